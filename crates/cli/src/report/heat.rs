//! What a program changed where in its memory, checkpoint by checkpoint.

use super::axis::{LEFT, RIGHT};
use super::chart::{WIDTH, f};
use maud::{Markup, html};
use std::collections::BTreeMap;
use stillpoint_image::PAGE;
use stillpoint_store::Area;
use stillpoint_store::history::Saved;

/// Columns at most: of more checkpoints, several share one.
const MOST_COLUMNS: usize = 150;
/// Bands at most: those of which the most pages were stored.
const MOST_BANDS: usize = 18;
/// Rows of all bands together, about.
const ROWS: f64 = 84.0;
/// Height of a row.
const ROW: f64 = 6.0;
/// Between two bands.
const GAP: f64 = 3.0;
/// From which part of a row on its pages count as so hot.
const LEVELS: [f64; 5] = [0.0, 0.02, 0.1, 0.3, 0.6];
/// Where the map begins: names of bands are longer than values.
const MAP: f64 = LEFT + 112.0;

/// Mappings that are drawn as one.
#[derive(Clone, Debug, PartialEq)]
struct Band {
    name: String,
    pid: Option<u32>,
    start: u64,
    end: u64,
    rows: usize,
}

/// How hot a place is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Heat {
    /// Part of its pages that was changed, on the average of those checkpoints that tell.
    changed: f64,
    /// It was saved, with all else, by a checkpoint that does not tell.
    saved: bool,
}

/// The map, if any of these checkpoints has one. All of them are of a program that was started once.
pub fn map(job: &str, saved: &[Saved]) -> Option<Markup> {
    let saved: Vec<&Saved> = saved.iter().filter(|s| !s.heat.is_empty()).collect();
    let bands = bands(&saved);
    if bands.is_empty() {
        return None;
    }
    let share = saved.len().div_ceil(MOST_COLUMNS).max(1);
    let columns: Vec<&[&Saved]> = saved.chunks(share).collect();
    let wide = ((RIGHT - MAP) / columns.len() as f64).min(40.0);
    let (mut tops, mut y) = (Vec::new(), 4.0);
    for band in &bands {
        tops.push(y);
        y += band.rows as f64 * ROW + GAP;
    }
    let (bottom, right) = (y - GAP, MAP + wide * columns.len() as f64);
    let paths = paths(&bands, &tops, &columns, wide);
    let every = columns.len().div_ceil(((right - MAP) / 70.0).max(1.0) as usize).max(1);
    Some(html! {
        svg viewBox=(format!("0 0 {WIDTH} {}", f(bottom + 40.0))) role="img" {
            @for (band, top) in bands.iter().zip(&tops) {
                @let height = band.rows as f64 * ROW;
                rect.band x=(f(MAP)) y=(f(*top)) width=(f(right - MAP)) height=(f(height)) {}
                text.tick x=(f(MAP - 8.0)) y=(f(top + height / 2.0 + 4.0)) text-anchor="end" {
                    (short(&band.name)) title { (title(band)) }
                }
            }
            @for (class, path) in &paths { path class=(class) d=(path) {} }
            @for (i, column) in columns.iter().enumerate() {
                @let x = MAP + wide * i as f64;
                rect.over x=(f(x)) y="4" width=(f(wide)) height=(f(bottom - 4.0)) { title { (told(job, column)) } }
                @if i % every == 0 && let Some(first) = column.first() {
                    line.axis x1=(f(x + wide / 2.0)) x2=(f(x + wide / 2.0)) y1=(f(bottom)) y2=(f(bottom + 4.0)) {}
                    text.tick x=(f(x + wide / 2.0)) y=(f(bottom + 18.0)) text-anchor="middle" { (format!("@{}", first.id)) }
                }
            }
            text.unit x=(f((MAP + right) / 2.0)) y=(f(bottom + 36.0)) text-anchor="middle" { "checkpoint" }
        }
        (legend())
        (ranges(&bands))
    })
}

fn legend() -> Markup {
    let words = ["up to 2 %", "10 %", "30 %", "60 %", "more"];
    html! {
        p.legend {
            "part of the pages changed since the checkpoint before:"
            @for (level, words) in words.iter().enumerate() {
                " " span.key { svg viewBox="0 0 14 14" { rect class=(format!("h{level}")) width="14" height="14" rx="2" {} } " " (words) }
            }
            " " span.key { svg viewBox="0 0 14 14" { rect.whole width="14" height="14" rx="2" {} } " saved with all else" }
        }
    }
}

/// Which addresses the bands are.
fn ranges(bands: &[Band]) -> Markup {
    html! {
        details {
            summary { "Addresses" }
            table {
                thead { tr { th { "mapping" } th.n { "from" } th.n { "to" } th.n { "size" } } }
                tbody {
                    @for band in bands {
                        tr {
                            td { (band.name) @if let Some(pid) = band.pid { " of process " (pid) } }
                            td.n { code { (format!("{:#x}", band.start)) } }
                            td.n { code { (format!("{:#x}", band.end)) } }
                            td.n { (crate::output::bytes(band.end - band.start)) }
                        }
                    }
                }
            }
        }
    }
}

