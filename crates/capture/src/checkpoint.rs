//! Taking a checkpoint, from the first look at the target to the commit.

use crate::freeze::Frozen;
use crate::inspect::{Known, inspect};
use crate::regions::private_regions;
use crate::{Builder, Error, Result, attributes, files};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime};
use stillpoint_image::{BlockedCall, Image, Meta, Owner, PAGE, PathFile, Range, Usage};
use stillpoint_linux::host;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::Pagemap;
use stillpoint_linux::proc::{Proc, TaskFlags};
use stillpoint_store::{PutError, Store, Writer, Zeros};

/// How memory is saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// The program stands still while its memory is written.
    #[default]
    Stop,
}

impl Engine {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Stop => "stop",
        }
    }
}

impl std::str::FromStr for Engine {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "stop" => Ok(Engine::Stop),
            _ => Err(format!("there is no engine {name:?}; there is: stop")),
        }
    }
}

/// What is asked of a checkpoint.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the job it belongs to.
    pub job: String,
    /// The user's words for it.
    pub label: Option<String>,
    /// How memory is saved.
    pub engine: Engine,
    /// Kill the program once the checkpoint is committed; it does not run in between.
    pub kill: bool,
    /// Pipes, sockets and terminals besides its standard streams that the program was started with: descriptor, and
    /// what `/proc/PID/fd` called it. Like those they become the ones of whoever restores.
    pub inherited: Vec<(u32, Vec<u8>)>,
}

/// Hears how far a checkpoint or restore is. It may be called while the program stands still.
pub trait Progress {
    /// So many bytes are to be saved or loaded.
    fn start(&self, total_bytes: u64);
    /// So many more have been.
    fn advance(&self, bytes: u64);
}

/// What a checkpoint was like.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of its job.
    pub job: String,
    /// Its number in the job.
    pub id: u64,
    /// Memory it describes, bytes.
    pub bytes: u64,
    /// Memory it describes, pages that are not zero.
    pub pages: u64,
    /// Page data added to the store, bytes.
    pub written_bytes: u64,
    /// How long the program stood still.
    pub pause: Duration,
    /// How long it all took.
    pub wall: Duration,
    /// Name of the engine.
    pub engine: &'static str,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

/// Takes a checkpoint of a process. Whatever fails, the process runs on unharmed and the store is as before.
pub fn checkpoint(
    pid: u32,
    store: &Store,
    options: &Options,
    progress: &(dyn Progress + Sync),
) -> Result<Report> {
    // On a thread of its own: what it may still trace when it fails is let go of when it ends.
    std::thread::scope(|scope| {
        let tracer = scope.spawn(|| match take(pid, store, options, progress, options.kill)? {
            Some(report) => Ok(report),
            None => take(pid, store, options, progress, true)?
                .ok_or_else(|| Error::Failed("it rests on assumptions".into())),
        });
        let joined = tracer.join();
        joined.unwrap_or_else(|_| Err(Error::Failed("the checkpoint failed inside stillpoint".into())))
    })
    .map_err(|e| match e {
        // Whatever could not be read or done, this is why.
        Error::Kernel(_) | Error::Failed(_) | Error::Refused(_) if is_dying(pid) => {
            Error::Failed(format!("process {pid} ended before its checkpoint was complete"))
        }
        e => e,
    })
}

/// Whether a process has ended, is ending, or has been killed.
fn is_dying(pid: u32) -> bool {
    let Ok(process) = Proc::process(pid) else { return true };
    let (Ok(stat), Ok(status)) = (process.stat(), process.status()) else { return true };
    let killed = (status.sig_pending | status.shared_pending) & 1 << (libc::SIGKILL - 1) != 0;
    // A main thread may have ended alone.
    let ending = matches!(stat.state, b'Z' | b'X') || stat.flags.contains(TaskFlags::EXITING);
    killed || (ending && stat.num_threads <= 1)
}

/// The target before it is stopped.
struct Target {
    pidfd: OwnedFd,
    process: Proc,
    memory: Memory,
    pagemap: Pagemap,
}

