//! Of a process that shares its memory with another, whose engine saves it.

use super::{Cut, Engine, MemoryEngine, Running, Still};
use crate::Result;

/// Nothing is done.
#[derive(Debug)]
pub(crate) struct Elsewhere;

impl MemoryEngine for Elsewhere {
    fn engine(&self) -> Engine {
        Engine::Stop
    }

    fn prepare(&mut self, _: &mut Running<'_>) -> Result<()> {
        Ok(())
    }

    fn cut(&mut self, _: &mut Still<'_>) -> Result<Cut> {
        Ok(Cut::Taken)
    }

    fn finish(&mut self, _: &mut Running<'_>) -> Result<()> {
        Ok(())
    }

    fn try_again(&self) -> bool {
        true
    }
}
