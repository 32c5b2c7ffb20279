//! The `stillpoint` command.
#![forbid(unsafe_code)]

mod args;
mod branch;
mod checkpointer;
mod chronicle;
mod commands;
mod control;
mod detach;
mod failure;
mod jobs;
mod lives;
mod loading;
mod names;
mod output;
mod pace;
mod paging;
mod periodic;
mod progress;
mod pumps;
mod reachable;
mod report;
mod supervise;
mod taken;
mod terminal;
mod top;
mod units;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use failure::{FAILED, Failure, Result};
use std::process::ExitCode;

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        let message = panic.payload().downcast_ref::<String>().map(String::as_str);
        let message = message.or_else(|| panic.payload().downcast_ref::<&str>().copied());
        let what = message.and_then(|m| m.lines().next()).unwrap_or("no message");
        output::note(&match what.contains("failed to spawn thread") {
            true => format!(
                "stillpoint: no more threads can be made here, of which it needs a few ({what}): raise pids.max of the control group, \
                 ulimit -u or kernel.threads-max"
            ),
            false => format!("stillpoint: a mistake in stillpoint itself: {what}{place}"),
        });
        std::process::exit(FAILED.into());
    }));
    reachable::ensure();
    let outcome = match Cli::try_parse() {
        Ok(cli) => dispatch(cli),
        Err(e) => usage(&e),
    };
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            output::note(&failure.to_string());
            ExitCode::from(failure.code)
        }
    }
}

fn dispatch(cli: Cli) -> Result<ExitCode> {
    let common = &cli.common;
    // A checkpoint that is read has all of its segments open. (A program that `run` starts has the limit that we were started with.)
    if !matches!(cli.command, Command::Run(_)) {
        let _ = stillpoint_linux::descriptors::raise_descriptor_limit();
    }
    match cli.command {
        Command::Run(args) => commands::run::run(common, &args),
        Command::Checkpoint(args) => commands::checkpoint::run(common, &args),
        Command::Restore(args) => commands::restore::run(common, &args),
        Command::Resume(args) => commands::resume::run(common, &args),
        Command::Fork(args) => commands::fork::run(common, &args),
        Command::Snapshot(args) => commands::branch::snapshot(common, &args),
        Command::Rollback(args) => commands::branch::rollback(common, &args),
        Command::Snapshots(args) => commands::branch::snapshots(common, &args),
        Command::Forget(args) => commands::branch::forget(common, &args),
        Command::Adopt(args) => commands::adopt::run(common, &args),
        Command::Release(args) => commands::release::run(common, &args),
        Command::Ls(args) => commands::list::run(common, &args),
        Command::Top(args) => commands::top::run(common, &args),
        Command::Report(args) => commands::report::run(common, &args),
        Command::Show(args) => commands::show::run(common, &args),
        Command::Verify(args) => commands::verify::run(common, &args),
        Command::Export(args) => commands::export::run(common, &args),
        Command::Import(args) => commands::import::run(common, &args),
        Command::Rm(args) => commands::remove::rm(common, &args),
        Command::Prune(args) => commands::remove::prune(common, &args),
        Command::Doctor => commands::doctor::run(common),
        Command::Brancher(args) => commands::branch::keep(common, &args),
        Command::Checkpointer(args) => commands::checkpointer::run(common, &args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "stillpoint", &mut script);
            print(&script)
        }
        Command::Man => {
            let mut page = Vec::new();
            let failed = |e| Failure::failed(format!("manual page: {e}"));
            clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(failed)?;
            print(&page)
        }
    }
}

/// Help and version are answers; anything else is a mistake of the user's.
fn usage(error: &clap::Error) -> Result<ExitCode> {
    let text = error.render().to_string();
    if !error.use_stderr() {
        return print(text.as_bytes());
    }
    let text = text.trim_end();
    match text.strip_prefix("error: ") {
        Some(mistake) => Err(Failure::usage(mistake)),
        None => {
            output::note(text); // no command at all: the help, with the exit code of a mistake
            Ok(ExitCode::from(failure::USAGE))
        }
    }
}

fn print(text: &[u8]) -> Result<ExitCode> {
    output::line(String::from_utf8_lossy(text).trim_end())?;
    Ok(ExitCode::SUCCESS)
}
