//! Values over time, drawn.

use super::axis::{LEFT, RIGHT, Scale, Time, Unit};
use super::facts::{Kind, Mark};
use maud::{Markup, html};

/// Width of a drawing.
pub const WIDTH: f64 = 1000.0;
const TOP: f64 = 12.0;
const TALL: f64 = 150.0;
const BOTTOM: f64 = TOP + TALL;
const HEIGHT: f64 = BOTTOM + 26.0;
/// Up to so many values, each is drawn by itself; of more, those that fall together are one.
const MOST: usize = 360;
/// Characters that a mark tells at most: there may be many marks, in several drawings. The table has more.
const LONGEST: usize = 160;
/// Up to so many marks there are lines across the drawings.
const MOST_LINES: usize = 60;

/// A value at a time.
#[derive(Clone, Debug)]
pub struct Point {
    /// When, nanoseconds since 1970.
    pub at_ns: u64,
    /// How much.
    pub value: f64,
    /// What there is to say about it.
    pub title: String,
    /// It is of another kind than the others.
    pub is_hollow: bool,
}

/// How values are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A point for each, joined by a line.
    Line,
    /// A bar for each.
    Bars,
}

/// Values that fall together.
struct Bucket {
    at: f64,
    low: f64,
    high: f64,
    middle: f64,
    title: String,
    is_hollow: bool,
}

/// A drawing of values over time, and a line that does not vary as fast, in steps.
pub fn chart(
    time: &Time,
    marks: &[Mark],
    unit: Unit,
    form: Form,
    points: &[Point],
    steps: &[(u64, f64)],
) -> Markup {
    let all: Vec<f64> = points.iter().map(|p| p.value).chain(steps.iter().map(|s| s.1)).collect();
    let scale = Scale::of(&all, unit);
    let y = |value: f64| BOTTOM - scale.at(value) * TALL;
    let buckets = buckets(time, unit, points);
    let is_many = buckets.len() < points.len();
    let bar = ((RIGHT - LEFT) / buckets.len().max(1) as f64 * 0.7).clamp(1.0, 14.0);
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" {
            (axes(time, &scale))
            (lines(time, marks, TOP, BOTTOM))
            @if !steps.is_empty() { path.step d=(stairs(time, steps, y)) {} }
            @if form == Form::Line { path.line d=(path(time, &buckets, y)) {} }
            @for b in &buckets {
                @let (high, low) = (y(b.high), y(b.low));
                @if form == Form::Bars {
                    rect.bar.hollow[b.is_hollow] x=(f(b.at - bar / 2.0)) y=(f(high.min(BOTTOM - 1.0))) width=(f(bar))
                        height=(f((BOTTOM - high).max(1.0))) { title { (b.title) } }
                } @else if is_many {
                    rect.span x=(f(b.at - 1.2)) y=(f(high - 1.0)) width="2.4" height=(f(low - high + 2.0)) { title { (b.title) } }
                } @else {
                    circle.dot.hollow[b.is_hollow] cx=(f(b.at)) cy=(f(y(b.middle))) r="2.6" { title { (b.title) } }
                }
            }
        }
    }
}

/// Whether a drawing of these values goes by powers of ten.
pub fn is_log(points: &[Point], unit: Unit) -> bool {
    Scale::of(&points.iter().map(|p| p.value).collect::<Vec<_>>(), unit).is_log()
}

/// What happened when: the runs as bars, with marks on them.
pub fn strip(time: &Time, marks: &[Mark]) -> Markup {
    let marks = apart(time, marks);
    html! {
        svg viewBox=(format!("0 0 {WIDTH} 62")) role="img" {
            @for (left, right) in time.runs() {
                rect.run x=(f(left)) y="20" width=(f((right - left).max(1.0))) height="12" rx="2" {}
            }
            @for (at, kind, title) in &marks { (sign(*at, 26.0, *kind, title)) }
            @for tick in time.ticks() {
                text.tick x=(f(tick.at)) y="54" text-anchor="middle" { (tick.text) }
            }
        }
    }
}

/// A mark of a kind, as it also stands in the legend.
pub fn sign(x: f64, y: f64, kind: Kind, title: &str) -> Markup {
    let shape = match kind {
        Kind::Start => format!("M{} {}v14l9 -7z", f(x - 3.0), f(y - 7.0)),
        Kind::Back => format!("M{} {}l7 12h-14z", f(x), f(y - 7.0)),
        Kind::Crash => format!("M{} {}l10 10m0 -10l-10 10", f(x - 5.0), f(y - 5.0)),
        Kind::Failed => format!("M{} {}l6 6l-6 6l-6 -6z", f(x), f(y - 6.0)),
        Kind::End => format!("M{} {}h8v8h-8z", f(x - 4.0), f(y - 4.0)),
    };
    html! { path class=(format!("sign {}", kind.class())) d=(shape) { title { (title) } } }
}

/// Marks that can be told apart; of those at one place, the gravest is seen, and all are named.
fn apart(time: &Time, marks: &[Mark]) -> Vec<(f64, Kind, String)> {
    const GRAVEST: [Kind; 5] = [Kind::Crash, Kind::Failed, Kind::Back, Kind::Start, Kind::End];
    const MOST_NAMED: usize = 6;
    let gravity = |kind| GRAVEST.iter().position(|k| *k == kind).unwrap_or(GRAVEST.len());
    let mut all: Vec<(f64, Kind, String, usize)> = Vec::new();
    for mark in marks {
        let (at, title) = (
            time.at(mark.at_ns),
            format!("{}  {}", crate::output::utc(mark.at_ns), super::cut(&mark.words, LONGEST)),
        );
        match all.last_mut().filter(|last| at - last.0 < 7.0) {
            Some((_, kind, titles, count)) => {
                *count += 1;
                match *count {
                    n if n <= MOST_NAMED => *titles += &format!("\n{title}"),
                    n if n == MOST_NAMED + 1 => *titles += "\n… and more",
                    _ => {}
                }
                if gravity(mark.kind) < gravity(*kind) {
                    *kind = mark.kind;
                }
            }
            None => all.push((at, mark.kind, title, 1)),
        }
    }
    all.into_iter().map(|(at, kind, title, _)| (at, kind, title)).collect()
}

