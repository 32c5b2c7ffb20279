//! Where what led outside leads now: standard streams, streams that a job was started with, and pipes of which a process outside
//! had an end.

use super::standard::{current, null};
use super::{Opening, kept, set_status_flags};
use crate::{Connection, Error, Options, Pipes, Result, Stdio, Streams, To};
use rustix::event::epoll;
use rustix::fs::{FileType, Mode, OFlags};
use std::cell::OnceCell;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use stillpoint_image::{Bytes, FileKind, Image, OpenFile, Pipe};
use stillpoint_linux::{Error as Kernel, descriptors, host, pipes};

/// Something of the program that led outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Outward {
    /// A stream that it was started with, by the number that it had then.
    Stream(u32),
    /// A pipe, row of [`Image::pipes`].
    Pipe(u32),
}

/// Where that leads now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// To the stream with this number of whoever restores.
    Ours(u32),
    /// To what the user says.
    To(To),
    /// It is the same as it was: it has been kept since the program was killed.
    Kept,
    /// Who had the other end has left.
    Left,
}

/// What was kept is not there any more.
pub(super) const GONE: &str = "pipes to other processes were kept for a while, and are not any more: say where they lead now (--fd N=PATH, \
                               --pipes follow, or --pipes closed)";

impl Outward {
    /// What a file is, if it led outside.
    pub fn of(image: &Image, file: &OpenFile) -> Option<Self> {
        match file.kind {
            FileKind::Stdio(number) => Some(Outward::Stream(number)),
            FileKind::Pipe(row) => image.pipes.get(row as usize)?.is_cut_off().then_some(Outward::Pipe(row)),
            _ => None,
        }
    }

    /// The number under which the program had it.
    pub fn number(&self, image: &Image) -> u32 {
        match *self {
            Outward::Stream(number) => number,
            Outward::Pipe(row) => image.holder_of_pipe(row).map_or(0, |(_, number)| number),
        }
    }

    /// What was in it and not yet read, in turn.
    pub fn unread<'i>(&self, image: &'i Image) -> Vec<&'i Pipe> {
        let pipes: Vec<&Pipe> = match *self {
            Outward::Stream(number) => image.pipes.iter().filter(|pipe| pipe.stdio == Some(number)).collect(),
            Outward::Pipe(row) => image.pipes.get(row as usize).into_iter().collect(),
        };
        pipes.into_iter().filter(|pipe| !pipe.data.is_empty()).collect()
    }

    /// Whether it is what `--fd NUMBER` means: the stream that the program was started with under this number, or what its first
    /// process has there now.
    fn is_meant(&self, image: &Image, number: u32) -> bool {
        match *self {
            Outward::Stream(own) => own == number,
            Outward::Pipe(_) => {
                !has_stream(image, number)
                    && image.root_file(number).and_then(|file| Self::of(image, file)) == Some(*self)
            }
        }
    }

    /// Where it leads now; nothing if nobody has said so.
    pub fn way(&self, image: &Image, streams: &Streams) -> Option<Way> {
        let mut connections = streams.connections.iter();
        if let Some(connection) = connections.find(|connection| self.is_meant(image, connection.number)) {
            return Some(Way::To(connection.to.clone()));
        }
        match (*self, streams.pipes) {
            (Outward::Stream(number), _) => Some(Way::Ours(number)),
            (Outward::Pipe(_), Pipes::Closed) => Some(Way::Left),
            (Outward::Pipe(row), Pipes::Follow) => {
                Some(Way::To(To::Descriptor(image.holder_of_pipe(row)?.1)))
            }
            (Outward::Pipe(row), Pipes::Kept) => image.pipes.get(row as usize)?.kept.map(|_| Way::Kept),
        }
    }

    /// How the program uses it, as flags of open(2): a terminal is open for both under all of its numbers.
    fn access(&self, flags: u32) -> i32 {
        match *self {
            Outward::Stream(0) => libc::O_RDONLY,
            Outward::Stream(1 | 2) => libc::O_WRONLY,
            _ => flags as i32 & libc::O_ACCMODE,
        }
    }

    /// Whether the program can read it, by one of its files.
    fn is_read(&self, file: &OpenFile) -> bool {
        self.access(file.flags) != libc::O_WRONLY
    }
}

