//! The history of a job as one page: no script, nothing to be fetched. All that comes from the job is escaped by `maud`, which
//! writes nothing else as it is; how large the page becomes does not depend on how long the history is.

mod axis;
mod chart;
pub mod facts;
mod heat;

use crate::output;
use axis::{Time, Unit};
use chart::{Form, Point, chart, is_log, sign, strip};
use facts::{Facts, Kind, Mark};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use std::time::Duration;
use stillpoint_image::PAGE;
use stillpoint_store::Paged;
use stillpoint_store::history::{Saved, Why};

/// Rows of a table at most; further ones are in the history itself.
const MOST_ROWS: usize = 300;
/// Longest words of others in a table, characters.
const LONGEST: usize = 400;

/// The page.
pub fn page(facts: &Facts) -> String {
    let time = Time::of(&facts.runs);
    let title = format!("{} · Stillpoint", facts.job);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="generator" content=(concat!("stillpoint ", env!("CARGO_PKG_VERSION")));
                title { (title) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                main {
                    (head(facts))
                    (tiles(facts))
                    @if !facts.runs.is_empty() { (timeline(facts, &time)) }
                    @if !facts.saved.is_empty() { (charts(facts, &time)) }
                    (map(facts))
                    (checkpoints(facts))
                    (events(facts))
                    (foot(facts))
                }
            }
        }
    };
    page.into_string()
}

fn head(facts: &Facts) -> Markup {
    let is_on = facts.runs.last().is_some_and(|run| run.is_on);
    let last = facts.marks.iter().rev().find(|m| matches!(m.kind, Kind::Crash | Kind::End));
    let (class, state) = match (is_on, last) {
        (true, _) => ("ok", "running".to_string()),
        (false, Some(mark)) if mark.kind == Kind::Crash => ("bad", mark.words.clone()),
        (false, Some(mark)) => ("soft", mark.words.clone()),
        (false, None) => ("soft", "not running".into()),
    };
    let arguments: Vec<stillpoint_image::Bytes> =
        facts.command.iter().map(|a| a.clone().into_bytes().into()).collect();
    html! {
        header {
            h1 { (facts.job) " " small class=(class) { (state) } }
            @if !arguments.is_empty() { p { code { (output::command(&arguments, LONGEST)) } } }
            p { "as of " (output::utc(facts.now_ns)) ", in " code { (facts.store) } }
        }
    }
}

fn tile(value: &str, name: &str, more: &str) -> Markup {
    html! { div.tile { span { (name) } b { (value) } i { (more) } } }
}

fn tiles(facts: &Facts) -> Markup {
    let dash = || "–".to_string();
    let pause = |percent| facts.pause(percent).map_or_else(dash, output::short);
    let (checkpoints, failed) = (facts.checkpoints(), facts.count(Kind::Failed));
    let uptime = facts.uptime();
    let still = facts.stood_still();
    let share = match uptime.is_zero() {
        false => format!("stood still for {:.3} % of it", still.as_secs_f64() / uptime.as_secs_f64() * 100.0),
        true => String::new(),
    };
    let times = |n: u64| match n {
        0 => "never brought back".to_string(),
        1 => "brought back once".to_string(),
        n => format!("brought back {} times", output::count(n)),
    };
    let (crashes, backs) = (facts.count(Kind::Crash), facts.count(Kind::Back));
    let last = facts.saved.last();
    html! {
        div.tiles {
            (tile(&output::count(checkpoints), "checkpoints",
                &format!("{} kept{}", facts.kept.len(), if failed > 0 { format!(", {} failed", output::count(failed)) } else { String::new() })))
            (tile(&pause(50), "median pause", &format!("99 % up to {}", pause(99))))
            (tile(&pause(100), "longest pause", ""))
            (tile(&output::bytes(facts.written()), "written in all", &format!("{} in the store now", output::bytes(facts.stored))))
            (tile(&last.map_or_else(dash, |s| output::bytes(s.pages.saturating_mul(PAGE))), "memory",
                &last.map_or_else(String::new, |s| format!("at {}@{}", cut(&facts.job, 14), s.id))))
            (tile(&output::long(uptime.as_secs()), "running time", &share))
            @if let Some(paged) = facts.paged() {
                (tile(&output::bytes(paged.back.saturating_mul(PAGE)), "paged in",
                    &format!("{} out, stopped for {}", output::bytes(paged.out.saturating_mul(PAGE)),
                        output::short(Duration::from_nanos(paged.stopped_ns)))))
            }
            (tile(&output::count(crashes), if crashes == 1 { "crash" } else { "crashes" },
                &times(backs)))
        }
    }
}

