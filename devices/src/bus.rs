//! Routes accesses to devices by address range, and counts those that hit no device.
//!
//! One [`Bus`] serves port I/O (addresses up to 0xffff) and another MMIO. Devices are added while
//! the machine is built. Afterwards any number of vCPU threads may access it concurrently. Each
//! access locks only the device that it is for. The caller splits repeated string I/O into single
//! accesses and completes the guest's instruction.
//! accesses and completes the guest's instruction.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device on the bus.
///
/// `offset` is relative to the range under which the device was added, in bytes. `offset +
/// data.len()` never exceeds that range. Data is little-endian. The guest determines the width and
/// the start of an access, so a device must handle any length.
pub trait BusDevice: Send {
    /// Fills the whole of `data`.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Writes `data` to the device.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// A device that the bus and its owner share.
pub type SharedDevice = Arc<Mutex<dyn BusDevice>>;

/// The reason why a device could not be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// Two devices claim the same address.
    #[error(
        "device {new} at {new_base:#x} ({new_length} bytes) overlaps device {old} at {old_base:#x} \
         ({old_length} bytes): move one of them"
    )]
    Overlap {
        /// The name of the device to be added.
        new: &'static str,
        /// The first address of the device to be added.
        new_base: u64,
        /// The length of the device to be added, in bytes.
        new_length: u64,
        /// The name of the present device.
        old: &'static str,
        /// The first address of the present device.
        old_base: u64,
        /// The length of the present device, in bytes.
        old_length: u64,
    },
    /// The range is empty, or passes the end of the address space.
    #[error(
        "device {name}: a range of {length} bytes at {base:#x} is empty or passes the end of the \
         64-bit address space"
    )]
    InvalidRange {
        /// The name of the device.
        name: &'static str,
        /// The first address of the requested range.
        base: u64,
        /// The length of the requested range, in bytes.
        length: u64,
    },
}

struct Slot {
    base: u64,
    /// The last address, inclusive because a range may end at the top of the address space.
    last: u64,
    name: &'static str,
    device: SharedDevice,
}

/// The maximum number of unknown addresses that are counted separately. A guest may access 2^64 of
/// them.
const MAX_UNKNOWN_ADDRESSES: usize = 64;

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    reads: u64,
    writes: u64,
}

impl Counts {
    fn add(&mut self, write: bool) {
        let count = if write {
            &mut self.writes
        } else {
            &mut self.reads
        };
        *count = count.saturating_add(1);
    }
}

#[derive(Debug, Default)]
struct Unknown {
    by_address: BTreeMap<u64, Counts>,
    others: Counts,
}

impl Unknown {
    fn add(&mut self, address: u64, write: bool) {
        if let Some(counts) = self.by_address.get_mut(&address) {
            counts.add(write);
        } else if self.by_address.len() < MAX_UNKNOWN_ADDRESSES {
            self.by_address.entry(address).or_default().add(write);
        } else {
            self.others.add(write);
        }
    }
}

/// The accesses to one address that belongs to no device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownAccess {
    /// The address at which the accesses started.
    pub address: u64,
    /// The number of reads. Each returned all-ones.
    pub reads: u64,
    /// The number of writes. Each was dropped.
    pub writes: u64,
}

/// The counts of a bus since it was made. They are exact.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BusStats {
    /// Accesses outside every device (or across a device's end), ascending by address. Only the
    /// first 64 distinct addresses are listed.
    pub unknown: Vec<UnknownAccess>,
    /// The number of unknown reads of addresses that are not listed.
    pub other_reads: u64,
    /// The number of unknown writes to addresses that are not listed.
    pub other_writes: u64,
}

impl BusStats {
    /// Returns the number of all unknown accesses.
    #[must_use]
    pub fn unknown_total(&self) -> u64 {
        self.unknown
            .iter()
            .flat_map(|access| [access.reads, access.writes])
            .chain([self.other_reads, self.other_writes])
            .fold(0, u64::saturating_add)
    }
}

/// One address space of devices.
#[derive(Default)]
pub struct Bus {
    /// The slots, sorted by `base` and disjoint. They do not change once vCPUs run (`insert` takes
    /// `&mut self`).
    slots: Vec<Slot>,
    /// The counts. Locked for one count only, never while a device is locked.
    unknown: Mutex<Unknown>,
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.slots.iter().map(|slot| {
                let range = format!("{:#x}..={:#x}", slot.base, slot.last);
                (slot.name, range)
            }))
            .finish()
    }
}

impl Bus {
    /// Makes a bus without devices.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `device` at `base`, for `length` bytes. `name` appears in errors.
    ///
    /// # Errors
    /// If the range is empty, passes the end of the address space, or overlaps another device's.
    /// The bus is then unchanged.
    pub fn insert(
        &mut self,
        name: &'static str,
        base: u64,
        length: u64,
        device: SharedDevice,
    ) -> Result<(), BusError> {
        let last = length
            .checked_sub(1)
            .and_then(|span| base.checked_add(span))
            .ok_or(BusError::InvalidRange { name, base, length })?;
        let position = self.slots.partition_point(|slot| slot.last < base);
        if let Some(old) = self.slots.get(position)
            && old.base <= last
        {
            return Err(BusError::Overlap {
                new: name,
                new_base: base,
                new_length: length,
                old: old.name,
                old_base: old.base,
                old_length: (old.last - old.base).saturating_add(1),
            });
        }
        let slot = Slot {
            base,
            last,
            name,
            device,
        };
        self.slots.insert(position, slot);
        Ok(())
    }

    /// Locks the device that holds all of `length` bytes (at least one) at `address`. Returns it
    /// and the offset.
    fn find(
        &self,
        address: u64,
        length: usize,
    ) -> Option<(MutexGuard<'_, dyn BusDevice + 'static>, u64)> {
        let span = u64::try_from(length).ok()?.checked_sub(1)?;
        let end = address.checked_add(span)?;
        let position = self.slots.partition_point(|slot| slot.last < address);
        let slot = self.slots.get(position)?;
        if address < slot.base || slot.last < end {
            return None;
        }
        let device = slot.device.lock().unwrap_or_else(PoisonError::into_inner);
        Some((device, address - slot.base))
    }

    fn count_unknown(&self, address: u64, write: bool) {
        self.unknown
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .add(address, write);
    }

    /// Performs a guest's read. If no device holds the whole access, `data` is filled with all-ones
    /// and the access is counted.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        if data.is_empty() {
            return;
        }
        match self.find(address, data.len()) {
            Some((mut device, offset)) => device.read(offset, data),
            None => {
                data.fill(0xff);
                self.count_unknown(address, false);
            }
        }
    }

    /// Performs a guest's write. If no device holds the whole access, it is dropped and counted.
    pub fn write(&self, address: u64, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        match self.find(address, data.len()) {
            Some((mut device, offset)) => device.write(offset, data),
            None => self.count_unknown(address, true),
        }
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn stats(&self) -> BusStats {
        let unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        BusStats {
            unknown: unknown
                .by_address
                .iter()
                .map(|(&address, counts)| UnknownAccess {
                    address,
                    reads: counts.reads,
                    writes: counts.writes,
                })
                .collect(),
            other_reads: unknown.others.reads,
            other_writes: unknown.others.writes,
        }
    }
}

#[cfg(test)]
mod tests;
