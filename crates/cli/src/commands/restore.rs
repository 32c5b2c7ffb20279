//! `stillpoint restore`: a program comes back from the store.

use crate::args::{Common, Files, Restore};
use crate::commands::run::Record;
use crate::detach::{Answer, Detached, detach};
use crate::failure::{Failure, Result};
use crate::progress::Bar;
use crate::supervise::{GiveUp, Supervisor, let_go};
use crate::{jobs, output, terminal};
use rustix::fd::{AsFd, OwnedFd};
use serde_json::json;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;
use stillpoint_image::Meta;
use stillpoint_linux::supervise::Signals;
use stillpoint_restore::{Error, FilesPolicy, Options, Restored, Stdio, restore};
use stillpoint_store::{Checkpoint, Claim, Store};

/// Runs the command.
pub fn run(common: &Common, args: &Restore) -> Result<ExitCode> {
    if !args.detach {
        return in_foreground(common, args);
    }
    match detach()? {
        Detached::Front(answer) => {
            answer?.tell(common.json, false)?;
            Ok(ExitCode::SUCCESS)
        }
        Detached::Back(relay) => {
            let revived = Revived::revive(common, args, Stdio::Null, Some(relay.as_fd()));
            let (answer, revived) = match revived {
                Ok(revived) => (Ok(revived.answer()), Some(revived)),
                Err(failure) => (Err(failure), None),
            };
            // Whether anybody still listens or not: the program runs.
            let _ = relay.send(&answer);
            let Some(revived) = revived else { return Ok(ExitCode::FAILURE) };
            let_go(false)?;
            let _ = std::env::set_current_dir("/"); // a supervisor must not keep a file system busy
            let (supervisor, record) = revived.into_supervisor();
            let end = supervisor.watch();
            drop(record);
            end?.follow()
        }
    }
}

fn in_foreground(common: &Common, args: &Restore) -> Result<ExitCode> {
    let mut revived = Revived::revive(common, args, Stdio::Current, None)?;
    // Standard output belongs to the program.
    revived.answer().tell(common.json, true)?;
    let settings = revived.restored.terminal.as_ref().and_then(terminal::Settings::apply);
    let pump = revived.restored.stdin_pump.take();
    let_go(pump.is_some())?;
    pump.map(start_pump).transpose()?;
    let (supervisor, record) = revived.into_supervisor();
    let end = supervisor.with_terminal().watch();
    drop(settings);
    drop(record);
    end?.follow()
}

/// Copies what is left of our standard input into the pipe that the program reads.
fn start_pump(pipe: OwnedFd) -> Result<()> {
    let copy = move || {
        let mut pipe = std::fs::File::from(pipe);
        // Ends with the input or with the reader; the program sees either as it always would.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut pipe);
    };
    let started = std::thread::Builder::new().name("stdin".into()).spawn(copy);
    started.map(drop).map_err(|e| Failure::failed(format!("cannot start a thread: {e}")))
}

/// A program that has come back.
struct Revived {
    restored: Restored,
    record: Option<Record>,
    signals: Signals,
    meta: Meta,
    job: String,
    notes: Vec<String>,
}

impl Revived {
    /// Brings the program back. While it is not complete, a signal (or the end of whoever listens at `relay`) ends us,
    /// and what there is of it with us.
    fn revive(
        common: &Common,
        args: &Restore,
        stdio: Stdio,
        relay: Option<rustix::fd::BorrowedFd<'_>>,
    ) -> Result<Self> {
        let store = jobs::open_store(common.store.as_deref())?;
        let name = &args.checkpoint;
        let checkpoint = store.load(&name.job, name.id).map_err(jobs::store_failure)?;
        let (claim, mut notes) = claim(&store, &name.job)?;
        let signals = Signals::take()?;
        let watch = GiveUp::watch(&signals, relay)?;
        let restored = {
            let bar = Bar::new("restore", common.json);
            restore(&checkpoint, &options(args, stdio), &mut keep_tail(&store, &checkpoint.image.meta), &bar)
        };
        drop(watch);
        let Checkpoint { image, .. } = checkpoint;
        let restored = restored.map_err(|e| failure(e, &image.meta))?;
        notes.extend(restored.notes.iter().cloned());
        let job = claim.job().to_string();
        let command = image.meta.command.clone();
        let record = jobs::running_record(restored.pid, command, Some(image.meta.id))
            .and_then(|running| Record::write(store, claim, &running));
        // The program runs already: it is worth more than its record.
        let record =
            record.map_err(|e| notes.push(format!("stillpoint ls will not show it: {}", e.what))).ok();
        Ok(Self { restored, record, signals, meta: image.meta, job, notes })
    }

