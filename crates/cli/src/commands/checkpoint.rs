//! `stillpoint checkpoint`: a running program is written to the store.

use crate::args::{Checkpoint, Common};
use crate::control::client::{Asking, ask};
use crate::failure::Result;
use crate::jobs::Target;
use crate::progress::Bar;
use crate::taken::{Asked, Taken, failure};
use crate::{jobs, output};
use std::process::ExitCode;
use stillpoint_capture::Engine;
use stillpoint_store::Store;

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
    let mut taken = {
        let bar = Bar::new("checkpoint", common.json);
        take(&store, &target, &asked, &bar)?
    };
    if args.incremental && !taken.incremental {
        taken.notes.push(why_complete(&target, &asked, &taken));
    }
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
    Ok(ExitCode::SUCCESS)
}

/// Takes the checkpoint: through the job's supervisor, which knows what changed since the last one, else by ourselves.
fn take(store: &Store, target: &Target, asked: &Asked, bar: &Bar) -> Result<Taken> {
    let asking = match &target.running {
        Some(_) => ask(store, &target.job, asked, bar),
        None => Asking::Nobody,
    };
    let note = match asking {
        Asking::Answered(outcome) => return outcome,
        Asking::Nobody => None,
        Asking::Deaf(note) => Some(note),
    };
    let inherited = target.inherited();
    let report = stillpoint_capture::checkpoint(target.pid, store, &asked.options(inherited), bar);
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