fn timeline(facts: &Facts, time: &Time) -> Markup {
    let kinds = Kind::ALL.into_iter().filter(|kind| facts.marks.iter().any(|m| m.kind == *kind));
    html! {
        section {
            h2 { "Time line" }
            p { "When the program ran. Times are UTC; those in which it did not run are drawn short." }
            (strip(time, &facts.marks))
            p.legend { @for kind in kinds {
                span.key { svg viewBox="0 0 14 14" { (sign(7.0, 7.0, kind, "")) } (kind.words()) }
            } }
        }
    }
}

/// A drawing with its words.
fn drawing(name: &str, words: &str, points: &[Point], unit: Unit, drawn: Markup) -> Markup {
    let scale = if is_log(points, unit) { " Logarithmic scale." } else { "" };
    html! { section { h2 { (name) } p { (words) (scale) } (drawn) } }
}

fn charts(facts: &Facts, time: &Time) -> Markup {
    let of = |value: &dyn Fn(&Saved) -> Option<f64>, words: &dyn Fn(&Saved) -> String| -> Vec<Point> {
        let point = |s: &Saved| {
            let title = format!("{}@{}  {}\n{}", facts.job, s.id, output::utc(s.taken_ns), words(s));
            Some(Point { at_ns: s.taken_ns, value: value(s)?, title, is_hollow: !s.incremental })
        };
        facts.saved.iter().filter_map(point).collect()
    };
    let ns = |n: u64| output::short(Duration::from_nanos(n));
    let pauses = of(&|s| Some(s.pause_ns as f64), &|s| {
        let others =
            if s.other_stops > 0 { format!(", and {} besides", ns(s.other_stops_ns)) } else { String::new() };
        format!("stood still for {}{others}\n{}", ns(s.pause_ns), s.engine)
    });
    let written = of(&|s| Some(s.written_bytes as f64), &|s| {
        let kind = if s.incremental { "what changed" } else { "complete" };
        format!("{} written: {kind}\nin {}", output::bytes(s.written_bytes), ns(s.wall_ns))
    });
    let dirty = of(&|s| s.dirty_pages.map(|p| p.saturating_mul(PAGE) as f64), &|s| {
        let pages = s.dirty_pages.unwrap_or(0);
        format!("{} pages changed, {}", output::count(pages), output::bytes(pages.saturating_mul(PAGE)))
    });
    let (spacing, asked) = intervals(facts);
    let (paged_in, paged_out) = paging(facts);
    let marks: &[Mark] = &facts.marks;
    html! {
        (drawing("Pauses", "How long the program stood still at each checkpoint.", &pauses, Unit::Time,
            chart(time, marks, Unit::Time, Form::Line, &pauses, &[])))
        (drawing("Written", "Page data that each checkpoint added to the store; those in outline are complete ones.", &written,
            Unit::Bytes, chart(time, marks, Unit::Bytes, Form::Bars, &written, &[])))
        @if !dirty.is_empty() {
            (drawing("Changed memory", "Pages that had changed since the checkpoint before.", &dirty, Unit::Bytes,
                chart(time, marks, Unit::Bytes, Form::Line, &dirty, &[])))
        }
        @if !paged_in.is_empty() {
            (drawing("Paging", "Memory that came back a second (points), and that left (line), until each checkpoint.", &paged_in,
                Unit::Bytes, chart(time, marks, Unit::Bytes, Form::Line, &paged_in, &paged_out)))
        }
        @if !spacing.is_empty() {
            @let words = if asked.is_empty() { "Time from each checkpoint to the next." }
                else { "Time from each checkpoint to the next (points), and the interval that was in force (line)." };
            (drawing("Intervals", words, &spacing, Unit::Time,
                chart(time, marks, Unit::Time, Form::Line, &spacing, &asked)))
        }
    }
}

