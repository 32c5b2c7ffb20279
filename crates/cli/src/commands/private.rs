//! Restoring where the program's process ids are taken: in a pid namespace of its own, whose process 1 is another
//! supervisor.

use super::restore::{Again, Back, Lent, Revived, failure};
use super::run::all_complete;
use crate::checkpointer::{Beside, Errand};
use crate::control;
use crate::failure::{Failure, Result};
use crate::jobs;
use crate::loading::{Loading, Tell};
use crate::pumps::start_pumps;
use crate::supervise::{End, Foreground, GiveUp, Supervisor, bring_to_front, is_in_front, let_go};
use crate::terminal;
use rustix::fd::BorrowedFd;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Write};
use stillpoint_image::Image;
use stillpoint_image::pids::Pids;
use stillpoint_image::tree::in_front;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::supervise::{Child, Private, Signals, inherited_streams, private_namespace};
use stillpoint_restore::Stdio;

/// The outer end of the line to process 1 of the namespace.
pub struct Inside(BufReader<PipeReader>);

impl Inside {
    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        self.0.read_line(&mut line).ok().filter(|&n| n > 0)?;
        Some(line)
    }

    /// How the program ended, where process 1 could not end in the same way.
    pub fn end(mut self, seen: End) -> End {
        heard_end(seen, self.line())
    }
}

/// Splits off process 1 of a new namespace, which restores the program there and tells us about it.
pub(super) fn revive(again: &Again<'_>, signals: Signals, relay: Option<BorrowedFd<'_>>) -> Result<Revived> {
    // Process 1 lends our terminal, which we get back.
    let settings = (again.stdio == Stdio::Current).then(terminal::Settings::keep).flatten();
    let lends = again.stdio == Stdio::Current && is_in_front();
    let (reader, writer) = std::io::pipe().map_err(|e| Failure::failed(format!("pipe: {e}")))?;
    let image = &again.checkpoint.image;
    let taken = image.processes.first().map_or(0, |p| p.pid);
    if Pids::of(image).are_deepest() {
        return Err(Failure::refused(format!(
            "process id {taken} (or another one of the program) is taken, and its pid namespaces leave no room for one around them"
        )));
    }
    match private_namespace() {
        Err(e) => Err(Failure::refused(format!(
            "process id {taken} (or the id of one of its threads) is taken, and a private pid namespace is not to \
             be had: {e}"
        ))),
        Ok(Private::Inside) => {
            drop(reader);
            let lends = Lends { settings: settings.as_ref(), foreground: lends };
            let code = inside(again, signals, writer, &lends).unwrap_or(crate::failure::FAILED.into());
            std::process::exit(code)
        }
        Ok(Private::Outside(child)) => {
            drop(writer);
            let watch = GiveUp::watch(&signals, relay)?;
            let mut line = Inside(BufReader::new(reader));
            let word = line.line().unwrap_or_default();
            drop(watch);
            let word: Word = serde_json::from_str(&word).map_err(|_| {
                Failure::failed("the restore in a private pid namespace ended without a word")
            })?;
            outside(again, signals, child, line, word, settings)
        }
    }
}

/// What process 1 lends the program of the terminal, without ever taking it back.
struct Lends<'a> {
    settings: Option<&'a terminal::Settings>,
    foreground: bool,
}

impl Lends<'_> {
    fn to(&self, pid: u32, image: &Image) {
        if let (Some(settings), Some(recorded)) = (self.settings, &image.terminal) {
            settings.change(recorded);
        }
        if self.foreground {
            bring_to_front(pid, in_front(image));
        }
    }
}

/// What process 1 tells.
#[derive(Serialize, Deserialize)]
enum Word {
    Back(Back),
    Failed { code: u8, what: String, hint: Option<String> },
}

impl Word {
    fn say(&self, mut line: impl Write) {
        let text = serde_json::to_string(self).unwrap_or_default();
        let _ = writeln!(line, "{text}");
    }
}