fn title(band: &Band) -> String {
    let of = band.pid.map_or(String::new(), |pid| format!(" of process {pid}"));
    let Band { name, start, end, .. } = band;
    format!("{name}{of}\n{start:#x} to {end:#x}, {}", crate::output::bytes(end - start))
}

/// Both ends of a name that is too long for its place.
fn short(name: &str) -> String {
    const ROOM: usize = 26;
    const END: usize = 10;
    let length = name.chars().count();
    if length <= ROOM {
        return name.into();
    }
    let (begin, end) = (name.chars().take(ROOM - END - 1), name.chars().skip(length - END));
    begin.chain(['…']).chain(end).collect()
}

fn told(job: &str, column: &[&Saved]) -> String {
    let changed = |s: &Saved| match s.dirty_pages {
        Some(pages) => format!("{} pages changed", crate::output::count(pages)),
        None => format!("complete: {} pages saved", crate::output::count(s.written_pages)),
    };
    match column {
        [one] => format!("{job}@{}  {}\n{}", one.id, crate::output::utc(one.taken_ns), changed(one)),
        [first, .., last] => {
            let pages: u64 = column.iter().filter_map(|s| s.dirty_pages).sum();
            let average = pages / (column.iter().filter(|s| s.dirty_pages.is_some()).count() as u64).max(1);
            let count = crate::output::count(average);
            format!("{job}@{} to {job}@{}\n{count} pages changed on the average", first.id, last.id)
        }
        [] => String::new(),
    }
}

/// What is known of mappings under one name.
#[derive(Default)]
struct Known {
    pages: u64,
    /// The first and the last address that was stored.
    touched: Option<(u64, u64)>,
}

