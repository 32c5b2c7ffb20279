//! Where checkpoints are asked for, and the one thread that takes them, one after the other.

use crate::chronicle;
use crate::failure::{Failure, Result};
use crate::pace::{FIRST, Pacer};
use crate::progress::Counts;
use crate::taken::{Asked, Ending, Taken, failure};
use std::io::{PipeWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use stillpoint_capture::{Error, Session};
use stillpoint_store::history::Why;
use stillpoint_store::{Every, Pace, Rolling, Store, Trouble};

/// How long the clock waits for whoever follows the job next.
const WAY: Duration = Duration::from_secs(1);
/// Between two looks at a job whose memory is still being loaded.
const TEND: Duration = Duration::from_millis(20);

/// Takes orders. They are carried out in turn.
#[derive(Clone, Debug)]
pub struct Desk {
    queue: Sender<Order>,
    /// Orders that were handed in and are not done.
    open: Arc<AtomicUsize>,
}

/// What is to be done.
#[derive(Debug)]
enum Order {
    Take(Taking),
    /// Nobody follows the job until the next checkpoint; who asked hears whether it is so.
    GiveWay(Sender<bool>),
}

/// A checkpoint to be taken.
#[derive(Debug)]
struct Taking {
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

    /// Whether something waits for its turn, while something else is being done.
    pub fn has_waiting(&self) -> bool {
        self.open.load(Ordering::Acquire) > 1
    }

    /// Asks for a checkpoint for somebody who waits for it.
    pub fn hand_in(&self, asked: Asked) -> Ticket {
        let (sender, answer) = channel();
        let ticket = Ticket { counts: Arc::default(), abandoned: Arc::default(), answer };
        let (counts, abandoned) = (ticket.counts.clone(), ticket.abandoned.clone());
        self.order(Order::Take(Taking { asked, counts, abandoned, answer: Some(sender) }));
        ticket
    }

    /// Asks for a checkpoint because it is time.
    pub fn tick(&self, asked: Asked) {
        let (counts, abandoned) = (Arc::default(), Arc::default());
        self.order(Order::Take(Taking { asked, counts, abandoned, answer: None }));
    }

    /// Asks that nobody follows the job until the next checkpoint; whether it is so.
    pub fn give_way(&self) -> Receiver<bool> {
        let (sender, answer) = channel();
        self.order(Order::GiveWay(sender));
        answer
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
    pub every: Option<Every>,
    /// Checkpoints that the clock asks for can be taken when somebody else follows the job.
    pub can_give_way: bool,
    /// Keeps the newest checkpoints only, when the clock has asked for one, and joins their segments.
    pub rolling: Rolling,
    /// What the user should know.
    pub trouble: Trouble,
    /// Where the clock asks as often as pays.
    pub pacing: Option<Pacing>,
}

/// How often checkpoints pay, and who waits to know it.
#[derive(Debug)]
pub struct Pacing {
    /// Finds it out.
    pub pacer: Pacer,
    /// The last that was found out.
    pub last: Option<Pace>,
    /// Hears, after each checkpoint that the clock has asked for, how long it is to the next, nanoseconds.
    pub clock: PipeWriter,
}

impl Pacing {
    fn end(&mut self, store: &Store, job: &str, outcome: &Result<Taken>) {
        if let Ok(taken) = outcome {
            let pace = self.pacer.end(taken.paced());
            // What changed little is not worth a write each time.
            let alike = |last: &Pace| pace.interval_ns.abs_diff(last.interval_ns) < last.interval_ns / 20;
            if !self.last.as_ref().is_some_and(alike) && store.set_pace(job, Some(&pace)).is_ok() {
                self.last = Some(pace);
            }
        }
        let interval = self.last.map_or(FIRST.as_nanos() as u64, |pace| pace.interval_ns);
        let _ = self.clock.write_all(&interval.to_le_bytes()); // its reader is ours
    }
}

impl Taker {
    fn work(mut self, orders: &Receiver<Order>, open: &AtomicUsize) {
        let mut way_until = None;
        while let Some(order) = self.next(orders) {
            let order = match order {
                Order::Take(order) => order,
                Order::GiveWay(answer) => {
                    let _ = answer.send(self.can_give_way && self.session.give_way());
                    way_until = Some(Instant::now() + WAY);
                    open.fetch_sub(1, Ordering::AcqRel);
                    continue;
                }
            };
            if order.answer.is_none()
                && let Some(until) = way_until.take()
            {
                std::thread::sleep(until.saturating_duration_since(Instant::now()));
            }
            if !order.abandoned.load(Ordering::Relaxed) {
                let why = if order.answer.is_some() { Why::Asked } else { Why::Periodic };
                if let Some(pacing) = &mut self.pacing {
                    pacing.pacer.begin();
                }
                let outcome = self.take(&order.asked, &order.counts, why);
                match order.answer {
                    // Somebody who has gone meanwhile finds it in the store.
                    Some(answer) => drop(answer.send(outcome)),
                    None => {
                        if let Some(pacing) = &mut self.pacing {
                            pacing.end(&self.store, &self.job, &outcome);
                        }
                        self.after_tick(outcome);
                    }
                }
                let _ = self.store.thin_history(&order.asked.job);
            }
            open.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The next order; until there is one, the job is tended, and what is owed is given back.
    fn next(&mut self, orders: &Receiver<Order>) -> Option<Order> {
        let mut tends = true;
        loop {
            tends = tends && self.session.tend();
            let left = self.rolling.due().map(|due| due.saturating_duration_since(Instant::now()));
            let patience = left.into_iter().chain(tends.then_some(TEND)).min();
            let received = match patience {
                Some(patience) => orders.recv_timeout(patience),
                None => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match received {
                Err(RecvTimeoutError::Timeout) => {}
                received => return received.ok(),
            }
            if self.rolling.due().is_some() {
                let _ = self.rolling.settle(); // the next tick tells what holds it up
            }
        }
    }

    fn take(&mut self, asked: &Asked, counts: &Counts, why: Why) -> Result<Taken> {
        let options = asked.options(self.inherited.clone());
        let taking = chronicle::Taking::begin(why, self.interval());
        let ending = Ending { progress: counts, store: &self.store, job: &self.job };
        let mut report = self.session.checkpoint(&self.store, &options, &ending);
        // What is owed, or kept to be written anew, may be what is missing.
        if let Err(Error::Store(e)) = &report
            && e.is_full()
            && self.rolling.make_room().is_ok_and(|freed| freed.bytes > 0)
        {
            report = self.session.checkpoint(&self.store, &options, &ending);
        }
        taking.note(&self.store, asked, &report);
        report.map(Taken::from).map_err(|e| failure(e, "checkpoint", &asked.target))
    }

    /// How often the clock asks at the time.
    fn interval(&self) -> Option<Duration> {
        let paced = self.pacing.as_ref().and_then(|pacing| pacing.last);
        paced.map(|pace| Duration::from_nanos(pace.interval_ns)).or(self.every.and_then(Every::time))
    }

    /// Makes room, and writes down what went wrong: nobody waits for a word.
    fn after_tick(&mut self, outcome: Result<Taken>) {
        let mut now = self.trouble.clone();
        let pruned = outcome.and_then(|taken| {
            if let Some(every) = self.every.and_then(Every::time).filter(|&every| taken.wall() > every) {
                now.slow.get_or_insert_with(|| slow(taken.wall(), every));
            }
            self.rolling.roll().map_err(crate::jobs::store_failure)?;
            self.rolling.held_up().map_or(Ok(()), |why| {
                Err(Failure::failed(format!("not all room of older checkpoints can be given back: {why}")))
            })
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