fn outside(
    again: &Again<'_>,
    signals: Signals,
    child: Child,
    line: Inside,
    word: Word,
    settings: Option<terminal::Settings>,
) -> Result<Revived> {
    let mut back = match word {
        Word::Failed { code, what, hint } => return Err(Failure { code, what, hint }),
        Word::Back(back) => back,
    };
    let inner = back.pid;
    // It may be in one of its own besides.
    let level = Proc::process(child.pid)?.status()?.ns_tgid.len().saturating_sub(1);
    let is_it =
        |pid: &u32| Proc::process(*pid).and_then(|p| p.status()).is_ok_and(|s| s.pid_at(level) == inner);
    let children = Proc::process(child.pid)?.children()?;
    back.pid = children.into_iter().find(is_it).unwrap_or(child.pid);
    back.private_pid = Some(inner);
    back.notes.push(format!(
        "process id {inner} (or the id of one of its threads) is taken: it lives in a private pid namespace"
    ));
    let foreground = (again.stdio == Stdio::Current).then(|| Foreground::of(back.pid, None)).flatten();
    Ok(Revived {
        child,
        back,
        lent: Lent { foreground, settings },
        pumps: Vec::new(),
        pager: None,
        paging: None,
        inside: Some(line),
        record: None,
        signals,
        meta: again.checkpoint.image.meta.clone(),
        job: again.job.to_string(),
        periodic: again.args.periodic.clone(),
        beside: None,
    })
}

/// Process 1: restores the program, tells the outside, and supervises it to its end. Returns its exit code.
fn inside(again: &Again<'_>, signals: Signals, line: PipeWriter, lends: &Lends<'_>) -> Result<i32> {
    let connections = &again.args.streams.connections;
    let mut inherited =
        jobs::connected(inherited_streams()?, connections, &again.checkpoint.image, again.stdio);
    let watch = GiveUp::watch(&signals, None)?;
    let restored = again.restore(&mut |pid| lends.to(pid, &again.checkpoint.image));
    drop(watch);
    let (mut r, paging) = match restored {
        Ok(restored) => restored,
        Err(e) => {
            let Failure { code, what, hint } = failure(e, again.origin);
            Word::Failed { code, what, hint }.say(&line);
            return Ok(code.into());
        }
    };
    let (mut notes, listener) = (std::mem::take(&mut r.notes), control::listen(again.store, again.job));
    let listener = listener.map_err(|e| notes.push(all_complete(&e))).ok();
    let mut back = Back::of(&r, notes);
    inherited.extend(back.pumped.iter().cloned());
    let mut loading = r.pager.take().map(|pager| (pager, None));
    match &mut loading {
        // Its figures are known when all is there.
        Some((pager, tell)) if again.quiet => {
            let line = line.try_clone().map_err(|e| Failure::failed(format!("pipe: {e}")))?;
            let coming = pager.coming.clone();
            let told: Tell = Box::new(move || {
                back.load(Some(&coming));
                Word::Back(back).say(line);
            });
            *tell = Some(told);
        }
        _ => Word::Back(back).say(&line),
    }
    let on = (again.stdio == Stdio::Current).then(|| terminal::Line::on_stderr(!again.quiet)).flatten();
    let loading = loading.map(|(pager, tell)| Loading::watch(pager, tell).on(on));
    let_go()?;
    start_pumps(r.pumps)?;
    let (store, job) = (again.store.clone(), again.job.to_string());
    let errand = Errand { store, job, pid: r.pid, inherited, periodic: again.args.periodic.clone() };
    let checkpointer = Beside::new(errand, listener);
    let supervisor = Supervisor::new(signals, r.pid, r.pidfd).with_checkpointer(Some(checkpointer));
    let supervisor = supervisor.with_loading(loading).with_paging(paging);
    Ok(last_word(supervisor.with_orphans().watch()?, line))
}

/// Process 1 cannot end by any signal: it says by which one the program ended. Returns its exit code.
pub(super) fn last_word(end: End, mut line: impl Write) -> i32 {
    match end {
        End::Exited(code) => code,
        End::Killed(signal) => {
            let _ = writeln!(line, "{KILLED}{signal}");
            128 + signal
        }
    }
}

/// How the program ended, if process 1, which ended as was seen, said so in its last line.
pub(super) fn heard_end(seen: End, line: Option<String>) -> End {
    let said = line.and_then(|line| line.trim().strip_prefix(KILLED)?.parse().ok());
    said.map_or(seen, End::Killed)
}

/// What it says then.
const KILLED: &str = "killed ";