impl Target {
    /// Refuses what cannot be captured, before anything is done to it.
    fn open(pid: u32) -> Result<Self> {
        let gone = || Error::Target(format!("there is no process {pid}"));
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
        let pidfd = pidfd_open(id, PidfdFlags::empty()).map_err(|_| gone())?;
        let process = attributes::target::find(pid)?;
        let mut builder = Builder::new();
        attributes::target::leader_ended(&mut builder, &process)?;
        refuse_if_needed(&mut builder)?;
        Ok(Target { pidfd, process, memory: Memory::open(pid)?, pagemap: Pagemap::open(pid)? })
    }
}

/// Takes a checkpoint; `None` if it rested on something that turned out to be wrong ([`crate::inspect::Assumed`]), which
/// an `exact` one does not.
fn take(
    pid: u32,
    store: &Store,
    options: &Options,
    progress: &(dyn Progress + Sync),
    exact: bool,
) -> Result<Option<Report>> {
    let start = Instant::now();
    let target = Target::open(pid)?;
    let mut builder = Builder::new();
    let mut writer = store.begin(&options.job)?;
    let last = store.load(&options.job, None).ok().map(|c| c.image);
    let earlier = last.as_ref().map(|l| earlier_calls(l, &target)).unwrap_or_default();
    describe(&mut builder.image, options, &target)?;
    let clocks = Clocks::of(&target.process);
    let known = Known::learn(
        &mut builder,
        &target.process,
        target.pidfd.as_fd(),
        &target.memory,
        &target.pagemap,
        &options.inherited,
        earlier,
        exact,
    )?;
    refuse_if_needed(&mut builder)?;
    let mut frozen = Frozen::freeze(&target.process)?;
    clocks.stamp(&mut builder.image.meta);
    let assumed = inspect(&mut builder, &mut frozen, &known)?;
    refuse_if_needed(&mut builder)?;
    copy_all(&mut builder, &mut writer, &target, progress)?;
    reuse_digests(&mut builder, last.as_ref());
    files::take_digests_of(&mut builder, Usage::Write)?;
    let (pause, committed) = if options.kill {
        files::take_digests_of(&mut builder, Usage::Read)?;
        builder.image.meta.pause_ns = frozen.since.elapsed().as_nanos() as u64;
        let committed = writer.commit(builder.image)?;
        pidfd_send_signal(&target.pidfd, Signal::KILL)
            .map_err(|e| Error::Failed(format!("kill {pid}: {e}")))?;
        let pause = frozen.thaw();
        wait_for_end(&target);
        (pause, committed)
    } else {
        let pause = frozen.thaw();
        if !assumed.holds(&known)? {
            return Ok(None);
        }
        builder.image.meta.pause_ns = pause.as_nanos() as u64;
        files::take_digests_of(&mut builder, Usage::Read)?;
        (pause, writer.commit(builder.image)?)
    };
    Ok(Some(Report {
        job: options.job.clone(),
        id: committed.id,
        bytes: committed.pages * PAGE,
        pages: committed.pages,
        written_bytes: committed.written_bytes,
        pause,
        wall: start.elapsed(),
        engine: options.engine.name(),
        notes: Vec::new(),
    }))
}

/// Waits until a killed process is no more (though its parent may not have noticed yet).
fn wait_for_end(target: &Target) {
    let mut fds = [PollFd::new(&target.pidfd, PollFlags::IN)];
    let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
    let _ = poll(&mut fds, Some(&patience));
}

fn refuse_if_needed(builder: &mut Builder) -> Result<()> {
    match builder.refusals.is_empty() {
        true => Ok(()),
        false => Err(Error::Refused(std::mem::take(&mut builder.refusals))),
    }
}

/// Takes over what an earlier checkpoint told of files that have not changed since. (Through a shared mapping a file
/// can change without a new time.)
fn reuse_digests(builder: &mut Builder, last: Option<&Image>) {
    let Some(last) = last else { return };
    let key = |p: &PathFile| (p.dev, p.ino, p.size, p.mtime_ns, p.ctime_ns);
    for path in builder.image.paths.iter_mut().filter(|p| p.mapped_ranges.is_empty() && !p.deleted) {
        let same = |p: &&PathFile| p.path == path.path && key(p) == key(path) && p.mapped_ranges.is_empty();
        path.digest = last.paths.iter().find(same).and_then(|p| p.digest.clone());
    }
}

