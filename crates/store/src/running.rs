//! Who runs a job now, and who may use its name.

use crate::folder::Folder;
use crate::lock::Lock;
use crate::record::Record;
use crate::{Error, Result, Store, check_name};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;
use stillpoint_image::Bytes;

/// Who runs a job. A record of what was, when it was written: whether that process still lives is for the reader of
/// the record to find out, by pid, start time and boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Running {
    /// Process id of the job's root process, as seen by the supervisor.
    pub pid: u32,
    /// Its start time: field 22 of `/proc/PID/stat`, clock ticks since boot.
    pub start_time: u64,
    /// `/proc/sys/kernel/random/boot_id` of the boot that both times belong to.
    pub boot_id: String,
    /// Process id of the supervisor.
    pub supervisor_pid: u32,
    /// Its start time, as above.
    pub supervisor_start_time: u64,
    /// When the record was written, nanoseconds since 1970.
    pub since_ns: u64,
    /// Checkpoint that the job was restored from, if it was.
    pub restored_from: Option<u64>,
    /// Command line of the job.
    pub command: Vec<Bytes>,
    /// Pipes, sockets and terminals besides its standard streams that the job was started with: descriptor and what
    /// `/proc/PID/fd` calls it.
    pub inherited: Vec<(u32, Bytes)>,
    /// The process was there before it became a job: the supervisor is not its parent.
    pub adopted: bool,
    /// How often a checkpoint is taken, nanoseconds, if that was asked for.
    pub every_ns: Option<u64>,
    /// How many of the newest checkpoints such a one leaves, if not all.
    pub keep: Option<u64>,
    /// How often it has been brought back after a crash.
    pub crashes: u64,
    /// The last of those: when (nanoseconds since 1970), and of what it died.
    pub crash: Option<(u64, String)>,
}

/// What keeps a running job from being checkpointed as often as was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trouble {
    /// Why the last checkpoint failed, if it did, and since when (nanoseconds since 1970) checkpoints fail for this
    /// reason.
    pub failing: Option<(u64, String)>,
    /// Why some were left out.
    pub slow: Option<String>,
    /// What is wrong with the paging of its memory ([`Store::set_paging`]).
    pub paging: Option<String>,
}

/// What the paging of a program's memory has come to since the program was started, or brought back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Paged {
    /// Pages that have left memory.
    pub out: u64,
    /// Pages of those that were written to the store: not those that it had already, or that are zero.
    pub written: u64,
    /// Pages that have come back.
    #[serde(rename = "in")]
    pub back: u64,
    /// How often the program was stopped for it.
    pub stops: u64,
    /// For how long in all, nanoseconds.
    pub stopped_ns: u64,
    /// For how long its threads, all together, have waited for pages that were held back for the sake of checkpoints, nanoseconds.
    pub waited_ns: u64,
}

/// The paging of a running job's memory, as those who do it tell at most once a second.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paging {
    /// Most private memory that its process is to take, bytes. A record of an earlier version does not tell.
    pub limit: Option<u64>,
    /// What it has come to.
    pub paged: Paged,
    /// Pages that left memory a second, of late.
    pub out_rate: u64,
    /// Pages that came back a second, of late.
    pub in_rate: u64,
    /// What is wrong with it.
    pub trouble: Option<String>,
}

/// How often checkpoints of a running job pay, and why. Times are nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// From the end of one to the next.
    pub interval_ns: u64,
    /// It would pay to take them more often, but one takes so long.
    pub bounded: bool,
    /// What one costs the program: it stands still,
    pub pause_ns: u64,
    /// has to fault in what it writes,
    pub faults_ns: u64,
    /// waits for a processor that is at work on the checkpoint,
    pub delay_ns: u64,
    /// and, within a memory limit, for pages that are held back until it is taken.
    pub waits_ns: u64,
    /// How long one takes to write.
    pub write_ns: u64,
    /// Mean time between failures.
    pub mtbf_ns: u64,
    /// The user said so.
    pub given: bool,
    /// Otherwise: how many there were,
    pub failures: u64,
    /// in how long.
    pub observed_ns: u64,
}

impl Pace {
    /// What a checkpoint costs the program in all, nanoseconds.
    pub fn cost_ns(&self) -> u64 {
        self.pause_ns + self.faults_ns + self.delay_ns + self.waits_ns
    }
}

/// The name of a job, held by whoever starts or runs it until this is dropped or its process dies.
#[derive(Debug)]
pub struct Claim {
    job: String,
    _lock: Lock,
}

impl Claim {
    /// The name.
    pub fn job(&self) -> &str {
        &self.job
    }
}

