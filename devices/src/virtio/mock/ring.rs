//! A split ring as a driver manages it: virtio 1.2 section 2.7.

use std::collections::HashMap;

use vm_memory::{Bytes, GuestAddress};

use crate::WatchedMemory;
use crate::virtio::FEATURE_EVENT_INDEX;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// The number of descriptors of an indirect table.
const TABLE: u64 = 16;

/// A descriptor as in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// The GPA of the buffer.
    pub address: u64,
    /// The length of the buffer in bytes.
    pub length: u32,
    /// The flags: NEXT, WRITE, INDIRECT.
    pub flags: u16,
    /// The number of the next descriptor.
    pub next: u16,
}

impl Descriptor {
    /// Makes a buffer that the device reads.
    pub fn readable(address: u64, length: u32) -> Self {
        Self {
            address,
            length,
            flags: 0,
            next: 0,
        }
    }

    /// Makes a buffer that the device writes.
    pub fn writable(address: u64, length: u32) -> Self {
        Self {
            flags: WRITE,
            ..Self::readable(address, length)
        }
    }

    /// Writes the descriptor into a table.
    pub fn store(&self, memory: &WatchedMemory, table: u64, number: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        let at = table + u64::from(number) * 16;
        memory.write_slice(&bytes, GuestAddress(at)).unwrap();
    }
}

/// A chain that the device has used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Used {
    /// The number of its first descriptor.
    pub head: u16,
    /// The number of bytes written, as reported by the device.
    pub length: u32,
    /// The content of its writable buffers, up to that length.
    pub bytes: Vec<u8>,
    /// The buffers, for reuse.
    pub chain: Vec<Descriptor>,
}

/// The ring of one queue.
#[derive(Debug, Clone)]
pub struct Ring {
    /// The GPA of the descriptor table.
    pub descriptors: u64,
    /// The GPA of the available ring.
    pub available: u64,
    /// The GPA of the used ring.
    pub used: u64,
    /// The number of descriptors.
    pub size: u16,
    /// The available index.
    pub next: u16,
    tables: u64,
    event_index: bool,
    kicked: u16,
    seen: u16,
    free: Vec<u16>,
    chains: HashMap<u16, (Vec<u16>, Vec<Descriptor>)>,
}

impl Ring {
    pub(in crate::virtio) fn new(
        memory: &WatchedMemory,
        base: u64,
        size: u16,
        features: u64,
    ) -> Self {
        // Only the rings are cleared. Tables are written before they are used.
        let zeros = vec![0; 0x3000];
        memory.write_slice(&zeros, GuestAddress(base)).unwrap();
        Self {
            descriptors: base,
            available: base + 0x1000,
            used: base + 0x2000,
            tables: base + 0x4000,
            size,
            next: 0,
            event_index: features & FEATURE_EVENT_INDEX != 0,
            kicked: 0,
            seen: 0,
            free: (0..size).rev().collect(),
            chains: HashMap::new(),
        }
    }

    /// Returns the number of free descriptors.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    pub(in crate::virtio) fn add(
        &mut self,
        memory: &WatchedMemory,
        chain: &[Descriptor],
        indirect: bool,
    ) -> u16 {
        assert!(!chain.is_empty());
        let numbers: Vec<u16>;
        if indirect {
            let head = self.free.pop().unwrap();
            let table = self.tables + u64::from(head) * TABLE * 16;
            let order: Vec<u16> = (0..chain.len() as u16).collect();
            link(memory, table, &order, chain);
            let name = Descriptor {
                flags: INDIRECT,
                ..Descriptor::readable(table, chain.len() as u32 * 16)
            };
            name.store(memory, self.descriptors, head);
            numbers = vec![head];
        } else {
            numbers = self.free.split_off(self.free.len() - chain.len());
            link(memory, self.descriptors, &numbers, chain);
        }
        let head = numbers[0];
        self.chains.insert(head, (numbers, chain.to_vec()));
        self.publish(memory, head);
        head
    }

    /// Puts any head into the available ring.
    pub fn publish(&mut self, memory: &WatchedMemory, head: u16) {
        let at = self.available + 4 + u64::from(self.next % self.size) * 2;
        memory.write_obj(head.to_le(), GuestAddress(at)).unwrap();
        self.next = self.next.wrapping_add(1);
        self.set_index(memory, self.next);
    }

    /// Sets the available ring's index to any value.
    pub fn set_index(&mut self, memory: &WatchedMemory, index: u16) {
        let at = GuestAddress(self.available + 2);
        memory.write_obj(index.to_le(), at).unwrap();
    }

    fn word(&self, memory: &WatchedMemory, at: u64) -> u16 {
        u16::from_le(memory.read_obj(GuestAddress(at)).unwrap())
    }

    pub(super) fn wants_kick(&mut self, memory: &WatchedMemory) -> bool {
        let (new, old) = (self.next, self.kicked);
        self.kicked = new;
        if self.event_index {
            let event = self.word(memory, self.used + 4 + u64::from(self.size) * 8);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.word(memory, self.used) & 1 == 0
        }
    }

    /// Sets the index after which the driver wants an interrupt, with event index.
    pub fn set_used_event(&self, memory: &WatchedMemory, index: u16) {
        let at = self.available + 4 + u64::from(self.size) * 2;
        memory.write_obj(index.to_le(), GuestAddress(at)).unwrap();
    }

    /// Disables or enables interrupts, without event index.
    pub fn set_no_interrupt(&self, memory: &WatchedMemory, none: bool) {
        let at = GuestAddress(self.available);
        memory.write_obj(u16::from(none).to_le(), at).unwrap();
    }

    pub(super) fn next_used(&mut self, memory: &WatchedMemory) -> Option<Used> {
        if self.word(memory, self.used + 2) == self.seen {
            return None;
        }
        let at = self.used + 4 + u64::from(self.seen % self.size) * 8;
        let head: u32 = memory.read_obj(GuestAddress(at)).unwrap();
        let length: u32 = memory.read_obj(GuestAddress(at + 4)).unwrap();
        self.seen = self.seen.wrapping_add(1);
        self.set_used_event(memory, self.seen);
        let head = u16::try_from(u32::from_le(head)).unwrap();
        let (numbers, chain) = self.chains.remove(&head).unwrap_or_default();
        self.free.extend(numbers);
        let mut bytes = Vec::new();
        for descriptor in chain.iter().filter(|one| one.flags & WRITE != 0) {
            let left = (u32::from_le(length) as usize).saturating_sub(bytes.len());
            let mut part = vec![0; left.min(descriptor.length as usize)];
            let from = GuestAddress(descriptor.address);
            memory.read_slice(&mut part, from).unwrap();
            bytes.extend(part);
        }
        Some(Used {
            head,
            length: u32::from_le(length),
            bytes,
            chain,
        })
    }
}

/// Writes a chain to these descriptors of a table.
fn link(memory: &WatchedMemory, table: u64, numbers: &[u16], chain: &[Descriptor]) {
    for (at, (&number, descriptor)) in numbers.iter().zip(chain).enumerate() {
        let mut descriptor = *descriptor;
        if let Some(&next) = numbers.get(at + 1) {
            descriptor.flags |= NEXT;
            descriptor.next = next;
        }
        descriptor.store(memory, table, number);
    }
}
