//! `stillpoint export`: a checkpoint becomes one file.

use crate::args::{Common, Export};
use crate::failure::{Failure, Result};
use crate::progress::Bar;
use crate::{jobs, output};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use stillpoint_archive::{Companion, Error, Exported, export};
use stillpoint_image::{Meta, PAGE};

/// Runs the command.
pub fn run(common: &Common, args: &Export) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let name = &args.checkpoint;
    let checkpoint = store.load(&name.job, name.id).map_err(jobs::store_failure)?;
    let meta = &checkpoint.image.meta;
    let to = To::of(args)?;
    let companions = Companion::all_of(&store, &checkpoint.image, args.portable);
    let companions = companions.map_err(|e| failure(e, meta, &args.file))?;
    let bar = Bar::new("export", common.json);
    let write = |out: &mut dyn Write| {
        let out = BufWriter::with_capacity(1 << 20, out);
        let (_, done) = export(&checkpoint, &companions, args.compress, out, &bar)?;
        Ok(done)
    };
    let done = to.write(args.force, write, |e| failure(e, meta, &args.file))?;
    drop(bar);
    tell(common, args, meta, &done)
}

/// What goes to standard output if that is not what the archive goes to; there it goes to standard error.
fn tell(common: &Common, args: &Export, meta: &Meta, done: &Exported) -> Result<ExitCode> {
    let bytes = done.pages * PAGE;
    let text = match common.json {
        true => json!({
            "job": meta.job,
            "id": meta.id,
            "file": args.file.display().to_string(),
            "portable": done.files > 0,
            "bytes": bytes,
            "pages": done.pages,
            "files": done.files,
            "file_bytes": done.file_bytes,
            "archive_bytes": done.bytes,
        })
        .to_string(),
        false => {
            let files = match done.files {
                0 => String::new(),
                n => format!(" and {} in {}", output::bytes(done.file_bytes), files(n)),
            };
            let (memory, archive) = (output::bytes(bytes), output::bytes(done.bytes));
            format!("{}@{}  {memory}{files} exported as {archive}", meta.job, meta.id)
        }
    };
    match is_standard(&args.file) {
        true => output::note(&text),
        false => output::line(&text)?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn files(n: u64) -> String {
    if n == 1 { "1 file".into() } else { format!("{n} files") }
}

/// Whether `-` is meant.
pub(super) fn is_standard(file: &Path) -> bool {
    file.as_os_str() == "-"
}

/// Where an archive goes.
enum To {
    Standard,
    /// A FIFO or a device: it is written as it is.
    Special(PathBuf),
    /// A file that gets its name when it is complete.
    File(PathBuf),
}

impl To {
    fn of(args: &Export) -> Result<Self> {
        let path = &args.file;
        if is_standard(path) {
            let refused = "an archive is not for a terminal";
            let hint = "name a file, or pass it on: stillpoint export JOB - | ssh HOST stillpoint import -";
            return match std::io::stdout().is_terminal() {
                true => Err(Failure::usage(refused).hint(hint)),
                false => Ok(To::Standard),
            };
        }
        match path.symlink_metadata() {
            Ok(found) if found.file_type().is_fifo() || found.file_type().is_char_device() => {
                Ok(To::Special(path.clone()))
            }
            Ok(found) if found.is_dir() => Err(Failure::usage(format!("{} is a directory", path.display()))),
            Ok(_) if !args.force => Err(exists(path)),
            _ => Ok(To::File(path.clone())),
        }
    }

    fn write(
        self,
        force: bool,
        write: impl FnOnce(&mut dyn Write) -> Result<Exported, Error>,
        failure: impl Fn(Error) -> Failure,
    ) -> Result<Exported> {
        match self {
            To::Standard => write(&mut std::io::stdout().lock()).map_err(failure),
            To::Special(path) => {
                let open = File::options().write(true).open(&path);
                let mut file = open.map_err(|e| cannot("open", &path, &e))?;
                write(&mut file).map_err(failure)
            }
            To::File(path) => {
                let mut new = New::beside(&path)?;
                let done = write(&mut new.file).map_err(failure)?;
                new.name(&path, force)?;
                Ok(done)
            }
        }
    }
}

/// A file that has no name yet, or (on file systems that have no such files) a temporary one.
struct New {
    file: File,
    temporary: Option<PathBuf>,
}

impl New {
    fn beside(path: &Path) -> Result<Self> {
        let folder = folder(path);
        let (flags, mode) = (OFlags::WRONLY | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
        if let Ok(file) = rustix::fs::open(folder, flags | OFlags::TMPFILE, mode) {
            return Ok(Self { file: file.into(), temporary: None });
        }
        let temporary = temporary(path);
        let file = rustix::fs::open(&temporary, flags | OFlags::CREATE | OFlags::EXCL, mode);
        let file = file.map_err(|e| cannot("create", path, &e.into()))?;
        Ok(Self { file: file.into(), temporary: Some(temporary) })
    }

    /// Gives it its name, durably. Whatever had that before is only gone once this is there.
    fn name(mut self, path: &Path, force: bool) -> Result<()> {
        let failed = |e: rustix::io::Errno| match e {
            rustix::io::Errno::EXIST => exists(path),
            e => cannot("write", path, &e.into()),
        };
        self.file.sync_all().map_err(|e| cannot("write", path, &e))?;
        let link = |to: &Path| {
            let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            rustix::fs::linkat(CWD, own, CWD, to, AtFlags::SYMLINK_FOLLOW)
        };
        match (&self.temporary, force) {
            (None, false) => link(path).map_err(failed)?,
            (None, true) => {
                let temporary = temporary(path);
                link(&temporary).map_err(failed)?;
                self.temporary = Some(temporary.clone());
                rustix::fs::rename(&temporary, path).map_err(failed)?;
            }
            (Some(temporary), true) => rustix::fs::rename(temporary, path).map_err(failed)?,
            (Some(temporary), false) => {
                let renamed = rustix::fs::renameat_with(CWD, temporary, CWD, path, RenameFlags::NOREPLACE);
                match renamed {
                    // Not every file system can: then another one of this name may come in between.
                    Err(rustix::io::Errno::INVAL) if path.symlink_metadata().is_err() => {
                        rustix::fs::rename(temporary, path).map_err(failed)?;
                    }
                    Err(rustix::io::Errno::INVAL) => return Err(exists(path)),
                    other => other.map_err(failed)?,
                }
            }
        }
        self.temporary = None;
        File::open(folder(path)).and_then(|folder| folder.sync_all()).map_err(|e| cannot("write", path, &e))
    }
}

impl Drop for New {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = std::fs::remove_file(temporary);
        }
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

fn exists(path: &Path) -> Failure {
    Failure::usage(format!("{} exists", path.display())).hint("--force replaces it")
}

pub(super) fn cannot(action: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::failed(format!("cannot {action} {}: {error}", path.display()))
}

fn failure(error: Error, meta: &Meta, file: &Path) -> Failure {
    match error {
        Error::Store(e) => jobs::store_failure(e),
        Error::Files(files) => {
            let list: Vec<String> = files.iter().map(|f| format!("\n{f}")).collect();
            let what = format!("cannot export {}@{} with its files:{}", meta.job, meta.id, list.concat());
            Failure::refused(what)
                .hint("without --portable they stay behind, and are to be there where it is restored")
        }
        Error::Write(e) if is_standard(file) => {
            Failure::failed(format!("cannot write to standard output: {e}"))
        }
        Error::Write(e) => cannot("write", file, &e),
        other => Failure::failed(other).within(&format!("export {}@{}", meta.job, meta.id)),
    }
}
