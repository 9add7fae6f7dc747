//! Ranges of memory whose accesses a CPU reports by its debug registers (Intel SDM volume 3B,
//! 18.2).

use introspect::Gva;

/// The number of debug registers with an address.
pub(crate) const NUMBER: usize = 4;

/// The accesses that a watchpoint reports. The CPU cannot leave out writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Writes.
    Write,
    /// Reads and writes.
    ReadWrite,
}

/// A range of bytes whose accesses are reported. One address means the same bytes in all processes
/// that map something there, so a filter by task selects the hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Watchpoint {
    address: Gva,
    length: u8,
    access: Access,
}

/// The reason that a watchpoint cannot be set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    /// The length is none that the CPU has.
    #[error("a watchpoint has 1, 2, 4 or 8 bytes, not {length}")]
    Length {
        /// The length that was asked for.
        length: u64,
    },
    /// The address is not aligned to the length.
    #[error("a watchpoint of {length} bytes begins at a multiple of {length}, which {:#x} is not", address.0)]
    Alignment {
        /// The address that was asked for.
        address: Gva,
        /// The length in bytes.
        length: u8,
    },
    /// All debug registers are in use.
    #[error("all {available} watchpoints of the CPU are in use; remove one first")]
    NoneFree {
        /// The number of debug registers on this host.
        available: usize,
    },
    /// KVM reports no accesses.
    #[error(
        "this host's KVM reports no accesses of {who} to memory (see exotrace doctor), so no watchpoint can be set there"
    )]
    Silent {
        /// The guest, its programs or its kernel.
        who: &'static str,
    },
}

impl Watchpoint {
    /// Returns the watchpoint of `length` bytes at an address.
    ///
    /// # Errors
    /// If the length is not 1, 2, 4 or 8, or the address is not a multiple of it.
    pub fn new(address: Gva, length: u64, access: Access) -> Result<Self, WatchError> {
        let short = u8::try_from(length).ok();
        let Some(length) = short.filter(|length| matches!(length, 1 | 2 | 4 | 8)) else {
            return Err(WatchError::Length { length });
        };
        if !address.0.is_multiple_of(u64::from(length)) {
            return Err(WatchError::Alignment { address, length });
        }
        Ok(Self {
            address,
            length,
            access,
        })
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn address(&self) -> Gva {
        self.address
    }

    /// Checks whether an access to `length` bytes at `address` is reported.
    pub(crate) fn is_met(&self, address: u64, length: usize, writes: bool) -> bool {
        let last = address.saturating_add((length as u64).saturating_sub(1));
        let own = self.address.0..=self.address.0 + u64::from(self.length - 1);
        length > 0
            && (writes || self.access == Access::ReadWrite)
            && address <= *own.end()
            && *own.start() <= last
    }

    /// Returns the bits of DR7 that enable the watchpoint in a register (Intel SDM volume 3B,
    /// 18.2.4).
    pub(crate) fn control(&self, register: usize) -> u64 {
        let access = match self.access {
            Access::Write => 0b01,
            Access::ReadWrite => 0b11,
        };
        let length = match self.length {
            1 => 0b00,
            2 => 0b01,
            4 => 0b11,
            _ => 0b10,
        };
        2 << (2 * register) | (access | length << 2) << (16 + 4 * register)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_watchpoint_is_of_a_length_and_an_alignment_that_the_cpu_has() {
        for (address, length, fits) in [
            (0x1000, 8, true),
            (0x1004, 4, true),
            (0x1001, 1, true),
            (0x1004, 8, false),
            (0x1000, 3, false),
            (0x1000, 0, false),
            (0x1000, 1 << 32, false),
        ] {
            let made = Watchpoint::new(Gva(address), length, Access::Write);
            assert_eq!(made.is_ok(), fits, "{length} bytes at {address:#x}");
        }
    }

    #[test]
    fn dr7_is_that_of_the_manual() {
        let watch = |length, access| Watchpoint::new(Gva(0x1000), length, access).unwrap();
        assert_eq!(watch(1, Access::Write).control(0), 0x1_0002);
        assert_eq!(watch(8, Access::ReadWrite).control(3), 0xb000_0080);
        assert_eq!(watch(4, Access::Write).control(1), 0xd0_0008);
    }

    #[test]
    fn an_access_is_met_where_it_overlaps() {
        let watch = |access| Watchpoint::new(Gva(0x1004), 4, access).unwrap();
        for (address, length, writes, read_write, write) in [
            (0x1004, 4, true, true, true),
            (0x1004, 4, false, true, false),
            (0x1000, 4, true, false, false),
            (0x1000, 5, true, true, true),
            (0x1007, 1, true, true, true),
            (0x1008, 1, true, false, false),
            (u64::MAX, 8, true, false, false),
        ] {
            let of = |access| watch(access).is_met(address, length, writes);
            assert_eq!(
                (of(Access::ReadWrite), of(Access::Write)),
                (read_write, write),
                "{length} bytes at {address:#x}"
            );
        }
    }
}
