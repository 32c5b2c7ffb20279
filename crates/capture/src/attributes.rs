//! Attributes of processes and threads that can be read without running code in them.
