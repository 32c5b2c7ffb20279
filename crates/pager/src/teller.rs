//! What is told of a program whose memory is paged: how much has left and come back, and what is wrong. The store may take its time to
//! write that down, so it is done on a thread of its own, for which nobody waits.

use crate::work::Work;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_store::Paging;

/// Between two looks at the counts. So often they are told, at most.
const PERIOD: Duration = Duration::from_secs(1);

/// Tells what is new.
pub(crate) struct Teller<'a> {
    work: &'a Work<'a>,
    news: Mutex<News>,
    come: Condvar,
}

/// What is to be told at once.
#[derive(Debug, Default)]
struct News {
    /// What is wrong.
    trouble: Option<String>,
    /// That is new.
    is_new: bool,
    /// Nothing comes after it.
    is_over: bool,
}

impl<'a> Teller<'a> {
    /// Of this program, of which nothing has been told.
    pub fn new(work: &'a Work<'a>) -> Self {
        Teller { work, news: Mutex::default(), come: Condvar::new() }
    }

    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something is wrong, as far as this one has heard.
    pub fn has_trouble(&self) -> bool {
        self.news().trouble.is_some()
    }

    /// Something is wrong, or nothing any more.
    pub fn trouble(&self, what: Option<String>) {
        let mut news = self.news();
        (news.trouble, news.is_new) = (what, true);
        self.come.notify_one();
    }

    /// Nobody serves the program any more.
    pub fn end(&self) {
        self.news().is_over = true;
        self.come.notify_one();
    }

    /// Counts, and tells what is new, until it is over.
    pub fn run(&self) {
        let (mut at, mut before) = (Instant::now(), self.work.paged());
        let (mut rates, mut told) = ((0, 0), None::<Paging>);
        loop {
            let (trouble, is_over) = self.wait(at + PERIOD);
            let (paging, passed) = (self.work.paging(), at.elapsed());
            if passed >= PERIOD {
                let rate = |now: u64, before: u64| a_second(now.saturating_sub(before), passed);
                rates = (rate(paging.paged.out, before.out), rate(paging.paged.back, before.back));
                (at, before) = (Instant::now(), paging.paged);
            }
            let now = Paging { out_rate: rates.0, in_rate: rates.1, trouble, ..paging };
            // In the end somebody waits, who serves the program no more: what is only counted the next one tells.
            let is_new = match is_over {
                true => now.trouble.as_ref() != told.as_ref().and_then(|told| told.trouble.as_ref()),
                false => told.as_ref() != Some(&now),
            };
            // Of a program that has ended nobody wants to know, and its job may be gone.
            if is_new && !self.work.has_ended() {
                (self.work.heard)(&now);
                told = Some(now);
            }
            if is_over {
                return;
            }
        }
    }

    /// Waits until then, or until there are news; returns what is wrong, and whether it is over.
    fn wait(&self, until: Instant) -> (Option<String>, bool) {
        let left = until.saturating_duration_since(Instant::now());
        let are_none = |news: &mut News| !news.is_new && !news.is_over;
        let waited = self.come.wait_timeout_while(self.news(), left, are_none);
        let (mut news, _) = waited.unwrap_or_else(PoisonError::into_inner);
        news.is_new = false;
        (news.trouble.clone(), news.is_over)
    }
}

/// So many in so long are that many a second; few are not none.
fn a_second(count: u64, passed: Duration) -> u64 {
    (count as f64 / passed.as_secs_f64().max(f64::EPSILON)).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_are_not_none() {
        let of = |count, ms| a_second(count, Duration::from_millis(ms));
        assert_eq!([of(0, 1000), of(1, 60_000), of(300, 1500)], [0, 1, 200]);
    }
}
