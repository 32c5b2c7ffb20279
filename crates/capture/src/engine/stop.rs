//! The engine `stop`: all pages are copied while the program stands still. What the others are compared with.

use super::{Cut, Engine, MemoryEngine, Running, Still, put};
use crate::Result;
use crate::regions::{own_pages, spans, zeros};
use stillpoint_image::Range;

/// At work on one checkpoint.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    own: Vec<Range>,
}

impl MemoryEngine for Stop {
    fn engine(&self) -> Engine {
        Engine::Stop
    }

    fn prepare(&mut self, running: &mut Running<'_>) -> Result<()> {
        running.writer.forget(running.target.owner());
        Ok(())
    }

    fn cut(&mut self, still: &mut Still<'_>) -> Result<Cut> {
        let spans = spans(&still.builder.image.spaces[still.target.space as usize]);
        let mut kinds = [Vec::new(), Vec::new()];
        for span in &spans {
            own_pages(&still.target.pagemap, span, &mut kinds[usize::from(span.zeros_matter)])?;
        }
        still.progress.start(kinds.iter().flatten().map(|r| r.len).sum());
        for zeros_matter in [false, true] {
            let ranges = &kinds[usize::from(zeros_matter)];
            put(
                still.target.owner(),
                &still.target.memory,
                ranges,
                zeros(zeros_matter),
                still.writer,
                still.progress,
            )?;
        }
        self.own = kinds.concat();
        self.own.sort_by_key(|r| r.start);
        Ok(Cut::Taken)
    }

    fn finish(&mut self, running: &mut Running<'_>) -> Result<()> {
        running.writer.keep_only(running.target.owner(), std::mem::take(&mut self.own));
        Ok(())
    }
}
