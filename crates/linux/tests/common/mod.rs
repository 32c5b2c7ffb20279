//! Sleepers that are disturbed.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that sleeps.
fn sleeper(seconds: &str) -> Child {
    let child = Command::new("sleep").arg(seconds).stdin(Stdio::null()).spawn().unwrap();
    let sleeps = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        stat.contains("(sleep) S")
    };
    wait_for("it to sleep", sleeps);
    child
}

/// Waits until something is so.
#[track_caller]
pub fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let patience = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < patience, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whoever is disturbed in this way, told its id, sleeps on for the rest of its time.
#[track_caller]
pub fn sleeps_on(disturb: impl Fn(u32)) {
    const SECONDS: f64 = 5.0;
    let start = Instant::now();
    let mut both = [(); 2].map(|()| sleeper("5"));
    // However long it takes, there is time left.
    while start.elapsed().as_secs_f64() < SECONDS * 0.6 {
        disturb(both[0].id());
        std::thread::sleep(Duration::from_millis(100));
    }
    let mut slept = [None; 2];
    while slept.contains(&None) {
        for (child, slept) in both.iter_mut().zip(&mut slept).filter(|(_, slept)| slept.is_none()) {
            *slept = child.try_wait().unwrap().map(|status| {
                assert!(status.success(), "{status}");
                start.elapsed().as_secs_f64()
            });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let [disturbed, other] = slept.map(Option::unwrap);
    assert!(disturbed >= SECONDS, "slept {disturbed} s instead of {SECONDS}");
    // From where it was last disturbed it would sleep much longer than one that nobody disturbs, who may be late, too.
    assert!(disturbed < other + SECONDS * 0.3, "slept {disturbed} s, and another one {other} s");
}
