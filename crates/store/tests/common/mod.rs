//! Memory whose contents are known, to be put into checkpoints and compared with what comes back.
#![allow(dead_code)] // each test uses its part

pub mod power;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use stillpoint_image::{AddressSpace, Image, MemoryObject, Meta, Owner, PAGE, Place, Range};
use stillpoint_store::{Committed, Result, Store, Writer, Zeros};

pub const PAGE_BYTES: usize = PAGE as usize;
pub const SPACE: Owner = Owner::Space(0);

/// Pages by number, each told by a seed; seed 0 is a page of zeros.
pub type Memory = BTreeMap<u64, u64>;

/// Contents of a page: different for each page and seed, zeros for seed 0.
pub fn fill_page(page: u64, seed: u64, out: &mut [u8]) {
    let mut state = (seed << 32 | page) + 1;
    for word in out.chunks_exact_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        word.copy_from_slice(&if seed == 0 { 0 } else { state }.to_le_bytes());
    }
}

/// An image with one address space and one memory object.
pub fn image() -> Image {
    Image {
        meta: Meta { engine: "test".into(), ..Meta::default() },
        spaces: vec![AddressSpace::default()],
        objects: vec![MemoryObject::default()],
        ..Image::default()
    }
}

/// Puts a run of pages of one seed.
pub fn put(writer: &mut Writer, first: u64, pages: u64, seed: u64) -> Result<()> {
    put_for(SPACE, writer, first, pages, seed)
}

/// As [`put`], for any owner.
pub fn put_for(owner: Owner, writer: &mut Writer, first: u64, pages: u64, seed: u64) -> Result<()> {
    let range = Range { start: first * PAGE, len: pages * PAGE };
    let result = writer.put(owner, range, Zeros::Omit, |address, buffer| {
        for (i, page) in buffer.chunks_exact_mut(PAGE_BYTES).enumerate() {
            fill_page(address / PAGE + i as u64, seed, page);
        }
        Ok::<_, Infallible>(())
    });
    result.map_err(|e| match e {
        stillpoint_store::PutError::Store(e) => e,
        stillpoint_store::PutError::Fill(never) => match never {},
    })
}

/// A full checkpoint of a memory.
pub fn checkpoint(store: &Store, job: &str, memory: &Memory) -> Result<Committed> {
    let mut writer = store.begin(job)?;
    for (&page, &seed) in memory {
        put(&mut writer, page, 1, seed)?;
    }
    writer.commit(image())
}

/// A memory of `pages` pages from `first` on.
pub fn memory(first: u64, pages: u64, seed: u64) -> Memory {
    (first..first + pages).map(|page| (page, seed)).collect()
}

/// Compares what a checkpoint holds, page by page, with what it should.
pub fn assert_holds(store: &Store, job: &str, id: u64, expected: &Memory) {
    let checkpoint = store.load(job, Some(id)).unwrap_or_else(|e| panic!("{job}@{id}: {e}"));
    let mut expected: Memory =
        expected.iter().map(|(p, s)| (*p, *s)).filter(|(_, seed)| *seed != 0).collect();
    let mut right = vec![0; PAGE_BYTES];
    for extent in &checkpoint.pages.extents {
        let mut bytes = vec![0; extent.len() as usize];
        checkpoint.reader.read(extent, &mut bytes).unwrap_or_else(|e| panic!("{e}"));
        for (i, found) in bytes.chunks_exact(PAGE_BYTES).enumerate() {
            let page = extent.address / PAGE + i as u64;
            let seed = expected.remove(&page);
            if extent.place == Place::Zero {
                assert_eq!(seed, None, "{job}@{id}: page {page}");
                continue;
            }
            fill_page(
                page,
                seed.unwrap_or_else(|| panic!("{job}@{id}: page {page} is too much")),
                &mut right,
            );
            assert!(found == right, "{job}@{id}: page {page} is another");
        }
    }
    assert!(expected.is_empty(), "{job}@{id}: pages are missing: {expected:?}");
}

/// Names in a folder, in order.
pub fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.map(|e| e.expect("entry").file_name().into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

/// Checks that there is nothing in a job that no checkpoint needs.
pub fn assert_no_leftovers(store: &Store, job: &str) {
    let folder = store.path().join("jobs").join(job);
    let mut needed = Vec::new();
    for id in store.checkpoints(job).unwrap_or_default() {
        let checkpoint = store.load(job, Some(id)).unwrap_or_else(|e| panic!("{job}@{id}: {e}"));
        for extent in checkpoint.pages.extents {
            if let Place::Stored { segment, .. } = extent.place {
                needed.push(format!("{segment}.pages"));
            }
        }
    }
    needed.sort();
    needed.dedup();
    let mut segments = names(&folder.join("segments"));
    segments.retain(|name| name != "spare" && !name.ends_with(".spare"));
    assert_eq!(segments, needed, "segments");
    assert!(!folder.join("owes-room").exists(), "room is owed");
    for place in [folder.clone(), folder.join("checkpoints")] {
        let hidden: Vec<String> = names(&place).into_iter().filter(|n| n.starts_with('.')).collect();
        assert!(hidden.is_empty(), "{} holds {hidden:?}", place.display());
    }
}

/// Bytes in the segments of a job.
pub fn segment_bytes(store: &Store, job: &str) -> u64 {
    let folder = store.path().join("jobs").join(job).join("segments");
    let held = |file: std::fs::Metadata| file.len().min(file.blocks() * 512); // without holes
    names(&folder).iter().map(|name| held(folder.join(name).metadata().expect("segment"))).sum()
}
