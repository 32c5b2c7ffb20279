//! All-pairs shortest paths.
fn main() {}
