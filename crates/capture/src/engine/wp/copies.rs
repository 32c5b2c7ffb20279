//! The bounded buffer: pages that were copied for a writer that waited, on their way to the store.

use std::collections::VecDeque;
use stillpoint_image::{PAGE, Range};

/// Copied runs of pages, and the room for more.
#[derive(Debug)]
pub(super) struct Copies {
    queue: VecDeque<(Range, Vec<u8>)>,
    /// Most bytes.
    bound: u64,
    /// Bytes that are in it, or for which room is taken.
    used: u64,
    /// Most that ever were.
    most_used: u64,
}

impl Copies {
    /// For at most `bound` bytes, and at least one page.
    pub fn new(bound: u64) -> Self {
        Copies { queue: VecDeque::new(), bound: bound.max(PAGE), used: 0, most_used: 0 }
    }

    /// Bytes that still fit.
    pub fn room(&self) -> u64 {
        self.bound - self.used
    }

    /// Most bytes that ever were in it.
    pub fn most_used(&self) -> u64 {
        self.most_used
    }

    /// Takes room for what is about to be copied.
    pub fn take_room(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.room());
        self.used += bytes;
        self.most_used = self.most_used.max(self.used);
    }

    /// Gives room back.
    pub fn give_room(&mut self, bytes: u64) {
        self.used -= bytes;
    }

    /// Adds a copy, for which room was taken.
    pub fn push(&mut self, run: Range, bytes: Vec<u8>) {
        self.queue.push_back((run, bytes));
    }

    /// Takes out the oldest copies that fit into `most` bytes. They keep their room until it is given back.
    pub fn pop(&mut self, most: u64) -> Vec<(Range, Vec<u8>)> {
        let mut taken = Vec::new();
        let mut left = most;
        while let Some((run, _)) = self.queue.front()
            && run.len <= left
        {
            left -= run.len;
            taken.extend(self.queue.pop_front());
        }
        taken
    }

    /// Whether nothing waits in it.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}
