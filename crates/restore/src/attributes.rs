//! Giving back attributes of processes and threads.
