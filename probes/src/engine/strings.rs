//! Reads the string that an argument points to, from the guest's memory at the hit.

use std::sync::atomic::{AtomicU64, Ordering};

use introspect::x86_64::paging::{AddressSpace, PAGE};
use introspect::x86_64::virtual_memory::read_virtual;
use introspect::{Gva, PAGE_WORDS, PhysicalMemory};

use super::plan::StringArgument;
use crate::event::{MAX_STRING, Recorder, StringState};

/// Puts the string at `address` into `record`, page by page, so that the part before a missing page
/// is kept.
pub(super) fn read(
    memory: &dyn PhysicalMemory,
    space: AddressSpace,
    address: Gva,
    wanted: &StringArgument,
    record: &mut Recorder<'_, '_>,
) {
    let mut buffer = [0; MAX_STRING];
    let most = wanted.length.min(MAX_STRING);
    let (length, state) = fill(
        memory,
        space,
        address,
        buffer.get_mut(..most).unwrap_or_default(),
    );
    let bytes = buffer.get(..length).unwrap_or_default();
    record.string(wanted.argument, bytes, state);
}

/// Reads the string at `address` into `buffer`. Returns its length there, and whether it is
/// complete. The bytes behind it are arbitrary.
pub(super) fn fill(
    memory: &dyn PhysicalMemory,
    space: AddressSpace,
    address: Gva,
    buffer: &mut [u8],
) -> (usize, StringState) {
    let mut done = 0;
    while done < buffer.len() {
        let Some(at) = address.0.checked_add(done as u64) else {
            return (done, StringState::Absent);
        };
        let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
        let end = buffer.len().min(done + in_page);
        let part = buffer.get_mut(done..end).unwrap_or_default();
        let Ok(nul) = fill_in_page(memory, space, Gva(at), part) else {
            return (done, StringState::Absent);
        };
        if let Some(nul) = nul {
            return (done + nul, StringState::Whole);
        }
        done = end;
    }
    (done, StringState::Cut)
}

/// The page is not there.
struct Absent;

/// Reads as much of a string as fits into `part`, all of which is in one page. Returns the place
/// of its NUL, behind which `part` may stay as it was.
fn fill_in_page(
    memory: &dyn PhysicalMemory,
    space: AddressSpace,
    gva: Gva,
    part: &mut [u8],
) -> Result<Option<usize>, Absent> {
    if let Some(words) = memory.page_at(space, gva) {
        let offset = (gva.0 % PAGE) as usize;
        return Ok(copy_string(words, offset, part));
    }
    read_virtual(memory, space, gva, part).map_err(|_| Absent)?;
    Ok(part.iter().position(|byte| *byte == 0))
}

/// Copies a string that begins at an offset in a page, word by word up to its NUL, whose place it
/// returns.
fn copy_string(page: &[AtomicU64; PAGE_WORDS], offset: usize, part: &mut [u8]) -> Option<usize> {
    let mut skipped = offset % 8;
    let mut done = 0;
    for word in page.get(offset / 8..).unwrap_or_default() {
        let left = part.get_mut(done..).unwrap_or_default();
        if left.is_empty() {
            break;
        }
        let word = u64::from_le(word.load(Ordering::Relaxed)) >> (8 * skipped);
        let length = left.len().min(8 - skipped);
        match left.first_chunk_mut() {
            Some(all) => *all = word.to_le_bytes(),
            None => {
                for (place, byte) in left.iter_mut().zip(word.to_le_bytes()) {
                    *place = byte;
                }
            }
        }
        // The shift has put zeros behind the first word's bytes.
        if let Some(nul) = first_zero(word).filter(|nul| *nul < length) {
            return Some(done + nul);
        }
        done += length;
        skipped = 0;
    }
    None
}

/// Returns the place of the lowest byte of a word that is 0.
fn first_zero(word: u64) -> Option<usize> {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const HIGH: u64 = ONES << 7;
    // Above the first zero byte, a borrow may mark others that are none.
    let zeros = word.wrapping_sub(ONES) & !word & HIGH;
    (zeros != 0).then(|| zeros.trailing_zeros() as usize / 8)
}

#[cfg(test)]
mod tests {
    use introspect::test_memory::{Flags, TestMemory};

    use super::*;

    #[test]
    fn a_string_in_a_page_is_copied_up_to_its_nul() {
        let whole = b"..\x01\x80/etc/passwd\x01";
        let text = [&whole[..], b"\0\xff\xffrest of the page.."].concat();
        let page: [AtomicU64; PAGE_WORDS] = std::array::from_fn(|at| {
            let chunk = text.chunks(8).nth(at).unwrap_or_default();
            let mut word = [0xff; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            AtomicU64::new(u64::from_le_bytes(word))
        });
        for start in 0..=whole.len() {
            for most in 0..24 {
                let mut part = vec![0xaa; most];
                let found = copy_string(&page, start, &mut part);
                let string = &whole[start..];
                let expected = &string[..string.len().min(most)];
                assert_eq!(&part[..expected.len()], expected, "{start} {most}");
                assert_eq!(found, (string.len() < most).then_some(string.len()));
            }
        }
    }

    #[test]
    fn a_string_is_read_as_far_as_it_is_there() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        let at = 0x7000_0000u64;
        memory.map(space, at, 0x18_0000, 4096, Flags::default());
        memory.write(0x18_0010, b"/etc/passwd\0rest");
        memory.write(0x18_0ffc, b"abcd");
        for (address, length, expected, state) in [
            (at + 0x10, 64, &b"/etc/passwd"[..], StringState::Whole),
            (at + 0x10, 4, b"/etc", StringState::Cut),
            (at + 0xffc, 64, b"abcd", StringState::Absent),
            (at + 0x1000, 64, b"", StringState::Absent),
            (0, 64, b"", StringState::Absent),
            (u64::MAX, 64, b"", StringState::Absent),
        ] {
            let mut buffer = vec![0; length];
            let found = fill(&memory, space, Gva(address), &mut buffer);
            assert_eq!(
                (&buffer[..found.0], found.1),
                (expected, state),
                "{address:#x}"
            );
        }
    }
}
