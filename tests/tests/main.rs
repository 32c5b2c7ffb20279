//! All end-to-end tests, a module for each kind: one program, because linking each by itself takes longer than most of them run.
#![allow(missing_docs)]

mod applications;
mod branch;
mod clones;
mod commands;
mod connections;
mod control_groups;
mod export;
mod features;
mod files;
mod incremental;
mod instant;
mod ipc;
mod jobs;
mod killing_us;
mod lazy;
mod outlive;
mod paging;
mod real_programs;
mod refusals;
mod servers;
mod store;
mod streams;
mod trees;
mod twins;
mod unprivileged;
mod watching;
mod wheel;
