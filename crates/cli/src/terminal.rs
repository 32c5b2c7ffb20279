//! The terminal of a restored program: it gets the settings that the program left, and gets its own back.

use crate::output::note;
use rustix::fd::OwnedFd;
use rustix::termios::LocalModes;
use std::io::Write;
use stillpoint_image::Terminal;
use stillpoint_linux::tty;

/// Our controlling terminal.
pub fn controlling() -> Option<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    rustix::fs::open("/dev/tty", OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// A terminal with borrowed settings; they are given back on drop.
#[derive(Debug)]
pub struct Settings {
    terminal: OwnedFd,
    before: Vec<u8>,
}

impl Settings {
    /// Those of standard input's terminal as they are.
    pub fn keep() -> Option<Self> {
        let stdin = std::io::stdin();
        if !rustix::termios::isatty(&stdin) {
            return None;
        }
        let terminal = rustix::io::fcntl_dupfd_cloexec(&stdin, 3).ok()?;
        let before = tty::settings(&terminal).ok()?;
        Some(Self { terminal, before })
    }

    /// Gives the terminal the settings of the program. Its window keeps its size: that is what the user looks at.
    pub fn change(&self, recorded: &Terminal) {
        if let Err(e) = tty::set_settings(&self.terminal, &recorded.termios.0) {
            note(&format!("stillpoint: the terminal keeps its settings: {e}"));
        }
    }
}

impl Settings {
    /// Gives the terminal its own settings back.
    pub fn put_back(&self) {
        // Fails only where the terminal has hung up.
        let _ = tty::set_settings(&self.terminal, &self.before);
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        self.put_back();
    }
}

/// Standard error, where a program that runs already writes, too: a line that changes, where it is a terminal of lines on
/// which nobody draws anything else.
#[derive(Debug)]
pub struct Line {
    stderr: std::fs::File,
    changes: bool,
    is_shown: bool,
}

impl Line {
    /// On standard error, which stays open for as long as the line is needed. With `changes`, the line does.
    pub fn on_stderr(changes: bool) -> Option<Self> {
        let stderr = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 3).ok()?;
        Some(Line { stderr: stderr.into(), changes, is_shown: false })
    }

    /// Shows a text in place of the one before.
    pub fn show(&mut self, text: &str) {
        if !self.changes {
            return;
        }
        // Whoever has the terminal may draw on it, and we may be in the background.
        let modes = rustix::termios::tcgetattr(&self.stderr).map(|t| t.local_modes);
        if modes.is_ok_and(|m| m.contains(LocalModes::ICANON) && !m.contains(LocalModes::TOSTOP)) {
            self.is_shown = write!(self.stderr, "\r\x1b[K{text}").is_ok();
        }
    }

    /// Tells something that stays.
    pub fn tell(&mut self, text: &str) {
        self.clear();
        // Nobody may be left to hear it.
        let _ = writeln!(self.stderr, "{text}");
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.is_shown) {
            self.show("");
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.clear();
    }
}
