//! `stillpoint doctor`: what this kernel and these privileges allow, found by trying each thing for real.

use crate::args::Common;
use crate::failure::Result;
use crate::{jobs, output};
use rustix::fs::{Mode, OFlags};
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;
use stillpoint_linux::probe::{self, Protection, Subject};
use stillpoint_linux::rootless::{self, Apart};
use stillpoint_linux::{Error, features};

/// How much depends on a feature.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    /// Checkpoint and restore do not work without.
    Required,
    /// They work without, for programs or with results that do not need it.
    Optional,
}

/// A feature and what came of trying it.
struct Feature {
    name: &'static str,
    need: Need,
    purpose: &'static str,
    remedy: &'static str,
    outcome: std::result::Result<String, String>,
}

impl Feature {
    fn state(&self) -> &'static str {
        match (&self.outcome, self.need) {
            (Ok(_), _) => "ok",
            (Err(_), Need::Required) => "missing",
            (Err(_), Need::Optional) => "optional",
        }
    }
}

/// Runs the command.
pub fn run(common: &Common) -> Result<ExitCode> {
    let store = jobs::store_path(common.store.as_deref())?;
    let features: Vec<Feature> =
        [own_features(), process_features(), store_features(&store)].into_iter().flatten().collect();
    let missing = features.iter().filter(|f| f.state() == "missing").count();
    if common.json {
        output::json(&as_json(&features, missing == 0))?;
    } else {
        output::line(&as_table(&features))?;
        output::line(&match missing {
            0 => "Checkpoint and restore work here.".to_string(),
            1 => "Checkpoint and restore do not work here: one required feature is missing.".to_string(),
            n => format!("Checkpoint and restore do not work here: {n} required features are missing."),
        })?;
    }
    Ok(if missing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a process may do by itself.
fn own_features() -> Vec<Feature> {
    const ROOT_HINT: &str = "run as root, or give the program CAP_CHECKPOINT_RESTORE (or CAP_SYS_ADMIN)";
    use Need::{Optional, Required};
    // What an ordinary user lacks he has in a user namespace of his own.
    let is_ordinary = rootless::is_ordinary().unwrap_or(false);
    let of_privilege = if is_ordinary { Optional } else { Required };
    let namespaces = if is_ordinary {
        tried(
            "user namespaces",
            Required,
            "an ordinary user restores, and makes isolated twins, in one of his own",
            "allow them (sysctls user.max_user_namespaces, kernel.unprivileged_userns_clone, \
             kernel.apparmor_restrict_unprivileged_userns; in a container, /proc must not be masked), or run as root",
            rootless::probe(),
        )
    } else {
        tried(
            "pid namespaces",
            Optional,
            "isolated twins; restore while the old process id is taken",
            "run as root, or with CAP_SYS_ADMIN",
            probe::pid_namespace(),
        )
    };
    vec![
        feature(
            "Linux 6.7",
            Required,
            "the interfaces everything stands on",
            "boot a newer kernel",
            kernel(),
        ),
        tried(
            "clone3 set_tid",
            of_privilege,
            "restored threads get their old ids",
            ROOT_HINT,
            probe::set_tid(),
        ),
        tried(
            "PR_SET_MM_MAP",
            Required,
            "heap, command line and auxv as they were",
            ROOT_HINT,
            probe::set_mm_map(),
        ),
        tried(
            "PR_SET_MM_MAP, executable",
            of_privilege,
            "what is restored, or a twin, is of the same executable",
            ROOT_HINT,
            probe::set_executable(),
        ),
        namespaces,
        tried(
            "time namespaces",
            Optional,
            "the monotonic clock goes on where it was",
            "run as root, or with CAP_SYS_ADMIN and CAP_SYS_TIME; the kernel needs CONFIG_TIME_NS",
            probe::time_namespace(),
        ),
        feature(
            "timer ids",
            Optional,
            "POSIX timers get back their ids at once",
            "Linux 6.15 or newer; older ones need many attempts",
            features::timer_ids().then(String::new).ok_or("the kernel does not know it".into()),
        ),
        tried(
            "userfaultfd, noting writes",
            Optional,
            "incremental checkpoints, and the engine precopy",
            "the kernel needs CONFIG_USERFAULTFD and Linux 6.7",
            probe::userfaultfd(Protection::Noted),
        ),
        tried(
            "userfaultfd, holding writes",
            Optional,
            "the engine wp, memory that comes after a restore, and limits of memory",
            "run as root, or set the sysctl vm.unprivileged_userfaultfd to 1; the kernel needs CONFIG_USERFAULTFD",
            probe::userfaultfd(Protection::Waits),
        ),
        tried(
            "sock_diag",
            Required,
            "the state of sockets",
            "the kernel needs CONFIG_UNIX_DIAG",
            sock_diag(),
        ),
        feature(
            "CAP_SYS_RESOURCE",
            Optional,
            "hard limits that are higher than our own",
            "run with CAP_SYS_RESOURCE",
            capability(24),
        ),
        feature(
            "movable vdso",
            Required,
            "the vdso moves to where the program knows it",
            "boot without CONFIG_MSEAL_SYSTEM_MAPPINGS",
            vdso(),
        ),
    ]
}

/// What may be done to another process.
fn process_features() -> Vec<Feature> {
    // As `run` starts a job.
    let kept_off = rootless::is_kept_off();
    let apart = matches!(kept_off, Ok(true)).then(|| Apart::new().ok()).flatten();
    let subject = match Subject::start(apart.as_ref()) {
        Ok(subject) => subject,
        Err(e) => {
            let hint = "raise the limit on processes (ulimit -u)";
            return vec![tried("a new process", Need::Required, "trying everything else", hint, Err(e))];
        }
    };
    use Need::{Optional, Required};
    let attach = "run as root, or with CAP_SYS_PTRACE, or set the sysctl kernel.yama.ptrace_scope to 0";
    let mut features = vec![
        feature(
            "programs of other parents",
            Optional,
            "what was not started by stillpoint run",
            "start it with stillpoint run, or run as root, or with CAP_SYS_PTRACE, or set the sysctl kernel.yama.ptrace_scope to 0",
            match kept_off {
                Ok(false) => Ok(String::new()),
                Ok(true) => Err("kernel.yama.ptrace_scope forbids it".into()),
                Err(e) => Err(e.to_string()),
            },
        ),
        tried("pidfd_getfd", Required, "descriptors of the program", attach, subject.pidfd_getfd()),
        tried("process_vm_readv", Required, "memory of the program", attach, subject.process_vm_readv()),
        tried(
            "kcmp",
            Required,
            "what is shared and what is a copy",
            "the kernel needs CONFIG_KCMP",
            subject.kcmp(),
        ),
        tried(
            "PAGEMAP_SCAN",
            Required,
            "which pages hold something, and which were written",
            "Linux 6.7 or newer, with CONFIG_PROC_PAGE_MONITOR",
            subject.pagemap_scan(),
        ),
        tried(
            "map_files",
            Optional,
            "deleted files that are still mapped",
            "run as root, or with CAP_CHECKPOINT_RESTORE",
            subject.map_files(),
        ),
    ];
    let (attached, traced) = match subject.ptrace() {
        Ok(traced) => (Ok(()), [traced.syscall_info, traced.rseq, traced.filter]),
        Err(e) => (Err(e), [(); 3].map(|()| Err(Error::Other("cannot attach".into())))),
    };
    let [syscall_info, rseq, filter] = traced;
    features.extend([
        tried("ptrace", Required, "stopping a program and looking into it", attach, attached),
        tried(
            "PTRACE_GET_SYSCALL_INFO",
            Required,
            "calls that were interrupted",
            "Linux 5.3 or newer",
            syscall_info,
        ),
        tried(
            "PTRACE_GET_RSEQ_CONFIGURATION",
            Required,
            "restartable sequences",
            "Linux 5.13 or newer, with CONFIG_RSEQ",
            rseq,
        ),
        tried(
            "seccomp filters",
            Optional,
            "programs that filter their system calls",
            "run as root, or with CAP_SYS_ADMIN; the kernel needs CONFIG_CHECKPOINT_RESTORE",
            filter,
        ),
    ]);
    features
}

/// What the file system of the store can do.
fn store_features(store: &Path) -> Vec<Feature> {
    // The store need not exist yet: its nearest ancestor that does is on the same file system.
    let dir = store.ancestors().find(|p| p.is_dir()).unwrap_or(store);
    let remedy = "name another directory with --store DIR or $STILLPOINT_STORE";
    let writable = temporary_file(dir, OFlags::empty());
    let direct = temporary_file(dir, OFlags::DIRECT);
    vec![
        feature("store", Need::Required, "keeping checkpoints", remedy, writable),
        feature("direct I/O", Need::Optional, "writing checkpoints at the speed of the disk", remedy, direct),
    ]
}

fn feature(
    name: &'static str,
    need: Need,
    purpose: &'static str,
    remedy: &'static str,
    outcome: std::result::Result<String, String>,
) -> Feature {
    Feature { name, need, purpose, remedy, outcome }
}

fn tried(
    name: &'static str,
    need: Need,
    purpose: &'static str,
    remedy: &'static str,
    outcome: stillpoint_linux::Result<()>,
) -> Feature {
    feature(name, need, purpose, remedy, outcome.map(|()| String::new()).map_err(|e| e.to_string()))
}

fn kernel() -> std::result::Result<String, String> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if is_new_enough(&release) { Ok(release) } else { Err(format!("this is Linux {release}")) }
}

fn is_new_enough(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 7)
}

