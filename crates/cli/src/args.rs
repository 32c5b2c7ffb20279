//! The command line: one definition feeds help, completions and the manual page.

use crate::failure::Failure;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;
use stillpoint_capture::Engine;
use stillpoint_restore::{Connection, FilesPolicy, Pipes as PipesPolicy};
use stillpoint_store::Every;

/// Checkpoint, restore, clone and roll back running Linux programs.
#[derive(Debug, Parser)]
#[command(name = "stillpoint", version, propagate_version = true, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Options of every command.
    #[command(flatten)]
    pub common: Common,
}

const EXIT_CODES: &str = "Exit codes:
  0  done
  1  failed; the target is unharmed
  2  usage or bad input
  3  refused: something cannot be captured or put back; each thing is named with the reason
run and restore in the foreground exit as the job exits; of clones, as the first that did not exit with 0.";

/// Options of every command.
#[derive(Debug, Args)]
pub struct Common {
    /// Where checkpoints live [default: $STILLPOINT_STORE, else $XDG_DATA_HOME/stillpoint, else
    /// ~/.local/share/stillpoint]
    #[arg(long, value_name = "DIR", global = true)]
    pub store: Option<PathBuf>,
    /// Answer with one JSON value instead of text for people
    #[arg(long, global = true)]
    pub json: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a program as a job
    Run(Run),
    /// Write a running program to the store
    Checkpoint(Checkpoint),
    /// Bring a program back from the store
    Restore(Restore),
    /// Continue jobs that were running when the machine went down
    Resume(Resume),
    /// Make live twins of a running program, beside it
    Fork(Fork),
    /// Remember a running program as it is now, in memory
    Snapshot(Snapshot),
    /// Bring a running program back to a snapshot
    Rollback(Rollback),
    /// List the snapshots of a running program
    Snapshots(Snapshots),
    /// Forget a snapshot
    Forget(SnapshotName),
    /// Make a running program a job, so that each further checkpoint of it saves only what changed
    Adopt(Adopt),
    /// Let go of a program that was adopted; it runs on
    Release(Release),
    /// List jobs, or the checkpoints of one job
    Ls(Ls),
    /// Watch the running jobs
    Top(Top),
    /// Write the history of a job as one HTML page
    Report(Report),
    /// Describe a checkpoint: processes, threads, memory, files
    Show(Show),
    /// Read stored checkpoints back and check every byte
    Verify(Verify),
    /// Write a checkpoint into one file, or a pipe, for another machine
    Export(Export),
    /// Read a checkpoint that was exported into the store
    Import(Import),
    /// Remove a checkpoint, or a job with all of its checkpoints
    Rm(Rm),
    /// Remove the oldest checkpoints of a job
    Prune(Prune),
    /// Tell what this kernel and these privileges allow, and how to get what is missing
    Doctor,
    /// Keep the snapshots of a program, beside it
    #[command(hide = true)]
    Brancher(Brancher),
    /// Take the checkpoints of a job, beside its supervisor
    #[command(hide = true)]
    Checkpointer(Checkpointer),
    /// Print a completion script for a shell
    #[command(hide = true)]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page
    #[command(hide = true)]
    Man,
}

/// `stillpoint run`
#[derive(Debug, Args)]
pub struct Run {
    /// Name of the job [default: the file name of COMMAND]
    #[arg(long, value_name = "NAME", value_parser = crate::names::parse_job)]
    pub name: Option<String>,
    /// Leave the job in the background and return
    #[arg(long)]
    pub detach: bool,
    /// Checkpoints as time passes.
    #[command(flatten)]
    pub periodic: Periodic,
    /// Bring it back from its last checkpoint, here, if a signal kills it: at most MAX times in a row [default: 5]
    #[arg(long, value_name = "on-crash[=MAX]", value_parser = crate::units::restart)]
    pub restart: Option<u64>,
    /// Keep what it has in memory within this size: 2GiB, 512MiB. The rest is in the store
    #[arg(long, value_name = "SIZE", value_parser = crate::units::memory)]
    pub memory_limit: Option<u64>,
    /// Whether it begins in a user namespace of its own, where nothing keeps its user from checkpointing it
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub user_namespace: UserNamespace,
    /// The program and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

/// `run --user-namespace`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UserNamespace {
    /// If the system keeps users from their own programs otherwise (Yama)
    Auto,
    /// In any case
    Always,
    /// In none
    Never,
}

