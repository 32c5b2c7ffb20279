//! Restoring where the program's process ids are taken, or by an ordinary user, who may not choose any: in a pid namespace of its own,
//! whose process 1 is another supervisor. That of an ordinary user belongs to a user namespace, in which he has the privileges that it takes.

use super::restore::{Again, Back, Lent, Revived, failure};
use super::run::all_complete;
use crate::checkpointer::{Beside, Errand};
use crate::control;
use crate::failure::{Failure, Result};
use crate::jobs;
use crate::loading::{Loading, Tell};
use crate::pumps::start_pumps;
use crate::supervise::{
    End, Foreground, GiveUp, Supervisor, Told, Within, bring_to_front, is_in_front, let_go,
};
use crate::terminal;
use rustix::fd::{AsFd, BorrowedFd};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::rc::Rc;
use stillpoint_image::Image;
use stillpoint_image::pids::Pids;
use stillpoint_image::tree::in_front;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::rootless;
use stillpoint_linux::supervise::{Child, Private, Signals, inherited_streams, private_namespace};
use stillpoint_restore::Stdio;

/// The outer end of the line to process 1 of the namespace.
#[derive(Debug)]
pub struct Inside {
    line: BufReader<PipeReader>,
    /// What it said of stops before anybody listened to that.
    before: Vec<Told>,
    /// What it said last, other than of stops.
    last: Option<String>,
}

impl Inside {
    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        self.line.read_line(&mut line).ok().filter(|&n| n > 0)?;
        Some(line)
    }

    /// From now on nobody waits for what it says.
    fn wait_no_more(&self) {
        let flags = rustix::fs::fcntl_getfl(self.line.get_ref());
        let _ = flags.and_then(|flags| {
            rustix::fs::fcntl_setfl(self.line.get_ref(), flags | rustix::fs::OFlags::NONBLOCK)
        });
    }

    fn word(&mut self) -> Result<Word> {
        let mut word = self.line().unwrap_or_default();
        while let Some(told) = Told::of(&word) {
            self.before.push(told);
            word = self.line().unwrap_or_default();
        }
        serde_json::from_str(&word)
            .map_err(|_| Failure::failed("the restore in a private pid namespace ended without a word"))
    }

    /// How the program ended, where process 1 could not end in the same way.
    pub fn end(&mut self, seen: End) -> End {
        let _ = self.told();
        heard_end(seen, self.last.take())
    }
}

impl Within for Inside {
    fn source(&self) -> BorrowedFd<'_> {
        self.line.get_ref().as_fd()
    }

    fn told(&mut self) -> Vec<Told> {
        let mut all = std::mem::take(&mut self.before);
        // Each line is written at once.
        while let Some(line) = self.line() {
            match Told::of(&line) {
                Some(told) => all.push(told),
                None => self.last = Some(line),
            }
        }
        all
    }
}

/// Why the program is not restored among the processes around us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// An id of one of its processes or threads is taken.
    Taken,
    /// An id of one of them is higher than they go here. (Those of a pid namespace may go higher, since Linux 6.14.)
    TooHigh,
    /// The user may not choose ids.
    Ordinary,
}

impl Why {
    fn text(self, pid: u32) -> String {
        match self {
            Why::Taken => format!("process id {pid} (or the id of one of its threads) is taken"),
            Why::TooHigh => {
                format!(
                    "process id {pid} (or another one of the program) is higher than they go here (kernel.pid_max)"
                )
            }
            Why::Ordinary => {
                "old process ids are for an ordinary user to be had in a namespace of his own alone".into()
            }
        }
    }
}

/// Splits off process 1 of a new namespace, which restores the program there and tells us about it. `begun` hears what we call the program
/// before it runs.
pub(super) fn revive(
    again: &Again<'_>,
    why: Why,
    signals: Signals,
    relay: Option<BorrowedFd<'_>>,
    begun: &mut dyn FnMut(u32),
) -> Result<Revived> {
    // Who may choose ids, and make no namespaces, has them in a user namespace, too.
    let why = if rootless::needs_users()? { Why::Ordinary } else { why };
    // Process 1 lends our terminal, which we get back.
    let settings = (again.stdio == Stdio::Current).then(terminal::Settings::keep).flatten();
    let lends = again.stdio == Stdio::Current && is_in_front();
    let pipe = || std::io::pipe().map_err(|e| Failure::failed(format!("pipe: {e}")));
    let ((reader, writer), (hear, mut go)) = (pipe()?, pipe()?);
    let image = &again.checkpoint.image;
    let taken = image.processes.first().map_or(0, |p| p.pid);
    if Pids::of(image).are_deepest() {
        let why = why.text(taken);
        return Err(Failure::refused(format!(
            "{why}, and its pid namespaces leave no room for one around them"
        )));
    }
    match private_namespace() {
        Err(e) => Err(not_to_be_had(why, taken, &e)),
        Ok(Private::Inside(settled)) => {
            drop((reader, go));
            let lends = Lends { settings: settings.as_ref(), foreground: lends };
            let settled = settled.map_err(|e| not_to_be_had(why, taken, &e));
            let code = inside(again, why, settled, signals, (writer, hear), &lends);
            std::process::exit(code.unwrap_or(crate::failure::FAILED.into()))
        }
        Ok(Private::Outside(child)) => {
            drop((writer, hear));
            let watch = GiveUp::watch(&signals, relay)?;
            let mut line = Inside { line: BufReader::new(reader), before: Vec::new(), last: None };
            let mut word = line.word();
            drop(watch);
            if let Ok(Word::Stands(inner)) = word {
                begun(seen_as(child.pid, inner)?);
                // If it is gone, it says no more.
                let _ = go.write_all(b"g");
                word = line.word();
            }
            let word = word?;
            outside(again, why, signals, child, line, word, settings)
        }
    }
}

