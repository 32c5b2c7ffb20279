//! `stillpoint checkpoint`: a running program is written to the store.

use crate::args::{Checkpoint, Common};
use crate::chronicle::Taking;
use crate::commands::export::files;
use crate::commands::fork::Folder;
use crate::control::client::{Asking, ask};
use crate::detach::Answer;
use crate::failure::{Failure, Result};
use crate::jobs::Target;
use crate::progress::Bar;
use crate::taken::{Asked, Ending, Taken, failure};
use crate::{jobs, output};
use serde_json::json;
use std::process::ExitCode;
use stillpoint_capture::Engine;
use stillpoint_store::Store;
use stillpoint_store::history::Why;

/// Runs the command.
pub fn run(common: &Common, args: &Checkpoint) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let target = jobs::target(&store, &args.target)?;
    let asked = Asked {
        target: args.target.clone(),
        job: args.name.clone().unwrap_or_else(|| target.job.clone()),
        label: args.label.clone(),
        engine: args.engine,
        buffer: args.buffer,
        full: args.full,
        kill: args.kill,
    };
    if args.check {
        return check(common, &store, &target, &asked);
    }
    let mut taken = {
        let bar = Bar::new("checkpoint", common.json);
        take(&store, &target, &asked, &bar)?
    };
    if args.incremental && !taken.incremental {
        taken.notes.push(why_complete(&target, &asked, &taken));
    }
    let portable = if args.portable { make_portable(&store, &asked.job, &mut taken) } else { Ok(()) };
    if let Some(keep) = args.keep {
        // The checkpoint is there, whatever becomes of the others.
        if let Err(e) = super::remove::roll(&store, &asked.job, keep) {
            taken.notes.push(format!("older checkpoints could not be removed: {}", e.what));
        }
    }
    taken.notes.splice(0..0, target.note);
    if args.verbose && !common.json {
        taken.story.iter().for_each(|line| output::note(line));
    }
    taken.answer(&asked, target.pid, store.path()).tell(common.json, false)?;
    portable.map(|()| ExitCode::SUCCESS)
}

/// Tells whether it could be taken and restored, by ourselves, whoever sees to the job.
fn check(common: &Common, store: &Store, target: &Target, asked: &Asked) -> Result<ExitCode> {
    let bar = Bar::new("check", common.json);
    let ending = Ending { progress: &bar, store, job: &target.job };
    // What is begun in it is never committed.
    let folder = Folder::make(store, 0, 1)?;
    let beside = jobs::open_store(Some(folder.path()))?;
    let looked = stillpoint_capture::check(target.pid, &beside, &asked.options(target.inherited()), &ending);
    let pause = looked.map_err(|e| failure(e, "checkpoint", &asked.target))?;
    let text =
        format!("{} can be checkpointed, and restored by you  pause {}", asked.target, output::short(pause));
    let json = json!({ "pid": target.pid, "job": asked.job, "ok": true, "pause_ms": output::ms(pause) });
    Answer { text, notes: Vec::new(), json }.tell(common.json, false)?;
    Ok(ExitCode::SUCCESS)
}

/// Keeps copies of the program's files with a checkpoint that is there, whatever becomes of them.
fn make_portable(store: &Store, job: &str, taken: &mut Taken) -> Result<()> {
    let (count, bytes) = stillpoint_archive::make_portable(store, job, taken.id()).map_err(|e| match e {
        stillpoint_archive::Error::Store(e) => jobs::store_failure(e),
        e => Failure::refused(format!("{job}@{} is there, but without its files:\n{e}", taken.id())),
    })?;
    taken.notes.push(format!("the store has its {}, {}", files(count), output::bytes(bytes)));
    Ok(())
}

/// Takes the checkpoint: through the job's supervisor, which knows what changed since the last one, else by ourselves.
fn take(store: &Store, target: &Target, asked: &Asked, bar: &Bar) -> Result<Taken> {
    let asking = match &target.running {
        Some(_) => ask(store, &target.job, asked, bar),
        None => Asking::Nobody,
    };
    let note = match asking {
        Asking::Answered(outcome) => return *outcome,
        Asking::Nobody => None,
        Asking::Deaf(note) => Some(note),
    };
    let inherited = target.inherited();
    let taking = Taking::begin(Why::Asked, None);
    let ending = Ending { progress: bar, store, job: &target.job };
    let report = stillpoint_capture::checkpoint(target.pid, store, &asked.options(inherited), &ending);
    taking.note(store, asked, &report);
    let _ = store.thin_history(&asked.job);
    let mut taken = Taken::from(report.map_err(|e| failure(e, "checkpoint", &asked.target))?);
    taken.notes.extend(note);
    Ok(taken)
}

/// Why a checkpoint that should be incremental is not.
fn why_complete(target: &Target, asked: &Asked, taken: &Taken) -> String {
    let why = match &target.running {
        // Only this one goes by what was written.
        _ if taken.engine() != Engine::Precopy.name() => {
            format!("the engine {} saves everything", taken.engine())
        }
        None => format!(
            "nobody follows what process {} writes (stillpoint adopt {0} makes it a job whose supervisor does)",
            target.pid
        ),
        Some(running) if !jobs::is_supervised(running) => format!(
            "the supervisor of job {} was killed (stillpoint adopt {} gives it another)",
            target.job, target.pid
        ),
        Some(_) => format!(
            "there is no checkpoint of job {} since which its supervisor has followed what it writes",
            asked.job
        ),
    };
    format!("this checkpoint is a complete one: {why}")
}
