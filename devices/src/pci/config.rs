//! The configuration space of one PCI function: header, base address registers and capabilities.
//!
//! Source: PCI Local Bus Specification 3.0, chapter 6. A function has its addresses from the start,
//! as firmware would have assigned them. A driver may write its base address registers, as it does
//! to learn their sizes. The function stays where it is.

use serde::{Deserialize, Serialize};

/// The size of configuration space in bytes. What PCI Express adds beyond reads as zero.
pub const CONFIG_LENGTH: usize = 256;

const VENDOR: usize = 0x00;
const DEVICE: usize = 0x02;
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION: usize = 0x08;
const CLASS: usize = 0x09;
const BARS: usize = 0x10;
const SUBSYSTEM_VENDOR: usize = 0x2c;
const SUBSYSTEM: usize = 0x2e;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
/// The first byte that a capability may occupy.
const FIRST_CAPABILITY: usize = 0x40;

/// Memory decoding, bus mastering and no INTx: the bits of the command register that a driver may
/// set.
const COMMAND_WRITABLE: u16 = 0x0406;
/// The status register's bit for a list of capabilities.
const HAS_CAPABILITIES: u16 = 0x0010;
/// A base address register of memory, 64 bits wide.
const MEMORY_64: u32 = 0x4;

/// The identity of a function.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// The vendor and device ids.
    pub ids: (u16, u16),
    /// The subsystem's vendor and device ids.
    pub subsystem: (u16, u16),
    /// The revision.
    pub revision: u8,
    /// The class code: base class, subclass, programming interface.
    pub class: [u8; 3],
}

/// The configuration space of one function.
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    bytes: [u8; CONFIG_LENGTH],
    /// The bits that a driver may write.
    writable: [u8; CONFIG_LENGTH],
    /// The place of the next capability, and of the byte that links to it.
    next: (usize, usize),
}

/// The content of configuration space in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigState {
    /// All bytes.
    pub bytes: Vec<u8>,
}

impl ConfigSpace {
    /// Makes the space of a function without memory and capabilities.
    #[must_use]
    pub fn new(identity: &Identity) -> Self {
        let mut space = Self {
            bytes: [0; CONFIG_LENGTH],
            writable: [0; CONFIG_LENGTH],
            next: (FIRST_CAPABILITY, CAPABILITIES),
        };
        let [base, sub, interface] = identity.class;
        space.set(VENDOR, &identity.ids.0.to_le_bytes());
        space.set(DEVICE, &identity.ids.1.to_le_bytes());
        space.set(SUBSYSTEM_VENDOR, &identity.subsystem.0.to_le_bytes());
        space.set(SUBSYSTEM, &identity.subsystem.1.to_le_bytes());
        space.set(REVISION, &[identity.revision]);
        space.set(CLASS, &[interface, sub, base]);
        space.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        space.allow(INTERRUPT_LINE, &[0xff]);
        space
    }

    /// Sets base address registers 0 and 1 to `size` bytes of memory at `address`. `size` is a
    /// power of two of at least 16.
    pub fn set_memory(&mut self, address: u64, size: u64) {
        let mask = !size.saturating_sub(1);
        let bar = address & mask | u64::from(MEMORY_64);
        self.set(BARS, &bar.to_le_bytes());
        self.allow(BARS, &(mask & !0xf).to_le_bytes());
    }

    /// Adds a capability, and returns its place. `body` begins behind the two bytes of id and link.
    /// A capability for which there is no room is left out.
    pub fn add_capability(&mut self, id: u8, body: &[u8]) -> usize {
        let (place, link) = self.next;
        let end = place + 2 + body.len();
        let Ok(next) = u8::try_from(place) else {
            return 0;
        };
        if end > CONFIG_LENGTH {
            return 0;
        }
        self.set(STATUS, &HAS_CAPABILITIES.to_le_bytes());
        self.set(link, &[next]);
        self.set(place, &[id, 0]);
        self.set(place + 2, body);
        self.next = (end.next_multiple_of(4), place + 1);
        place
    }

    /// Lets a driver write these bits at `place`.
    pub fn allow(&mut self, place: usize, bits: &[u8]) {
        let range = place..place.saturating_add(bits.len());
        if let Some(writable) = self.writable.get_mut(range) {
            writable.copy_from_slice(bits);
        }
    }