fn not_to_be_had(why: Why, pid: u32, e: &stillpoint_linux::Error) -> Failure {
    let hint = match why {
        Why::Taken => "end who has it, or run it as root",
        Why::TooHigh => "raise kernel.pid_max",
        Why::Ordinary => "see stillpoint doctor for what stands against it, or run it as root",
    };
    let why = why.text(pid);
    Failure::refused(format!("{why}, and that is not to be had: {e}")).hint(hint)
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
    /// The program is complete under this id, and runs as soon as it is told to.
    Stands(u32),
    Back(Back),
    Failed {
        code: u8,
        what: String,
        hint: Option<String>,
    },
}

impl Word {
    fn say(&self, mut line: impl Write) {
        let text = serde_json::to_string(self).unwrap_or_default();
        let _ = writeln!(line, "{text}");
    }
}

fn outside(
    again: &Again<'_>,
    why: Why,
    signals: Signals,
    child: Child,
    line: Inside,
    word: Word,
    settings: Option<terminal::Settings>,
) -> Result<Revived> {
    let mut back = match word {
        Word::Failed { code, what, hint } => return Err(Failure { code, what, hint }),
        Word::Back(back) => back,
        Word::Stands(_) => return Err(Failure::failed("a restored program was told of twice")),
    };
    line.wait_no_more();
    let inner = back.pid;
    back.pid = seen_as(child.pid, inner)?;
    back.private_pid = Some(inner);
    back.notes.push(match why {
        Why::Taken | Why::TooHigh => format!("{}: it lives in a private pid namespace", why.text(inner)),
        Why::Ordinary => {
            format!("restored without privileges: it lives in a user and a pid namespace, as process {inner}")
        }
    });
    let foreground = (again.stdio == Stdio::Current).then(|| Foreground::of(back.pid, None)).flatten();
    Ok(Revived {
        child,
        back,
        lent: Lent { foreground, settings },
        pumps: Vec::new(),
        pager: None,
        paging: None,
        inside: Some(Rc::new(RefCell::new(line))),
        has_checkpointer: why != Why::Ordinary,
        record: None,
        signals,
        meta: again.checkpoint.image.meta.clone(),
        job: again.job.to_string(),
        periodic: again.args.periodic.clone(),
        beside: None,
    })
}

/// What we call the child of a process 1 that this is what it calls.
fn seen_as(first: u32, inner: u32) -> Result<u32> {
    // It may be in one of its own besides.
    let level = Proc::process(first)?.status()?.ns_tgid.len().saturating_sub(1);
    let is_it =
        |pid: &u32| Proc::process(*pid).and_then(|p| p.status()).is_ok_and(|s| s.pid_at(level) == inner);
    let children = Proc::process(first)?.children()?;
    Ok(children.into_iter().find(is_it).unwrap_or(first))
}

/// Process 1: restores the program, tells the outside, and supervises it to its end. Returns its exit code.
fn inside(
    again: &Again<'_>,
    why: Why,
    settled: Result<()>,
    signals: Signals,
    (line, mut hear): (PipeWriter, PipeReader),
    lends: &Lends<'_>,
) -> Result<i32> {
    let connections = &again.args.streams.connections;
    let mut inherited =
        jobs::connected(inherited_streams()?, connections, &again.checkpoint.image, again.stdio);
    let mut watch = Some(GiveUp::watch(&signals, None)?);
    let restored = settled.and_then(|()| {
        let restored = again.restore(&mut |pid| {
            Word::Stands(pid).say(&line);
            if hear.read_exact(&mut [0]).is_err() {
                // Nobody is there to supervise it: with us ends all that is in the namespace.
                std::process::exit(crate::failure::FAILED.into());
            }
            // From now on a signal is for the program, and waits until it is supervised.
            watch = None;
            lends.to(pid, &again.checkpoint.image);
        });
        restored.map_err(|e| failure(e, again.origin))
    });
    drop(watch);
    let (mut r, paging) = match restored {
        Ok(restored) => restored,
        Err(Failure { code, what, hint }) => {
            Word::Failed { code, what, hint }.say(&line);
            return Ok(code.into());
        }
    };
    let mut notes = std::mem::take(&mut r.notes);
    // Of a user namespace those outside can tell more.
    let listener = (why == Why::Taken).then(|| control::listen(again.store, again.job));
    let listener = listener.map(|listener| listener.map_err(|e| notes.push(all_complete(&e))).ok());
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
    let checkpointer = listener.map(|listener| Beside::new(errand, listener));
    let supervisor = Supervisor::new(signals, r.pid, r.pidfd).with_checkpointer(checkpointer);
    let supervisor = supervisor.with_loading(loading).with_paging(paging);
    let teller = line.try_clone().map_err(|e| Failure::failed(format!("pipe: {e}")))?;
    Ok(last_word(supervisor.with_teller(teller).with_orphans().watch()?, line))
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
