//! What clients of redis notice of checkpoints, and of its own way to save itself.

use crate::bench::{Bench, Failures, size_name};
use crate::latency::{Measured, meanwhile};
use crate::programs::CLOSE;
use crate::report::{Figure, Limit, Promise, Section};
use crate::tools::{Job, Request};
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const ABOUT: &str = "\
A redis-server with values of 1,000 bytes, to which four connections each send a request every millisecond, SETs and GETs of random
keys. A request's time counts from when it was due, if the answer before it came later than that. What is counted is due while something is done, in turn: a checkpoint by each engine (`incremental`: by `auto` as a job, which saves
what has changed since the last one, and which is followed meanwhile), BGSAVE, and nothing for a second (`none`). `pause`
is the command's stopwatch, `takes` all the time it took, `most` the longest request of all runs. All others are figures of each
run by itself, of which the medians are told.";

const CONNECTIONS: u64 = 4;
/// Between two requests of a connection.
const PERIOD: Duration = Duration::from_millis(1);
/// Values of 1,000 bytes for each MiB.
const VALUES: u64 = 900;
const LENGTH: usize = 1000;
/// Time for which the server is left alone.
const ALONE: Duration = Duration::from_secs(1);
/// For so long an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(60);
const JOB: &str = "redis";
const INCREMENTAL: &str = "incremental";
const BGSAVE: &str = "BGSAVE";

/// Measures it.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("redis", ABOUT);
    let mebibytes = bench.base_size().min(bench.plan.memory() / 4);
    if !crate::real::is_installed("redis-server") {
        section.note("redis-server is not installed: nothing was measured");
        return Ok(section);
    }
    let measured = measure(bench, mebibytes, &mut section)?;
    let title = format!("Latencies with {} of values.", size_name(mebibytes));
    section.tables.push(meanwhile("redis", &title, "requests", &measured));
    section.promises.extend(promises(bench, mebibytes, &measured));
    Ok(section)
}

fn measure(bench: &Bench, mebibytes: u64, section: &mut Section) -> Result<Vec<(String, Measured)>> {
    let mut failures = Failures::default();
    let mut measured: Vec<(String, Measured)> = Vec::new();
    let store = bench.plan.place("redis-store")?;
    let engines = bench.engines.iter().map(|e| e.name);
    let peers = bench.peers.iter().map(|p| p.name());
    let names = ["none"].into_iter().chain(engines).chain(peers).chain([BGSAVE, INCREMENTAL]);
    measured.extend(names.map(|name| (name.to_owned(), Measured::default())));
    {
        let server = Server::start(bench, mebibytes)?;
        let mut load = Load::start(server.port, mebibytes * VALUES)?;
        for run in 0..=bench.plan.runs {
            for (name, m) in &mut measured {
                let mut pause = f64::NAN;
                let engine = bench.engines.iter().find(|e| e.name == name);
                let peer = bench.peers.iter().find(|p| p.name() == name);
                let place = bench.plan.directory.join("redis-peer");
                let window = load.during(|| match (name.as_str(), engine, peer) {
                    (INCREMENTAL, ..) => Ok(false),
                    ("none", ..) => {
                        std::thread::sleep(ALONE);
                        Ok(true)
                    }
                    (BGSAVE, ..) => server.save().map(|()| true),
                    (_, Some(engine), _) => {
                        let cut = failures.checkpoint(bench, server.pid, &store, *engine);
                        cut.iter().for_each(|cut| pause = cut.own_pause_ms());
                        Ok(cut.is_some())
                    }
                    (_, _, Some(peer)) => Ok(peer.checkpoint(server.pid, &place).is_ok()),
                    _ => bail!("there is no {name}"),
                })?;
                add(m, run, window, pause);
            }
        }
        load.end()?;
    }
    incremental(bench, mebibytes, &mut measured)?;
    failures.tell(section);
    for peer in &bench.peers {
        if measured.iter().any(|(name, m)| name == peer.name() && m.latencies.count() == 0) {
            section.note(format!("{} could not checkpoint it", peer.name()));
        }
    }
    Ok(measured)
}

/// The first run does not count.
fn add(m: &mut Measured, run: usize, window: Option<Window>, pause: f64) {
    if let Some(window) = window.filter(|_| run > 0) {
        m.latencies.add(window.latencies);
        m.takes.add_time(window.took);
        m.pause.add(pause);
    }
}

