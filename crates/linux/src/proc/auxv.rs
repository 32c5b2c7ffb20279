//! `/proc/PID/auxv`: the auxiliary vector (getauxval(3)).

use super::Proc;
use crate::Result;

impl Proc {
    /// Auxiliary vector as pairs of type (`AT_*`) and value, without the terminating `AT_NULL`. Empty for kernel
    /// threads and zombies. The vector of a 32-bit program makes no sense here.
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Parse`].
    pub fn auxv(&self) -> Result<Vec<(u64, u64)>> {
        let raw = self.read("auxv")?;
        parse(&raw).ok_or_else(|| self.nonsense("auxv", &raw))
    }
}

/// Parses a raw vector; `None` if it ends within a pair.
pub fn parse(raw: &[u8]) -> Option<Vec<(u64, u64)>> {
    let (words, rest) = raw.as_chunks::<8>();
    if !rest.is_empty() || words.len() % 2 != 0 {
        return None;
    }
    let (pairs, _) = words.as_chunks::<2>();
    let pairs = pairs.iter().map(|&[kind, value]| (u64::from_ne_bytes(kind), u64::from_ne_bytes(value)));
    Some(pairs.take_while(|&(kind, _)| kind != 0).collect())
}
