//! Everything a program can hold, one by one: each test runs one scenario of a target program undisturbed, through
//! checkpoints, and killed and restored. What a scenario checks stands in `targets/`.

use std::time::Duration;
use stillpoint_tests::{Build, Feature, turn};

/// One test for each scenario, by its name.
macro_rules! scenarios {
    ($program:literal: $($name:ident $(.$method:ident($($argument:expr),*))*,)*) => {
        $(
            #[test]
            fn $name() {
                #[allow(unused_imports)]
                use crate::features::turn;
                crate::features::Feature::new($program, stringify!($name))$(.$method($($argument),*))*.survives();
            }
        )*
    };
}

mod attributes {
    scenarios!("attributes":
        identity,
        renamed,
        clocks,
        directories,
        changed_root,
        nobody,
        mixed_ids,
        capabilities,
        credentials_per_thread,
        no_new_privileges,
        seccomp_filters,
        seccomp_no_mappings,
        seccomp_tight.ignoring(&["thread"]).or_refused("seccomp"),
        seccomp_strict.ignoring(&["thread"]).or_refused("seccomp"),
        seccomp_per_thread,
        limits,
        short_of_memory,
        odds,
        all_that_is_told,
        read_only_program,
    );
}

mod dispatch {
    scenarios!("dispatch":
        within_libc,
        within_a_page,
        around,
        as_wine,
        always,
        let_through,
        several,
        switched,
    );
}

mod descriptors {
    scenarios!("descriptors":
        regular,
        duplicates,
        deleted,
        times,
        directories,
        pipes,
        pipes_of_two_modes,
        owners,
        fifo,
        fifo_in_common,
        fifo_removed,
        fifo_left,
        stream_pair,
        credentials_pair,
        message_pairs,
        half_closed_pair,
        listening_tcp4,
        listening_tcp6,
        listening_unix,
        file_attributes,
        eventfds,
        signalfds,
        epolls,
        inotifys,
        watched_closely,
        memfd_programs,
        lock_owner,
        deleted_folders,
        shared_port,
        fanotifys,
        pidfds,
        pidfds_unwaited,
        ptys.in_turn(turn::TERMINALS),
        pty_modes.in_turn(turn::TERMINALS),
        hung_up.in_turn(turn::TERMINALS).ignoring(&["fd"]),
        pty_unread.in_turn(turn::TERMINALS).ignoring(&["thread", "map", "fd"]),
        leases,
        devices.ignoring(&["map"]), // a private mapping of /dev/zero is anonymous memory by another name
        idle_devices,
        locks,
        signal_driven,
        proc_files,
        network_files.ignoring(&["fd"]),
        ended_proc_files.ignoring(&["fd"]), // their numbers may be somebody else's by now
        many_descriptors,
    );
}

mod memory {
    scenarios!("memory":
        anonymous,
        private_file,
        shared_file,
        shared_anonymous,
        private_of_shared,
        memfd_twice,
        memfd_closed,
        never_written,
        deleted_file,
        beyond_the_end,
        stack_growth,
        grows_down,
        heap_growth,
        guards,
        guards_in_file,
        no_access,
        executable_only,
        protection_keys,
        advice,
        locked,
        lock_future,
        named,
        sparse,
        zeros,
        many_mappings,
        fixed_places,
        huge_pages,
        transparent_huge_pages,
        dropped_after,
        dropped_before,
        remapped_after,
        written_meanwhile,
    );
}

mod odd {
    scenarios!("odd":
        deleted_directory,
        replaced.ignoring(&["fd"]), // its name is the other file's
        renamed,
        disarmed,
        edges,
        nested_epolls,
        mapped_handle,
        views,
        bound,
    );
}

mod registers {
    scenarios!("registers":
        general,
        sse,
        avx,
        avx512,
        tiles,
        x87,
        fresh,
        segment_bases,
        red_zone,
        small_stack,
        no_stack,
    );
}

