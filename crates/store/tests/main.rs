//! All tests of the crate from outside, a module for each subject: one program, because linking each by itself takes longer than most of them run.
#![allow(missing_docs)]

mod alike;
mod common;
mod damage;
mod jobs;
mod kill;
mod medium;
mod model;
mod power;
mod roundtrip;
mod touch;