impl Store {
    /// Takes the name of a job, new or known, for as long as the [`Claim`] lives. The descriptor behind it does not
    /// survive `exec`, but it does survive `fork`.
    ///
    /// # Errors
    /// [`Error::NameTaken`] while somebody else holds it; [`Error::Name`], [`Error::Io`].
    pub fn claim(&self, job: &str) -> Result<Claim> {
        let taken = || Error::NameTaken { job: job.to_owned() };
        let lock = |folder: &Folder| Lock::exclusive(&folder.name_lock(), Duration::ZERO)?.ok_or_else(taken);
        let (_, lock) = self.made(job, lock)?;
        Ok(Claim { job: job.to_owned(), _lock: lock })
    }

    /// Takes a name that no job has yet: `base`, or else `base-2`, `base-3`, …
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Io`].
    pub fn claim_new(&self, base: &str) -> Result<Claim> {
        check_name(base)?;
        let mut number = 1_u64;
        loop {
            let job = if number == 1 { base.to_owned() } else { format!("{base}-{number}") };
            number += 1;
            if self.is_used(&job)? {
                continue;
            }
            match self.claim(&job) {
                // Whoever held it a moment ago may have begun a job under it.
                Ok(claim) if !self.is_used(&job)? => return Ok(claim),
                Ok(_) | Err(Error::NameTaken { .. }) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Whether a job of this name has left anything in the store.
    fn is_used(&self, job: &str) -> Result<bool> {
        let folder = self.folder_unchecked(job);
        let records = [folder.running(), folder.terms(), folder.ledger()];
        Ok(records.iter().any(|record| record.exists()) || !folder.checkpoint_ids()?.is_empty())
    }

    /// Records who runs a job.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Io`].
    pub fn set_running(&self, job: &str, running: &Running) -> Result<()> {
        let folder = self.make(job)?;
        let mut record = Record::new("running")
            .number("pid", running.pid.into())
            .number("start-time", running.start_time)
            .with("boot-id", &running.boot_id)
            .number("supervisor-pid", running.supervisor_pid.into())
            .number("supervisor-start-time", running.supervisor_start_time)
            .number("since-ns", running.since_ns);
        if let Some(id) = running.restored_from {
            record = record.number("restored-from", id);
        }
        for argument in &running.command {
            record = record.with("command", &argument.0);
        }
        for (fd, name) in &running.inherited {
            record = record.with("inherited", [format!("{fd} ").as_bytes(), &name.0].concat());
        }
        if running.adopted {
            record = record.number("adopted", 1);
        }
        for (key, value) in [("every-ns", running.every_ns), ("keep", running.keep)] {
            if let Some(value) = value {
                record = record.number(key, value);
            }
        }
        if let Some((when_ns, what)) = &running.crash {
            record =
                record.number("crashes", running.crashes).number("crash-ns", *when_ns).with("crash", what);
        }
        record.write_for_now(&self.medium, &folder.running())
    }

    /// Who runs a job, if that is recorded.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`]; [`Error::Record`] if the record is damaged.
    pub fn running(&self, job: &str) -> Result<Option<Running>> {
        let path = self.known(job)?.running();
        let Some(record) = Record::read("running", &path)? else { return Ok(None) };
        let decode = || {
            let pid = |key| record.get(key).and_then(|pid| u32::try_from(pid).ok());
            Some(Running {
                pid: pid("pid")?,
                start_time: record.get("start-time")?,
                boot_id: record.text("boot-id")?,
                supervisor_pid: pid("supervisor-pid")?,
                supervisor_start_time: record.get("supervisor-start-time")?,
                since_ns: record.get("since-ns")?,
                restored_from: record.get("restored-from"),
                command: record.all("command").map(|argument| Bytes(argument.to_vec())).collect(),
                inherited: record.all("inherited").map(inherited).collect::<Option<_>>()?,
                adopted: record.get("adopted") == Some(1),
                every_ns: record.get("every-ns"),
                keep: record.get("keep"),
                crashes: record.get("crashes").unwrap_or_default(),
                crash: record.get("crash-ns").zip(record.text("crash")),
            })
        };
        decode().map(Some).ok_or(Error::Record { path, kind: "running" })
    }

    /// Forgets who runs a job; nothing happens if nobody does.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn clear_running(&self, job: &str) -> Result<()> {
        self.medium.remove(&self.known(job)?.running())
    }

    /// Records what is wrong with the checkpoints of a running job; nothing wrong removes the record.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn set_trouble(&self, job: &str, trouble: &Trouble) -> Result<()> {
        let path = self.known(job)?.trouble();
        if trouble.failing.is_none() && trouble.slow.is_none() {
            return self.medium.remove(&path);
        }
        let mut record = Record::new("trouble");
        if let Some((since_ns, what)) = &trouble.failing {
            record = record.number("since-ns", *since_ns).with("failing", what);
        }
        if let Some(what) = &trouble.slow {
            record = record.with("slow", what);
        }
        record.write(&self.medium, &path)
    }

    /// What is wrong with the checkpoints of a running job; by default nothing.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`]; [`Error::Record`] if the record is damaged.
    pub fn trouble(&self, job: &str) -> Result<Trouble> {
        let folder = self.known(job)?;
        // While it is being written in its place it may not be readable.
        let paging = self.paging(job).ok().flatten().and_then(|paging| paging.trouble);
        let Some(record) = Record::read("trouble", &folder.trouble())? else {
            return Ok(Trouble { paging, ..Trouble::default() });
        };
        let failing = record.get("since-ns").zip(record.text("failing"));
        Ok(Trouble { failing, slow: record.text("slow"), paging })
    }

    /// Records how the paging of a job's memory fares, which is for those who page it to do. Once there is a record, a medium that is
    /// full has room for the next one, until [`Store::clear_paging`].
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn set_paging(&self, job: &str, paging: &Paging) -> Result<()> {
        let path = self.known(job)?.paging();
        let Paging { limit, paged, out_rate, in_rate, trouble } = paging;
        let mut record = Record::new("paging").with("what", trouble.as_deref().unwrap_or_default());
        if let Some(limit) = limit {
            let counts = [
                ("limit", *limit),
                ("out", paged.out),
                ("written", paged.written),
                ("in", paged.back),
                ("stops", paged.stops),
                ("stopped-ns", paged.stopped_ns),
                ("waited-ns", paged.waited_ns),
                ("out-rate", *out_rate),
                ("in-rate", *in_rate),
            ];
            record = counts.into_iter().fold(record, |record, (key, value)| record.number(key, value));
        }
        let in_place = |_| record.write_in_place(&path);
        record.write_for_now(&self.medium, &path).or_else(in_place)
    }

    /// How the paging of a job's memory fares, if it is paged.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`]; [`Error::Record`] if the record is damaged.
    pub fn paging(&self, job: &str) -> Result<Option<Paging>> {
        let Some(record) = Record::read("paging", &self.known(job)?.paging())? else { return Ok(None) };
        let number = |key| record.get(key).unwrap_or_default();
        Ok(Some(Paging {
            limit: record.get("limit"),
            paged: Paged {
                out: number("out"),
                written: number("written"),
                back: number("in"),
                stops: number("stops"),
                stopped_ns: number("stopped-ns"),
                waited_ns: number("waited-ns"),
            },
            out_rate: number("out-rate"),
            in_rate: number("in-rate"),
            trouble: record.text("what").filter(|what| !what.is_empty()),
        }))
    }

    /// Forgets how the paging of a job's memory fared.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn clear_paging(&self, job: &str) -> Result<()> {
        self.medium.remove(&self.known(job)?.paging())
    }

    /// Records how often checkpoints of a running job pay; nothing removes the record.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn set_pace(&self, job: &str, pace: Option<&Pace>) -> Result<()> {
        let path = self.known(job)?.pace();
        let Some(pace) = pace else { return self.medium.remove(&path) };
        let fields = [
            ("interval-ns", pace.interval_ns),
            ("bounded", pace.bounded.into()),
            ("pause-ns", pace.pause_ns),
            ("faults-ns", pace.faults_ns),
            ("delay-ns", pace.delay_ns),
            ("waits-ns", pace.waits_ns),
            ("write-ns", pace.write_ns),
            ("mtbf-ns", pace.mtbf_ns),
            ("given", pace.given.into()),
            ("failures", pace.failures),
            ("observed-ns", pace.observed_ns),
        ];
        let record =
            fields.into_iter().fold(Record::new("pace"), |record, (key, value)| record.number(key, value));
        record.write_for_now(&self.medium, &path)
    }

    /// How often checkpoints of a running job pay, if that was asked for and is known.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`]; [`Error::Record`] if the record is damaged.
    pub fn pace(&self, job: &str) -> Result<Option<Pace>> {
        let path = self.known(job)?.pace();
        let Some(record) = Record::read("pace", &path)? else { return Ok(None) };
        let decode = || {
            Some(Pace {
                interval_ns: record.get("interval-ns")?,
                bounded: record.get("bounded")? == 1,
                pause_ns: record.get("pause-ns")?,
                faults_ns: record.get("faults-ns")?,
                delay_ns: record.get("delay-ns")?,
                // An earlier version did not count them.
                waits_ns: record.get("waits-ns").unwrap_or_default(),
                write_ns: record.get("write-ns")?,
                mtbf_ns: record.get("mtbf-ns")?,
                given: record.get("given")? == 1,
                failures: record.get("failures")?,
                observed_ns: record.get("observed-ns")?,
            })
        };
        decode().map(Some).ok_or(Error::Record { path, kind: "pace" })
    }

    /// Where the socket is through which the supervisor of a job is asked for checkpoints, in the job's folder, which
    /// is made if it is not there.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Io`].
    pub fn control(&self, job: &str) -> Result<PathBuf> {
        Ok(self.make(job)?.control())
    }
}

fn inherited(value: &[u8]) -> Option<(u32, Bytes)> {
    let space = value.iter().position(|&b| b == b' ')?;
    let fd = std::str::from_utf8(&value[..space]).ok()?.parse().ok()?;
    Some((fd, Bytes(value[space + 1..].to_vec())))
}