/// As a job, which is followed all the time.
fn incremental(bench: &Bench, mebibytes: u64, measured: &mut [(String, Measured)]) -> Result<()> {
    let Some((_, m)) = measured.iter_mut().find(|(name, _)| name == INCREMENTAL) else { return Ok(()) };
    let store = bench.plan.place("redis-store")?;
    let server = Server::start_job(bench, mebibytes, &store)?;
    let mut load = Load::start(server.port, mebibytes * VALUES)?;
    // The first one is a complete one.
    for run in 0..=bench.plan.runs {
        std::thread::sleep(ALONE);
        let mut pause = f64::NAN;
        let window = load.during(|| {
            let engine = Some(bench.default_engine());
            let request = Request { engine, keep: Some("2"), ..Request::default() };
            pause = bench.stillpoint.checkpoint(JOB, &store, request)?.own_pause_ms();
            Ok(true)
        })?;
        add(m, run, window, pause);
    }
    load.end()
}

fn promises(bench: &Bench, mebibytes: u64, measured: &[(String, Measured)]) -> Vec<Promise> {
    let of = |name: &str| measured.iter().find(|(n, _)| n == name).map(|(_, m)| &m.latencies);
    let Some(none) = of("none") else { return Vec::new() };
    let size = size_name(mebibytes);
    let mut promises = Vec::new();
    for name in [bench.default_engine().name, INCREMENTAL] {
        let Some(m) = of(name) else { continue };
        promises.push(Promise {
            what: format!(
                "redis with {size}, p99.9 while it is checkpointed ({name}): at most 2 × that without"
            ),
            reached: Figure(m.rare(), "ms"),
            peer: Some(("none".into(), Figure(none.rare(), "ms"))),
            limit: Limit::TimesPeer(2.0),
        });
        promises.push(Promise {
            what: format!(
                "redis with {size}, longest request while it is checkpointed ({name}), beyond the usual: at most 5 ms; \
                 beside BGSAVE"
            ),
            reached: Figure(m.longest() - none.longest(), "ms"),
            peer: of(BGSAVE).map(|b| (BGSAVE.to_owned(), Figure(b.longest() - none.longest(), "ms"))),
            limit: Limit::AtMost(5.0),
        });
    }
    promises
}

/// A server that runs. It is killed when this is dropped.
struct Server {
    pid: u32,
    port: u16,
    keeper: Keeper,
}

/// How it is ended.
enum Keeper {
    Child(Child),
    Job(Job),
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-9", &self.pid.to_string()]).output();
        match &mut self.keeper {
            Keeper::Child(child) => drop(child.wait()),
            Keeper::Job(job) => drop(job.wait()),
        }
    }
}

impl Server {
    fn command(bench: &Bench) -> Result<(Vec<String>, PathBuf, u16)> {
        let place = bench.plan.place("redis")?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let number = port.to_string();
        let command = ["redis-server", "--port", &number, "--bind", "127.0.0.1", "--save", ""];
        let more = ["--enable-debug-command", "local", "--daemonize", "no", "--logfile", "log"];
        Ok((command.iter().chain(&more).map(|&word| word.to_owned()).collect(), place, port))
    }

    fn start(bench: &Bench, mebibytes: u64) -> Result<Self> {
        let (command, place, port) = Self::command(bench)?;
        let mut process = Command::new("bash");
        process.args(["-c", CLOSE, "bash", "setsid"]).args(command).current_dir(&place);
        process.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = process.spawn().context("bash, setsid")?;
        Self { pid: child.id(), port, keeper: Keeper::Child(child) }.filled(mebibytes)
    }

    fn start_job(bench: &Bench, mebibytes: u64, store: &Path) -> Result<Self> {
        let (command, place, port) = Self::command(bench)?;
        let job = bench.stillpoint.run(store, JOB, &place, &command)?;
        Self { pid: job.pid, port, keeper: Keeper::Job(job) }.filled(mebibytes)
    }

    fn filled(self, mebibytes: u64) -> Result<Self> {
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            ensure!(Instant::now() < until, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        let said = Connection::new(self.port)?.ask(&[
            b"DEBUG",
            b"POPULATE",
            (mebibytes * VALUES).to_string().as_bytes(),
            b"key",
            b"1000",
        ])?;
        ensure!(said == b"OK", "redis-server: {}", String::from_utf8_lossy(&said));
        Ok(self)
    }

    /// Has it save itself.
    fn save(&self) -> Result<()> {
        let mut connection = Connection::new(self.port)?;
        connection.ask(&[b"BGSAVE"])?;
        loop {
            std::thread::sleep(Duration::from_millis(10));
            let said = connection.ask(&[b"INFO", b"persistence"])?;
            let said = String::from_utf8_lossy(&said).into_owned();
            if said.contains("rdb_bgsave_in_progress:0") {
                ensure!(said.contains("rdb_last_bgsave_status:ok"), "BGSAVE failed");
                return Ok(());
            }
        }
    }
}

/// A connection to a server.
struct Connection(BufReader<TcpStream>);

impl Connection {
    fn new(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Connection(BufReader::new(stream)))
    }

