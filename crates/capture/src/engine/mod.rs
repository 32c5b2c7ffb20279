//! Memory engines: how the pages of one instant come to the store.
//!
//! Each does its work in three steps, and the program stands still in the middle one only: it gets ready while the
//! program runs, makes the instant recoverable while it stands still, and brings the pages to the store while it runs
//! again.

pub(crate) mod aftermath;
pub(crate) mod elsewhere;
pub mod fork;
mod loading;
pub mod precopy;
pub mod stop;
pub mod tracking;
pub mod wp;

pub(crate) use loading::Loading;
pub use tracking::Tracking;
pub(crate) use wp::Armed;

use crate::blocked::Earlier;
use crate::checkpoint::Progress;
use crate::freeze::Frozen;
use crate::regions::zeros;
use crate::target::Target;
use crate::{Builder, Error, Result};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use stillpoint_image::{Owner, Range};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::Vma;
use stillpoint_linux::sched::{self, SchedAttr};
use stillpoint_store::{PutError, Writer, Zeros};

/// How memory is saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Whichever suits the program, changed within a checkpoint where it turns out not to.
    #[default]
    Auto,
    /// Pages are copied while the program runs, again when they change, and the few that are left at the cut.
    Precopy,
    /// Pages are protected at the cut; the first write to one waits until it is copied.
    Wp,
    /// A copy-on-write twin is made at the cut and read afterwards.
    Fork,
    /// The program stands still while its memory is written.
    Stop,
}

impl Engine {
    /// All there are.
    pub const ALL: [Engine; 5] = [Engine::Auto, Engine::Precopy, Engine::Wp, Engine::Fork, Engine::Stop];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Auto => "auto",
            Engine::Precopy => "precopy",
            Engine::Wp => "wp",
            Engine::Fork => "fork",
            Engine::Stop => "stop",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|e| e.name() == name)
    }

    /// What it does, in a line.
    pub fn summary(self) -> &'static str {
        match self {
            Engine::Auto => "Whichever fits the program and the kernel, and another if that one does not",
            Engine::Precopy => {
                "Copied ahead while the program runs; what it writes meanwhile is copied again"
            }
            Engine::Wp => "Write-protected; the first write to a page waits until the page is copied",
            Engine::Fork => "Read from a copy-on-write twin",
            Engine::Stop => "The program stands still while its memory is written",
        }
    }
}

/// The engines to try, one after the other, where `asked` was asked for. `wp` is taken only by those who ask for it: to
/// let the kernel itself wait for a page is more than every program and every kernel path can bear.
pub(crate) fn order(asked: Engine) -> Vec<Engine> {
    match asked {
        Engine::Auto => vec![Engine::Precopy, Engine::Fork, Engine::Stop],
        Engine::Precopy => vec![Engine::Precopy, Engine::Fork, Engine::Stop],
        Engine::Wp => vec![Engine::Wp, Engine::Fork, Engine::Stop],
        other => vec![other],
    }
}

/// Whether it can save memory that several processes share. Those that follow what is written must know all that a process
/// does with its memory past the page tables, such as reading files into it directly, and which words the kernel writes when a
/// thread ends: of one process, not of all that may come to share it meanwhile.
pub(crate) fn can_share(engine: Engine) -> bool {
    matches!(engine, Engine::Fork | Engine::Stop)
}

/// Why `auto` takes this engine next.
pub(crate) fn reason(engine: Engine) -> &'static str {
    match engine {
        Engine::Precopy => "the next checkpoint will cost only what changes",
        Engine::Fork => "it copies nothing in the cut, however fast the program writes",
        _ => "it needs nothing of the kernel and of the program",
    }
}

/// The checkpoint that has every page that was not written since.
#[derive(Clone, Debug)]
pub(crate) struct Base {
    pub job: String,
    pub id: u64,
    /// When it was taken, nanoseconds since 1970: there may be another of that name in another store.
    pub taken_ns: u64,
    /// Row of the address space there.
    pub space: u32,
}

/// What is followed of a process, handed from one checkpoint to the next.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    pub tracking: Option<Tracking>,
    pub armed: Option<Armed>,
}

impl Kept {
    pub fn is_empty(&self) -> bool {
        self.tracking.is_none() && self.armed.is_none()
    }
}

/// What an engine works with while the program runs.
pub(crate) struct Running<'a> {
    pub target: &'a Target,
    /// What its threads were waiting for when it was stopped before.
    pub earlier: &'a mut Earlier,
    pub writer: &'a mut Writer,
    pub progress: &'a (dyn Progress + Sync),
    pub log: &'a mut Log,
}

/// What an engine works with while the program stands still.
pub(crate) struct Still<'a> {
    pub target: &'a Target,
    pub frozen: &'a mut Frozen,
    /// Describes everything but the contents of memory.
    pub builder: &'a Builder,
    pub writer: &'a mut Writer,
    pub progress: &'a (dyn Progress + Sync),
    pub log: &'a mut Log,
}

/// What a checkpoint was like, for those who want to know.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Sentences.
    pub story: Vec<String>,
    /// Times at which the program stood still besides the cut.
    pub pauses: Vec<Duration>,
}

impl Log {
    pub fn tell(&mut self, sentence: impl Into<String>) {
        self.story.push(sentence.into());
    }
}

/// How a cut went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The instant is recoverable: the program may run on.
    Taken,
    /// It would take too long: the program must run on first, and another engine take over.
    TooMuch,
    /// It cannot be done with this program, for this reason: another engine must take over.
    Impossible(String),
}

/// Work that several threads can do at a time; it is done when it has returned in all of them.
pub(crate) type AtRest<'s> = Box<dyn Fn() -> Result<()> + Sync + 's>;

