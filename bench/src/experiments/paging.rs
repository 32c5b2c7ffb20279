//! A job under a memory limit, whose pages go to its store, beside the same job paged by the kernel and checkpointed by us.

use crate::bench::Bench;
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use crate::tools::{Request, Stillpoint, sync};
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{major, minor, stat};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ABOUT: &str = "\
Continuous checkpointing: the job runs with `--memory-limit`, and what leaves memory goes to its store. Beside it the same job
in a control group with the same limit, whose memory the kernel swaps to a file on the same disk, and incremental checkpoints of
it. Both are checkpointed at the same intervals, in turn in one run, and must come to the same result. `elapsed` is from the
command that starts the job to its end; `pages` are those that a checkpoint wrote, in the mean of a run, the first of which is
a complete one; `disk` is what the device read and wrote in all, paging included, until everything was durable. The group is left
1 MiB more than the limit, for what the kernel charges it beside its private memory.";

const JOB: &str = "paging";
const MIB: u64 = 1 << 20;
/// Bytes of a page, and of a sector of the kernel's account.
const PAGE: f64 = 4096.0;
const SECTOR: u64 = 512;
const PATIENCE: Duration = Duration::from_secs(120);

/// What is computed.
#[derive(Clone, Copy)]
enum Work {
    /// All-pairs shortest paths of so many nodes.
    Paths(u64),
    /// So many products of matrices of this size.
    Products(u64, u64),
}

/// A job, within so much memory, checkpointed so often.
struct Case {
    name: &'static str,
    work: Work,
    limit: u64,
    every: Duration,
}

const fn case(name: &'static str, work: Work, limit: u64, every_ms: u64) -> Case {
    Case { name, work, limit, every: Duration::from_millis(every_ms) }
}

/// What each goes through again and again is within its limit, and not much more.
const CASES: [Case; 5] = [
    case("shortest paths, 1408 nodes", Work::Paths(1408), 9 * MIB, 100),
    case("shortest paths, 2816 nodes", Work::Paths(2816), 34 * MIB, 500),
    case("matrices of 1024", Work::Products(1024, 6), 9 * MIB, 500),
    case("matrices of 1536", Work::Products(1536, 3), 18 * MIB, 500),
    case("matrices of 2048", Work::Products(2048, 2), 32 * MIB, 500),
];

/// Who takes its memory, and takes checkpoints of what is left.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Paged,
    Swapped,
}

/// Of all runs of one way.
#[derive(Default)]
struct Measured {
    elapsed: Series,
    checkpoints: Series,
    pages: Series,
    disk: Series,
}

/// Measures all jobs both ways.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("paging", ABOUT);
    let columns = ["job", "limit, MiB", "by", "elapsed, s", "checkpoints", "pages", "disk, MiB", "runs"];
    let mut table = Table::new("paging", "Medians.", &columns);
    for case in &CASES {
        let command = Prepared::new(bench, case)?;
        let (mut ours, mut theirs) = (Measured::default(), Measured::default());
        let mut results = Vec::new();
        for run in 0..bench.plan.runs {
            let order = if run % 2 == 0 { [Way::Paged, Way::Swapped] } else { [Way::Swapped, Way::Paged] };
            for way in order {
                let measured = if way == Way::Paged { &mut ours } else { &mut theirs };
                match once(bench, case, &command, way, measured) {
                    Ok(result) => results.push(result),
                    // Where a checkpoint reads its pages the kernel may find none that can leave so small a group.
                    Err(why) if way == Way::Swapped => {
                        section.note(format!("{} by kernel swap: {why:#}", case.name));
                    }
                    Err(why) => return Err(why),
                }
            }
        }
        results.dedup();
        ensure!(results.len() == 1, "{}: results differ", case.name);
        for (by, of) in [("stillpoint", &ours), ("kernel swap", &theirs)] {
            let numbers = [&of.elapsed, &of.checkpoints, &of.pages, &of.disk].map(|s| number(s.median()));
            let head = [case.name.to_owned(), (case.limit / MIB).to_string(), by.to_owned()];
            table.row([&head[..], &numbers, &[of.elapsed.count().to_string()]].concat());
        }
        let within = format!("{} within {} MiB", case.name, case.limit / MIB);
        let peer = "incremental, with kernel swap";
        let mut promise = |what: &str, (ours, theirs): (f64, f64), unit, most| {
            section.promises.push(Promise {
                what: format!("{within}: {what}"),
                reached: Figure(ours, unit),
                peer: Some((peer.to_owned(), Figure(theirs, unit))),
                limit: Limit::TimesPeer(most),
            });
        };
        let both = |of: fn(&Measured) -> &Series| (of(&ours).median(), of(&theirs).median());
        promise("at least 80 % fewer pages written at a checkpoint", both(|m| &m.pages), "pages", 0.2);
        promise("no more disk traffic in all", both(|m| &m.disk), "MiB", 1.0);
        promise("no longer until its end", both(|m| &m.elapsed), "s", 1.0);
    }
    section.tables.push(table);
    Ok(section)
}