    fn into_supervisor(self) -> (Supervisor, Option<Record>) {
        let Restored { pid, pidfd, .. } = self.restored;
        (Supervisor::new(self.signals, pid, pidfd), self.record)
    }

    fn answer(&self) -> Answer {
        let Restored { pid, pages, .. } = self.restored;
        let bytes = pages * stillpoint_image::PAGE;
        let text = format!(
            "{}@{} restored as pid {pid}  {}  skeleton {}, loaded {}",
            self.meta.job,
            self.meta.id,
            output::bytes(bytes),
            output::short(self.restored.skeleton),
            output::short(self.restored.loaded),
        );
        let json = json!({
            "job": self.job,
            "from": self.meta.job,
            "id": self.meta.id,
            "pid": pid,
            "supervisor_pid": std::process::id(),
            "bytes": bytes,
            "pages": pages,
            "skeleton_ms": output::ms(self.restored.skeleton),
            "loaded_ms": output::ms(self.restored.loaded),
            "notes": self.notes,
        });
        Answer { text, json, notes: self.notes.clone() }
    }
}

fn options(args: &Restore, stdio: Stdio) -> Options {
    let files = match args.files {
        Files::Rollback => FilesPolicy::Rollback,
        Files::Keep => FilesPolicy::Keep,
        Files::Refuse => FilesPolicy::Refuse,
    };
    Options { files, stdio }
}

/// The name that the restored program runs under: that of its job, or, while that runs, a new one.
fn claim(store: &Store, job: &str) -> Result<(Claim, Vec<String>)> {
    if let Some(record) = jobs::running(store, job)? {
        let claim = jobs::claim_new(store, job)?;
        let note = format!("job {job} still runs (process {}): this one is job {}", record.pid, claim.job());
        return Ok((claim, vec![note]));
    }
    Ok((jobs::claim(store, job)?, Vec::new()))
}

/// Keeps what is cut from a file, in the store.
fn keep_tail<'a>(
    store: &'a Store,
    meta: &'a Meta,
) -> impl FnMut(&Path, u64, &mut dyn Read) -> stillpoint_restore::Result<()> + 'a {
    move |file, offset, tail| Ok(store.keep_tail(&meta.job, meta.id, file, offset, tail).map(drop)?)
}

fn failure(error: Error, meta: &Meta) -> Failure {
    let name = format!("{}@{}", meta.job, meta.id);
    match error {
        Error::Refused(things) => {
            let list: Vec<String> = things.iter().map(|t| format!("\n{t}")).collect();
            Failure::refused(format!("cannot restore {name}:{}", list.concat()))
        }
        Error::PidTaken(_) => Failure::refused(format!("cannot restore {name}: {error}"))
            .hint("end the process that has the id, if it is of no use any more"),
        Error::NoPidPrivilege(_) => Failure::failed(format!("restore {name}: {error}"))
            .hint("stillpoint doctor tells what is missing"),
        Error::Store(e) => jobs::store_failure(e),
        Error::Kernel(e) => Failure::from(e).within(&format!("restore {name}")),
        Error::Failed(what) => Failure::failed(what).within(&format!("restore {name}")),
    }
}
