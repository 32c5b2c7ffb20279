//! Process ids in pid namespaces of the program's own: a process has one there, and one in each namespace around it.
//!
//! All ids of an image are those of the pid namespace that its root was made in ("outside" here). Inside of another one a process is
//! told of those only that are in it, too, by their ids there.

use crate::{Image, Namespace, Process};
use std::collections::HashMap;

/// Most pid namespaces that lie within each other (`MAX_PID_NS_LEVEL`).
pub const DEEPEST: usize = 32;

/// Who has which ids.
#[derive(Debug)]
pub struct Pids<'a> {
    image: &'a Image,
    /// The namespace of each process, thread, ended process and leader that is no more, and its ids within.
    known: HashMap<u32, (Option<u32>, &'a [u32])>,
    /// Whoever is made gets an id of the kernel's choice.
    are_new: bool,
}

impl<'a> Pids<'a> {
    /// Those of an image.
    pub fn of(image: &'a Image) -> Self {
        let mut known = HashMap::new();
        // Where there are none, all ids are the same everywhere.
        if image.namespaces.iter().any(|n| matches!(n, Namespace::Pid { .. })) {
            for process in &image.processes {
                let namespace = namespace_of(image, process);
                known.extend(process.threads.iter().map(|t| (t.tid, (namespace, t.inner.as_slice()))));
                known.extend(process.ended().iter().map(|e| (e.pid, (e.namespace, e.inner.as_slice()))));
            }
            known.extend(image.leaders.iter().map(|l| (l.pid, (Some(l.namespace), l.inner.as_slice()))));
        }
        Pids { image, known, are_new: false }
    }

    /// Those of an image whose processes and threads are to get whatever ids the kernel gives them.
    pub fn anew(image: &'a Image) -> Self {
        Pids { are_new: true, ..Self::of(image) }
    }

    /// Whether whoever is made gets an id of the kernel's choice.
    pub fn are_new(&self) -> bool {
        self.are_new
    }

    /// Whether no process is in such a namespace.
    pub fn are_plain(&self) -> bool {
        self.known.is_empty()
    }

    /// Whether some lie as deep as the kernel lets them: there is no room for one around them.
    pub fn are_deepest(&self) -> bool {
        self.known.values().any(|(_, inner)| inner.len() >= DEEPEST)
    }

    /// The namespace that one was made in.
    pub fn parent(&self, namespace: u32) -> Option<u32> {
        match self.image.namespaces.get(namespace as usize) {
            // (That is a row before it.)
            Some(Namespace::Pid { parent }) => parent.filter(|parent| *parent < namespace),
            _ => None,
        }
    }

    /// How many namespaces of the program's own there are around those in it, with itself.
    pub fn depth(&self, mut namespace: Option<u32>) -> usize {
        let mut depth = 0;
        while let Some(row) = namespace {
            depth += 1;
            namespace = self.parent(row);
        }
        depth
    }

    /// Whether a namespace is another one, or lies in it.
    pub fn lies_in(&self, mut namespace: Option<u32>, outer: Option<u32>) -> bool {
        while namespace != outer {
            let Some(row) = namespace else { return false };
            namespace = self.parent(row);
        }
        true
    }

    /// The namespace of whoever has (or had) this id; outside if nothing else is known of him.
    pub fn namespace(&self, id: u32) -> Option<u32> {
        self.known.get(&id).and_then(|(namespace, _)| *namespace)
    }

    /// What an id is called within a namespace, if it has a name there.
    pub fn seen_from(&self, namespace: Option<u32>, id: u32) -> Option<u32> {
        let Some(_) = namespace else { return Some(id) };
        let &(theirs, inner) = self.known.get(&id)?;
        let level = self.depth(namespace).checked_sub(1)?;
        inner.get(level).copied().filter(|_| self.lies_in(theirs, namespace))
    }

    /// All ids that whoever has this one is to be made with, in his own namespace first and outside last; none where that is left to
    /// the kernel.
    pub fn all(&self, id: u32) -> Vec<u32> {
        if self.are_new {
            return Vec::new();
        }
        let inner = self.known.get(&id).map_or(&[][..], |(_, inner)| inner);
        inner.iter().rev().copied().chain([id]).collect()
    }

    /// Process 1 of a namespace.
    pub fn first_of(&self, namespace: u32) -> Option<u32> {
        let is_first = |(_, (theirs, inner)): &(&u32, &(Option<u32>, &[u32]))| {
            *theirs == Some(namespace) && inner.last() == Some(&1)
        };
        self.known.iter().find(is_first).map(|(id, _)| *id)
    }

    /// Whether it is process 1 of its namespace.
    pub fn is_first(&self, id: u32) -> bool {
        self.known.get(&id).is_some_and(|(_, inner)| inner.last() == Some(&1))
    }
}

/// The pid namespace of the program's own that a process is in.
pub fn namespace_of(image: &Image, process: &Process) -> Option<u32> {
    let is_one = |row: &&u32| matches!(image.namespaces.get(**row as usize), Some(Namespace::Pid { .. }));
    process.namespaces.iter().find(is_one).copied()
}
