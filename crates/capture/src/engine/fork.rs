//! The engine `fork`: at the cut a copy-on-write twin of the program is made ([`stillpoint_linux::twin`]) and read while
//! the program runs on. What is saved is given back at once: the program's writes there copy nothing any more.
//!
//! The pause grows with the memory's page tables (some 10 ms a GiB, a twentieth of that with huge pages) but not with
//! how fast the program writes; nothing has to be prepared, and nothing is followed.

use super::{Copied, Cut, Engine, MemoryEngine, Running, Still, put};
use crate::inspect::lowest_stack;
use crate::lend::Lender;
use crate::regions::{Span, own_pages, spans, zeros};
use crate::target::Target;
use crate::{Error, Result};
use std::time::{Duration, Instant};
use stillpoint_image::pids::namespace_of;
use stillpoint_image::{Image, Mapping, MappingFlags, Range};
use stillpoint_linux::headroom::headroom;
use stillpoint_linux::pagemap::Pagemap;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::twin::{self, Twin};
use stillpoint_linux::{Error as Kernel, RemoteAddr};

/// So much is saved, and then given back, at a time; bytes.
const PIECE: u64 = 64 << 20;
/// Less than that is not given back before the end.
const WORTH_A_CALL: u64 = 256 << 10;
/// Who has so many children that ended and are not buried may bury none …
const UNBURIED: usize = 16;
/// … and does not, if none of them is within this time, not counting for how long it waits for a processor …
const PATIENCE: Duration = Duration::from_secs(5);
/// … but for this time at most.
const BUSY: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// At work on one checkpoint.
#[derive(Debug)]
pub(crate) struct Fork {
    twin: Option<Twin>,
    /// What the twin will have pages of.
    spans: Vec<Span>,
    /// What it shares with the program.
    shared: Vec<Range>,
    /// What it does not inherit.
    aside: Copied,
    aside_ranges: Vec<Range>,
    /// Most bytes that the cut may copy.
    most: u64,
}

/// Own pages of one span.
struct Own {
    range: Range,
    span: usize,
}

impl Fork {
    /// With `most` bytes to be copied at the cut.
    pub fn new(most: u64) -> Self {
        Fork {
            twin: None,
            spans: Vec::new(),
            shared: Vec::new(),
            aside: Copied::default(),
            aside_ranges: Vec::new(),
            most,
        }
    }

    /// Copies what the twin does not inherit or must not keep; returns why not, if that is too much.
    fn set_aside(&mut self, still: &Still<'_>) -> Result<Option<String>> {
        let mappings = &still.builder.image.spaces[still.target.space as usize].mappings;
        let left_out: Vec<&Mapping> = mappings.iter().filter(|m| !m.shared && is_left_out(m)).collect();
        let apart = |s: &Span| left_out.iter().any(|m| m.start == s.range.start);
        let (apart, inherited): (Vec<Span>, Vec<Span>) =
            spans(&still.builder.image.spaces[still.target.space as usize]).into_iter().partition(apart);
        let mut ranges = Vec::new();
        self.aside_ranges.clear();
        for span in &apart {
            let first = self.aside_ranges.len();
            own_pages(&still.target.pagemap, span, &mut self.aside_ranges)?;
            ranges.extend(self.aside_ranges[first..].iter().map(|r| (*r, span.zeros_matter)));
        }
        let bytes: u64 = self.aside_ranges.iter().map(|r| r.len).sum();
        if bytes > self.most {
            let what = format!(
                "{bytes} bytes are kept from its children (MADV_DONTFORK) or from the pool of huge pages"
            );
            return Ok(Some(format!("{what}, more than the buffer holds")));
        }
        self.aside.copy(&still.target.memory, &ranges)?;
        self.spans = inherited;
        Ok(None)
    }

    /// Saves all that is the twin's own, piece by piece; returns what that is.
    fn save(&self, twin: &mut Twin, running: &mut Running<'_>) -> Result<Vec<Range>> {
        let pagemap = Pagemap::open(twin.pid())?;
        let mut kinds = [Vec::new(), Vec::new()];
        for (index, span) in self.spans.iter().enumerate() {
            let mut ranges = Vec::new();
            own_pages(&pagemap, span, &mut ranges)?;
            let own = ranges.into_iter().map(|range| Own { range, span: index });
            kinds[usize::from(span.zeros_matter)].extend(own);
        }
        let all = || kinds.iter().flatten().map(|o| o.range);
        running.progress.start(all().chain(self.aside_ranges.iter().copied()).map(|r| r.len).sum());
        for zeros_matter in [false, true] {
            for piece in pieces(&kinds[usize::from(zeros_matter)]) {
                let ranges: Vec<Range> = piece.iter().map(|o| o.range).collect();
                put(
                    running.target.owner(),
                    twin.memory(),
                    &ranges,
                    zeros(zeros_matter),
                    running.writer,
                    running.progress,
                )?;
                give_back(twin, &piece);
            }
        }
        Ok(all().collect())
    }
}