fn axes(time: &Time, scale: &Scale) -> Markup {
    html! {
        @for (value, words) in scale.ticks() {
            @let y = BOTTOM - scale.at(value) * TALL;
            line.grid x1=(f(LEFT)) x2=(f(RIGHT)) y1=(f(y)) y2=(f(y)) {}
            text.tick x=(f(LEFT - 8.0)) y=(f(y + 4.0)) text-anchor="end" { (words) }
        }
        line.axis x1=(f(LEFT)) x2=(f(RIGHT)) y1=(f(BOTTOM)) y2=(f(BOTTOM)) {}
        @for tick in time.ticks() {
            line.axis x1=(f(tick.at)) x2=(f(tick.at)) y1=(f(BOTTOM)) y2=(f(BOTTOM + 4.0)) {}
            text.tick x=(f(tick.at)) y=(f(BOTTOM + 18.0)) text-anchor="middle" { (tick.text) }
        }
    }
}

/// What interrupts a program is seen in all drawings: gaps, crashes and failures.
fn lines(time: &Time, marks: &[Mark], top: f64, bottom: f64) -> Markup {
    let runs: Vec<(f64, f64)> = time.runs().collect();
    let is_drawn = |kind| matches!(kind, Kind::Crash | Kind::Failed | Kind::Back);
    let marks: Vec<_> = apart(time, marks).into_iter().filter(|(_, kind, _)| is_drawn(*kind)).collect();
    html! {
        @for pair in runs.windows(2) {
            rect.gap x=(f(pair[0].1)) y=(f(top)) width=(f((pair[1].0 - pair[0].1).max(0.5))) height=(f(bottom - top)) {}
        }
        @if marks.len() <= MOST_LINES {
            @for (at, kind, title) in &marks {
                line class=(format!("mark {}", kind.class())) x1=(f(*at)) x2=(f(*at)) y1=(f(top)) y2=(f(bottom)) {
                    title { (title) }
                }
            }
        }
    }
}

/// Joins values where there are more than can be told apart.
fn buckets(time: &Time, unit: Unit, points: &[Point]) -> Vec<Bucket> {
    let single = |p: &Point| Bucket {
        at: time.at(p.at_ns),
        low: p.value,
        high: p.value,
        middle: p.value,
        title: p.title.clone(),
        is_hollow: p.is_hollow,
    };
    if points.len() <= MOST {
        return points.iter().map(single).collect();
    }
    let column = |p: &Point| ((time.at(p.at_ns) - LEFT) / (RIGHT - LEFT) * MOST as f64) as usize;
    points.chunk_by(|a, b| column(a) == column(b)).map(|together| joined(time, unit, together)).collect()
}

fn joined(time: &Time, unit: Unit, points: &[Point]) -> Bucket {
    let mut values: Vec<f64> = points.iter().map(|p| p.value).collect();
    values.sort_by(f64::total_cmp);
    let (low, high, middle) = (values[0], values[values.len() - 1], values[values.len() / 2]);
    let title = match points {
        [only] => only.title.clone(),
        [first, .., last] => format!(
            "{} checkpoints, {} to {}\nleast {}, median {}, most {}",
            points.len(),
            crate::output::utc(first.at_ns),
            crate::output::utc(last.at_ns),
            unit.words(low),
            unit.words(middle),
            unit.words(high),
        ),
        [] => String::new(),
    };
    let at = time.at(points[points.len() / 2].at_ns);
    Bucket { at, low, high, middle, title, is_hollow: points.iter().all(|p| p.is_hollow) }
}

/// A line through all values of a run; there is none across a gap.
fn path(time: &Time, buckets: &[Bucket], y: impl Fn(f64) -> f64) -> String {
    let runs: Vec<(f64, f64)> = time.runs().collect();
    let run_of = |at: f64| runs.partition_point(|run| run.0 <= at + 0.01);
    let (mut path, mut before) = (String::new(), None);
    for bucket in buckets {
        let run = Some(run_of(bucket.at));
        path += &format!("{}{} {}", if run == before { "L" } else { "M" }, f(bucket.at), f(y(bucket.middle)));
        before = run;
    }
    path
}

fn stairs(time: &Time, steps: &[(u64, f64)], y: impl Fn(f64) -> f64) -> String {
    let runs: Vec<(f64, f64)> = time.runs().collect();
    let run_of = |at: f64| runs.partition_point(|run| run.0 <= at + 0.01);
    let (mut path, mut before): (String, Option<(usize, f64, f64)>) = (String::new(), None);
    for &(at_ns, value) in steps {
        let (at, height) = (time.at(at_ns), y(value));
        let run = run_of(at);
        match before {
            Some((same, from, old)) if same == run && at - from < 0.8 && (old - height).abs() < 0.5 => {
                continue;
            }
            Some((same, _, old)) if same == run && (old - height).abs() < 0.5 => {
                path += &format!("H{}", f(at))
            }
            Some((same, ..)) if same == run => path += &format!("H{}V{}", f(at), f(height)),
            _ => path += &format!("M{} {}", f(at), f(height)),
        }
        before = Some((run, at, height));
    }
    path
}

/// A place, in tenths.
pub fn f(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
}
