//! The common part of the fuzz targets: moves read from the input.
#![forbid(unsafe_code)]

use devices::virtio::mock::{BUFFERS, MEMORY, RINGS};

/// The input. After its end, zeros follow.
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    /// Reads the next bytes.
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let count = N.min(self.0.len());
        let (head, rest) = self.0.split_at(count);
        out[..count].copy_from_slice(head);
        self.0 = rest;
        out
    }

    /// Reads the next byte.
    pub fn byte(&mut self) -> u8 {
        self.bytes::<1>()[0]
    }

    /// Reads the next 16 bits.
    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    /// Reads the next 32 bits.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    /// Reads an address of guest memory that is usually meaningful.
    pub fn address(&mut self) -> u64 {
        let offset = u64::from(self.short());
        match self.byte() % 4 {
            0 => BUFFERS + offset,
            1 => RINGS + offset * 8,
            2 => MEMORY as u64 - offset,
            _ => u64::from_le_bytes(self.bytes()),
        }
    }
}