impl MemoryEngine for Fork {
    fn engine(&self) -> Engine {
        Engine::Fork
    }

    fn prepare(&mut self, running: &mut Running<'_>) -> Result<()> {
        // Of an instant that was lost.
        self.twin = None;
        running.writer.forget(running.target.owner());
        check_burial(&running.target.process, PATIENCE)?;
        check_memory(&running.target.process)
    }

    fn cut(&mut self, still: &mut Still<'_>) -> Result<Cut> {
        let target = still.target;
        if let Some(why) = obstacle(&still.builder.image, target)? {
            return Ok(Cut::Impossible(why));
        }
        if let Some(why) = self.set_aside(still)? {
            return Ok(Cut::Impossible(why));
        }
        let mappings = &still.builder.image.spaces[still.target.space as usize].mappings;
        let shared = mappings.iter().filter(|m| m.shared);
        self.shared = shared.map(|m| Range { start: m.start, len: m.end - m.start }).collect();
        let lowest = Some(lowest_stack(&still.builder.image, target.space));
        let lender =
            Lender { process: &target.process, memory: &target.memory, gadgets: target.gadgets, lowest };
        let forked =
            lender.main_thread(still.frozen, &twin::calls(), |site, visit| Ok(Twin::fork(site, visit)?));
        match forked {
            Ok(mut twin) => {
                // The program's first write to a huge page that the twin has too would take another from the pool,
                // where there may be none.
                for m in mappings.iter().filter(|m| !m.shared && m.huge_page != 0 && is_inherited(m)) {
                    if let Err(e) = twin.unmap(RemoteAddr(m.start), m.end - m.start) {
                        return Ok(Cut::Impossible(e.to_string()));
                    }
                }
                self.twin = Some(twin);
            }
            Err(e @ (Error::Failed(_) | Error::Incapable(_) | Error::Kernel(Kernel::Remote { .. }))) => {
                return Ok(Cut::Impossible(e.to_string()));
            }
            Err(e) => return Err(e),
        }
        Ok(Cut::Taken)
    }

    fn finish(&mut self, running: &mut Running<'_>) -> Result<()> {
        let Some(mut twin) = self.twin.take() else { return Err(Error::Failed("there is no twin".into())) };
        twin.settle()?;
        for range in &self.shared {
            // A sealed one stays until the end.
            let _ = twin.unmap(RemoteAddr(range.start), range.len);
        }
        let saved = self.save(&mut twin, running);
        let alive = twin.check().map_err(Error::Kernel);
        let mut own = match (saved, alive) {
            (Err(e @ Error::Store(_)), _) => return Err(e),
            (Ok(own), Ok(())) => own,
            (Err(e), _) | (Ok(_), Err(e)) => {
                let what = "the twin could not be read to its end; was it killed, as memory was short?";
                return Err(Error::Failed(format!("{what} ({e})")));
            }
        };
        twin.end()?;
        self.aside.put(running.target.owner(), running.writer)?;
        running.progress.advance(self.aside_ranges.iter().map(|r| r.len).sum());
        own.append(&mut self.aside_ranges);
        own.sort_by_key(|r| r.start);
        running.writer.keep_only(running.target.owner(), own);
        Ok(())
    }
}

/// Why no twin of a process can be made that lives for long, if so. It is at rest: nobody is waited for, to see whether he buries.
///
/// # Errors
/// That it cannot be looked at.
pub fn why_no_lasting_twin(image: &Image, target: &Target) -> Result<Option<String>> {
    if let Some(why) = obstacle(image, target)? {
        return Ok(Some(why));
    }
    match check_burial(&target.process, Duration::ZERO) {
        Err(Error::Failed(why)) => Ok(Some(why)),
        checked => checked.map(|()| None),
    }
}

/// Whether a private mapping is not for a twin, so that it has to be copied in the cut.
pub fn is_left_out(mapping: &Mapping) -> bool {
    !is_inherited(mapping) || mapping.huge_page != 0
}

fn is_inherited(mapping: &Mapping) -> bool {
    !mapping.flags.intersects(MappingFlags::DONT_FORK | MappingFlags::WIPE_ON_FORK)
}

/// What a twin cannot be made with, or would harm.
fn obstacle(image: &Image, target: &Target) -> Result<Option<String>> {
    let (process, space) = (target.described(image)?, &image.spaces[target.space as usize]);
    let mut above = Some(process);
    while let Some(process) = above {
        if process.child_subreaper {
            let why = "orphans come to the program (PR_SET_CHILD_SUBREAPER), as its twin would";
            return Ok(Some(why.into()));
        }
        above = process.parent.and_then(|parent| image.processes.get(parent as usize));
    }
    if namespace_of(image, process).is_some() {
        return Ok(Some("orphans in its pid namespace come to the program, as its twin would".into()));
    }
    if process.children_in.is_some() || process.children_apart {
        return Ok(Some("its children are in another pid namespace, as its twin would be".into()));
    }
    let needed = |m: &&Mapping| m.flags.contains(MappingFlags::STACK) || m.prot & libc::PROT_EXEC as u32 != 0;
    if space.mappings.iter().filter(needed).any(|m| !is_inherited(m)) {
        return Ok(Some("it keeps its stack or code from its children (MADV_DONTFORK)".into()));
    }
    Ok(None)
}

