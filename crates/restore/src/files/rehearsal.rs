//! What of the open files can be tried beside the program, which still has its names and addresses.

use super::sockets::{name, refusal};
use super::{check, connections, mapped_rows, objects, options, peers};
use crate::{Error, Result};
use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, StatxAttributes, StatxFlags};
use std::collections::HashMap;
use std::path::Path;
use stillpoint_image::{
    FileKind, Image, MemoryObject, PathFile, Socket, is_kernel_log, is_memory_device, is_miscellaneous,
};
use stillpoint_linux::datagrams::{JOIN_GROUP, SOURCE_FILTER};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::sockets as kernel;
use stillpoint_linux::{Error as Kernel, descriptors, memfd};

/// Tries whether files could be opened, and sockets and memory files be made. `is_still`: the program does not run, and its files are as
/// the image tells. Nothing that can be seen is opened, and no name or address is taken; devices that keep nothing are opened, of which
/// nobody is told.
///
/// # Errors
/// [`Error::Refused`] with a line for each that could not; that our own rights cannot be read.
pub(crate) fn rehearse(image: &Image, is_still: bool) -> Result<()> {
    let mut against = Vec::new();
    if is_still {
        against.extend(misplaced(image));
        against.extend(inaccessible(image)?);
    }
    peers::check(image, &mut against);
    // Those of a network of its own are not tried: it is made anew, and while they are made its settings let them.
    let sockets = image.sockets.iter().filter(|_| image.network.is_none());
    let sockets = sockets.map(|socket| make_socket(image, socket, is_still));
    let memory = image.objects.iter().map(make_memory);
    for tried in sockets.chain(memory) {
        match tried {
            Ok(()) => {}
            Err(Error::Refused(lines)) => against.extend(lines),
            Err(e) => against.push(e.to_string()),
        }
    }
    against.sort_unstable();
    against.dedup();
    if against.is_empty() { Ok(()) } else { Err(Error::Refused(against)) }
}

/// Whether its path is one of ours, and not of a mount namespace that is to be made.
fn is_ours(file: &PathFile) -> bool {
    file.namespace.is_none() && !file.deleted && !file.made_anew
}

/// Files that are not where the program has them. What is in them is looked at by the restore: others may write to them until then.
fn misplaced(image: &Image) -> Vec<String> {
    let rows = check::checked(image).filter(|(_, file)| is_ours(file));
    rows.filter_map(|(_, file)| check::misplaced(file)).collect()
}

/// Files that we may not open as the program has them open.
fn inaccessible(image: &Image) -> Result<Vec<String>> {
    let mut wanted: HashMap<u32, Access> = HashMap::new();
    for (row, write) in mapped_rows(image) {
        let is_file = image.paths.get(row as usize).is_some_and(|file| {
            matches!(FileType::from_raw_mode(file.mode), FileType::RegularFile | FileType::CharacterDevice)
        });
        *wanted.entry(row).or_insert(Access::EXISTS) |= match (is_file, write) {
            // A directory that cannot be read is entered by a handle.
            (false, _) => Access::EXISTS,
            (true, false) => Access::READ_OK,
            (true, true) => Access::READ_OK | Access::WRITE_OK,
        };
    }
    let mut not_accessed = Vec::new();
    for file in &image.files {
        let FileKind::Path(row) = file.kind else { continue };
        let flags = file.flags as i32;
        *wanted.entry(row).or_insert(Access::EXISTS) |= match flags & libc::O_ACCMODE {
            _ if flags & libc::O_PATH != 0 => Access::EXISTS,
            libc::O_RDONLY => Access::READ_OK,
            libc::O_WRONLY => Access::WRITE_OK,
            _ => Access::READ_OK | Access::WRITE_OK,
        };
        if flags & (libc::O_NOATIME | libc::O_PATH) == libc::O_NOATIME {
            not_accessed.push(row);
        }
    }
    let file = |row: u32| image.paths.get(row as usize).filter(|file| is_ours(file));
    let mut against: Vec<String> = overwritten(image)
        .filter_map(file)
        .filter(|file| may_only_grow(file))
        .map(|file| {
            format!("{}: it may only be appended to (chattr +a), and the program can overwrite it", file.path)
        })
        .collect();
    for (file, access) in wanted.into_iter().filter_map(|(row, access)| Some((file(row)?, access))) {
        let path = file.path.as_path();
        match rustix::fs::accessat(
            rustix::fs::CWD,
            path,
            access,
            AtFlags::EACCESS | AtFlags::SYMLINK_NOFOLLOW,
        ) {
            Ok(()) => {
                if let Err(e) = open_device(file, access) {
                    against.push(format!("{}: we may not open it as the program did: {e}", path.display()));
                }
            }
            Err(e) => against.push(format!("{}: we may not open it as the program did: {e}", path.display())),
        }
    }
    let owned = Owned::new()?;
    let others = not_accessed.into_iter().filter_map(file).filter(|file| !owned.by_one_of(&[file.uid]));
    against
        .extend(others.map(|file| {
            format!("{}: leaving its access time alone (O_NOATIME) needs CAP_FOWNER", file.path)
        }));
    against.extend(unix_names(image, &owned));
    Ok(against)
}

