//! Reads the string that an argument points to, from the guest's memory at the hit.

use introspect::x86_64::paging::{AddressSpace, PAGE};
use introspect::x86_64::virtual_memory::read_virtual;
use introspect::{Gva, PhysicalMemory};

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
/// complete.
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
        if read_virtual(memory, space, Gva(at), part).is_err() {
            return (done, StringState::Absent);
        }
        if let Some(nul) = part.iter().position(|byte| *byte == 0) {
            return (done + nul, StringState::Whole);
        }
        done = end;
    }
    (done, StringState::Cut)
}

#[cfg(test)]
mod tests {
    use introspect::test_memory::{Flags, TestMemory};

    use super::*;

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
