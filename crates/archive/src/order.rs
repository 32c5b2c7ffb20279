//! Work on many things at a time, taken up in the order in which they came.

use std::collections::BTreeMap;
use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use stillpoint_linux::host;

/// Calls `next` on one thread, `work` on as many as there are processors, and `take` here, in the order of `next`. No more things
/// are under way than a few for each thread. Ends with the first error, in that order.
pub(crate) fn in_order<I: Send, O: Send, E: Send>(
    mut next: impl FnMut() -> Result<Option<I>, E> + Send,
    work: impl Fn(I) -> Result<O, E> + Sync,
    mut take: impl FnMut(O) -> Result<(), E>,
) -> Result<(), E> {
    let threads = host::processors();
    let (give, jobs) = channel::<(u64, I)>();
    let jobs = Mutex::new(jobs);
    let (tell, done) = channel::<(u64, Result<O, E>)>();
    // A place for each thing that is under way.
    let (enter, places) = sync_channel::<()>(2 * threads + 2);
    std::thread::scope(|scope| {
        let (jobs, work) = (&jobs, &work);
        for _ in 0..threads {
            let tell = tell.clone();
            scope.spawn(move || {
                loop {
                    let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((number, thing)) = job else { return };
                    if tell.send((number, work(thing))).is_err() {
                        return; // nobody wants to know any more
                    }
                }
            });
        }
        scope.spawn(move || {
            let mut number = 0;
            while enter.send(()).is_ok() {
                match next() {
                    Ok(Some(thing)) => drop(give.send((number, thing))),
                    Ok(None) => return,
                    Err(e) => return drop(tell.send((number, Err(e)))),
                }
                number += 1;
            }
        });
        // Both end here when this returns early: so do the others then.
        let (done, places) = (done, places);
        let (mut early, mut expected) = (BTreeMap::new(), 0);
        for (number, result) in done.iter() {
            early.insert(number, result);
            while let Some(result) = early.remove(&expected) {
                take(result?)?;
                let _ = places.recv();
                expected += 1;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_kept() {
        let mut numbers = 0..1000;
        let mut found = Vec::new();
        let work = |n: u64| Ok::<_, ()>((0..(n % 7) * 1000).fold(n, |a, _| std::hint::black_box(a)));
        let done = in_order(
            || Ok(numbers.next()),
            work,
            |n| {
                found.push(n);
                Ok(())
            },
        );
        assert_eq!(done, Ok(()));
        assert!(found.iter().copied().eq(0..1000));
    }

    #[test]
    fn the_first_error_ends_it() {
        let taken = Mutex::new(Vec::new());
        let take = |n| {
            taken.lock().expect("taken").push(n);
            if n == 5 { Err(n) } else { Ok(()) }
        };
        let mut numbers = 0..;
        assert_eq!(in_order(|| Ok(numbers.next()), Ok, take), Err(5));
        let mut numbers = 0..;
        let work = |n| if n == 3 { Err(n) } else { Ok(n) };
        assert_eq!(in_order(|| Ok(numbers.next()), work, |_| Ok(())), Err(3));
        let mut numbers = 0..3;
        let next = || numbers.next().map(Some).ok_or(9);
        assert_eq!(in_order(next, Ok, |_| Ok(())), Err(9));
    }
}
