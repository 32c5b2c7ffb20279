//! Memory engines: how the pages of one instant come to the store.
//!
//! Each does its work in three steps, and the program stands still in the middle one only: it gets ready while the
//! program runs, makes the instant recoverable while it stands still, and brings the pages to the store while it runs
//! again.

pub mod precopy;
pub mod stop;
pub mod tracking;

use crate::blocked::Earlier;
use crate::checkpoint::{Progress, Target};
use crate::freeze::Frozen;
use crate::{Builder, Error, Result};
use std::time::Duration;
use stillpoint_image::{Owner, Range};
use stillpoint_linux::memory::Memory;
use stillpoint_store::{PutError, Writer, Zeros};

/// How memory is saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
}

/// The engines to try, one after the other, where `asked` was asked for.
pub(crate) fn order(asked: Engine) -> Vec<Engine> {
    match asked {
        Engine::Auto | Engine::Precopy => vec![Engine::Precopy, Engine::Stop],
        other => vec![other],
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The instant is recoverable: the program may run on.
    Taken,
    /// It would take too long: the program must run on first, and another engine take over.
    TooMuch,
}

/// A memory engine, at work on one checkpoint.
pub(crate) trait MemoryEngine {
    fn engine(&self) -> Engine;

    /// Gets ready while the program runs. An error means that the engine cannot be used for this program; the reason
    /// is told, and another takes over.
    fn prepare(&mut self, running: &mut Running<'_>) -> Result<()>;

    /// Makes this instant recoverable. The program stands still: nothing is written to the medium here.
    fn cut(&mut self, still: &mut Still<'_>) -> Result<Cut>;

    /// Brings every private page of the instant to the store; the program may be running again. Afterwards the writer
    /// has all of them, and none besides ([`Writer::keep_only`]).
    fn finish(&mut self, running: &mut Running<'_>) -> Result<()>;

    /// Whether it is worth preparing again after a cut that was too much.
    fn try_again(&self) -> bool {
        false
    }
}

/// Copies pages of a process into the store.
pub(crate) fn put(
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
    writer.put_parallel(Owner::Space(0), ranges, zeros, &fill).map_err(put_error)
}

pub(crate) fn put_error(e: PutError<stillpoint_linux::Error>) -> Error {
    match e {
        PutError::Fill(e) => Error::Kernel(e),
        PutError::Store(e) => Error::Store(e),
    }
}
