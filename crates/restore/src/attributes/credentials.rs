//! User, groups, capabilities and securebits: a program that turns what a thread has into what it had.
//! credentials(7), capabilities(7)

use super::process::prctl;
use crate::{Error, Result};
use linux_raw_sys::prctl::{
    PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, PR_CAP_AMBIENT_RAISE, PR_CAPBSET_DROP, PR_SET_KEEPCAPS,
    PR_SET_SECUREBITS,
};
use stillpoint_image::Credentials;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::Program;
use stillpoint_linux::{features, layout, rootless};

const CAP_SETGID: u64 = 1 << 6;
const CAP_SETUID: u64 = 1 << 7;
const CAP_SETPCAP: u64 = 1 << 8;
const CAP_SYS_ADMIN: u64 = 1 << 21;
/// `SECBIT_NO_SETUID_FIXUP`: changing user ids leaves capabilities alone.
const NO_SETUID_FIXUP: u32 = 1 << 2;
/// `SECBIT_KEEP_CAPS`.
const KEEP_CAPS: u32 = 1 << 4;

/// Names of capabilities by number (`linux/capability.h`).
#[rustfmt::skip]
const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// Credentials of a thread as they are now. `securebits` are ours: what a process of our making starts with.
///
/// # Errors
/// [`stillpoint_linux::Error::Gone`] or that they cannot be read.
pub fn current(tid: u32) -> Result<Credentials> {
    let s = Proc::thread_by_tid(tid)?.status()?;
    let securebits = features::own_securebits()?;
    Ok(Credentials { uid: s.uid, gid: s.gid, groups: named(s.groups), caps: s.caps, securebits })
}

/// What we are, and what of our privileges a program can have that we restore. An ordinary user's is in a user namespace, where privileges
/// are others than outside: there it can have none, but gives up what it had given up.
///
/// # Errors
/// That it cannot be read.
pub fn own() -> Result<Credentials> {
    let mut own = current(std::process::id())?;
    let outside = rootless::outside();
    if outside.is_some() || rootless::is_ordinary()? {
        let [.., bounding, _] = outside.map_or(own.caps, |outside| outside.caps);
        own.caps = [0, 0, CAP_SETPCAP, bounding, 0];
    }
    Ok(own)
}

/// The supplementary groups of a process of ours, as they are called outside: in the user namespace of an ordinary user's restore nobody
/// can change them.
fn named(groups: Vec<u32>) -> Vec<u32> {
    match rootless::outside() {
        Some(outside) if outside.groups.len() == groups.len() => outside.groups.clone(),
        _ => groups,
    }
}

/// The same of who has gone into a user namespace of the program's own, where nothing of that is left.
///
/// # Errors
/// As [`current`].
pub fn current_inside(tid: u32) -> Result<Credentials> {
    Ok(Credentials { securebits: 0, ..current(tid)? })
}

/// What it takes to put somebody with the credentials `want` into a user namespace of the program's own and is not there, one sentence
/// each.
pub fn missing_inside(now: &Credentials, want: &Credentials) -> Vec<String> {
    let effective = now.caps[2];
    let needed = [
        (
            true,
            CAP_SYS_ADMIN,
            "the program was in a user namespace of its own; going into one needs CAP_SYS_ADMIN",
        ),
        (
            true,
            CAP_SETUID,
            "the program was in a user namespace of its own; giving names to users needs CAP_SETUID",
        ),
        (
            true,
            CAP_SETGID,
            "the program was in a user namespace of its own; giving names to groups needs CAP_SETGID",
        ),
        (
            now.uid != want.uid,
            CAP_SETPCAP,
            "the program ran as another user in a user namespace; that needs CAP_SETPCAP",
        ),
    ];
    let lacking = needed.into_iter().filter(|(is_needed, cap, _)| *is_needed && effective & cap == 0);
    lacking.map(|(.., why)| why.into()).collect()
}

/// What it takes to get from `now` to `want` and is not there, one sentence each.
pub fn missing(now: &Credentials, want: &Credentials) -> Vec<String> {
    let mut all = Vec::new();
    let [inheritable, permitted, effective, bounding, _] = now.caps;
    let lacking =
        want.caps[1] & !permitted | want.caps[3] & !bounding | want.caps[0] & !(inheritable | bounding);
    if lacking != 0 {
        all.push(format!("the program has capabilities that stillpoint lacks here: {}", names(lacking)));
    }
    if now.uid != want.uid && effective & CAP_SETUID == 0 {
        all.push(format!("the program ran as user {}; changing to it needs CAP_SETUID", want.uid[1]));
    }
    if (now.gid != want.gid || now.groups != want.groups) && effective & CAP_SETGID == 0 {
        all.push(format!(
            "the program ran with group {} and others; changing to them needs CAP_SETGID",
            want.gid[1]
        ));
    }
    let own_rules = now.securebits != want.securebits || now.caps[3] & !want.caps[3] != 0;
    if own_rules && effective & CAP_SETPCAP == 0 {
        all.push("the program had other securebits or a smaller bounding set; that needs CAP_SETPCAP".into());
    }
    all
}

fn names(caps: u64) -> String {
    let name = |bit: usize| CAPABILITIES.get(bit).map_or(format!("capability {bit}"), |n| format!("CAP_{n}"));
    let all: Vec<String> = (0..64).filter(|bit| caps & 1 << bit != 0).map(name).collect();
    all.join(", ")
}

