//! `stillpoint rm` and `stillpoint prune`: checkpoints are removed, and their room is given back.

use crate::args::{CheckpointName, Common, Prune, Rm};
use crate::failure::{Failure, Result};
use crate::{jobs, output};
use serde_json::json;
use std::process::ExitCode;
use stillpoint_image::Image;
use stillpoint_restore::files::{is_anything_kept, let_go};
use stillpoint_store::{Freed, Store};

/// Runs `rm`.
pub fn rm(common: &Common, args: &Rm) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let CheckpointName { job, id } = &args.checkpoint;
    match id {
        Some(id) => {
            let kept = Kept::of(&store, job, &[*id]);
            let freed = store.remove(job, *id).map_err(jobs::store_failure)?;
            kept.let_go(&freed.checkpoints);
            tell(common, job, &[freed])
        }
        None => remove_job(common, &store, job, args.force),
    }
}

/// Runs `prune`.
pub fn prune(common: &Common, args: &Prune) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let keep = usize::try_from(args.keep).unwrap_or(usize::MAX);
    let kept = Kept::of(&store, &args.job, &store.checkpoints(&args.job).map_err(jobs::store_failure)?);
    let freed = store.prune(&args.job, keep).map_err(jobs::store_failure)?;
    kept.let_go(&freed.checkpoints);
    tell(common, &args.job, &[freed])
}

/// Keeps only the newest checkpoints of a job that will have more of them.
pub(super) fn roll(store: &Store, job: &str, keep: u64) -> Result<()> {
    let kept = Kept::of(store, job, &store.checkpoints(job).map_err(jobs::store_failure)?);
    let freed = store.roll(job, usize::try_from(keep).unwrap_or(usize::MAX)).map_err(jobs::store_failure)?;
    kept.let_go(&freed.checkpoints);
    match freed.unfinished {
        Some(why) => Err(jobs::store_failure(why)),
        None => Ok(()),
    }
}

/// Checkpoints for whose restore sockets are kept.
struct Kept(Vec<Image>);

impl Kept {
    fn of(store: &Store, job: &str, ids: &[u64]) -> Self {
        let ids = if is_anything_kept() { ids } else { &[] };
        let images = ids.iter().filter_map(|id| Some(store.load(job, Some(*id)).ok()?.image));
        Kept(images.filter(|image| image.kept.is_some()).collect())
    }

    /// Lets go of what was kept for those that have been removed.
    fn let_go(&self, removed: &[u64]) {
        self.0.iter().filter(|image| removed.contains(&image.meta.id)).for_each(let_go);
    }
}

fn remove_job(common: &Common, store: &Store, job: &str, force: bool) -> Result<ExitCode> {
    let ids = store.checkpoints(job).map_err(jobs::store_failure)?;
    let kept = Kept::of(store, job, &ids);
    let Some(record) = jobs::running(store, job)? else {
        store.remove_job(job).map_err(jobs::store_failure)?;
        kept.let_go(&ids);
        let answer = json!({"job": job, "removed": ids, "job_removed": true});
        return finish(common, &answer, &format!("{job}: removed with {}", checkpoints(ids.len())));
    };
    if !force {
        return Err(Failure::usage(format!("job {job} is running, as process {}", record.pid)).hint(
            format!("stillpoint rm --force {job} removes its checkpoints and leaves the process alone"),
        ));
    }
    let freed: stillpoint_store::Result<Vec<Freed>> = ids.iter().map(|&id| store.remove(job, id)).collect();
    let freed = freed.map_err(jobs::store_failure)?;
    freed.iter().for_each(|freed| kept.let_go(&freed.checkpoints));
    tell(common, job, &freed)
}

fn tell(common: &Common, job: &str, freed: &[Freed]) -> Result<ExitCode> {
    let ids: Vec<u64> = freed.iter().flat_map(|f| &f.checkpoints).copied().collect();
    let bytes: u64 = freed.iter().map(|f| f.bytes).sum();
    let notes: Vec<String> =
        freed.iter().filter_map(|f| f.unfinished.as_ref()).map(ToString::to_string).collect();
    let text = format!("{job}: removed {}, {} given back", checkpoints(ids.len()), output::bytes(bytes));
    notes.iter().for_each(|n| output::note(&format!("stillpoint: some room could not be given back: {n}")));
    finish(common, &json!({"job": job, "removed": ids, "bytes": bytes, "notes": notes}), &text)
}

fn finish(common: &Common, answer: &serde_json::Value, text: &str) -> Result<ExitCode> {
    if common.json {
        output::json(answer)?
    } else {
        output::line(text)?
    }
    Ok(ExitCode::SUCCESS)
}

fn checkpoints(n: usize) -> String {
    if n == 1 { "1 checkpoint".into() } else { format!("{n} checkpoints") }
}
