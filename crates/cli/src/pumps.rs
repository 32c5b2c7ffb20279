//! Brings a restored program what comes in behind what it had not yet read.

use crate::failure::{Failure, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::{SpliceFlags, splice};
use std::time::Duration;
use stillpoint_linux::locks::{LockRange, lock_description, unlock_description};
use stillpoint_restore::Pump;

/// Brings a program what comes in from where it was reading.
pub fn start_pumps(pumps: Vec<Pump>) -> Result<()> {
    for pump in pumps {
        let bring = move || {
            // Ends with the input or with the reader; the program sees either as it always would.
            let _ = bring(&pump);
        };
        let started = std::thread::Builder::new().name("input".into()).spawn(bring);
        started.map_err(|e| Failure::failed(format!("cannot start a thread: {e}")))?;
    }
    Ok(())
}

/// Brings all that comes in, until there is no more or nobody who reads it. Nothing is on the way in between: what has been taken
/// from the source is in the pipe, where a checkpoint finds it. The pipe is locked meanwhile, as a checkpoint looks at both, and while a
/// program is killed at its checkpoint nothing more may come.
///
/// Who waits within splice(2) has the pipe to himself, and neither the program nor a checkpoint could look at what is there. So it
/// is waited for before.
fn bring(Pump { from, to, .. }: &Pump) -> rustix::io::Result<()> {
    loop {
        // A FIFO that nobody has yet written to is not at its end.
        let is_read =
            is_ready(&mut [PollFd::new(to, PollFlags::empty()), PollFd::new(from, PollFlags::IN)], None)?
                && is_ready(&mut [PollFd::new(to, PollFlags::OUT)], None)?;
        if !is_read {
            return Ok(());
        }
        // Somebody is looking at it.
        while lock_description(to, LockRange::ALL).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let brought = bring_some(from, to);
        let unlocked = unlock_description(to, LockRange::ALL);
        if !brought? || unlocked.is_err() {
            return Ok(());
        }
    }
}

/// Brings what there is; whether more may come.
fn bring_some(from: &OwnedFd, to: &OwnedFd) -> rustix::io::Result<bool> {
    const MOST: usize = 1 << 20;
    // Somebody else may have been quicker; and once nobody reads, nothing is taken from others who do.
    let now = Some(&Timespec::default());
    if !is_ready(&mut [PollFd::new(to, PollFlags::empty())], now)? {
        return Ok(false);
    }
    let mut source = [PollFd::new(from, PollFlags::IN)];
    if retry_on_intr(|| poll(&mut source, now))? == 0 {
        return Ok(true);
    }
    match splice(from, None, to, None, MOST, SpliceFlags::NONBLOCK) {
        Ok(0) => Ok(false),
        Ok(_) | Err(Errno::INTR | Errno::AGAIN) => Ok(true),
        // Others that give nothing but by read(2). So much fits in.
        Err(Errno::INVAL) => {
            let mut piece = [0; 4096];
            match rustix::io::read(from, &mut piece) {
                Ok(0) => Ok(false),
                Ok(length) => rustix::io::write(to, &piece[..length]).map(|_| true),
                Err(Errno::INTR | Errno::AGAIN) => Ok(true),
                Err(e) => Err(e),
            }
        }
        Err(e) => Err(e),
    }
}

/// Waits for one of them, but no longer than that; whether the first, the writing end of a pipe, still has readers.
fn is_ready(ends: &mut [PollFd<'_>], patience: Option<&Timespec>) -> rustix::io::Result<bool> {
    retry_on_intr(|| poll(ends, patience))?;
    Ok(!ends[0].revents().contains(PollFlags::ERR))
}
