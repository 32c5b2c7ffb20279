//! The terminal: all of it is ours until we leave it as it was, whatever makes us leave.

use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::event::{Event, read};
use crossterm::style::{Attribute, Color, Print, ResetColor, SetAttribute, SetForegroundColor};
use crossterm::terminal::{
    BeginSynchronizedUpdate, Clear, ClearType, EndSynchronizedUpdate, EnterAlternateScreen,
    LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use crossterm::{execute, queue};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{Result, Write, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use stillpoint_linux::supervise::{Received, Signals};

/// Whether the terminal is ours just now.
static OURS: AtomicBool = AtomicBool::new(false);

/// How a piece of text looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// As all text.
    Plain,
    /// A heading.
    Bold,
    /// A heading of the column that is sorted by.
    Marked,
    /// Of no importance.
    Dim,
    /// All is well, and something goes on.
    Busy,
    /// Somebody should know.
    Odd,
    /// Somebody should do something.
    Bad,
}

/// A line: pieces of text from left to right, no wider than the window.
pub type Line = Vec<(Look, String)>;

/// Something that happens while the table is shown.
#[derive(Debug)]
pub enum Happening {
    /// A key, or the like.
    Typed(Event),
    /// A signal.
    Signal(Received),
    /// There will be no more keys: the terminal is gone.
    Gone,
}

/// The terminal while it is ours.
#[derive(Debug)]
pub struct Screen(());

impl Screen {
    /// Takes it. A panic gives it back before it tells what happened.
    pub fn take() -> Result<Self> {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            tell(panic);
        }));
        let screen = Screen(());
        screen.resume()?;
        Ok(screen)
    }

    /// Takes it again.
    pub fn resume(&self) -> Result<()> {
        enable_raw_mode()?;
        OURS.store(true, Ordering::SeqCst);
        execute!(stdout(), EnterAlternateScreen, Hide)
    }

    /// Gives it back for a while, or for good.
    pub fn pause(&self) {
        give_back();
    }

    /// Shows lines in place of those before. They are written in one piece over each other, never wiped first: nothing flickers.
    pub fn show(&self, lines: &[Line], height: usize) -> Result<()> {
        let mut frame = Vec::new();
        queue!(frame, BeginSynchronizedUpdate)?;
        for (row, line) in lines.iter().take(height).enumerate() {
            queue!(frame, MoveTo(0, row as u16))?;
            for (look, text) in line {
                style(&mut frame, *look)?;
                queue!(frame, Print(text), ResetColor, SetAttribute(Attribute::Reset))?;
            }
            queue!(frame, Clear(ClearType::UntilNewLine))?;
        }
        if lines.len() < height {
            queue!(frame, MoveTo(0, lines.len() as u16), Clear(ClearType::FromCursorDown))?;
        }
        queue!(frame, EndSynchronizedUpdate)?;
        let mut out = stdout().lock();
        out.write_all(&frame)?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// Leaves the terminal as it was, once.
fn give_back() {
    if OURS.swap(false, Ordering::SeqCst) {
        // It may have hung up.
        let _ = execute!(stdout(), Show, LeaveAlternateScreen);
        let _ = disable_raw_mode();
    }
}

fn style(frame: &mut Vec<u8>, look: Look) -> Result<()> {
    match look {
        Look::Plain => Ok(()),
        Look::Bold => queue!(frame, SetAttribute(Attribute::Bold)),
        Look::Marked => queue!(frame, SetAttribute(Attribute::Bold), SetAttribute(Attribute::Underlined)),
        Look::Dim => queue!(frame, SetAttribute(Attribute::Dim)),
        Look::Busy => queue!(frame, SetForegroundColor(Color::Cyan)),
        Look::Odd => queue!(frame, SetForegroundColor(Color::Yellow)),
        Look::Bad => queue!(frame, SetForegroundColor(Color::Red)),
    }
}

/// Rows and columns of the window; those of a common one where it does not tell.
pub fn size() -> (usize, usize) {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout());
    match size {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row.into(), size.ws_col.into()),
        _ => (24, 80),
    }
}

/// Tells of keys and signals, from threads that end with the process.
pub fn listen(signals: Signals, to: Sender<Happening>) -> Result<()> {
    let typed = to.clone();
    let keys = move || {
        while let Ok(event) = read() {
            if typed.send(Happening::Typed(event)).is_err() {
                return;
            }
        }
        let _ = typed.send(Happening::Gone);
    };
    let heard = move || {
        loop {
            let _ = poll(&mut [PollFd::new(&signals, PollFlags::IN)], None);
            while let Ok(Some(signal)) = signals.next() {
                if to.send(Happening::Signal(signal)).is_err() {
                    return;
                }
            }
        }
    };
    std::thread::Builder::new().name("keys".into()).spawn(keys)?;
    std::thread::Builder::new().name("signals".into()).spawn(heard)?;
    Ok(())
}
