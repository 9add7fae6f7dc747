//! The ioctl requests of dt(4): direction, size of the argument and number in one word, as `<sys/ioccom.h>` packs them.
//!
//! `direction | (size & 0x1fff) << 16 | 'D' << 8 | number`, with 0x80000000 for arguments that go in and 0x40000000 for those
//! that come out. Since sizes differ, two requests have another code in the older ABI. Requests that are no ioctls of
//! OpenBSD have no direction (`wire`): they cannot be mistaken for one.

use super::abi::{self, Abi};

const IN: u32 = 0x8000_0000;
const OUT: u32 = 0x4000_0000;
/// Bits of the size.
const SIZE_MASK: usize = 0x1fff;
const GROUP: u32 = b'D' as u32;

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request {
    /// `DTIOCGPLIST`: the probes.
    ListProbes,
    /// `DTIOCGSTATS`: the session's counts.
    Stats,
    /// `DTIOCRECORD`: start or stop.
    Record,
    /// `DTIOCPRBENABLE`: add a probe.
    Enable,
    /// `DTIOCPRBDISABLE`: take one away.
    Disable,
    /// `DTIOCGARGS`: the types of a probe's arguments.
    Arguments,
    /// `DTIOCRDVNODE`: the file behind an address of a process.
    Resolve,
}

impl Request {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::ListProbes,
        Self::Stats,
        Self::Record,
        Self::Enable,
        Self::Disable,
        Self::Arguments,
        Self::Resolve,
    ];

    fn number(self) -> u32 {
        match self {
            Self::ListProbes => 1,
            Self::Stats => 2,
            Self::Record => 3,
            Self::Enable => 4,
            Self::Disable => 5,
            Self::Arguments => 6,
            // 7 was DTIOCGETAUXBASE and is retired.
            Self::Resolve => 8,
        }
    }

    fn direction(self) -> u32 {
        match self {
            Self::ListProbes | Self::Arguments | Self::Resolve => IN | OUT,
            Self::Stats => OUT,
            Self::Record | Self::Enable | Self::Disable => IN,
        }
    }

    /// Bytes of the argument.
    #[must_use]
    pub fn size(self, abi: Abi) -> usize {
        match self {
            Self::ListProbes => abi::LIST_SIZE,
            Self::Stats => abi.stat_size(),
            Self::Record => abi::RECORD_SIZE,
            Self::Enable | Self::Disable => abi.request_size(),
            Self::Arguments => abi::ARGUMENTS_SIZE,
            Self::Resolve => abi::RESOLVE_SIZE,
        }
    }

    /// Whether the client gives an argument; else it gets one alone.
    #[must_use]
    pub fn takes_argument(self) -> bool {
        self.direction() & IN != 0
    }

    /// Whether OpenBSD takes it of root alone.
    #[must_use]
    pub fn is_privileged(self) -> bool {
        !matches!(self, Self::ListProbes | Self::Stats | Self::Arguments)
    }

    /// Its code.
    #[must_use]
    pub fn code(self, abi: Abi) -> u32 {
        let size = (self.size(abi) & SIZE_MASK) as u32;
        self.direction() | size << 16 | GROUP << 8 | self.number()
    }

    /// The request of a code; `None` for those that this ABI does not have.
    #[must_use]
    pub fn of(code: u32, abi: Abi) -> Option<Self> {
        let known = Self::ALL.into_iter().find(|r| r.code(abi) == code)?;
        (abi == Abi::Current || known != Self::Arguments).then_some(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_openbsd() {
        for (request, current, old) in [
            (Request::ListProbes, 0xC010_4401, 0xC010_4401),
            (Request::Stats, 0x4020_4402, 0x4010_4402),
            (Request::Record, 0x8004_4403, 0x8004_4403),
            (Request::Enable, 0x8018_4404, 0x8020_4404),
            (Request::Disable, 0x8018_4405, 0x8020_4405),
            (Request::Resolve, 0xC028_4408, 0xC028_4408),
        ] {
            for (abi, code) in [(Abi::Current, current), (Abi::Old, old)] {
                assert_eq!(request.code(abi), code, "{request:?} {abi:?}");
                assert_eq!(Request::of(code, abi), Some(request), "{code:#x}");
            }
        }
        assert_eq!(
            Request::of(0xC018_4406, Abi::Current),
            Some(Request::Arguments)
        );
        for (abi, code) in [
            (Abi::Old, 0xC018_4406),
            (Abi::Old, 0x8018_4404),
            (Abi::Current, 0x8020_4404),
            (Abi::Current, 0xC010_4407),
            (Abi::Current, 0),
        ] {
            assert_eq!(Request::of(code, abi), None, "{abi:?} {code:#x}");
        }
    }

    #[test]
    fn who_only_looks_needs_no_privilege() {
        let free = Request::ALL.into_iter().filter(|r| !r.is_privileged());
        let expected = [Request::ListProbes, Request::Stats, Request::Arguments];
        assert!(free.eq(expected));
    }
}
