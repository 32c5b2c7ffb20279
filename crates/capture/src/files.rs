//! Descriptors of the target and the objects behind them.
