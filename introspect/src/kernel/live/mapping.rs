//! The mappings in the window of the kernel image, and their bytes.

use crate::x86_64::{AddressSpace, PAGE, TranslateError, translate};
use crate::{Gva, MemoryView, PhysicalMemory};

/// The start of the window: `__START_KERNEL_map` (arch/x86/include/asm/page_64_types.h). From here
/// the image is linked, and moved by KASLR, within `KERNEL_IMAGE_SIZE`, which is at most 1 GiB.
const START: u64 = 0xffff_ffff_8000_0000;
const END: u64 = START + (1 << 30);
/// The maximum number of ranges of different rights. An image has about ten, and modules may follow
/// inside the window.
const MAX_RANGES: usize = 16_384;

/// Adjacent pages with the same rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MappedRange {
    /// The address of the first byte.
    pub(super) start: u64,
    /// Size in bytes, a multiple of 4096.
    pub(super) length: u64,
    /// Whether the pages are writable.
    pub(super) writable: bool,
    /// Whether the pages are executable.
    pub(super) executable: bool,
}

impl MappedRange {
    /// Returns the first address past the range.
    pub(super) fn end(&self) -> u64 {
        self.start.saturating_add(self.length)
    }
}

/// Returns the mapped ranges of the window, ascending. Takes at most one page walk for each of its
/// 262,144 small pages.
pub(super) fn ranges(
    memory: &(impl PhysicalMemory + ?Sized),
    space: AddressSpace,
) -> Vec<MappedRange> {
    let mut ranges: Vec<MappedRange> = Vec::new();
    let mut at = START;
    while at < END && ranges.len() < MAX_RANGES {
        let page = match translate(memory, space, Gva(at)) {
            Ok(page) => page,
            Err(error) => {
                at = (at | (unmapped(&error) - 1)) + 1;
                continue;
            }
        };
        // A page of 1 GiB is no larger than the window and starts with it.
        let length = page.bytes_left_in_page();
        let found = MappedRange {
            start: at,
            length,
            writable: page.writable,
            executable: !page.no_execute,
        };
        match ranges.last_mut() {
            Some(last)
                if last.end() == at
                    && (last.writable, last.executable) == (found.writable, found.executable) =>
            {
                last.length += length;
            }
            _ => ranges.push(found),
        }
        at = at.saturating_add(length);
    }
    ranges
}

/// Returns the size in bytes of the unmapped area that this error implies around an address: a
/// power of two, and aligned to itself.
fn unmapped(error: &TranslateError) -> u64 {
    let entry_covers = |level: u8| 1u64 << (12 + 9 * u32::from(level.clamp(1, 3) - 1));
    match *error {
        TranslateError::NotPresent { level, .. } => entry_covers(level),
        // The whole table is missing, so skip what one entry of the next higher level covers.
        TranslateError::TableOutsideRam { level, .. } => entry_covers(level.saturating_add(1)),
        TranslateError::NoAccess { .. } => PAGE,
        TranslateError::NonCanonical { .. } | TranslateError::BadLevels { .. } => entry_covers(3),
    }
}

/// Reads the bytes of a range, at most `most` of them. Pages that cannot be read split it into
/// chunks. Each chunk starts at a page and comes with its address.
pub(super) fn chunks(
    view: MemoryView<'_>,
    range: MappedRange,
    most: usize,
) -> impl Iterator<Item = (Gva, Vec<u8>)> {
    let (mut at, mut left) = (range.start, most);
    std::iter::from_fn(move || {
        let (mut bytes, mut start) = (Vec::new(), at);
        while at < range.end() && left >= PAGE as usize {
            let done = bytes.len();
            if done == 0 {
                start = at;
                let rest = usize::try_from(range.end() - at).unwrap_or(usize::MAX);
                bytes.reserve_exact(rest.min(left));
            }
            bytes.resize(done + PAGE as usize, 0);
            let read = view.read(Gva(at), bytes.get_mut(done..).unwrap_or_default());
            at += PAGE;
            left -= PAGE as usize;
            if read.is_err() {
                bytes.truncate(done);
                if done > 0 {
                    break;
                }
            }
        }
        (!bytes.is_empty()).then_some((Gva(start), bytes))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PausedMemory;
    use crate::test_memory::{Flags, TestMemory};

    const LARGE: u64 = 2 << 20;

    /// Maps text of one large page, read-only data of two scattered small pages, a hole, data, and
    /// a page of a device.
    fn guest() -> (TestMemory, AddressSpace) {
        let mut memory = TestMemory::new(0, 8 << 20);
        let space = memory.address_space(4);
        let text = START + (16 << 20);
        let constant = Flags::default().no_execute();
        memory.map(space, text, 4 << 20, LARGE, Flags::default());
        memory.map(space, text + LARGE, 0x20_3000, PAGE, constant);
        memory.map(space, text + LARGE + PAGE, 0x20_1000, PAGE, constant);
        let data = text + 2 * LARGE;
        memory.map(space, data, 0x20_5000, PAGE, constant.writable());
        memory.map(space, data + PAGE, 0xfee0_0000, PAGE, constant.writable());
        memory.map(space, data + 2 * PAGE, 0x20_6000, PAGE, constant.writable());
        (memory, space)
    }

    #[test]
    fn ranges_join_pages_of_one_kind() {
        let (memory, space) = guest();
        let found: Vec<_> = ranges(&memory, space)
            .into_iter()
            .map(|r| (r.start - START, r.length, r.writable, r.executable))
            .collect();
        assert_eq!(
            found,
            [
                (16 << 20, LARGE, false, true),
                (18 << 20, 2 * PAGE, false, false),
                (20 << 20, 3 * PAGE, true, false),
            ]
        );
    }

    #[test]
    fn chunks_end_where_pages_are_no_ram() {
        let (mut memory, space) = guest();
        memory.write(0x20_3fff, b"a");
        memory.write(0x20_1000, b"b");
        let paused = PausedMemory::new(&memory);
        let view = paused.view(space);
        let ranges = ranges(&memory, space);
        let lengths = |index: usize, most: usize| -> Vec<usize> {
            let range = ranges.get(index).copied().into_iter();
            range
                .flat_map(|range| chunks(view, range, most))
                .map(|(_, chunk)| chunk.len())
                .collect()
        };
        assert_eq!(lengths(0, usize::MAX), [LARGE as usize]);
        assert_eq!(lengths(1, usize::MAX), [0x2000]);
        assert_eq!(lengths(1, 0x1fff), [0x1000]);
        assert_eq!(lengths(2, usize::MAX), [0x1000, 0x1000]);
        let joined = ranges
            .get(1)
            .and_then(|range| chunks(view, *range, usize::MAX).next());
        let (start, joined) = joined.unwrap_or_default();
        assert_eq!(start, Gva(START + (18 << 20)));
        assert_eq!(joined.get(0xfff..0x1001), Some(&b"ab"[..]));
    }

    #[test]
    fn tables_of_noise_are_walked_once() {
        // Every entry of every table points to the same table, so all of the window is mapped
        // repeatedly.
        let mut memory = TestMemory::new(0, 1 << 20);
        for entry in 0..512 {
            memory.write(0x1000 + entry * 8, &0x1003u64.to_le_bytes());
        }
        let space = AddressSpace {
            root: crate::Gpa(0x1000),
            levels: 4,
        };
        let found = ranges(&memory, space);
        assert_eq!(found.iter().map(|r| r.length).sum::<u64>(), END - START);
        let outside = AddressSpace {
            root: crate::Gpa(0x9999_0000),
            levels: 5,
        };
        assert_eq!(ranges(&memory, outside), []);
    }
}
