//! Which ranges of an address space hold contents of their own, and reading them.

use crate::Result;
use stillpoint_image::{AddressSpace, Backing, Mapping, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::pagemap::{Category, Pagemap, Query, Run};

/// A range of private pages to be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Where it lies.
    pub range: Range,
    /// Whether a page of zeros must be saved as such, because the mapping would read as something else without it.
    pub zeros_matter: bool,
}

/// The private pages of an address space that are not as their mapping would give them.
pub fn private_regions(pagemap: &Pagemap, space: &AddressSpace) -> Result<Vec<Region>> {
    let mut regions = Vec::new();
    let mut runs: Vec<Run> = Vec::new();
    for mapping in space.mappings.iter().filter(|m| !m.shared) {
        let Some(query) = own_pages(mapping) else { continue };
        runs.clear();
        pagemap.scan(RemoteAddr(mapping.start), RemoteAddr(mapping.end), query, &mut runs)?;
        let zeros_matter = !matches!(mapping.backing, Backing::Anonymous);
        regions.extend(
            runs.iter()
                .map(|r| Region { range: Range { start: r.start, len: r.end - r.start }, zeros_matter }),
        );
    }
    Ok(regions)
}

/// Pages that belong to the mapping alone. A page that was never written, or dropped by the program, is neither
/// present nor swapped; a guard page looks swapped to kernels that do not know guards.
fn own_pages(mapping: &Mapping) -> Option<Query> {
    let any = Category::PRESENT | Category::SWAPPED;
    match mapping.backing {
        Backing::Anonymous => Some(Query { none: Category::ZERO | Category::GUARD, any, ..Query::default() }),
        // Private mappings of files and objects: pages that were copied on write. A copy of the zero page counts.
        Backing::File { .. } | Backing::Object { .. } | Backing::Device { .. } => {
            Some(Query { none: Category::FILE | Category::GUARD, any, ..Query::default() })
        }
        Backing::Special(_) => None,
    }
}

/// All guard regions (`MADV_GUARD_INSTALL`) of an address space below `end`, ascending, across mappings.
pub fn guards(pagemap: &Pagemap, end: u64) -> Result<Vec<Range>> {
    if !pagemap.knows_guards() {
        return Ok(Vec::new());
    }
    let mut runs = Vec::new();
    let query = Query { all: Category::GUARD, ..Query::default() };
    pagemap.scan(RemoteAddr(0), RemoteAddr(end), query, &mut runs)?;
    Ok(runs.iter().map(|r| Range { start: r.start, len: r.end - r.start }).collect())
}

/// The parts of ascending ranges that lie in `[start, end)`.
pub fn within(ranges: &[Range], start: u64, end: u64) -> Vec<Range> {
    let first = ranges.partition_point(|r| r.end() <= start);
    let touching = ranges[first..].iter().take_while(|r| r.start < end);
    let cut = touching.map(|r| (r.start.max(start), r.end().min(end)));
    cut.map(|(start, end)| Range { start, len: end - start }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_to_a_mapping() {
        let r = |start, len| Range { start, len };
        let all = [r(0, 4), r(8, 8), r(20, 2)];
        assert_eq!(within(&all, 0, 4), [r(0, 4)]);
        assert_eq!(within(&all, 2, 12), [r(2, 2), r(8, 4)]);
        assert_eq!(within(&all, 4, 8), []);
        assert_eq!(within(&all, 12, 30), [r(12, 4), r(20, 2)]);
    }
}
