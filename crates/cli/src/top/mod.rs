//! The running jobs, as a table that stays up to date.

pub mod columns;
mod screen;
pub mod sight;

use crate::failure::{Failure, Result};
use crate::output::{self, now_ns};
use columns::{Column, Layout, cut, sum};
use crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};
use screen::{Happening, Line, Look, Screen, listen, size};
use sight::{Sight, State, look};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use stillpoint_linux::locks::{Flocked, flocked};
use stillpoint_linux::supervise::{Signals, die_of, stop_like};
use stillpoint_store::Store;
use unicode_width::UnicodeWidthStr;

/// Numbers of signals, named as in signal(7).
const TSTP: i32 = rustix::process::Signal::TSTP.as_raw();

/// Looks at jobs, again and again.
#[derive(Debug)]
pub struct Watch<'a> {
    store: &'a Store,
    /// These only, whether they run or not.
    only: &'a [String],
    /// Those that have been seen to run, and stay listed when they end.
    seen: BTreeSet<String>,
}

impl<'a> Watch<'a> {
    /// Of these jobs, or of all that run if none are named.
    pub fn new(store: &'a Store, only: &'a [String]) -> Self {
        Self { store, only, seen: BTreeSet::new() }
    }

    /// What is seen of them now.
    pub fn look(&mut self) -> Result<Vec<Sight>> {
        let locks = flocked().unwrap_or_default();
        let at_work = |job: &str| self.store.lock_of_writers(job).is_ok_and(|path| is_locked(&path, &locks));
        let mut sights = Vec::new();
        let all =
            if self.only.is_empty() { crate::jobs::within_reach(self.store)?.0 } else { self.only.to_vec() };
        for job in all {
            let Some(sight) = look(self.store, &job, &at_work)? else { continue };
            if sight.state.is_alive() || self.seen.contains(&job) || !self.only.is_empty() {
                self.seen.insert(job);
                sights.push(sight);
            }
        }
        Ok(sights)
    }
}

/// Whether somebody holds a file. Some file systems have other numbers for their devices than the kernel itself.
fn is_locked(path: &Path, locks: &[Flocked]) -> bool {
    let Ok(file) = path.metadata() else { return false };
    let device = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
    locks.iter().any(|lock| lock.inode == file.ino() && (lock.device == device || lock.device.0 == 0))
}

/// How the table is shown.
#[derive(Clone, Copy, Debug)]
struct View {
    by: Column,
    reversed: bool,
    /// So many rows above the window.
    above: usize,
}

/// What a key does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Done {
    Quit,
    Stop,
    Looked,
    Nothing,
}

/// Shows the jobs until somebody has seen enough.
pub fn live(watch: &mut Watch<'_>, period: Duration, signals: Signals) -> Result<()> {
    let failed = |e: std::io::Error| Failure::failed(format!("cannot use the terminal: {e}"));
    let mut sights = watch.look()?;
    let screen = Screen::take().map_err(failed)?;
    let (to, happenings) = channel();
    listen(signals, to).map_err(failed)?;
    let mut view = View { by: Column::Job, reversed: false, above: 0 };
    let mut next = Instant::now() + period;
    loop {
        let (height, width) = size();
        sights.sort_by(|a, b| view.by.compare(a, b));
        if view.reversed {
            sights.reverse();
        }
        let frame = frame(watch.store.path(), &sights, &mut view, height, width);
        if screen.show(&frame, height).is_err() {
            return Ok(()); // it has hung up
        }
        let done = match happenings.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(Happening::Typed(event)) => view.hear(&event, height),
            Ok(Happening::Signal(signal)) if signal.would_end_us() => {
                screen.pause();
                die_of(signal.signal);
            }
            Ok(Happening::Signal(signal)) if signal.signal == TSTP => Done::Stop,
            Ok(Happening::Signal(_)) => Done::Nothing, // a new size, at most
            Err(RecvTimeoutError::Timeout) => Done::Looked,
            Ok(Happening::Gone) | Err(RecvTimeoutError::Disconnected) => Done::Quit,
        };
        match done {
            Done::Quit => return Ok(()),
            Done::Stop => {
                screen.pause();
                stop_like(TSTP);
                screen.resume().map_err(failed)?;
            }
            Done::Looked => {
                sights = watch.look()?;
                next = Instant::now() + period;
            }
            Done::Nothing => {}
        }
    }
}

