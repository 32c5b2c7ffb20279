//! `stillpoint import`: an exported checkpoint comes into the store.

use crate::args::{Common, Import};
use crate::commands::export::{cannot, files, is_standard};
use crate::failure::{Failure, Result};
use crate::names::job_from;
use crate::progress::Bar;
use crate::{jobs, output};
use serde_json::json;
use std::fs::File;
use std::io::{BufReader, IsTerminal, Read};
use std::path::Path;
use std::process::ExitCode;
use stillpoint_archive::{Error, Imported};
use stillpoint_image::{Meta, PAGE};
use stillpoint_store::{Claim, Store};

/// Runs the command.
pub fn run(common: &Common, args: &Import) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let failure = |e: Error| failure(e, &args.file);
    let archive = stillpoint_archive::Import::open(source(&args.file)?).map_err(failure)?;
    let meta = archive.meta().clone();
    let claim = claim(&store, args.name.as_deref(), &meta)?;
    let job = claim.job().to_string();
    let bar = Bar::new("import", common.json);
    match archive.into_store(&store, &job, &bar) {
        Ok(done) => {
            drop(bar);
            tell(common, &store, &job, &meta, &done)
        }
        Err(e) => {
            // The name was taken for it alone.
            let _ = store.forget(claim);
            Err(failure(e))
        }
    }
}

fn source(file: &Path) -> Result<Box<dyn Read + Send>> {
    if is_standard(file) {
        let stdin = std::io::stdin();
        return match stdin.is_terminal() {
            true => Err(Failure::usage("an archive does not come from a terminal").hint("name a file")),
            false => Ok(Box::new(BufReader::with_capacity(1 << 20, File::from(duplicate()?)))),
        };
    }
    let open = File::open(file).map_err(|e| Failure::usage(format!("{}: {e}", file.display())))?;
    if open.metadata().is_ok_and(|m| m.is_dir()) {
        return Err(Failure::usage(format!("{} is a directory", file.display())));
    }
    Ok(Box::new(BufReader::with_capacity(1 << 20, open)))
}

/// Standard input, without the lock and the buffer that the library has for it.
fn duplicate() -> Result<rustix::fd::OwnedFd> {
    let stdin = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3);
    stdin.map_err(|e| Failure::failed(format!("standard input: {e}")))
}

/// The job that the checkpoint will belong to.
fn claim(store: &Store, name: Option<&str>, meta: &Meta) -> Result<Claim> {
    match name {
        Some(name) => {
            jobs::claim(store, name).map_err(|e| e.hint("choose another --name, or import it later"))
        }
        None => jobs::claim_new(store, &job_from(&meta.job)),
    }
}

fn tell(common: &Common, store: &Store, job: &str, from: &Meta, done: &Imported) -> Result<ExitCode> {
    let id = done.checkpoint.id;
    let bytes = done.checkpoint.pages * PAGE;
    if common.json {
        output::json(&json!({
            "job": job,
            "id": id,
            "from_job": from.job,
            "from_id": from.id,
            "taken": output::utc(from.taken_ns),
            "bytes": bytes,
            "pages": done.checkpoint.pages,
            "written_bytes": done.checkpoint.written_bytes,
            "files": done.files,
            "file_bytes": done.file_bytes,
            "store": store.path().display().to_string(),
        }))?;
    } else {
        let with = match done.files {
            0 => String::new(),
            n => format!(" and {}", files(n)),
        };
        let (memory, age) = (output::bytes(bytes), output::age(from.taken_ns));
        output::line(&format!("{job}@{id}  {memory}{with}, taken {age} as {}@{}", from.job, from.id))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn failure(error: Error, file: &Path) -> Failure {
    let name = if is_standard(file) { "standard input".into() } else { file.display().to_string() };
    match error {
        Error::Store(e) => jobs::store_failure(e),
        Error::Read(e) => cannot("read", Path::new(&name), &e),
        e if e.is_input() => Failure::usage(e).within(&name).hint("nothing of it was imported"),
        e => Failure::failed(e).within(&format!("import {name}")),
    }
}
