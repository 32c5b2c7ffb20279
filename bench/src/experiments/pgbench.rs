//! What clients of PostgreSQL notice of checkpoints.

use crate::bench::{Bench, Failures};
use crate::latency::{Measured, meanwhile};
use crate::programs::CLOSE;
use crate::report::{Figure, Limit, Promise, Section};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const ABOUT: &str = "\
PostgreSQL with a database of pgbench of 10 branches and 4 clients, for which 200 transactions a second are due. A transaction's
time counts from when it was due (`--rate`). Meanwhile the server with all of its processes is checkpointed again and again, each
time 200 ms after the last one is done, by one engine after the other, and left alone (`none`). What is counted are transactions
of which some part was within a checkpoint, and without any, all. `pause` is the command's stopwatch, `takes` all the time it took,
`most` the longest transaction of all runs; all others are figures of each run by itself, of which the medians are told. In the end all
transactions that pgbench knows of must be in the tables, and their sums agree.";

/// For so long the clients work in a run, seconds; of that, the beginning and the end are not counted.
const RUN: u64 = 7;
const MARGIN: Duration = Duration::from_millis(700);
/// Between two checkpoints.
const REST: Duration = Duration::from_millis(200);
const CLIENTS: &str = "4";
const RATE: &str = "200";
const BRANCHES: &str = "10";
const USER: &str = "postgres";
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures it.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("pgbench", ABOUT);
    let Some(programs) = programs() else {
        section.note("PostgreSQL is not installed: nothing was measured");
        return Ok(section);
    };
    if !rustix::process::geteuid().is_root() {
        section.note("PostgreSQL is run as another user, which takes root: nothing was measured");
        return Ok(section);
    }
    let server = Server::start(bench, programs)?;
    let mut failures = Failures::default();
    let store = bench.plan.place("pgbench-store")?;
    let engines = bench.engines.iter().map(|e| e.name);
    let names = ["none"].into_iter().chain(engines).chain(bench.peers.iter().map(|p| p.name()));
    let mut measured: Vec<(String, Measured)> =
        names.map(|name| (name.to_owned(), Measured::default())).collect();
    let mut known = 0;
    for run in 0..=bench.plan.runs {
        for (name, m) in &mut measured {
            let engine = bench.engines.iter().find(|e| e.name == name);
            if engine.is_some_and(|engine| failures.has(*engine)) {
                continue;
            }
            let peer = bench.peers.iter().find(|p| p.name() == name);
            let place = bench.plan.directory.join("pgbench-peer");
            let mut checkpoint = || match (engine, peer) {
                (Some(engine), _) => {
                    let cut = failures.checkpoint(bench, server.child.id(), &store, *engine);
                    cut.map(|cut| cut.own_pause_ms())
                }
                (_, Some(peer)) => peer.checkpoint(server.child.id(), &place).ok().map(|_| f64::NAN),
                _ => None,
            };
            let (load, cuts) = server.work(&mut checkpoint)?;
            known += load.processed;
            if run > 0 && (name == "none" || !cuts.is_empty()) {
                m.latencies.add(load.latencies(&cuts));
                for cut in &cuts {
                    m.pause.add(cut.pause);
                    m.takes.add_time(cut.to.saturating_sub(cut.from));
                }
            }
        }
    }
    let lost = server.lost(known)?;
    failures.tell(&mut section);
    for peer in &bench.peers {
        if measured.iter().any(|(name, m)| name == peer.name() && m.latencies.count() == 0) {
            section.note(format!("{} could not checkpoint it", peer.name()));
        }
    }
    section.tables.push(meanwhile("pgbench", "Transactions.", "transactions", &measured));
    section.promises.extend(promises(bench, &measured, lost));
    Ok(section)
}

