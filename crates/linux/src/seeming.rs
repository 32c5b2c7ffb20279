//! Doing something as another user, as far as others are told: who connects or listens is remembered by the kernel with the effective ids
//! and the groups of that moment (`SO_PEERCRED`, `SO_PEERGROUPS`, unix(7)).

use crate::{Error, Result};
use rustix::fs::{Gid, Uid};
use rustix::process::DumpableBehavior;
use rustix::thread;
use std::sync::{Mutex, PoisonError};

/// By which somebody is known to the other end of a unix socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups, ascending.
    pub groups: Vec<u32>,
}

impl Identity {
    /// Our own.
    ///
    /// # Errors
    /// That the groups cannot be read.
    pub fn own() -> Result<Self> {
        let groups = rustix::process::getgroups().map_err(|e| Error::call("getgroups", e))?;
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let mut groups: Vec<u32> = groups.into_iter().map(Gid::as_raw).collect();
        groups.sort_unstable();
        Ok(Identity { uid, gid, groups })
    }
}

/// Does something on a thread that seems to be somebody else, and is not there any more afterwards. It keeps our real and saved ids, so that
/// whose ids it has may send it no signal and not trace it; and our capabilities. Files that it makes are that user's.
///
/// The kernel takes from all of us that we may be looked at (`PR_SET_DUMPABLE`) where a thread's ids change; that is given back.
///
/// # Errors
/// `EPERM`: that needs `CAP_SETUID` and `CAP_SETGID`. `EINVAL`: there is no such user or group in our user namespace.
pub fn seeming_to_be<T: Send>(who: &Identity, work: impl FnOnce() -> T + Send) -> Result<T> {
    let own = Identity::own()?;
    if own == *who {
        return Ok(work());
    }
    // Two at a time would take each other's for how it was.
    static ONE: Mutex<()> = Mutex::new(());
    let _alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = rustix::process::dumpable_behavior().map_err(|e| Error::call("PR_GET_DUMPABLE", e))?;
    let act = || {
        become_somebody(&own, who)?;
        Ok(work())
    };
    let failed = |_| Err(Error::Other("what was done as somebody else failed inside stillpoint".into()));
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, act);
        thread
            .map_err(|e| Error::call("make a thread that seems to be somebody else", e))?
            .join()
            .unwrap_or_else(failed)
    });
    if before == DumpableBehavior::Dumpable {
        rustix::process::set_dumpable_behavior(before).map_err(|e| Error::call("PR_SET_DUMPABLE", e))?;
    }
    done
}

/// Gives the calling thread, and no other, the effective ids and groups of somebody.
fn become_somebody(own: &Identity, who: &Identity) -> Result<()> {
    let failed = |what: &'static str| move |e: rustix::io::Errno| Error::call(what, e);
    // All bits set stand for no change.
    if who.uid == u32::MAX || who.gid == u32::MAX || who.groups.contains(&u32::MAX) {
        return Err(Error::call(
            "be a user without a number",
            std::io::Error::from_raw_os_error(libc::EINVAL),
        ));
    }
    let before = thread::capabilities(None).map_err(failed("capget"))?;
    if own.groups != who.groups {
        let groups: Vec<Gid> = who.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
        thread::set_thread_groups(&groups).map_err(failed("setgroups"))?;
    }
    if own.gid != who.gid {
        thread::set_thread_res_gid(None, Gid::from_raw(who.gid), None).map_err(failed("setresgid"))?;
    }
    if own.uid != who.uid {
        thread::set_thread_res_uid(None, Uid::from_raw(who.uid), None).map_err(failed("setresuid"))?;
        // Who ceases to be root loses the effective ones, and may take them up again while root is among the other ids.
        thread::set_capabilities(None, before).map_err(failed("capset"))?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sockets::{pair, peer_identity};

    fn told_of(who: &Identity) -> Option<Identity> {
        let (one, _other) = seeming_to_be(who, || pair(libc::SOCK_STREAM)).ok()?.unwrap();
        peer_identity(one).unwrap()
    }

    #[test]
    fn the_other_end_is_told_of_somebody_else() {
        let own = Identity::own().unwrap();
        assert_eq!(told_of(&own).as_ref(), Some(&own));
        if own.uid != 0 {
            return; // not root
        }
        let many = Identity { uid: 1001, gid: 1002, groups: (5000..5300).collect() };
        let group = Identity { gid: 7, ..own.clone() };
        for who in [many, group, Identity { uid: 1001, ..own.clone() }] {
            assert_eq!(told_of(&who).as_ref(), Some(&who));
            assert_eq!(Identity::own().unwrap(), own);
            assert_eq!(rustix::process::dumpable_behavior().unwrap(), DumpableBehavior::Dumpable);
        }
    }

    #[test]
    fn it_keeps_our_capabilities_and_may_be_sent_no_signal() {
        let nobody = Identity { uid: 65534, gid: 65534, groups: Vec::new() };
        let before = thread::capabilities(None).unwrap();
        let seen = seeming_to_be(&nobody, || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let ids = status.lines().find(|line| line.starts_with("Uid:")).unwrap().to_owned();
            (thread::capabilities(None).unwrap(), ids)
        });
        let Ok((capabilities, ids)) = seen else { return }; // not root
        assert_eq!(capabilities, before);
        assert_eq!(ids, "Uid:\t0\t65534\t0\t65534");
    }

    #[test]
    fn nobody_can_be_a_user_without_a_number() {
        for who in [
            Identity { uid: u32::MAX, ..Default::default() },
            Identity { groups: vec![u32::MAX], ..Default::default() },
        ] {
            assert!(seeming_to_be(&who, || ()).is_err());
        }
    }

    #[test]
    fn sockets_that_were_never_connected_tell_of_nobody() {
        let alone = crate::sockets::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
        assert_eq!(peer_identity(&alone).unwrap(), None);
    }
}