fn capability(number: u32) -> std::result::Result<String, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|e| e.to_string())?;
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let effective = effective.and_then(|v| u64::from_str_radix(v.trim(), 16).ok()).unwrap_or(0);
    if effective >> number & 1 == 1 { Ok(String::new()) } else { Err("not among our capabilities".into()) }
}

/// A sealed vdso (`sl` among the flags of its mapping) cannot be moved.
fn vdso() -> std::result::Result<String, String> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").map_err(|e| e.to_string())?;
    let mut lines = smaps.lines().skip_while(|l| !l.ends_with("[vdso]"));
    let flags = lines.find(|l| l.starts_with("VmFlags:")).unwrap_or_default();
    if flags.split_whitespace().any(|f| f == "sl") { Err("it is sealed".into()) } else { Ok(String::new()) }
}

/// Asks the kernel for its unix sockets.
fn sock_diag() -> stillpoint_linux::Result<()> {
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
    const NLMSG_ERROR: u16 = 2;
    let failed = |e| Error::call("NETLINK_SOCK_DIAG", e);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol = Some(netlink::SOCK_DIAG);
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol).map_err(failed)?;
    // struct nlmsghdr and struct unix_diag_req, see sock_diag(7): a dump of all states, with nothing shown.
    let mut request = Vec::with_capacity(40);
    request.extend(40u32.to_ne_bytes());
    request.extend(20u16.to_ne_bytes()); // SOCK_DIAG_BY_FAMILY
    request.extend(0x301u16.to_ne_bytes()); // NLM_F_REQUEST | NLM_F_DUMP
    request.extend([0; 8]);
    request.extend([1, 0, 0, 0]); // AF_UNIX
    request.extend(u32::MAX.to_ne_bytes());
    request.resize(40, 0);
    rustix::net::send(&socket, &request, SendFlags::empty()).map_err(failed)?;
    let mut answer = [0u8; 8192];
    let (length, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::TRUNC).map_err(failed)?;
    if length >= 20 && u16::from_ne_bytes([answer[4], answer[5]]) == NLMSG_ERROR {
        let number = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
        return Err(Error::call("SOCK_DIAG_BY_FAMILY", std::io::Error::from_raw_os_error(-number)));
    }
    Ok(())
}