impl Way {
    /// Whether what is said to lead there gives what it has once, to one who reads: a pipe, or what may be one.
    fn gives_once(&self) -> bool {
        match self {
            Way::To(To::File(path)) => rustix::fs::stat(path)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo),
            Way::To(To::Descriptor(_)) | Way::Kept => true,
            Way::Ours(_) | Way::Left => false,
        }
    }
}

fn has_stream(image: &Image, number: u32) -> bool {
    image.files.iter().any(|file| file.kind == FileKind::Stdio(number))
}

/// The numbers of what led outside and can be connected by hand.
pub fn connectable(image: &Image) -> BTreeSet<u32> {
    let table = image.processes.first().and_then(|root| image.tables.get(root.table as usize));
    let table = table.map(|table| table.descriptors.as_slice()).unwrap_or_default();
    let is_pipe = |row: u32| {
        let outward = image.files.get(row as usize).and_then(|file| Outward::of(image, file));
        matches!(outward, Some(Outward::Pipe(_)))
    };
    let streams = image.files.iter().filter_map(|file| match file.kind {
        FileKind::Stdio(number) => Some(number),
        _ => None,
    });
    table.iter().filter(|d| is_pipe(d.file)).map(|d| d.fd).chain(streams).collect()
}

/// What stands against the ways that things which led outside are to lead.
pub(super) fn check(image: &Image, options: &Options, refusals: &mut Vec<String>) {
    let streams = &options.streams;
    let connectable = connectable(image);
    for Connection { number, .. } in streams.connections.iter().filter(|c| !connectable.contains(&c.number)) {
        refusals.push(format!("--fd {number}: descriptor {number} of the program did not lead outside"));
    }
    let is_kept = OnceCell::new();
    for (row, told) in image.pipes_cut_off() {
        let way = Outward::Pipe(row)
            .way(image, streams)
            .filter(|way| *way != Way::Kept || *is_kept.get_or_init(|| kept::is_there(image)));
        if way.is_none() {
            let outward = Outward::Pipe(row);
            let by_hand = match image.holder_of_pipe(row) {
                Some((0, number)) if outward.is_meant(image, number) => {
                    format!("--fd {number}=PATH, --pipes follow, or --pipes closed")
                }
                Some(_) => "--pipes follow, or --pipes closed".into(),
                None => "--pipes closed".into(),
            };
            refusals.push(format!("{told} led outside: say where it leads now ({by_hand})"));
        }
    }
    refusals.extend(contested(image, streams));
    let watched = watched(image);
    let mut told = HashSet::new();
    for (row, file) in (0..).zip(&image.files) {
        let Some(outward) = Outward::of(image, file) else { continue };
        let Some(way) = outward.way(image, streams) else { continue };
        let is_watched = watched.contains(&row);
        if let Err(why) = can_lead(image, outward, &way, file.flags, is_watched, options.stdio)
            && told.insert(why.clone())
        {
            refusals.push(why);
        }
    }
}

/// Pipes that would follow to a descriptor to which something else leads already: those of one number in different processes.
fn contested(image: &Image, streams: &Streams) -> Vec<String> {
    let mut taken: HashMap<u32, Outward> = HashMap::new();
    let mut refusals = Vec::new();
    let streams_of_it = image.files.iter().filter_map(|file| match file.kind {
        FileKind::Stdio(number) => Some(Outward::Stream(number)),
        _ => None,
    });
    let pipes = image.pipes_cut_off().map(|(row, _)| Outward::Pipe(row));
    for outward in streams_of_it.chain(pipes) {
        let number = match outward.way(image, streams) {
            Some(Way::Ours(number)) => number,
            Some(Way::To(To::Descriptor(number))) if streams.pipes == Pipes::Follow => number,
            _ => continue,
        };
        let first = *taken.entry(number).or_insert(outward);
        if let Outward::Pipe(row) = outward
            && first != outward
        {
            let told = image.pipes_cut_off().find(|(of, _)| *of == row).map(|(_, told)| told);
            let told = told.unwrap_or_default();
            refusals.push(format!(
                "--pipes follow: {told} and something else would both lead to descriptor {number} of this command"
            ));
        }
    }
    refusals
}

