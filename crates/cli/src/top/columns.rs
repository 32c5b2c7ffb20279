//! The table: which columns there are, what stands in them, and which fit.

use super::sight::{Sight, State};
use crate::output;
use std::cmp::Ordering;
use std::time::Duration;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Between two columns.
const GAP: usize = 2;
/// A command line gets no less than this, or no column at all.
const SHORTEST_COMMAND: usize = 12;

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Name of the job.
    Job,
    /// How it fares.
    State,
    /// Resident memory.
    Memory,
    /// What it changes of that.
    Dirty,
    /// Most that it is to take.
    Limit,
    /// What leaves memory for that,
    Out,
    /// and what comes back.
    In,
    /// How long its last checkpoint stopped it.
    Pause,
    /// How long ago that was.
    Last,
    /// How often there is one.
    Interval,
    /// How long it is until the next.
    Next,
    /// How many there are.
    Checkpoints,
    /// What they take in the store.
    Stored,
    /// Its command line.
    Command,
}

use Column::*;

impl Column {
    /// All, from left to right.
    pub const ALL: [Column; 14] = [
        Job,
        State,
        Memory,
        Limit,
        Out,
        In,
        Dirty,
        Pause,
        Last,
        Interval,
        Next,
        Checkpoints,
        Stored,
        Command,
    ];

    /// The first to go where there is no room for all.
    const LEAST: [Column; 13] =
        [Command, Last, Interval, Stored, Checkpoints, Next, Pause, Dirty, Limit, Out, In, Memory, State];

    /// Those that tell something of these jobs: where there is no limit, nothing leaves for its sake.
    pub fn of(sights: &[Sight]) -> impl Iterator<Item = Column> {
        let is_limited = sights.iter().any(|sight| sight.limit.is_some());
        Self::ALL.into_iter().filter(move |column| is_limited || !matches!(column, Limit | Out | In))
    }

    /// What stands above it.
    pub fn title(self) -> &'static str {
        match self {
            Job => "JOB",
            State => "STATE",
            Memory => "MEMORY",
            Dirty => "DIRTY/s",
            Limit => "LIMIT",
            Out => "OUT/s",
            In => "IN/s",
            Pause => "PAUSE",
            Last => "LAST",
            Interval => "INTERVAL",
            Next => "NEXT",
            Checkpoints => "KEPT",
            Stored => "STORED",
            Command => "COMMAND",
        }
    }

    /// The key that sorts by it.
    pub fn key(self) -> Option<char> {
        Some(match self {
            Job => 'n',
            State => 's',
            Memory => 'm',
            Dirty => 'd',
            Limit => 'w',
            Out => 'u',
            In => 'b',
            Pause => 'p',
            Last => 'l',
            Interval => 'i',
            Next => 't',
            Checkpoints => 'k',
            Stored => 'o',
            Command => return None,
        })
    }

    /// Whether numbers stand in it.
    pub fn is_number(self) -> bool {
        !matches!(self, Job | State | Command)
    }

    /// What stands in it.
    pub fn cell(self, sight: &Sight, now_ns: u64) -> String {
        let dash = || "-".to_string();
        let since = |at: u64| Duration::from_nanos(now_ns.saturating_sub(at));
        match self {
            Job => sight.job.clone(),
            State => sight.state.word().into(),
            Memory => sight.memory.map_or_else(dash, output::bytes),
            Dirty => sight.dirty.map_or_else(dash, |rate| output::bytes(rate as u64)),
            Limit => sight.limit.map_or_else(dash, output::bytes),
            Out => sight.paged.map_or_else(dash, |(out, _)| output::bytes(out)),
            In => sight.paged.map_or_else(dash, |(_, back)| output::bytes(back)),
            Pause => sight.last.as_ref().map_or_else(dash, |last| output::short(last.pause)),
            Last => {
                sight.last.as_ref().map_or_else(dash, |last| output::long(since(last.taken_ns).as_secs()))
            }
            Interval => sight.interval.map_or_else(dash, output::period),
            Next => match sight.next_ns.map(|at| Duration::from_nanos(at.saturating_sub(now_ns))) {
                None => dash(),
                Some(left) if sight.interval < Some(Duration::from_secs(1)) => output::short(left),
                Some(left) => output::long(left.as_secs_f64().ceil() as u64),
            },
            Checkpoints => output::count(sight.checkpoints as u64),
            Stored => output::bytes(sight.stored),
            Command => output::command(&sight.command, 200),
        }
    }

    /// Which of two jobs comes first: of numbers the largest, of what is in trouble all others behind it.
    pub fn compare(self, a: &Sight, b: &Sight) -> Ordering {
        let wall = |sight: &Sight| sight.last.as_ref().map(|last| last.pause);
        let last = |sight: &Sight| sight.last.as_ref().map(|last| last.taken_ns);
        let out = |sight: &Sight| sight.paged.map(|(out, _)| out);
        let back = |sight: &Sight| sight.paged.map(|(_, back)| back);
        let order = match self {
            Job | Command => Ordering::Equal,
            State => a.state.cmp(&b.state),
            Memory => b.memory.cmp(&a.memory),
            Dirty => b.dirty.unwrap_or(-1.0).total_cmp(&a.dirty.unwrap_or(-1.0)),
            Limit => b.limit.cmp(&a.limit),
            Out => out(b).cmp(&out(a)),
            In => back(b).cmp(&back(a)),
            Pause => wall(b).cmp(&wall(a)),
            Last => last(b).cmp(&last(a)),
            Interval => first(a.interval, b.interval),
            Next => first(a.next_ns, b.next_ns),
            Checkpoints => b.checkpoints.cmp(&a.checkpoints),
            Stored => b.stored.cmp(&a.stored),
        };
        order.then_with(|| a.job.cmp(&b.job))
    }
}