/// A block as direct I/O wants it.
#[repr(align(4096))]
struct Block([u8; 4096]);

fn temporary_file(dir: &Path, flags: OFlags) -> std::result::Result<String, String> {
    let failed = |e| format!("{}: {}", dir.display(), std::io::Error::from(e));
    let flags = flags | OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    rustix::io::write(&file, &Block([1; 4096]).0).map_err(failed)?;
    Ok(dir.display().to_string())
}

fn as_json(features: &[Feature], works: bool) -> serde_json::Value {
    let features: Vec<_> = features
        .iter()
        .map(|f| {
            json!({
                "feature": f.name,
                "state": f.state(),
                "required": f.need == Need::Required,
                "purpose": f.purpose,
                "detail": f.outcome.as_ref().unwrap_or_else(|e| e),
                "remedy": f.outcome.as_ref().err().map(|_| f.remedy),
            })
        })
        .collect();
    json!({"works": works, "features": features})
}

fn as_table(features: &[Feature]) -> String {
    let row = |f: &Feature| {
        let remark = match &f.outcome {
            Ok(detail) => detail.clone(),
            Err(e) => format!("{}: {e}", f.remedy),
        };
        vec![f.name.into(), f.state().into(), f.purpose.into(), remark]
    };
    output::table(&["FEATURE", "STATE", "FOR", "REMARK"], features.iter().map(row).collect(), &[])
}

#[cfg(test)]
mod tests {
    use super::is_new_enough;

    #[test]
    fn kernel_versions() {
        for good in ["6.7.0", "6.18.44-fc-v595", "7.0-rc1", "10.0"] {
            assert!(is_new_enough(good), "{good}");
        }
        for bad in ["6.6.99", "5.15.0-generic", "", "x"] {
            assert!(!is_new_enough(bad), "{bad}");
        }
    }
}