/// What several copies of a program would take from each other: pipes and such that they read, and that are led to one place.
pub fn shared_inputs(image: &Image, streams: &Streams) -> Vec<String> {
    let mut shared = BTreeSet::new();
    for file in &image.files {
        let Some(outward) = Outward::of(image, file) else { continue };
        let is_shared = |way: Way| way == Way::Kept || outward.is_read(file) && way.gives_once();
        if outward.way(image, streams).is_some_and(is_shared) {
            shared.insert(outward.number(image));
        }
    }
    shared.into_iter().map(|number| format!("descriptor {number}")).collect()
}

/// Whether all pipes that led outside lead somewhere, as far as it is said for later: with files, or closed. Otherwise which does not.
pub fn untold(image: &Image, streams: &Streams) -> Option<String> {
    let is_untold = |row: u32| {
        let way = Outward::Pipe(row).way(image, streams);
        !matches!(way, Some(Way::Left | Way::To(To::File(_))))
    };
    image.pipes_cut_off().find(|(row, _)| is_untold(*row)).map(|(_, told)| told)
}

/// What is read from a pipe, a socket or a terminal, from which nothing can be read again: one of the streams that are connected by hand.
pub fn read_once(image: &Image, streams: &Streams) -> Option<u32> {
    let is_read_once = |file: &OpenFile| {
        let outward = Outward::of(image, file).filter(|outward| outward.is_read(file))?;
        let is_once = match outward.way(image, streams)? {
            Way::Ours(_) => !outward.unread(image).is_empty(),
            way => way.gives_once(),
        };
        is_once.then(|| outward.number(image))
    };
    image.files.iter().find_map(is_read_once)
}

/// Rows of files that epolls watch.
pub(super) fn watched(image: &Image) -> HashSet<u32> {
    let watches = image.files.iter().filter_map(|file| match &file.kind {
        FileKind::Epoll(watches) => Some(watches),
        _ => None,
    });
    watches.flatten().map(|watch| watch.file).collect()
}

/// Whether something can lead that way; otherwise why not.
fn can_lead(
    image: &Image,
    outward: Outward,
    way: &Way,
    flags: u32,
    is_watched: bool,
    stdio: Stdio,
) -> std::result::Result<(), String> {
    let (number, access) = (outward.number(image), outward.access(flags));
    let reads = access == libc::O_RDONLY;
    let has_unread = reads && !outward.unread(image).is_empty();
    match way {
        Way::To(To::File(path)) => {
            let what = format!("--fd {number}={}", path.display());
            let as_pipe = match reads {
                true => format!("--fd {number}=fd:{number} {number}< <(cat {})", path.display()),
                false => format!("--fd {number}=fd:{number} {number}> >(cat >> {})", path.display()),
            };
            let is_file =
                || no_file(has_unread, is_watched).map_err(|why| format!("{what}: {why}: {as_pipe}"));
            match rustix::fs::stat(path) {
                Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Directory => Err(format!("{what}: it is a directory")),
                    FileType::Socket => Err(format!("{what}: it is a socket, which cannot be opened")),
                    FileType::Fifo if access == libc::O_RDWR => {
                        Err(format!("{what}: a FIFO leads one way, and the program has this open for both"))
                    }
                    FileType::RegularFile => is_file(),
                    FileType::CharacterDevice if is_watched && !is_watchable_device(path, access) => {
                        is_file()
                    }
                    _ => Ok(()),
                },
                Err(rustix::io::Errno::NOENT) if !reads => is_file(),
                Err(e) => Err(format!("{what}: {}", std::io::Error::from(e))),
            }
        }
        Way::To(To::Descriptor(own)) => {
            let what = format!("descriptor {own} of this command");
            let fd = fits(*own, access).map_err(|why| {
                format!("{what} {why} (in a shell {own}>FILE, {own}<FILE and such open it)")
            })?;
            let is_file = is_regular(&fd);
            no_file(has_unread && is_file, is_watched && !can_be_watched(&fd))
                .map_err(|why| format!("{what}: {why}"))
        }
        Way::Ours(_) if !is_watched => Ok(()),
        Way::Ours(own) => match inherited(*own, stdio) {
            Some(fd) if !can_be_watched(&fd) => {
                no_file(false, true).map_err(|why| format!("descriptor {own} of this command: {why}"))
            }
            // It is at its end.
            None if !reads => Err(format!(
                "descriptor {number} led outside, and the program watches it (epoll): /dev/null cannot be watched (restore it without \
                 --detach, or connect it with a pipe: --fd {number}=fd:{number})"
            )),
            _ => Ok(()),
        },
        Way::Left | Way::Kept => Ok(()),
    }
}

