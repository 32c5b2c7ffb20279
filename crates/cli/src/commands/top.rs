//! `stillpoint top`: the running jobs, live.

use crate::args::{Common, Top};
use crate::failure::{Failure, Result};
use crate::top::columns::Column;
use crate::top::sight::Sight;
use crate::top::{Watch, live};
use crate::{jobs, output};
use rustix::termios::isatty;
use serde_json::json;
use std::process::ExitCode;
use stillpoint_linux::supervise::Signals;

/// Runs the command.
pub fn run(common: &Common, args: &Top) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let mut watch = Watch::new(&store, &args.jobs);
    let sights = watch.look()?;
    if let Some(job) = args.jobs.iter().find(|job| sights.iter().all(|s| s.job != **job)) {
        return Err(Failure::usage(format!("no job {job} in {}", store.path().display()))
            .hint("stillpoint ls lists the jobs; --store DIR names another store"));
    }
    if common.json {
        let all: Vec<_> = sights.iter().map(Sight::json).collect();
        let (at, store) = (output::utc(output::now_ns()), store.path().to_string_lossy());
        output::json(&json!({"at": at, "store": store, "jobs": all}))?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.once || !can_be_drawn_on() {
        table(&sights)?;
        return Ok(ExitCode::SUCCESS);
    }
    let signals = Signals::take()?;
    live(&mut watch, args.interval, signals)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether there is a terminal that can do more than print lines.
fn can_be_drawn_on() -> bool {
    let name = std::env::var("TERM").unwrap_or_default();
    isatty(rustix::stdio::stdout())
        && crate::terminal::controlling().is_some()
        && !matches!(&*name, "" | "dumb")
}

fn table(sights: &[Sight]) -> Result<()> {
    if sights.is_empty() {
        output::note("no job runs");
        return Ok(());
    }
    let now = output::now_ns();
    let row = |sight: &Sight| Column::ALL.iter().map(|column| column.cell(sight, now)).collect();
    let right: Vec<usize> = (0..Column::ALL.len()).filter(|&i| Column::ALL[i].is_number()).collect();
    output::line(&output::table(&Column::ALL.map(Column::title), sights.iter().map(row).collect(), &right))?;
    for sight in sights {
        if let Some(why) = &sight.why {
            output::note(&format!("{}: {} {why}", sight.job, sight.state.word()));
        }
    }
    Ok(())
}
