//! The record of ORC, the kernel's own unwind information, in its four layouts since Linux 4.14
//! (arch/x86/include/asm/orc_types.h).
//!
//! All have six bytes: two signed 16-bit offsets, then 16 bits of fields. The base registers kept
//! their numbers up to Linux 7.0, and have others from 7.1 on. The fields are:
//!
//! | Linux | bits 0-3 | 4-7 | from 8 on |
//! |---|---|---|---|
//! | 4.14 - 4.17 | base of SP | base of BP | type, 2 bits |
//! | 4.18 - 6.2 | | | type, 2 bits; end of stack |
//! | 6.3 | | | type, 2 bits; signal; end of stack |
//! | 6.4 on | | | type, 3 bits, with values for "undefined" and "end of stack"; signal |
//!
//! The kernel's types determine the layout, or its version if there are none. The register numbers
//! depend on the version alone.

use crate::kernel::btf::{Btf, MemberError};

/// The size of a record in bytes.
pub const ENTRY_SIZE: usize = 6;

/// The base from which RBP, or the stack pointer before a function's call, is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// For BP, the register has not changed. For SP, nothing is known.
    Undefined,
    /// The stack pointer before the call.
    PreviousSp,
    /// RDX.
    Dx,
    /// RDI.
    Di,
    /// RBP.
    Bp,
    /// RSP.
    Sp,
    /// R10.
    R10,
    /// R13.
    R13,
    /// In memory at RBP plus the offset.
    BpIndirect,
    /// In memory at RSP (see [`OrcFormat::offset_after_indirection`]).
    SpIndirect,
}

impl Base {
    /// Formats the location `offset` bytes from this base as the kernel's objtool does: `sp+16`, or
    /// `(bp-8)` for the value stored there.
    #[must_use]
    pub fn place(self, offset: i16) -> String {
        let name = match self {
            Self::Undefined => return "(und)".to_owned(),
            Self::BpIndirect => return format!("(bp{offset:+})"),
            Self::SpIndirect => return format!("(sp){offset:+}"),
            Self::PreviousSp => "prevsp",
            Self::Dx => "dx",
            Self::Di => "di",
            Self::Bp => "bp",
            Self::Sp => "sp",
            Self::R10 => "r10",
            Self::R13 => "r13",
        };
        format!("{name}{offset:+}")
    }
}

/// The contents of the stack at the stack pointer that a record computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrcType {
    /// Unknown: unwinding must not go through this code.
    Undefined,
    /// Nothing, because the frame is outermost.
    EndOfStack,
    /// A return address right below the stack pointer.
    Call,
    /// A whole `pt_regs`.
    Registers,
    /// The part of a `pt_regs` that the CPU pushes.
    HardwareFrame,
}

/// A decoded record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrcEntry {
    /// The offset from the base of SP, in bytes.
    pub sp_offset: i16,
    /// The offset from the base of BP, in bytes.
    pub bp_offset: i16,
    /// The base of SP.
    pub sp: Base,
    /// The base of BP.
    pub bp: Base,
    /// The contents of the stack at SP.
    pub kind: OrcType,
    /// True if the address found there is an interrupted instruction rather than a return address.
    pub signal: bool,
}

impl OrcEntry {
    /// The record of code with a whole `pt_regs` on top of the stack, as entries into the kernel
    /// have it once they have saved the registers.
    pub const REGISTERS: Self = Self {
        sp_offset: 0,
        bp_offset: 0,
        sp: Base::Sp,
        bp: Base::Undefined,
        kind: OrcType::Registers,
        signal: true,
    };
}

/// One of the four layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// Linux 4.14.
    First,
    /// Linux 4.18.
    End,
    /// Linux 6.3.
    SignalAndEnd,
    /// Linux 6.4.
    Types,
}

/// The first version after each older layout.
const UNTIL: [((u32, u32), Shape); 3] = [
    ((4, 18), Shape::First),
    ((6, 3), Shape::End),
    ((6, 4), Shape::SignalAndEnd),
];

/// The base registers by number, up to Linux 7.0.
const FIRST_NUMBERS: [Base; 10] = {
    use Base::*;
    [
        Undefined, PreviousSp, Dx, Di, Bp, Sp, R10, R13, BpIndirect, SpIndirect,
    ]
};
/// The base registers by number, from Linux 7.1 on. Number 1 ([`RAX`]) is in no record of the
/// inspected kernels.
const NUMBERS: [Base; 11] = {
    use Base::*;
    [
        Undefined, Undefined, Dx, Sp, Bp, Di, R10, R13, PreviousSp, SpIndirect, BpIndirect,
    ]
};
const RAX: u8 = 1;