impl Known {
    fn add(&mut self, pages: u64, touched: Option<(u64, u64)>) {
        self.pages += pages;
        self.touched = match (self.touched, touched) {
            (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
    }
}

/// The part of an area in which something was stored.
fn touched(area: &Area) -> Option<(u64, u64)> {
    let cell = area.cell_pages.max(1).saturating_mul(PAGE);
    let at = |number: usize| area.first_cell().saturating_add(cell.saturating_mul(number as u64));
    let first = area.cells.iter().position(|&pages| pages > 0)?;
    let last = area.cells.iter().rposition(|&pages| pages > 0)?;
    Some((at(first).max(area.start), at(last + 1).min(area.end)))
}

/// The bands of all maps: areas that overlap are one. Of address space that was only reserved nothing is shown.
fn bands(saved: &[&Saved]) -> Vec<Band> {
    let mut all: BTreeMap<(Option<u32>, u64, u64, &str), Known> = BTreeMap::new();
    for area in saved.iter().flat_map(|s| &s.heat).filter(|area| area.end > area.start) {
        all.entry((area.pid, area.start, area.end, &area.name)).or_default().add(area.pages(), touched(area));
    }
    let mut bands: Vec<(Band, Known, u64)> = Vec::new(); // the last: pages of the area whose name it has
    for ((pid, start, end, name), known) in all {
        let same = |b: &Band| b.pid == pid && start < b.end && (start > 0 || b.name == name);
        match bands.last_mut().filter(|b| same(&b.0)) {
            Some((band, sum, named)) => {
                band.end = band.end.max(end);
                if known.pages > *named {
                    (band.name, *named) = (name.into(), known.pages);
                }
                sum.add(known.pages, known.touched);
            }
            None => {
                let pages = known.pages;
                bands.push((Band { name: name.into(), pid, start, end, rows: 0 }, known, pages));
            }
        }
    }
    for (band, known, _) in &mut bands {
        (band.start, band.end) = known.touched.unwrap_or((band.start, band.start));
    }
    bands.retain(|(band, ..)| band.start < band.end);
    bands.sort_by_key(|b| std::cmp::Reverse(b.1.pages));
    bands.truncate(MOST_BANDS);
    let mut bands: Vec<Band> = bands.into_iter().map(|b| b.0).collect();
    bands.sort_by(|a, b| (a.pid, a.start, &a.name).cmp(&(b.pid, b.start, &b.name)));
    let root = |band: &Band| ((band.end - band.start) as f64).sqrt();
    let all: f64 = bands.iter().map(root).sum();
    for band in &mut bands {
        let pages = ((band.end - band.start) / PAGE).max(1) as usize;
        band.rows = ((root(band) / all * ROWS).round() as usize).min(pages).max(2);
    }
    bands
}

/// How hot the rows of a band are in a column.
fn heat(band: &Band, column: &[&Saved]) -> Vec<Heat> {
    let mut rows = vec![Heat::default(); band.rows];
    let size = (band.end - band.start) as f64 / band.rows as f64;
    let telling = column.iter().filter(|s| s.incremental).count().max(1) as f64;
    for saved in column {
        for area in saved.heat.iter().filter(|area| is_in(area, band)) {
            let cell = area.cell_pages.max(1).saturating_mul(PAGE);
            for (number, &pages) in area.cells.iter().enumerate().filter(|(_, pages)| **pages > 0) {
                let begin = area.first_cell().saturating_add(cell.saturating_mul(number as u64));
                let (from, to) = (
                    begin.max(area.start).max(band.start),
                    begin.saturating_add(cell).min(area.end).min(band.end),
                );
                if from >= to {
                    continue;
                }
                let place = |at: u64| (at - band.start) as f64 / size;
                for row in
                    place(from) as usize..=(place(to).ceil() as usize).saturating_sub(1).min(band.rows - 1)
                {
                    let overlap = place(to).min(row as f64 + 1.0) - place(from).max(row as f64);
                    let part = overlap / (place(to) - place(from));
                    match saved.incremental {
                        true => rows[row].changed += part * f64::from(pages) * PAGE as f64 / size / telling,
                        false => rows[row].saved = true,
                    }
                }
            }
        }
    }
    rows
}

fn is_in(area: &Area, band: &Band) -> bool {
    let is_named = area.start > 0 || area.name == band.name;
    area.pid == band.pid && area.start < band.end && band.start < area.end && is_named
}

/// One shape for all places that are equally hot; neighbours are one piece of it.
fn paths(bands: &[Band], tops: &[f64], columns: &[&[&Saved]], wide: f64) -> Vec<(String, String)> {
    let mut paths: BTreeMap<String, String> = BTreeMap::new();
    for (band, top) in bands.iter().zip(tops) {
        let heats: Vec<Vec<Heat>> = columns.iter().map(|column| heat(band, column)).collect();
        for row in 0..band.rows {
            let class = |heat: &Vec<Heat>| class(heat[row]);
            let mut from = 0;
            for same in heats.chunk_by(|a, b| class(a) == class(b)) {
                if let Some(class) = class(&same[0]) {
                    let (x, y) = (MAP + wide * from as f64, top + ROW * row as f64);
                    let length = f(wide * same.len() as f64);
                    *paths.entry(class).or_default() +=
                        &format!("M{} {}h{length}v{ROW}h-{length}z", f(x), f(y));
                }
                from += same.len();
            }
        }
    }
    paths.into_iter().collect()
}

fn class(heat: Heat) -> Option<String> {
    let level = LEVELS.iter().rposition(|level| heat.changed > *level);
    level.map(|level| format!("h{level}")).or(heat.saved.then(|| "whole".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(name: &str, start: u64, pages: u64, cells: &[u32]) -> Area {
        let end = start + pages * PAGE;
        Area { name: name.into(), pid: None, start, end, cell_pages: 16, cells: cells.to_vec() }
    }

    fn saved(id: u64, incremental: bool, heat: Vec<Area>) -> Saved {
        Saved { id, incremental, heat, ..Saved::default() }
    }

    #[test]
    fn an_area_that_grows_is_one_band() {
        let first =
            saved(1, false, vec![area("[heap]", 0x10_0000, 32, &[16, 16]), area("x", 0x90_0000, 16, &[1])]);
        let second = saved(2, true, vec![area("[heap]", 0x10_0000, 90, &[0, 0, 0, 16])]);
        let bands = bands(&[&first, &second]);
        let told: Vec<_> = bands.iter().map(|b| (b.name.as_str(), b.start, b.end)).collect();
        assert_eq!(told, [("[heap]", 0x10_0000, 0x14_0000), ("x", 0x90_0000, 0x91_0000)]);
        let heap = Band { rows: 4, ..bands[0].clone() };
        let hot = heat(&heap, &[&second]);
        assert!((hot[3].changed - 1.0).abs() < 1e-9 && hot[..3].iter().all(|h| h.changed == 0.0), "{hot:?}");
        assert_eq!(
            heat(&heap, &[&first]).iter().map(|h| h.saved).collect::<Vec<_>>(),
            [true, true, false, false]
        );
    }

    #[test]
    fn a_map_of_many_checkpoints_is_small() {
        let area = |id: u64| {
            let cells: Vec<u32> = (0..200).map(|i| (i as u64 * 7919 * id % 17) as u32).collect();
            area("anonymous", 0x7000_0000, 3200, &cells)
        };
        let all: Vec<Saved> = (1..=10_000).map(|id| saved(id, id > 1, vec![area(id)])).collect();
        let map = map("job", &all).expect("a map").into_string();
        assert!(map.len() < 600_000, "{}", map.len());
        assert!(super::map("job", &[]).is_none());
    }
}
