//! Real programs.
