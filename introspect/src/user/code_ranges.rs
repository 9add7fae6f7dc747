//! The link-time addresses of an object that hold code.

use super::object_file::ObjectFile;

/// The ranges of addresses, ascending and disjoint.
#[derive(Debug, Default)]
pub(super) struct CodeRanges(Vec<(u64, u64)>);

impl CodeRanges {
    /// Collects the ranges of the sections if there are section headers, else of the segments.
    /// Marks such as `_etext` are after them.
    pub(super) fn of(object: &ObjectFile<'_>) -> Self {
        let sections = object.sections().iter().filter(|section| section.is_code());
        let mut ranges: Vec<_> = sections.map(|s| (s.address, s.size)).collect();
        if ranges.is_empty() {
            let segments = object.segments().iter().filter(|segment| segment.is_code());
            ranges = segments.map(|s| (s.address, s.memory_size)).collect();
        }
        Self::new(ranges)
    }

    /// Makes ranges of starts and sizes, in any order.
    fn new(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.sort_unstable();
        let mut apart: Vec<(u64, u64)> = Vec::new();
        for (start, size) in ranges {
            let end = start.saturating_add(size);
            match apart.last_mut() {
                Some(last) if start < last.1 => last.1 = last.1.max(end),
                _ => apart.push((start, end)),
            }
        }
        Self(apart)
    }

    /// Returns the first address after the code that holds `address`.
    pub(super) fn end_of(&self, address: u64) -> Option<u64> {
        let after = self.0.partition_point(|(start, _)| *start <= address);
        let (_, end) = self.0.get(after.checked_sub(1)?)?;
        (address < *end).then_some(*end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_are_one() {
        let code = CodeRanges::new(vec![
            (0x50, 8),
            (0x10, 0x10),
            (0x18, 0x10),
            (0x1a, 1),
            (u64::MAX, 9),
        ]);
        for (address, end) in [
            (0xf, None),
            (0x10, Some(0x28)),
            (0x27, Some(0x28)),
            (0x28, None),
            (0x57, Some(0x58)),
            (u64::MAX, None),
        ] {
            assert_eq!(code.end_of(address), end, "{address:#x}");
        }
    }
}
