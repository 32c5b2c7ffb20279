//! Making a long history short: the older, the coarser.

use serde_json::{Map, Value, json};

type Record = Map<String, Value>;

/// A line.
enum Line<'a> {
    /// As it is.
    Kept(&'a [u8]),
    /// As what several came to.
    Made(Record),
}

impl Line<'_> {
    fn record(&self) -> Option<Record> {
        match self {
            Line::Kept(text) => serde_json::from_slice(text).ok(),
            Line::Made(record) => Some(record.clone()),
        }
    }

    fn text(self) -> Vec<u8> {
        match self {
            Line::Kept(text) => text.to_vec(),
            Line::Made(record) => serde_json::to_vec(&record).unwrap_or_default(),
        }
    }
}

/// What is left of the lines of a history in so many bytes. Of the older half, neighbours become one where both are checkpoints or
/// failures for the same reason, again and again; where that does not help any more, the oldest go. What goes leaves its sums.
/// Lines that are not understood stay as they are for as long as any of their age.
pub fn thin(text: &[u8], room: usize) -> Vec<u8> {
    let lines = text.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    let mut lines: Vec<(Line<'_>, usize)> = lines.map(|l| (Line::Kept(l), l.len() + 1)).collect();
    while size(&lines) > room {
        let before = lines.len();
        lines = halve(lines);
        if lines.len() == before {
            break;
        }
    }
    if size(&lines) > room {
        lines = without_oldest(lines, room);
    }
    lines.into_iter().flat_map(|(line, _)| [line.text(), b"\n".to_vec()].concat()).collect()
}

fn size(lines: &[(Line<'_>, usize)]) -> usize {
    lines.iter().map(|(_, size)| size).sum()
}

/// Joins neighbours in the older half.
fn halve(lines: Vec<(Line<'_>, usize)>) -> Vec<(Line<'_>, usize)> {
    let older = lines.len() / 2;
    let mut left = Vec::with_capacity(lines.len());
    let mut rest = lines.into_iter().enumerate().peekable();
    while let Some((i, line)) = rest.next() {
        let next = rest.peek().filter(|_| i + 1 < older);
        let joined = next.and_then(|(_, (next, _))| join(&line.0.record()?, next.record()?));
        match joined {
            Some(joined) => {
                rest.next();
                let length = serde_json::to_vec(&joined).map_or(0, |text| text.len() + 1);
                left.push((Line::Made(joined), length));
            }
            None => left.push(line),
        }
    }
    left
}

/// One record for two: the later one, with what the earlier came to.
fn join(earlier: &Record, mut later: Record) -> Option<Record> {
    let is_both = |key: &str, value: &str| text(earlier, key) == value && text(&later, key) == value;
    if is_both("kind", "checkpoint") && !earlier.contains_key("label") {
        let mut sums = Sums::of(later.get("merged").and_then(Value::as_object));
        sums.add(earlier);
        later.insert("merged".into(), sums.into());
        return Some(later);
    }
    if is_both("kind", "failed") && is_both("reason", text(earlier, "reason")) {
        let others = number(earlier, "others") + number(&later, "others") + 1;
        let since = first(number(earlier, "since_ns"), number(earlier, "at_ns"));
        later.insert("others".into(), others.into());
        later.insert("since_ns".into(), since.into());
        return Some(later);
    }
    None
}

/// Leaves out the oldest, and puts in front of the others what they came to.
fn without_oldest(lines: Vec<(Line<'_>, usize)>, room: usize) -> Vec<(Line<'_>, usize)> {
    let mut left = size(&lines);
    let mut sums = Sums::default();
    let mut rest = lines.into_iter().peekable();
    while let Some((line, size)) = rest.next_if(|_| left + 300 > room) {
        left -= size;
        sums.last_ns = first(sums.last_ns, line.record().map_or(0, |r| number(&r, "at_ns")));
        line.record().iter().for_each(|record| sums.add(record));
    }
    let mut record = Record::new();
    record.insert("at_ns".into(), sums.last_ns.into());
    record.insert("kind".into(), "earlier".into());
    record.extend(Record::from_iter(Value::from(sums).as_object().cloned().unwrap_or_default()));
    std::iter::once((Line::Made(record), 0)).chain(rest).collect()
}

/// What events came to: [`super::Earlier`].
#[derive(Default)]
struct Sums {
    since_ns: u64,
    last_ns: u64,
    checkpoints: u64,
    failed: u64,
    crashes: u64,
    written_bytes: u64,
    dirty_pages: u64,
    longest_pause_ns: u64,
    stopped_ns: u64,
}

impl Sums {
    fn of(record: Option<&Record>) -> Self {
        let mut sums = Sums::default();
        record.iter().for_each(|record| sums.add_sums(record));
        sums
    }

    fn add(&mut self, record: &Record) {
        let at_ns = number(record, "at_ns");
        match text(record, "kind") {
            "checkpoint" => {
                let own = json!({
                    "since_ns": first(number(record, "taken_ns"), at_ns),
                    "checkpoints": 1,
                    "written_bytes": number(record, "written_bytes"),
                    "dirty_pages": number(record, "dirty_pages"),
                    "longest_pause_ns": number(record, "pause_ns"),
                    "stopped_ns": number(record, "pause_ns").saturating_add(number(record, "other_stops_ns")),
                });
                own.as_object().into_iter().for_each(|own| self.add_sums(own));
                let merged = record.get("merged").and_then(Value::as_object);
                merged.into_iter().for_each(|merged| self.add_sums(merged));
            }
            "earlier" => self.add_sums(record),
            "failed" => {
                self.failed = self.failed.saturating_add(number(record, "others")).saturating_add(1);
                self.since_ns = first(self.since_ns, first(number(record, "since_ns"), at_ns));
            }
            kind => {
                self.crashes += u64::from(kind == "crash");
                self.since_ns = first(self.since_ns, at_ns);
            }
        }
    }

    fn add_sums(&mut self, record: &Record) {
        let add = |sum: &mut u64, key: &str| *sum = sum.saturating_add(number(record, key));
        add(&mut self.checkpoints, "checkpoints");
        add(&mut self.failed, "failed");
        add(&mut self.crashes, "crashes");
        add(&mut self.written_bytes, "written_bytes");
        add(&mut self.dirty_pages, "dirty_pages");
        add(&mut self.stopped_ns, "stopped_ns");
        self.longest_pause_ns = self.longest_pause_ns.max(number(record, "longest_pause_ns"));
        self.since_ns = first(self.since_ns, number(record, "since_ns"));
    }
}

impl From<Sums> for Value {
    fn from(sums: Sums) -> Value {
        json!({
            "since_ns": sums.since_ns,
            "checkpoints": sums.checkpoints,
            "failed": sums.failed,
            "crashes": sums.crashes,
            "written_bytes": sums.written_bytes,
            "dirty_pages": sums.dirty_pages,
            "longest_pause_ns": sums.longest_pause_ns,
            "stopped_ns": sums.stopped_ns,
        })
    }
}

/// The earlier of two times; 0 is none.
fn first(a: u64, b: u64) -> u64 {
    if a == 0 || b == 0 { a.max(b) } else { a.min(b) }
}

fn number(record: &Record, key: &str) -> u64 {
    record.get(key).and_then(Value::as_u64).unwrap_or(0)
}

fn text<'a>(record: &'a Record, key: &str) -> &'a str {
    record.get(key).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::{Earlier, Event, Failed, Saved, What, parse};
    use super::*;
    use proptest::prelude::*;

    fn line(at_ns: u64, what: What) -> Vec<u8> {
        Event { at_ns, what }.line()
    }

    #[test]
    fn what_later_versions_know_stays() {
        let odd = format!("{{\"at_ns\":1,\"kind\":\"teleport\",\"to\":\"mars\"}}\n{}", "not JSON\n");
        let mut text = odd.clone().into_bytes();
        for id in 1..100 {
            text.extend(
                format!("{{\"at_ns\":{id},\"kind\":\"checkpoint\",\"id\":{id},\"hue\":{id}}}\n").bytes(),
            );
        }
        let left = thin(&text, 3000);
        assert!(left.len() <= 3000 && left.starts_with(odd.as_bytes()));
        assert!(String::from_utf8_lossy(&left).contains("\"hue\":"));
    }

    proptest! {
        /// Whatever is in it, it fits afterwards, its sums are those from before, and the newest is as it was.
        #[test]
        fn sums_stay(kinds in prop::collection::vec(0_u8..5, 20..200), room in 1_000_usize..6_000) {
            let mut text = Vec::new();
            for (i, kind) in kinds.iter().enumerate() {
                let at = i as u64 + 1;
                let saved = Saved { id: at, written_bytes: at, pause_ns: at, ..Saved::default() };
                let labelled = Saved { label: Some("kept".into()), ..saved.clone() };
                text.extend(line(at, match kind {
                    0 => What::Checkpoint(saved.into()),
                    1 => What::Checkpoint(labelled.into()),
                    2 => What::Failed(Failed { reason: "full".into(), ..Failed::default() }),
                    3 => What::Crash { signal: 9 },
                    _ => What::Release,
                }));
            }
            let left = thin(&text, room);
            prop_assert!(left.len() <= room.max(500));
            prop_assert_eq!(sums(&left), sums(&text));
            if text.len() <= room {
                prop_assert_eq!(left, text);
            } else {
                prop_assert!(left.ends_with(&line(kinds.len() as u64, parse(&text).events.pop().expect("one").what)));
            }
        }
    }

    fn sums(text: &[u8]) -> (u64, u64, u64, u64, u64) {
        let history = parse(text);
        assert_eq!(history.unreadable, 0);
        let mut sums = (0, 0, 0, 0, 0);
        let mut add = |e: &Earlier| {
            sums.0 += e.checkpoints;
            sums.1 += e.failed;
            sums.2 += e.crashes;
            sums.3 += e.written_bytes;
            sums.4 = sums.4.max(e.longest_pause_ns);
        };
        for event in &history.events {
            match &event.what {
                What::Checkpoint(s) => {
                    let (written_bytes, longest_pause_ns) = (s.written_bytes, s.pause_ns);
                    add(&Earlier { checkpoints: 1, written_bytes, longest_pause_ns, ..Earlier::default() });
                    s.merged.iter().for_each(&mut add);
                }
                What::Failed(f) => add(&Earlier { failed: 1 + f.others, ..Earlier::default() }),
                What::Crash { .. } => add(&Earlier { crashes: 1, ..Earlier::default() }),
                What::Earlier(earlier) => add(earlier),
                _ => {}
            }
        }
        sums
    }
}