/// Opens a device of those that keep nothing once: there are rights to it beside those of its file, as to the log of the kernel, and
/// those that a control group gives.
fn open_device(file: &PathFile, access: Access) -> Result<()> {
    // Of miscellaneous ones a checkpoint has taken those that keep nothing only.
    let is_one = is_memory_device(file.rdev) || is_kernel_log(file.rdev) || is_miscellaneous(file.rdev);
    if FileType::from_raw_mode(file.mode) != FileType::CharacterDevice || !is_one {
        return Ok(());
    }
    let mode = match (access.contains(Access::READ_OK), access.contains(Access::WRITE_OK)) {
        (false, false) => return Ok(()),
        (true, false) => libc::O_RDONLY,
        (false, true) => libc::O_WRONLY,
        (true, true) => libc::O_RDWR,
    };
    let path = file.path.as_path();
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let handle = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| Kernel::file(path, e))?;
    let stat = rustix::fs::fstat(&handle).map_err(|e| Kernel::file(path, e))?;
    if (stat.st_mode, stat.st_rdev) == (file.mode, file.rdev) {
        descriptors::reopen(&handle, mode | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC)?;
    }
    Ok(())
}

/// Files (rows of [`Image::paths`]) that the program writes to elsewhere than at their ends.
fn overwritten(image: &Image) -> impl Iterator<Item = u32> {
    let mapped = mapped_rows(image).into_iter().filter_map(|(row, write)| write.then_some(row));
    let opened = image.files.iter().filter_map(|file| match file.kind {
        FileKind::Path(row) => {
            let flags = file.flags as i32;
            let writes = flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != libc::O_RDONLY;
            (writes && flags & libc::O_APPEND == 0).then_some(row)
        }
        _ => None,
    });
    mapped.chain(opened)
}

/// Whether a file has the attribute that lets it be opened for appending only.
fn may_only_grow(file: &PathFile) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    let told = rustix::fs::statx(rustix::fs::CWD, file.path.as_path(), flags, StatxFlags::TYPE);
    told.is_ok_and(|told| told.stx_attributes.contains(StatxAttributes::APPEND))
}

/// Files with which we may do what their owners may.
struct Owned {
    own: u32,
    all: bool,
}

impl Owned {
    fn new() -> Result<Self> {
        const CAP_FOWNER: u64 = 1 << 3;
        let status = Proc::process(std::process::id())?.status()?;
        Ok(Owned { own: rustix::process::geteuid().as_raw(), all: status.caps[2] & CAP_FOWNER != 0 })
    }

    fn by_one_of(&self, users: &[u32]) -> bool {
        self.all || users.contains(&self.own)
    }
}

