//! Going to the background: a supervisor in a session of its own does the work, while the command that the user typed
//! waits for its word and passes it on.

use crate::failure::{FAILED, Failure, Result};
use crate::output;
use crate::supervise::let_go;
use rustix::fd::{AsFd, BorrowedFd};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, PipeWriter, Write, stderr, stdout};
use std::process::ExitCode;
use stillpoint_linux::descriptors;
use stillpoint_linux::supervise::{Side, background, drop_inherited};

/// What a command tells when it worked.
#[derive(Debug)]
pub struct Answer {
    /// One line for people.
    pub text: String,
    /// One object for programs.
    pub json: Value,
    /// Remarks, for people (they are in the object as well).
    pub notes: Vec<String>,
}

impl Answer {
    /// Tells it: on standard output, or on standard error where standard output belongs to the program.
    pub fn tell(&self, as_json: bool, stdout_is_taken: bool) -> Result<()> {
        if stdout_is_taken {
            output::note(self.lines(as_json).trim_end());
            return Ok(());
        }
        output::line(&if as_json { self.json.to_string() } else { self.text.clone() })?;
        if !as_json {
            self.notes.iter().for_each(|n| output::note(&format!("  {n}")));
        }
        Ok(())
    }

    /// All of it, in lines.
    pub fn lines(&self, as_json: bool) -> String {
        match as_json {
            true => format!("{}\n", self.json),
            false => {
                [&self.text]
                    .into_iter()
                    .cloned()
                    .chain(self.notes.iter().map(|n| format!("  {n}")))
                    .collect::<Vec<_>>()
                    .join("\n")
                    + "\n"
            }
        }
    }
}

/// Brings something back in the background and supervises it there, while the command in front waits for `supervise` to tell that
/// it runs, and passes that on. `bring_back` fails when whoever listens at the descriptor that it gets has gone.
pub fn in_background<T>(
    as_json: bool,
    bring_back: impl FnOnce(BorrowedFd<'_>) -> Result<T>,
    supervise: impl FnOnce(T, Box<dyn FnOnce(Answer)>) -> Result<ExitCode>,
) -> Result<ExitCode> {
    match detach()? {
        Detached::Front(answer) => {
            answer?.tell(as_json, false)?;
            Ok(ExitCode::SUCCESS)
        }
        Detached::Back(relay) => {
            let back = match bring_back(relay.as_fd()) {
                Ok(back) => back,
                Err(failure) => {
                    let _ = relay.send(&Err(failure));
                    return Ok(ExitCode::FAILURE);
                }
            };
            let_go()?;
            let _ = std::env::set_current_dir("/"); // a supervisor must not keep a file system busy
            // Whether anybody still listens or not: it runs.
            supervise(back, Box::new(move |answer| drop(relay.send(&Ok(answer)))))
        }
    }
}

/// The way from the supervisor in the background to the command in front.
#[derive(Debug)]
pub struct Relay(PipeWriter);

impl Relay {
    /// Sends the outcome; the command in front then returns. `Err` means that it has gone.
    pub fn send(mut self, outcome: &Result<Answer>) -> std::io::Result<()> {
        let message = match outcome {
            Ok(a) => json!({"code": 0, "text": a.text, "json": a.json, "notes": a.notes}),
            Err(f) => json!({"code": f.code, "what": f.what, "hint": f.hint}),
        };
        writeln!(self.0, "{message}")
    }
}

impl AsFd for Relay {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Which of the two processes [`detach`] returned in.
#[derive(Debug)]
pub enum Detached {
    /// The command in front, with the outcome.
    Front(Result<Answer>),
    /// The supervisor in the background.
    Back(Relay),
}

/// Splits in two.
pub fn detach() -> Result<Detached> {
    let (reader, writer) = std::io::pipe().map_err(|e| Failure::failed(format!("pipe: {e}")))?;
    match background()? {
        Side::Back => Ok(Detached::Back(Relay(writer))),
        Side::Front => {
            drop(writer);
            let mut line = String::new();
            // A line, not the end: nothing that lives on can hold us up by keeping the pipe open.
            let _ = BufReader::new(reader).read_line(&mut line);
            Ok(Detached::Front(outcome(&line)))
        }
    }
}

fn outcome(line: &str) -> Result<Answer> {
    let Ok(mut message) = serde_json::from_str::<Value>(line) else {
        return Err(Failure::failed("the supervisor in the background ended without a word"));
    };
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    match message["code"].as_u64() {
        Some(0) => Ok(Answer {
            text: text(&message["text"]),
            json: message["json"].take(),
            notes: message["notes"].as_array().into_iter().flatten().map(text).collect(),
        }),
        code => Err(Failure {
            code: code.and_then(|c| c.try_into().ok()).unwrap_or(FAILED),
            what: text(&message["what"]),
            hint: message["hint"].as_str().map(String::from),
        }),
    }
}

/// Where the standard streams of a detached job lead: input to `/dev/null`; output where it was redirected to a file
/// (or a device) and to `/dev/null` otherwise: a terminal will be gone, and the reader of a pipe (`$(…)`, a script)
/// would wait for the job instead of for this command. Other descriptors that were inherited (of a terminal emulator, a
/// build system, a test harness) are closed, as is the custom of daemons: they would tie the job to programs it has
/// nothing to do with. Returns the streams that lead nowhere now.
pub fn background_stdio() -> Result<Vec<&'static str>> {
    let null = descriptors::null()?;
    let failed = |e| Failure::failed(format!("dup2: {e}"));
    let mut lost = Vec::new();
    rustix::stdio::dup2_stdin(&null).map_err(failed)?;
    if !stays(stdout().as_fd()) {
        rustix::stdio::dup2_stdout(&null).map_err(failed)?;
        lost.push("standard output");
    }
    if !stays(stderr().as_fd()) {
        rustix::stdio::dup2_stderr(&null).map_err(failed)?;
        lost.push("standard error");
    }
    drop_inherited()?;
    Ok(lost)
}

/// Whether a detached job keeps this stream.
pub fn stays(stream: BorrowedFd<'_>) -> bool {
    use rustix::fs::{FileType, fstat};
    let kind = fstat(stream).map(|s| FileType::from_raw_mode(s.st_mode));
    match kind {
        Ok(FileType::RegularFile | FileType::BlockDevice) => true,
        Ok(FileType::CharacterDevice) => !rustix::termios::isatty(stream),
        _ => false,
    }
}