fn promises(bench: &Bench, measured: &[(String, Measured)], lost: f64) -> Vec<Promise> {
    let of = |name: &str| measured.iter().find(|(n, _)| n == name).map(|(_, m)| &m.latencies);
    let engine = bench.default_engine().name;
    let (Some(none), Some(m)) = (of("none"), of(engine)) else { return Vec::new() };
    let stop = of("stop").filter(|_| engine != "stop");
    vec![
        Promise {
            what: format!(
                "PostgreSQL under pgbench, longest transaction while it is checkpointed ({engine}), beyond the usual: at \
                 most 20 ms; beside stop-and-copy"
            ),
            reached: Figure(m.longest() - none.longest(), "ms"),
            peer: stop.map(|s| ("stop".to_owned(), Figure(s.longest() - none.longest(), "ms"))),
            limit: Limit::AtMost(20.0),
        },
        Promise {
            what: format!(
                "PostgreSQL under pgbench, p99.9 while it is checkpointed ({engine}); beside that without"
            ),
            reached: Figure(m.rare(), "ms"),
            peer: Some(("none".into(), Figure(none.rare(), "ms"))),
            limit: Limit::None,
        },
        Promise {
            what: "PostgreSQL under pgbench, transactions lost: none".into(),
            reached: Figure(lost, ""),
            peer: None,
            limit: Limit::AtMost(0.0),
        },
    ]
}

/// Where the programs of the newest version are.
fn programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<_> = versions.map(|v| v.path().join("bin")).collect();
    found.retain(|bin| bin.join("initdb").is_file() && bin.join("pgbench").is_file());
    found.sort();
    found.pop()
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A checkpoint: from and to by the time of day, and its pause, ms.
struct CutAt {
    from: Duration,
    to: Duration,
    pause: f64,
}

/// What the clients did in a run.
struct Work {
    /// From and to by the time of day.
    transactions: Vec<(Duration, Duration)>,
    processed: u64,
    from: Duration,
    to: Duration,
}

impl Work {
    /// Of transactions that met a checkpoint, if there were any, ms.
    fn latencies(&self, cuts: &[CutAt]) -> Vec<f64> {
        let counts = |&&(from, to): &&(Duration, Duration)| match cuts {
            [] => from >= self.from && to <= self.to,
            _ => cuts.iter().any(|cut| from <= cut.to && to >= cut.from),
        };
        self.transactions
            .iter()
            .filter(counts)
            .map(|(from, to)| to.saturating_sub(*from).as_secs_f64() * 1e3)
            .collect()
    }
}

/// A server. It is ended when this is dropped.
struct Server {
    bin: PathBuf,
    place: PathBuf,
    port: String,
    child: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        // At once, but in order.
        let _ = Command::new("kill").args(["-INT", &self.child.id().to_string()]).output();
        let _ = self.child.wait();
    }
}

fn as_postgres(place: &Path, program: &Path) -> Command {
    let mut command = Command::new("bash");
    let user = [format!("--reuid={USER}"), format!("--regid={USER}"), "--clear-groups".to_owned()];
    command.args(["-c", CLOSE, "bash", "setsid", "setpriv"]).args(user).arg(program);
    command.current_dir(place).stdin(Stdio::null());
    command
}