/// A command line, and where it leaves its result.
struct Prepared {
    place: PathBuf,
    command_line: Vec<String>,
    result: PathBuf,
}

impl Prepared {
    fn new(bench: &Bench, case: &Case) -> Result<Self> {
        let place = bench.plan.place("paging/program")?;
        let result = place.join("result");
        let command_line = match case.work {
            Work::Products(size, rounds) => {
                let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
                let arguments = [size, rounds, threads].map(|n| n.to_string());
                bench.programs.command_line("mat", &place, &arguments)
            }
            Work::Paths(nodes) => {
                let apsp = bench.stillpoint.path().with_file_name("apsp");
                let graph = place.join("graph");
                let made = Command::new(&apsp)
                    .args(["--generate", &nodes.to_string(), "1"])
                    .arg(&graph)
                    .status()
                    .with_context(|| apsp.display().to_string())?;
                ensure!(made.success(), "apsp --generate: {made}");
                [&apsp, &graph, &result].map(|path| path.display().to_string()).to_vec()
            }
        };
        Ok(Prepared { place, command_line, result })
    }

    /// What it came to, which is the same in every run.
    fn take_result(&self) -> Result<Vec<u8>> {
        let result = fs::read(&self.result).with_context(|| self.result.display().to_string())?;
        fs::remove_file(&self.result)?;
        let _ = fs::remove_file(self.place.join("ready"));
        // Of a program that also tells its time.
        let is_digest = |line: &&[u8]| line.starts_with(b"digest ");
        Ok(result.split(|byte| *byte == b'\n').find(is_digest).map_or(result.clone(), <[u8]>::to_vec))
    }
}

/// One run; what it came to.
fn once(
    bench: &Bench,
    case: &Case,
    command: &Prepared,
    way: Way,
    measured: &mut Measured,
) -> Result<Vec<u8>> {
    let place = bench.plan.place("paging/job")?;
    let store = place.join("store");
    let device = Device::of(&place)?;
    let limit = case.limit.to_string();
    let swap = (way == Way::Swapped).then(|| Swap::begin(&place, case.limit)).transpose()?;
    let (options, command_line) = match &swap {
        None => (vec!["--memory-limit", limit.as_str()], command.command_line.clone()),
        Some(swap) => (Vec::new(), swap.within(&command.command_line)),
    };
    sync(&place)?;
    let before = device.bytes()?;
    let began = Instant::now();
    let job = bench.stillpoint.run_with(&store, JOB, &command.place, &options, &command_line)?;
    let is_over = AtomicBool::new(false);
    let (written, elapsed) = std::thread::scope(|scope| {
        let stillpoint = &bench.stillpoint;
        let taking = scope.spawn(|| checkpoints(stillpoint, &store, case.every, &is_over));
        let ended = wait(job.pid, began);
        let elapsed = began.elapsed().as_secs_f64();
        is_over.store(true, Ordering::Relaxed);
        let written = taking.join().unwrap_or_else(|_| bail!("the checkpoints failed inside"));
        Ok::<_, anyhow::Error>((ended.and(written)?, elapsed))
    })?;
    job.wait()?;
    sync(&place)?;
    let group = if swap.is_some() {
        " (the kernel ends what needs more than its group can have at once)"
    } else {
        ""
    };
    ensure!(command.result.exists(), "it was killed{group}");
    let result = command.take_result()?;
    measured.elapsed.add(elapsed);
    measured.disk.add((device.bytes()? - before) as f64 / MIB as f64);
    measured.checkpoints.add(written.len() as f64);
    // A short job may have ended before its first.
    if !written.is_empty() {
        measured.pages.add(written.iter().sum::<f64>() / PAGE / written.len() as f64);
    }
    Ok(result)
}

