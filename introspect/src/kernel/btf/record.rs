//! One type's record: a common head of 12 bytes, and the data that its kind appends.

use super::TypeId;
use crate::bytes::u32_at;

/// The kind of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the names are C's
pub enum Kind {
    Int,
    Pointer,
    Array,
    Struct,
    Union,
    Enum,
    Forward,
    Typedef,
    Volatile,
    Const,
    Restrict,
    Function,
    Prototype,
    Variable,
    DataSection,
    Float,
    DeclTag,
    TypeTag,
    Enum64,
}

/// The kinds by number, from 1 on (`BTF_KIND_*`, include/uapi/linux/btf.h).
const KINDS: [Kind; 19] = [
    Kind::Int,
    Kind::Pointer,
    Kind::Array,
    Kind::Struct,
    Kind::Union,
    Kind::Enum,
    Kind::Forward,
    Kind::Typedef,
    Kind::Volatile,
    Kind::Const,
    Kind::Restrict,
    Kind::Function,
    Kind::Prototype,
    Kind::Variable,
    Kind::DataSection,
    Kind::Float,
    Kind::DeclTag,
    Kind::TypeTag,
    Kind::Enum64,
];

impl Kind {
    fn from_number(number: u32) -> Option<Self> {
        let index = usize::try_from(number.checked_sub(1)?).ok()?;
        KINDS.get(index).copied()
    }

    /// Returns the number in the format.
    #[cfg(test)]
    pub(super) fn number(self) -> u32 {
        1 + KINDS.iter().position(|kind| *kind == self).unwrap_or(0) as u32
    }

    /// Checks whether types of this kind can be looked up by name.
    pub(super) fn is_named(self) -> bool {
        matches!(
            self,
            Self::Struct
                | Self::Union
                | Self::Typedef
                | Self::Function
                | Self::Variable
                | Self::Enum
                | Self::Enum64
        )
    }

    /// Checks whether this kind only names or qualifies another type.
    pub(super) fn is_transparent(self) -> bool {
        matches!(
            self,
            Self::Typedef | Self::Volatile | Self::Const | Self::Restrict | Self::TypeTag
        )
    }

    /// Checks whether the head's last word is a size and not a type.
    pub(super) fn has_size(self) -> bool {
        matches!(
            self,
            Self::Int | Self::Struct | Self::Union | Self::Enum | Self::Float | Self::Enum64
        )
    }

    /// Checks whether this kind has members.
    pub(super) fn is_composite(self) -> bool {
        matches!(self, Self::Struct | Self::Union)
    }

    /// Returns the number of bytes after the head: those of `count` elements and those that occur
    /// once.
    fn appended(self, count: usize) -> usize {
        match self {
            Self::Int | Self::Variable | Self::DeclTag => 4,
            Self::Array => 12,
            Self::Struct | Self::Union | Self::DataSection | Self::Enum64 => 12 * count,
            Self::Enum | Self::Prototype => 8 * count,
            _ => 0,
        }
    }
}

const HEAD: usize = 12;

/// A type as stored in the type section.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record<'a> {
    /// Offset of its name in the string section.
    pub(super) name: u32,
    pub(super) kind: Kind,
    /// The kind's flag: a struct with bitfields, a forward declaration of a union.
    pub(super) flag: bool,
    /// The size in bytes, or the type referred to; see [`Kind::has_size`].
    pub(super) size_or_type: u32,
    appended: &'a [u8],
}

/// A member as stored in a struct or union.
#[derive(Debug, Clone, Copy)]
pub(super) struct RawMember {
    pub(super) name: u32,
    pub(super) type_id: TypeId,
    /// Offset from the start of the struct, in bits.
    pub(super) bit_offset: u32,
    /// Width of a bitfield in bits; 0 for any other member.
    pub(super) bits: u32,
}

impl<'a> Record<'a> {
    /// Reads the record at `offset`. Returns it and the offset of the next.
    pub(super) fn at(types: &'a [u8], offset: usize) -> Option<(Self, usize)> {
        let info = u32_at(types, offset.checked_add(4)?)?;
        let kind = Kind::from_number(info >> 24 & 0x1f)?;
        let start = offset + HEAD;
        let end = start.checked_add(kind.appended(usize::try_from(info & 0xffff).ok()?))?;
        let record = Self {
            name: u32_at(types, offset)?,
            kind,
            flag: info >> 31 != 0,
            size_or_type: u32_at(types, offset + 8)?,
            appended: types.get(start..end)?,
        };
        Some((record, end))
    }

    /// Returns the encoding of an int: the number of bits, their offset, and flags from bit 24 on.
    pub(super) fn encoding(&self) -> Option<u32> {
        u32_at(self.appended, 0)
    }

    /// Returns the element type and the number of elements of an array.
    pub(super) fn array(&self) -> Option<(TypeId, u32)> {
        Some((TypeId(u32_at(self.appended, 0)?), u32_at(self.appended, 8)?))
    }

    /// Returns the members of a struct or union.
    pub(super) fn members(&self) -> impl Iterator<Item = RawMember> {
        let flag = self.flag;
        self.appended
            .as_chunks::<12>()
            .0
            .iter()
            .filter_map(move |member| {
                let place = u32_at(member, 8)?;
                Some(RawMember {
                    name: u32_at(member, 0)?,
                    type_id: TypeId(u32_at(member, 4)?),
                    bit_offset: if flag { place & 0xff_ffff } else { place },
                    bits: if flag { place >> 24 } else { 0 },
                })
            })
    }

    /// Returns the name offset and value of each enumerator. The kind's flag says whether values
    /// are signed.
    pub(super) fn enumerators(&self) -> impl Iterator<Item = (u32, i64)> {
        let (wide, signed) = (self.kind == Kind::Enum64, self.flag);
        let size = if wide { 12 } else { 8 };
        self.appended.chunks_exact(size).filter_map(move |entry| {
            let low = u32_at(entry, 4)?;
            let value = match (wide, signed) {
                (true, _) => (u64::from(u32_at(entry, 8)?) << 32 | u64::from(low)).cast_signed(),
                (false, true) => i64::from(low.cast_signed()),
                (false, false) => i64::from(low),
            };
            Some((u32_at(entry, 0)?, value))
        })
    }

    /// Returns the name offset and type of each parameter of a prototype.
    pub(super) fn parameters(&self) -> impl ExactSizeIterator<Item = (u32, TypeId)> {
        self.appended.as_chunks::<8>().0.iter().map(|parameter| {
            let word = |offset| u32_at(parameter, offset).unwrap_or(0);
            (word(0), TypeId(word(4)))
        })
    }
}
