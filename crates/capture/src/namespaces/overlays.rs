//! Overlays that only the program has mounted: which directories they lie over.
//!
//! The kernel tells what these were called when it was mounted, from wherever that was. Where they are is looked for, and proved by what is
//! in them: what lies directly below files of the overlay is told by the kernel.

use super::mounted::{Look, below_path, quiet_copy};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use stillpoint_image::{Bytes, Layer, Mounted, Role, are_within_each_other};
use stillpoint_linux::namespaces::inside;
use stillpoint_linux::overlay::{FileId, Names, Proof, is_for_work, settings};
use stillpoint_linux::proc::mounts::{Mount, unescaped};
use stillpoint_linux::proc::{NamespaceKind, Proc};
use stillpoint_linux::{Error, Result, fdinfo, mounts};

/// Options that are set again.
const SETTINGS: [&str; 14] = [
    "rw",
    "ro",
    "lowerdir",
    "lowerdir+",
    "upperdir",
    "workdir",
    "default_permissions",
    "redirect_dir",
    "index",
    "uuid",
    "nfs_export",
    "userxattr",
    "xino",
    "metacopy",
];
/// Options by which it remembers which files are below others, by more than their names.
const REMEMBERS: [&str; 3] = ["index", "nfs_export", "metacopy"];

/// Kinds of file systems that somebody serves, perhaps the program, which stands still.
const SERVED: [&[u8]; 6] = [b"fuse", b"nfs", b"cifs", b"smb", b"9p", b"autofs"];

/// Why one cannot be mounted again, as far as its options tell.
pub(super) fn refused(told: &[u8]) -> Option<&'static str> {
    if settings(told).any(|(name, _)| name == b"volatile") {
        return Some("after the option volatile nobody can mount it again");
    }
    match Names::of(told) {
        None => Some("there are directories in it that have no names"),
        Some(names) if are_within_each_other(calls(&names)) => {
            Some("the name of one of its directories lies within that of another")
        }
        Some(_) => None,
    }
}

/// Whether it is known how to set an option of an overlay.
pub(super) fn is_known(setting: &[u8]) -> bool {
    SETTINGS.iter().any(|known| known.as_bytes() == setting)
}

/// All directories, with what they are called.
fn calls(names: &Names) -> impl Iterator<Item = (Role, &[u8])> {
    let lower = names.lower.iter().map(|name| (Role::Lower, &name[..]));
    let upper = names.upper.iter().map(|name| (Role::Upper, &name[..]));
    let work = names.work.iter().map(|name| (Role::Work, &name[..]));
    lower.chain(upper).chain(work)
}

/// Where the directories of an overlay are looked for.
pub(super) struct Search<'a> {
    pub look: &'a Look<'a>,
    /// Rows of file systems of the namespace, by device.
    pub systems: &'a HashMap<(u32, u32), u32>,
    /// The overlay.
    pub mount: &'a Mount,
}

/// A directory that was found.
struct Found {
    file: OwnedFd,
    /// The same without what is mounted in it, where that can be had.
    bare: OwnedFd,
    at: Mounted,
}

