//! `/proc/PID/status`: ids, credentials, signals, sizes of a process or thread.

use super::{Proc, nonsense, text};
use crate::Result;
use std::path::Path;

/// What `status` tells. Lines that a kernel does not have leave their field at `None`, empty or zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// State: `R`, `S`, `D`, `T` (stopped), `t` (traced), `Z`, `X`, `I`.
    pub state: u8,
    /// Process id.
    pub tgid: u32,
    /// Thread id.
    pub pid: u32,
    /// Parent.
    pub ppid: u32,
    /// Thread that traces it, 0 for none.
    pub tracer: u32,
    /// Real, effective, saved and file-system user id.
    pub uid: [u32; 4],
    /// Real, effective, saved and file-system group id.
    pub gid: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Process id in each pid namespace, ours first, its own last.
    pub ns_tgid: Vec<u32>,
    /// Thread id in each pid namespace, ours first, its own last.
    pub ns_pid: Vec<u32>,
    /// Process group in each pid namespace (0: outside of it).
    pub ns_pgid: Vec<u32>,
    /// Session in each pid namespace (0: outside of it).
    pub ns_sid: Vec<u32>,
    /// Kernel thread.
    pub kthread: bool,
    /// File mode creation mask; `None` for zombies.
    pub umask: Option<u32>,
    /// Number of threads.
    pub threads: u32,
    /// Resident memory, bytes.
    pub rss: u64,
    /// Swapped memory, bytes.
    pub swap: u64,
    /// Resident memory of its own, neither shared nor of files, bytes.
    pub anonymous: u64,
    /// Locked in memory, bytes.
    pub locked: u64,
    /// Dumping core.
    pub core_dumping: bool,
    /// Transparent huge pages allowed; `None` for zombies, kernel threads and old kernels.
    pub thp_enabled: Option<bool>,
    /// Linear address masking: all ones if off.
    pub untag_mask: Option<u64>,
    /// Signals pending for the thread (bit `n - 1` is signal `n`).
    pub sig_pending: u64,
    /// Signals pending for the process.
    pub shared_pending: u64,
    /// Blocked signals.
    pub sig_blocked: u64,
    /// Ignored signals.
    pub sig_ignored: u64,
    /// Caught signals.
    pub sig_caught: u64,
    /// Capability sets: inheritable, permitted, effective, bounding, ambient.
    pub caps: [u64; 5],
    /// `no_new_privs`.
    pub no_new_privs: bool,
    /// Seccomp mode: 0 none, 1 strict, 2 filter.
    pub seccomp: u32,
    /// Number of seccomp filters; `None` on old kernels.
    pub seccomp_filters: Option<u32>,
    /// `Speculation_Store_Bypass`, in the kernel's words.
    pub store_bypass: Vec<u8>,
    /// `SpeculationIndirectBranch`, in the kernel's words.
    pub indirect_branch: Vec<u8>,
    /// `x86_Thread_features`: `shstk`, `wrss`.
    pub x86_features: Vec<u8>,
    /// Allowed CPUs: bit mask, little-endian.
    pub cpus_allowed: Vec<u8>,
}

impl Status {
    /// Memory that another one like it would take for itself, bytes: of its own, in memory or swapped.
    pub fn own_memory(&self) -> u64 {
        self.anonymous + self.swap
    }

    /// Its thread id, as it sees it itself.
    pub fn own_tid(&self) -> u32 {
        self.ns_pid.last().copied().unwrap_or(self.pid)
    }

    /// Its process id, as it sees it itself.
    pub fn own_pid(&self) -> u32 {
        self.ns_tgid.last().copied().unwrap_or(self.tgid)
    }

    /// Its process id in the pid namespace so many levels below ours.
    pub fn pid_at(&self, level: usize) -> u32 {
        self.ns_tgid.get(level).copied().unwrap_or_else(|| self.own_pid())
    }

    /// Its thread id in the pid namespace so many levels below ours.
    pub fn tid_at(&self, level: usize) -> u32 {
        self.ns_pid.get(level).copied().unwrap_or_else(|| self.own_tid())
    }
}

