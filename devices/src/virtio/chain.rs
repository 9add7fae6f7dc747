//! A checked chain of descriptors.

use crate::{MemorySlice, WatchedMemory};
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, GuestMemoryBackend, Permissions};

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

/// A well-formed chain. Its buffers are in the guest's memory, and those that the device reads
/// precede those that it writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    head: u16,
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
}

impl Chain {
    /// Checks a chain of a queue of `size` descriptors.
    pub(super) fn collect(
        memory: &WatchedMemory,
        size: u16,
        descriptors: DescriptorChain<&WatchedMemory>,
    ) -> Result<Self, ChainError> {
        let mut chain = Self {
            head: descriptors.head_index(),
            readable: Vec::new(),
            writable: Vec::new(),
        };
        let mut last: Option<Descriptor> = None;
        // An indirect table may be longer than its queue, but the chain in it may not.
        for (at, descriptor) in (0..=usize::from(size)).zip(descriptors) {
            if at == usize::from(size) {
                return Err(ChainError::Endless);
            }
            chain.add(memory, descriptor)?;
            last = Some(descriptor);
        }
        // The iterator ends silently if a chain is truncated. Its last descriptor then names a
        // successor.
        match last {
            Some(descriptor) if !descriptor.has_next() => Ok(chain),
            _ => Err(ChainError::Endless),
        }
    }

    fn add(&mut self, memory: &WatchedMemory, descriptor: Descriptor) -> Result<(), ChainError> {
        let buffer = Buffer {
            address: descriptor.addr(),
            length: descriptor.len(),
        };
        let access = if descriptor.is_write_only() {
            Permissions::Write
        } else {
            Permissions::Read
        };
        if buffer.length == 0 {
            return Err(ChainError::Empty);
        }
        let length = usize::try_from(buffer.length).map_err(|_| ChainError::OutsideMemory)?;
        if !GuestMemory::check_range(memory, buffer.address, length, access) {
            return Err(ChainError::OutsideMemory);
        }
        if descriptor.is_write_only() {
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

fn slices<'m>(
    buffers: &[Buffer],
    memory: &'m WatchedMemory,
    offset: usize,
    length: usize,
) -> Option<Vec<MemorySlice<'m>>> {
    let mut slices = Vec::with_capacity(buffers.len());
    let mut left = length;
    for (address, part) in parts(buffers, offset, length) {
        // Every access was checked when the chain was collected.
        for slice in GuestMemoryBackend::get_slices(memory, address, part) {
            slices.push(slice.ok()?);
        }
        left = left.checked_sub(part)?;
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