/// `stillpoint checkpoint`
#[derive(Debug, Args)]
pub struct Checkpoint {
    /// Name of a running job, or a process id
    #[arg(value_name = "TARGET")]
    pub target: String,
    /// Job the checkpoint belongs to [default: the job that TARGET is, else its program's name and process id]
    #[arg(long, value_name = "NAME", value_parser = crate::names::parse_job)]
    pub name: Option<String>,
    /// How its memory is saved
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = engine())]
    pub engine: Engine,
    /// Memory that may be used for pages on their way: 16MiB, 64k, 1GiB
    #[arg(long, value_name = "SIZE", default_value = DEFAULT_BUFFER, value_parser = crate::units::buffer)]
    pub buffer: u64,
    /// Save only what changed since the last checkpoint, and say so if that is not possible
    #[arg(long, conflicts_with = "full")]
    pub incremental: bool,
    /// Save everything, also what the last checkpoint has
    #[arg(long)]
    pub full: bool,
    /// Tell on standard error which engine was taken, why, and what it did
    #[arg(long, short)]
    pub verbose: bool,
    /// Kill the program once the checkpoint is safe in the store
    #[arg(long)]
    pub kill: bool,
    /// Only tell whether it could be checkpointed, killed and restored by you: it stands still for a moment, and nothing is written
    #[arg(long, conflicts_with_all = ["kill", "portable", "keep", "label", "incremental", "full"])]
    pub check: bool,
    /// Keep copies of the executable, libraries and all other files that the program has mapped with it
    #[arg(long)]
    pub portable: bool,
    /// A note to find the checkpoint by
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// Then keep only the newest N checkpoints of the job [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub keep: Option<u64>,
}

/// Memory for pages on their way, unless told otherwise.
pub const DEFAULT_BUFFER: &str = "16MiB";

/// Less than this is loaded before a program runs, where nothing else is asked for.
pub const EAGER_BELOW: &str = "8MiB";

/// Reads the name of a memory engine.
fn engine() -> impl TypedValueParser<Value = Engine> {
    let names = Engine::ALL.map(|e| PossibleValue::new(e.name()).help(e.summary()));
    PossibleValuesParser::new(names).try_map(|name| Engine::named(&name).ok_or("there is no such engine"))
}

/// Checkpoints as time passes.
#[derive(Clone, Debug, Default, Args)]
pub struct Periodic {
    /// Take a checkpoint every so often while it runs: 500ms, 10s, 5m, 1h; auto: as often as pays
    #[arg(long, value_name = "TIME|auto", value_parser = crate::units::every)]
    pub every: Option<Every>,
    /// Mean time between failures, 12h or 30d, by which --every auto goes [default: learned from the job's history]
    #[arg(long, value_name = "TIME", requires = "every", value_parser = crate::units::duration)]
    pub mtbf: Option<Duration>,
    /// Keep only the newest N checkpoints of the job [default: all]
    #[arg(long, value_name = "N", requires = "every", value_parser = clap::value_parser!(u64).range(1..))]
    pub keep: Option<u64>,
    /// How memory is saved by these checkpoints [default: auto]
    #[arg(long, value_name = "ENGINE", requires = "every", value_parser = engine())]
    pub engine: Option<Engine>,
    /// Memory that these checkpoints may use for pages on their way [default: 16MiB]
    #[arg(long, value_name = "SIZE", requires = "every", value_parser = crate::units::buffer)]
    pub buffer: Option<u64>,
}

impl Periodic {
    /// Whether they make sense together.
    pub fn check(&self) -> Result<(), Failure> {
        match (self.mtbf, self.every) {
            (Some(_), Some(Every::Time(_))) => {
                Err(Failure::usage("--mtbf is what --every auto goes by, and --every says a time here"))
            }
            _ => Ok(()),
        }
    }
}

