//! A checked chain of descriptors.
//!
//! A request of a megabyte has some 250 descriptors, so each costs little: an indirect table is
//! copied at once, and most buffers lie in the region of the one before.

use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Address, Bytes, GuestAddress};

use super::regions::Regions;
use crate::{MemorySlice, WatchedMemory};

/// The size of a descriptor in bytes: address (8), length (4), flags (2), next (2), little-endian.
pub(super) const DESCRIPTOR: usize = 16;
/// Its flags: there is a next one, the device writes the buffer, it names a table.
const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// The reason why a chain is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum ChainError {
    /// It loops, leaves its table, is longer than its queue or 4 GiB, or names an invalid indirect
    /// table.
    #[error("descriptors loop, leave their table or are too many")]
    Endless,
    /// A buffer is empty.
    #[error("a descriptor of zero length")]
    Empty,
    /// A buffer is not in the guest's memory.
    #[error("a buffer outside the guest's memory")]
    OutsideMemory,
    /// A buffer that the device reads follows one that it writes.
    #[error("a readable buffer after a writable one")]
    Order,
    /// There is an indirect table without the feature.
    #[error("an indirect table, which was not negotiated")]
    Indirect,
    /// The device requires the other direction.
    #[error("buffers of the wrong direction")]
    Direction,
    /// The device requires more bytes, or other content.
    #[error("a request of the wrong size or with wrong content")]
    Content,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Buffer {
    address: GuestAddress,
    length: u32,
}

/// A descriptor.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    buffer: Buffer,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn of(bytes: &[u8; DESCRIPTOR]) -> Self {
        let all = u128::from_le_bytes(*bytes);
        Self {
            buffer: Buffer {
                address: GuestAddress(all as u64),
                length: (all >> 64) as u32,
            },
            flags: (all >> 96) as u16,
            next: (all >> 112) as u16,
        }
    }
}

/// A table of descriptors.
struct Table<'m> {
    memory: &'m WatchedMemory,
    at: GuestAddress,
    /// The number of descriptors.
    length: u16,
    /// Copies of the first ones.
    copied: Vec<u8>,
}

impl<'m> Table<'m> {
    /// Returns the table of a queue.
    fn direct(memory: &'m WatchedMemory, at: GuestAddress, length: u16) -> Self {
        Self {
            memory,
            at,
            length,
            copied: Vec::new(),
        }
    }

    /// Returns the table that a descriptor names, of which a chain has at most `most`; `None` if it
    /// is not valid.
    fn indirect(memory: &'m WatchedMemory, named: Buffer, most: u16) -> Option<Self> {
        let bytes = usize::try_from(named.length).ok()?;
        let length = u16::try_from(bytes / DESCRIPTOR).ok()?;
        let mut copied = vec![0; bytes.min(usize::from(most) * DESCRIPTOR)];
        memory.read_slice(&mut copied, named.address).ok()?;
        bytes.is_multiple_of(DESCRIPTOR).then_some(Self {
            memory,
            at: named.address,
            length,
            copied,
        })
    }

    /// Returns a descriptor, if the table has it.
    fn get(&self, index: u16) -> Option<Descriptor> {
        if index >= self.length {
            return None;
        }
        let (copied, _) = self.copied.as_chunks();
        if let Some(bytes) = copied.get(usize::from(index)) {
            return Some(Descriptor::of(bytes));
        }
        let mut bytes = [0; DESCRIPTOR];
        let offset = u64::from(index) * DESCRIPTOR as u64;
        let at = self.at.checked_add(offset)?;
        self.memory.read_slice(&mut bytes, at).ok()?;
        Some(Descriptor::of(&bytes))
    }
}

/// A well-formed chain. Its buffers are in the guest's memory, and those that the device reads
/// precede those that it writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    head: u16,
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
}

