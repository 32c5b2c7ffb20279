//! A terminal: what is typed goes in, what is shown comes out.

use crate::scratch::MARK;
use crate::target::alone;
use crate::turn::{self, Turn};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// A pseudo-terminal of which this process is the user.
#[derive(Debug)]
pub struct Terminal {
    master: File,
    slave: PathBuf,
    shown: Arc<Mutex<Vec<u8>>>,
    /// How often there was nobody, and nothing left to be read.
    silences: Arc<AtomicU64>,
    _turn: Arc<Turn>,
}

/// The turn of all terminals of this process.
fn turn_of_all() -> Arc<Turn> {
    static SLOT: Mutex<Weak<Turn>> = Mutex::new(Weak::new());
    let mut slot = SLOT.lock().expect("nobody panics with it");
    slot.upgrade().unwrap_or_else(|| {
        let turn = Arc::new(Turn::of(turn::TERMINALS));
        *slot = Arc::downgrade(&turn);
        turn
    })
}

impl Terminal {
    /// A new terminal without a size.
    pub fn new() -> Self {
        let _turn = turn_of_all();
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pty");
        grantpt(&master).expect("grantpt");
        unlockpt(&master).expect("unlockpt");
        let slave = ptsname(&master, Vec::new()).expect("ptsname");
        let slave = PathBuf::from(OsStr::from_bytes(slave.as_bytes()));
        let shown = Arc::new(Mutex::new(Vec::new()));
        let mut reader = File::from(master.try_clone().expect("dup"));
        let silences = Arc::new(AtomicU64::new(0));
        let (into, silent) = (shown.clone(), silences.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            loop {
                match reader.read(&mut buffer) {
                    Ok(n) if n > 0 => into.lock().expect("lock").extend(&buffer[..n]),
                    // Between two programs nobody has it open; the end of the test ends this thread, too.
                    _ => {
                        silent.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
            }
        });
        Terminal { master: File::from(master), slave, shown, silences, _turn }
    }

    /// A new terminal of so many rows and columns.
    pub fn of_size(rows: u16, columns: u16) -> Self {
        let terminal = Terminal::new();
        terminal.resize(rows, columns);
        terminal
    }

    /// Gives its window another size.
    pub fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.master, size).expect("the size of a terminal");
    }

    /// Whether lines are edited and typed keys shown, as a shell has it.
    pub fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.master).expect("the modes of a terminal").local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// Starts a command whose controlling terminal this is: a dumb one, unless the command has another word for it.
    pub fn start(&self, command: &Command, mark: &Path, directory: &Path) -> Child {
        let open = || File::options().read(true).write(true).open(&self.slave).expect("the terminal");
        let mut here = alone("--ctty");
        here.arg(command.get_program()).args(command.get_args());
        here.env("TERM", "dumb").envs(command.get_envs().filter_map(|(n, v)| Some((n, v?)))).env(MARK, mark);
        here.current_dir(directory).stdin(open()).stdout(open()).stderr(open());
        here.spawn().expect("setsid")
    }

    /// All that was ever shown.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().expect("lock")).into_owned()
    }

    /// Waits until all is shown that was said by those who have ended: nobody else has the terminal.
    #[track_caller]
    pub fn shows_all(&self, patience: Duration) {
        let before = self.silences.load(Ordering::Relaxed);
        // The first one may have begun before.
        crate::wait_for("a terminal to be left", patience, || {
            (self.silences.load(Ordering::Relaxed) > before + 1).then_some(())
        });
    }

    /// Waits until a text is shown.
    #[track_caller]
    pub fn shows(&self, text: &str, patience: Duration) {
        let until = std::time::Instant::now() + patience;
        while !self.shown().contains(text) {
            let shown = self.shown();
            assert!(std::time::Instant::now() < until, "waited in vain for {text:?}; it shows: {shown:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Types a text.
    pub fn type_keys(&self, keys: &str) {
        (&self.master).write_all(keys.as_bytes()).expect("the terminal");
    }

    /// Types a line.
    pub fn type_line(&self, line: &str) {
        self.type_keys(&format!("{line}\n"));
    }

    /// The lines of a program, without what the command itself said.
    pub fn lines(&self) -> Vec<String> {
        let ours = |l: &&str| !l.contains("stillpoint") && !l.contains("shell@");
        self.shown().lines().filter(ours).map(str::to_owned).collect()
    }
}

impl Default for Terminal {
    fn default() -> Self {
        Terminal::new()
    }
}
