//! Address ranges, the devices behind them, and a count of what hit none.
//!
//! One [`Bus`] serves port I/O (addresses up to 0xffff) and another one MMIO. Devices are added
//! while the machine is built; afterwards any number of vCPU threads may access it at once. Each
//! access locks the one device it is for. The caller splits repeated string I/O into single
//! accesses and completes the guest's instruction.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device as the bus sees it.
///
/// `offset` is relative to the range under which the device was added, in bytes, and
/// `offset + data.len()` never exceeds that range. Data is little-endian. The guest decides how
/// wide an access is and where it starts: any length must be answered.
pub trait BusDevice: Send {
    /// Fills the whole of `data`.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Takes `data`.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// A device that the bus and its owner share.
pub type SharedDevice = Arc<Mutex<dyn BusDevice>>;

/// Why a device could not be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// Two devices claim the same address.
    #[error(
        "device {new} at {new_base:#x} ({new_length} bytes) overlaps device {old} at {old_base:#x} \
         ({old_length} bytes): move one of them"
    )]
    Overlap {
        /// Name of the device that was to be added.
        new: &'static str,
        /// Its first address.
        new_base: u64,
        /// Its length in bytes.
        new_length: u64,
        /// Name of the device that is there.
        old: &'static str,
        /// Its first address.
        old_base: u64,
        /// Its length in bytes.
        old_length: u64,
    },
    /// A range of no bytes, or one that passes the end of the address space.
    #[error(
        "device {name}: a range of {length} bytes at {base:#x} is empty or passes the end of the \
         64-bit address space"
    )]
    InvalidRange {
        /// Name of the device.
        name: &'static str,
        /// First address asked for.
        base: u64,
        /// Length asked for, in bytes.
        length: u64,
    },
}

struct Slot {
    base: u64,
    /// Last address, inclusive: a range may end at the top of the address space.
    last: u64,
    name: &'static str,
    device: SharedDevice,
}

/// Distinct unknown addresses that are told apart; a guest may touch 2^64 of them.
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

/// Accesses to one address that no device answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownAccess {
    /// The address at which the accesses started.
    pub address: u64,
    /// Number of reads; each was answered with all-ones.
    pub reads: u64,
    /// Number of writes; each was dropped.
    pub writes: u64,
}

/// What a bus counted since it was made. Counts are exact.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BusStats {
    /// Accesses outside every device (or across a device's end), by address, ascending.
    /// The first 64 distinct addresses are listed.
    pub unknown: Vec<UnknownAccess>,
    /// Unknown reads of addresses beyond those listed.
    pub other_reads: u64,
    /// Unknown writes to addresses beyond those listed.
    pub other_writes: u64,
}

impl BusStats {
    /// All unknown accesses together.
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
    /// Sorted by `base`, disjoint. Not changed once vCPUs run (`insert` takes `&mut self`).
    slots: Vec<Slot>,
    /// Held for the time of one count only, never while a device is locked.
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
    /// A bus without devices.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `device` at `base`, for `length` bytes. `name` appears in errors.
    ///
    /// # Errors
    /// If the range is empty, passes the end of the address space, or overlaps another device's;
    /// the bus is unchanged then.
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

    /// The device that holds all of `length` bytes (at least one) at `address`, locked, and the offset.
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

    /// A guest's read. Where no device holds the whole access, `data` is filled with all-ones and
    /// the access is counted.
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

    /// A guest's write. Where no device holds the whole access, it is dropped and counted.
    pub fn write(&self, address: u64, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        match self.find(address, data.len()) {
            Some((mut device, offset)) => device.write(offset, data),
            None => self.count_unknown(address, true),
        }
    }

    /// What was counted so far.
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