impl Chain {
    /// Checks the chain that begins at descriptor `head` of a queue: of `size` descriptors, at
    /// `table`. `indirect`: its descriptors may name a table.
    pub(super) fn collect(
        memory: &WatchedMemory,
        table: GuestAddress,
        size: u16,
        head: u16,
        indirect: bool,
    ) -> Result<Self, ChainError> {
        let mut chain = Self {
            head,
            readable: Vec::new(),
            writable: Vec::new(),
        };
        let mut table = Table::direct(memory, table, size);
        let mut regions = Regions::of(memory);
        let (mut index, mut is_indirect, mut bytes) = (head, false, 0u32);
        // An indirect table may be longer than its queue, but the chain in it may not.
        let mut left = size;
        loop {
            let descriptor = table.get(index).ok_or(ChainError::Endless)?;
            let Descriptor {
                buffer,
                flags,
                next,
            } = descriptor;
            if flags & INDIRECT != 0 {
                if !indirect {
                    return Err(ChainError::Indirect);
                }
                let named = Table::indirect(memory, buffer, size).filter(|_| !is_indirect);
                table = named.ok_or(ChainError::Endless)?;
                (index, is_indirect) = (0, true);
                continue;
            }
            left = left.checked_sub(1).ok_or(ChainError::Endless)?;
            // Longer chains are invalid (virtio 1.2, 2.7.5.2).
            bytes = bytes
                .checked_add(buffer.length)
                .ok_or(ChainError::Endless)?;
            chain.add(&mut regions, buffer, flags & WRITE != 0)?;
            if flags & NEXT == 0 {
                return Ok(chain);
            }
            index = next;
        }
    }

    fn add(
        &mut self,
        regions: &mut Regions<'_>,
        buffer: Buffer,
        is_writable: bool,
    ) -> Result<(), ChainError> {
        if buffer.length == 0 {
            return Err(ChainError::Empty);
        }
        if !regions.hold(buffer.address, u64::from(buffer.length)) {
            return Err(ChainError::OutsideMemory);
        }
        if is_writable {
            self.writable.push(buffer);
        } else if self.writable.is_empty() {
            self.readable.push(buffer);
        } else {
            return Err(ChainError::Order);
        }
        Ok(())
    }

    /// Returns the number by which the driver knows the chain.
    #[must_use]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Returns the number of bytes for the device to read.
    #[must_use]
    pub fn readable(&self) -> usize {
        bytes(&self.readable)
    }

    /// Returns the number of bytes for the device to write.
    #[must_use]
    pub fn writable(&self) -> usize {
        bytes(&self.writable)
    }

    /// Reads from `offset` of the readable bytes. Returns the number of bytes read, at most
    /// `data`'s length.
    #[must_use]
    pub fn read(&self, memory: &WatchedMemory, offset: usize, data: &mut [u8]) -> usize {
        let mut done = 0usize;
        for (address, length) in parts(&self.readable, offset, data.len()) {
            let Some(target) = data.get_mut(done..done.saturating_add(length)) else {
                break;
            };
            if memory.read_slice(target, address).is_err() {
                break;
            }
            done += length;
        }
        done
    }

    /// Writes at `offset` of the writable bytes. Returns the number of bytes for which there was
    /// room.
    pub fn write(&self, memory: &WatchedMemory, offset: usize, data: &[u8]) -> usize {
        let mut done = 0usize;
        for (address, length) in parts(&self.writable, offset, data.len()) {
            let Some(source) = data.get(done..done.saturating_add(length)) else {
                break;
            };
            if memory.write_slice(source, address).is_err() {
                break;
            }
            done += length;
        }
        done
    }

