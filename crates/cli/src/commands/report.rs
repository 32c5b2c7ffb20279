//! `stillpoint report`: the history of a job as one page.

use crate::args::{Common, Report};
use crate::failure::{Failure, Result};
use crate::report::facts::Facts;
use crate::report::page;
use crate::{jobs, output};
use serde_json::json;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs the command.
pub fn run(common: &Common, args: &Report) -> Result<ExitCode> {
    let to_stdout = args.output.as_deref() == Some(Path::new("-"));
    if to_stdout && common.json {
        return Err(Failure::usage("--json and --output - both want standard output"));
    }
    let store = jobs::open_store(common.store.as_deref())?;
    let no_job = || {
        Failure::usage(format!("no job {} in {}", args.job, store.path().display()))
            .hint("stillpoint ls lists the jobs; --store DIR names another store")
    };
    let facts = Facts::of(&store, &args.job)?.ok_or_else(no_job)?;
    let page = page(&facts);
    if to_stdout {
        output::line(&page)?;
        return Ok(ExitCode::SUCCESS);
    }
    let path = args.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.html", args.job)));
    write(&path, page.as_bytes(), args.force)?;
    if common.json {
        let mut value = facts.json();
        value["file"] = json!(path.to_string_lossy());
        output::json(&value)?;
    } else {
        output::line(&format!("{}  {}", path.display(), output::bytes(page.len() as u64)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the file, beside it first where there is one that is to be replaced: a full disk does not cost the old one.
fn write(path: &Path, page: &[u8], force: bool) -> Result<()> {
    let failed = |e: std::io::Error| Failure::failed(format!("cannot write {}: {e}", path.display()));
    let replaces = force && path.symlink_metadata().is_ok_and(|m| m.is_file());
    if replaces {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}", std::process::id()));
        let beside = path.with_file_name(name);
        let written = create(&beside, false).and_then(|mut file| file.write_all(page));
        return written.and_then(|()| std::fs::rename(&beside, path)).map_err(|e| {
            let _ = std::fs::remove_file(&beside);
            failed(e)
        });
    }
    let mut file = create(path, force).map_err(|e| match e.kind() {
        ErrorKind::AlreadyExists => Failure::usage(format!("{} is there already", path.display()))
            .hint("--force replaces it; --output FILE names another, - standard output"),
        ErrorKind::NotFound | ErrorKind::IsADirectory | ErrorKind::PermissionDenied => {
            Failure::usage(failed(e).what)
        }
        _ => failed(e),
    })?;
    file.write_all(page).map_err(|e| {
        if !force {
            let _ = std::fs::remove_file(path); // it is ours
        }
        failed(e)
    })
}

/// Opens a file that is to be new; with `any`, also one that is none, such as a pipe.
fn create(path: &Path, any: bool) -> std::io::Result<File> {
    File::options().write(true).create_new(!any).create(any).truncate(any).open(path)
}