/// The interrupted calls of the job's newest checkpoint, with the time that is left now, if it is of this process.
fn earlier_calls(last: &Image, target: &Target) -> HashMap<u32, BlockedCall> {
    let (Some(process), Ok(status)) = (last.processes.first(), target.process.status()) else {
        return HashMap::new();
    };
    let same_boot = last.meta.host.boot_id == host::boot_id();
    let now = Clocks::of(&target.process).now().0;
    if !same_boot || process.pid != status.own_pid() {
        return HashMap::new();
    }
    let since = now.saturating_sub(last.meta.monotonic_ns).max(0) as u64;
    let calls = process.threads.iter().filter_map(|t| {
        let call = t.blocked?;
        let remaining_ns = call.remaining_ns.and_then(|left| left.checked_sub(since));
        Some((t.tid, BlockedCall { remaining_ns, ..call }))
    });
    calls.collect()
}

/// The target's monotonic and boot time: nanoseconds by which they are ahead of ours.
struct Clocks {
    ahead: (i64, i64),
}

impl Clocks {
    /// Of a process. They stay the same as long as it lives.
    fn of(process: &Proc) -> Self {
        let theirs = process.time_offsets().ok().flatten().unwrap_or_default();
        let own = Proc::process(std::process::id()).and_then(|p| p.time_offsets()).ok().flatten();
        let own = own.unwrap_or_default();
        Clocks { ahead: (theirs.0 - own.0, theirs.1 - own.1) }
    }

    fn now(&self) -> (i64, i64) {
        let now = |clock| {
            let t = clock_gettime(clock);
            t.tv_sec * 1_000_000_000 + t.tv_nsec
        };
        (now(ClockId::Monotonic) + self.ahead.0, now(ClockId::Boottime) + self.ahead.1)
    }

    /// Notes the moment of the cut.
    fn stamp(&self, meta: &mut Meta) {
        meta.taken_ns = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
        (meta.monotonic_ns, meta.boottime_ns) = self.now();
    }
}

/// Describes what is the same at any moment. (The command line is a note for people.)
fn describe(image: &mut Image, options: &Options, target: &Target) -> Result<()> {
    let meta = &mut image.meta;
    meta.job.clone_from(&options.job);
    meta.label.clone_from(&options.label);
    meta.engine = options.engine.name().into();
    meta.command = target.process.cmdline()?.into_iter().map(Into::into).collect();
    meta.host = stillpoint_image::Host {
        machine: host::machine(),
        kernel: host::kernel(),
        boot_id: host::boot_id(),
        xfeatures: 0,
        vdso: blake3::hash(&host::vdso()?).as_bytes().to_vec().into(),
    };
    Ok(())
}

/// The engine `stop`: copies all private pages and all objects while the program stands still.
fn copy_all(
    builder: &mut Builder,
    writer: &mut Writer,
    target: &Target,
    progress: &(dyn Progress + Sync),
) -> Result<()> {
    let space = &builder.image.spaces[0];
    let regions = private_regions(&target.pagemap, space)?;
    let contents: u64 = builder.contents.iter().flat_map(|c| &c.ranges).map(|r| r.len).sum();
    progress.start(regions.iter().map(|r| r.range.len).sum::<u64>() + contents);
    for zeros_matter in [false, true] {
        let alike = regions.iter().filter(|r| r.zeros_matter == zeros_matter).map(|r| r.range);
        copy_regions(&alike.collect::<Vec<_>>(), zeros_matter, writer, &target.memory, progress)?;
    }
    for content in &builder.contents {
        files::copy_content(content, writer, &mut |bytes| progress.advance(bytes))?;
    }
    Ok(())
}

fn copy_regions(
    ranges: &[Range],
    zeros_matter: bool,
    writer: &mut Writer,
    memory: &Memory,
    progress: &(dyn Progress + Sync),
) -> Result<()> {
    let zeros = if zeros_matter { Zeros::Record } else { Zeros::Omit };
    let fill = |batch: &[Range], buffer: &mut [u8]| {
        progress.advance(buffer.len() as u64);
        let ranges: Vec<(u64, u64)> = batch.iter().map(|r| (r.start, r.len)).collect();
        memory.read_many(&ranges, buffer)
    };
    writer.put_parallel(Owner::Space(0), ranges, zeros, &fill).map_err(|e| match e {
        PutError::Fill(e) => Error::Kernel(e),
        PutError::Store(e) => Error::Store(e),
    })
}