/// `stillpoint adopt`
#[derive(Debug, Args)]
pub struct Adopt {
    /// The process
    #[arg(value_name = "PID")]
    pub pid: String,
    /// Name of the job [default: its program's name and process id]
    #[arg(long, value_name = "NAME", value_parser = crate::names::parse_job)]
    pub name: Option<String>,
    /// Checkpoints as time passes.
    #[command(flatten)]
    pub periodic: Periodic,
}

/// `stillpoint release`
#[derive(Debug, Args)]
pub struct Release {
    /// The job
    #[arg(value_name = "JOB", value_parser = crate::names::parse_job)]
    pub job: String,
}

/// `stillpoint checkpointer`: what a supervisor tells the process beside it. Its control socket is standard input.
#[derive(Debug, Args)]
pub struct Checkpointer {
    /// The job
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Its process
    #[arg(long)]
    pub process: u32,
    /// Our parent, which we do not outlive
    #[arg(long)]
    pub supervisor: i32,
    /// Streams besides the standard ones that the job was started with: `FD=NAME`
    #[arg(long)]
    pub inherited: Vec<OsString>,
    /// Checkpoints as time passes.
    #[command(flatten)]
    pub periodic: Periodic,
}

/// Most clones of one restore. Each takes five descriptors of the process that supervises them, which may have 1024 on most
/// systems.
pub const MOST_CLONES: i64 = 200;

/// `stillpoint restore`
#[derive(Clone, Debug, Args)]
pub struct Restore {
    /// JOB for its newest checkpoint, or JOB@ID
    #[arg(value_name = "JOB[@ID]", value_parser = crate::names::parse_checkpoint)]
    pub checkpoint: CheckpointName,
    /// Leave the program in the background and return
    #[arg(long)]
    pub detach: bool,
    /// Load all of its memory before it runs, instead of most of it behind the running program
    #[arg(long)]
    pub eager: bool,
    /// Load all of it before the program runs if it is less than this
    #[arg(long, value_name = "SIZE", default_value = EAGER_BELOW, value_parser = crate::units::size)]
    pub eager_below: u64,
    /// Read memory from the store no faster than this: 7MB/s, 100MiB/s
    #[arg(long, value_name = "RATE", value_parser = crate::units::rate)]
    pub limit_bandwidth: Option<u64>,
    /// Bring back a copy beside the original: in a pid namespace of its own, where it has its old process ids
    #[arg(long)]
    pub clone: bool,
    /// How many clones there are to be, all loaded at once [default: 1]
    #[arg(long, value_name = "N", requires = "clone", value_parser = clap::value_parser!(u32).range(1..=MOST_CLONES))]
    pub count: Option<u32>,
    /// What to do about files that the program writes and that changed since the checkpoint; clones keep them
    #[arg(
        long,
        value_name = "POLICY",
        default_value = "rollback",
        default_value_if("clone", "true", "keep")
    )]
    pub files: Files,
    /// What becomes of TCP connections with others
    #[arg(long, value_name = "POLICY", default_value = "established")]
    pub tcp: Tcp,
    /// Where streams lead.
    #[command(flatten)]
    pub streams: Streams,
    /// Refuse unless the program gets back its process id in this pid namespace
    #[arg(long, value_name = "same", conflicts_with = "clone")]
    pub pid: Option<PidPolicy>,
    /// Bring it back once more, here, if a signal kills it: at most MAX times in a row [default: 5]
    #[arg(
        long,
        value_name = "on-crash[=MAX]",
        conflicts_with = "clone",
        value_parser = crate::units::restart
    )]
    pub restart: Option<u64>,
    /// Keep what it has in memory within this size: 2GiB, 512MiB. The rest stays in the store
    #[arg(long, value_name = "SIZE", conflicts_with = "clone", value_parser = crate::units::memory)]
    pub memory_limit: Option<u64>,
    /// Checkpoints as time passes.
    #[command(flatten)]
    pub periodic: Periodic,
}

/// `stillpoint resume`
#[derive(Debug, Args)]
pub struct Resume {
    /// Every job that was running when the machine, or all of its processes, went down
    #[arg(long)]
    pub all: bool,
    /// These jobs
    #[arg(value_name = "JOB", value_parser = crate::names::parse_job, conflicts_with = "all")]
    pub jobs: Vec<String>,
    /// Tell of one as `restore` would
    #[arg(long, hide = true)]
    pub one: bool,
}