/// Distances of checkpoints within runs, and what they were to be.
fn intervals(facts: &Facts) -> (Vec<Point>, Vec<(u64, f64)>) {
    let run_of = |ns: u64| facts.run_of(ns);
    let within = |pair: &[Saved]| {
        let [a, b] = pair else { return None };
        // Where several are left out, their distance is not that.
        let is_next = run_of(a.taken_ns) == run_of(b.taken_ns) && b.merged.is_none();
        let span = b.taken_ns.checked_sub(a.taken_ns).filter(|_| is_next)?;
        let title =
            format!("{}@{} to {}\n{}", facts.job, a.id, b.id, output::short(Duration::from_nanos(span)));
        Some(Point { at_ns: b.taken_ns, value: span as f64, title, is_hollow: false })
    };
    let spacing = facts.saved.windows(2).filter_map(within).collect();
    let asked = facts.saved.iter().filter_map(|s| Some((s.taken_ns, s.interval_ns? as f64))).collect();
    (spacing, asked)
}

/// What came back and what left within a memory limit, bytes a second, from checkpoint to checkpoint of each run and from its begin.
fn paging(facts: &Facts) -> (Vec<Point>, Vec<(u64, f64)>) {
    let (mut back, mut out) = (Vec::new(), Vec::new());
    let mut last = (0, 0, Paged::default());
    for s in &facts.saved {
        let (Some(paged), run) = (s.paged, facts.run_of(s.taken_ns)) else { continue };
        let begun = run.checked_sub(1).map_or(s.taken_ns, |run| facts.runs[run].begin_ns);
        let (_, since, before) = if last.0 == run { last } else { (run, begun, Paged::default()) };
        last = (run, s.taken_ns, paged);
        let seconds = s.taken_ns.saturating_sub(since) as f64 / 1e9;
        if seconds <= 0.0 {
            continue;
        }
        let rate = |now: u64, before: u64| now.saturating_sub(before).saturating_mul(PAGE) as f64 / seconds;
        let (value, left) = (rate(paged.back, before.back), rate(paged.out, before.out));
        let stopped = output::short(Duration::from_nanos(paged.stopped_ns.saturating_sub(before.stopped_ns)));
        let title = format!(
            "{}@{}  {}\n{} a second came back, {} left\nstopped {} times for it, {stopped} in all",
            facts.job,
            s.id,
            output::utc(s.taken_ns),
            output::bytes(value as u64),
            output::bytes(left as u64),
            output::count(paged.stops.saturating_sub(before.stops)),
        );
        back.push(Point { at_ns: s.taken_ns, value, title, is_hollow: false });
        out.push((s.taken_ns, left));
    }
    (back, out)
}

fn map(facts: &Facts) -> Markup {
    let saved = &facts.saved[facts.lineage..];
    // Started anew and not checkpointed since: what was before is better than nothing.
    let saved = if saved.iter().all(|s| s.heat.is_empty()) { &facts.saved } else { saved };
    html! {
        @if let Some(map) = heat::map(&facts.job, saved) {
            section {
                h2 { "Memory" }
                p { "Which parts of the address space changed from checkpoint to checkpoint, low addresses on top." }
                (map)
            }
        }
    }
}

