//! Which objects are standard streams from outside: the terminal, or the pipes and sockets the job was started with.
//!
//! Such an object is recognised by a descriptor 0, 1 or 2 that refers to it, or because it is known that the job was started with it;
//! all descriptors of the same object follow. After a restore they lead to the streams of whoever restores that have these numbers.

use super::descriptions::{Description, Held};
use super::{Scan, behind, pipes, terminals};
use crate::Result;
use rustix::fs::FileType;
use std::collections::{BTreeSet, HashMap, HashSet};
use stillpoint_image::{Bytes, Pipe};

/// An object outside that carries standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Object {
    /// A terminal, by its devpts if it is in one, and device number: it may be open through several names.
    Terminal(u64, u64),
    /// A pipe, FIFO or socket, by device and inode number.
    Inode(u64, u64),
}

fn object(d: &Description) -> Option<Object> {
    if d.is_path_handle() {
        return None;
    }
    match FileType::from_raw_mode(d.stat.st_mode) {
        // One that was hung up comes from nowhere.
        FileType::CharacterDevice if terminals::is_terminal(d) && !terminals::is_hung_up(d) => {
            Some(Object::Terminal(terminals::system(d), d.stat.st_rdev))
        }
        FileType::Fifo | FileType::Socket => Some(Object::Inode(d.stat.st_dev, d.stat.st_ino)),
        _ => None,
    }
}

/// The streams from outside that the program was started with.
#[derive(Debug, Default)]
pub struct Standard {
    objects: HashMap<Object, Numbers>,
}

/// The numbers of such a stream.
#[derive(Debug)]
struct Numbers {
    /// Which it had then, as far as that is known or looks so.
    all: BTreeSet<u32>,
    /// Those of them that the root does not have at their places any more: it has put them aside.
    aside: BTreeSet<u32>,
}

impl Standard {
    /// Finds them, and captures the unread input.
    ///
    /// What the job was started with is that whatever number it has now: a shell moves its standard output aside while it redirects
    /// what a loop writes. Of others nothing is known; what the root has as 0, 1 or 2 is a standard stream, and what it does not have
    /// at all, if another process has it so.
    pub fn find(scan: &mut Scan<'_>) -> Result<Self> {
        let mut standard = Standard::default();
        let mut taken = HashSet::new();
        for known in [true, false] {
            for d in scan.all {
                let Some(object) = object(d).filter(|object| !standard.objects.contains_key(object)) else {
                    continue;
                };
                let mut all = match known {
                    true => started_with(scan, d),
                    false => looks_like(scan, object),
                };
                // Two of one number have nothing in common but that.
                if matches!(object, Object::Inode(..)) {
                    all.retain(|number| !taken.contains(number));
                }
                if all.is_empty() || !is_outside(scan, d)? {
                    continue;
                }
                if matches!(object, Object::Inode(..)) {
                    taken.extend(all.iter().copied());
                }
                let is_there = |number: u32| {
                    let mut same = scan.all.iter().filter(|d| self::object(d) == Some(object));
                    same.any(|d| d.held.iter().any(|held| held.process == 0 && held.fd == number))
                };
                let aside = all.iter().copied().filter(|number| !is_there(*number)).collect();
                standard.objects.insert(object, Numbers { all, aside });
            }
        }
        let mut captured = HashSet::new();
        for d in scan.all.iter().filter(|d| d.can_read()) {
            let Some(object) = object(d) else { continue };
            // What leads there as 1 or 2 is written to, where it can be.
            let number = standard.number(d).filter(|number| !(d.can_write() && matches!(number, 1 | 2)));
            if let Some(number) = number.filter(|_| captured.insert(object)) {
                capture_input(scan, d, number)?;
            }
        }
        Ok(standard)
    }

    /// The stream that a description is, if it is one: that of the number it has, else one of the same object that fits its access
    /// mode.
    pub fn number(&self, d: &Description) -> Option<u32> {
        let Numbers { all, .. } = self.objects.get(&object(d)?)?;
        if let Some(fd) = d.numbers().find(|fd| all.contains(fd) && leads_alone(d, *fd)) {
            return Some(fd);
        }
        let order = if d.can_read() { [0, 1, 2] } else { [1, 2, 0] };
        order.into_iter().find(|n| all.contains(n)).or(all.first().copied())
    }

