//! `stillpoint snapshot`, `rollback`, `snapshots`, `forget`: a running program goes back to where it was.

use crate::args::{Brancher, Common, Rollback, Snapshot, SnapshotName, Snapshots};
use crate::branch::server::Keeper;
use crate::branch::{Answer, Ask, client};
use crate::failure::{Failure, Result};
use crate::{jobs, output};
use serde_json::json;
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use stillpoint_linux::split::close_all_but;

/// `stillpoint snapshot`
pub fn snapshot(common: &Common, args: &Snapshot) -> Result<ExitCode> {
    if args.name.as_ref().is_some_and(|name| name.parse::<u64>().is_ok() || name.is_empty()) {
        return Err(Failure::usage("--name: a number, or nothing, is no name"));
    }
    let asked = Ask::Snapshot { name: args.name.clone(), alone: args.alone };
    let (pid, answer) = ask(common, &args.target, &asked)?;
    let Answer::Taken { snapshot, pause_ms, pages, processes, .. } = answer else { return Err(strange()) };
    match common.json {
        true => output::json(&json!({
            "pid": pid, "snapshot": snapshot, "name": args.name, "pause_ms": rounded(pause_ms), "pages": pages,
            "processes": processes,
        }))?,
        false => {
            let (who, they) = those(pid, processes);
            output::line(&format!("snapshot {snapshot} of {who}: {they} stood still for {pause_ms:.2} ms"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `stillpoint rollback`
pub fn rollback(common: &Common, args: &Rollback) -> Result<ExitCode> {
    let (kill_children, files, value) = (args.kill_children, args.files, args.value);
    let asked = Ask::Rollback { snapshot: args.of.which.1.clone(), kill_children, files, value };
    let (pid, answer) = ask(common, &args.of.which.0, &asked)?;
    let Answer::Rolled { snapshot, pause_ms, pages, processes, notes, files } = answer else {
        return Err(strange());
    };
    if common.json {
        output::json(&json!({
            "pid": pid, "snapshot": snapshot, "pause_ms": rounded(pause_ms), "pages": pages,
            "processes": processes, "notes": notes, "files": files,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let ((who, they), are) = (those(pid, processes), if processes > 1 { "are" } else { "is" });
    output::line(&format!(
        "{who} {are} back at snapshot {snapshot}: {pages} pages, {they} stood still for {pause_ms:.2} ms"
    ))?;
    notes.iter().chain(files.iter().map(|file| &file.what)).for_each(|note| output::note(note));
    Ok(ExitCode::SUCCESS)
}

/// `stillpoint snapshots`
pub fn snapshots(common: &Common, args: &Snapshots) -> Result<ExitCode> {
    let (_, answer) = ask(common, &args.target, &Ask::List)?;
    let Answer::List(rows) = answer else { return Err(strange()) };
    if common.json {
        output::json(&serde_json::to_value(rows).map_err(Failure::failed)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let number = |n: Option<u64>| n.map(|n| n.to_string()).unwrap_or_default();
    let now = output::now_ns();
    let cells = rows.into_iter().map(|row| {
        let age = std::time::Duration::from_nanos(now.saturating_sub(row.taken_ns));
        let here = if row.current { "here" } else { "" };
        let age = format!("{:.1} s", age.as_secs_f64());
        vec![row.snapshot.to_string(), number(row.parent), age, here.into(), row.name.unwrap_or_default()]
    });
    output::line(&output::table(&["snapshot", "after", "age", "", "name"], cells.collect(), &[0, 1, 2]))?;
    Ok(ExitCode::SUCCESS)
}

/// `stillpoint forget`
pub fn forget(common: &Common, args: &SnapshotName) -> Result<ExitCode> {
    let (pid, answer) = ask(common, &args.which.0, &Ask::Forget { snapshot: args.which.1.clone() })?;
    let Answer::Forgotten { snapshot } = answer else { return Err(strange()) };
    match common.json {
        true => output::json(&json!({"pid": pid, "snapshot": snapshot}))?,
        false => output::line(&format!("snapshot {snapshot} of process {pid} is forgotten"))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The process that keeps snapshots.
pub fn keep(common: &Common, args: &Brancher) -> Result<ExitCode> {
    // Where it was started must not matter to it.
    let _ = rustix::process::setsid();
    let input = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3);
    let input = input.map_err(|e| Failure::failed(format!("its socket: {e}")))?;
    // Whoever started us may have had more open, which is not ours.
    close_all_but(&[0, 1, 2, input.as_raw_fd()]);
    let nowhere = stillpoint_linux::descriptors::null()?;
    rustix::stdio::dup2_stdin(nowhere).map_err(|e| Failure::failed(format!("dup2: {e}")))?;
    let store = jobs::open_store(common.store.as_deref())?;
    Keeper::new(&store, args.pid, input, args.own)?.serve(&store)?;
    Ok(ExitCode::SUCCESS)
}

fn ask(common: &Common, target: &str, asked: &Ask) -> Result<(u32, Answer)> {
    let store = jobs::open_store(common.store.as_deref())?;
    let pid = jobs::target(&store, target)?.pid;
    Ok((pid, client::ask(&store, pid, asked)?))
}

/// Whom a snapshot is of: a name for them, and a word.
fn those(pid: u32, processes: usize) -> (String, &'static str) {
    match processes {
        0 | 1 => (format!("process {pid}"), "it"),
        2 => (format!("process {pid} and its child"), "they"),
        _ => (format!("process {pid} and {} others of it", processes - 1), "they"),
    }
}

fn strange() -> Failure {
    Failure::failed("who keeps the snapshots gives a strange answer: it is of another version")
}

fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}
