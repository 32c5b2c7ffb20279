//! Archives that were damaged, cut, added to, or made up: each gives an error that names what is wrong, and leaves nothing behind.

use proptest::prelude::*;
use std::convert::Infallible;
use std::io::{Cursor, Read};
use std::path::Path;
use stillpoint_archive::{Companion, Compression, Error, Import, export};
use stillpoint_image::{
    AddressSpace, FileTable, Image, Owner, PAGE, PathFile, Place, Process, Range, Thread, Usage,
};
use stillpoint_store::{Store, Zeros};

const SPACES: [Owner; 2] = [Owner::Space(0), Owner::Space(1)];

/// A page: some compress well, some not at all.
fn page(number: u64) -> Vec<u8> {
    let mut state = number + 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if number.is_multiple_of(2) { (state >> 33) as u8 } else { number as u8 | 1 }
    };
    (0..PAGE).map(next).collect()
}

/// A program with an executable, two address spaces, and pages that these have in common.
fn prepare(folder: &Path, pages: u64) -> Store {
    let exe = folder.join("program");
    std::fs::write(&exe, (0..30_000u32).map(|n| (n / 7) as u8).collect::<Vec<u8>>()).expect("write");
    use std::os::unix::fs::MetadataExt;
    let stat = exe.metadata().expect("metadata");
    let file = PathFile {
        path: exe.as_path().into(),
        dev: stat.dev(),
        ino: stat.ino(),
        mode: stat.mode(),
        size: stat.len(),
        mtime_ns: stat.mtime() * 1_000_000_000 + stat.mtime_nsec(),
        usage: Usage::Read,
        ..PathFile::default()
    };
    let thread = Thread { tid: 7, regs: vec![1; 216].into(), ..Thread::default() };
    let image = Image {
        processes: vec![Process { pid: 7, threads: vec![thread], ..Process::default() }],
        spaces: vec![AddressSpace::default(), AddressSpace::default()],
        tables: vec![FileTable::default()],
        paths: vec![file],
        ..Image::default()
    };
    let store = Store::open(&folder.join("store")).expect("open");
    let mut writer = store.begin("far").expect("begin");
    let range = Range { start: 0x10000, len: pages * PAGE };
    writer
        .put(SPACES[0], range, Zeros::Omit, |address, buffer| {
            for (i, out) in buffer.chunks_exact_mut(PAGE as usize).enumerate() {
                out.copy_from_slice(&page(address / PAGE + i as u64));
            }
            Ok::<_, Infallible>(())
        })
        .expect("put");
    writer.commit(image.clone()).expect("commit");
    // The second address space has some of the pages of the first, as they are.
    let mut writer = store.begin("far").expect("begin");
    let first = store.load("far", None).expect("load").pages.extents;
    let mut all = first.clone();
    all.extend(first.iter().take(2).map(|e| {
        let mut part = e.part(e.address, e.address + PAGE * u64::from(e.pages.min(3)));
        part.owner = SPACES[1];
        part
    }));
    writer.reuse(&all).expect("reuse");
    writer.commit(image).expect("commit");
    store
}

fn archive(store: &Store, compression: Compression) -> Vec<u8> {
    let checkpoint = store.load("far", None).expect("load");
    let companions = Companion::all_of(store, &checkpoint.image, true).expect("companions");
    export(&checkpoint, &companions, compression, Vec::new(), &()).expect("export").0
}

fn import(store: &Store, from: impl Read + Send) -> Result<(), Error> {
    Import::open(from)?.into_store(store, "near", &()).map(drop)
}

/// All that is in a folder, but locks and records of what has been cleared up.
fn contents(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut all = Vec::new();
    for entry in entries.flatten() {
        let (name, path) = (entry.file_name().into_string().expect("name"), entry.path());
        match path.is_dir() {
            true => all.extend(contents(&path)),
            false
                if ["writer.lock", "reader.lock", "name.lock", "ledger", "lock", "settled"]
                    .contains(&name.as_str()) => {}
            false => all.push(path.display().to_string()),
        }
    }
    all
}

/// A fresh store that nothing may be left in.
struct Near {
    folder: tempfile::TempDir,
    store: Store,
}

