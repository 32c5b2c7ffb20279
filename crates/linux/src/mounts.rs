//! Making, placing and changing mounts: `open_tree(2)`, `fsopen(2)`, `move_mount(2)`, `mount_setattr(2)`, `pivot_root(2)`.

use crate::descriptors::check;
use crate::namespaces::{enter, on_a_thread};
use crate::proc::mounts::Mount;
use crate::proc::{NamespaceKind, Proc};
use crate::{Error, Result};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// `struct mount_attr`
#[repr(C)]
struct Attributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user: u64,
}

const _: () = assert!(size_of::<Attributes>() == linux_raw_sys::general::MOUNT_ATTR_SIZE_VER0 as usize);

/// `MOUNT_ATTR_RDONLY`: nothing is written there.
pub const READ_ONLY: u64 = 0x1;
/// All options of a mount that there are, by the names that `mountinfo` has for them.
const OPTIONS: [(&[u8], u64); 8] = [
    (b"ro", READ_ONLY),
    (b"nosuid", NO_SET_ID),
    (b"nodev", NO_DEVICES),
    (b"noexec", NO_EXECUTION),
    (b"noatime", NO_ATIME),
    (b"nodiratime", 0x80),
    (b"nosymfollow", 0x20_0000),
    (b"rw", 0),
];
/// `MOUNT_ATTR_NOSUID`: nobody gets rights by executing what is there.
pub const NO_SET_ID: u64 = 0x2;
/// `MOUNT_ATTR_NODEV`: devices there are none.
pub const NO_DEVICES: u64 = 0x4;
/// `MOUNT_ATTR_NOEXEC`: nothing there is executed.
pub const NO_EXECUTION: u64 = 0x8;
/// `MOUNT_ATTR_NOATIME`: times of access are not kept.
pub const NO_ATIME: u64 = 0x10;
const STRICT_ATIME: u64 = 0x20;
/// Those that exclude each other.
const ATIME: u64 = 0x70;

/// The options of a mount that `mountinfo` tells, as `MOUNT_ATTR_*`; nothing if there is one that is not known.
pub fn options(told: &[u8]) -> Option<u64> {
    let (mut all, mut is_relative) = (0, false);
    for word in told.split(|b| *b == b',') {
        match OPTIONS.iter().find(|(name, _)| *name == word) {
            Some((_, option)) => all |= option,
            None if word == b"relatime" => is_relative = true,
            None => return None,
        }
    }
    Some(if is_relative || all & NO_ATIME != 0 { all } else { all | STRICT_ATIME })
}

/// What a mount passes on and receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// Nothing.
    Private,
    /// It receives what its peers do, and passes nothing on.
    Receiving,
    /// It is in a peer group, a new one if it was in none.
    Shared,
    /// Nothing, and it cannot be mounted elsewhere.
    Unbindable,
}

/// The number of the mount that a file was opened on, as `mountinfo` tells it.
pub fn number(file: impl AsFd) -> Result<u64> {
    number_at(file, "", AtFlags::EMPTY_PATH)
}

/// The same of what a path leads to.
pub fn number_at(folder: impl AsFd, path: &str, flags: AtFlags) -> Result<u64> {
    let stat = rustix::fs::statx(folder, path, flags, StatxFlags::MNT_ID)
        .map_err(|e| Error::call("look on which mount a file is", e))?;
    Ok(stat.stx_mnt_id)
}

/// Whether something is mounted where a path leads.
pub fn is_mount_point(path: &Path) -> Result<bool> {
    let stat = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty());
    let stat = stat.map_err(|e| Error::file(path, e))?;
    Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// A mount namespace as seen from its root.
#[derive(Debug)]
pub struct View {
    /// Its root. By this everything in it can be reached.
    pub root: OwnedFd,
    /// Its mounts.
    pub mounts: Vec<Mount>,
}

/// Looks at a mount namespace.
pub fn view(namespace: impl AsFd + Sync) -> Result<View> {
    on_a_thread(|| {
        let here = Proc::process(std::process::id())?
            .sibling(rustix::thread::gettid().as_raw_nonzero().get() as u32)?;
        enter(NamespaceKind::Mount, &namespace)?;
        Ok(View { root: handle(CWD, Path::new("/"))?, mounts: here.mounts()? })
    })
}

/// A handle to what a path leads to, which is no link.
pub fn handle(folder: impl AsFd, path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    rustix::fs::openat(folder, path, flags, Mode::empty()).map_err(|e| Error::file(path, e))
}

