//! `stillpoint fork`: live twins of a running program, beside it.
//!
//! 1. A checkpoint of it is taken into a store of its own, in memory where there is room. The program runs on.
//! 2. That checkpoint is opened and its store removed: what is open stays readable, and nobody else finds it.
//! 3. The twins are clones of it ([`super::clones`]). Those that are not isolated have other ids than the program: for them an instant is
//!    taken at which no lock of the C library knows its owner by one ([`owners`]).

use super::clones::{Flock, not_to_be_had};
use super::restore::Origin;
use crate::args::{Common, DEFAULT_BUFFER, Files, Fork, Restore};
use crate::detach::in_background;
use crate::failure::{Failure, Result};
use crate::jobs::{self, Target};
use crate::output;
use crate::progress::Bar;
use crate::{taken, units};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use stillpoint_capture::attributes::target::has_ended;
use stillpoint_capture::{Engine, Options};
use stillpoint_linux::descriptors::{duplicate_from, null, pidfd_open};
use stillpoint_linux::headroom::{headroom, in_groups};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::{probe, rootless};
use stillpoint_restore::{Ids, Stdio, owners};
use stillpoint_store::{Checkpoint, Store};

/// Runs the command.
pub fn run(common: &Common, args: &Fork) -> Result<ExitCode> {
    args.periodic.check()?;
    let began = Instant::now();
    let store = jobs::open_store(common.store.as_deref())?;
    let target = jobs::target(&store, &args.target)?;
    // Before the program is stopped.
    let (ids, remark) = ids(args)?;
    let plain = Restore::plain(NAME, &args.periodic)?;
    let (count, streams) = (args.count, args.streams.clone());
    let clones = Restore { detach: true, clone: true, count, files: Files::Keep, streams, ..plain };
    in_background(
        common.json,
        |relay| {
            let program = program(target.pid)?;
            let (checkpoint, pause) = match ids {
                Ids::Same => instant(&store, &target, args)?,
                Ids::New => fitting_instant(&store, &target, args)?,
            };
            let job = target.job.clone();
            let origin = Origin::Program { job, pause, began, made: Duration::ZERO };
            speak_like(&target, &program)?;
            drop(program);
            let mut flock =
                Flock::rebuild(store, checkpoint, origin, (&clones, ids), Stdio::Current, Some(relay))?;
            flock.remark(remark.map(str::to_owned).as_ref());
            Ok(flock)
        },
        |flock, tell| flock.supervise(None, common.json, tell),
    )
}

/// Which ids twins are to have, and a remark if that was not asked for. Executables are for the privileged to choose, in a user namespace for
/// everybody.
fn ids(args: &Fork) -> Result<(Ids, Option<&'static str>)> {
    if args.isolated {
        rootless::probe_private().map_err(|e| not_to_be_had("isolated twins", &e))?;
        return Ok((Ids::Same, None));
    }
    match probe::set_executable() {
        Ok(()) => Ok((Ids::New, None)),
        Err(_) if rootless::probe_private().is_ok() => {
            Ok((Ids::Same, Some("without privileges a twin is as with --isolated: it has the ids of the program")))
        }
        Err(e) => Err(Failure::refused(format!("a twin cannot be given the executable of the program: {e}"))
            .hint("run as root, or give stillpoint CAP_CHECKPOINT_RESTORE; stillpoint doctor tells what else is missing")),
    }
}

/// The only job of the store of one instant. Nobody can name it: to people, a number is a process id.
const NAME: &str = "0";

/// How often, and for how long, another instant is taken if at one the program cannot be had under other ids; and what lies between two.
const INSTANTS: u32 = 20;
const LONG: Duration = Duration::from_secs(10);
const BETWEEN: Duration = Duration::from_millis(7);