mod signals {
    scenarios!("signals":
        masks,
        actions,
        queued_realtime_order,
        pending_standard,
        pending_per_thread,
        delivered_once,
        alternate_stacks,
        handler_running,
        faulting.ignoring(&["thread", "map"]),
        faults,
        storm.ignoring(&["thread"]),
    );
}

mod namespaces {
    scenarios!("namespaces":
        host_name,
        host_names,
        host_name_below,
        ipc_objects,
        posix_queues,
        ipc_apart,
        clocks,
        control_groups,
        networks,
        network_of_sockets,
        network_sockets,
        network_settings,
        network_addresses,
        network_routes,
        network_narrowed,
    );
}

mod pid_namespaces {
    scenarios!("pid_namespaces":
        inside,
        in_a_group_from_outside,
        nested,
        begins_with_the_next_child,
        goes_on_with_children_inside,
        comes_and_goes,
        ended,
        leaderless,
        ids,
    );
}

mod mount_namespaces {
    scenarios!("mount_namespaces":
        copied,
        entered,
        with_proc,
        with_a_file_system,
        bound,
        of_the_machine,
        other_root,
        other_root_and_processes,
        changed_root,
        passing_on,
        over_directories,
        over_memory,
        numbered_directories,
        over_both,
        over_read_only,
        over_the_root,
        marked,
        terminals.in_turn(turn::TERMINALS),
    );
}

mod trees {
    scenarios!("tree":
        pair,
        generations,
        many,
        programs,
        ended,
        ended_pending,
        exit_signals,
        nobody_waits,
        sessions,
        groups,
        leaderless,
        dead_leader,
        orphans,
        stopped,
        stopped_by_signals,
        told_stops,
        told_of_many,
        shared_memory,
        shared_object,
        shared_file,
        copied_on_write,
        inherited,
        pipes,
        socket_pairs,
        accepted,
        shared_offset,
        locks,
        lock_waiter,
        objects,
        handles,
        proc_files,
        asynchronous,
        alone,
        parent_death,
        sleeping.ignoring(&["thread", "child"]),
        terminals.in_turn(turn::TERMINALS),
        turns.ignoring(&["thread", "child"]),
        token.ignoring(&["thread", "child"]),
        forks.ignoring(&["thread", "child"]),
        spawns.ignoring(&["thread", "child"]),
        forking_threads.ignoring(&["thread", "child"]),
        waits,
        signalled.ignoring(&["thread", "child"]),
        shared_contexts,
        half_shared,
        left_context,
        apart,
        thread_zombie,
        thread_children.ignoring(&["child"]), // whose main stack is that of nobody, and grows when they are asked
        lost_session,
        dead_session,
        left_session,
    );
}

mod sharers {
    scenarios!("sharers":
        pair,
        generations.ignoring(&["child"]), // whose main stack is that of nobody, and grows when they are asked
        brothers.ignoring(&["child"]),
        orphans.ignoring(&["child"]),
        adopted,
        actions,
        old_threads,
        threaded,
        one_stack.ignoring(&["map", "child"]),
        turns.ignoring(&["thread", "child"]),
        memory,
        passing.ignoring(&["thread", "child"]),
        personalities,
    );
}

mod sysv {
    // Segments of programs that run at the same time take each other's ids.
    scenarios!("sysv":
        marked.in_turn(turn::SYSTEM_V),
        by_key.in_turn(turn::SYSTEM_V),
        read_only.in_turn(turn::SYSTEM_V),
        parts.in_turn(turn::SYSTEM_V),
        locked.in_turn(turn::SYSTEM_V),
        others.in_turn(turn::SYSTEM_V),
        huge.in_turn(turn::SYSTEM_V),
        two_segments.in_turn(turn::SYSTEM_V),
        semaphores.in_turn(turn::SYSTEM_V),
        queue.in_turn(turn::SYSTEM_V),
        posix_queues.in_turn(turn::SYSTEM_V),
    );
}

mod threads {
    scenarios!("threads":
        many,
        scheduling,
        life_after,
        cancelled,
        locks,
        robust_mutex,
        rseq,
        sections.ignoring(&["thread"]),
        leader_ended.or_refused("main thread"),
        fork_exec,
        computing.ignoring(&["thread", "map"]),
    );
}

