//! Where a thread can make system calls for us, and go home.
//!
//! One that dispatches its calls to itself ([`stillpoint_linux::dispatch`]) gets a signal instead of what it calls, unless that is in its region or
//! its selector lets all through. To switch that off for a moment would harm it: it would stay so if we died then. So it makes
//! its calls, the way home included, within its region.

use crate::Refusal;
use crate::target::in_code;
use std::collections::HashMap;
use stillpoint_image::Thread;
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::arch::Gadgets;
use stillpoint_linux::dispatch::{Dispatch, LETS_ALL_THROUGH};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::Vma;

/// Where a thread can make system calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gate {
    /// A place for them, and for the way home.
    pub gadgets: Gadgets,
    /// What it may not leave for that.
    within: Option<Dispatch>,
}

impl Gate {
    /// Whether a call of the thread goes through; `ip` is the address behind its instruction.
    pub fn lets_through(&self, ip: u64) -> bool {
        self.within.is_none_or(|dispatch| dispatch.lets_through(ip))
    }
}

/// The gates of the threads of a process that stands still.
#[derive(Debug)]
pub(crate) struct Gates<'a> {
    memory: &'a Memory,
    maps: &'a [Vma],
    /// Where threads make calls that can do so anywhere.
    common: Gadgets,
    /// What was found in regions, by first address and length. Many threads have the same.
    found: HashMap<(u64, u64), Option<Gadgets>>,
    /// Addresses of the selectors of all threads.
    selectors: Vec<u64>,
}

impl<'a> Gates<'a> {
    /// `selectors`: their addresses, of all threads that have the memory, as far as they dispatch their calls.
    pub fn new(memory: &'a Memory, maps: &'a [Vma], common: Gadgets, selectors: Vec<u64>) -> Self {
        Gates { memory, maps, common, found: HashMap::new(), selectors }
    }

    /// Where a thread can make calls; refuses one, which is called `what`, that cannot.
    ///
    /// All who have its memory stand still, so the selector stays as it is, where nobody else has that; and if we died, so that all go
    /// on, as long as no other thread has the same one. (One that the kernel could not read would be the end of the thread.)
    pub fn of(&mut self, thread: &Thread, what: &str) -> Result<Gate, Refusal> {
        let Some(dispatch) = thread.dispatch.map(|d| Dispatch::new(d.offset, d.len, d.selector)) else {
            return Ok(Gate { gadgets: self.common, within: None });
        };
        if let Some(gadgets) = self.within(&dispatch) {
            return Ok(Gate { gadgets, within: Some(dispatch) });
        }
        let selector = self.maps.iter().find(|vma| (vma.start..vma.end).contains(&dispatch.selector));
        let is_its_own = selector.is_some_and(|vma| !vma.shared && vma.prot & libc::PROT_READ as u32 != 0)
            && self.selectors.iter().filter(|other| **other == dispatch.selector).count() < 2;
        let mut byte = [!LETS_ALL_THROUGH];
        if is_its_own
            && self.memory.read(RemoteAddr(dispatch.selector), &mut byte).is_ok()
            && byte == [LETS_ALL_THROUGH]
        {
            return Ok(Gate { gadgets: self.common, within: None });
        }
        let why = "it dispatches its system calls to itself (PR_SET_SYSCALL_USER_DISPATCH): those by which its state is asked would become \
                   signals to it, as the region from which calls go through has no code for them";
        let hint = if is_its_own {
            "try again when the program has switched its selector to let calls through"
        } else {
            ""
        };
        Err(Refusal { what: what.into(), why: why.into(), hint: hint.into() })
    }

    fn within(&mut self, dispatch: &Dispatch) -> Option<Gadgets> {
        let goes_through = [self.common.call_ip(), self.common.sigreturn_ip()];
        if goes_through.iter().all(|ip| dispatch.lets_through(*ip)) {
            return Some(self.common);
        }
        let (memory, maps) = (self.memory, self.maps);
        // The kernel looks at the address behind a call.
        let ranges = || dispatch.ranges().into_iter().map(|(start, end)| (start, end.saturating_sub(1)));
        let found = self.found.entry((dispatch.offset, dispatch.len));
        *found.or_insert_with(|| in_code(memory, maps, &ranges().collect::<Vec<_>>()))
    }
}
