//! Whether those who have to name others when they are restored can: in a pid namespace nobody outside has a name.

use crate::Builder;
use crate::attributes::target::named;
use std::collections::HashMap;
use stillpoint_image::pids::{Pids, namespace_of};
use stillpoint_image::{Bytes, FileKind, Image, Namespace, OpenFile};

/// Signals go to a process group.
const GROUP: u32 = 2;

/// Refuses open files that could not be made again in the process that has them first, or not be fetched from there by others.
/// `pids` are the processes of the image, as we see them.
pub fn check(builder: &mut Builder, pids: &[u32]) {
    if Pids::of(&builder.image).are_plain() {
        return;
    }
    for (process, fd, why) in nameless(&builder.image) {
        builder.refuse(
            format!("descriptor {fd} of {}", named(pids[process])),
            why,
            "close it before the checkpoint",
        );
    }
}

/// Descriptors by process and number, and why they cannot be had again.
fn nameless(image: &Image) -> Vec<(usize, u32, &'static str)> {
    let pids = Pids::of(image);
    let space = |process: usize| namespace_of(image, &image.processes[process]);
    let sees = |process: usize, id: u32| pids.seen_from(space(process), id).is_some();
    let mut home: HashMap<u32, (usize, u32)> = HashMap::new();
    let mut all = Vec::new();
    for (process, of) in image.processes.iter().enumerate() {
        let table = image.tables.get(of.table as usize).map_or(&[][..], |t| t.descriptors.as_slice());
        for d in table {
            let Some(file) = image.files.get(d.file as usize) else { continue };
            let Some(&(first, _)) = home.get(&d.file) else {
                home.insert(d.file, (process, d.fd));
                continue;
            };
            let shares = image.processes[first].table == of.table;
            if !shares && is_made_within(image, file) && !sees(process, image.processes[first].pid) {
                all.push((process, d.fd, "it has it from a process that is outside of its pid namespace"));
            }
        }
    }
    let has_other_proc = |process: usize| {
        let theirs = image.processes[process].namespaces.iter();
        let is_one = |row: &u32| match image.namespaces.get(*row as usize) {
            Some(Namespace::Mount { proc: Some(_), .. }) => true,
            Some(Namespace::Mount { mounts: Some(own), .. }) => {
                let is_there = |path: &Bytes| path.0.starts_with(b"/proc");
                own.is_apart || own.gone.iter().any(is_there) || own.all.iter().any(|m| is_there(&m.point))
            }
            _ => false,
        };
        theirs.into_iter().any(is_one)
    };
    for (row, file) in image.files.iter().enumerate() {
        let Some(&(process, fd)) = home.get(&(row as u32)) else { continue };
        match &file.kind {
            FileKind::Proc(_) | FileKind::EndedProc(_) if has_other_proc(process) => {
                all.push((process, fd, "it is a file of another procfs than that on its /proc"));
            }
            FileKind::Pid(pid) if !sees(process, *pid) => {
                all.push((process, fd, "it is a handle to a process outside of its pid namespace"));
            }
            FileKind::Epoll(watches) => {
                let of = image.processes[process].table;
                let table = image.tables.get(of as usize).map_or(&[][..], |t| t.descriptors.as_slice());
                let elsewhere = watches.iter().filter(|w| !table.iter().any(|d| d.file == w.file));
                let mut from = elsewhere.filter_map(|w| Some(image.processes[home.get(&w.file)?.0].pid));
                if from.any(|pid| !sees(process, pid)) {
                    all.push((
                        process,
                        fd,
                        "it watches a file of a process that is outside of its pid namespace",
                    ));
                }
            }
            _ => {}
        }
        let Some(owner) = file.owner.filter(|owner| owner.id != 0) else { continue };
        let is_own = owner.kind != GROUP || image.processes.iter().any(|p| p.own_group() == Some(owner.id));
        if !is_own && space(process).is_some() || !sees(process, owner.id) {
            all.push((process, fd, "its signals go to somebody outside of its pid namespace"));
        }
    }
    all
}

/// Whether a file is made in a process that has it, and fetched from there by others.
fn is_made_within(image: &Image, file: &OpenFile) -> bool {
    match file.kind {
        FileKind::Pid(_) | FileKind::Proc(_) => true,
        FileKind::ControllingTerminal => image.ptys.iter().any(|p| p.controlling),
        _ => false,
    }
}