/// A kernel's record layout, and its unwinder's interpretation of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrcFormat {
    shape: Shape,
    /// True if registers have the numbers of Linux 7.1.
    renumbered: bool,
    /// For [`Base::SpIndirect`], true if the offset is added to the value read (Linux 5.12 on).
    /// Otherwise it is added to the address that is read.
    pub offset_after_indirection: bool,
}

/// The reason why a kernel's layout is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrcFormatError {
    /// The types describe an unknown record.
    #[error(
        "struct orc_entry has {what} in this kernel, which no known version of its unwind information has: kernel \
         stacks cannot be unwound by it"
    )]
    Unknown {
        /// The difference from the known layouts.
        what: String,
    },
    /// There are neither types nor a version.
    #[error(
        "the version of the kernel's unwind information is not known: neither its types nor its banner ({banner:?}) \
         determine it"
    )]
    NoVersion {
        /// The banner.
        banner: String,
    },
}

/// The bit offset and width of a field, if it exists.
type Place = Option<(u64, u32)>;
/// The record's members: those at the same place in all layouts, and those that distinguish the
/// layouts.
const NAMES: [&str; 7] = [
    "sp_offset",
    "bp_offset",
    "sp_reg",
    "bp_reg",
    "type",
    "signal",
    "end",
];
const COMMON: [Place; 4] = [Some((0, 16)), Some((16, 16)), Some((32, 4)), Some((36, 4))];
const SHAPES: [(Shape, [Place; 3]); 4] = [
    (Shape::First, [Some((40, 2)), None, None]),
    (Shape::End, [Some((40, 2)), None, Some((42, 1))]),
    (
        Shape::SignalAndEnd,
        [Some((40, 2)), Some((42, 1)), Some((43, 1))],
    ),
    (Shape::Types, [Some((40, 3)), Some((43, 1)), None]),
];

impl OrcFormat {
    /// Determines the format of a kernel, by its types if they have the record, else by its banner
    /// (`Linux version 6.1.0…`). Without a version, the newest format is assumed for what the types
    /// do not show.
    ///
    /// # Errors
    /// If the types describe an unknown record, or there is neither.
    pub fn of(btf: Option<&Btf>, banner: Option<&str>) -> Result<Self, OrcFormatError> {
        let version = banner.and_then(version);
        let described = match btf {
            Some(btf) => described(btf)?,
            None => None,
        };
        let shape = match (described, version) {
            (Some(shape), _) => shape,
            (None, Some(version)) => {
                let until = |(end, _): &&((u32, u32), Shape)| version < *end;
                UNTIL
                    .iter()
                    .find(until)
                    .map_or(Shape::Types, |(_, shape)| *shape)
            }
            (None, None) => {
                let banner = banner.unwrap_or_default().to_owned();
                return Err(OrcFormatError::NoVersion { banner });
            }
        };
        Ok(Self {
            shape,
            renumbered: version.is_none_or(|version| version >= (7, 1)),
            offset_after_indirection: version.is_none_or(|version| version >= (5, 12)),
        })
    }

    /// Decodes a record. Returns `None` if it uses values that no kernel knows.
    #[must_use]
    pub fn decode(&self, bytes: [u8; ENTRY_SIZE]) -> Option<OrcEntry> {
        let [s0, s1, b0, b1, registers, rest] = bytes;
        let kind = rest & 0b11;
        let (kind, signal) = match self.shape {
            Shape::First | Shape::End | Shape::SignalAndEnd => {
                let end = match self.shape {
                    Shape::SignalAndEnd => rest & 0b1000 != 0,
                    Shape::End => rest & 0b100 != 0,
                    _ => true,
                };
                let known = match kind {
                    0 => OrcType::Call,
                    1 => OrcType::Registers,
                    2 => OrcType::HardwareFrame,
                    _ => return None,
                };
                let signal = match self.shape {
                    Shape::SignalAndEnd => rest & 0b100 != 0,
                    _ => known != OrcType::Call,
                };
                match (registers & 0xf, end) {
                    (0, true) => (OrcType::EndOfStack, signal),
                    (0, false) => (OrcType::Undefined, signal),
                    _ => (known, signal),
                }
            }
            Shape::Types => {
                let kind = match rest & 0b111 {
                    0 => OrcType::Undefined,
                    1 => OrcType::EndOfStack,
                    2 => OrcType::Call,
                    3 => OrcType::Registers,
                    4 => OrcType::HardwareFrame,
                    _ => return None,
                };
                (kind, rest & 0b1000 != 0)
            }
        };
        Some(OrcEntry {
            sp_offset: i16::from_le_bytes([s0, s1]),
            bp_offset: i16::from_le_bytes([b0, b1]),
            sp: self.base(registers & 0xf)?,
            bp: self.base(registers >> 4)?,
            kind,
            signal,
        })
    }

