//! User namespaces of the program's own: who is in which, what belongs to which, and what ids are called there.
//!
//! A process has all privileges that its own user namespace gives, over what belongs to that and to those that lie in it, and over nothing
//! else. So whoever is made again can be put into its user namespace only when nothing has to be done any more that takes others
//! ([`standing_against`]).

use crate::pids::{Pids, namespace_of};
use crate::{Credentials, IdRange, Image, Namespace, Process, Users};

impl Users {
    /// What a user is called in it.
    pub fn uid(&self, outside: u32) -> Option<u32> {
        called(&self.uids, outside)
    }

    /// What a group is called in it.
    pub fn gid(&self, outside: u32) -> Option<u32> {
        called(&self.gids, outside)
    }

    /// Whether whoever is in it can go from these ids to those.
    fn leads(&self, from: &Credentials, to: &Credentials) -> bool {
        let has_uids = to.uid.iter().all(|id| self.uid(*id).is_some());
        let has_gids = to.gid.iter().all(|id| self.gid(*id).is_some());
        let has_groups = !self.keeps_groups && to.groups.iter().all(|id| self.gid(*id).is_some());
        (from.uid == to.uid || has_uids)
            && (from.gid == to.gid || has_gids)
            && (from.groups == to.groups || has_groups)
    }
}

/// What an id is called in a user namespace with these names.
pub fn called(ranges: &[IdRange], outside: u32) -> Option<u32> {
    let of = |range: &IdRange| {
        let at = outside.checked_sub(range.outside).filter(|at| *at < range.count)?;
        range.inside.checked_add(at)
    };
    ranges.iter().find_map(of)
}

/// A user namespace by its row.
pub fn users(image: &Image, row: Option<u32>) -> Option<&Users> {
    match image.namespaces.get(row? as usize) {
        Some(Namespace::User(users)) => Some(users),
        _ => None,
    }
}

/// The user namespace of the program's own that a process is in.
pub fn users_of(image: &Image, process: &Process) -> Option<u32> {
    process.namespaces.iter().copied().find(|row| users(image, Some(*row)).is_some())
}

/// The user namespace whose privileges count in one; that around it, of one of users.
pub fn owner(image: &Image, row: u32) -> Option<u32> {
    match users(image, Some(row)) {
        Some(users) => users.parent,
        None => image.owners.get(row as usize).copied().flatten(),
    }
}

/// Whether a user namespace is another one, or lies in it.
pub fn lies_in(image: &Image, mut inner: Option<u32>, outer: Option<u32>) -> bool {
    while inner != outer {
        // (Its parent is a row before it.)
        let parent = users(image, inner).map(|users| users.parent.filter(|parent| Some(*parent) < inner));
        let Some(parent) = parent else { return false };
        inner = parent;
    }
    true
}

/// The user namespace that those in a pid namespace are made in, as their process 1 is: that to which the pid namespace belongs.
pub fn born_in(image: &Image, pids: Option<u32>) -> Option<u32> {
    owner(image, pids?)
}

/// How many of the ids that somebody is to have, the innermost first, can be chosen by who is in this user namespace: those in pid
/// namespaces that belong to it, or lie in it.
pub fn chosen(image: &Image, pids: &Pids<'_>, namespace: Option<u32>, by: Option<u32>) -> usize {
    let (mut count, mut next) = (0, namespace);
    while let Some(row) = next {
        if !lies_in(image, owner(image, row), by) {
            return count;
        }
        count += 1;
        next = pids.parent(row);
    }
    if by.is_none() { count + 1 } else { count }
}

/// Namespaces that a process is in which do not belong to the user namespace that it is made in, or to one in it: it has to have them from
/// birth.
pub fn inherited(image: &Image, process: &Process) -> Vec<u32> {
    let born = born_in(image, namespace_of(image, process));
    let is_of_kind = |row: &u32| {
        !matches!(image.namespaces.get(*row as usize), Some(Namespace::User(_) | Namespace::Pid { .. }))
    };
    let rows = process.namespaces.iter().copied().filter(is_of_kind);
    let mut rows: Vec<u32> = rows.filter(|row| !lies_in(image, owner(image, *row), born)).collect();
    rows.sort_unstable();
    rows
}