    /// Returns the pieces of guest memory of `length` readable bytes from `offset` on; `None` if
    /// there are not so many.
    pub(super) fn sources<'m>(
        &self,
        memory: &'m WatchedMemory,
        offset: usize,
        length: usize,
    ) -> Option<Vec<MemorySlice<'m>>> {
        slices(&self.readable, memory, offset, length)
    }

    /// Returns the pieces of guest memory of the first `length` writable bytes; `None` if there are
    /// not so many.
    pub(super) fn targets<'m>(
        &self,
        memory: &'m WatchedMemory,
        length: usize,
    ) -> Option<Vec<MemorySlice<'m>>> {
        slices(&self.writable, memory, 0, length)
    }
}

/// Returns the pieces. Buffers that follow one another in memory are one piece.
fn slices<'m>(
    buffers: &[Buffer],
    memory: &'m WatchedMemory,
    offset: usize,
    length: usize,
) -> Option<Vec<MemorySlice<'m>>> {
    let mut left = length;
    let mut pieces: Vec<(GuestAddress, usize)> = Vec::with_capacity(buffers.len());
    for (address, part) in parts(buffers, offset, length) {
        left = left.checked_sub(part)?;
        match pieces.last_mut() {
            Some((start, done)) if start.checked_add(*done as u64) == Some(address) => {
                *done += part;
            }
            _ => pieces.push((address, part)),
        }
    }
    let mut slices = Vec::with_capacity(pieces.len());
    let mut regions = Regions::of(memory);
    for (address, length) in pieces {
        regions.slices(address, length, &mut slices)?;
    }
    (left == 0).then_some(slices)
}

fn bytes(buffers: &[Buffer]) -> usize {
    buffers
        .iter()
        .map(|buffer| buffer.length as usize)
        .fold(0, usize::saturating_add)
}

/// Returns the pieces of guest memory that hold up to `most` bytes from `offset` on.
fn parts(
    buffers: &[Buffer],
    offset: usize,
    most: usize,
) -> impl Iterator<Item = (GuestAddress, usize)> {
    let (mut skip, mut left) = (offset, most);
    buffers.iter().filter_map(move |buffer| {
        let length = buffer.length as usize;
        let inside = skip.min(length);
        skip -= inside;
        let take = (length - inside).min(left);
        left -= take;
        // The whole buffer is known to be in memory, so the sum is an address.
        let address = buffer.address.checked_add(inside as u64)?;
        (take > 0).then_some((address, take))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Tests buffers in two regions, one behind the other.
    #[test]
    fn buffers_that_follow_one_another_are_one_piece_of_each_region() {
        let ranges = [(0, 0x2000), (0x2000, 0x2000)];
        let ranges = ranges.map(|(start, length)| (GuestAddress(start), length));
        let memory = WatchedMemory::from_ranges(&ranges).unwrap();
        let buffers = [
            (0x1000, 0x800),
            (0x1800, 0x700),
            (0x1f00, 0x200),
            (0x3000, 0x10),
        ];
        for (number, (address, length)) in buffers.iter().enumerate() {
            let next = number + 1 < buffers.len();
            let flags = WRITE | if next { NEXT } else { 0 };
            let descriptor = u128::from(*address as u64)
                | u128::from(*length as u32) << 64
                | u128::from(flags) << 96
                | (number as u128 + 1) << 112;
            let at = GuestAddress((number * DESCRIPTOR) as u64);
            memory.write_slice(&descriptor.to_le_bytes(), at).unwrap();
        }
        let chain = Chain::collect(&memory, GuestAddress(0), 4, 0, false).unwrap();
        assert_eq!((chain.readable(), chain.writable()), (0, 0x1110));
        let pieces = |length| {
            let targets = chain.targets(&memory, length)?;
            Some(targets.iter().map(MemorySlice::len).collect::<Vec<_>>())
        };
        assert_eq!(pieces(0x1110), Some(vec![0x1000, 0x100, 0x10]));
        assert_eq!(pieces(0xfff), Some(vec![0xfff]));
        assert_eq!(pieces(0x1111), None);
        let shorter = Chain::collect(&memory, GuestAddress(0), 3, 0, false);
        assert_eq!(shorter, Err(ChainError::Endless));
    }
}