impl Proc {
    /// Reads `status`.
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Parse`].
    pub fn status(&self) -> Result<Status> {
        parse(&self.read("status")?, &self.path.join("status"))
    }
}

/// Parses the text of `status`.
///
/// # Errors
/// [`crate::Error::Parse`] with the offending line, or with the whole text if it lacks what every kernel tells.
pub fn parse(text: &[u8], path: &Path) -> Result<Status> {
    let mut status = Status::default();
    for line in text::lines(text) {
        // Newlines in the name are escaped here, so no name can forge a line.
        let Some((key, value)) = text::cut(line, b':') else { return Err(nonsense(path, line)) };
        field(&mut status, number(key), value.trim_ascii()).ok_or_else(|| nonsense(path, line))?;
    }
    if status.state == 0 || status.pid == 0 || status.tgid == 0 {
        return Err(nonsense(path, text));
    }
    Ok(status)
}

/// Names of lines as numbers: there are many lines, and many names to compare each with.
mod key {
    macro_rules! keys {
        ($($name:ident = $text:literal)*) => { $(pub(super) const $name: u64 = super::number($text);)* };
    }
    keys! {
        STATE = b"State"
        UMASK = b"Umask"
        TGID = b"Tgid"
        PID = b"Pid"
        PPID = b"PPid"
        TRACER_PID = b"TracerPid"
        UID = b"Uid"
        GID = b"Gid"
        GROUPS = b"Groups"
        NSTGID = b"NStgid"
        NSPID = b"NSpid"
        NSPGID = b"NSpgid"
        NSSID = b"NSsid"
        KTHREAD = b"Kthread"
        THREADS = b"Threads"
        VM_RSS = b"VmRSS"
        VM_LCK = b"VmLck"
        VM_SWAP = b"VmSwap"
        RSS_ANON = b"RssAnon"
        CORE_DUMPING = b"CoreDumping"
        THP_ENABLED = b"THP_enabled"
        UNTAG_MASK = b"untag_mask"
        SIG_PND = b"SigPnd"
        SHD_PND = b"ShdPnd"
        SIG_BLK = b"SigBlk"
        SIG_IGN = b"SigIgn"
        SIG_CGT = b"SigCgt"
        CAP_INH = b"CapInh"
        CAP_PRM = b"CapPrm"
        CAP_EFF = b"CapEff"
        CAP_BND = b"CapBnd"
        CAP_AMB = b"CapAmb"
        NO_NEW_PRIVS = b"NoNewPrivs"
        SECCOMP = b"Seccomp"
        SECCOMP_FILTERS = b"Seccomp_filters"
        SPECULATION_STORE_BYPASS = b"Speculation_Store_Bypass"
        SPECULATION_INDIRECT_BRANCH = b"SpeculationIndirectBranch"
        X86_THREAD_FEATURES = b"x86_Thread_features"
        CPUS_ALLOWED = b"Cpus_allowed"
    }
}

/// Length and first seven letters, by which all names that are of interest differ from all there are.
const fn number(name: &[u8]) -> u64 {
    let (mut number, mut i) = (name.len() as u64, 0);
    while i < 7 {
        number = number << 8 | if i < name.len() { name[i] as u64 } else { 0 };
        i += 1;
    }
    number
}

fn field(s: &mut Status, key: u64, value: &[u8]) -> Option<()> {
    match key {
        key::STATE => s.state = *value.first()?,
        key::UMASK => s.umask = Some(octal(value)?),
        key::TGID => s.tgid = small(value)?,
        key::PID => s.pid = small(value)?,
        key::PPID => s.ppid = small(value)?,
        key::TRACER_PID => s.tracer = small(value)?,
        key::UID => s.uid = list(value)?.try_into().ok()?,
        key::GID => s.gid = list(value)?.try_into().ok()?,
        key::GROUPS => s.groups = list(value)?,
        key::NSTGID => s.ns_tgid = list(value)?,
        key::NSPID => s.ns_pid = list(value)?,
        key::NSPGID => s.ns_pgid = list(value)?,
        key::NSSID => s.ns_sid = list(value)?,
        key::KTHREAD => s.kthread = small(value)? != 0,
        key::THREADS => s.threads = small(value)?,
        key::VM_RSS => s.rss = kilobytes(value)?,
        key::VM_LCK => s.locked = kilobytes(value)?,
        key::VM_SWAP => s.swap = kilobytes(value)?,
        key::RSS_ANON => s.anonymous = kilobytes(value)?,
        key::CORE_DUMPING => s.core_dumping = small(value)? != 0,
        key::THP_ENABLED => s.thp_enabled = Some(small(value)? != 0),
        key::UNTAG_MASK => s.untag_mask = Some(text::hex(value)?),
        _ => return rights(s, key, value),
    }
    Some(())
}

/// Signals, capabilities, mitigations.
fn rights(s: &mut Status, key: u64, value: &[u8]) -> Option<()> {
    match key {
        key::SIG_PND => s.sig_pending = text::hex(value)?,
        key::SHD_PND => s.shared_pending = text::hex(value)?,
        key::SIG_BLK => s.sig_blocked = text::hex(value)?,
        key::SIG_IGN => s.sig_ignored = text::hex(value)?,
        key::SIG_CGT => s.sig_caught = text::hex(value)?,
        key::CAP_INH => s.caps[0] = text::hex(value)?,
        key::CAP_PRM => s.caps[1] = text::hex(value)?,
        key::CAP_EFF => s.caps[2] = text::hex(value)?,
        key::CAP_BND => s.caps[3] = text::hex(value)?,
        key::CAP_AMB => s.caps[4] = text::hex(value)?,
        key::NO_NEW_PRIVS => s.no_new_privs = small(value)? != 0,
        key::SECCOMP => s.seccomp = small(value)?,
        key::SECCOMP_FILTERS => s.seccomp_filters = Some(small(value)?),
        key::SPECULATION_STORE_BYPASS => s.store_bypass = value.to_vec(),
        key::SPECULATION_INDIRECT_BRANCH => s.indirect_branch = value.to_vec(),
        key::X86_THREAD_FEATURES => s.x86_features = value.to_vec(),
        key::CPUS_ALLOWED => s.cpus_allowed = mask(value)?,
        _ => {}
    }
    Some(())
}

fn small(value: &[u8]) -> Option<u32> {
    text::dec(value)?.try_into().ok()
}

fn octal(value: &[u8]) -> Option<u32> {
    u32::from_str_radix(str::from_utf8(value).ok()?, 8).ok()
}

fn list(value: &[u8]) -> Option<Vec<u32>> {
    text::words(value).map(small).collect()
}

fn kilobytes(value: &[u8]) -> Option<u64> {
    text::dec(value.strip_suffix(b" kB")?)?.checked_mul(1024)
}

/// `ff,00000003`: groups of 32 bits, highest first.
fn mask(value: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for group in value.split(|&b| b == b',').rev() {
        bytes.extend_from_slice(&u32::try_from(text::hex(group)?).ok()?.to_le_bytes());
    }
    Some(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_thread() {
        let text = b"Name:\todd\\nTgid:\t1\nUmask:\t0027\nState:\tt (tracing stop)\nTgid:\t70\nPid:\t71\nPPid:\t6\n\
            TracerPid:\t9\nUid:\t1000\t1001\t1002\t1003\nGid:\t1\t2\t3\t4\nGroups:\t4 24 27 \nNStgid:\t70\t1\n\
            NSpid:\t71\t2\nNSpgid:\t70\t1\nNSsid:\t5\t0\nVmRSS:\t    1764 kB\nSigCgt:\t0000000180014a07\n\
            CapEff:\t000001fffeffffff\nCapAmb:\t0000000000000001\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\n\
            Speculation_Store_Bypass:\tthread vulnerable\nx86_Thread_features:\tshstk wrss \n\
            Cpus_allowed:\tff,00000003\nFuture:\twhatever\n";
        let s = parse(text, Path::new("status")).unwrap();
        assert_eq!((s.state, s.tgid, s.pid, s.own_pid(), s.own_tid()), (b't', 70, 71, 1, 2));
        assert_eq!((s.umask, s.uid, s.gid), (Some(0o27), [1000, 1001, 1002, 1003], [1, 2, 3, 4]));
        assert_eq!((s.groups, s.tracer, s.rss), (vec![4, 24, 27], 9, 1764 * 1024));
        assert_eq!((s.caps[2], s.caps[4]), (0x1ff_feff_ffff, 1));
        assert_eq!((s.no_new_privs, s.seccomp, s.seccomp_filters), (true, 2, Some(3)));
        assert_eq!(s.cpus_allowed, [3, 0, 0, 0, 0xff, 0, 0, 0]);
        assert_eq!(s.x86_features, b"shstk wrss");
        assert_eq!((s.ns_sid, s.thp_enabled), (vec![5, 0], None));
    }

    #[test]
    fn nonsense_is_named() {
        assert!(parse(b"", Path::new("status")).is_err());
        let e = parse(b"Uid:\t1 2 3\n", Path::new("status")).unwrap_err();
        assert!(e.to_string().contains("Uid:"), "{e}");
    }
}
