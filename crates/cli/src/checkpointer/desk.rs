//! Where checkpoints are asked for, and the one thread that takes them, one after the other.

use crate::failure::{Failure, Result};
use crate::progress::Counts;
use crate::taken::{Asked, Taken, failure};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use stillpoint_capture::Session;
use stillpoint_store::{Store, Trouble};

/// Between two looks at a job whose memory is still being loaded.
const TEND: Duration = Duration::from_millis(20);

/// Takes orders. They are carried out in turn.
#[derive(Clone, Debug)]
pub struct Desk {
    queue: Sender<Order>,
    /// Orders that were handed in and are not done.
    open: Arc<AtomicUsize>,
}

/// A checkpoint to be taken.
#[derive(Debug)]
struct Order {
    asked: Asked,
    counts: Arc<Counts>,
    /// Whoever asked for it has gone.
    abandoned: Arc<AtomicBool>,
    /// Nobody: the clock asked.
    answer: Option<Sender<Result<Taken>>>,
}

/// What whoever asked for a checkpoint holds in their hands. If it is dropped before their turn comes, there is none.
#[derive(Debug)]
pub struct Ticket {
    counts: Arc<Counts>,
    abandoned: Arc<AtomicBool>,
    answer: Receiver<Result<Taken>>,
}

impl Ticket {
    /// Waits for the outcome; `None` if there is none yet.
    pub fn wait(&self, patience: Duration) -> Option<Result<Taken>> {
        match self.answer.recv_timeout(patience) {
            Ok(outcome) => Some(outcome),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(Failure::failed("the checkpoint failed inside the supervisor")))
            }
        }
    }

    /// How many bytes there are to save, and how many have been.
    pub fn progress(&self) -> (u64, u64) {
        self.counts.get()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}

impl Desk {
    /// Opens it: from now on `taker` takes what is asked for, in a thread of its own.
    pub fn open(taker: Taker) -> Result<Self> {
        let (queue, orders) = channel();
        let open = Arc::new(AtomicUsize::new(0));
        let theirs = open.clone();
        let work = move || taker.work(&orders, &theirs);
        let started = std::thread::Builder::new().name("checkpoints".into()).spawn(work);
        started.map_err(|e| Failure::failed(format!("cannot start a thread: {e}")))?;
        Ok(Self { queue, open })
    }

    /// Whether nothing is being done or waits to be.
    pub fn is_idle(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    /// Asks for a checkpoint for somebody who waits for it.
    pub fn hand_in(&self, asked: Asked) -> Ticket {
        let (sender, answer) = channel();
        let ticket = Ticket { counts: Arc::default(), abandoned: Arc::default(), answer };
        let (counts, abandoned) = (ticket.counts.clone(), ticket.abandoned.clone());
        self.order(Order { asked, counts, abandoned, answer: Some(sender) });
        ticket
    }

    /// Asks for a checkpoint because it is time.
    pub fn tick(&self, asked: Asked) {
        self.order(Order { asked, counts: Arc::default(), abandoned: Arc::default(), answer: None });
    }

    fn order(&self, order: Order) {
        self.open.fetch_add(1, Ordering::AcqRel);
        // Fails only if the other thread has ended, and then the ticket tells so.
        let _ = self.queue.send(order);
    }
}

/// Takes the checkpoints of one job.
#[derive(Debug)]
pub struct Taker {
    /// Where they go.
    pub store: Store,
    /// The job.
    pub job: String,
    /// Follows its process.
    pub session: Session,
    /// Streams besides the standard ones that it was started with.
    pub inherited: Vec<(u32, Vec<u8>)>,
    /// How often the clock asks.
    pub every: Option<Duration>,
    /// How many of the newest checkpoints stay when the clock has asked for one.
    pub keep: Option<usize>,
    /// What the user should know.
    pub trouble: Trouble,
}

impl Taker {
    fn work(mut self, orders: &Receiver<Order>, open: &AtomicUsize) {
        while let Some(order) = self.next(orders) {
            if !order.abandoned.load(Ordering::Relaxed) {
                let outcome = self.take(&order.asked, &order.counts);
                match order.answer {
                    // Somebody who has gone meanwhile finds it in the store.
                    Some(answer) => drop(answer.send(outcome)),
                    None => self.after_tick(outcome),
                }
            }
            open.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The next order; until there is one, the job is tended.
    fn next(&mut self, orders: &Receiver<Order>) -> Option<Order> {
        while self.session.tend() {
            match orders.recv_timeout(TEND) {
                Err(RecvTimeoutError::Timeout) => {}
                received => return received.ok(),
            }
        }
        orders.recv().ok()
    }

    fn take(&mut self, asked: &Asked, counts: &Counts) -> Result<Taken> {
        let options = asked.options(self.inherited.clone());
        let report = self.session.checkpoint(&self.store, &options, counts);
        report.map(Taken::from).map_err(|e| failure(e, "checkpoint", &asked.target))
    }

    /// Makes room, and writes down what went wrong: nobody waits for a word.
    fn after_tick(&mut self, outcome: Result<Taken>) {
        let mut now = self.trouble.clone();
        let pruned = outcome.and_then(|taken| {
            if let Some(every) = self.every.filter(|&every| taken.wall() > every) {
                now.slow.get_or_insert_with(|| slow(taken.wall(), every));
            }
            let Some(keep) = self.keep else { return Ok(()) };
            self.store.roll(&self.job, keep).map(drop).map_err(crate::jobs::store_failure)
        });
        now.failing = pruned.err().map(|failure| {
            let since = self.trouble.failing.as_ref().filter(|(_, what)| *what == failure.what);
            (since.map_or_else(crate::output::now_ns, |(since, _)| *since), failure.what)
        });
        // A store that takes no records takes no checkpoints either; the next tick tries again.
        if now != self.trouble && self.store.set_trouble(&self.job, &now).is_ok() {
            self.trouble = now;
        }
    }
}

fn slow(took: Duration, every: Duration) -> String {
    let (took, every) = (crate::output::short(took), crate::output::short(every));
    format!("a checkpoint took {took}, longer than the period of {every}: some are left out")
}
