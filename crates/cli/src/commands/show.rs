//! `stillpoint show`: what is in a checkpoint.

use crate::args::{Common, Show};
use crate::commands::export::files;
use crate::commands::list::{meta_json, pace_json, passed_over};
use crate::failure::Result;
use crate::{jobs, output, paging};
use serde_json::{Value, json};
use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;
use stillpoint_image::{AddressSpace, Backing, FileKind, Image, Meta, PAGE, Process};
use stillpoint_store::{Checkpoint, Pace, Paging, Sources, Tail, TouchSet};

/// Runs the command.
pub fn run(common: &Common, args: &Show) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let name = &args.checkpoint;
    let checkpoint = store.load(&name.job, name.id).map_err(jobs::store_failure)?;
    let running = jobs::running(&store, &name.job)?;
    let now = Now {
        pace: running.as_ref().and_then(|_| store.pace(&name.job).ok().flatten()),
        paging: jobs::paging(&store, &name.job, running.as_ref()),
    };
    let mut tails = store.tails(&name.job).map_err(jobs::store_failure)?;
    tails.retain(|tail| tail.checkpoint == checkpoint.image.meta.id);
    let is_passed = passed_over(&store, &name.job).contains(&checkpoint.image.meta.id);
    if common.json {
        let mut value = as_json(&checkpoint);
        value["passed_over"] = is_passed.into();
        value["tails"] = tails.iter().map(tail_json).collect();
        value["auto"] = now.pace.as_ref().map(pace_json).into();
        value["memory"] = now.paging.as_ref().and_then(paging::json).into();
        output::json(&value)?
    } else {
        output::line(&as_text(&checkpoint, &now, is_passed, &tails))?
    }
    Ok(ExitCode::SUCCESS)
}

/// What is so of its job now, if that runs.
struct Now {
    pace: Option<Pace>,
    paging: Option<Paging>,
}

fn as_json(checkpoint: &Checkpoint) -> Value {
    let image = &checkpoint.image;
    let mut value = meta_json(&image.meta);
    let host = &image.meta.host;
    value["host"] = json!({"machine": host.machine, "kernel": host.kernel, "boot_id": host.boot_id});
    value["imported"] = meta_imported(&image.meta);
    value["manifest_bytes"] = checkpoint.manifest_bytes.into();
    value["touch_set"] = checkpoint
        .touch
        .as_ref()
        .map(|t| json!({"bytes": t.bytes(), "runs": t.len(), "source": sources(t)}))
        .into();
    value["processes"] = image.processes.iter().map(|p| process_json(image, p)).collect();
    value["files"] = image
        .paths
        .iter()
        .map(|p| json!({"path": p.path.to_string(), "size": p.size, "deleted": p.deleted, "usage": usage(p.usage), "copy": p.copy.is_some()}))
        .collect();
    value
}

fn tail_json(tail: &Tail) -> Value {
    let (file, data) = (tail.file.to_string(), tail.data.display().to_string());
    json!({"file": file, "offset": tail.offset, "bytes": tail.length, "cut_ns": tail.cut_ns, "data": data})
}

fn tail_text(tail: &Tail) -> String {
    let Tail { file, offset, length, data, cut_ns, .. } = tail;
    let (length, when) = (output::bytes(*length), output::age(*cut_ns));
    format!("{length} of {file} from byte {offset} on, cut off {when}: {}", data.display())
}

/// What it was called where it was exported.
fn meta_imported(meta: &Meta) -> Value {
    meta.imported.as_ref().map(|from| json!({"job": from.job, "id": from.id})).into()
}

/// Where a touch set comes from.
fn sources(touch: &TouchSet) -> String {
    let sources = [
        (Sources::WRITES, "written after the checkpoint"),
        (Sources::RESTORES, "waited for after earlier restores"),
    ];
    let of_this = sources.into_iter().filter(|(source, _)| touch.sources().contains(*source));
    of_this.map(|(_, words)| words).collect::<Vec<_>>().join(" and ")
}

