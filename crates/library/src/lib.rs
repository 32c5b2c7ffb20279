//! A program takes snapshots of itself, and goes back to them: for C and all that can call it (`include/stillpoint.h`).
//!
//! The calls ask a process beside the program, over a socket ([`line`](mod@line)). Whoever asks waits for the answer: in the middle
//! of that the program is stopped, and in the middle of that it is again when it comes back.

mod line;

use line::{Answer, Error, ask};
use serde_json::json;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

thread_local! {
    /// What the last error of this thread was.
    static LAST: RefCell<CString> = RefCell::default();
    /// Files that were not as they were when this thread came back to a snapshot, a line for each.
    static CHANGED: RefCell<CString> = RefCell::default();
}

/// A snapshot was taken (0), or the program has come back to it (what the rollback gave); its number.
///
/// # Errors
/// [`Error`]; there is no snapshot.
pub fn snapshot() -> Result<(u64, i32), Error> {
    match ask(&json!({"snapshot": {"name": null}}))? {
        Answer::Taken { snapshot, value, files } => {
            CHANGED.with(|changed| *changed.borrow_mut() = text(&files.join("\n")));
            Ok((snapshot, value))
        }
        _ => Err(Error::strange()),
    }
}

/// Files that were not as they were at the snapshot, when [`snapshot`] last returned in this thread because of a rollback: in which
/// ways they had changed, in words for people, a line for each. They stay as they are.
pub fn changed_files() -> String {
    CHANGED.with(|changed| changed.borrow().to_string_lossy().into_owned())
}

/// Back to a snapshot, where [`snapshot`] returns this value.
///
/// # Errors
/// Always, if it returns: [`Error`], and nothing has changed.
pub fn rollback(id: u64, value: i32, kill_children: bool) -> Error {
    if value <= 0 {
        return Error { code: -libc::EINVAL, what: format!("{value}: a rollback gives a positive number") };
    }
    let question =
        json!({"rollback": {"snapshot": id.to_string(), "kill_children": kill_children, "value": value}});
    match ask(&question) {
        Err(e) => e,
        Ok(_) => Error::strange(),
    }
}

/// Forgets a snapshot.
///
/// # Errors
/// [`Error`], if there is none of this number.
pub fn commit(id: u64) -> Result<(), Error> {
    ask(&json!({"forget": {"snapshot": id.to_string()}})).map(drop)
}

/// A checkpoint of this program, in the store, of a job of this name (none: named after the program): whether this is the program
/// that was restored from it.
///
/// # Errors
/// [`Error`]; there is no checkpoint.
pub fn checkpoint(name: Option<&str>) -> Result<bool, Error> {
    ask(&json!({"checkpoint": {"name": name}})).map(|answer| matches!(answer, Answer::Reborn))
}

/// A live twin of this program, with all of its threads, in a pid namespace of its own: in this process its id, in the twin nothing.
///
/// # Errors
/// [`Error`]; there is no twin.
pub fn fork_all() -> Result<Option<i32>, Error> {
    match ask(&json!({"fork": {}}))? {
        Answer::Forked { pid } => Ok(Some(pid)),
        Answer::Reborn => Ok(None),
        _ => Err(Error::strange()),
    }
}

fn told(error: Error) -> c_int {
    LAST.with(|last| *last.borrow_mut() = text(&error.what));
    error.code
}

fn text(words: &str) -> CString {
    CString::new(words.replace('\0', " ")).unwrap_or_default()
}

/// `sp_snapshot`
///
/// # Safety
/// `id` is null or can be written.
#[unsafe(no_mangle)]
#[allow(unsafe_code)]
pub unsafe extern "C" fn sp_snapshot(id: *mut u64) -> c_int {
    match snapshot() {
        Ok((number, value)) => {
            if !id.is_null() {
                // SAFETY: the caller says so.
                unsafe { *id = number };
            }
            value
        }
        Err(e) => told(e),
    }
}

/// `sp_rollback`
#[unsafe(no_mangle)]
#[allow(unsafe_code)]
pub extern "C" fn sp_rollback(id: u64, value: c_int) -> c_int {
    told(rollback(id, value, false))
}

/// `sp_rollback_killing`
#[unsafe(no_mangle)]
#[allow(unsafe_code)]
pub extern "C" fn sp_rollback_killing(id: u64, value: c_int) -> c_int {
    told(rollback(id, value, true))
}

/// `sp_commit`
#[unsafe(no_mangle)]
#[allow(unsafe_code)]
pub extern "C" fn sp_commit(id: u64) -> c_int {
    commit(id).map_or_else(told, |()| 0)
}

/// `sp_checkpoint`
///
/// # Safety
/// `name` is null or a string.
#[unsafe(no_mangle)]
#[allow(unsafe_code)]
pub unsafe extern "C" fn sp_checkpoint(name: *const c_char) -> c_int {
    // SAFETY: the caller says so.
    let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) });
    let name = name.map(CStr::to_str).transpose();
    let unreadable = |_| Error { code: -libc::EINVAL, what: "the name of a job is text in UTF-8".into() };
    name.map_err(unreadable).and_then(checkpoint).map_or_else(told, c_int::from)
}

/// `sp_fork_all`
#[unsafe(no_mangle)]
#[allow(unsafe_code)]
pub extern "C" fn sp_fork_all() -> c_int {
    fork_all().map_or_else(told, Option::unwrap_or_default)
}

/// `sp_changed_files`
#[unsafe(no_mangle)]
#[allow(unsafe_code)]
pub extern "C" fn sp_changed_files() -> *const c_char {
    // Valid until this thread's next snapshot.
    CHANGED.with(|changed| changed.borrow().as_ptr())
}

/// `sp_strerror`
#[unsafe(no_mangle)]
#[allow(unsafe_code)]
pub extern "C" fn sp_strerror(error: c_int) -> *const c_char {
    let plain: &CStr = match -error {
        0 => c"no error",
        libc::EINVAL => c"an argument makes no sense",
        libc::ENOENT => c"there is no such snapshot",
        libc::EPERM => c"something cannot be remembered, undone, or copied",
        libc::ENOSYS => c"stillpoint cannot be started, or is of another version",
        _ => c"it failed",
    };
    LAST.with(|last| {
        let last = last.borrow();
        // Valid until this thread's next call.
        if error != 0 && !last.is_empty() { last.as_ptr() } else { plain.as_ptr() }
    })
}
