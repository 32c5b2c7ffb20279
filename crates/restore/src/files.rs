//! Opening and installing the descriptors of the restored program.