/// Why a file does not do, if it does not.
fn no_file(has_unread: bool, is_watched: bool) -> std::result::Result<(), &'static str> {
    match (has_unread, is_watched) {
        (true, _) => Err("what was not yet read comes first, and a file cannot come behind it; a pipe can"),
        (_, true) => Err("the program watches it (epoll), and a file cannot be watched; a pipe can"),
        _ => Ok(()),
    }
}

fn is_regular(fd: &OwnedFd) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

/// Whether an epoll takes it.
fn can_be_watched(fd: &OwnedFd) -> bool {
    let Ok(epoll) = epoll::create(epoll::CreateFlags::CLOEXEC) else { return true };
    epoll::add(&epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN).is_ok()
}

/// Whether a device can be watched, as far as it can be tried.
fn is_watchable_device(path: &Path, access: i32) -> bool {
    let how = OFlags::from_bits_retain(access as u32) | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(path, how, Mode::empty()).is_ok_and(|fd| can_be_watched(&fd))
}

/// The stream with this number that we were started with, unless none is to be had.
fn inherited(number: u32, stdio: Stdio) -> Option<OwnedFd> {
    descriptors::inherited(number).filter(|_| stdio == Stdio::Current)
}

/// Whether we were started with a descriptor that can be used in this way.
fn fits(number: u32, access: i32) -> std::result::Result<OwnedFd, &'static str> {
    let Some(own) = descriptors::inherited(number) else { return Err("is not open") };
    let Ok(now) = rustix::fs::fcntl_getfl(&own) else { return Err("is not open") };
    let now = now.bits() as i32 & libc::O_ACCMODE;
    match access {
        _ if now == libc::O_RDWR || now == access => Ok(own),
        libc::O_RDONLY => Err("cannot be read"),
        libc::O_WRONLY => Err("cannot be written"),
        _ => Err("cannot be both read and written"),
    }
}

/// How something is led that way.
pub(super) enum Led {
    /// This is it.
    Directly(OwnedFd),
    /// It is a pipe with this in it, into which that is brought, or nothing.
    Through(Vec<Bytes>, Option<OwnedFd>),
}

/// Opens what leads that way, for a file with these flags, which is watched or not.
pub(super) fn open(
    opening: &mut Opening<'_>,
    outward: Outward,
    way: &Way,
    flags: u32,
    is_watched: bool,
) -> Result<Led> {
    let access = outward.access(flags);
    let can_read = flags as i32 & libc::O_ACCMODE != libc::O_WRONLY;
    let unread = if can_read { outward.unread(opening.image) } else { Vec::new() };
    let flags = match way {
        Way::To(_) => flags & !(libc::O_ACCMODE as u32) | access as u32,
        _ => flags,
    };
    let (fd, first, is_fifo) = match way {
        Way::To(To::File(path)) => {
            let (fd, is_fifo) = open_file(opening, path, flags)?;
            let first = lacking(opening.image, &unread, &fd)?;
            (fd, first, is_fifo)
        }
        Way::Ours(number) if inherited(*number, opening.stdio).is_none() => {
            if opening.stdio == Stdio::Current && *number > 2 {
                let note = format!(
                    "descriptor {number} led outside and is /dev/null now: there is none to lead it to"
                );
                opening.files.notes.push(note);
            }
            // It is at its end, as `/dev/null` is, and can be watched.
            return Ok(match !unread.is_empty() || is_watched && access == libc::O_RDONLY {
                true => Led::Through(unread.iter().flat_map(|pipe| pipe.data.clone()).collect(), None),
                false => Led::Directly(null(flags)?),
            });
        }
        Way::To(To::Descriptor(number)) | Way::Ours(number) => {
            let fd = current(*number, flags)?;
            let first = lacking(opening.image, &unread, &fd)?;
            (fd, first, false)
        }
        Way::Left | Way::Kept => return Err(Error::Failed("it is opened as a pipe".into())),
    };
    // Of a FIFO that nobody writes to yet the end is not to be seen.
    Ok(match !first.is_empty() || is_fifo && access == libc::O_RDONLY {
        true => Led::Through(first, Some(fd)),
        false => Led::Directly(fd),
    })
}

