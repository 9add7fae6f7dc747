//! Restores original bytes in what the guest has copied: each is written only where the copied byte
//! is still in place.

use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::x86_64::virtual_memory::read_virtual;
use introspect::{Gpa, Gva};
use vmm::memory::GuestRam;
use vmm::trap::INT3;

/// A byte that differs between the guest's file and memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Original {
    /// The distance in bytes from the first byte that is copied.
    pub(super) at: u64,
    /// The byte in memory.
    pub(super) ours: u8,
    /// The byte in the file.
    pub(super) original: u8,
}

/// Converts int3s at physical addresses to distances from `start`.
pub(super) fn relative(originals: &[(Gpa, u8)], start: u64) -> Vec<Original> {
    let places = originals.iter().map(|(place, byte)| Original {
        at: place.0 - start,
        ours: INT3,
        original: *byte,
    });
    places.collect()
}

/// Restores original bytes over those of the engine. Returns their number.
pub(super) fn put_right(
    ram: &GuestRam,
    space: AddressSpace,
    places: impl Iterator<Item = (u64, Original)>,
) -> u64 {
    let mut done = 0;
    for (address, Original { ours, original, .. }) in places {
        let mut byte = [0];
        if read_virtual(ram, space, Gva(address), &mut byte).is_ok()
            && byte == [ours]
            && let Ok(place) = translate(ram, space, Gva(address))
            && ram.write_physical(place.gpa, &[original]).is_ok()
        {
            done += 1;
        }
    }
    done
}