impl View {
    fn hear(&mut self, event: &Event, height: usize) -> Done {
        let Event::Key(key) = event else { return Done::Nothing };
        if key.kind == KeyEventKind::Release {
            return Done::Nothing;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let page = height.saturating_sub(4).max(1);
        match key.code {
            KeyCode::Char('c') if control => return Done::Quit,
            KeyCode::Char('z') if control => return Done::Stop,
            KeyCode::Char(_) if control => {}
            KeyCode::Char('q' | 'Q') | KeyCode::Esc => return Done::Quit,
            KeyCode::Char(' ') => return Done::Looked,
            KeyCode::Char('r' | 'R') => self.reversed = !self.reversed,
            KeyCode::Char(c) => {
                let by = Column::ALL.into_iter().find(|column| column.key() == Some(c.to_ascii_lowercase()));
                if let Some(by) = by {
                    *self = View { by, reversed: false, above: 0 };
                }
            }
            KeyCode::Down => self.above += 1,
            KeyCode::Up => self.above = self.above.saturating_sub(1),
            KeyCode::PageDown => self.above += page,
            KeyCode::PageUp => self.above = self.above.saturating_sub(page),
            KeyCode::Home => self.above = 0,
            KeyCode::End => self.above = usize::MAX,
            _ => {}
        }
        Done::Nothing
    }
}

/// All lines of a window. What does not fit below can be scrolled to.
fn frame(store: &Path, sights: &[Sight], view: &mut View, height: usize, width: usize) -> Vec<Line> {
    let now = now_ns();
    let layout = Layout::fit(sights, now, width);
    let mut head = vec![title(store, sights, width)];
    if height >= 8 {
        head.push(Vec::new());
    }
    let marked = |column: Column| match column == view.by {
        true => format!("{}{}", column.title(), if view.reversed { '▴' } else { '▾' }),
        false => column.title().into(),
    };
    let look = |column| if column == view.by { Look::Marked } else { Look::Bold };
    head.push(pieces(layout.row(marked), width, look));
    let mut body: Vec<Line> = Vec::new();
    for sight in sights {
        body.push(pieces(layout.row(|column| column.cell(sight, now)), width, |column| cell(sight, column)));
        if let Some(why) = &sight.why {
            body.push(vec![(of_state(sight.state), cut(&format!("  └ {why}"), width))]);
        }
    }
    if sights.is_empty() {
        body.push(vec![(
            Look::Dim,
            cut("no job runs: stillpoint run --every 10s -- COMMAND starts one", width),
        )]);
    }
    let foot = usize::from(height >= 5);
    let room = height.saturating_sub(head.len() + foot);
    view.above = view.above.min(body.len().saturating_sub(room));
    let below = body.len().saturating_sub(view.above + room);
    let mut lines = head;
    lines.extend(body.into_iter().skip(view.above).take(room));
    if foot > 0 {
        lines.resize(height - 1, Vec::new());
        let columns: Vec<Column> = Column::of(sights).collect();
        lines.push(vec![(Look::Dim, keys(&columns, view.above, below, width))]);
    }
    lines
}

/// Name, sum, store and time, as far as they fit.
fn title(store: &Path, sights: &[Sight], width: usize) -> Line {
    let time = output::utc(now_ns());
    let time = time.get(11..19).unwrap_or_default();
    let left = format!("stillpoint  {}", sum(sights));
    let room = width.saturating_sub(left.width());
    let (place, clock) = (store.display().to_string(), format!("{time} UTC"));
    let right = match room {
        _ if place.width() + clock.width() + 5 <= room => format!("{place}   {clock}"),
        _ if clock.width() + 2 <= room => clock,
        _ => return vec![(Look::Bold, cut(&left, width))],
    };
    let gap = " ".repeat(room - right.width());
    vec![(Look::Bold, left), (Look::Plain, gap), (Look::Dim, right)]
}

/// The keys there are for these columns.
fn keys(columns: &[Column], above: usize, below: usize, width: usize) -> String {
    let keys = || columns.iter().filter_map(|column| Some((column.key()?, column.title().to_lowercase())));
    let sorting = keys().map(|(key, title)| format!("{key} {title}")).collect::<Vec<_>>().join("  ");
    let briefly = keys().map(|(key, _)| key.to_string()).collect::<Vec<_>>().join(" ");
    let more = match (above, below) {
        (0, 0) => String::new(),
        (_, 0) => format!("↑ {above} above   "),
        (0, _) => format!("↓ {below} below   "),
        _ => format!("↑ {above} above  ↓ {below} below   "),
    };
    let long = format!("{more}q quit   sort by: {sorting}   r reverse");
    let short = format!("{more}q quit   sort: {briefly}   r reverse");
    match width {
        _ if long.width() <= width => long,
        _ if short.width() <= width => short,
        _ => cut(&format!("{more}q quit"), width),
    }
}

fn pieces(row: Vec<(Column, String)>, width: usize, look: impl Fn(Column) -> Look) -> Line {
    let mut left = width;
    let piece = |(column, text): (Column, String)| {
        let text = cut(&text, left);
        left -= text.width();
        (look(column), text)
    };
    row.into_iter().map(piece).collect()
}

fn cell(sight: &Sight, column: Column) -> Look {
    match column {
        _ if !sight.state.is_alive() && column != Column::State => Look::Dim,
        Column::State => of_state(sight.state),
        Column::Job => Look::Bold,
        Column::Command => Look::Dim,
        _ => Look::Plain,
    }
}

fn of_state(state: State) -> Look {
    match state {
        State::Failing | State::Crashed => Look::Bad,
        State::Alone | State::Stopped => Look::Odd,
        State::Checkpointing => Look::Busy,
        State::Running => Look::Plain,
        State::Ended => Look::Dim,
    }
}

#[cfg(test)]
mod tests {
    use super::columns::tests::sight;
    use super::*;