    fn base(&self, number: u8) -> Option<Base> {
        let numbers = match self.renumbered {
            true if number == RAX => return None,
            true => &NUMBERS[..],
            false => &FIRST_NUMBERS,
        };
        numbers.get(usize::from(number)).copied()
    }
}

/// Returns the layout that the types describe, or `None` if they have no such record.
fn described(btf: &Btf) -> Result<Option<Shape>, OrcFormatError> {
    let unknown = |what: String| Err(OrcFormatError::Unknown { what });
    let mut fields = Vec::new();
    for name in NAMES {
        let place = match btf.member(&format!("orc_entry.{name}")) {
            Ok(member) => {
                let whole = u32::try_from(member.size.saturating_mul(8)).unwrap_or(u32::MAX);
                Some((member.bit_offset, member.bits.unwrap_or(whole)))
            }
            Err(MemberError::NoType { .. }) => return Ok(None),
            Err(_) => None,
        };
        fields.push(place);
    }
    match btf.size_of("orc_entry") {
        Some(size) if size == ENTRY_SIZE as u64 => {}
        size => return unknown(format!("a size of {size:?} bytes")),
    }
    match SHAPES.iter().find(|(_, expected)| {
        fields.starts_with(&COMMON) && fields.get(COMMON.len()..) == Some(&expected[..])
    }) {
        Some((shape, _)) => Ok(Some(*shape)),
        None => unknown(format!("its fields {NAMES:?} at (bit, width) {fields:?}")),
    }
}