fn checkpoints(facts: &Facts) -> Markup {
    // Those with a label are of interest however old they are.
    let newest = facts.saved.len().saturating_sub(MOST_ROWS);
    let labelled = |s: &&Saved| s.label.is_some();
    let older = facts.saved[..newest].iter().rev().filter(labelled).take(MOST_ROWS);
    let rows: Vec<&Saved> = facts.saved[newest..].iter().rev().chain(older).collect();
    let more = facts.checkpoints() - rows.len() as u64;
    let ns = |n: u64| output::short(Duration::from_nanos(n));
    html! {
        section.long {
            h2 { "Checkpoints" }
            @if rows.is_empty() {
                p { "There is none yet." }
            } @else {
                p {
                    "The newest first; ● can still be restored. Times are UTC."
                    @if more > 0 { " " (output::count(more)) " older ones are not listed." }
                }
                div.scroll { table {
                    thead { tr {
                        th { "" } th { "checkpoint" } th { "taken" } th { "why" } th { "engine" } th.n { "pause" }
                        th.n { "took" } th.n { "processor" } th.n { "memory" } th.n { "changed" } th.n { "written" } th.n { "interval" }
                        th { "label" }
                    } }
                    tbody { @for s in rows { tr {
                        td.ok { @if facts.kept.contains(&s.id) { "●" } }
                        td { (cut(&facts.job, 24)) "@" (s.id) }
                        td { (clock(s.taken_ns)) }
                        td { (why(s.why)) }
                        td { (s.engine) @if s.incremental { span.soft { " +" } } }
                        td.n { (ns(s.pause_ns)) @if s.other_stops > 0 { span.soft { " + " (ns(s.other_stops_ns)) } } }
                        td.n { @if s.wall_ns > 0 { (ns(s.wall_ns)) } }
                        td.n { @if s.cpu_ns > 0 { (ns(s.cpu_ns)) } }
                        td.n { (output::bytes(s.pages.saturating_mul(PAGE))) }
                        td.n { @if let Some(pages) = s.dirty_pages { (output::bytes(pages.saturating_mul(PAGE))) } }
                        td.n { (output::bytes(s.written_bytes)) }
                        td.n { @if let Some(every) = s.interval_ns { (output::period(Duration::from_nanos(every))) } }
                        td.w { @if let Some(label) = &s.label { (cut(label, LONGEST)) } }
                    } } }
                } }
                p.soft { "precopy +: saved only what had changed since the one before. 3 ms + 1 ms: it stood still once more, besides the cut." }
            }
        }
    }
}

/// A time to be read: `2026-01-31 12:00:00`.
fn clock(at_ns: u64) -> String {
    output::utc(at_ns).replace('T', " ").replace('Z', "")
}

fn why(why: Why) -> &'static str {
    match why {
        Why::Periodic => "periodic",
        Why::Asked => "asked for",
        Why::Signal => "signal",
        Why::Unknown => "",
    }
}

fn events(facts: &Facts) -> Markup {
    let rows: Vec<&Mark> = facts.marks.iter().rev().take(MOST_ROWS).collect();
    let more = facts.marks.len() - rows.len();
    html! {
        @if !rows.is_empty() {
            section.long {
                h2 { "What else happened" }
                p { "The newest first. Times are UTC." @if more > 0 { " " (output::count(more as u64)) " older events are not listed." } }
                div.scroll { table { tbody { @for mark in rows { tr {
                    td.s { svg viewBox="0 0 14 14" { (sign(7.0, 7.0, mark.kind, mark.kind.words())) } }
                    td.s { (clock(mark.at_ns)) }
                    td.w { (cut(&mark.words, LONGEST)) }
                } } } } }
            }
        }
    }
}

fn foot(facts: &Facts) -> Markup {
    let left_out = facts.earlier.checkpoints;
    html! {
        footer {
            @if left_out > 0 {
                p {
                    "The history is long: " (output::count(left_out)) " checkpoints are in the sums and not in the drawings; "
                    "median and 99 % are of those that are."
                }
            }
            @if facts.unreadable > 0 {
                p { (output::count(facts.unreadable as u64)) " lines of the history could not be read." }
            }
            p { (concat!("stillpoint ", env!("CARGO_PKG_VERSION"))) }
        }
    }
}

