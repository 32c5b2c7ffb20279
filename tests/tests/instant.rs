//! Whatever the engine, a checkpoint is one exact instant: each test runs one writer that would notice any other, under one
//! engine. What the writers check stands in `targets/`.
#![allow(missing_docs)]

use stillpoint_tests::{Cuts, machine};

/// A write through `/proc/PID/mem` looks pages up without leave to wait (`get_user_page_vma_remote`).
const NO_WAITING_FOR_REMOTE_WRITES: &str =
    "a write through /proc/self/mem to a page that waits for its copy fails: EIO";
/// The kernel marks the locks of an ending thread without leave to wait (`fault_in_user_writeable`).
const NO_WAITING_FOR_ROBUST_LISTS: &str =
    "a robust lock in a page that waits for its copy is not given up when its owner ends";

/// One test for each scenario under each engine, in a module of the engine's name.
macro_rules! under {
    ($($engine:ident)*: $scenarios:tt) => {
        $(
            mod $engine {
                scenarios! { $engine $scenarios }
            }
        )*
    };
}

macro_rules! scenarios {
    ($engine:ident { $($program:ident: $($name:ident $(.$method:ident($($argument:expr),*))*,)*;)* }) => {
        $(
            mod $program {
                use crate::*;
                $(
                    #[test]
                    fn $name() {
                        Cuts::new(stringify!($program), stringify!($name), stringify!($engine))
                            $(.$method($($argument),*))*
                            .hold();
                    }
                )*
            }
        )*
    };
}

under! { stop precopy wp fork auto: {
    instant:
        sequences,
        shared_anonymous,
        mapped_twice,
        rolling.says_the_same(),
        queue,
        swapped_pages,
        private_file,
        shared_file,
    ;
    kernel_writes:
        system_calls,
        own_memory.not_by("wp", NO_WAITING_FOR_REMOTE_WRITES),
        read_only.not_by("wp", NO_WAITING_FOR_REMOTE_WRITES),
        direct_reads,
        memory_file,
        futexes.not_by("wp", NO_WAITING_FOR_ROBUST_LISTS),
    ;
    mappings:
        moves,
        drops,
        replacements,
        protections,
        collapses,
        everything,
    ;
    storms:
        heap,
        stacks,
        forks.until_not_refused(&["child"]),
        spawns.until_not_refused(&["child"]),
        // While another thread takes the main thread's place, there is none, and the one has its own descriptors.
        execs.until_not_refused(&["main thread", "replaces itself"]),
        threads,
    ;
    pages:
        transparent,
        hugetlb.with(machine::huge_pages),
        locked,
        swapped.with(machine::swap),
        merged.with(machine::merging),
    ;
} }
