//! A client outside the program that keeps its connection, as a thread of the test.

use crate::wait_for;
use std::io::{BufReader, Result};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a client waits for an answer, and others for a client.
const PATIENCE: Duration = Duration::from_secs(60);

/// A client that says something and hears an answer, again and again, on one connection.
pub struct Client {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Client {
    /// Connects to a port of this machine; `round` is what it says and hears in a round, of which it is told the number.
    pub fn new(
        port: u16,
        mut round: impl FnMut(&mut BufReader<TcpStream>, u64) -> Result<()> + Send + 'static,
    ) -> Self {
        let (rounds, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        stream.set_nodelay(true).expect("nodelay");
        let (counter, until) = (rounds.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            while !until.load(Ordering::Relaxed) {
                round(&mut stream, counter.load(Ordering::Relaxed))?;
                counter.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        Client { rounds, stop, thread }
    }

    /// How many rounds there were.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Whether it has lost its connection.
    pub fn has_lost(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until it is seen that its connection lives.
    #[track_caller]
    pub fn goes_on(&self, what: &str) {
        let from = self.rounds();
        wait_for(&format!("a client to go on {what}"), PATIENCE, || {
            assert!(!self.has_lost(), "{what}: a client has lost its connection");
            (self.rounds() > from + 1).then_some(())
        });
    }

    /// Ends it; tells how many rounds there were, or how it lost its connection.
    pub fn end(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("client")?;
        Ok(self.rounds.load(Ordering::Relaxed))
    }
}