/// Takes checkpoints until the job is over; bytes that each wrote.
fn checkpoints(
    stillpoint: &Stillpoint,
    store: &Path,
    every: Duration,
    is_over: &AtomicBool,
) -> Result<Vec<f64>> {
    let (mut written, began) = (Vec::new(), Instant::now());
    for number in 1.. {
        while began.elapsed() < every * number && !is_over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        let request = Request { keep: Some("2"), ..Request::default() };
        match stillpoint.checkpoint(JOB, store, request) {
            Ok(cut) => written.push(cut.written()),
            Err(why) => {
                // It may have come to its end meanwhile.
                std::thread::sleep(Duration::from_millis(50));
                if !is_over.load(Ordering::Relaxed) {
                    return Err(why);
                }
            }
        }
    }
    Ok(written)
}

/// Waits for the end of a process.
fn wait(pid: u32, began: Instant) -> Result<()> {
    let stat = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    while stat().rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X'])) {
        ensure!(began.elapsed() < PATIENCE, "process {pid} does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The device that a directory is on.
struct Device(PathBuf);

impl Device {
    fn of(place: &Path) -> Result<Self> {
        let device = stat(place)?.st_dev;
        Ok(Device(format!("/sys/dev/block/{}:{}/stat", major(device), minor(device)).into()))
    }

    /// Read and written since the machine began.
    fn bytes(&self) -> Result<u64> {
        let text = fs::read_to_string(&self.0).with_context(|| self.0.display().to_string())?;
        let words: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match words[..] {
            [_, _, read, _, _, _, written, ..] => Ok((read + written) * SECTOR),
            _ => bail!("{}: {text}", self.0.display()),
        }
    }
}

/// A control group whose memory is limited, and a file to swap to.
struct Swap {
    group: PathBuf,
    file: PathBuf,
}

/// Files of a control group that limit its memory, in either version, and where such groups are.
const GROUPS: [(&str, &str); 2] =
    [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];

impl Swap {
    fn begin(place: &Path, limit: u64) -> Result<Self> {
        // A group is also charged for page tables and stacks in the kernel.
        let limit = limit + MIB;
        let file = place.join("swap");
        let size = (8 * limit).max(64 * MIB).to_string();
        tool("fallocate", &["-l".as_ref(), size.as_ref(), file.as_os_str()])?;
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        tool("mkswap", &[file.as_os_str()])?;
        let name = format!("stillpoint-bench-{}", std::process::id());
        let groups = GROUPS.iter().find_map(|(folder, most)| {
            let group = Path::new(folder).join(&name);
            fs::create_dir(&group).ok()?;
            let is_limited = fs::write(group.join(most), limit.to_string()).is_ok();
            if !is_limited {
                let _ = fs::remove_dir(&group);
            }
            is_limited.then_some(group)
        });
        let group = groups.context("the memory of a control group cannot be limited here")?;
        let swap = Swap { group, file };
        tool("swapon", &[swap.file.as_os_str()])?;
        Ok(swap)
    }

    /// A command line that enters the group first.
    fn within(&self, command_line: &[String]) -> Vec<String> {
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.group.display());
        let shell = ["sh", "-c", &enter, "sh"].map(str::to_owned);
        [&shell[..], command_line].concat()
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = tool("swapoff", &[self.file.as_os_str()]);
        let _ = fs::remove_dir(&self.group);
    }
}

fn tool(name: &str, arguments: &[&std::ffi::OsStr]) -> Result<()> {
    let output = Command::new(name).args(arguments).output().with_context(|| name.to_owned())?;
    ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