/// The program at an instant at which it can be had under other ids; and for how long it was stopped for all that were looked at.
fn fitting_instant(store: &Store, target: &Target, args: &Fork) -> Result<(Checkpoint, Duration)> {
    let (began, mut stopped) = (Instant::now(), Duration::ZERO);
    for number in 1.. {
        let (checkpoint, pause) = instant(store, target, args)?;
        stopped += pause;
        let of = |e| Failure::failed(format!("cannot look for locks: {e}"));
        let found = owners::look(&checkpoint).map_err(of)?;
        let is_last = number >= INSTANTS || began.elapsed() > LONG;
        if found.locks.is_empty() && (is_last || !found.may_be_taken) {
            return Ok((checkpoint, stopped));
        }
        if is_last {
            let what = found.locks.iter().map(|lock| format!("\n  {lock}")).collect::<String>();
            let target = &args.target;
            let moments = match number {
                1 => "at the moment that was looked at it was not".into(),
                _ => format!("at none of {number} moments was it"),
            };
            return Err(Failure::refused(format!(
                "cannot fork {target}, which runs on unharmed: {moments} without locks that know their owners by thread ids, and a \
                 twin beside it has others:{what}"
            ))
            .hint("with --isolated twins keep their ids, and all locks their owners"));
        }
        std::thread::sleep(BETWEEN);
    }
    Err(Failure::failed("no moment was looked at"))
}

/// The program as it is now, readable as long as it is held; and for how long it was stopped.
fn instant(store: &Store, target: &Target, args: &Fork) -> Result<(Checkpoint, Duration)> {
    let looked = Proc::process(target.pid).and_then(|it| Ok((it.status()?, in_groups(&it)?)));
    let (status, left) = match looked {
        Err(stillpoint_linux::Error::Gone(_)) => return Err(ended(target.pid)),
        looked => looked?,
    };
    let twins = u64::from(args.count.unwrap_or(1));
    let size = status.own_memory();
    if size.saturating_mul(twins) > left {
        // They are in its control groups. What is short of memory there is not only they.
        return Err(Failure::refused(format!(
            "cannot fork {}, which runs on unharmed: what is made may take another {} of memory, and only {} can be had",
            args.target,
            output::bytes(size * twins),
            output::bytes(left)
        ))
        .hint("give its control group more memory (memory.max), or make fewer twins"));
    }
    let folder = Folder::make(store, status.rss, twins)?;
    let of_instant = Store::open(&folder.path).map_err(jobs::store_failure)?;
    let options = Options {
        job: NAME.into(),
        label: None,
        engine: Engine::Auto,
        buffer: units::buffer(DEFAULT_BUFFER).map_err(Failure::failed)?,
        full: true,
        kill: false,
        inherited: target.inherited(),
    };
    let bar = Bar::new("fork", true);
    let report = stillpoint_capture::checkpoint(target.pid, &of_instant, &options, &bar);
    let report = report.map_err(|e| taken::failure(e, "fork", &args.target))?;
    let checkpoint = of_instant.load(NAME, None).map_err(jobs::store_failure)?;
    Ok((checkpoint, report.pause))
}

/// The program, whoever has its id when its instant has been taken.
fn program(pid: u32) -> Result<OwnedFd> {
    match pidfd_open(pid, 0) {
        Err(e) if e.errno() == Some(Errno::SRCH.raw_os_error()) => Err(ended(pid)),
        program => Ok(program?),
    }
}

/// Lets our standard output and error lead where the program's do, for its twins; there is no input for them. Where they would lead is
/// not known any more if it has ended.
fn speak_like(target: &Target, program: &OwnedFd) -> Result<()> {
    let failed = |e| Failure::failed(format!("dup2: {e}"));
    let streams = [1, 2].map(|number| duplicate_from(program.as_fd(), number));
    if has_ended(target.pid) {
        return Err(ended(target.pid));
    }
    // What it has closed leads nowhere.
    let [output, error] = streams.map(|stream| stream.or_else(|_| null()));
    rustix::stdio::dup2_stdin(null()?).map_err(failed)?;
    rustix::stdio::dup2_stdout(output?).map_err(failed)?;
    rustix::stdio::dup2_stderr(error?).map_err(failed)
}