/// `stillpoint fork`
#[derive(Debug, Args)]
pub struct Fork {
    /// Name of a running job, or a process id
    #[arg(value_name = "TARGET")]
    pub target: String,
    /// How many twins there are to be [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MOST_CLONES))]
    pub count: Option<u32>,
    /// Each in a pid namespace of its own, where it has the process ids of the program; without, each has new ones
    #[arg(long)]
    pub isolated: bool,
    /// Where their streams lead.
    #[command(flatten)]
    pub streams: Streams,
    /// Checkpoints of the twins as time passes.
    #[command(flatten)]
    pub periodic: Periodic,
}

/// `JOB` or `JOB@ID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointName {
    /// The job.
    pub job: String,
    /// The checkpoint; `None` for the newest.
    pub id: Option<u64>,
}

/// `restore --files`, `rollback --files`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Files {
    /// Cut a file that only grew back to the size it had; refuse any other change
    Rollback,
    /// Take files as they are
    Keep,
    /// Refuse any change
    Refuse,
}

impl From<Files> for FilesPolicy {
    fn from(files: Files) -> Self {
        match files {
            Files::Rollback => FilesPolicy::Rollback,
            Files::Keep => FilesPolicy::Keep,
            Files::Refuse => FilesPolicy::Refuse,
        }
    }
}

/// `restore --tcp`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Tcp {
    /// Those that were kept since the program was killed by `checkpoint --kill` go on; the others are over
    Established,
    /// All are over; those that were kept are closed
    Close,
}

/// Where what led outside of a program leads.
#[derive(Clone, Debug, Default, Args)]
pub struct Streams {
    /// What becomes of pipes, other than the streams that it was started with, of which a process outside had an end
    #[arg(long, value_name = "POLICY", default_value = "kept")]
    pub pipes: Pipes,
    /// Connect descriptor N of the program, which led outside, with a file, or with descriptor M of this command
    #[arg(long = "fd", value_name = "N=PATH|N=fd:M", value_parser = crate::units::connection)]
    pub connections: Vec<Connection>,
}

impl Streams {
    /// As a restore wants them.
    pub fn policy(&self) -> stillpoint_restore::Streams {
        let pipes = match self.pipes {
            Pipes::Kept => PipesPolicy::Kept,
            Pipes::Follow => PipesPolicy::Follow,
            Pipes::Closed => PipesPolicy::Closed,
        };
        stillpoint_restore::Streams { pipes, connections: self.connections.clone() }
    }
}

/// `restore --pipes`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Pipes {
    /// Those that were kept since the program was killed at its checkpoint go on; one that was not, and that --fd does not connect,
    /// is refused
    #[default]
    Kept,
    /// They become the descriptors with the same numbers of this command
    Follow,
    /// Who had the other end has left: the program reads what was in the pipe, and then its end; to write fails
    Closed,
}

/// `restore --pid`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PidPolicy {
    /// The process id it had
    Same,
}

/// `stillpoint ls`
#[derive(Debug, Args)]
pub struct Ls {
    /// List the checkpoints of this job
    #[arg(value_name = "JOB", value_parser = crate::names::parse_job)]
    pub job: Option<String>,
}

/// `stillpoint top`
#[derive(Debug, Args)]
pub struct Top {
    /// Watch these jobs, whether they run or not [default: all that run]
    #[arg(value_name = "JOB", value_parser = crate::names::parse_job)]
    pub jobs: Vec<String>,
    /// Print one table and leave, as where standard output is no terminal
    #[arg(long)]
    pub once: bool,
    /// How often the jobs are looked at
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = crate::units::duration)]
    pub interval: Duration,
}

/// `stillpoint report`
#[derive(Debug, Args)]
pub struct Report {
    /// The job
    #[arg(value_name = "JOB", value_parser = crate::names::parse_job)]
    pub job: String,
    /// Where the page goes, - for standard output [default: JOB.html in the current directory]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace a file that is there
    #[arg(long)]
    pub force: bool,
}

/// `stillpoint show`
#[derive(Debug, Args)]
pub struct Show {
    /// JOB for its newest checkpoint, or JOB@ID
    #[arg(value_name = "JOB[@ID]", value_parser = crate::names::parse_checkpoint)]
    pub checkpoint: CheckpointName,
}

