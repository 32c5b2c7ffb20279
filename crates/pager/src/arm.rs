//! Beginning to follow a program that runs: what follows its memory is made within it, and it holds that itself, too.

use crate::Result;
use crate::cells::Word;
use crate::work::Work;
use rustix::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use stillpoint_capture::blocked::Earlier;
use stillpoint_capture::brief::stop_briefly;
use stillpoint_capture::freeze::Frozen;
use stillpoint_capture::lend::Lender;
use stillpoint_capture::target::Target;
use stillpoint_linux::descriptors::duplicate_from;
use stillpoint_linux::fdinfo;
use stillpoint_linux::hold;
use stillpoint_linux::userfault::{Mode, OPEN_FLAGS, Userfault};
use stillpoint_restore::lazy::board::COPIES;

/// Makes what follows the program's memory. Nothing is followed yet.
///
/// # Errors
/// That it cannot be made, for example because the program may not, or its main thread cannot be asked.
pub(crate) fn arm(work: &Work<'_>, target: &Target, earlier: &mut Earlier) -> Result<()> {
    let armed = |frozen: &mut Frozen| make(target, frozen);
    let ((userfault, ring), pause) = stop_briefly(target, earlier, armed)?;
    work.cells.count_stop(pause);
    // Nobody else closes them.
    work.cells.set(Word::Ring, ring.into_raw_fd() as u64 + 1);
    work.board.space(0).begin(userfault.into_fd().into_raw_fd(), 0);
    Ok(())
}

type Made = (Userfault, OwnedFd);

fn make(target: &Target, frozen: &mut Frozen) -> stillpoint_capture::Result<Made> {
    let number = lowest_free(&fdinfo::list(target.pid)?);
    let close = (libc::SYS_close, [number, 0, 0, 0, 0, 0]);
    let open = (libc::SYS_userfaultfd, [OPEN_FLAGS, 0, 0, 0, 0, 0]);
    let calls = [open, hold::making_call(0), hold::keeping_call(0, 0), close];
    lender(target).main_thread(frozen, &calls, |site, visit| {
        let fd = visit.call_with_undo(open.0, open.1, close)?;
        if fd < 0 {
            let why = std::io::Error::from_raw_os_error(-fd as i32);
            let hint = match why.raw_os_error() {
                Some(libc::EPERM) => {
                    "; the program may not let its memory wait: set the sysctl vm.unprivileged_userfaultfd to 1, or run it as root"
                }
                _ => "",
            };
            return Err(stillpoint_capture::Error::Failed(format!("userfaultfd: {why}{hint}")));
        }
        let taken = duplicate_from(target.pidfd.as_fd(), fd as u32);
        visit.call(libc::SYS_close, [fd as u64, 0, 0, 0, 0, 0])?;
        let userfault = Userfault::new(taken?, target.pid, Mode::Missing)?;
        // Should all of us be killed at the same moment, it waits, and does not go on with zeros.
        let room = site.data();
        target.memory.write(room, &[0; hold::ROOM])?;
        let (nr, arguments) = hold::making_call(room.0);
        let made = visit.call_with_undo(nr, arguments, close)?;
        let cannot = "it cannot hold what follows its memory (io_uring, kernel.io_uring_disabled)";
        let made = u32::try_from(made).map_err(|_| stillpoint_capture::Error::Failed(cannot.into()))?;
        let ring = hold::take(target.pidfd.as_fd(), made.into(), 1 + COPIES);
        target.memory.write(room, &hold::keeping(made))?;
        let (nr, arguments) = hold::keeping_call(made, room.0);
        let kept = visit.call_with_undo(nr, arguments, close)?;
        visit.call(libc::SYS_close, [made.into(), 0, 0, 0, 0, 0])?;
        let ring = ring.ok().filter(|_| kept == 1);
        let ring = ring.filter(|ring| hold::put(ring, 0, Some(userfault.as_fd())).is_ok());
        // Without, it would go on with zeros.
        Ok((userfault, ring.ok_or_else(|| stillpoint_capture::Error::Failed(cannot.into()))?))
    })
}

/// Lends the program's main thread.
pub(crate) fn lender(target: &Target) -> Lender<'_> {
    Lender { process: &target.process, memory: &target.memory, gadgets: target.gadgets, lowest: None }
}

/// Lowest number that is not in use, of numbers in ascending order.
pub(crate) fn lowest_free(used: &[u32]) -> u64 {
    used.iter().zip(0..).take_while(|&(&fd, n)| fd == n).count() as u64
}

/// The program is another one now, or no more: what followed it follows nothing.
pub(crate) fn disarm(work: &Work<'_>) {
    for word in [Word::Ring, Word::AsideFollowed] {
        let descriptor = work.cells.descriptor(word);
        work.cells.keep(word, None);
        descriptor.iter().for_each(|fd| stillpoint_linux::split::close_shared(fd.as_raw_fd()));
    }
    for word in [Word::Moving, Word::Aside, Word::Held, Word::Unmarked] {
        work.cells.set(word, 0);
    }
    if let Some(descriptor) = work.board.space(0).descriptor() {
        work.board.space(0).end();
        stillpoint_linux::split::close_shared(descriptor);
    }
}
