//! The commands, one file each.

pub mod adopt;
pub mod branch;
pub mod checkpoint;
pub mod checkpointer;
pub mod clones;
pub mod doctor;
pub mod export;
pub mod fork;
pub mod import;
pub mod list;
pub mod private;
pub mod release;
pub mod remove;
pub mod report;
pub mod restore;
pub mod resume;
pub mod run;
pub mod show;
pub mod top;
pub mod verify;