/// A memory engine, at work on one checkpoint.
pub(crate) trait MemoryEngine {
    fn engine(&self) -> Engine;

    /// What people are told that has saved the program.
    fn name(&self) -> &'static str {
        self.engine().name()
    }

    /// Gets ready while the program runs. An error means that the engine cannot be used for this program; the reason
    /// is told, and another takes over.
    fn prepare(&mut self, running: &mut Running<'_>) -> Result<()>;

    /// The cut comes next: a last chance to make it short.
    fn converge(&mut self, _: &mut Running<'_>) -> Result<()> {
        Ok(())
    }

    /// Somebody else has taken the marks of what was written in a range: all that is there counts as written.
    fn marks_are_gone(&mut self, _: Range) {}

    /// The program has just come to rest, with these mappings: what can be done for the cut while all else is described, if
    /// that is worth another thread. `many`: there are many processes, and so there is one.
    fn rest<'s>(&'s mut self, _: &'s Target, _: &[Vma], _many: bool) -> Result<Option<AtRest<'s>>> {
        Ok(None)
    }

    /// Makes this instant recoverable. The program stands still: nothing is written to the medium here.
    fn cut(&mut self, still: &mut Still<'_>) -> Result<Cut>;

    /// Brings every private page of the instant to the store; the program may be running again. Afterwards the writer
    /// has all of them, and none besides ([`Writer::keep_only`]).
    fn finish(&mut self, running: &mut Running<'_>) -> Result<()>;

    /// Whether only what changed since an earlier checkpoint is saved.
    fn is_incremental(&self) -> bool {
        false
    }

    /// It is done; what is followed of the process is kept for the next checkpoint.
    fn kept(self: Box<Self>) -> Kept {
        Kept::default()
    }

    /// Whether it is worth preparing again after a cut that was too much.
    fn try_again(&self) -> bool {
        false
    }
}

/// Copies pages of a process into the store.
pub(crate) fn put(
    owner: Owner,
    memory: &Memory,
    ranges: &[Range],
    zeros: Zeros,
    writer: &mut Writer,
    progress: &(dyn Progress + Sync),
) -> Result<()> {
    let fill = |batch: &[Range], buffer: &mut [u8]| {
        progress.advance(buffer.len() as u64);
        let ranges: Vec<(u64, u64)> = batch.iter().map(|r| (r.start, r.len)).collect();
        memory.read_many(&ranges, buffer)
    };
    writer.put_parallel(owner, ranges, zeros, &fill).map_err(put_error)
}

pub(crate) fn put_error(e: PutError<stillpoint_linux::Error>) -> Error {
    match e {
        PutError::Fill(e) => Error::Kernel(e),
        PutError::Store(e) => Error::Store(e),
    }
}

/// Pages copied at the cut, in memory that was there before unless there are more than was to be expected.
#[derive(Debug, Default)]
pub(crate) struct Copied {
    /// The pages one behind the other, and room that is not used.
    bytes: Vec<u8>,
    ranges: Vec<(Range, bool)>,
}

impl Copied {
    /// Gets memory ready for so many bytes, so that the cut need not wait for any.
    pub fn reserve(&mut self, bytes: u64) {
        if self.bytes.len() < bytes as usize {
            self.bytes.resize(bytes as usize, 1);
        }
    }

    /// Bytes that are copied.
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|(r, _)| r.len).sum()
    }

    pub fn copy(&mut self, memory: &Memory, ranges: &[(Range, bool)]) -> Result<()> {
        self.copy_with(ranges, |bytes| {
            let from: Vec<(u64, u64)> = ranges.iter().map(|(r, _)| (r.start, r.len)).collect();
            // What was written lately is its own.
            memory.read_pinning(&from, bytes)
        })
    }

    /// Copies ranges, which `read` reads one behind the other.
    pub fn copy_with(
        &mut self,
        ranges: &[(Range, bool)],
        read: impl FnOnce(&mut [u8]) -> Result<(), stillpoint_linux::Error>,
    ) -> Result<()> {
        self.ranges = ranges.to_vec();
        let total = self.len() as usize;
        if self.bytes.len() < total {
            self.bytes.resize(total, 0);
        }
        Ok(read(&mut self.bytes[..total])?)
    }

    pub fn put(&self, owner: Owner, writer: &mut Writer) -> Result<()> {
        let mut at = 0;
        for (range, zeros_matter) in &self.ranges {
            let bytes = &self.bytes[at..at + range.len as usize];
            at += range.len as usize;
            let fill = |address: u64, buffer: &mut [u8]| {
                let from = (address - range.start) as usize;
                buffer.copy_from_slice(&bytes[from..from + buffer.len()]);
                Ok::<(), stillpoint_linux::Error>(())
            };
            let put: Result<(), PutError<_>> = writer.put(owner, *range, zeros(*zeros_matter), fill);
            put.map_err(put_error)?;
        }
        Ok(())
    }
}

/// Does work in a thread that gives way to the program, and so do threads that it starts. With a short slice of time,
/// the program's threads do not wait long where processors are few (Linux 6.12; before, with nice alone). With the slice alone a
/// program of one thread, on two processors, lost 23 % to a checkpoint every 10 ms instead of 17.
pub(crate) fn politely<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    const NICE: i32 = 10;
    const SLICE: u64 = 100_000; // nanoseconds, the shortest there is
    std::thread::scope(|scope| {
        let polite = scope.spawn(|| {
            let attributes = SchedAttr { nice: NICE, runtime: SLICE, ..SchedAttr::default() };
            // Where it may not be had, it was low already.
            let _ = sched::set_attributes(0, &attributes);
            work()
        });
        polite.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
