//! Putting processes into the control groups that they were in.
//!
//! A group that is there is joined. One that is gone is made again with what it had, if that limited anything; otherwise there is
//! nothing to be had from it, and the process stays where we are, as it does if whoever took the checkpoint was in the same group:
//! then it was not the program's own. Where something is not permitted the program runs without, and a note says so.

use stillpoint_image::{ControlGroup, Image};
use stillpoint_linux::cgroups::{self, Group};
use stillpoint_linux::proc::Proc;

/// Puts processes into their groups, one after the other.
pub(crate) struct Joining<'i> {
    image: &'i Image,
    /// None if they cannot be known.
    mounts: Option<String>,
    /// Those that cannot be joined.
    gone: Vec<(&'i str, &'i str)>,
    /// What could not be done.
    pub notes: Vec<String>,
}

impl<'i> Joining<'i> {
    /// Those of a program.
    pub fn new(image: &'i Image) -> Self {
        Joining { image, mounts: cgroups::mounts().ok(), gone: Vec::new(), notes: Vec::new() }
    }

    /// Puts a process, by row and by its id in our pid namespace, into its groups.
    pub fn join(&mut self, row: usize, pid: u32) {
        let Some(mounts) = &self.mounts else { return };
        let here = Proc::process(pid).and_then(|p| p.cgroup()).unwrap_or_default();
        let lines = self.image.processes[row].cgroup.iter().filter_map(|line| cgroups::parse(line));
        for (controllers, path) in lines {
            let is_there =
                here.iter().filter_map(|line| cgroups::parse(line)).any(|at| at == (controllers, path));
            let is_gone = self.gone.contains(&(controllers, path));
            if is_there || is_gone || !is_wanted(self.image, controllers, path) {
                continue;
            }
            if let Err(why) = join_one(self.image, controllers, path, mounts, pid) {
                let name = if controllers.is_empty() { "version 2" } else { controllers };
                self.notes.push(format!("it is not in its control group {path} ({name}): {why}"));
                self.gone.push((controllers, path));
            }
        }
    }
}

/// What is recorded of a group.
fn recorded<'i>(image: &'i Image, controllers: &str, path: &str) -> Option<&'i ControlGroup> {
    image.groups.iter().find(|g| g.controllers == controllers && g.path == path)
}

/// Whether a process has to be in a group: it was the program's own, or limits it.
fn is_wanted(image: &Image, controllers: &str, path: &str) -> bool {
    recorded(image, controllers, path).is_some_and(|group| !group.shared || limits(image, controllers, path))
}

/// Whether a group or one that it lies in limits anything.
fn limits(image: &Image, controllers: &str, path: &str) -> bool {
    cgroups::ancestors(path)
        .filter_map(|path| recorded(image, controllers, path))
        .any(|group| !group.settings.is_empty())
}

/// The groups in which a cgroup namespace of the program's own begins, as its processes will be in them. They are there by then; one
/// that cannot be had is told when these would join it.
pub(crate) fn roots(image: &Image, namespace: u32) -> Vec<Group> {
    let member = image.processes.iter().find(|process| process.namespaces.contains(&namespace));
    let (Some(member), Ok(mounts)) = (member, cgroups::mounts()) else { return Vec::new() };
    let lines = member.cgroup.iter().filter_map(|line| cgroups::parse(line));
    let wanted = lines.filter(|(controllers, path)| is_wanted(image, controllers, path));
    wanted
        .filter_map(|(controllers, path)| prepare(image, controllers, path, &mounts).ok().flatten())
        .collect()
}

fn join_one(image: &Image, controllers: &str, path: &str, mounts: &str, pid: u32) -> Result<(), String> {
    match prepare(image, controllers, path, mounts)? {
        Some(group) => group.join(pid).map_err(|e| e.to_string()),
        None => Ok(()),
    }
}

/// A group that is there, or is made again; none if nothing is to be had from it.
fn prepare(image: &Image, controllers: &str, path: &str, mounts: &str) -> Result<Option<Group>, String> {
    let find = |path: &str| Group::find(controllers, path, mounts);
    let Some(group) = find(path) else {
        return match limits(image, controllers, path) {
            true => Err("its hierarchy is not mounted here".into()),
            false => Ok(None),
        };
    };
    if !group.exists() {
        if !limits(image, controllers, path) {
            return Ok(None);
        }
        let above: Vec<&str> = cgroups::ancestors(path).collect();
        for path in above.into_iter().rev() {
            let Some(group) = find(path).filter(|group| !group.exists()) else { continue };
            let settings =
                recorded(image, controllers, path).map(|g| g.settings.as_slice()).unwrap_or_default();
            group.make(settings).map_err(|e| e.to_string())?;
        }
    }
    match group.is_frozen() {
        true => Err("it is frozen".into()),
        false => Ok(Some(group)),
    }
}
