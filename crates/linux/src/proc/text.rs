//! Numbers and lines of the kernel's text files, by hand: they are read inside the freeze.

/// Lines without their newline; no empty one after the last newline.
pub(super) fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = memchr::memchr(b'\n', rest).unwrap_or(rest.len());
        let (line, after) = rest.split_at(end);
        rest = after.get(1..).unwrap_or_default();
        (!(line.is_empty() && rest.is_empty())).then_some(line)
    })
    .filter(|l| !l.is_empty())
}

/// Words between spaces and tabs.
pub(super) fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&b| b == b' ' || b == b'\t').filter(|w| !w.is_empty())
}

/// An unsigned decimal number that fills the whole text.
pub(super) fn dec(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |n, &b| {
        let digit = b.wrapping_sub(b'0');
        if digit > 9 { None } else { n.checked_mul(10)?.checked_add(digit.into()) }
    })
}

/// A decimal number with an optional minus that fills the whole text.
pub(super) fn signed(text: &[u8]) -> Option<i64> {
    match text.strip_prefix(b"-") {
        Some(digits) => 0i64.checked_sub_unsigned(dec(digits)?),
        None => i64::try_from(dec(text)?).ok(),
    }
}

/// A hexadecimal number, with or without `0x`, that fills the whole text.
pub(super) fn hex(text: &[u8]) -> Option<u64> {
    let text = text.strip_prefix(b"0x").unwrap_or(text);
    if text.is_empty() || text.len() > 16 {
        return None;
    }
    text.iter().try_fold(0u64, |n, &b| {
        let digit = match b {
            b'0'..=b'9' => b - b'0',
            b'a'..=b'f' => b - b'a' + 10,
            b'A'..=b'F' => b - b'A' + 10,
            _ => return None,
        };
        Some(n << 4 | u64::from(digit))
    })
}

/// Splits at the first `at`, which belongs to neither part.
pub(super) fn cut(text: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let i = memchr::memchr(at, text)?;
    Some((&text[..i], &text[i + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(dec(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(dec(b"18446744073709551616"), None);
        assert_eq!(dec(b""), None);
        assert_eq!(dec(b"12a"), None);
        assert_eq!(signed(b"-9223372036854775808"), Some(i64::MIN));
        assert_eq!(signed(b"-9223372036854775809"), None);
        assert_eq!(signed(b"-"), None);
        assert_eq!(hex(b"ffffffffffffffff"), Some(u64::MAX));
        assert_eq!(hex(b"0x1F"), Some(31));
        assert_eq!(hex(b"10000000000000000"), None);
        assert_eq!(hex(b"0x"), None);
    }
}