/// As much of a text as there is room for.
fn cut(text: &str, longest: usize) -> String {
    match text.chars().count() > longest {
        true => text.chars().take(longest - 1).chain(['…']).collect(),
        false => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use facts::Run;
    use std::collections::BTreeSet;

    const SECOND: u64 = 1_000_000_000;

    fn facts(checkpoints: u64) -> Facts {
        let begin = 1_700_000_000 * SECOND;
        let saved = |id: u64| Saved {
            id,
            taken_ns: begin + id * SECOND,
            pause_ns: 1_000_000 + id % 7 * 100_000,
            written_bytes: 4096 * id,
            dirty_pages: (id > 1).then_some(id),
            incremental: id > 1,
            interval_ns: Some(SECOND),
            engine: "precopy".into(),
            label: id.is_multiple_of(100).then(|| "</script><blink>\"'&".into()),
            ..Saved::default()
        };
        let end_ns = begin + (checkpoints + 1) * SECOND;
        let mark = |at_ns, kind, words: &str| Mark { at_ns, kind, words: words.into() };
        Facts {
            job: "a<blink>&\"".into(),
            store: "/tmp/</style>".into(),
            command: vec!["</title><script>alert(1)</script>".into()],
            now_ns: end_ns,
            saved: (1..=checkpoints).map(saved).collect(),
            kept: BTreeSet::from([checkpoints]),
            marks: vec![mark(begin, Kind::Start, "<started>"), mark(end_ns, Kind::Crash, "]]><x>")],
            runs: vec![Run { begin_ns: begin, end_ns, is_on: false }],
            ..Facts::default()
        }
    }

    #[test]
    fn what_comes_from_the_job_is_only_text() {
        let page = page(&facts(200));
        for bad in ["<blink", "<script", "</script", "<x>", "<started>", "alert(1)</"] {
            assert!(!page.contains(bad), "{bad}");
        }
        assert_eq!(page.matches("</style>").count(), 1);
        assert_eq!(page.matches("</title>").count(), page.matches("<title>").count());
    }

    #[test]
    fn pages_have_a_size_however_long_the_history_is() {
        assert!(page(&Facts::default()).contains("There is none yet"));
        let sizes = [0, 1, 2, 300, 10_000].map(|n| page(&facts(n)).len());
        assert!(sizes[4] < 1_000_000, "{sizes:?}");
    }

    #[test]
    fn paging_is_drawn_from_run_to_run() {
        let mut facts = facts(4);
        let paged = |out, back| Some(Paged { out, back, stops: out, stopped_ns: SECOND, ..Paged::default() });
        assert!(!page(&facts).contains("Paging") && facts.paged().is_none());
        // It was brought back after the second checkpoint, and counted anew.
        let again = facts.saved[2].taken_ns - SECOND / 2;
        facts.runs[0].end_ns = again;
        facts.runs.push(Run { begin_ns: again, end_ns: facts.now_ns, is_on: true });
        let counts = [(100, 50), (300, 250), (10, 5), (30, 25)];
        facts.saved.iter_mut().zip(counts).for_each(|(s, (out, back))| s.paged = paged(out, back));
        let (back, out) = paging(&facts);
        let pages = |values: Vec<f64>| values.into_iter().map(|v| v / PAGE as f64).collect::<Vec<_>>();
        assert_eq!(pages(back.iter().map(|p| p.value).collect()), [50.0, 200.0, 10.0, 20.0]);
        assert_eq!(pages(out.iter().map(|p| p.1).collect()), [100.0, 200.0, 20.0, 20.0]);
        facts.paging = paged(40, 35);
        let sum = facts.paged().map(|p| (p.out, p.back, p.stopped_ns));
        assert_eq!(sum, Some((340, 285, 2 * SECOND)));
        assert!(page(&facts).contains("Paging") && page(&facts).contains("paged in"));
    }

    #[test]
    fn figures() {
        let facts = facts(100);
        assert_eq!(facts.pause(50), Some(Duration::from_micros(1_300)));
        assert_eq!(facts.pause(100), Some(Duration::from_micros(1_600)));
        assert_eq!(facts.written(), 4096 * 5050);
        assert_eq!(facts.uptime(), Duration::from_secs(101));
        assert_eq!(Facts::default().pause(99), None);
    }
}