/// The smaller first, and what there is not in the end.
fn first<T: Ord>(a: Option<T>, b: Option<T>) -> Ordering {
    match (a, b) {
        (Some(a), Some(b)) => a.cmp(&b),
        (a, b) => b.is_some().cmp(&a.is_some()),
    }
}

/// Columns that fit a window, with their widths.
pub struct Layout {
    /// From left to right.
    pub columns: Vec<(Column, usize)>,
}

impl Layout {
    /// The columns for jobs in so many columns of a terminal. One more than the titles take leaves room for a mark.
    pub fn fit(sights: &[Sight], now_ns: u64, width: usize) -> Self {
        let widest = |column: Column| {
            let cells = sights.iter().map(|sight| column.cell(sight, now_ns).width()).max().unwrap_or(0);
            let title = column.title().width() + 1;
            if column == Command { SHORTEST_COMMAND.max(title) } else { cells.max(title) }
        };
        let mut columns: Vec<(Column, usize)> = Column::of(sights).map(|c| (c, widest(c))).collect();
        let all = |columns: &[(Column, usize)]| columns.iter().map(|(_, width)| width + GAP).sum::<usize>();
        for least in Column::LEAST {
            if all(&columns) <= width + GAP {
                break;
            }
            columns.retain(|(column, _)| *column != least);
        }
        let left = (width + GAP).saturating_sub(all(&columns));
        if let Some((Command, width)) = columns.last_mut() {
            *width += left;
        }
        Self { columns }
    }

    /// The cells of a row, padded.
    pub fn row(&self, text: impl Fn(Column) -> String) -> Vec<(Column, String)> {
        let last = self.columns.len().saturating_sub(1);
        let cell = |(i, &(column, width)): (usize, &(Column, usize))| {
            let mut text = cut(&text(column), width);
            let room = " ".repeat(width - text.width());
            text = if column.is_number() { room + &text } else { text + &room };
            text += if i < last { "  " } else { "" };
            (column, text)
        };
        self.columns.iter().enumerate().map(cell).collect()
    }
}

/// As much of a text as fits; whatever would move the cursor is left out.
pub fn cut(text: &str, width: usize) -> String {
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let plain: String = plain.collect();
    if plain.width() <= width {
        return plain;
    }
    let (mut cut, mut used) = (String::new(), 0);
    for c in plain.chars() {
        used += c.width().unwrap_or(0);
        if used + 1 > width {
            break;
        }
        cut.push(c);
    }
    if width > 0 { cut + "…" } else { cut }
}