/// Whether somebody will bury the twin. In a container the first process may never have heard of that; each twin
/// would then remain as an entry in the list of processes.
fn check_burial(process: &Proc, patience: Duration) -> Result<()> {
    let status = process.status()?;
    if status.own_pid() == 1 {
        return Err(Error::Failed("orphans come to the program, the first process of its namespace".into()));
    }
    let mut pid = status.ppid;
    while pid != 0 {
        let Ok(ancestor) = Proc::process(pid) else { break };
        if !buries(&ancestor, patience)? {
            let name = String::from_utf8_lossy(&ancestor.comm()?).into_owned();
            let what = format!("process {pid} ({name}), to which the twin may come when it ends");
            return Err(Error::Failed(format!("{what}, does not bury its children")));
        }
        pid = ancestor.status()?.ppid;
    }
    Ok(())
}

/// Whether a process buries its children sooner or later, as far as one can see.
fn buries(process: &Proc, patience: Duration) -> Result<bool> {
    let ended = |&pid: &u32| Proc::process(pid).and_then(|c| c.stat()).is_ok_and(|s| s.state == b'Z');
    let unburied =
        || -> Result<Vec<u32>> { Ok(process.children()?.into_iter().filter(|c| ended(c)).collect()) };
    let before = unburied()?;
    if before.len() < UNBURIED {
        return Ok(true);
    }
    let (start, mut slept) = (Instant::now(), Duration::ZERO);
    while slept < patience && start.elapsed() < BUSY {
        let now = unburied()?;
        if before.iter().any(|pid| !now.contains(pid)) {
            return Ok(true);
        }
        std::thread::sleep(LOOK);
        if !wants_to_run(process)? {
            slept += LOOK;
        }
    }
    Ok(false)
}

/// Whether a thread of a process runs, or would if there were a processor for it.
fn wants_to_run(process: &Proc) -> Result<bool> {
    let wants = |tid| process.sibling(tid).and_then(|thread| thread.stat()).is_ok_and(|s| s.state == b'R');
    Ok(process.threads()?.into_iter().any(wants))
}

/// Whether there is memory for a copy of each page, should the program write to all of them before they are saved.
/// When memory is short the kernel kills the twin first (`oom_score_adj`), but may not wait for what that frees.
fn check_memory(process: &Proc) -> Result<()> {
    let (most, left) = (process.status()?.rss, headroom(process)?);
    if most <= left {
        return Ok(());
    }
    let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
    Err(Error::Failed(format!(
        "while its twin lives, the program may need another {} MiB of memory, and only {} MiB can be had",
        mebibytes(most),
        mebibytes(left)
    )))
}

/// Pages in ascending order, cut into pieces.
fn pieces(own: &[Own]) -> Vec<Vec<Own>> {
    let mut pieces: Vec<Vec<Own>> = Vec::new();
    let mut room = 0;
    for Own { range, span } in own {
        let mut rest = *range;
        while rest.len > 0 {
            if room == 0 {
                pieces.push(Vec::new());
                room = PIECE;
            }
            let range = Range { start: rest.start, len: rest.len.min(room) };
            pieces.last_mut().into_iter().for_each(|p| p.push(Own { range, span: *span }));
            rest = Range { start: range.end(), len: rest.len - range.len };
            room -= range.len;
        }
    }
    pieces
}

/// Gives back what lies between the first and the last page of a piece in each span: all of that is saved.
fn give_back(twin: &mut Twin, piece: &[Own]) {
    for part in piece.chunk_by(|a, b| a.span == b.span) {
        let (start, end) = (part[0].range.start, part[part.len() - 1].range.end());
        if end - start >= WORTH_A_CALL {
            // What the kernel does not give back is kept until the end.
            let _ = twin.release(RemoteAddr(start), end - start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_there_is_in_order() {
        let own =
            |start: u64, len: u64, span| Own { range: Range { start: start << 20, len: len << 20 }, span };
        let pieces = pieces(&[own(0, 1, 0), own(2, 130, 0), own(200, 1, 1)]);
        let found: Vec<Vec<(u64, u64, usize)>> = pieces
            .iter()
            .map(|p| p.iter().map(|o| (o.range.start >> 20, o.range.len >> 20, o.span)).collect())
            .collect();
        let expected = vec![vec![(0, 1, 0), (2, 63, 0)], vec![(65, 64, 0)], vec![(129, 3, 0), (200, 1, 1)]];
        assert_eq!(found, expected);
    }
}
