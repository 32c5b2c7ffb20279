//! What identifies the contents of a file: a digest of all of it, or of samples of a very large one.

use crate::{Error, Result};
use std::os::fd::AsFd;

/// Files up to this size are read whole.
pub const WHOLE: u64 = 256 << 20;
/// Length of a sample.
const SAMPLE: u64 = 64 << 10;
/// Samples besides the first and the last.
const SAMPLES: u64 = 64;
const BUFFER: usize = 1 << 20;

/// BLAKE3 of the first `size` bytes of a file, and whether it is of samples only: the head, the tail and 64 evenly
/// spaced blocks of 64 KiB of files above [`WHOLE`].
///
/// Bytes in `skip` (offset and length: what a program changes through a mapping) count as zeros. A file shorter than
/// `size` counts as if zeros followed; so compare sizes first.
pub fn digest(file: impl AsFd, size: u64, skip: &[(u64, u64)]) -> Result<([u8; 32], bool)> {
    let mut hash = blake3::Hasher::new();
    hash.update(&size.to_le_bytes());
    let sampled = size > WHOLE;
    let mut buffer = vec![0u8; BUFFER];
    if sampled {
        for i in 0..SAMPLES + 2 {
            let start = (u128::from(size - SAMPLE) * u128::from(i) / u128::from(SAMPLES + 1)) as u64;
            feed(&mut hash, &file, start, SAMPLE, skip, &mut buffer)?;
        }
    } else {
        feed(&mut hash, &file, 0, size, skip, &mut buffer)?;
    }
    Ok((*hash.finalize().as_bytes(), sampled))
}

fn feed(
    hash: &mut blake3::Hasher,
    file: impl AsFd,
    start: u64,
    len: u64,
    skip: &[(u64, u64)],
    buffer: &mut [u8],
) -> Result<()> {
    let mut at = start;
    while at < start + len {
        let n = (start + len - at).min(buffer.len() as u64) as usize;
        let block = &mut buffer[..n];
        read_at(&file, at, block)?;
        for &(from, length) in skip {
            let (from, to) = (from.max(at), from.saturating_add(length).min(at + n as u64));
            if from < to {
                block[(from - at) as usize..(to - at) as usize].fill(0);
            }
        }
        hash.update(block);
        at += n as u64;
    }
    Ok(())
}

/// Reads at an offset; what is behind the end of the file is zero.
pub fn read_at(file: impl AsFd, offset: u64, buffer: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match rustix::io::pread(&file, &mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::call(format!("read at {offset}"), e)),
        }
    }
    buffer[done..].fill(0);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_prefix_keeps_its_digest_when_the_file_grows() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[5; 100_000], 0).unwrap();
        let before = digest(&file, 100_000, &[]).unwrap();
        file.write_all_at(b"more", 100_000).unwrap();
        assert_eq!(digest(&file, 100_000, &[]).unwrap(), before);
        file.write_all_at(b"x", 99_999).unwrap();
        assert_ne!(digest(&file, 100_000, &[]).unwrap(), before);
        assert_eq!(digest(&file, 100_000, &[(99_000, 1000)]).unwrap(), {
            file.write_all_at(b"other", 99_500).unwrap();
            digest(&file, 100_000, &[(99_000, 1000)]).unwrap()
        });
    }

    #[test]
    fn very_large_files_are_sampled_at_head_and_tail() {
        let file = tempfile::tempfile().unwrap();
        let size = 3 * WHOLE + 12_345;
        file.set_len(size).unwrap();
        let (before, sampled) = digest(&file, size, &[]).unwrap();
        assert!(sampled);
        for at in [0, size - 1] {
            file.write_all_at(b"x", at).unwrap();
            assert_ne!(digest(&file, size, &[]).unwrap().0, before);
            file.write_all_at(b"\0", at).unwrap();
        }
        assert_eq!(digest(&file, size, &[]).unwrap().0, before);
    }
}
