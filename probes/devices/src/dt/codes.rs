//! The ioctl requests of dt(4). Direction, argument size and number are packed into one word, as in
//! `<sys/ioccom.h>`.
//!
//! The format is `direction | (size & 0x1fff) << 16 | 'D' << 8 | number`, with 0x80000000 for input
//! and 0x40000000 for output arguments. Because sizes differ, two requests have another code in the
//! older ABI. Requests that are no ioctls of OpenBSD (`wire`) have no direction, so they cannot be
//! mistaken for one.

use super::abi::{self, Abi};

const IN: u32 = 0x8000_0000;
const OUT: u32 = 0x4000_0000;
/// The bits of the size.
const SIZE_MASK: usize = 0x1fff;
const GROUP: u32 = b'D' as u32;

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request {
    /// `DTIOCGPLIST`: lists the probes.
    ListProbes,
    /// `DTIOCGSTATS`: returns the session's counts.
    Stats,
    /// `DTIOCRECORD`: starts or stops recording.
    Record,
    /// `DTIOCPRBENABLE`: enables a probe.
    Enable,
    /// `DTIOCPRBDISABLE`: disables a probe.
    Disable,
    /// `DTIOCGARGS`: returns the types of a probe's arguments.
    Arguments,
    /// `DTIOCRDVNODE`: returns the file behind an address of a process.
    Resolve,
}

impl Request {
    /// All requests.
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
            // 7 was DTIOCGETAUXBASE, now retired.
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

    /// Returns the size of the argument in bytes.
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

    /// Checks whether the argument is input. If not, it is output only.
    #[must_use]
    pub fn takes_argument(self) -> bool {
        self.direction() & IN != 0
    }

    /// Checks whether OpenBSD allows the request to root only.
    #[must_use]
    pub fn is_privileged(self) -> bool {
        !matches!(self, Self::ListProbes | Self::Stats | Self::Arguments)
    }

    /// Returns the code.
    #[must_use]
    pub fn code(self, abi: Abi) -> u32 {
        let size = (self.size(abi) & SIZE_MASK) as u32;
        self.direction() | size << 16 | GROUP << 8 | self.number()
    }

    /// Returns the request of a code; `None` if this ABI does not have it.
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