impl Near {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let store = Store::open(&folder.path().join("store")).expect("open");
        Near { folder, store }
    }

    fn refuses(&self, bytes: &[u8]) -> Error {
        let error = import(&self.store, bytes).expect_err("it is wrong");
        assert_eq!(contents(self.folder.path()), Vec::<String>::new(), "{error}");
        assert!(error.is_input(), "{error:?}");
        error
    }
}

#[test]
fn what_comes_is_what_went() {
    let far = tempfile::tempdir().expect("folder");
    let from = prepare(far.path(), 700);
    for compression in [Compression::None, Compression::Lz4, Compression::Zstd(1), Compression::default()] {
        let near = Near::new();
        let bytes = archive(&from, compression);
        // In as many pieces as there may be.
        struct Slowly<'a>(&'a [u8]);
        impl Read for Slowly<'_> {
            fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
                let most = out.len().min(997);
                self.0.read(&mut out[..most])
            }
        }
        import(&near.store, Slowly(&bytes)).expect("import");
        let (there, here) =
            (from.load("far", None).expect("load"), near.store.load("near", None).expect("load"));
        assert!(near.store.verify("near", None).expect("verify").problems.is_empty());
        for owner in SPACES {
            let pages = |checkpoint: &stillpoint_store::Checkpoint| {
                let mut all = Vec::new();
                for extent in checkpoint.pages.of(owner) {
                    let mut bytes = vec![0; extent.len() as usize];
                    checkpoint.reader.read(extent, &mut bytes).expect("read");
                    for (i, page) in bytes.chunks_exact(PAGE as usize).enumerate() {
                        all.push((extent.address + i as u64 * PAGE, page.to_vec()));
                    }
                }
                all
            };
            assert!(pages(&there) == pages(&here), "{owner}");
        }
        // What they have in common they have in common here.
        let place = |e: &stillpoint_image::Extent| match e.place {
            Place::Stored { segment, offset, skip, .. } => (segment, offset, skip),
            Place::Zero => (0, 0, 0),
        };
        assert_eq!(place(&here.pages.of(SPACES[0])[0]), place(&here.pages.of(SPACES[1])[0]));
        assert_eq!(here.image.meta.written_bytes, 700 * PAGE);
        let imported = here.image.meta.imported.as_ref().expect("it tells where it comes from");
        assert_eq!((imported.job.as_str(), imported.id), ("far", 2));
        let copy = near.store.copy_of(&here.image.paths[0]).expect("the executable came along");
        assert_eq!(
            std::fs::read(copy).expect("read"),
            std::fs::read(far.path().join("program")).expect("read")
        );
        // And on from here.
        let again = tempfile::tempdir().expect("folder");
        std::fs::remove_file(far.path().join("program")).expect("remove");
        let companions = Companion::all_of(&near.store, &here.image, false).expect("it has its own copies");
        assert_eq!(companions.len(), 1);
        let (bytes, _) = export(&here, &companions, compression, Vec::new(), &()).expect("export");
        let third = Store::open(again.path()).expect("open");
        import(&third, Cursor::new(bytes)).expect("import");
        assert!(third.copy_of(&third.load("near", None).expect("load").image.paths[0]).is_some());
        std::fs::write(
            far.path().join("program"),
            (0..30_000u32).map(|n| (n / 7) as u8).collect::<Vec<u8>>(),
        )
        .expect("write");
        let prepared = prepare_again(far.path());
        assert!(prepared, "the executable is another file now, and says so");
    }
}

/// Whether the executable, written anew, is refused by the checkpoint that knows the old one; then it is made the old one's equal.
fn prepare_again(folder: &Path) -> bool {
    let store = Store::open(&folder.join("store")).expect("open");
    let checkpoint = store.load("far", None).expect("load");
    let refused = matches!(Companion::all_of(&store, &checkpoint.image, true), Err(Error::Files(_)));
    store.remove_job("far").expect("remove");
    drop(prepare(folder, 700));
    refused
}