/// Words for the state of all.
pub fn sum(sights: &[Sight]) -> String {
    let count = |is: fn(&Sight) -> bool| sights.iter().filter(|s| is(s)).count();
    let jobs = count(|s| s.state.is_alive());
    let failing = count(|s| s.state == State::Failing);
    let failing = if failing > 0 { format!(", {failing} failing") } else { String::new() };
    format!("{jobs} {}{failing}", if jobs == 1 { "job runs" } else { "jobs run" })
}

#[cfg(test)]
pub mod tests {
    use super::super::sight::Last;
    use super::*;

    /// A job as it may be.
    pub fn sight(job: &str, state: State) -> Sight {
        Sight {
            job: job.into(),
            pid: Some(4711),
            state,
            why: None,
            memory: Some(1 << 30),
            processes: 1,
            dirty: Some(1e6),
            limit: Some(1 << 30),
            paged: Some((3 << 20, 2 << 20)),
            last: Some(Last {
                id: 3,
                taken_ns: 1,
                pause: Duration::from_micros(800),
                wall: Duration::ZERO,
                written: 4096,
            }),
            interval: Some(Duration::from_secs(10)),
            next_ns: Some(5_000_000_000),
            checkpoints: 5,
            stored: 3 << 30,
            command: vec![b"./simulate".to_vec().into(), b"input.dat".to_vec().into()],
        }
    }

    #[test]
    fn rows_fit_windows_of_any_size() {
        let wide = "語".repeat(40);
        let sights = [sight("sim", State::Running), sight(&wide, State::Checkpointing)];
        for width in 1..200 {
            let layout = Layout::fit(&sights, 0, width);
            let row = layout.row(|column| column.cell(&sights[0], 0));
            let text: String = row.iter().map(|(_, text)| text.as_str()).collect();
            assert!(text.width() <= width.max(wide.width()), "{width}: {text:?}");
            assert_eq!(row[0].0, Column::Job);
        }
        let all = Layout::fit(&sights[..1], 0, 200);
        assert_eq!(all.columns.len(), Column::ALL.len());
        assert_eq!(Layout::fit(&sights[..1], 0, 5).columns.len(), 1);
    }

    #[test]
    fn what_is_paged_has_columns_where_there_is_a_limit() {
        let titles = |sights: &[Sight]| {
            let layout = Layout::fit(sights, 0, 200);
            layout.columns.iter().map(|(column, _)| column.title()).collect::<Vec<_>>()
        };
        let paged = ["LIMIT", "OUT/s", "IN/s"];
        let limited = sight("a", State::Running);
        let free = Sight { limit: None, paged: None, ..sight("b", State::Running) };
        assert!(paged.iter().all(|title| titles(&[free.clone(), limited.clone()]).contains(title)));
        assert!(!paged.iter().any(|title| titles(std::slice::from_ref(&free)).contains(title)));
        let cells = |sight: &Sight| [Limit, Out, In].map(|column| column.cell(sight, 0));
        assert_eq!(cells(&limited), ["1.0 GiB", "3.0 MiB", "2.0 MiB"]);
        assert_eq!(cells(&free), ["-", "-", "-"]);
    }

    #[test]
    fn what_is_cut_is_marked_and_moves_no_cursor() {
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abcd", 3), "ab…");
        assert_eq!(cut("語語", 3), "語…");
        assert_eq!(cut("a\x1b[2Jb\n", 20), "a [2Jb ");
        assert_eq!(cut("abc", 0), "");
    }

    #[test]
    fn trouble_and_large_numbers_come_first() {
        let mut all = [sight("b", State::Running), sight("a", State::Running), sight("c", State::Failing)];
        all[0].memory = Some(5 << 30);
        all[1].interval = None;
        let order = |all: &[Sight], by: Column| {
            let mut sorted: Vec<&Sight> = all.iter().collect();
            sorted.sort_by(|a, b| by.compare(a, b));
            sorted.iter().map(|s| s.job.as_str()).collect::<String>()
        };
        assert_eq!(order(&all, Column::Job), "abc");
        assert_eq!(order(&all, Column::State), "cab");
        assert_eq!(order(&all, Column::Memory), "bac");
        assert_eq!(order(&all, Column::Interval), "bca");
    }
}
