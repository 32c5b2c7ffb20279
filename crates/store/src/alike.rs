//! Pages that processes have in common because one was made as a copy of the other: each is stored once.
//!
//! A page of a process is compared, by its BLAKE3 hash, with what its parent had at the same address when that was put. So it
//! does not matter whether the two are still one page of memory, nor what became of the parent's since: what a page refers to
//! is stored, and is the same. Only pages that a hint says may be shared are hashed.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use stillpoint_image::{Extent, Owner, PAGE, Range};

/// Which pages of ranges may be one with those of another process, page by page. What it says wrongly costs time or room only.
pub type Hint = dyn Fn(&[Range]) -> Vec<bool> + Send + Sync;

type Hash = [u8; 16];

/// Whose pages may be as those of whom.
#[derive(Default)]
pub(crate) struct Alike {
    relatives: HashMap<Owner, Relative>,
    /// The parents of some.
    parents: HashSet<Owner>,
}

struct Relative {
    parent: Option<Owner>,
    hint: Box<Hint>,
    stored: Mutex<Stored>,
}

/// What was put, for those who may have the same.
#[derive(Default)]
struct Stored {
    extents: Vec<Extent>,
    /// Pages by their addresses: what they hold, and the number of the extent that they are in.
    pages: HashMap<u64, (Hash, u32)>,
}

impl Stored {
    /// Where the page at an address is stored, if it is this one.
    fn get(&self, at: u64, hash: &Hash) -> Option<Extent> {
        let (_, extent) = self.pages.get(&at).filter(|(theirs, _)| theirs == hash)?;
        Some(self.extents.get(*extent as usize)?.part(at, at + PAGE))
    }
}

/// Pages of a batch that may be shared, by their addresses: what they hold, and where that is stored already.
pub(crate) type Found = HashMap<u64, (Hash, Option<Extent>)>;

impl Alike {
    /// Pages of `owner` may be as those of `parent`, and those of others as these.
    pub fn relate(&mut self, owner: Owner, parent: Option<Owner>, hint: Box<Hint>) {
        self.parents.extend(parent);
        let stored = match self.relatives.remove(&owner) {
            Some(before) => before.stored,
            None => Mutex::default(),
        };
        self.relatives.insert(owner, Relative { parent, hint, stored });
    }

    /// Forgets where pages of an owner are stored: they are going to be put anew.
    pub fn forget(&mut self, owner: Owner) {
        self.relatives.get_mut(&owner).into_iter().for_each(|relative| relative.stored = Mutex::default());
    }

    /// Extents that pages may still refer to.
    pub fn extents(&self) -> Vec<Extent> {
        self.relatives.values().flat_map(|relative| relative.stored().extents.clone()).collect()
    }

    /// Looks at pages that are about to be put, whose contents are in `bytes`.
    pub fn find(&self, owner: Owner, batch: &[Range], bytes: &[u8]) -> Found {
        let Some(relative) = self.relatives.get(&owner) else { return Found::new() };
        let may_be_shared = (relative.hint)(batch);
        let addresses = batch.iter().flat_map(|r| (r.start..r.end()).step_by(PAGE as usize));
        let pages = addresses.zip(bytes.chunks_exact(PAGE as usize)).zip(may_be_shared);
        let hashed = pages.filter(|(_, shared)| *shared).map(|((at, page), _)| (at, (hash(page), None)));
        let mut found: Found = hashed.collect();
        if let Some(parent) = relative.parent.and_then(|parent| self.relatives.get(&parent)) {
            let stored = parent.stored();
            found.iter_mut().for_each(|(at, (hash, place))| *place = stored.get(*at, hash));
        }
        found
    }

    /// Notes where what was found has been stored.
    pub fn note(&self, owner: Owner, found: &Found, extents: impl Iterator<Item = Extent>) {
        let is_wanted = !found.is_empty() && self.parents.contains(&owner);
        let Some(relative) = self.relatives.get(&owner).filter(|_| is_wanted) else { return };
        let mut stored = relative.stored();
        for extent in extents {
            let number = stored.extents.len() as u32;
            stored.extents.push(extent);
            for at in (extent.address..extent.end()).step_by(PAGE as usize) {
                if let Some((hash, _)) = found.get(&at) {
                    stored.pages.insert(at, (*hash, number));
                }
            }
        }
    }
}

impl Relative {
    fn stored(&self) -> MutexGuard<'_, Stored> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn hash(page: &[u8]) -> Hash {
    let whole = *blake3::hash(page).as_bytes();
    std::array::from_fn(|i| whole[i])
}
