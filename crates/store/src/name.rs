//! Names of jobs.

use crate::{Error, Result};

/// Longest name of a job, bytes.
const LONGEST: usize = 128;

/// Checks that a name can be the name of a job: it is a folder in the store and a word on the command line.
///
/// # Errors
/// [`Error::Name`] unless it has 1 to 128 bytes, all printable, no `/`, `@` or white space, and no `.` or `-` in front.
pub fn check_name(name: &str) -> Result<()> {
    let why = if name.is_empty() {
        "it is empty"
    } else if name.len() > LONGEST {
        "it is longer than 128 bytes"
    } else if name.starts_with('.') {
        "it begins with a dot"
    } else if name.starts_with('-') {
        "it begins with a dash"
    } else if name.contains(['/', '@']) {
        "'/' and '@' have other meanings"
    } else if name.chars().any(|c| c.is_control() || c.is_whitespace()) {
        "it has white space or unprintable characters in it"
    } else {
        return Ok(());
    };
    Err(Error::Name { name: name.to_owned(), why })
}