    /// Sends a command; the answer, if it is a string.
    fn ask(&mut self, words: &[&[u8]]) -> Result<Vec<u8>> {
        let mut request = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            request.extend(format!("${}\r\n", word.len()).as_bytes());
            request.extend_from_slice(word);
            request.extend(b"\r\n");
        }
        self.0.get_mut().write_all(&request)?;
        let mut head = String::new();
        ensure!(self.0.read_line(&mut head)? > 0, "the connection was closed");
        let (kind, rest) = head.trim_end().split_at(1);
        match kind {
            "+" => Ok(rest.as_bytes().to_vec()),
            "$" => {
                let mut body = vec![0; rest.parse::<usize>().context("a length")? + 2];
                self.0.read_exact(&mut body)?;
                body.truncate(body.len() - 2);
                Ok(body)
            }
            _ => bail!("unexpected: {head:?}"),
        }
    }
}

/// One request: when it was due, and when its answer was there.
type Sample = (Instant, Instant);

/// Clients that send requests all the time.
struct Load {
    stop: Arc<AtomicBool>,
    window: Arc<AtomicU64>,
    samples: Arc<Mutex<Vec<Sample>>>,
    clients: Vec<JoinHandle<Result<()>>>,
    failed: mpsc::Receiver<()>,
}

/// What was asked while something was done.
struct Window {
    latencies: Vec<f64>,
    took: Duration,
}

impl Load {
    fn start(port: u16, keys: u64) -> Result<Self> {
        let (stop, samples) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let window = Arc::new(AtomicU64::new(0));
        let (sender, failed) = mpsc::channel();
        let client = |number| {
            let (stop, samples, connection) = (stop.clone(), samples.clone(), Connection::new(port)?);
            let (sender, window) = (sender.clone(), window.clone());
            Ok(std::thread::spawn(move || {
                let ended =
                    requests(connection, number, keys, &Until { stop: &stop, window: &window }, &samples);
                let _ = sender.send(());
                ended
            }))
        };
        let clients = (0..CONNECTIONS).map(client).collect::<Result<_>>()?;
        Ok(Load { stop, window, samples, clients, failed })
    }

    fn taken(&self) -> Vec<Sample> {
        std::mem::take(&mut *self.samples.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// What is asked while something is done; nothing if that could not be done.
    fn during(&mut self, act: impl FnOnce() -> Result<bool>) -> Result<Option<Window>> {
        // What is late then is not the fault of what comes.
        self.window.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(200));
        let began = Instant::now();
        let done = act()?;
        let ended = Instant::now();
        // Until every connection has had an answer to what was due by then.
        let mut all = Vec::new();
        while all.iter().filter(|(due, _)| *due > ended).count() < 4 * CONNECTIONS as usize {
            ensure!(ended.elapsed() < PATIENCE, "redis-server does not answer");
            ensure!(self.failed.try_recv().is_err(), "a connection has ended");
            std::thread::sleep(Duration::from_millis(5));
            all.extend(self.taken());
        }
        let within = all.iter().filter(|(due, _)| (began..=ended).contains(due));
        let latencies = within.map(|(due, answered)| (*answered - *due).as_secs_f64() * 1e3).collect();
        Ok(done.then(|| Window { latencies, took: ended - began }))
    }

    fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().ok().context("a client has panicked")??;
        }
        Ok(())
    }
}

/// What clients are told: to stop, and that another window begins, in which nothing is due yet.
struct Until<'a> {
    stop: &'a AtomicBool,
    window: &'a AtomicU64,
}

/// Sends requests, and checks the answers.
fn requests(
    mut connection: Connection,
    number: u64,
    keys: u64,
    until: &Until<'_>,
    samples: &Mutex<Vec<Sample>>,
) -> Result<()> {
    let mut seed = number + 1;
    let mut due = Instant::now();
    let mut counted = 0;
    while !until.stop.load(Ordering::Relaxed) {
        let window = until.window.load(Ordering::Relaxed);
        if window != counted {
            counted = window;
            due = Instant::now();
        }
        // The answer before came too late: its delay is that of this one, too.
        let late = Instant::now() > due;
        if !late {
            std::thread::sleep(due - Instant::now());
        }
        let from = if late { due } else { Instant::now() };
        seed = seed * 16807 % 2_147_483_647;
        let key = format!("key:{}", seed % keys);
        if seed.is_multiple_of(2) {
            let value = format!("{:01$}", seed, LENGTH);
            let said = connection.ask(&[b"SET", key.as_bytes(), value.as_bytes()])?;
            ensure!(said == b"OK", "SET: {}", String::from_utf8_lossy(&said));
        } else {
            let said = connection.ask(&[b"GET", key.as_bytes()])?;
            ensure!(said.len() == LENGTH, "GET: {} bytes", said.len());
        }
        samples.lock().unwrap_or_else(|e| e.into_inner()).push((from, Instant::now()));
        due += PERIOD;
    }
    Ok(())
}
