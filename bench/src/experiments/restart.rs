//! Time from the first instruction of a restored program to the end of its next unit of work.

use crate::bench::Bench;
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ABOUT: &str = "\
Programs with large heaps are checkpointed and killed, their checkpoint in the page cache, and restored; at once a client asks
for a unit of work. `work` is the time from the program's first instruction to the end of that work: restored eagerly, lazily
for the first time, and lazily after that was recorded. `faults` is how often the program waited for a page.";

/// How long a program may take to begin.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program that answers at a socket.
struct Service {
    name: &'static str,
    about: &'static str,
    command: fn(&Path) -> Vec<String>,
    /// Fills its heap.
    fill: fn(&mut Client) -> Result<()>,
    /// A unit of work, the same for the same seed.
    work: fn(&mut Client, u64) -> Result<()>,
}

const SERVICES: [Service; 2] = [
    Service {
        name: "redis",
        about: "1,000 random GETs of 900,000 keys of 1 KB",
        command: |socket| {
            let words = [
                "redis-server",
                "--port",
                "0",
                "--save",
                "",
                "--enable-debug-command",
                "yes",
                "--unixsocket",
            ];
            words.iter().map(ToString::to_string).chain([socket.display().to_string()]).collect()
        },
        fill: |client| client.line("DEBUG POPULATE 900000 key 1000").map(drop),
        work: |client, seed| {
            let mut state = seed;
            for _ in 0..1000 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let head = client.line(&format!("GET key:{}", (state >> 33) % 900_000))?;
                if !head.starts_with('$') || head.starts_with("$-1") {
                    bail!("redis says {head}");
                }
                client.read()?;
            }
            Ok(())
        },
    },
    Service {
        name: "python",
        about: "10,000 lookups at random in a dictionary of 2.5 million entries",
        command: |socket| {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/heap.py");
            ["python3".into(), script.display().to_string(), socket.display().to_string(), "1000".into()]
                .to_vec()
        },
        fill: |_| Ok(()),
        work: |client, seed| client.line(&seed.to_string()).map(drop),
    },
];

/// A connection to a service.
struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects as soon as somebody answers.
    fn connect(socket: &Path) -> Result<Self> {
        let until = Instant::now() + PATIENCE;
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => return Ok(Client(BufReader::new(stream))),
                Err(e) if Instant::now() > until => return Err(e).context("nobody answers"),
                Err(_) => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }

    fn line(&mut self, line: &str) -> Result<String> {
        self.0.get_mut().write_all(format!("{line}\r\n").as_bytes())?;
        self.read()
    }

    fn read(&mut self) -> Result<String> {
        let mut answer = String::new();
        match self.0.read_line(&mut answer)? {
            0 => bail!("it has ended"),
            _ => Ok(answer),
        }
    }
}

/// What was measured of one way to restore.
#[derive(Default)]
struct Measured {
    runs: Series,
    work: Series,
    faults: Series,
}

/// Measures all services that are installed.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("restart", ABOUT);
    let columns =
        ["program", "restored", "runs, ms", "work, ms", "least", "most", "of eager", "faults", "runs"];
    let mut table = Table::new("restart", "Medians.", &columns);
    for service in &SERVICES {
        let program = (service.command)(Path::new("socket")).swap_remove(0);
        if !std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .any(|p| p.join(&program).is_file())
        {
            section.note(format!("{} is skipped: {program} is not installed", service.name));
            continue;
        }
        section.note(format!("{}: {}.", service.name, service.about));
        let ways = measure(bench, service).with_context(|| service.name)?;
        let eager = ways[0].1.work.median();
        for (way, m) in &ways {
            let numbers = [m.runs.median(), m.work.median(), m.work.least(), m.work.most()];
            let mut row = vec![service.name.to_owned(), (*way).to_owned()];
            row.extend(numbers.into_iter().chain([m.work.median() / eager, m.faults.median()]).map(number));
            row.push(m.work.count().to_string());
            table.row(row);
        }
        let (first, later) = (&ways[1].1, &ways[2].1);
        section.promises.push(Promise {
            what: format!(
                "next unit of work of {} after a restore that was recorded: at most 1.2 × eager",
                service.name
            ),
            reached: Figure(later.work.median(), "ms"),
            peer: Some(("eager".into(), Figure(eager, "ms"))),
            limit: Limit::TimesPeer(1.2),
        });
        section.promises.push(Promise {
            what: format!(
                "{}: waits for pages after a restore that was recorded: at most 10 % of the first",
                service.name
            ),
            reached: Figure(later.faults.median(), ""),
            peer: Some(("first".into(), Figure(first.faults.median(), ""))),
            limit: Limit::TimesPeer(0.1),
        });
    }
    section.tables.push(table);
    Ok(section)
}

fn measure(bench: &Bench, service: &Service) -> Result<[(&'static str, Measured); 3]> {
    let place = bench.plan.place("restart")?;
    let (socket, store) = (place.join("socket"), place.join("store"));
    let started = Started::start(&(service.command)(&socket), &place)?;
    (service.fill)(&mut Client::connect(&socket)?)?;
    std::thread::sleep(Duration::from_millis(300)); // for it to notice that the client has gone
    let pid = started.kill_with(bench, &store)?;
    let mut ways = [
        ("eagerly", Measured::default()),
        ("lazily, first", Measured::default()),
        ("lazily, then", Measured::default()),
    ];
    for run in 0..=bench.plan.runs {
        for (number, (_, measured)) in ways.iter_mut().enumerate() {
            if number == 1 {
                let _ = std::fs::remove_dir_all(store.join("jobs/restart/touch"));
            }
            let options: &[&str] = if number == 0 { &["--eager"] } else { &[] };
            let began = Instant::now();
            let restore = bench.stillpoint.restore_in_background(&store, "restart", options)?;
            // The socket is there all the time: it answers as soon as the program runs.
            let mut client = Client::connect(&socket)?;
            (service.work)(&mut client, 7)?;
            let worked = began.elapsed();
            drop(client);
            let report = finish(restore)?;
            let runs = report["running_ms"].as_f64().context("running_ms")?;
            if run > 0 {
                measured.runs.add(runs);
                measured.work.add(worked.as_secs_f64() * 1e3 - runs);
                measured.faults.add(report["demand_faults"].as_f64().unwrap_or(f64::NAN));
            }
            kill(pid)?;
            bench.stillpoint.await_pagers()?;
        }
    }
    Ok(ways)
}

fn finish(restore: Child) -> Result<Value> {
    let output = restore.wait_with_output()?;
    if !output.status.success() {
        bail!("restore: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn kill(pid: u32) -> Result<()> {
    kill_process(Pid::from_raw(pid as i32).context("process id")?, Signal::KILL)?;
    let until = Instant::now() + PATIENCE;
    while PathBuf::from(format!("/proc/{pid}")).exists() {
        if Instant::now() > until {
            bail!("process {pid} does not end");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// A service that runs, not yet checkpointed.
struct Started(Child);

impl Started {
    fn start(command: &[String], place: &Path) -> Result<Self> {
        let mut setsid = Command::new("bash");
        setsid.args(["-c", crate::programs::CLOSE, "bash", "setsid"]).args(command).current_dir(place);
        setsid.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Started(setsid.spawn().context("bash, setsid")?))
    }

    /// Checkpoints and kills it; its process id.
    fn kill_with(mut self, bench: &Bench, store: &Path) -> Result<u32> {
        let pid = self.0.id();
        bench.stillpoint.checkpoint_and_kill(&pid.to_string(), store, "restart")?;
        self.0.wait()?;
        Ok(pid)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
