//! Whatever the engine, a checkpoint is one exact instant: each test runs one writer that would notice any other, under an
//! engine. What the writers check stands in `targets/`.

use stillpoint_tests::{Cuts, engine, machine};

/// One test for each scenario, under the engine whose turn it is (or under each, where there is time).
macro_rules! scenarios {
    ($($program:ident: $($name:ident $(.$method:ident($($argument:expr),*))*,)*;)*) => {
        $(
            mod $program {
                use crate::instant::*;
                $(
                    #[test]
                    fn $name() {
                        for engine in engine::in_turn() {
                            Cuts::new(stringify!($program), stringify!($name), engine)
                                $(.$method($($argument),*))*
                                .hold();
                        }
                    }
                )*
            }
        )*
    };
}

scenarios! {
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
        // Writing through /proc/self/mem fails while writers wait, and where pages are still to come.
        own_memory.unfit_for(&["wp"]).eagerly(),
        read_only.unfit_for(&["wp"]).eagerly(),
        // What process_vm_writev(2) writes into pages that it looked up before they were protected is not noted.
        vm_writes.unfit_for(&["precopy", "auto"]),
        direct_reads,
        memory_file,
        // Its threads die holding robust mutexes; those who wait for them may never hear of it.
        futexes.unfit_for(&["wp"]),
    ;
    mappings:
        moves,
        overlaid,
        drops,
        replacements,
        zeros,
        protections,
        collapses,
        grows,
        // With little room, the cut looks closer at what it found.
        wide.within(&["16MiB", "256KiB"]),
        inherited.with_children(),
        everything,
    ;
    shared_memory:
        by_two.with_children(),
        by_children.with_children(),
        by_unburied.with_children(),
        dropped.with_children(),
        remapped.with_children(),
        attached.with_children(),
        grows.with_children(),
    ;
    storms:
        heap,
        stacks,
        forks.with_children(),
        spawns.with_children(),
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
}
