//! Flags of VMAs (include/linux/mm.h).

/// The `vm_flags`. The bits named here have kept their places from Linux 4.20 on; others move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmaFlags(pub u64);

impl VmaFlags {
    /// Readable (`VM_READ`).
    pub const READ: u64 = 1;
    /// Writable (`VM_WRITE`).
    pub const WRITE: u64 = 1 << 1;
    /// Executable (`VM_EXEC`).
    pub const EXEC: u64 = 1 << 2;
    /// Mapped with `MAP_SHARED`, even if the file is open only for reading (`VM_MAYSHARE`).
    pub const MAY_SHARE: u64 = 1 << 7;

    /// Checks whether all of `bits` are set.
    #[must_use]
    pub fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    /// Returns the permissions as in `/proc/PID/maps`: `r-xp`.
    #[must_use]
    pub fn permissions(self) -> [u8; 4] {
        let letter = |bit, letter| if self.has(bit) { letter } else { b'-' };
        [
            letter(Self::READ, b'r'),
            letter(Self::WRITE, b'w'),
            letter(Self::EXEC, b'x'),
            if self.has(Self::MAY_SHARE) {
                b's'
            } else {
                b'p'
            },
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_those_of_maps() {
        for (flags, expected) in [
            (0x0800_0071, b"r--p"),
            (0x0800_0075, b"r-xp"),
            (0x0810_0073, b"rw-p"),
            (0x00fb, b"rw-s"),
            (0x0000, b"---p"),
            (0x0080, b"---s"),
        ] {
            assert_eq!(&VmaFlags(flags).permissions(), expected, "{flags:#x}");
        }
    }
}