/// Adds the calls that turn the credentials of the running thread from `now` into `want`.
///
/// 1. `SECBIT_NO_SETUID_FIXUP`, so that steps 2 and 3 keep all capabilities.
/// 2. Groups and group ids, while user ids still allow it. 3. User ids. File-system ids follow the effective ones and
///    are set after them.
/// 4. Inheritable capabilities, which must be in the bounding set or inheritable before, so before 5.
/// 5. The bounding set shrinks. 6. Ambient ones are raised: they must be permitted and inheritable.
/// 7. Securebits, locks included: they may forbid step 6 and need `CAP_SETPCAP`, which step 8 may give up.
/// 8. Permitted and effective capabilities.
pub fn program(p: &mut Program, now: &Credentials, want: &Credentials) {
    if now == want {
        return;
    }
    let mut securebits = now.securebits;
    if now.uid != want.uid && now.caps[2] & CAP_SETPCAP != 0 {
        securebits |= NO_SETUID_FIXUP;
        set_securebits(p, now.securebits, securebits);
    } else if now.uid != want.uid {
        // Needs no privilege, and spares all but the effective ones, which step 8 sets.
        prctl(p, "PR_SET_KEEPCAPS", PR_SET_KEEPCAPS, [1.into()]);
    }
    ids(p, now, want);
    let [mut inheritable, permitted, effective, bounding, mut ambient] = now.caps;
    if inheritable != want.caps[0] {
        inheritable = want.caps[0];
        set_caps(p, "inheritable", [inheritable, permitted, effective]);
        ambient &= inheritable;
    }
    for bit in (0..64u64).filter(|bit| bounding & !want.caps[3] & 1 << bit != 0) {
        prctl(p, "PR_CAPBSET_DROP", PR_CAPBSET_DROP, [bit.into()]);
    }
    if ambient != want.caps[4] {
        prctl(p, "PR_CAP_AMBIENT_CLEAR_ALL", PR_CAP_AMBIENT, [u64::from(PR_CAP_AMBIENT_CLEAR_ALL).into()]);
        for bit in (0..64u64).filter(|bit| want.caps[4] & 1 << bit != 0) {
            let args = [u64::from(PR_CAP_AMBIENT_RAISE).into(), bit.into()];
            prctl(p, "PR_CAP_AMBIENT_RAISE", PR_CAP_AMBIENT, args);
        }
    }
    set_securebits(p, securebits, want.securebits);
    if now.uid != want.uid && now.caps[2] & CAP_SETPCAP == 0 {
        let keep = u64::from(want.securebits & KEEP_CAPS != 0);
        prctl(p, "PR_SET_KEEPCAPS", PR_SET_KEEPCAPS, [keep.into()]);
    }
    if now.uid != want.uid || [permitted, effective] != want.caps[1..3] {
        set_caps(p, "permitted and effective", [inheritable, want.caps[1], want.caps[2]]);
    }
}

/// Adds the call after which changing user ids changes capabilities as usual, as in a user namespace that has just been entered.
pub(crate) fn keep_nothing(p: &mut Program) {
    prctl(p, "PR_SET_SECUREBITS", PR_SET_SECUREBITS, [0.into()]);
}

/// Adds the calls that change users and groups.
pub(crate) fn ids(p: &mut Program, now: &Credentials, want: &Credentials) {
    if now.groups != want.groups {
        let list: Vec<u8> = want.groups.iter().flat_map(|g| g.to_le_bytes()).collect();
        let list = p.data(&list);
        p.call("setgroups", libc::SYS_setgroups, [(want.groups.len() as u64).into(), list]);
    }
    if now.gid != want.gid {
        let [real, effective, saved, file] = want.gid.map(u64::from);
        p.call("setresgid", libc::SYS_setresgid, [real.into(), effective.into(), saved.into()]);
        // Returns the old id, never an error.
        p.attempt("setfsgid", libc::SYS_setfsgid, [file.into()]);
    }
    if now.uid != want.uid {
        let [real, effective, saved, file] = want.uid.map(u64::from);
        p.call("setresuid", libc::SYS_setresuid, [real.into(), effective.into(), saved.into()]);
        p.attempt("setfsuid", libc::SYS_setfsuid, [file.into()]);
    }
}

fn set_securebits(p: &mut Program, from: u32, to: u32) {
    if from != to {
        prctl(p, "PR_SET_SECUREBITS", PR_SET_SECUREBITS, [u64::from(to).into()]);
    }
}

/// capset(2): the low halves of effective, permitted and inheritable, then the high halves.
fn set_caps(p: &mut Program, which: &str, [inheritable, permitted, effective]: [u64; 3]) {
    let mut header = layout::CAP_VERSION.to_le_bytes().to_vec();
    header.resize(layout::CAP_HEADER, 0);
    let halves = [0, 32].map(|shift| [effective, permitted, inheritable].map(|set| (set >> shift) as u32));
    let data: Vec<u8> = halves.iter().flatten().flat_map(|half| half.to_le_bytes()).collect();
    let (header, data) = (p.data(&header), p.data(&data));
    p.call(format!("capset ({which})"), libc::SYS_capset, [header, data]);
}

/// Checks that a thread has these credentials now. (`setfsuid` does not tell whether it worked.)
///
/// # Errors
/// [`Error::Failed`] naming the first difference.
pub fn verify(tid: u32, want: &Credentials) -> Result<()> {
    let now = Proc::thread_by_tid(tid)?.status()?;
    let differs = |what: &str| Err(Error::Failed(format!("thread {tid}: {what} could not be given back")));
    if now.uid != want.uid {
        return differs("user ids");
    }
    if now.gid != want.gid || named(now.groups) != want.groups {
        return differs("group ids");
    }
    if now.caps != want.caps {
        return differs("capabilities");
    }
    Ok(())
}