impl Search<'_> {
    /// Finds them. `overlay`: its root, with nothing mounted in it.
    ///
    /// The inner error says which one cannot be found.
    pub fn layers(&self, overlay: &OwnedFd) -> Result<Result<Vec<Layer>, String>> {
        let names = Names::of(&self.mount.settings).unwrap_or_default();
        let Ok(mut proof) = Proof::begin(overlay) else {
            let why = "the kernel does not tell what it lies over: it was mounted in a user namespace, or lies over another overlay, \
                       or this is a kernel before Linux 6.6";
            return Ok(Err(why.into()));
        };
        let (mut layers, mut is_top) = (Vec::new(), true);
        let mut own = None;
        if let Some(name) = &names.upper {
            let mut found = self.places(name).into_iter();
            let Some(upper) = found.find(|found| proof.is_top(&found.file).unwrap_or(false)) else {
                return Ok(Err(lost(name)));
            };
            proof.cover(&upper.bare)?;
            is_top = false;
            let name = names.work.as_deref().unwrap_or_default();
            let number = mounts::number(&upper.file)?;
            let is_it = |found: &Found| {
                mounts::number(&found.file).is_ok_and(|other| other == number)
                    && is_for_work(&found.file).unwrap_or(false)
            };
            let Some(work) = self.places(name).into_iter().find(is_it) else { return Ok(Err(lost(name))) };
            own = Some((upper, work));
        }
        for name in &names.lower {
            let found = self.places(name);
            let is_it = |found: &&Found| !is_top || proof.is_top(&found.file).unwrap_or(false);
            let fitting: Vec<&Found> = found.iter().filter(is_it).collect();
            // What shows something is more certain than what shows nothing, and so could be any.
            let shows = |found: &&&Found| proof.shown_by(&found.bare).ok().flatten().is_some_and(|n| n > 0);
            let fits = |found: &&&Found| proof.shown_by(&found.bare).ok().flatten().is_some();
            let right = fitting.iter().find(shows).or_else(|| fitting.iter().find(fits));
            let Some(right) = right else { return Ok(Err(lost(name))) };
            layers.push(layer(Role::Lower, name, right)?);
            proof.cover(&right.bare)?;
            is_top = false;
        }
        if !proof.ends()? {
            return Ok(Err("there is more in it than in the directories that its options name".into()));
        }
        if let Some((upper, work)) = own {
            layers.push(layer(Role::Upper, names.upper.as_deref().unwrap_or_default(), &upper)?);
            layers.push(layer(Role::Work, names.work.as_deref().unwrap_or_default(), &work)?);
        }
        Ok(self.judge(layers))
    }

    /// Refuses what cannot come back although it was found.
    fn judge(&self, layers: Vec<Layer>) -> Result<Vec<Layer>, String> {
        let is_anew = layers.iter().any(|layer| matches!(layer.at, Mounted::System { .. }));
        let is_on = |name: &[u8], value: Option<Vec<u8>>| {
            REMEMBERS.iter().any(|other| other.as_bytes() == name) && value.is_none_or(|value| value == b"on")
        };
        match settings(&self.mount.settings).any(|(name, value)| is_on(&name, value)) {
            true if is_anew => Err("it remembers which files it lies over, and they will be others: some of its directories are in a \
                                    file system in memory"
                .into()),
            _ => Ok(layers),
        }
    }

    /// All directories that a name may be that of, the likeliest first.
    fn places(&self, name: &[u8]) -> Vec<Found> {
        let path = Path::new(OsStr::from_bytes(name));
        let point = |mount: &Mount| PathBuf::from(OsStr::from_bytes(&unescaped(&mount.point)));
        let is_served = |mount: &&Mount| SERVED.iter().any(|kind| mount.kind.starts_with(kind));
        let points = self.look.within.iter().filter(|mount| !is_served(mount)).map(point);
        let mut candidates = Vec::new();
        if path.is_absolute() {
            candidates.push(path.to_owned());
        } else {
            candidates.extend(self.beginnings().iter().map(|from| from.join(path)));
        }
        // What it was called before the root was changed begins with more.
        let parts: Vec<Component<'_>> = path.components().filter(|c| *c != Component::RootDir).collect();
        let points: Vec<PathBuf> = std::iter::once(PathBuf::from("/")).chain(points).collect();
        for from in usize::from(path.is_absolute())..parts.len() {
            let rest: PathBuf = parts[from..].iter().collect();
            candidates.extend(points.iter().map(|point| point.join(&rest)));
        }
        let ours = mounts::handle(CWD, Path::new("/")).ok();
        let space = (NamespaceKind::Mount, self.look.own.file.as_fd());
        let mut found: Vec<(Vec<u8>, Found)> = Vec::new();
        let all = self.look.within.iter().chain(self.look.around);
        let served: Vec<PathBuf> = all.filter(is_served).map(point).collect();
        candidates.retain(|path| !served.iter().any(|point| path.starts_with(point)));
        for path in candidates {
            for (root, is_ours) in [(Some(&**self.look.root), false), (ours.as_ref(), true)] {
                let Some(file) = root.and_then(|root| within(root, &path)) else { continue };
                let Ok(id) = FileId::of(&file) else { continue };
                let Some(at) = self.place(&file) else { continue };
                if found.iter().any(|(known, other)| *known == id.told() && other.at == at) {
                    continue;
                }
                let bare = match is_ours {
                    true => quiet_copy(&file),
                    false => inside(&[space], || quiet_copy(&file)),
                };
                // In a user namespace nobody may see what is below other mounts.
                if let Ok(bare) = bare.or_else(|_| duplicate(&file)) {
                    found.push((id.told(), Found { file, bare, at }));
                }
            }
        }
        found.into_iter().map(|(_, found)| found).collect()
    }

    /// Where a name may begin that is no absolute path: in current directories, and in those around that on which it is mounted.
    fn beginnings(&self) -> Vec<PathBuf> {
        let current = self.look.own.pids.iter().filter_map(|pid| Proc::process(*pid).ok()?.link("cwd").ok());
        let point = unescaped(&self.mount.point);
        let all = current.chain([point]).map(|path| PathBuf::from(OsStr::from_bytes(&path)));
        let mut all: Vec<PathBuf> =
            all.flat_map(|path| path.ancestors().map(PathBuf::from).collect::<Vec<_>>()).collect();
        all.sort_by_key(|path| std::cmp::Reverse(path.as_os_str().len()));
        all.dedup();
        all
    }

    /// Where a directory is that was found.
    fn place(&self, file: &OwnedFd) -> Option<Mounted> {
        let number = mounts::number(file).ok()?;
        let mut all = self.look.within.iter().chain(self.look.around);
        let on = all.find(|mount| mount.id == number)?;
        let link = fdinfo::link(std::process::id(), file.as_raw_fd() as u32).ok()?;
        let rest = below_path(&unescaped(&on.point), &link)?;
        let root = Path::new(OsStr::from_bytes(&unescaped(&on.root))).join(OsStr::from_bytes(&rest));
        let root = root.into_os_string().into_vec();
        let root = if root.len() > 1 { root.strip_suffix(b"/").unwrap_or(&root).to_vec() } else { root };
        if on.device == self.mount.device {
            return None;
        }
        if let Some(&row) = self.systems.get(&on.device) {
            return Some(Mounted::System { row, root: Bytes(root) });
        }
        let stat = rustix::fs::fstat(file).ok()?;
        Some(Mounted::Around(Bytes(self.look.source(on, &root, Some(&stat))?)))
    }
}