fn ended(pid: u32) -> Failure {
    Failure::usage(format!("process {pid} ended"))
}

/// A folder for the store of one instant. It is removed when this is dropped; after us it is removed by the next who makes one.
pub(super) struct Folder {
    path: PathBuf,
    /// Locked while we live.
    _lock: File,
}

/// Where files are in memory, on most systems.
const IN_MEMORY: &str = "/dev/shm";
const PREFIX: &str = "stillpoint-fork-";
/// A folder that nobody has locked may just be about to be.
const YOUNG: Duration = Duration::from_secs(60);

impl Folder {
    /// For about so many bytes, of which there are going to be so many copies.
    pub(super) fn make(store: &Store, bytes: u64, twins: u64) -> Result<Self> {
        let in_memory = Path::new(IN_MEMORY);
        if has_room(in_memory, bytes, twins)
            && let Ok(folder) = Self::make_in(in_memory)
        {
            return Ok(folder);
        }
        let on_disk = store.path().join("forks");
        let made = std::fs::create_dir_all(&on_disk).and_then(|()| Self::make_in(&on_disk));
        made.map_err(|e| Failure::failed(format!("cannot make a folder in {}: {e}", on_disk.display())))
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn make_in(parent: &Path) -> std::io::Result<Self> {
        sweep(parent)?;
        let now = crate::output::now_ns();
        let path = parent.join(format!("{PREFIX}{}-{now}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path)?;
        let lock = File::open(&path)?;
        flock(&lock, FlockOperation::LockExclusive)?;
        Ok(Folder { path, _lock: lock })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the next.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Removes what those have left behind who were killed. Others may make folders there, too, and what looks like one.
fn sweep(parent: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(parent)?.flatten() {
        let is_named = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        let Some(metadata) = entry.metadata().ok().filter(|_| is_named) else { continue };
        let is_ours = metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw();
        let age = metadata.modified().map(|at| at.elapsed().unwrap_or_default());
        if !is_ours || age.map_or(true, |age| age < YOUNG) {
            continue;
        }
        let only_that = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(folder) = rustix::fs::open(entry.path(), only_that, Mode::empty()) else { continue };
        if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Whether there is memory for this, and for the twins that are going to have it all, too.
fn has_room(parent: &Path, bytes: u64, twins: u64) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const MARGIN: u64 = 64 << 20;
    let Ok(system) = rustix::fs::statfs(parent) else { return false };
    let room = system.f_bavail * system.f_bsize as u64;
    let left = Proc::process(std::process::id()).and_then(|own| headroom(&own)).unwrap_or(0);
    system.f_type as u64 == TMPFS && bytes + MARGIN < room && bytes * (twins + 1) + MARGIN < left
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn what_was_left_behind_is_removed_and_nothing_else() {
        let parent = std::env::temp_dir().join(format!("sweep-{}", std::process::id()));
        let (old, young, other, link) =
            ("stillpoint-fork-1-1", "stillpoint-fork-2-2", "else-1-1", "stillpoint-fork-3-3");
        for name in [old, young, other] {
            std::fs::create_dir_all(parent.join(name)).expect("a folder");
            std::fs::write(parent.join(name).join("file"), "").expect("a file");
        }
        std::os::unix::fs::symlink(parent.join(other), parent.join(link)).expect("a link");
        let long_ago = SystemTime::now() - 2 * YOUNG;
        for name in [old, other] {
            let folder = File::open(parent.join(name)).expect("open");
            folder.set_modified(long_ago).expect("a time");
        }
        // It is held first, as by one who lives, then no more.
        let held = File::open(parent.join(old)).expect("open");
        flock(&held, FlockOperation::LockExclusive).expect("a lock");
        sweep(&parent).expect("sweep");
        assert!(parent.join(old).exists());
        drop(held);
        sweep(&parent).expect("sweep");
        assert!(!parent.join(old).exists());
        for name in [young, other, link] {
            assert!(parent.join(name).join("file").exists(), "{name}");
        }
        std::fs::remove_dir_all(parent).expect("remove");
    }
}
