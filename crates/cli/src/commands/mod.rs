//! The commands, one file each.

pub mod checkpoint;
pub mod doctor;
pub mod list;
pub mod private;
pub mod remove;
pub mod restore;
pub mod run;
pub mod show;
pub mod verify;