/// Makes a file system, and a mount of it that is nowhere yet.
pub fn make(kind: &str, source: &[u8], settings: &[(&[u8], Option<&[u8]>)]) -> Result<OwnedFd> {
    let failed = |e| Error::call(format!("make a file system ({kind})"), e);
    let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed)?;
    if !source.is_empty() {
        rustix::mount::fsconfig_set_string(context.as_fd(), "source", source).map_err(failed)?;
    }
    for (name, value) in settings {
        match value {
            Some(value) => rustix::mount::fsconfig_set_string(context.as_fd(), *name, *value),
            None => rustix::mount::fsconfig_set_flag(context.as_fd(), *name),
        }
        .map_err(|e| Error::call(format!("set {} of a file system ({kind})", name.escape_ascii()), e))?;
    }
    rustix::mount::fsconfig_create(context.as_fd()).map_err(failed)?;
    let (flags, options) = (FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty());
    rustix::mount::fsmount(context.as_fd(), flags, options).map_err(failed)
}

/// Lets nothing be written to a file system any more.
pub fn make_read_only(mount: impl AsFd) -> Result<()> {
    let failed = |e| Error::call("make a file system read-only", e);
    let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
    let context = rustix::mount::fspick(mount, "", flags).map_err(failed)?;
    rustix::mount::fsconfig_set_flag(context.as_fd(), "ro").map_err(failed)?;
    rustix::mount::fsconfig_reconfigure(context.as_fd()).map_err(failed)
}

/// A copy of the mount on which a file or directory of this thread's mount namespace is: of that, without what is mounted
/// in it, and nowhere yet.
pub fn copy(of: impl AsFd) -> Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(of, "", flags).map_err(|e| Error::call("copy a mount", e))
}

/// The same with all that is mounted in it, which nobody can take away from the copy if that is so here.
pub fn copy_all(of: impl AsFd) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    rustix::mount::open_tree(of, "", flags).map_err(|e| Error::call("copy mounts", e))
}

/// Puts a mount that is nowhere yet on a file or directory.
pub fn place(mount: impl AsFd, on: impl AsFd) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", on, "", flags).map_err(|e| Error::call("place a mount", e))
}

/// Lets a private mount share with others what another mount of its file system does, which is wider.
pub fn join(mount: impl AsFd, other: impl AsFd) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_SET_GROUP;
    rustix::mount::move_mount(other, "", mount, "", flags)
        .map_err(|e| Error::call("let a mount join a peer group", e))
}

/// Sets the options of a mount (`MOUNT_ATTR_*`).
pub fn set_options(mount: impl AsFd, options: u64) -> Result<()> {
    let clear = OPTIONS.iter().fold(ATIME, |all, (_, option)| all | option);
    change(mount, &Attributes { set: options, clear, propagation: 0, user: 0 })
}

/// Sets what a mount passes on and receives.
pub fn set_propagation(mount: impl AsFd, propagation: Propagation) -> Result<()> {
    let propagation = match propagation {
        Propagation::Private => libc::MS_PRIVATE,
        Propagation::Receiving => libc::MS_SLAVE,
        Propagation::Shared => libc::MS_SHARED,
        Propagation::Unbindable => libc::MS_UNBINDABLE,
    };
    change(mount, &Attributes { set: 0, clear: 0, propagation, user: 0 })
}

fn change(mount: impl AsFd, attributes: &Attributes) -> Result<()> {
    // SAFETY: the path is a string, and the attributes are readable for the length that is given.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            std::ptr::from_ref(attributes),
            size_of::<Attributes>(),
        )
    };
    check(|| "change a mount".into(), done).map(drop)
}

/// Takes away what is mounted on a path, with all that is mounted in it, if anything is.
pub fn take_away(path: &Path) -> Result<()> {
    use rustix::io::Errno;
    match rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT | Errno::NOTDIR) => Ok(()),
        Err(e) => Err(Error::file(path, e)),
    }
}

/// Takes a mount away, and goes to it before.
pub fn take_away_from(mount: impl AsFd) -> Result<()> {
    let failed = |e| Error::call("take a mount away", e);
    rustix::process::fchdir(mount).map_err(failed)?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(failed)
}

/// Makes a mount, which is on this thread's root, the root of its mount namespace, and takes away the one that was.
pub fn take_root(mount: impl AsFd) -> Result<()> {
    let failed = |e| Error::call("change the root of a mount namespace", e);
    rustix::process::fchdir(mount).map_err(failed)?;
    rustix::process::pivot_root(".", ".").map_err(failed)?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(failed)?;
    rustix::process::chdir("/").map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_told_by_names() {
        assert_eq!(options(b"rw,relatime"), Some(0));
        assert_eq!(options(b"ro,nosuid,nodev,noexec,relatime"), Some(0xf));
        assert_eq!(options(b"rw"), Some(STRICT_ATIME));
        assert_eq!(options(b"rw,noatime,nodiratime"), Some(0x90));
        assert_eq!(options(b"rw,relatime,idmapped"), None);
    }
}
