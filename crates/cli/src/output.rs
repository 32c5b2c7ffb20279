//! Answers: text for people, JSON for programs.

use crate::failure::{Failure, Result};
use std::io::{ErrorKind, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Writes a line to standard output. A reader that has gone away (`| head`) is no error.
pub fn line(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::failed(format!("cannot write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}

/// Writes a JSON value to standard output, on one line.
pub fn json(value: &serde_json::Value) -> Result<()> {
    line(&value.to_string())
}

/// A stream that a program was started with.
pub fn stream(number: u32) -> String {
    match number {
        0 => "standard input".into(),
        1 => "standard output".into(),
        2 => "standard error".into(),
        _ => format!("stream {number} from outside"),
    }
}

/// Writes a line to standard error; nobody is left to hear that this fails.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A table with aligned columns and no lines. Columns in `right` are numbers.
pub fn table(header: &[&str], rows: Vec<Vec<String>>, right: &[usize]) -> String {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&i) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
    let lines: Vec<String> = table.lines().map(|l| l.trim_end().to_string()).collect();
    lines.join("\n")
}

/// A number of bytes: `1.0 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be rounded to 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A whole number: `262,144`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A short time: `0.8 ms`, `310 ms`, `0.74 s`, `12 s`.
pub fn short(d: Duration) -> String {
    let ms = d.as_secs_f64() * 1e3;
    match ms {
        ..0.0995 => format!("{ms:.2} ms"),
        ..9.95 => format!("{ms:.1} ms"),
        ..499.5 => format!("{ms:.0} ms"),
        ..9_995.0 => format!("{:.2} s", ms / 1e3),
        ..99_950.0 => format!("{:.1} s", ms / 1e3),
        _ => long(d.as_secs()),
    }
}

/// A long time: `42 s`, `5 min`, `3 h 20 min`, `12 d`.
pub fn long(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
        172_800.. => format!("{} d", seconds / 86_400),
    }
}

/// A period as it is asked for: `500 ms`, `30 s`, `5 min`, `1 h 30 min`.
pub fn period(d: Duration) -> String {
    match d.as_millis() {
        ms if ms < 1_000 => format!("{ms} ms"),
        ms if ms < 120_000 && ms % 1_000 != 0 => format!("{:.1} s", d.as_secs_f64()),
        _ => long(d.as_secs()),
    }
}

/// Now, in nanoseconds since 1970.
pub fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

/// How long ago a time (nanoseconds since 1970) is.
pub fn age(taken_ns: u64) -> String {
    match now_ns().checked_sub(taken_ns) {
        Some(ns) => format!("{} ago", long(ns / 1_000_000_000)),
        None => "in the future".into(),
    }
}

/// A time (nanoseconds since 1970) as `2026-01-31T12:00:00Z`.
pub fn utc(taken_ns: u64) -> String {
    let seconds = taken_ns / 1_000_000_000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Civil date from days, by eras of 400 years that begin on 1 March (H. Hinnant, chrono-compatible date algorithms).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (h, m, s) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}Z")
}

/// Milliseconds with three decimals, for JSON.
pub fn ms(d: Duration) -> f64 {
    (d.as_secs_f64() * 1e6).round() / 1e3
}

/// Name of a signal: `SIGSEGV`.
pub fn signal(number: i32) -> String {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
        "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    let name = usize::try_from(number - 1).ok().and_then(|n| NAMES.get(n));
    name.map_or_else(|| format!("signal {number}"), |name| format!("SIG{name}"))
}

/// A command line for people: arguments that need it are quoted, a long one is cut.
pub fn command(arguments: &[stillpoint_image::Bytes], longest: usize) -> String {
    let plain =
        |s: &str| !s.is_empty() && s.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c));
    let quote = |s: String| if plain(&s) { s } else { format!("{s:?}") };
    let text = arguments.iter().map(|a| quote(a.to_string())).collect::<Vec<_>>().join(" ");
    if text.chars().count() <= longest {
        return text;
    }
    text.chars().take(longest.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(
            [bytes(0), bytes(1023), bytes(1024), bytes(1 << 30)],
            ["0 B", "1023 B", "1.0 KiB", "1.0 GiB"]
        );
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!([count(0), count(999), count(262_144)], ["0", "999", "262,144"]);
    }

    #[test]
    fn times() {
        let of = |us| short(Duration::from_micros(us));
        assert_eq!(
            [of(0), of(50), of(800), of(310_000), of(740_000)],
            ["0.00 ms", "0.05 ms", "0.8 ms", "310 ms", "0.74 s"]
        );
        assert_eq!([of(12_000_000), of(600_000_000)], ["12.0 s", "10 min"]);
        assert_eq!([long(119), long(12_000), long(1_000_000)], ["119 s", "3 h 20 min", "11 d"]);
    }

    #[test]
    fn periods() {
        let of = |ms| period(Duration::from_millis(ms));
        assert_eq!([of(500), of(1_500), of(30_000), of(300_000)], ["500 ms", "1.5 s", "30 s", "5 min"]);
    }

    #[test]
    fn dates() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400_000_000_000), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_767_225_599_999_999_999), "2025-12-31T23:59:59Z");
    }

    #[test]
    fn signals() {
        use rustix::process::Signal;
        let of = |s: Signal| signal(s.as_raw());
        assert_eq!([of(Signal::HUP), of(Signal::SEGV), of(Signal::SYS)], ["SIGHUP", "SIGSEGV", "SIGSYS"]);
        assert_eq!([signal(0), signal(-3), signal(40)], ["signal 0", "signal -3", "signal 40"]);
    }

    #[test]
    fn command_lines() {
        let of =
            |a: &[&str], n| command(&a.iter().map(|s| s.as_bytes().to_vec().into()).collect::<Vec<_>>(), n);
        assert_eq!(of(&["sh", "-c", "a b"], 80), "sh -c \"a b\"");
        assert_eq!(of(&["abcdef"], 4), "abc…");
    }
}