fn duplicate(file: &OwnedFd) -> Result<OwnedFd> {
    file.try_clone().map_err(|e| Error::call("duplicate a descriptor", e))
}

fn lost(name: &[u8]) -> String {
    format!(
        "its directory {} cannot be found, or what is in it is not what the overlay shows",
        String::from_utf8_lossy(name)
    )
}

fn layer(role: Role, name: &[u8], found: &Found) -> Result<Layer> {
    let id = match found.at {
        Mounted::Around(_) => FileId::of(&found.file)?.told(),
        _ => Vec::new(),
    };
    Ok(Layer { role, name: Bytes(name.to_vec()), at: found.at.clone(), id: Bytes(id) })
}

/// What a path leads to from a root, if that is a directory.
fn within(root: impl AsFd, path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::DIRECTORY;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(root, path, flags, Mode::empty(), resolve).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_mounted_again_is_told_by_its_options() {
        for told in [
            "rw,lowerdir=/a:/b,upperdir=/u/u,workdir=/u/w",
            "ro,lowerdir=a:../b",
            "rw,lowerdir=/,upperdir=/u,workdir=/w",
        ] {
            assert_eq!(refused(told.as_bytes()), None, "{told}");
        }
        for told in [
            "rw,lowerdir=/a,upperdir=/u,workdir=/w,volatile",
            "ro,lowerdir=/a::/data",
            "ro,lowerdir=/:/a",
            "ro,lowerdir=/a/b:/a",
            "ro,lowerdir=/a/b:a/./c/../b",
        ] {
            assert!(refused(told.as_bytes()).is_some(), "{told}");
        }
        assert!(is_known(b"lowerdir+") && !is_known(b"volatile") && !is_known(b"lower"));
    }
}