/// Process 1 of a pid namespace.
pub fn first_in(image: &Image, pids: Option<u32>) -> Option<&Process> {
    let is_first = |p: &&Process| p.threads.first().is_some_and(|thread| thread.inner.last() == Some(&1));
    image.processes.iter().find(|p| namespace_of(image, p) == pids && is_first(p))
}

/// Why processes cannot be made again in their user namespaces: their rows, and the reasons.
pub fn standing_against(image: &Image) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    if !image.namespaces.iter().any(|n| matches!(n, Namespace::User(_))) {
        return found;
    }
    let pids = Pids::of(image);
    for (row, process) in image.processes.iter().enumerate() {
        found.extend(against(image, &pids, row, process).into_iter().map(|why| (row, why)));
    }
    found
}

fn against(image: &Image, pids: &Pids<'_>, row: usize, process: &Process) -> Option<&'static str> {
    let (own, namespace) = (users_of(image, process), namespace_of(image, process));
    let born = born_in(image, namespace);
    let main = process.threads.first()?;
    if let Some(namespace) = namespace {
        let around = pids.parent(namespace).map(|parent| owner(image, parent));
        if around.is_some_and(|around| !lies_in(image, born, around)) {
            return Some(
                "its pid namespace lies in one that belongs to a user namespace without privileges over it",
            );
        }
    }
    if !lies_in(image, own, born) {
        return Some("it is in a pid namespace that belongs to a user namespace in which it is not");
    }
    if row == 0 && born.is_some() {
        return Some(
            "it is process 1 of a pid namespace that belongs to a user namespace, and its parent is not part of the checkpoint",
        );
    }
    // Who is made has what his maker has.
    let parent = process.parent.and_then(|parent| image.processes.get(parent as usize));
    let from = parent.and_then(|parent| born_in(image, namespace_of(image, parent)));
    let is_first = main.inner.last() == Some(&1);
    if row > 0 && (from != born && !is_first || !lies_in(image, born, from)) {
        return Some(
            "it has entered a pid namespace that belongs to another user namespace than that of its parent",
        );
    }
    let levels = pids.depth(namespace) + 1;
    if chosen(image, pids, namespace, born) + 1 < levels {
        return Some(
            "more than one of its process ids is told in pid namespaces over which its user namespace has no privileges",
        );
    }
    if process.threads.len() > 1 && chosen(image, pids, namespace, own) + 1 < levels {
        return Some(
            "more than one id of its threads is told in pid namespaces over which its user namespace has no privileges",
        );
    }
    if let Some(in_born) = users(image, born) {
        let first = first_in(image, namespace)?;
        if inherited(image, process) != inherited(image, first) {
            return Some(
                "it is in a namespace over which its user namespace has no privileges, and process 1 is not",
            );
        }
        let theirs = first.threads.first()?;
        if !in_born.leads(&theirs.creds, &main.creds) {
            return Some(
                "its user or groups have no names in the user namespace that its pid namespace belongs to",
            );
        }
    }
    let inside = users(image, own)?;
    if process.threads.iter().any(|thread| !inside.leads(&main.creds, &thread.creds)) {
        return Some(
            "its threads have other users or groups than its main thread, without names in its user namespace",
        );
    }
    let shares = process.shares_fs.is_some()
        || image.processes.iter().any(|other| other.shares_fs == Some(row as u32))
        || process.threads.iter().any(|thread| thread.directories.is_some());
    if shares {
        return Some(
            "it is in a user namespace of the program's own, and shares its current directory with another process, or threads of it have their own",
        );
    }
    let of_thread = process.ended().iter().any(|e| e.parent_thread.is_some())
        || image.processes.iter().any(|p| p.parent == Some(row as u32) && p.parent_thread.is_some());
    if of_thread {
        return Some("it is in a user namespace of the program's own, and has children of a thread");
    }
    if process.children_in.is_some_and(|row| !lies_in(image, owner(image, row), own)) {
        return Some(
            "its children are to be in a pid namespace over which its user namespace has no privileges",
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Thread;

    fn image() -> Image {
        let range = |inside, outside, count| IdRange { inside, outside, count };
        let users = |parent, uids: Vec<IdRange>| {
            Namespace::User(Users { parent, gids: uids.clone(), uids, ..Users::default() })
        };
        let namespaces = vec![
            users(None, vec![range(0, 1000, 1), range(1, 100_000, 10)]),
            users(Some(0), vec![range(7, 100_002, 2)]),
            Namespace::Pid { parent: None },
            Namespace::Pid { parent: Some(2) },
            Namespace::Cgroup,
        ];
        Image { namespaces, owners: vec![None, None, Some(0), Some(1)], ..Image::default() }
    }

    fn process(namespaces: &[u32], inner: &[u32], uid: u32) -> Process {
        let creds = Credentials { uid: [uid; 4], gid: [uid; 4], ..Credentials::default() };
        let thread = Thread { creds, inner: inner.to_vec(), ..Thread::default() };
        Process { namespaces: namespaces.to_vec(), threads: vec![thread], ..Process::default() }
    }

    #[test]
    fn ids_have_names_in_namespaces() {
        let image = image();
        let (outer, inner) = (users(&image, Some(0)).expect("one"), users(&image, Some(1)).expect("one"));
        assert_eq!((outer.uid(1000), outer.uid(100_009), outer.uid(100_010)), (Some(0), Some(10), None));
        assert_eq!((inner.gid(100_003), inner.gid(1000)), (Some(8), None));
        assert!(lies_in(&image, Some(1), Some(0)) && lies_in(&image, Some(1), None));
        assert!(!lies_in(&image, Some(0), Some(1)) && !lies_in(&image, None, Some(0)));
        assert_eq!((owner(&image, 1), owner(&image, 3), owner(&image, 4)), (Some(0), Some(1), None));
    }

    #[test]
    fn ids_are_chosen_where_there_are_privileges() {
        let image = image();
        let pids = Pids::of(&image);
        assert_eq!(chosen(&image, &pids, Some(3), None), 3);
        assert_eq!(chosen(&image, &pids, Some(3), Some(0)), 2);
        assert_eq!(chosen(&image, &pids, Some(3), Some(1)), 1);
        assert_eq!(chosen(&image, &pids, None, Some(0)), 0);
    }

    #[test]
    fn what_cannot_be_made_again_is_told() {
        let told = |processes: Vec<Process>| {
            let all = standing_against(&Image { processes, ..image() });
            all.into_iter().map(|(row, _)| row).collect::<Vec<_>>()
        };
        let root = || process(&[0], &[], 1000);
        assert_eq!(told(vec![root(), process(&[0, 2], &[1], 1000)]), []);
        // One that nobody in the namespace can become.
        assert_eq!(told(vec![root(), process(&[0, 2], &[1], 1000), process(&[0, 2], &[2], 5)]), [2]);
        // One that has not entered the user namespace around it.
        assert_eq!(told(vec![root(), process(&[0, 2], &[1], 1000), process(&[2], &[2], 1000)]), [2]);
        // The namespaces of process 1 are those that the others begin in.
        let apart = process(&[0, 2, 4], &[2], 1000);
        assert_eq!(told(vec![root(), process(&[0, 2], &[1], 1000), apart]), [2]);
        // Two ids that nobody in it can choose.
        assert_eq!(told(vec![root(), process(&[0, 2], &[1], 1000), process(&[1, 3], &[2, 1], 1000)]), [2]);
        assert_eq!(told(vec![process(&[0, 2], &[1], 1000)]), [0]);
    }
}
