//! User namespaces: which there are, what belongs to them, and what ids are called in them.
//!
//! One that nobody is in counts as well, where something that is in use belongs to it, or another one lies in it: there is no other way to
//! those than through it.

use super::{HINT, Namespaces, Own, Owner, around, name};
use crate::attributes::target::named;
use crate::{Builder, Error, Result};
use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use stillpoint_image::{self as image, IdRange, Users, users};
use stillpoint_linux::messenger::{self, Messenger};
use stillpoint_linux::namespaces;
use stillpoint_linux::proc::{Namespace, NamespaceKind, Proc};
use stillpoint_linux::program::Program;

/// The user namespace of the program's own that a namespace belongs to, by its inode number.
pub(super) fn owner(
    builder: &mut Builder,
    found: &mut Namespaces,
    file: &OwnedFd,
    space: Namespace,
) -> Result<Option<Owner>> {
    let home = namespaces::open("/proc/self", NamespaceKind::User)?.1;
    let Some((file, id)) = namespaces::owner_of(file)? else {
        let why = "it belongs to a user namespace in which stillpoint is not";
        builder.refuse(name(space.kind), why, HINT);
        return Ok(None);
    };
    let owner = Namespace { kind: NamespaceKind::User, id };
    if id == home.id || builder.home.private.contains(&owner) {
        return Ok(None);
    }
    if !found.has(&owner) {
        let around = lying_in(builder, found, &file, owner)?;
        found.own.push(Own::new(owner, file, around, None));
    }
    Ok(found.users_of(id).map(|own| (id, own.file.clone())))
}

/// A user namespace and those that it lies in, by their inode numbers. Those are noted, too.
pub(super) fn lying_in(
    builder: &mut Builder,
    found: &mut Namespaces,
    file: &OwnedFd,
    space: Namespace,
) -> Result<Vec<u64>> {
    let all = around(builder, file, space)?;
    let mut next = namespaces::parent(file)?;
    for (place, &id) in all.iter().enumerate().skip(1) {
        let Some((file, _)) = next else { break };
        let outer = Namespace { kind: NamespaceKind::User, id };
        next = namespaces::parent(&file)?;
        if !found.has(&outer) {
            found.own.push(Own::new(outer, file, all[place..].to_vec(), None));
        }
    }
    Ok(all)
}

/// Those that have to be there.
pub(super) fn held(found: &Namespaces) -> HashSet<u64> {
    let in_use = || found.own.iter().filter(|own| !own.pids.is_empty());
    let mut held: HashSet<u64> = in_use().filter_map(|own| own.owner.as_ref()).map(|(id, _)| *id).collect();
    held.extend(in_use().filter(|own| own.space.kind == NamespaceKind::User).map(|own| own.space.id));
    let around = |id: &u64| found.users_of(*id).map_or(Vec::new(), |own| own.around.clone());
    let all: Vec<u64> = held.iter().flat_map(around).collect();
    held.extend(all);
    held
}

/// Describes one.
pub(super) fn describe(builder: &mut Builder, found: &mut Namespaces, at: usize) -> Result<()> {
    let parent = found.own[at].around.get(1).and_then(|id| found.users_of(*id)?.row);
    let own = &mut found.own[at];
    let names = match (own.pids.first(), &own.names) {
        (Some(pid), _) => names_at(*pid)?,
        // Nobody is in it who could be given names.
        (None, Some(names)) => names.clone(),
        (None, None) => {
            let mut program = Program::new();
            messenger::enter(&mut program, NamespaceKind::User, &own.file);
            names_at(Messenger::send(&program)?.pid())?
        }
    };
    own.names = Some(names.clone());
    own.row = Some(builder.image.namespaces.len() as u32);
    let users = Users { parent, owner: namespaces::owner_uid(own.file.as_fd())?, ..names };
    builder.image.namespaces.push(image::Namespace::User(users));
    Ok(())
}

/// What ids are called in the user namespace of a process.
fn names_at(pid: u32) -> Result<Users> {
    let process = Proc::process(pid)?;
    let read = |file: &str| {
        let text = process.read_optional(file)?.unwrap_or_default();
        let ranges = String::from_utf8_lossy(&text).lines().map(range).collect::<Option<Vec<_>>>();
        ranges.ok_or_else(|| Error::Failed(format!("/proc/{pid}/{file} cannot be understood")))
    };
    let keeps_groups = process.read_optional("setgroups")?.is_some_and(|text| text.starts_with(b"deny"));
    Ok(Users { uids: read("uid_map")?, gids: read("gid_map")?, keeps_groups, ..Users::default() })
}

/// `         0       1000          1`
fn range(line: &str) -> Option<IdRange> {
    let mut numbers = line.split_whitespace().map(|word| word.parse::<u32>().ok());
    let mut next = || numbers.next().flatten();
    let range = IdRange { inside: next()?, outside: next()?, count: next()? };
    // Those have no name outside.
    (range.outside != u32::MAX).then_some(range)
}

/// Refuses processes that could not be put into theirs.
pub(crate) fn check(builder: &mut Builder, pids: &[u32]) {
    for (row, why) in users::standing_against(&builder.image) {
        let process = pids.get(row).map_or_else(|| "a process".into(), |pid| named(*pid));
        builder.refuse(process, why, "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read() {
        let told = range("         0       1000          1");
        assert_eq!(told, Some(IdRange { inside: 0, outside: 1000, count: 1 }));
        assert_eq!(range("0 4294967295 1"), None);
        assert_eq!(range("0 1000"), None);
    }
}