fn process_json(image: &Image, process: &Process) -> Value {
    let threads = process.threads.iter().map(|t| json!({"tid": t.tid, "name": t.name.to_string()}));
    let memory = image.spaces.get(process.space as usize).map(Memory::of).unwrap_or_default();
    let descriptors = descriptors(image, process);
    json!({
        "pid": process.pid,
        "exe": path(image, process.exe),
        "cwd": path(image, process.cwd),
        "threads": threads.collect::<Vec<_>>(),
        "memory": {
            "mappings": memory.mappings,
            "bytes": memory.bytes,
            "anonymous_bytes": memory.anonymous,
            "file_bytes": memory.file,
            "shared_bytes": memory.shared,
        },
        "namespaces": namespaces(image, process),
        "descriptors": descriptors.iter().map(|(fd, what)| json!({"fd": fd, "what": what})).collect::<Vec<_>>(),
    })
}

fn as_text(checkpoint: &Checkpoint, now: &Now, is_passed: bool, tails: &[Tail]) -> String {
    let image = &checkpoint.image;
    let meta = &image.meta;
    let mut fields = vec![
        ("checkpoint", format!("{}@{}", meta.job, meta.id)),
        ("taken", format!("{} ({})", output::utc(meta.taken_ns), output::age(meta.taken_ns))),
        ("command", output::command(&meta.command, usize::MAX)),
        ("memory", format!("{} in {} pages", output::bytes(meta.pages * PAGE), output::count(meta.pages))),
        ("written", output::bytes(meta.written_bytes)),
        ("pause", output::short(Duration::from_nanos(meta.pause_ns))),
        ("engine", meta.engine.clone()),
        ("host", format!("Linux {} {}", meta.host.kernel, meta.host.machine)),
    ];
    fields.extend(now.pace.as_ref().map(|pace| ("interval", crate::pace::why(pace))));
    fields.extend(now.paging.as_ref().and_then(paging::words).map(|words| ("limit", words)));
    fields.extend(meta.label.clone().map(|label| ("label", label)));
    fields
        .extend(meta.imported.as_ref().map(|from| ("imported", format!("it was {}@{}", from.job, from.id))));
    fields.extend(
        is_passed.then(|| ("passed over", "brought back from it, the job crashed again".to_string())),
    );
    let copies = image.paths.iter().filter(|file| file.copy.is_some()).count() as u64;
    fields.extend((copies > 0).then(|| ("copies", format!("{} in the store", files(copies)))));
    fields.extend(checkpoint.touch.as_ref().map(|touch| {
        let (bytes, runs) = (output::bytes(touch.bytes()), output::count(touch.len() as u64));
        ("touch set", format!("{bytes} in {runs} runs, {}", sources(touch)))
    }));
    // What restores of it have cut off.
    fields.extend(tails.iter().map(|tail| ("tail", tail_text(tail))));
    let mut text = String::new();
    for (name, value) in fields {
        let _ = writeln!(text, "{name:<12}{value}");
    }
    image.processes.iter().for_each(|p| process_text(&mut text, image, p));
    text.trim_end().to_string()
}

fn process_text(text: &mut String, image: &Image, process: &Process) {
    let memory = image.spaces.get(process.space as usize).map(Memory::of).unwrap_or_default();
    // Writing to a string does not fail.
    let _ = writeln!(text, "\nprocess {}", process.pid);
    let _ = writeln!(text, "  executable   {}", path(image, process.exe));
    let _ = writeln!(text, "  directory    {}", path(image, process.cwd));
    let _ = writeln!(text, "  threads      {}", threads(process));
    let _ = writeln!(
        text,
        "  mappings     {} of {} (anonymous {}, files {}, shared {})",
        output::count(memory.mappings),
        output::bytes(memory.bytes),
        output::bytes(memory.anonymous),
        output::bytes(memory.file),
        output::bytes(memory.shared),
    );
    if !process.namespaces.is_empty() {
        let _ = writeln!(text, "  namespaces   {}", namespaces(image, process).join(", "));
    }
    for (i, (fd, what)) in descriptors(image, process).iter().enumerate() {
        let head = if i == 0 { "descriptors" } else { "" };
        let _ = writeln!(text, "  {head:<11}{fd:>4}  {what}");
    }
}

