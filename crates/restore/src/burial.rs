//! Ids of the dead: a process that ended keeps its id, and those of its group and session, until its parent has noticed,
//! and for a moment longer (since Linux 6.15 the kernel frees ids after nothing is to be seen of a thread any more).

use std::time::{Duration, Instant};
use stillpoint_linux::proc::{Proc, Stat, processes};

/// How long the parent of a dead process may take to notice.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long it may take before somebody is told.
const LONG: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(2);

/// Waits until none of these ids is that of a dead process or thread. What lives is not waited for. `tell` hears whom it waits for if that
/// takes long.
pub(crate) fn wait(ids: impl IntoIterator<Item = u32>, tell: impl Fn(&str)) {
    let (start, mut is_told) = (Instant::now(), false);
    for id in ids {
        while start.elapsed() < PATIENCE
            && let Some(dead) = own(id).filter(is_dead)
        {
            if !is_told && start.elapsed() > LONG {
                is_told = true;
                let parent = match own(dead.ppid) {
                    Some(p) => {
                        format!("process {} ({})", p.pid, String::from_utf8_lossy(&p.comm).escape_debug())
                    }
                    None => "its parent".into(),
                };
                tell(&format!(
                    "waits up to {} s for {parent} to notice that process {id} has ended, whose id is needed",
                    2 * PATIENCE.as_secs()
                ));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// Makes something with an id (that of the moment), again and again while the kernel says that the id is taken
/// (`is_taken`) though nothing that lives has it, or even so if we are to wait `for_the_living`.
pub(crate) fn until_free<T, E>(
    id: impl Fn() -> u32,
    mut make: impl FnMut() -> Result<T, E>,
    is_taken: impl Fn(&E) -> bool,
    for_the_living: bool,
) -> Result<T, E> {
    let start = Instant::now();
    loop {
        match make() {
            Err(e)
                if is_taken(&e) && start.elapsed() < PATIENCE && (for_the_living || none_alive_has(id())) =>
            {
                std::thread::sleep(PAUSE);
            }
            other => return other,
        }
    }
}

fn own(id: u32) -> Option<Stat> {
    Proc::thread_by_tid(id).and_then(|p| p.stat()).ok()
}

/// A main thread may end before the others: such a process lives.
fn is_dead(stat: &Stat) -> bool {
    stat.ends() && stat.num_threads <= 1
}

fn none_alive_has(id: u32) -> bool {
    if let Some(stat) = own(id) {
        return is_dead(&stat);
    }
    let has = |s: &Stat| s.pgrp == id || s.session == id;
    let stats = processes().unwrap_or_default().into_iter().filter_map(own);
    stats.filter(has).all(|s| is_dead(&s))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    /// Makes a process group of which only a member is left that ended.
    #[test]
    fn a_group_of_the_dead_is_free_once_they_are_buried() {
        let mut leader = Command::new("true").process_group(0).spawn().expect("true");
        let group = leader.id();
        let mut member = Command::new("true").process_group(group as i32).spawn().expect("true");
        while own(member.id()).is_some_and(|s| !is_dead(&s)) {
            std::thread::sleep(PAUSE);
        }
        leader.wait().expect("wait");
        assert!(own(group).is_none());
        assert!(none_alive_has(group));
        let exists = || {
            rustix::process::test_kill_process_group(
                rustix::process::Pid::from_raw(group as i32).expect("pid"),
            )
        };
        let mut tries = 0;
        let made = until_free(
            || group,
            || {
                tries += 1;
                if tries == 2 {
                    member.wait().expect("wait");
                }
                if exists().is_ok() { Err("taken") } else { Ok(()) }
            },
            |_| true,
            false,
        );
        assert_eq!((made, tries), (Ok(()), 2));
        assert!(member.wait().expect("wait").success());
    }

    #[test]
    fn the_living_are_not_waited_for() {
        let id = std::process::id();
        assert!(!none_alive_has(id));
        wait([id], |_| unreachable!("it lives"));
        assert_eq!(until_free(|| id, || Err::<(), _>(()), |()| true, false), Err(()));
    }
}