    /// The stream that a descriptor is, whose description is one: a terminal is open for both under all of its numbers, and what leads
    /// there as 1 or 2 is written to.
    pub fn number_of(&self, d: &Description, fd: u32) -> Option<u32> {
        let Numbers { all, aside } = self.objects.get(&object(d)?)?;
        if all.contains(&fd) && leads_alone(d, fd) {
            return Some(fd);
        }
        let order = match fd {
            1 => [1, 2, 0],
            2 => [2, 1, 0],
            _ if d.can_read() => [0, 1, 2],
            _ => [1, 2, 0],
        };
        let candidates = if fd <= 2 { all } else { aside };
        order.into_iter().find(|n| candidates.contains(n)).or_else(|| self.number(d))
    }

    /// Records the settings of the terminal, if the standard streams are on one.
    pub fn capture_terminal(&self, scan: &mut Scan<'_>) -> Result<()> {
        let on_terminal = |d: &&Description| matches!(object(d), Some(o @ Object::Terminal(..)) if self.objects.contains_key(&o));
        if let Some(d) = scan.all.iter().find(on_terminal) {
            scan.builder.image.terminal = Some(terminals::settings(&d.file)?);
        }
        Ok(())
    }
}

/// Whether a number that the program was started with may lead elsewhere than others of the same object: what is read under several
/// numbers comes from one place, in turn.
fn leads_alone(d: &Description, fd: u32) -> bool {
    fd <= 2 || !d.can_read()
}

/// The numbers under which the root was started with what this is, as far as that is known.
fn started_with(scan: &Scan<'_>, d: &Description) -> BTreeSet<u32> {
    // A FIFO may have been opened by its name: then it is opened so again.
    let is_fifo = d.link.starts_with(b"/") && FileType::from_raw_mode(d.stat.st_mode) == FileType::Fifo;
    let is_held = |fd: u32| d.held.iter().any(|h| h.process == 0 && h.fd == fd);
    let named =
        scan.target.inherited.iter().filter(|(fd, name)| *name == d.link && (!is_fifo || is_held(*fd)));
    named.map(|(fd, _)| *fd).collect()
}

/// The numbers among 0, 1 and 2 that the root has an object under, or others, if that has it under none.
fn looks_like(scan: &Scan<'_>, of: Object) -> BTreeSet<u32> {
    let same = scan.all.iter().filter(|d| object(d) == Some(of)).flat_map(|d| &d.held);
    let (of_root, of_others): (Vec<&Held>, Vec<&Held>) = same.partition(|held| held.process == 0);
    // A terminal is always the one that they all are on.
    let held = match of {
        Object::Terminal(..) => [of_root, of_others].concat(),
        Object::Inode(..) if of_root.is_empty() => of_others,
        Object::Inode(..) => of_root,
    };
    held.into_iter().map(|held| held.fd).filter(|fd| *fd <= 2).collect()
}

/// Whether the other end is outside the target.
fn is_outside(scan: &mut Scan<'_>, d: &Description) -> Result<bool> {
    match FileType::from_raw_mode(d.stat.st_mode) {
        FileType::CharacterDevice => Ok(!terminals::has_master(scan, d)),
        FileType::Fifo => pipes::is_stream_from_outside(scan, d),
        _ => super::sockets::is_stream_from_outside(scan, d),
    }
}

/// Unread input from a pipe, or a socket that is standard input, goes with the checkpoint; a restore feeds it first.
fn capture_input(scan: &mut Scan<'_>, d: &Description, number: u32) -> Result<()> {
    let unread = match FileType::from_raw_mode(d.stat.st_mode) {
        FileType::Fifo => behind::unread(scan, d, number)?,
        FileType::Socket if number == 0 => {
            let data = super::sockets::standard_input(scan, d)?.into_iter().map(Bytes).collect();
            vec![Pipe { data, stdio: Some(number), inode: Some(d.inode()), ..Pipe::default() }]
        }
        _ => return Ok(()),
    };
    let unread: Vec<Pipe> = unread.into_iter().filter(|pipe| !pipe.data.is_empty()).collect();
    if scan.builder.kills && !behind::can_be_held(&unread) {
        let why = "more than a pipe may hold waits to be read from it";
        scan.refuse::<()>(d, why, "try again when the program has read more")?;
        return Ok(());
    }
    scan.builder.image.pipes.extend(unread);
    Ok(())
}