/// Names of unix sockets that we may not make, or not take away when nobody is behind them any more.
fn unix_names(image: &Image, owned: &Owned) -> Vec<String> {
    let mut against = Vec::new();
    let rows = image.sockets.iter().flat_map(|socket| socket.path.into_iter().chain(socket.renamed_from));
    for file in rows.filter_map(|row| image.paths.get(row as usize)).filter(|file| is_ours(file)) {
        let folder = file.path.as_path().parent().unwrap_or(Path::new("/"));
        let access = Access::WRITE_OK | Access::EXEC_OK;
        let mut may = rustix::fs::accessat(rustix::fs::CWD, folder, access, AtFlags::EACCESS);
        if let Ok(stat) = rustix::fs::stat(folder)
            && stat.st_mode & libc::S_ISVTX != 0
            && !owned.by_one_of(&[stat.st_uid, file.uid])
        {
            may = may.and(Err(rustix::io::Errno::PERM));
        }
        if let Err(e) = may {
            against.push(format!("{}: we may not make a socket of that name: {e}", file.path));
        }
    }
    against
}

/// Makes one like it, with its options. It is not bound where it was: there the program's own is.
fn make_socket(image: &Image, socket: &Socket, is_still: bool) -> Result<()> {
    let what = name(image, socket);
    let failed = |e: &dyn std::fmt::Display| Error::Refused(vec![format!("{what}: {e}")]);
    let fd = connections::new(socket).map_err(|e| failed(&e))?;
    if socket.outside {
        return Ok(()); // it is kept by whoever has it already
    }
    if socket.connection.is_some() && socket.peer.is_none() {
        return connections::rehearse_ended(socket, &what);
    }
    if socket.connection.is_some() {
        connections::rehearse(image, socket, &what)?;
        return if is_still { is_permitted_port(socket, &what) } else { Ok(()) };
    }
    options::apply_some(&fd, socket, &what, |level, name| !takes_part(socket, level, name))?;
    // A program that runs may just be about to bind to it once more.
    if is_still { is_permitted_port(socket, &what) } else { Ok(()) }
}

/// Options by which one would take part in what the program receives, or be heard of by others: those of packet sockets, and groups.
fn takes_part(socket: &Socket, level: u32, name: u32) -> bool {
    let is_internet = [libc::IPPROTO_IP, libc::IPPROTO_IPV6].contains(&(level as i32));
    match socket.family as i32 {
        libc::AF_PACKET => true,
        libc::AF_NETLINK => name == libc::NETLINK_ADD_MEMBERSHIP as u32,
        _ => is_internet && [JOIN_GROUP, SOURCE_FILTER].contains(&name),
    }
}

/// The right to a port is asked for before whether it is free, which it is not: without the options that let several have it.
fn is_permitted_port(socket: &Socket, what: &str) -> Result<()> {
    let is_internet = [libc::AF_INET as u32, libc::AF_INET6 as u32].contains(&socket.family);
    if !is_internet || socket.local.0.is_empty() || socket.foreign {
        return Ok(());
    }
    let plain = connections::new(socket)?;
    match kernel::bind(&plain, &socket.local.0) {
        Err(e) if e.raw_os_error() == Some(libc::EACCES) => Err(refusal(what, &e)),
        _ => Ok(()),
    }
}

/// Makes an empty memory file of that size, owner and seals. Huge pages are those that the program still has.
fn make_memory(object: &MemoryObject) -> Result<()> {
    let Some(name) = object.memfd.as_ref().filter(|_| object.huge_page == 0) else { return Ok(()) };
    let tried = memfd::create(&name.0, 0).map_err(Error::from).and_then(|fd| {
        objects::resize(&fd, object.size)?;
        objects::finish_memory(object, &fd)?;
        if object.seals != 0 {
            memfd::add_seals(&fd, object.seals)?;
        }
        Ok(())
    });
    tried.map_err(|e| {
        Error::Refused(vec![format!("memfd {} cannot be made: {e}", String::from_utf8_lossy(&name.0))])
    })
}
