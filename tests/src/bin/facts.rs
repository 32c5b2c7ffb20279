//! Prints what can be seen of a process (`stillpoint_tests::observe`), as JSON: for those who look from another namespace.

use stillpoint_tests::observe::Facts;

fn main() {
    let pid = std::env::args().nth(1).and_then(|pid| pid.parse().ok()).expect("a process id");
    println!("{}", serde_json::json!(Facts::of(pid).0));
}
