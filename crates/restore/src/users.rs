//! User namespaces of the program's own, and who goes into them when.
//!
//! | when | what |
//! | --- | --- |
//! | before there is a process | [`make`]: the namespaces, by processes of ours that are there for a moment, the outer ones first |
//! | as each process is made | [`begin`]: whoever is process 1 of a pid namespace that belongs to one is made in that, as all his descendants are; all others are made with all our privileges |
//! | when a process stands, and has but one thread | [`enter`]: it takes its users and groups on, as they are called outside, and goes into its own |
//!
//! Whoever is in one has a new set of all capabilities, which he can only lose.

use crate::attributes::credentials;
use crate::{Error, Result};
use std::os::fd::OwnedFd;
use stillpoint_image::users::{called, users};
use stillpoint_image::{Credentials, IdRange, Image, Users};
use stillpoint_linux::messenger::{self, Messenger};
use stillpoint_linux::namespaces;
use stillpoint_linux::proc::NamespaceKind;
use stillpoint_linux::program::Program;

/// Makes a user namespace; `parent`: the one around it, if that is the program's own.
pub(crate) fn make(image: &Image, of: &Users, parent: Option<&OwnedFd>) -> Result<OwnedFd> {
    let around = users(image, of.parent);
    let mut first = Program::new();
    // Whoever makes one must have a name around it, and so must his group.
    let group = around.map_or(0, |around| around.gids.first().map_or(0, |range| range.outside));
    messenger::become_user(&mut first, of.owner.into(), group.into());
    if let Some(parent) = parent {
        messenger::enter(&mut first, NamespaceKind::User, parent);
    }
    messenger::begin(&mut first, NamespaceKind::User);
    let inhabitant = Messenger::send(&first)?;
    let folder = format!("/proc/{}", inhabitant.pid());
    let (file, _) = namespaces::open(&folder, NamespaceKind::User)?;
    let mut names = Program::new();
    if let Some(parent) = parent {
        messenger::enter(&mut names, NamespaceKind::User, parent);
    }
    if of.keeps_groups && !around.is_some_and(|around| around.keeps_groups) {
        messenger::write(&mut names, &format!("{folder}/setgroups"), b"deny");
    }
    for (ranges, outer, name) in [
        (&of.uids, around.map(|around| &around.uids), "uid_map"),
        (&of.gids, around.map(|around| &around.gids), "gid_map"),
    ] {
        if !ranges.is_empty() {
            let map = map(ranges, outer)?;
            messenger::write(&mut names, &format!("{folder}/{name}"), map.as_bytes());
        }
    }
    if !names.is_empty() {
        Messenger::send(&names)?;
    }
    Ok(file)
}

/// What is to be written to give ids their names, those around it as they are called there.
fn map(ranges: &[IdRange], around: Option<&Vec<IdRange>>) -> Result<String> {
    let mut text = String::new();
    for range in ranges {
        let outer = match around {
            Some(around) => called(around, range.outside),
            None => Some(range.outside),
        };
        let outer = outer.ok_or_else(|| {
            Error::Failed(format!(
                "id {} has no name in the user namespace around that in which it has one",
                range.outside
            ))
        })?;
        text += &format!("{} {outer} {}\n", range.inside, range.count);
    }
    Ok(text)
}

/// Adds the calls by which somebody with all our privileges takes on the users and groups of a process, and keeps those privileges.
pub(crate) fn take_on(program: &mut Program, now: &Credentials, want: &Credentials) {
    messenger::keep_capabilities(program);
    credentials::ids(program, now, want);
}

/// Adds the calls by which whoever has the privileges for it goes into a user namespace.
pub(crate) fn enter(program: &mut Program, file: &OwnedFd) {
    messenger::enter(program, NamespaceKind::User, file);
    // Until the end it is to find itself in /proc.
    let dumpable = [u64::from(linux_raw_sys::prctl::PR_SET_DUMPABLE).into(), 1.into()];
    program.call("prctl PR_SET_DUMPABLE", libc::SYS_prctl, dumpable);
}

/// Credentials as they are called within a user namespace; what has no name there is left as it is in `now`.
pub(crate) fn inside(
    of: &Users,
    now: &Credentials,
    want: &Credentials,
) -> Result<(Credentials, Credentials)> {
    let nameless = || Error::Failed("a user or group has no name in its user namespace".into());
    // What does not change need not have one.
    let four = |from: [u32; 4], to: [u32; 4], name: &dyn Fn(u32) -> Option<u32>| -> Result<_> {
        if from == to {
            return Ok(([0; 4], [0; 4]));
        }
        let all: Option<Vec<u32>> = to.iter().map(|id| name(*id)).collect();
        let all: [u32; 4] = all.and_then(|all| all.try_into().ok()).ok_or_else(nameless)?;
        Ok(([u32::MAX; 4], all))
    };
    let (uid_now, uid) = four(now.uid, want.uid, &|id| of.uid(id))?;
    let (gid_now, gid) = four(now.gid, want.gid, &|id| of.gid(id))?;
    let groups = if now.groups == want.groups {
        now.groups.clone()
    } else {
        want.groups.iter().map(|id| of.gid(*id)).collect::<Option<Vec<u32>>>().ok_or_else(nameless)?
    };
    let groups_now = if now.groups == want.groups { groups.clone() } else { vec![u32::MAX] };
    Ok((
        Credentials { uid: uid_now, gid: gid_now, groups: groups_now, ..now.clone() },
        Credentials { uid, gid, groups, ..want.clone() },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_as_they_are_called_around() {
        let range = |inside, outside, count| IdRange { inside, outside, count };
        let around = vec![range(0, 1000, 1), range(1, 100_000, 10)];
        let told = map(&[range(5, 100_002, 3)], Some(&around));
        assert_eq!(told.ok().as_deref(), Some("5 3 3\n"));
        assert_eq!(map(&[range(5, 100_002, 3)], None).ok().as_deref(), Some("5 100002 3\n"));
        assert!(map(&[range(5, 7, 1)], Some(&around)).is_err());
    }

    #[test]
    fn what_stays_needs_no_name() {
        let of = Users { uids: vec![IdRange { inside: 0, outside: 1000, count: 1 }], ..Users::default() };
        let nobody = Credentials { uid: [7; 4], gid: [7; 4], groups: vec![3], ..Credentials::default() };
        let somebody = Credentials { uid: [1000; 4], ..nobody.clone() };
        let (now, want) = inside(&of, &nobody, &somebody).expect("it has a name");
        assert_eq!((want.uid, want.gid == now.gid, want.groups == now.groups), ([0; 4], true, true));
        assert!(now.uid != want.uid);
        assert!(inside(&of, &somebody, &nobody).is_err());
    }
}