    /// Sets bytes, also those that a driver may not write.
    pub fn set(&mut self, place: usize, bytes: &[u8]) {
        let range = place..place.saturating_add(bytes.len());
        if let Some(present) = self.bytes.get_mut(range) {
            present.copy_from_slice(bytes);
        }
    }

    /// Reads a word.
    #[must_use]
    pub fn word(&self, place: usize) -> u16 {
        let mut word = [0; 2];
        self.read(place, &mut word);
        u16::from_le_bytes(word)
    }

    /// Reads bytes; those beyond the space are zero.
    pub fn read(&self, place: usize, data: &mut [u8]) {
        data.fill(0);
        for (to, from) in data.iter_mut().zip(self.bytes.iter().skip(place)) {
            *to = *from;
        }
    }

    /// Writes the bits that a driver may write.
    pub fn write(&mut self, place: usize, data: &[u8]) {
        let present = self.bytes.iter_mut().zip(&self.writable).skip(place);
        for ((byte, writable), new) in present.zip(data) {
            *byte = *byte & !writable | new & writable;
        }
    }

    /// Returns the state to save.
    #[must_use]
    pub fn state(&self) -> ConfigState {
        ConfigState {
            bytes: self.bytes.to_vec(),
        }
    }

    /// Restores what a driver has written. Everything else is as the function was made.
    pub fn restore(&mut self, state: &ConfigState) {
        self.write(0, &state.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        ConfigSpace::new(&Identity {
            ids: (0x1af4, 0x1042),
            subsystem: (0x1af4, 2),
            revision: 1,
            class: [1, 0x80, 0],
        })
    }

    fn double(space: &ConfigSpace, place: usize) -> u32 {
        let mut bytes = [0; 4];
        space.read(place, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn a_driver_reads_the_identity_and_cannot_change_it() {
        let mut space = space();
        space.write(0, &[0; CONFIG_LENGTH]);
        assert_eq!(double(&space, 0), 0x1042_1af4);
        assert_eq!(double(&space, 8), 0x0180_0001);
        assert_eq!(double(&space, 0x2c), 0x0002_1af4);
        space.write(0, &[0xff; CONFIG_LENGTH]);
        assert_eq!(
            double(&space, 4),
            0x0406,
            "only the command register's bits"
        );
    }

    #[test]
    fn a_driver_learns_the_size_of_memory_as_linux_does() {
        let mut space = space();
        space.set_memory(0xe100_8000, 0x8000);
        let (low, high) = (double(&space, 0x10), double(&space, 0x14));
        assert_eq!((low, high), (0xe100_8004, 0));
        space.write(0x10, &[0xff; 8]);
        let size = u64::from(double(&space, 0x14)) << 32 | u64::from(double(&space, 0x10));
        assert_eq!(!(size & !0xf) + 1, 0x8000);
        space.write(0x10, &low.to_le_bytes());
        space.write(0x14, &high.to_le_bytes());
        assert_eq!(double(&space, 0x10), 0xe100_8004);
    }

    #[test]
    fn capabilities_are_a_list_that_ends() {
        let mut space = space();
        assert_eq!(space.word(STATUS) & HAS_CAPABILITIES, 0);
        let first = space.add_capability(9, &[16, 1, 0]);
        let second = space.add_capability(0x11, &[0; 10]);
        assert_eq!(space.add_capability(9, &[0; CONFIG_LENGTH]), 0, "no room");
        let mut place = double(&space, CAPABILITIES) as usize & 0xff;
        let mut found = Vec::new();
        while place != 0 {
            found.push((space.word(place) as u8, place));
            place = usize::from(space.word(place) >> 8);
        }
        assert_eq!(found, [(9, first), (0x11, second)]);
        assert_eq!(first % 4 + second % 4, 0);
    }

    #[test]
    fn a_restored_space_has_what_the_driver_wrote_and_nothing_else() {
        let mut space = space();
        space.write(COMMAND, &[6, 4]);
        let mut state = space.state();
        state.bytes[0] = 0;
        let mut restored = self::space();
        restored.restore(&state);
        assert_eq!(restored.bytes, space.bytes);
        restored.restore(&ConfigState { bytes: vec![1; 9] });
        assert_eq!(restored.word(VENDOR), 0x1af4);
    }
}