impl Server {
    fn start(bench: &Bench, bin: PathBuf) -> Result<Self> {
        let place = bench.plan.place("pgbench")?;
        let owned = Command::new("chown").arg(USER).arg(&place).status()?;
        ensure!(owned.success(), "there is no user {USER}");
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let mut initdb = as_postgres(&place, &bin.join("initdb"));
        initdb.args(["-D", "data", "-A", "trust", "-U", USER, "--no-sync"]);
        said(&mut initdb)?;
        let settings = format!(
            "port = {port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = ''\nlogging_collector = off\n"
        );
        let file = place.join("data/postgresql.conf");
        fs::OpenOptions::new().append(true).open(file)?.write_all(settings.as_bytes())?;
        let mut postgres = as_postgres(&place, &bin.join("postgres"));
        let log = fs::File::create(place.join("log"))?;
        postgres.args(["-D", "data"]).stdout(log.try_clone()?).stderr(log);
        let server = Server { child: postgres.spawn()?, bin, place, port };
        let until = Instant::now() + PATIENCE;
        while server.sql("select 1").is_err() {
            ensure!(Instant::now() < until, "PostgreSQL does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        said(server.client("pgbench").args(["-i", "-q", "-s", BRANCHES, USER]))?;
        Ok(server)
    }

    fn client(&self, program: &str) -> Command {
        let mut command = as_postgres(&self.place, &self.bin.join(program));
        command.args(["-h", "127.0.0.1", "-p", &self.port, "-U", USER]);
        command
    }

    fn sql(&self, query: &str) -> Result<String> {
        said(self.client("psql").args(["-At", "-c", query, USER])).map(|text| text.trim().to_owned())
    }

    /// Lets the clients work, and takes checkpoints, for as long as there are some, meanwhile.
    fn work(&self, checkpoint: &mut dyn FnMut() -> Option<f64>) -> Result<(Work, Vec<CutAt>)> {
        let mut pgbench = self.client("pgbench");
        pgbench.args(["-n", "-c", CLIENTS, "-j", "2", "-T", &RUN.to_string(), "--rate", RATE]);
        pgbench.args(["--log", "--log-prefix", "transactions", USER]);
        let began = since_epoch();
        let child = pgbench.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        std::thread::sleep(MARGIN);
        let mut cuts = Vec::new();
        let until = began + Duration::from_secs(RUN) - MARGIN;
        while since_epoch() < until {
            let from = since_epoch();
            let Some(pause) = checkpoint() else { break };
            cuts.push(CutAt { from, to: since_epoch(), pause });
            std::thread::sleep(REST);
        }
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "pgbench: {}: {errors}", output.status);
        ensure!(said.contains("number of failed transactions: 0"), "pgbench: {said} {errors}");
        let processed =
            said.lines().find_map(|l| l.strip_prefix("number of transactions actually processed: "));
        let processed = processed.and_then(|p| p.split('/').next()?.parse().ok()).context("no number")?;
        let transactions = self.transactions()?;
        Ok((Work { transactions, processed, from: began + MARGIN, to: until }, cuts))
    }

    /// What the clients have written of each of their transactions since the last time.
    fn transactions(&self) -> Result<Vec<(Duration, Duration)>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.place)? {
            let file = entry?.path();
            if !file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("transactions")) {
                continue;
            }
            for line in fs::read_to_string(&file)?.lines() {
                // Client, transaction, µs, script, and when it was over: seconds and µs.
                let words: Vec<u64> = line.split(' ').map_while(|word| word.parse().ok()).collect();
                let &[_, _, took, _, seconds, micros, ..] = words.as_slice() else {
                    bail!("pgbench has written {line:?}");
                };
                let to = Duration::from_secs(seconds) + Duration::from_micros(micros);
                all.push((to.saturating_sub(Duration::from_micros(took)), to));
            }
            fs::remove_file(&file)?;
        }
        Ok(all)
    }

    /// How many of so many transactions are not in the tables; not a number if the sums do not agree.
    fn lost(&self, known: u64) -> Result<f64> {
        let sum = |column: &str, table: &str| format!("(select sum({column}) from pgbench_{table})");
        let agree = ["abalance accounts", "bbalance branches", "tbalance tellers"].map(|pair| {
            let (column, table) = pair.split_once(' ').unwrap_or_default();
            format!("{} = {}", sum(column, table), sum("delta", "history"))
        });
        let agree = self.sql(&format!("select {}", agree.join(" and ")))? == "t";
        let there: f64 = self.sql("select count(*) from pgbench_history")?.parse().context("a count")?;
        Ok(if agree { known as f64 - there } else { f64::NAN })
    }
}

/// Runs a command that must succeed; its output.
fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {}", output.status, errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
