//! Lookups of many buffers in guest memory, most of them in the region of the one before.

use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress, Permissions,
};

use crate::{HostWrites, MemorySlice, WatchedMemory};

/// Guest memory, and the region that was found last.
pub(super) struct Regions<'m> {
    memory: &'m WatchedMemory,
    last: Option<&'m GuestRegionMmap<HostWrites>>,
}

impl<'m> Regions<'m> {
    pub(super) fn of(memory: &'m WatchedMemory) -> Self {
        Self { memory, last: None }
    }

    /// Returns the region that has all of a range, and the range's offset in it.
    fn find(
        &mut self,
        address: GuestAddress,
        length: u64,
    ) -> Option<(&'m GuestRegionMmap<HostWrites>, u64)> {
        let within = |region: &GuestRegionMmap<HostWrites>| {
            let offset = address.0.checked_sub(region.start_addr().0)?;
            let is_whole = offset.checked_add(length)? <= region.len();
            is_whole.then_some(offset)
        };
        if let Some(region) = self.last
            && let Some(offset) = within(region)
        {
            return Some((region, offset));
        }
        let region = self.memory.find_region(address)?;
        self.last = Some(region);
        Some((region, within(region)?))
    }

    /// Checks whether a range is in memory, in one region or several.
    pub(super) fn hold(&mut self, address: GuestAddress, length: u64) -> bool {
        // The regions are the guest's RAM, which may be read and written.
        self.find(address, length).is_some()
            || usize::try_from(length).is_ok_and(|length| {
                GuestMemory::check_range(self.memory, address, length, Permissions::ReadWrite)
            })
    }

    /// Adds the pieces of a range to `slices`. `None` if a part of it is not in memory.
    pub(super) fn slices(
        &mut self,
        address: GuestAddress,
        length: usize,
        slices: &mut Vec<MemorySlice<'m>>,
    ) -> Option<()> {
        if let Some((region, offset)) = self.find(address, length as u64) {
            let slice = region.get_slice(MemoryRegionAddress(offset), length);
            slices.push(slice.ok()?);
            return Some(());
        }
        for slice in GuestMemoryBackend::get_slices(self.memory, address, length) {
            slices.push(slice.ok()?);
        }
        Some(())
    }
}