mod timers {
    scenarios!("timers":
        interval_timers,
        interval_fires,
        pending_alarm,
        pending_alarm_once,
        posix_timers,
        pending_timer,
        pending_timer_once,
        pending_timer_goes_on,
        timer_threads.ignoring(&["thread", "map"]),
        timer_descriptors,
    );

    #[test]
    fn alarm_once() {
        crate::features::half_way("timers", "alarm_once");
    }
}

mod options {
    scenarios!("options":
        every_option,
        stamps_and_processors,
        sizes_and_keys,
    );
}

mod unix {
    scenarios!("unix":
        in_flight,
        by_itself,
        each_other,
        nested,
        left_behind,
        credentials,
        senders,
        mutual,
        clients,
        pending,
        listener_closed,
        directory_gone,
        renamed,
        peek_offset,
        peers,
        pending_peers,
        nameless,
        handles,
        filters,
        half_closed,
        shut_alone,
    );
}

/// Waits with an end: the cut comes half-way, so that one that starts over, or is cut short, is told from one that goes on
/// for the time that is left.
fn half_way(program: &'static str, scenario: &'static str) {
    // sigtimedwait blocks other signals while it waits
    let busy: &[&str] = if scenario.starts_with("sigtimedwait") { &["thread"] } else { &[] };
    Feature::new(program, scenario)
        .ignoring(busy)
        .cut_after(Duration::from_millis(1000))
        .one_life()
        .survives();
}

mod waits {
    macro_rules! half_way {
        ($($name:ident,)*) => {
            $(
                #[test]
                fn $name() {
                    crate::features::half_way("sleeps", stringify!($name));
                }
            )*
        };
    }

    half_way! {
        relative_nanosleep,
        relative_clock_nanosleep,
        absolute_clock_nanosleep,
        poll_timeout,
        ppoll_timeout,
        select_timeout,
        pselect_timeout,
        epoll_timeout,
        futex_relative,
        cond_timedwait,
        mutex_timedlock,
        sem_timed,
        sigtimedwait_timeout,
        receive_timeout,
        staggered,
        timerfd_read,
    }

    scenarios!("sleeps":
        relative_sleep_by_work,
        pipe_read,
        socket_receive,
        pipe_write,
        poll_endless,
        select_endless,
        epoll_endless,
        eventfd_read,
        sigwait_endless,
        sigwaitinfo_endless,
        pause_endless,
        sigsuspend_endless,
        sem_endless,
        cond_endless,
        flock_endless,
        signalfd_read,
        restart_after,
        interrupted_after,
    );
}

/// Programs whose C library is linked in, and another C library: nothing may depend on what glibc brings along.
mod other_builds {
    use crate::features::Build;

    macro_rules! built {
        ($build:ident: $($name:ident: $program:literal $scenario:literal $(.$with:ident($($value:expr),*))*,)*) => {
            $(
                #[test]
                fn $name() {
                    crate::features::Feature::new($program, $scenario).built(Build::$build)$(.$with($($value),*))*.survives();
                }
            )*
        };
    }

    built! { Static:
        static_threads: "threads" "many",
        static_life_after: "threads" "life_after",
        static_rseq: "threads" "rseq",
        static_registers: "registers" "avx512",
        static_sleep: "sleeps" "interrupted_after",
        static_signals: "signals" "handler_running",
        static_memory: "memory" "anonymous",
        static_heap: "memory" "heap_growth",
        static_descriptors: "descriptors" "epolls",
        static_identity: "attributes" "identity",
        static_timers: "timers" "timer_threads".ignoring(&["thread", "map"]),
    }

    built! { Musl:
        musl_threads: "threads" "many",
        musl_life_after: "threads" "life_after",
        musl_robust_mutex: "threads" "robust_mutex",
        musl_registers: "registers" "general",
        musl_pipe_read: "sleeps" "pipe_read",
        musl_signals: "signals" "alternate_stacks",
        musl_memory: "memory" "private_file",
        musl_timers: "timers" "posix_timers",
    }
}
