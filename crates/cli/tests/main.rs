//! All tests of the crate from outside, a module for each subject: one program, because linking each by itself takes longer than most of them run.
#![allow(missing_docs)]

mod arguments;
mod common;
mod hostile;
mod jobs;
mod stored;
mod terminal;