/// Parses the major and minor number of a banner.
fn version(banner: &str) -> Option<(u32, u32)> {
    let numbers = banner.strip_prefix("Linux version ")?;
    let mut numbers = numbers.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::btf::Kind;
    use crate::kernel::btf::test_types::TestBtf;
    use crate::test_says::assert_says;

    /// Builds types with a record of these bitfields (name, bit, width).
    fn types(fields: &[(&str, u32, u32)]) -> Btf {
        let mut t = TestBtf::default();
        let short = t.add("short int", Kind::Int, 0, 2, &[0x0100_0010]);
        let word = t.add("unsigned int", Kind::Int, 0, 4, &[0x20]);
        let mut members = vec![("sp_offset", short, 0), ("bp_offset", short, 16)];
        for (name, bit, width) in fields {
            members.push((name, word, width << 24 | bit));
        }
        t.composite("orc_entry", Kind::Struct, true, 6, &members);
        Btf::parse(&t.bytes()).unwrap()
    }

    const BASES: [(&str, u32, u32); 2] = [("sp_reg", 32, 4), ("bp_reg", 36, 4)];

    fn formats() -> [(OrcFormat, &'static str); 4] {
        [
            ("Linux version 4.14.336 (gcc)", &[("type", 40, 2)][..]),
            (
                "Linux version 6.1.0-56-cloud-amd64 (debian)",
                &[("type", 40, 2), ("end", 42, 1)],
            ),
            (
                "Linux version 6.3.1",
                &[("type", 40, 2), ("signal", 42, 1), ("end", 43, 1)],
            ),
            (
                "Linux version 6.12.117",
                &[("type", 40, 3), ("signal", 43, 1)],
            ),
        ]
        .map(|(banner, fields)| {
            let by_version = OrcFormat::of(None, Some(banner)).unwrap();
            let btf = types(&[&BASES[..], fields].concat());
            assert_eq!(
                OrcFormat::of(Some(&btf), Some(banner)),
                Ok(by_version),
                "{banner}"
            );
            assert_eq!(
                OrcFormat::of(Some(&btf), None).unwrap().shape,
                by_version.shape
            );
            (by_version, banner)
        })
    }

    #[test]
    fn every_version_tells_calls_registers_and_ends_apart() {
        // Each case is the record's fields from bit 8 on, then the expected values.
        let cases: [&[(u8, u8, OrcType, bool)]; 4] = [
            &[
                (0, 5, OrcType::Call, false),
                (1, 5, OrcType::Registers, true),
                (2, 5, OrcType::HardwareFrame, true),
                (0, 0, OrcType::EndOfStack, false),
            ],
            &[
                (0, 5, OrcType::Call, false),
                (1, 5, OrcType::Registers, true),
                (0, 0, OrcType::Undefined, false),
                (4, 0, OrcType::EndOfStack, false),
            ],
            &[
                (0, 5, OrcType::Call, false),
                (1 | 4, 5, OrcType::Registers, true),
                (0, 0, OrcType::Undefined, false),
                (8, 0, OrcType::EndOfStack, false),
            ],
            &[
                (0, 0, OrcType::Undefined, false),
                (1, 0, OrcType::EndOfStack, false),
                (2, 5, OrcType::Call, false),
                (2 | 8, 5, OrcType::Call, true),
                (3 | 8, 5, OrcType::Registers, true),
                (4 | 8, 5, OrcType::HardwareFrame, true),
            ],
        ];
        for ((format, banner), cases) in formats().iter().zip(cases) {
            for (rest, sp, kind, signal) in cases {
                let entry = format
                    .decode([16, 0, 0xf0, 0xff, 0x10 | sp, *rest])
                    .unwrap();
                assert_eq!(
                    (entry.kind, entry.signal),
                    (*kind, *signal),
                    "{banner}: {rest:#b}"
                );
                assert_eq!((entry.sp_offset, entry.bp_offset), (16, -16));
                assert_eq!(entry.bp, Base::PreviousSp);
            }
            assert_eq!(
                format.decode([0, 0, 0, 0, 0x0f, 2]),
                None,
                "{banner}: base 15"
            );
            assert_eq!(
                format.decode([0, 0, 0, 0, 0xf5, 2]),
                None,
                "{banner}: base 15 of BP"
            );
        }
        let [(first, _), .., (last, _)] = formats();
        assert_eq!(first.decode([0, 0, 0, 0, 5, 3]), None, "no such type");
        assert_eq!(last.decode([0, 0, 0, 0, 5, 7]), None, "no such type");
        assert!(!first.offset_after_indirection && last.offset_after_indirection);
    }

    #[test]
    fn registers_have_other_numbers_since_linux_7_1() {
        let at = |banner: &str, registers: u8| {
            let format = OrcFormat::of(None, Some(banner)).unwrap();
            let entry = format.decode([16, 0, 0xf0, 0xff, registers, 2]);
            entry.map(|entry| (entry.sp, entry.bp))
        };
        for (old, new, expected) in [
            (0x15, 0x83, Some((Base::Sp, Base::PreviousSp))),
            (0x14, 0x84, Some((Base::Bp, Base::PreviousSp))),
            (0x05, 0x03, Some((Base::Sp, Base::Undefined))),
            (0x48, 0x4a, Some((Base::BpIndirect, Base::Bp))),
            (0x09, 0x09, Some((Base::SpIndirect, Base::Undefined))),
            (0x03, 0x05, Some((Base::Di, Base::Undefined))),
            (0x0a, 0x01, None),
        ] {
            assert_eq!(at("Linux version 7.0.13+deb13-cloud-amd64", old), expected);
            assert_eq!(at("Linux version 7.1.13+deb13-cloud-amd64", new), expected);
        }
        let format = OrcFormat::of(None, Some("Linux version 7.3.4")).unwrap();
        let newest = types(&[&BASES[..], &[("type", 40, 3), ("signal", 43, 1)]].concat());
        assert_eq!(OrcFormat::of(Some(&newest), None), Ok(format));
    }

    #[test]
    fn unknown_records_are_refused() {
        let moved = types(&[&BASES[..], &[("type", 40, 4)]].concat());
        assert_says(
            OrcFormat::of(Some(&moved), Some("Linux version 6.12.0")).unwrap_err(),
            "Some((40, 4))",
        );
        // A member of 2^63 bytes.
        let mut t = TestBtf::default();
        let word = t.add("unsigned int", Kind::Int, 0, 4, &[0x20]);
        let inner = t.add("", Kind::Array, 0, 0, &[word, word, 1 << 31]);
        let outer = t.add("", Kind::Array, 0, 0, &[inner, word, 1 << 30]);
        t.composite("orc_entry", Kind::Struct, false, 6, &[("type", outer, 40)]);
        let huge = Btf::parse(&t.bytes()).unwrap();
        assert_says(
            OrcFormat::of(Some(&huge), None).unwrap_err(),
            "Some((40, 4294967295))",
        );
        let none = Btf::parse(&TestBtf::default().bytes()).unwrap();
        assert_says(
            OrcFormat::of(Some(&none), Some("Linux wersion")).unwrap_err(),
            "Linux wersion",
        );
    }
}