/// `stillpoint verify`
#[derive(Debug, Args)]
pub struct Verify {
    /// Check this job or checkpoint only [default: everything in the store]
    #[arg(value_name = "JOB[@ID]", value_parser = crate::names::parse_checkpoint)]
    pub checkpoint: Option<CheckpointName>,
}

/// `stillpoint export`
#[derive(Debug, Args)]
pub struct Export {
    /// JOB for its newest checkpoint, or JOB@ID
    #[arg(value_name = "JOB[@ID]", value_parser = crate::names::parse_checkpoint)]
    pub checkpoint: CheckpointName,
    /// The file to write; - for standard output
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// With the executable, libraries and all other files that the program has mapped
    #[arg(long)]
    pub portable: bool,
    /// How it is compressed: none, lz4, zstd or zstd:LEVEL
    #[arg(long, value_name = "HOW", default_value = "zstd")]
    pub compress: stillpoint_archive::Compression,
    /// Replace the file if it exists
    #[arg(long)]
    pub force: bool,
}

/// `stillpoint import`
#[derive(Debug, Args)]
pub struct Import {
    /// The file to read; - for standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Job that the checkpoint will belong to, as its newest [default: as it was called, or the next free name like that]
    #[arg(long, value_name = "JOB", value_parser = crate::names::parse_job)]
    pub name: Option<String>,
}

/// `stillpoint rm`
#[derive(Debug, Args)]
pub struct Rm {
    /// JOB@ID for one checkpoint, JOB for the job with all of its checkpoints
    #[arg(value_name = "JOB[@ID]", value_parser = crate::names::parse_checkpoint)]
    pub checkpoint: CheckpointName,
    /// Remove a job also while it runs
    #[arg(long)]
    pub force: bool,
}

/// `stillpoint prune`
#[derive(Debug, Args)]
pub struct Prune {
    /// The job
    #[arg(value_name = "JOB", value_parser = crate::names::parse_job)]
    pub job: String,
    /// How many of the newest checkpoints to keep
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub keep: u64,
}

/// `stillpoint snapshot`
#[derive(Debug, Args)]
pub struct Snapshot {
    /// Name of a running job, or a process id
    #[arg(value_name = "TARGET")]
    pub target: String,
    /// A name for the snapshot, beside its number
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Remember this one process, and not those that it has made
    #[arg(long)]
    pub alone: bool,
}

/// `stillpoint rollback`
#[derive(Debug, Args)]
pub struct Rollback {
    /// Which snapshot.
    #[command(flatten)]
    pub of: SnapshotName,
    /// Kill child processes that were made since, with all that they have made
    #[arg(long)]
    pub kill_children: bool,
    /// What becomes of files that the program writes and that changed since
    #[arg(long, value_name = "POLICY", default_value = "keep")]
    pub files: Files,
    /// What sp_snapshot() returns, if the program has taken the snapshot itself
    #[arg(long, value_name = "NUMBER", default_value_t = 1, allow_negative_numbers = true)]
    pub value: i64,
}

/// `stillpoint snapshots`
#[derive(Debug, Args)]
pub struct Snapshots {
    /// Name of a running job, or a process id
    #[arg(value_name = "TARGET")]
    pub target: String,
}

/// A snapshot of a running program: `TARGET[@SNAPSHOT]`.
#[derive(Clone, Debug, Args)]
pub struct SnapshotName {
    /// Name of a running job or a process id; number or name of a snapshot [default: the last one it was at]
    #[arg(value_name = "TARGET[@SNAPSHOT]", value_parser = snapshot_name)]
    pub which: (String, Option<String>),
}

fn snapshot_name(text: &str) -> Result<(String, Option<String>), String> {
    match text.rsplit_once('@') {
        Some((_, "")) => Err("there is nothing behind the @".into()),
        Some((target, snapshot)) => Ok((target.into(), Some(snapshot.into()))),
        None => Ok((text.into(), None)),
    }
}

/// `stillpoint brancher`
#[derive(Debug, Args)]
pub struct Brancher {
    /// The process
    pub pid: u32,
    /// Standard input is the line to the program's own library
    #[arg(long)]
    pub own: bool,
}
