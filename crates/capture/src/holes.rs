//! What of shared memory is nowhere yet, where the kernel opens it for the privileged alone and only mappings lead to it. To read such a
//! page would make it, in the program's memory: so the program is asked (`mincore(2)`), which sees pages that no process has in its tables.

use crate::builder::{Content, Source, Span};
use crate::freeze::Frozen;
use crate::inspect::lowest_stack;
use crate::lend::Lender;
use crate::target::Target;
use crate::{Error, Result};
use stillpoint_image::{Image, PAGE, Range};
use stillpoint_linux::host;
use stillpoint_linux::program::Program;

/// So many pages are asked of in one call: as many bytes it answers.
const TOGETHER: u64 = 8 << 10;

/// Tells of contents that processes have mapped what is to be read, where they can be asked; `frozen`: the processes, with what stands still
/// of them. Of the others it stays open.
///
/// # Errors
/// That a thread cannot be brought home. The calling OS thread is to end then.
pub(crate) fn find(
    contents: &mut [Content],
    image: &Image,
    frozen: &mut [(&Target, &mut Frozen)],
) -> Result<()> {
    for content in contents.iter_mut().filter(|content| content.ranges.is_none()) {
        match &content.source {
            // Of a file, what is not in memory may be on its disk.
            Source::Mapped(spans) if spans.iter().all(|span| span.is_memory) => {
                content.ranges = there(spans, image, frozen)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// What of these there is; `None` if that cannot be told.
fn there(spans: &[Span], image: &Image, frozen: &mut [(&Target, &mut Frozen)]) -> Result<Option<Vec<Range>>> {
    let mut there: Vec<Range> = spans.iter().flat_map(|span| span.present.iter().copied()).collect();
    let mut known = Range::joined(there.clone());
    // A page that was swapped out is not told from one that is nowhere.
    if host::has_swapped() {
        return Ok(None);
    }
    for span in spans {
        let unknown = Range::without(&[span.range], &known);
        if unknown.is_empty() {
            continue;
        }
        let owner = frozen.iter_mut().find(|(target, _)| target.pid == span.memory.pid());
        let Some((target, frozen)) = owner else { return Ok(None) };
        let lender = Lender {
            process: &target.process,
            memory: &target.memory,
            gadgets: target.gadgets,
            lowest: Some(lowest_stack(image, target.space)),
        };
        let Some(resident) = ask(lender, frozen, span, &unknown)? else { return Ok(None) };
        there.extend(resident);
        known.extend(unknown);
        known = Range::joined(known);
    }
    if host::has_swapped() { Ok(None) } else { Ok(Some(Range::joined(there))) }
}

/// What of some ranges of an object is in memory; `None` if its process may not be asked.
fn ask(lender: Lender<'_>, frozen: &mut Frozen, span: &Span, ranges: &[Range]) -> Result<Option<Vec<Range>>> {
    let most = TOGETHER * PAGE;
    let pieces = ranges.iter().flat_map(|range| {
        (range.start..range.end())
            .step_by(most as usize)
            .map(|start| Range { start, len: most.min(range.end() - start) })
    });
    let address = |at: u64| span.address + (at - span.range.start);
    let pieces: Vec<_> = pieces.collect();
    let arguments = |piece: &Range| (libc::SYS_mincore, [address(piece.start), piece.len, 0, 0, 0, 0]);
    let threads = frozen.threads.len();
    let asked = lender.bench(frozen, &pieces.iter().map(arguments).collect::<Vec<_>>(), |bench| {
        let mut resident = Vec::new();
        for piece in &pieces {
            let pages = (piece.len / PAGE) as usize;
            let mut program = Program::new();
            let room = program.room(pages);
            let step = program.attempt(
                "mincore",
                libc::SYS_mincore,
                [address(piece.start).into(), piece.len.into(), room],
            );
            let outcome = bench.run(&program)?;
            if outcome.result(step) != 0 {
                return Ok(None);
            }
            let is_there = |(_, told): &(u64, &u8)| **told & 1 != 0;
            let page = |(n, _): (u64, &u8)| Range { start: piece.start + n * PAGE, len: PAGE };
            resident.extend((0..).zip(outcome.bytes(room, pages)).filter(is_there).map(page));
        }
        Ok(Some(Range::joined(resident)))
    });
    match asked {
        Err(Error::Incapable(_)) => Ok(None),
        // It was not begun.
        Err(_) if frozen.threads.len() == threads => Ok(None),
        asked => asked,
    }
}
