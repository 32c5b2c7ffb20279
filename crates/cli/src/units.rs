//! Sizes and times as people write them.

use std::time::Duration;
use stillpoint_restore::{Connection, To};
use stillpoint_store::Every;

/// Reads a time: `500ms`, `10s`, `5m`, `1h`, `1d`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text).ok_or("write a number and a unit, as in 500ms, 10s, 5m, 1h")?;
    let ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "" => return Err(format!("{number} what? Write a unit, as in 500ms, 10s, 5m, 1h")),
        _ => return Err(format!("{unit:?} is no unit of time; there are ms, s, m, h, d")),
    };
    match number.checked_mul(ms) {
        Some(0) => Err("it must be longer than nothing".into()),
        Some(ms) if ms <= LONGEST_MS => Ok(Duration::from_millis(ms)),
        _ => Err("it must not be longer than ten years".into()),
    }
}

/// Reads how often there are to be checkpoints: a time, or `auto`.
pub fn every(text: &str) -> Result<Every, String> {
    match text {
        "auto" => Ok(Every::Auto),
        _ => duration(text).map(Every::Time).map_err(|e| format!("{e} (or auto)")),
    }
}

/// So many times in a row a job is brought back, unless told otherwise.
const RESTARTS: u64 = 5;

/// Reads when a job is brought back: `on-crash`, `on-crash=3`. Returns how many times in a row.
pub fn restart(text: &str) -> Result<u64, String> {
    let (when, most) = text.split_once('=').map_or((text, None), |(when, most)| (when, Some(most)));
    if when != "on-crash" {
        return Err("write on-crash, or on-crash=MAX".into());
    }
    match most.map(str::parse) {
        None => Ok(RESTARTS),
        Some(Ok(most @ 1..)) => Ok(most),
        Some(_) => Err("MAX is a number from 1 on, as in on-crash=3".into()),
    }
}

/// Reads what a descriptor is connected with: `7=/var/log/prog`, `7=fd:3`. A path is taken from where we are now.
pub fn connection(text: &str) -> Result<Connection, String> {
    const FORM: &str = "write N=PATH or N=fd:M, as in 7=/var/log/prog or 7=fd:3";
    let (number, to) = text.split_once('=').ok_or(FORM)?;
    let number = number.parse().map_err(|_| FORM)?;
    let to = match to.strip_prefix("fd:") {
        Some(own) => To::Descriptor(own.parse().map_err(|_| FORM)?),
        None if to.is_empty() => return Err(FORM.into()),
        None => {
            let path = std::path::absolute(to).map_err(|e| format!("{to}: {e}"))?;
            // It is written down for later.
            path.to_str().ok_or("the path from the root to it is not UTF-8")?;
            To::File(path)
        }
    };
    Ok(Connection { number, to })
}

/// A connection with a file, to be [read](connection) again later; one with a descriptor is only for now.
pub fn told_connection(connection: &Connection) -> Option<String> {
    match &connection.to {
        To::File(path) => Some(format!("{}={}", connection.number, path.to_str()?)),
        To::Descriptor(_) => None,
    }
}

const LONGEST_MS: u64 = 3_652 * 86_400_000;

/// Reads a size in bytes: `16MiB`, `64k`, `1GiB`. As for most tools `k`, `M`, `G` alone are powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text).ok_or("write a number and a unit, as in 16MiB, 64k, 1GiB")?;
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("{unit:?} is no unit of size; there are KiB, MiB, GiB, TiB")),
    };
    number.checked_mul(factor).ok_or_else(|| "it is more than there can be".to_string())
}

/// Reads a rate in bytes a second: `7MB/s`, `100MiB/s`.
pub fn rate(text: &str) -> Result<u64, String> {
    let amount = text.strip_suffix("/s").ok_or("write a size and /s, as in 7MB/s, 100MiB/s")?;
    match size(amount)? {
        0 => Err("it must be more than nothing".into()),
        bytes => Ok(bytes),
    }
}

/// Reads how much memory a program may take.
pub fn memory(text: &str) -> Result<u64, String> {
    match size(text)? {
        small if small < stillpoint_pager::LEAST => Err("it must be at least 1MiB".into()),
        bytes => Ok(bytes),
    }
}

/// Smallest buffer that lets work go on beside it.
const SMALLEST_BUFFER: u64 = 64 << 10;

/// Reads the size of a buffer.
pub fn buffer(text: &str) -> Result<u64, String> {
    match size(text)? {
        small if small < SMALLEST_BUFFER => Err("it must be at least 64KiB".into()),
        bytes => Ok(bytes),
    }
}

/// Number and unit; nothing if there is no number, or none that fits.
fn split(text: &str) -> Option<(u64, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    Some((text[..digits].parse().ok()?, text[digits..].trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let ms = |text| duration(text).map(|d| d.as_millis());
        assert_eq!(
            [ms("500ms"), ms("10s"), ms("5m"), ms("5 min"), ms("1h"), ms("2d")],
            [Ok(500), Ok(10_000), Ok(300_000), Ok(300_000), Ok(3_600_000), Ok(172_800_000)]
        );
        let huge = "99999999999999999999s";
        for bad in ["", "s", "10", "0s", "-1s", "1.5s", "1y", "10S", "4000d", huge, "18446744073709551615h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn intervals_and_restarts() {
        assert_eq!(every("auto"), Ok(Every::Auto));
        assert_eq!(every("30s"), Ok(Every::Time(Duration::from_secs(30))));
        assert_eq!([restart("on-crash"), restart("on-crash=3")], [Ok(RESTARTS), Ok(3)]);
        for bad in ["", "always", "on-crash=", "on-crash=0", "on-crash=-1", "on-crash=many"] {
            assert!(restart(bad).is_err(), "{bad}");
        }
        assert!(every("automatic").is_err());
    }

    #[test]
    fn rates() {
        assert_eq!([rate("7MB/s"), rate("1 KiB/s")], [Ok(7_000_000), Ok(1024)]);
        for bad in ["7MB", "0/s", "/s", "fast"] {
            assert!(rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(
            [size("16MiB"), size("64k"), size("1GiB"), size("4096"), size("1 M"), size("2TB")],
            [Ok(16 << 20), Ok(64 << 10), Ok(1 << 30), Ok(4096), Ok(1 << 20), Ok(2_000_000_000_000)]
        );
        for bad in ["", "MiB", "-1", "1.5G", "16Mb ps", "1X", "99999999999999999999", "99999999999TiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(buffer("64KiB"), Ok(64 << 10));
        assert!(buffer("0").is_err() && buffer("4k").is_err());
    }
}
