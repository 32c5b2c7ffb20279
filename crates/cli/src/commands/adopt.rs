//! `stillpoint adopt`: a program that runs already becomes a job, with a supervisor that is not its parent.

use crate::args::{Adopt, Common, Periodic};
use crate::checkpointer::Work;
use crate::commands::run::Record;
use crate::detach::{Answer, Detached, background_stdio, detach};
use crate::failure::{Failure, Result};
use crate::{chronicle, jobs};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::json;
use std::process::ExitCode;
use stillpoint_image::Bytes;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::supervise::Signals;
use stillpoint_store::history::What;
use stillpoint_store::{Running, Store, Terms};

/// Runs the command.
pub fn run(common: &Common, args: &Adopt) -> Result<ExitCode> {
    args.periodic.check()?;
    check_number(&args.pid)?;
    match detach()? {
        Detached::Front(answer) => {
            answer?.tell(common.json, false)?;
            Ok(ExitCode::SUCCESS)
        }
        Detached::Back(relay) => {
            let adopted = background_stdio().and_then(|_| Adopted::adopt(common, args));
            let (answer, adopted) = match adopted {
                Ok(adopted) => (Ok(adopted.answer()), Some(adopted)),
                Err(failure) => (Err(failure), None),
            };
            // Nobody who listens any more did not want it.
            let told = relay.send(&answer).is_ok();
            let Some(adopted) = adopted.filter(|_| told) else { return Ok(ExitCode::FAILURE) };
            let _ = std::env::set_current_dir("/"); // a supervisor must not keep a file system busy
            adopted.serve()
        }
    }
}

fn check_number(pid: &str) -> Result<()> {
    match !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit()) {
        true => Ok(()),
        false => Err(Failure::usage(format!("{pid:?} is no process id"))
            .hint("ps -e lists processes; a job needs not be adopted")),
    }
}

/// A program that was adopted.
struct Adopted {
    record: Record,
    signals: Signals,
    pid: u32,
    pidfd: OwnedFd,
    periodic: Periodic,
}

impl Adopted {
    fn adopt(common: &Common, args: &Adopt) -> Result<Self> {
        let store = jobs::open_store(common.store.as_deref())?;
        let target = jobs::target(&store, &args.pid)?;
        if let Some(running) = target.running.as_ref().filter(|r| jobs::is_supervised(r)) {
            let what = format!("process {} is that of job {} already", running.pid, target.job);
            return Err(Failure::usage(what)
                .hint(format!("stillpoint checkpoint {} takes a checkpoint of it", target.job)));
        }
        let pid = target.pid;
        let ended = || Failure::usage(format!("process {pid} ended"));
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(ended)?;
        let pidfd = pidfd_open(id, PidfdFlags::empty()).map_err(|_| ended())?;
        check(pid)?;
        // It may be a job whose supervisor was killed.
        let is_orphan = target.running.is_some();
        let before = store.terms(&target.job).ok().flatten().filter(|_| is_orphan);
        let inherited = target.running.map(|orphan| forget(&store, &target.job, orphan)).transpose()?;
        let is_same = args.name.as_ref().is_none_or(|name| *name == target.job);
        let name = args.name.clone().unwrap_or(target.job);
        let claim = jobs::claim(&store, &name)?;
        let signals = Signals::take()?;
        let command = Proc::process(pid)?.cmdline()?.into_iter().map(Bytes).collect();
        let running = jobs::running_record(pid, command, None, &args.periodic)?;
        let running = Running { adopted: true, inherited: inherited.unwrap_or_default(), ..running };
        // What was saved before by way of the store is of this program, too, if it was this job.
        let terms = jobs::terms(&store, &name, &args.periodic);
        let terms = before.filter(|_| is_same).map_or(terms.clone(), |before| {
            // Those who page it have not ended with its supervisor.
            Terms { memory_limit: before.memory_limit, ..jobs::carried(before, terms) }
        });
        let begun = chronicle::started(&running);
        let written = store.set_terms(claim.job(), &terms);
        let record = Record::write(store, claim, running)?.with_control().with_event(begun).keeps(written);
        Ok(Self { record, signals, pid, pidfd, periodic: args.periodic.clone() })
    }

    fn answer(&self) -> Answer {
        let (job, pid) = (self.record.job(), self.pid);
        Answer {
            text: format!("process {pid} is job {job} now"),
            json: json!({
                "job": job,
                "pid": pid,
                "supervisor_pid": std::process::id(),
                "store": self.record.store().path().to_string_lossy(),
                "notes": self.record.notes,
            }),
            notes: self.record.notes.clone(),
        }
    }

    /// Takes its checkpoints until it ends, or until we are told to let go of it.
    fn serve(mut self) -> Result<ExitCode> {
        let work = Work {
            store: self.record.store().clone(),
            job: self.record.job().to_string(),
            pid: self.pid,
            pidfd: self.pidfd,
            inherited: self.record.inherited(),
            periodic: self.periodic,
            listener: self.record.take_control(),
            heeds_signals: true,
        };
        let over = work.serve(&self.signals);
        self.record.leave();
        if let Ok(has_ended) = over {
            // How, only its parent hears.
            let end = if has_ended { What::End { code: None } } else { What::Release };
            chronicle::tell(self.record.store(), self.record.job(), end);
        }
        drop(self.record);
        over.map(|_| ExitCode::SUCCESS)
    }
}

/// A job whose supervisor was killed can be adopted like any other process. Returns what it was started with.
fn forget(store: &Store, job: &str, orphan: Running) -> Result<Vec<(u32, Bytes)>> {
    let _claim = store.claim(job).map_err(jobs::store_failure)?;
    store.clear_running(job).and_then(|()| store.clear_terms(job)).map_err(jobs::store_failure)?;
    Ok(orphan.inherited)
}

/// Whether it can be the target of a checkpoint at all.
fn check(pid: u32) -> Result<()> {
    use stillpoint_capture::Error;
    let program = |pid| Proc::process(pid).and_then(|p| p.link("exe"));
    if program(pid).ok() == program(std::process::id()).ok() {
        return Err(Failure::usage(format!("process {pid} is stillpoint itself")));
    }
    match stillpoint_capture::attributes::target::find(pid) {
        Ok(_) => Ok(()),
        Err(e @ (Error::Target(_) | Error::Busy(_))) => Err(Failure::usage(e)),
        Err(e) => Err(Failure::failed(format!("adopt {pid}: {e}"))),
    }
}
