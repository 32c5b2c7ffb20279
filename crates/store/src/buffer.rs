//! Memory that direct I/O accepts.

use stillpoint_image::PAGE;

/// A buffer that begins at a page boundary.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// A buffer of `len` zero bytes. Safe Rust cannot ask for aligned memory, so a page more is taken.
    pub fn new(len: usize) -> Self {
        let memory = vec![0; len + PAGE as usize];
        let start = memory.as_ptr().align_offset(PAGE as usize);
        Buffer { memory, start, len }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}
