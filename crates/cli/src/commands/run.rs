//! `stillpoint run`: a program becomes a job.

use crate::args::{Common, Run};
use crate::detach::{Answer, Detached, Relay, background_stdio, detach, stays};
use crate::failure::{Failure, Result};
use crate::names::job_from;
use crate::supervise::{End, Supervisor, let_go};
use crate::{jobs, output};
use rustix::fd::AsFd;
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;
use stillpoint_linux::supervise::{Child, Signals, SpawnError, spawn};
use stillpoint_store::Claim;

/// Runs the command.
pub fn run(common: &Common, args: &Run) -> Result<ExitCode> {
    if !args.detach {
        let (job, child, signals) = start(common, args)?;
        let_go(false)?;
        end_of(job, Supervisor::new(signals, child.pid, child.pidfd, true)).follow();
    }
    let stdout_is_taken = stays(std::io::stdout().as_fd());
    match detach()? {
        Detached::Front(answer) => {
            answer?.tell(common.json, stdout_is_taken)?;
            Ok(ExitCode::SUCCESS)
        }
        Detached::Back(relay) => in_background(common, args, relay),
    }
}
