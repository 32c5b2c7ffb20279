//! `stillpoint checkpoint`: a running program is written to the store.

use crate::args::{Checkpoint, Common, EngineName};
use crate::detach::Answer;
use crate::failure::{Failure, Result};
use crate::progress::Bar;
use crate::{jobs, output};
use serde_json::json;
use std::process::ExitCode;
use stillpoint_capture::{Engine, Error, Options, Report, checkpoint};
use stillpoint_store::Store;

/// Runs the command.
pub fn run(common: &Common, args: &Checkpoint) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let target = jobs::target(&store, &args.target)?;
    let engine = match args.engine {
        EngineName::Auto => Engine::Auto,
        EngineName::Precopy => Engine::Precopy,
        EngineName::Fork => Engine::Fork,
        EngineName::Wp => Engine::Wp,
        EngineName::Stop => Engine::Stop,
    };
    let job = args.name.clone().unwrap_or(target.job);
    let options = Options {
        job,
        label: args.label.clone(),
        engine,
        buffer: 16 << 20,
        full: false,
        kill: args.kill,
        inherited: target.inherited,
    };
    let report = {
        let bar = Bar::new("checkpoint", common.json);
        checkpoint(target.pid, &store, &options, &bar)
    };
    let mut report = report.map_err(|e| failure(e, &args.target))?;
    if std::env::var_os("STILLPOINT_STORY").is_some() {
        report.story.iter().for_each(|line| crate::output::note(line));
        crate::output::note(&format!("{:?}", report.other_pauses));
    }
    report.notes.splice(0..0, target.note);
    answer(&report, args, &store, target.pid).tell(common.json, false)?;
    Ok(ExitCode::SUCCESS)
}

fn failure(error: Error, target: &str) -> Failure {
    match error {
        Error::Refused(refusals) => {
            let list = stillpoint_capture::list(&refusals);
            Failure::refused(format!("cannot checkpoint {target}, which runs on unharmed:\n{list}"))
        }
        Error::Target(what) => Failure::usage(what),
        Error::Store(e) => jobs::store_failure(e).within(&format!("checkpoint {target}")),
        Error::Kernel(e) => Failure::from(e).within(&format!("checkpoint {target}")),
        Error::Failed(what) | Error::Lost(what) => {
            Failure::failed(what).within(&format!("checkpoint {target}"))
        }
    }
}

fn answer(report: &Report, args: &Checkpoint, store: &Store, pid: u32) -> Answer {
    let Report { job, id, bytes, pages, .. } = report;
    let text = format!(
        "{job}@{id}  {} in {} pages  pause {}  {}",
        output::bytes(*bytes),
        output::count(*pages),
        output::short(report.pause),
        output::short(report.wall),
    );
    let json = json!({
        "job": job,
        "id": id,
        "pid": pid,
        "bytes": bytes,
        "pages": pages,
        "written_bytes": report.written_bytes,
        "pause_ms": output::ms(report.pause),
        "wall_ms": output::ms(report.wall),
        "engine": report.engine,
        "label": args.label,
        "killed": args.kill,
        "store": store.path().to_string_lossy(),
        "notes": report.notes,
    });
    Answer { text, json, notes: report.notes.clone() }
}
