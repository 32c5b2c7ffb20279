//! Which pages of an address space are its own: neither shared nor as their mapping gives them by itself.

use crate::Result;
use stillpoint_image::{AddressSpace, Backing, Mapping, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::pagemap::{Category, Pagemap, Query, Run};
use stillpoint_linux::proc::Vma;
use stillpoint_store::Zeros;

/// A private mapping, as far as its pages are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it lies.
    pub range: Range,
    /// A page of zeros must be saved as such, because the mapping would read as something else without it: there is a
    /// file behind it.
    pub zeros_matter: bool,
    /// A page that looks swapped out and has not been written since it was protected is just that. Behind a file (or
    /// of huge pages), it may as well have been dropped while it was protected: the kernel leaves the same mark.
    pub swapped_is_clean: bool,
}

/// The private mappings of an address space.
pub fn spans(space: &AddressSpace) -> Vec<Span> {
    let private = space.mappings.iter().filter(|m| !m.shared);
    private.filter(|m| !matches!(m.backing, Backing::Special(_))).map(span_of_mapping).collect()
}

fn span_of_mapping(mapping: &Mapping) -> Span {
    let anonymous = mapping.backing == Backing::Anonymous;
    Span {
        range: Range { start: mapping.start, len: mapping.end - mapping.start },
        zeros_matter: !anonymous,
        swapped_is_clean: anonymous && mapping.huge_page == 0,
    }
}

/// The private mappings among those that `/proc/PID/maps` shows of a running program.
pub fn spans_of_maps(maps: &[Vma]) -> Vec<Span> {
    let private = maps.iter().filter(|v| !v.shared && !v.name.starts_with(b"[v"));
    private.map(span_of_vma).collect()
}

fn span_of_vma(vma: &Vma) -> Span {
    let huge = vma.name.starts_with(b"/anon_hugepage");
    let anonymous = vma.ino == 0 || huge;
    Span {
        range: Range { start: vma.start, len: vma.len() },
        zeros_matter: !anonymous,
        swapped_is_clean: anonymous && !huge,
    }
}

/// What becomes of pages of zeros in a span.
pub fn zeros(zeros_matter: bool) -> Zeros {
    if zeros_matter { Zeros::Record } else { Zeros::Omit }
}

/// Appends the pages of a span that are its own.
pub fn own_pages(pagemap: &Pagemap, span: &Span, ranges: &mut Vec<Range>) -> Result<()> {
    let mut runs: Vec<Run> = Vec::new();
    let Range { start, .. } = span.range;
    pagemap.scan(RemoteAddr(start), RemoteAddr(span.range.end()), span.query(), &mut runs)?;
    ranges.extend(runs.iter().map(range));
    Ok(())
}

/// A run as a range.
pub fn range(run: &Run) -> Range {
    Range { start: run.start, len: run.end - run.start }
}

impl Span {
    /// Pages that belong to the mapping alone. A page that was never written, or dropped by the program, is neither
    /// present nor swapped; a guard page looks swapped to kernels that do not know guards. Of a private mapping of a
    /// file, these are the pages that were copied on write; a copy of the zero page counts.
    pub fn query(&self) -> Query {
        let any = Category::PRESENT | Category::SWAPPED;
        let given = if self.zeros_matter { Category::FILE } else { Category::ZERO };
        Query { none: given | Category::GUARD, any, ..Query::default() }
    }
}

/// All guard regions (`MADV_GUARD_INSTALL`) in these places of an address space, ascending, across mappings.
pub fn guards(pagemap: &Pagemap, places: &[Range]) -> Result<Vec<Range>> {
    if !pagemap.knows_guards() {
        return Ok(Vec::new());
    }
    let mut runs = Vec::new();
    let query = Query { all: Category::GUARD, ..Query::default() };
    for place in places {
        pagemap.scan(RemoteAddr(place.start), RemoteAddr(place.end()), query, &mut runs)?;
    }
    Ok(runs.iter().map(range).collect())
}

/// The parts of ascending ranges that lie in `[start, end)`.
pub fn within(ranges: &[Range], start: u64, end: u64) -> Vec<Range> {
    Range { start, len: end - start }.parts_of(ranges).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_united() {
        let r = |start, len| Range { start, len };
        let all = vec![r(8, 4), r(0, 4), r(4, 2), r(9, 1), r(20, 1)];
        assert_eq!(Range::joined(all), vec![r(0, 6), r(8, 4), r(20, 1)]);
    }

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
