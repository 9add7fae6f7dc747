//! Bytes of ours in what the guest copies, and how a copy is put right: each is written over where it still stands as it was copied.

use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::x86_64::virtual_memory::read_virtual;
use introspect::{Gpa, Gva};
use vmm::memory::GuestRam;
use vmm::trap::INT3;

/// A byte that the guest's file has otherwise than memory has it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Original {
    /// As a distance from the first that is copied.
    pub(super) at: u64,
    /// What stands in memory.
    pub(super) ours: u8,
    /// What belongs there.
    pub(super) original: u8,
}

/// Places of int3s as distances from `start`.
pub(super) fn relative(originals: &[(Gpa, u8)], start: u64) -> Vec<Original> {
    let places = originals.iter().map(|(place, byte)| Original {
        at: place.0 - start,
        ours: INT3,
        original: *byte,
    });
    places.collect()
}

/// Writes bytes over those of ours; gives how many.
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