    fn text(line: &Line) -> String {
        line.iter().map(|(_, text)| text.as_str()).collect()
    }

    #[test]
    fn frames_fit_windows_of_any_size() {
        let mut sights: Vec<Sight> = (0..30).map(|i| sight(&format!("job-{i:02}"), State::Running)).collect();
        sights[3].state = State::Failing;
        sights[3].why = Some("no space left on device\nat all ".repeat(20));
        for height in 1..40 {
            for width in 1..140 {
                let mut view = View { by: Column::Job, reversed: false, above: width % 40 };
                let lines = frame(Path::new("/var/lib/stillpoint"), &sights, &mut view, height, width);
                assert!(lines.len() <= height.max(2), "{height}×{width}: {} lines", lines.len());
                assert!(lines.iter().all(|line| text(line).width() <= width), "{height}×{width}");
            }
        }
    }

    #[test]
    fn the_end_can_be_scrolled_to() {
        let sights: Vec<Sight> = (0..30).map(|i| sight(&format!("job-{i:02}"), State::Running)).collect();
        let mut view = View { by: Column::Job, reversed: false, above: 0 };
        let shown = |view: &mut View| {
            let lines = frame(Path::new("/"), &sights, view, 10, 100);
            lines.iter().map(text).collect::<Vec<_>>().join("\n")
        };
        let top = shown(&mut view);
        assert!(top.contains("job-00") && !top.contains("job-29") && top.contains("24 below"), "{top}");
        view.above = usize::MAX;
        let end = shown(&mut view);
        assert!(end.contains("job-29") && end.contains("24 above"), "{end}");
    }
}