#[test]
fn any_flipped_bit_is_noticed() {
    let far = tempfile::tempdir().expect("folder");
    let bytes = archive(&prepare(far.path(), 12), Compression::default());
    let near = Near::new();
    // Every bit of the headers, and every so many of the rest.
    let every = if stillpoint_tests::tier::soaks() { 61 } else { 607 };
    let is_head = |bit: &usize| bit / 8 < 200 || bit / 8 + 80 > bytes.len();
    let bits = (0..bytes.len() * 8).filter(|bit| is_head(bit) || bit % every == 0);
    for bit in bits {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        near.refuses(&flipped);
    }
    import(&near.store, &*bytes).expect("as it was");
}

#[test]
fn a_part_is_called_one() {
    let far = tempfile::tempdir().expect("folder");
    let bytes = archive(&prepare(far.path(), 12), Compression::Lz4);
    let near = Near::new();
    let lengths = (0..200).chain((200..bytes.len()).step_by(379)).chain(bytes.len() - 80..bytes.len());
    for len in lengths {
        let error = near.refuses(&bytes[..len]);
        let is_short = matches!(error, Error::Truncated { .. }) || len < 8 && matches!(error, Error::Foreign);
        assert!(is_short, "{len}: {error}");
    }
    let more = [bytes.as_slice(), b"x"].concat();
    assert!(matches!(near.refuses(&more), Error::Trailing { .. }));
    assert!(matches!(near.refuses(b"something else entirely"), Error::Foreign));
    let twice = [bytes.as_slice(), &bytes].concat();
    assert!(matches!(near.refuses(&twice), Error::Trailing { .. }));
}

/// Puts the right checksums into headers that were changed, so that what they say gets to be looked at.
fn reseal(bytes: &mut [u8]) {
    let seal = |header: &mut [u8]| {
        let (body, crc) = header.split_at_mut(header.len() - 4);
        crc.copy_from_slice(&crc32fast::hash(body).to_le_bytes());
    };
    if bytes.len() < 64 {
        return;
    }
    seal(&mut bytes[..64]);
    let mut at = 64;
    while let Some(stored) =
        bytes.get(at + 4..at + 8).map(|b| u32::from_le_bytes(b.try_into().expect("four")) as usize)
    {
        if bytes.len() < at + 32 {
            return;
        }
        let end = (at + 32).saturating_add(stored);
        if let Some(body) = bytes.get(at + 32..end) {
            let crc = crc32fast::hash(body).to_le_bytes();
            bytes[at + 12..at + 16].copy_from_slice(&crc);
        }
        seal(&mut bytes[at..at + 32]);
        at = end;
    }
}

fn made_up() -> (Vec<u8>, tempfile::TempDir) {
    let far = tempfile::tempdir().expect("folder");
    (archive(&prepare(far.path(), 5), Compression::default()), far)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Bytes that say anything, under checksums that hold: an error, never a panic, nothing outside the store, nothing in it.
    #[test]
    fn whatever_it_says(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12), sealed in any::<bool>()) {
        let (bytes, _far) = made_up();
        let mut changed = bytes.clone();
        for (at, byte) in &changes {
            let at = at.index(changed.len());
            changed[at] = *byte;
        }
        if sealed {
            reseal(&mut changed);
        }
        if changed != bytes {
            Near::new().refuses(&changed);
        }
    }

    /// Headers that say anything.
    #[test]
    fn whatever_lengths_it_has(block in 0..6usize, at in 0..28usize, value: u32) {
        let (bytes, _far) = made_up();
        let mut changed = bytes.clone();
        let mut from = 0;
        for _ in 0..block {
            from = if from == 0 { 64 } else {
                from + 32 + u32::from_le_bytes(changed[from + 4..from + 8].try_into().expect("four")) as usize
            };
            if from + 32 > changed.len() {
                return Ok(());
            }
        }
        let at = from + at.min(28);
        changed[at..at + 4].copy_from_slice(&value.to_le_bytes());
        reseal(&mut changed);
        if changed != bytes {
            Near::new().refuses(&changed);
        }
    }

    #[test]
    fn noise(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let near = Near::new();
        near.refuses(&bytes);
        let mut named = b"STILLARC".to_vec();
        named.extend(&bytes);
        near.refuses(&named);
    }
}
