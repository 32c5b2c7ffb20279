//! Pages that a process has in common with its parent are stored once, and are those of each.

use crate::common::*;
use proptest::prelude::*;
use std::convert::Infallible;
use stillpoint_image::{AddressSpace, Extent, Image, Owner, PAGE, Place, Range};
use stillpoint_store::{Checkpoint, Store, Writer, Zeros};

/// Pages of a memory, more than a batch.
const PAGES: usize = 700;
const GENERATIONS: usize = 3;

/// Seeds of pages; 0: zeros.
type Seeds = Vec<u64>;

fn put_generation(writer: &mut Writer, generation: usize, seeds: &Seeds) {
    let fill = |batch: &[Range], buffer: &mut [u8]| {
        let pages = batch.iter().flat_map(|r| r.start / PAGE..r.end() / PAGE);
        for (page, bytes) in pages.zip(buffer.chunks_exact_mut(PAGE as usize)) {
            fill_page(page, seeds[page as usize], bytes);
        }
        Ok::<_, Infallible>(())
    };
    let all = Range { start: 0, len: PAGES as u64 * PAGE };
    let owner = Owner::Space(generation as u32);
    assert!(writer.put_parallel(owner, &[all], Zeros::Omit, &fill).is_ok(), "put");
}

/// Where each page of a generation is stored.
fn places(checkpoint: &Checkpoint, generation: usize) -> Vec<Option<Place>> {
    let mut places = vec![None; PAGES];
    for extent in checkpoint.pages.of(Owner::Space(generation as u32)) {
        for at in (extent.address..extent.end()).step_by(PAGE as usize) {
            places[(at / PAGE) as usize] = Some(extent.part(at, at + PAGE).place);
        }
    }
    places
}

fn holds(checkpoint: &Checkpoint, generation: usize, seeds: &Seeds) {
    let mut expected = vec![0; PAGE as usize];
    let mut found = vec![0; PAGE as usize];
    for (page, (place, seed)) in places(checkpoint, generation).into_iter().zip(seeds).enumerate() {
        assert_eq!(place.is_none(), *seed == 0, "page {page} of {generation}");
        let Some(place) = place else { continue };
        let (owner, address) = (Owner::Space(generation as u32), page as u64 * PAGE);
        checkpoint.reader.read(&Extent { owner, address, pages: 1, place }, &mut found).expect("read");
        fill_page(page as u64, *seed, &mut expected);
        assert!(found == expected, "page {page} of {generation}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn generations(
        first in prop::collection::vec(0_u64..4, PAGES),
        changes in prop::collection::vec(prop::collection::vec((0..PAGES, 0_u64..6), 0..200), GENERATIONS - 1),
        blind in prop::collection::vec(any::<bool>(), PAGES),
        again in any::<bool>(),
    ) {
        let mut all: Vec<Seeds> = vec![first];
        for changes in changes {
            let mut seeds = all[all.len() - 1].clone();
            changes.into_iter().for_each(|(page, seed)| seeds[page] = seed);
            all.push(seeds);
        }
        let folder = tempfile::tempdir().expect("folder");
        let store = Store::open(folder.path()).expect("open");
        let mut writer = store.begin("job").expect("begin");
        for generation in 0..GENERATIONS {
            let blind = blind.clone();
            let hint = move |batch: &[Range]| {
                let pages = batch.iter().flat_map(|r| r.start / PAGE..r.end() / PAGE);
                pages.map(|page| !blind[page as usize]).collect()
            };
            let parent = generation.checked_sub(1).map(|parent| Owner::Space(parent as u32));
            writer.relate(Owner::Space(generation as u32), parent, Box::new(hint));
        }
        for (generation, seeds) in all.iter().enumerate() {
            put_generation(&mut writer, generation, seeds);
        }
        if again {
            // What becomes of the parent afterwards is its own affair.
            all[0].iter_mut().for_each(|seed| *seed = (*seed + 1) % 5);
            put_generation(&mut writer, 0, &all[0]);
        }
        let spaces = vec![AddressSpace::default(); GENERATIONS];
        writer.commit(Image { spaces, ..image() }).expect("commit");
        let checkpoint = store.load("job", None).expect("load");
        all.iter().enumerate().for_each(|(generation, seeds)| holds(&checkpoint, generation, seeds));
        for child in if again { 2 } else { 1 }..GENERATIONS {
            let (theirs, own) = (places(&checkpoint, child - 1), places(&checkpoint, child));
            for page in (0..PAGES).filter(|&page| all[child][page] != 0 && !blind[page]) {
                let same = all[child - 1][page] == all[child][page];
                prop_assert_eq!(theirs[page] == own[page], same, "page {} of {}", page, child);
            }
        }
        prop_assert!(store.verify("job", None).expect("verify").problems.is_empty());
    }
}
