//! Which objects are standard streams from outside: the terminal, or the pipes and sockets the job was started with.
//!
//! Such an object is recognised by a descriptor 0, 1 or 2 that refers to it; all other descriptors of the same object
//! follow. After a restore they lead to the standard streams of whoever restores.

use super::descriptions::Description;
use super::{Scan, pipes, terminals};
use crate::Result;
use rustix::fs::FileType;
use std::collections::HashMap;
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

/// The standard streams from outside.
#[derive(Debug, Default)]
pub struct Standard {
    /// Which of the numbers 0 to 2 each object carries.
    objects: HashMap<Object, [bool; 3]>,
    /// Other streams that the program was started with, by the number it got them under.
    inherited: HashMap<Object, u32>,
}

impl Standard {
    /// Finds them, and captures the unread input.
    pub fn find(scan: &mut Scan<'_>) -> Result<Self> {
        let mut standard = Standard::default();
        for d in scan.all {
            for fd in d.numbers().filter(|fd| *fd <= 2) {
                if let Some(object) = object(d)
                    && is_outside(scan, d)?
                {
                    let carried = &mut standard.objects.entry(object).or_default()[fd as usize];
                    if !std::mem::replace(carried, true) && fd == 0 {
                        capture_input(scan, d)?;
                    }
                }
            }
        }
        for d in scan.all {
            let Some((fd, _)) = scan.target.inherited.iter().find(|(fd, name)| is_still(d, *fd, name)) else {
                continue;
            };
            if let Some(object) = object(d)
                && is_outside(scan, d)?
            {
                standard.inherited.entry(object).or_insert(*fd);
            }
        }
        Ok(standard)
    }

    /// The standard stream that a description follows, if it is one: its own number if it has one, else a number of
    /// the same object that fits its access mode.
    pub fn number(&self, d: &Description) -> Option<u32> {
        let Some(carried) = self.objects.get(&object(d)?) else {
            return self.inherited.get(&object(d)?).copied();
        };
        if let Some(fd) = d.numbers().find(|fd| *fd <= 2) {
            return Some(fd);
        }
        let order = if d.can_read() { [0, 1, 2] } else { [1, 2, 0] };
        order.into_iter().find(|&n| carried[n as usize])
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

/// Whether a description is what the root was started with under this number.
fn is_still(d: &Description, fd: u32, name: &[u8]) -> bool {
    d.link == name && d.held.iter().any(|h| h.process == 0 && h.fd == fd)
}

/// Whether the other end is outside the target.
fn is_outside(scan: &mut Scan<'_>, d: &Description) -> Result<bool> {
    match FileType::from_raw_mode(d.stat.st_mode) {
        FileType::CharacterDevice => Ok(!terminals::has_master(scan, d)),
        FileType::Fifo => pipes::is_stream_from_outside(scan, d),
        _ => super::sockets::is_stream_from_outside(scan, d),
    }
}

/// Unread input from a pipe or socket goes with the checkpoint; a restore feeds it first.
fn capture_input(scan: &mut Scan<'_>, d: &Description) -> Result<()> {
    let (capacity, data) = match FileType::from_raw_mode(d.stat.st_mode) {
        FileType::Fifo if d.can_read() => {
            (stillpoint_linux::pipes::capacity(&d.file)?, stillpoint_linux::pipes::contents(&d.file)?)
        }
        FileType::Socket => (0, super::sockets::standard_input(scan, d)?),
        _ => return Ok(()),
    };
    if !data.is_empty() {
        let data = data.into_iter().map(Bytes).collect();
        scan.builder.image.pipes.push(Pipe { capacity, data, stdio: Some(0), ..Pipe::default() });
    }
    Ok(())
}