/// What was not yet read and is not there any more: where it leads now may be the very pipe that it led from, which somebody else has
/// kept, such as the shell that opened it.
///
/// From there all may have been read since, or a part of it. What is there now at its beginning and was at its end is taken for the same.
fn lacking(image: &Image, unread: &[&Pipe], fd: &OwnedFd) -> Result<Vec<Bytes>> {
    let stat = rustix::fs::fstat(fd).map_err(|e| Kernel::call("fstat", e))?;
    let is_pipe = FileType::from_raw_mode(stat.st_mode) == FileType::Fifo;
    let is_here = is_pipe && image.meta.host.boot_id == host::boot_id();
    let mut parts = Vec::new();
    for pipe in unread {
        let mut left: usize = pipe.data.iter().map(|part| part.0.len()).sum();
        if is_here && pipe.inode == Some((stat.st_dev, stat.st_ino)) {
            let before: Vec<u8> = pipe.data.iter().flat_map(|part| &part.0).copied().collect();
            left -= overlap(&before, &pipes::contents(fd)?.concat());
        }
        for (part, is_packet) in pipes::parts(&pipe.data) {
            let (taken, _) = part.split_at(left.min(part.len()));
            left -= taken.len();
            if !taken.is_empty() {
                parts.push(pipes::Part { bytes: taken.to_vec(), is_packet });
            }
        }
    }
    Ok(pipes::told(parts).into_iter().map(Bytes).collect())
}

/// How many of the last bytes of one are the first of the other, at most.
fn overlap(one: &[u8], other: &[u8]) -> usize {
    // Of each beginning of the other: how many of its last bytes are the first of it, too (Knuth, Morris, Pratt).
    let mut fallback = vec![0; other.len()];
    let next = |fallback: &[usize], mut matched: usize, byte: u8| {
        while matched > 0 && other.get(matched) != Some(&byte) {
            matched = fallback[matched - 1];
        }
        matched + usize::from(other.get(matched) == Some(&byte))
    };
    for end in 1..other.len() {
        fallback[end] = next(&fallback, fallback[end - 1], other[end]);
    }
    one.iter().fold(0, |matched, &byte| next(&fallback, matched, byte))
}

/// Opens a file for a stream: what is written to it comes behind what is in it. Also whether it is a FIFO.
fn open_file(opening: &mut Opening<'_>, path: &Path, flags: u32) -> Result<(OwnedFd, bool)> {
    let access = OFlags::from_bits_retain(flags & libc::O_ACCMODE as u32);
    let reads_only = access == OFlags::RDONLY;
    let is_new = !reads_only && rustix::fs::stat(path).is_err_and(|e| e == rustix::io::Errno::NOENT);
    let make = if is_new { OFlags::CREATE } else { OFlags::empty() };
    let append = if reads_only { OFlags::empty() } else { OFlags::APPEND };
    // Of a FIFO nobody is waited for.
    let how = access | make | append | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let refused = |why: String| Error::Refused(vec![format!("--fd {}: {why}", path.display())]);
    let fd = rustix::fs::open(path, how, Mode::from_raw_mode(0o666)).map_err(|e| match e {
        rustix::io::Errno::NXIO => refused("it is a FIFO that nobody reads".into()),
        e => refused(std::io::Error::from(e).to_string()),
    })?;
    if is_new {
        opening.files.created.note(path);
    }
    let stat = rustix::fs::fstat(&fd).map_err(|e| Kernel::file(path, e))?;
    let is_fifo = FileType::from_raw_mode(stat.st_mode) == FileType::Fifo;
    let waits = if is_fifo && reads_only { 0 } else { libc::O_NONBLOCK as u32 };
    set_status_flags(&fd, flags & waits | append.bits())?;
    Ok((fd, is_fifo))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_still_there_is_found() {
        for (one, other, same) in [
            ("two", "twothree", 3),
            ("two", "", 0),
            ("", "two", 0),
            ("two", "wothree", 2),
            ("one two", "two", 3),
            ("one two", "two three", 3),
            ("aaaa", "aa", 2),
            ("aab", "aabaab", 3),
            ("aabaab", "aabx", 3),
            ("xaabaaba", "aabaabaz", 7),
            ("two", "three", 0),
        ] {
            assert_eq!(overlap(one.as_bytes(), other.as_bytes()), same, "{one} {other}");
        }
    }
}
