//! The terminal of a restored program: it gets the settings that the program left, and gets its own back.

use crate::output::note;
use rustix::fd::OwnedFd;
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
    /// Gives standard input's terminal the settings of the program. Its window keeps its size: that is what the user
    /// looks at.
    pub fn apply(recorded: &Terminal) -> Option<Self> {
        let stdin = std::io::stdin();
        if !rustix::termios::isatty(&stdin) {
            return None;
        }
        let terminal = rustix::io::fcntl_dupfd_cloexec(&stdin, 3).ok()?;
        let before = tty::settings(&terminal).ok()?;
        if let Err(e) = tty::set_settings(&terminal, &recorded.termios.0) {
            note(&format!("stillpoint: the terminal keeps its settings: {e}"));
            return None;
        }
        Some(Self { terminal, before })
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        // Fails only where the terminal has hung up.
        let _ = tty::set_settings(&self.terminal, &self.before);
    }
}
