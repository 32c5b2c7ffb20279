//! Following what processes write into shared memory, and hearing of what else they do to it.

use super::objects::Mapping;
use crate::Result;
use crate::regions::range;
use crate::target::Target;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use stillpoint_image::Range;
use stillpoint_linux::pagemap::{Category, Query};
use stillpoint_linux::userfault::Userfault;
use stillpoint_linux::{Error as Kernel, RemoteAddr};

/// Memory is protected in pieces of this size, bytes, so that the program's own page faults get their turn.
const PIECE: u64 = 16 << 20;

/// A process that is followed.
#[derive(Debug)]
pub(super) struct Follower {
    pub target: Arc<Target>,
    pub userfault: Arc<Userfault>,
    pub followed: Vec<Range>,
}

impl Follower {
    /// What was written in a mapping since it was protected; `None` if it is not followed.
    pub fn written(&self, span: Range, protect: bool) -> Result<Option<Vec<Range>>> {
        let query = Query { all: Category::WRITTEN, report: Category::WRITTEN, ..Query::default() };
        let mut runs = Vec::new();
        let mut at = span.start;
        while at < span.end() {
            let end = if protect { span.end().min(at + PIECE) } else { span.end() };
            let (from, to) = (RemoteAddr(at), RemoteAddr(end));
            let followed = match protect {
                true => self.target.pagemap.scan_and_protect(from, to, query, &mut runs)?,
                false => self.target.pagemap.scan_followed(from, to, query, &mut runs)?,
            };
            if !followed {
                return Ok(None);
            }
            at = end;
        }
        Ok(Some(runs.iter().map(range).collect()))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // Closing the descriptor would release everything in one step, with the program's page faults waiting.
        for range in &self.followed {
            self.userfault.release_gently(RemoteAddr(range.start), RemoteAddr(range.end()));
        }
    }
}

/// A look at what was written, under way.
#[derive(Debug)]
pub(super) struct Looking {
    mappings: Vec<Mapping>,
    /// From here on all counts as unwritten.
    protect: bool,
    /// The mapping to be looked at next, and what was found so far; nothing where one is not followed.
    next: AtomicUsize,
    seen: Mutex<Vec<Written>>,
}

/// What was written in a mapping, where in memory; nothing if it is not followed any more.
pub(super) type Written = (Mapping, Option<Vec<Range>>);

impl Looking {
    /// At these mappings; `protect`: the next look is to find what was written since this one.
    pub fn new(mappings: Vec<Mapping>, protect: bool) -> Self {
        Looking { mappings, protect, next: AtomicUsize::new(0), seen: Mutex::default() }
    }

    /// What was found, when all who worked have returned.
    pub fn end(self) -> Vec<Written> {
        self.seen.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at one mapping after the other, beside whoever else does.
    pub fn work(&self, followers: &HashMap<u32, Follower>) {
        while let Some(mapping) = self.mappings.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            // It may have ended, or become another program.
            let follower = followers.get(&mapping.pid);
            let written = follower.and_then(|f| f.written(mapping.span(), self.protect).ok().flatten());
            self.seen.lock().unwrap_or_else(PoisonError::into_inner).push((*mapping, written));
        }
    }
}

/// Hears of pages that are dropped and mappings that are moved. Who does that waits until it was heard.
#[derive(Debug)]
pub(super) struct Watch {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Watched {
    userfaults: Vec<(u32, Arc<Userfault>)>,
    /// Processes that have dropped or moved something. What was heard by when its lock is had is in it.
    disturbed: Mutex<BTreeSet<u32>>,
    /// Wakes the thread.
    bell: OwnedFd,
}

impl Watch {
    pub fn begin(userfaults: Vec<(u32, Arc<Userfault>)>) -> Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| Kernel::call("eventfd", e))?;
        let watched = Arc::new(Watched { userfaults, disturbed: Mutex::default(), bell });
        let same = watched.clone();
        let thread = std::thread::Builder::new().name("watch".into()).spawn(move || same.listen());
        let thread = thread.map_err(|e| crate::Error::Failed(format!("no thread: {e}")))?;
        Ok(Watch { watched, thread: Some(thread) })
    }

    /// Processes that have dropped or moved something of what is followed.
    pub fn disturbed(&self) -> BTreeSet<u32> {
        self.watched.disturbed().clone()
    }
}

impl Watched {
    fn disturbed(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.disturbed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self) {
        let mut there: Vec<&(u32, Arc<Userfault>)> = self.userfaults.iter().collect();
        loop {
            let all = there.iter().map(|(_, userfault)| userfault.as_fd()).chain([self.bell.as_fd()]);
            let mut fds: Vec<PollFd<'_>> =
                all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            // Interrupted or not, all are looked at.
            let _ = poll(&mut fds, None);
            let told: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if told.last() == Some(&true) {
                return;
            }
            let mut told = told.into_iter();
            there.retain(|(pid, userfault)| {
                if told.next() != Some(true) {
                    return true;
                }
                // Whoever waits goes on when its event is read, and may come to rest before it is noted.
                let mut disturbed = self.disturbed();
                let mut events = Vec::new();
                let is_there = userfault.events(&mut events).is_ok();
                if !is_there || !events.is_empty() {
                    disturbed.insert(*pid);
                }
                is_there
            });
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.watched.bell, &1u64.to_ne_bytes());
        self.thread.take().map(JoinHandle::join);
    }
}