/// Number of threads, and how many there are of each name, in order of appearance.
fn threads(process: &Process) -> String {
    let mut names: Vec<(String, usize)> = Vec::new();
    for thread in &process.threads {
        let name = thread.name.to_string();
        match names.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => names.push((name, 1)),
        }
    }
    let name =
        |(name, count): &(String, usize)| if *count > 1 { format!("{name} ×{count}") } else { name.clone() };
    let list: Vec<String> = names.iter().map(name).collect();
    format!("{} ({})", process.threads.len(), list.join(", "))
}

/// Sizes of mappings, bytes (of address space, not of stored pages).
#[derive(Default)]
struct Memory {
    mappings: u64,
    bytes: u64,
    anonymous: u64,
    file: u64,
    shared: u64,
}

impl Memory {
    fn of(space: &AddressSpace) -> Self {
        let mut memory = Self::default();
        for mapping in &space.mappings {
            memory.mappings += 1;
            memory.bytes += mapping.len();
            match mapping.backing {
                _ if mapping.shared => memory.shared += mapping.len(),
                Backing::File { .. } => memory.file += mapping.len(),
                _ => memory.anonymous += mapping.len(),
            }
        }
        memory
    }
}

/// Namespaces of the program's own that a process is in: kind, and row in the checkpoint.
fn namespaces(image: &Image, process: &Process) -> Vec<String> {
    let kind = |row: &u32| Some(format!("{} {row}", image.namespaces.get(*row as usize)?.kind()));
    process.namespaces.iter().filter_map(kind).collect()
}

fn path(image: &Image, index: u32) -> String {
    image.paths.get(index as usize).map_or("?".into(), |p| p.path.to_string())
}

fn usage(usage: stillpoint_image::Usage) -> &'static str {
    match usage {
        stillpoint_image::Usage::Path => "path",
        stillpoint_image::Usage::Read => "read",
        stillpoint_image::Usage::Write => "write",
    }
}

/// Descriptors of a process: number and what it is.
fn descriptors(image: &Image, process: &Process) -> Vec<(u32, String)> {
    let table = image.tables.get(process.table as usize);
    let list = table.map(|t| t.descriptors.as_slice()).unwrap_or_default();
    let what = |file: u32| image.files.get(file as usize).map_or("?".into(), |f| describe(image, &f.kind));
    list.iter().map(|d| (d.fd, what(d.file))).collect()
}

fn describe(image: &Image, kind: &FileKind) -> String {
    match kind {
        FileKind::Queue(queue) => match image.queues.get(*queue as usize) {
            Some(queue) => format!("message queue /{}", queue.name),
            None => "message queue".into(),
        },
        FileKind::EndedProc(p) => match image.paths.get(*p as usize) {
            Some(file) => format!("{} of a process that has ended", file.path),
            None => "?".into(),
        },
        FileKind::Path(p) | FileKind::Proc(p) => match image.paths.get(*p as usize) {
            Some(file) if file.deleted => format!("{} (deleted)", file.path),
            Some(file) => file.path.to_string(),
            None => "?".into(),
        },
        FileKind::Stdio(number) => output::stream(*number),
        FileKind::ControllingTerminal => "/dev/tty".into(),
        FileKind::HungUp => "terminal that was hung up".into(),
        FileKind::Pipe(p) => match image.pipes.get(*p as usize).and_then(|pipe| pipe.outside.as_deref()) {
            Some(who) => format!("pipe {p}, whose other end {who} had"),
            None => format!("pipe {p}"),
        },
        FileKind::Socket(s) => format!("socket {s}"),
        FileKind::PtyMaster(p) => format!("terminal {p}, master"),
        FileKind::PtySlave(p) => format!("terminal {p}"),
        FileKind::Memory(m) => format!("shared memory {m}"),
        FileKind::Event { .. } => "eventfd".into(),
        FileKind::Timer(_) => "timerfd".into(),
        FileKind::Signal(_) => "signalfd".into(),
        FileKind::Epoll(watches) => format!("epoll of {}", watches.len()),
        FileKind::Inotify(watches) => format!("inotify of {}", watches.len()),
        FileKind::Fanotify(group) => format!("fanotify of {}", group.marks.len()),
        FileKind::Ended { .. } => "pidfd of a process that has ended".into(),
        FileKind::Pid(pid) => format!("pidfd of {pid}"),
    }
}
