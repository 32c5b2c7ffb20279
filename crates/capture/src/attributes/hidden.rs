//! What the kernel shows to nobody, and a restore could give to nobody: keyrings of a process or thread, which it can be asked for, and
//! Landlock domains, which show in what it may not do.
//!
//! Who is in a domain may not look at a process that is not (`kcmp(2)`), for whatever reason it might otherwise. So it is asked to look at us,
//! where it has the right to. Where its seccomp filters forbid such questions they are not asked.

use crate::Builder;
use std::sync::OnceLock;
use stillpoint_linux::features;
use stillpoint_linux::proc::{NamespaceKind, Proc, Status};
use stillpoint_linux::program::{Outcome, Program, Step};

const KEYCTL_GET_KEYRING_ID: u64 = 0;
const KEY_SPEC_THREAD_KEYRING: i32 = -1;
const KEY_SPEC_PROCESS_KEYRING: i32 = -2;
const KCMP_VM: u64 = 1;
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// What all threads of a process may be asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hidden {
    keyrings: bool,
    /// Our process id, as the program sees it, where each thread has the right to look at us.
    us: Option<u32>,
}

/// What a program asks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Questions {
    keyring: Option<Step>,
    look: Option<Step>,
}

/// Whether a process is in our pid namespace and in our user namespace, where rights mean what they do for us.
pub fn is_near(process: &Proc) -> bool {
    let spaces = |of: &Proc| of.namespaces_of(&[NamespaceKind::User, NamespaceKind::Pid]).ok();
    let own = || Proc::process(std::process::id()).ok().and_then(|own| spaces(&own));
    features::landlock() && own().zip(spaces(process)).is_some_and(|(ours, theirs)| ours == theirs)
}

impl Hidden {
    /// `threads`: what is told of each. `may_call`: whether all of them may make a call. `is_near`: [`is_near`].
    pub fn of<'a>(
        mut threads: impl Iterator<Item = &'a Status>,
        may_call: impl Fn(i64, [u64; 6]) -> bool,
        is_near: bool,
    ) -> Self {
        let us = std::process::id();
        let [nr, who, whom, kind, ..] = look(us);
        let may_look =
            is_near && may_call(nr as i64, [who, whom, kind, 0, 0, 0]) && threads.all(may_look_at_us);
        let of = |keyring: i32| [KEYCTL_GET_KEYRING_ID, keyring as u64, 0, 0, 0, 0];
        let keyrings = [KEY_SPEC_THREAD_KEYRING, KEY_SPEC_PROCESS_KEYRING];
        Hidden {
            keyrings: keyrings.into_iter().all(|keyring| may_call(libc::SYS_keyctl, of(keyring))),
            us: may_look.then_some(us),
        }
    }

    /// Adds what is asked of a thread.
    pub(super) fn ask_thread(self, p: &mut Program) -> Questions {
        let keyring = self.keyrings.then(|| ask_keyring(p, KEY_SPEC_THREAD_KEYRING));
        let look = self.us.map(|us| {
            let [nr, args @ ..] = look(us);
            p.attempt("kcmp", nr as i64, args.map(Into::into))
        });
        Questions { keyring, look }
    }

    /// Adds what is asked of a process.
    pub(super) fn ask_process(self, p: &mut Program) -> Questions {
        let keyring = self.keyrings.then(|| ask_keyring(p, KEY_SPEC_PROCESS_KEYRING));
        Questions { keyring, look: None }
    }
}

impl Questions {
    /// Refuses what cannot be given back. `what`: who was asked.
    pub(super) fn decode(self, outcome: &Outcome, builder: &mut Builder, what: impl Fn() -> String) {
        if self.keyring.is_some_and(|step| outcome.result(step) > 0) {
            let why =
                "it has a keyring of its own (keyctl), whose keys cannot be given back under their numbers";
            builder.refuse(what(), why, "");
        }
        if self.look.is_some_and(|step| outcome.result(step) == -i64::from(libc::EPERM)) {
            let why = "it is in a Landlock domain (landlock_restrict_self), whose rules nobody can read: restored, it could do \
                       what they forbid";
            builder.refuse(what(), why, "");
        }
    }
}

fn ask_keyring(p: &mut Program, keyring: i32) -> Step {
    let args = [KEYCTL_GET_KEYRING_ID.into(), (keyring as u64).into(), 0.into()];
    p.attempt("keyctl KEYCTL_GET_KEYRING_ID", libc::SYS_keyctl, args)
}

/// The call by which somebody looks at a process, and its arguments.
fn look(pid: u32) -> [u64; 4] {
    [libc::SYS_kcmp as u64, pid.into(), pid.into(), KCMP_VM]
}

/// Whether a thread has the right to look at us (`ptrace(2)`, `PTRACE_MODE_READ_REALCREDS`), as far as its own rights tell.
fn may_look_at_us(thread: &Status) -> bool {
    static OURS: OnceLock<Option<Status>> = OnceLock::new();
    let ours = OURS.get_or_init(|| Proc::process(std::process::id()).and_then(|own| own.status()).ok());
    let [_, permitted, effective, ..] = thread.caps;
    if effective & CAP_SYS_PTRACE != 0 {
        return true;
    }
    let same = |ours: &[u32; 4], theirs: &[u32; 4]| ours[..3].iter().all(|id| *id == theirs[0]);
    ours.as_ref().is_some_and(|ours| {
        same(&ours.uid, &thread.uid) && same(&ours.gid, &thread.gid) && ours.caps[1] & !permitted == 0
    }) && rustix::process::dumpable_behavior()
        .is_ok_and(|how| how == rustix::process::DumpableBehavior::Dumpable)
}
