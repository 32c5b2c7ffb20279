//! Control groups that the processes are in, and what limits them there.

use std::collections::BTreeSet;
use std::path::Path;
use stillpoint_image::{ControlGroup, Image};
use stillpoint_linux::cgroups::{self, Group};
use stillpoint_linux::proc::Proc;

/// Records the groups of all processes, each behind those that it lies in. What cannot be read (a hierarchy that is not mounted
/// here) has no settings.
pub fn record(image: &mut Image) {
    let ours = Proc::process(std::process::id()).and_then(|own| own.cgroup()).unwrap_or_default();
    let mounts = cgroups::mounts().unwrap_or_default();
    let lines = image.processes.iter().flat_map(|process| &process.cgroup);
    let mut all: BTreeSet<(String, String)> = BTreeSet::new();
    for (controllers, path) in lines.filter_map(|line| cgroups::parse(line)) {
        // Ancestors are prefixes, and so come first.
        let above = cgroups::ancestors(path).filter(|path| *path != "/");
        all.extend(above.map(|path| (controllers.to_owned(), path.to_owned())));
    }
    let is_ours = |controllers: &str, path: &str| {
        let mut ours = ours.iter().filter_map(|line| cgroups::parse(line));
        ours.any(|(c, p)| c == controllers && Path::new(p).starts_with(path))
    };
    image.groups = all
        .into_iter()
        .map(|(controllers, path)| ControlGroup {
            settings: Group::find(&controllers, &path, &mounts)
                .filter(|group| !group.is_top())
                .map(|group| group.settings())
                .unwrap_or_default(),
            shared: is_ours(&controllers, &path),
            controllers,
            path,
        })
        .collect();
}
