//! The `stillpoint` command.
fn main() {}
