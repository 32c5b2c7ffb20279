//! Connections: between two sockets of the program, and with clients outside.
#![allow(missing_docs)]

use std::time::Duration;
use stillpoint_tests::target::Running;
use stillpoint_tests::{Build, Feature, Scratch, Target, undisturbed_only};

/// Each scenario through everything that can happen to it; and restored from a checkpoint that it went on after, so that its
/// sockets were closed by its end and must be made anew.
macro_rules! scenarios {
    ($($name:ident $(.$method:ident($($argument:expr),*))*,)*) => {
        mod kept {
            $(
                #[test]
                fn $name() {
                    super::Feature::new("connections", stringify!($name))$(.$method($($argument),*))*.survives();
                }
            )*
        }
        mod made_anew {
            $(
                #[test]
                fn $name() {
                    super::made_anew(stringify!($name));
                }
            )*
        }
    };
}

scenarios! {
    pair4,
    pair6,
    pair_mapped,
    two_families,
    no_door,
    full,
    half_closed,
    other_end_closed,
    with_options,
    corked,
    watched,
    busy.ignoring(&["thread"]),
    blocked,
    many,
}

fn made_anew(scenario: &str) {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("connections", scenario, Build::Dynamic).expect("cc");
    let directory = scratch.directory("anew");
    let running = target.start(&directory, scratch.path());
    if running.skip().is_some() {
        return;
    }
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(scratch.random().below(40)));
        stillpoint.checkpoint(running.pid, "anew", &[]);
    }
    let pid = running.pid;
    running.kill();
    assert_eq!(stillpoint.restore_detached("anew", &[]), pid);
    // Once more, now of sockets that were made by a restore.
    stillpoint.checkpoint(pid, "anew", &[]);
    Running::restored(pid, &directory).kill();
    assert_eq!(stillpoint.restore_detached("anew", &[]), pid);
    Running::restored(pid, &directory).finish("made anew");
    scratch.nothing_is_left("in the end");
}
