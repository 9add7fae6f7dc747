//! BTF: the kernel's own description of its types. It has about 2% of the size of DWARF, and most
//! distribution kernels carry it.
//!
//! The caller passes the bytes of a `.BTF` section or of a detached file (`pahole
//! --btf_encode_detached`). This module finds member offsets, enumerator values and function
//! prototypes. It does not read the split BTF of modules or line information (`.BTF.ext`).
//!
//! Format: Documentation/bpf/btf.rst, include/uapi/linux/btf.h.

mod declaration;
mod enumerator;
mod form;
mod member;
mod prototype;
mod record;
#[cfg(test)]
pub(crate) mod test_types;
mod type_name;

pub use declaration::{Declaration, DeclaredMember, Encoding, Qualifier};
pub use form::Form;
pub use member::{Member, MemberError};
pub use prototype::{Parameter, Prototype, PrototypeError};
pub use record::Kind;

use record::Record;

use super::name_index::{KEY, NameIndex, NameIndexBuilder};
use super::shared_bytes::SharedBytes;
use crate::bytes::{u16_at, u32_at};

const MAGIC: u16 = 0xeb9f;
const VERSION: u8 = 1;
/// Size in bytes of the header that all versions share.
const HEADER: usize = 24;
/// The maximum length in bytes of a name; the kernel accepts 511 (`KSYM_NAME_LEN`).
const MAX_NAME: usize = 512;
/// The maximum number of typedefs, qualifiers and array levels that are followed, which bounds
/// loops.
const MAX_CHAIN: usize = 32;

/// The number of a type; 0 is `void`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TypeId(pub u32);

/// A kernel's types, indexed by name. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Btf {
    bytes: SharedBytes,
    shape: Shape,
}

/// The sizes of the parts of a [`Btf`], in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Shape {
    /// Size of the type section in bytes.
    pub(super) types: usize,
    /// Size of the string section in bytes.
    pub(super) strings: usize,
    /// The number of types. Each has the 4-byte offset of its record in the type section.
    pub(super) count: usize,
    /// The number of types that can be looked up by name. Their index ends the bytes.
    pub(super) named: usize,
}

impl Shape {
    /// Returns the total size in bytes; `None` on overflow.
    fn total(self) -> Option<usize> {
        let offsets = self.count.checked_mul(OFFSET)?;
        let by_name = self.named.checked_mul(KEY)?;
        let sections = self.types.checked_add(self.strings)?;
        sections.checked_add(offsets)?.checked_add(by_name)
    }
}

/// Size of a record's offset in bytes.
const OFFSET: usize = 4;

/// An error in parsing BTF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// The bytes are too few for a header.
    #[error("{length} bytes are too few for a BTF header (24 bytes)")]
    NoHeader {
        /// The number of bytes passed.
        length: usize,
    },
    /// The magic number is not that of BTF.
    #[error("the magic number is {found:#06x}, not 0xeb9f: this is not BTF")]
    NotBtf {
        /// The first two bytes, as little-endian.
        found: u16,
    },
    /// The BTF is for a big-endian machine.
    #[error("the BTF is big-endian: it describes a kernel of another architecture")]
    BigEndian,
    /// The version is not supported.
    #[error("BTF version {found} is not supported, only 1 is")]
    Version {
        /// The version found.
        found: u8,
    },
    /// A section reaches past the end of the bytes.
    #[error(
        "invalid BTF header: expected all of the {section} section within {available:#x} bytes, found {length:#x} \
         bytes at {offset:#x}; the BTF is cut short"
    )]
    Truncated {
        /// `type` or `string`.
        section: &'static str,
        /// Offset from the end of the header.
        offset: u32,
        /// Length in bytes.
        length: u32,
        /// The number of bytes after the header.
        available: usize,
    },
    /// A type's record cannot be read.
    #[error(
        "type {id} at byte {offset:#x} of the type section has an unknown kind or is cut short (info {info:#x})"
    )]
    BadType {
        /// The type's number.
        id: u32,
        /// The record's offset in the type section.
        offset: usize,
        /// The record's info word; 0 if not even that is present.
        info: u32,
    },
}

impl Btf {
    /// Checks and indexes the types. Copies the bytes.
    ///
    /// # Errors
    /// If this is not complete little-endian BTF of version 1.
    pub fn parse(bytes: &[u8]) -> Result<Self, BtfError> {
        let no_header = BtfError::NoHeader {
            length: bytes.len(),
        };
        let field = |offset| u32_at(bytes, offset).ok_or(no_header);
        let magic = u16_at(bytes, 0).ok_or(no_header)?;
        match magic {
            MAGIC => {}
            _ if magic == MAGIC.swap_bytes() => return Err(BtfError::BigEndian),
            found => return Err(BtfError::NotBtf { found }),
        }
        let version = *bytes.get(2).ok_or(no_header)?;
        if version != VERSION {
            return Err(BtfError::Version { found: version });
        }
        let header = usize::try_from(field(4)?).map_err(|_| no_header)?;
        let body = bytes
            .get(header..)
            .filter(|_| header >= HEADER)
            .ok_or(no_header)?;
        let section = |section, offset: u32, length: u32| {
            let range = || {
                let start = usize::try_from(offset).ok()?;
                body.get(start..start.checked_add(usize::try_from(length).ok()?)?)
            };
            range().ok_or(BtfError::Truncated {
                section,
                offset,
                length,
                available: body.len(),
            })
        };
        let types = section("type", field(8)?, field(12)?)?;
        let strings = section("string", field(16)?, field(20)?)?;
        Self::index(types, strings)
    }

    fn index(types: &[u8], strings: &[u8]) -> Result<Self, BtfError> {
        // Half of a kernel's types have 12 or 16 bytes, and a third can be looked up by name.
        let mut offsets = Vec::<u32>::with_capacity(types.len() / 24);
        let mut by_name = NameIndexBuilder::with_capacity(types.len() / 64);
        let (mut at, mut id) = (0usize, 0u32);
        while at < types.len() {
            id += 1;
            let (record, next) = Record::at(types, at).ok_or_else(|| BtfError::BadType {
                id,
                offset: at,
                info: u32_at(types, at + 4).unwrap_or(0),
            })?;
            // A type section is below 4 GiB and a type has at least 12 bytes, so neither number
            // overflows.
            offsets.push(u32::try_from(at).unwrap_or(u32::MAX));
            if record.kind.is_named() {
                let name = string_at(strings, record.name);
                if !name.is_empty() {
                    by_name.add(name, id);
                }
            }
            at = next;
        }
        let shape = Shape {
            types: types.len(),
            strings: strings.len(),
            count: offsets.len(),
            named: by_name.len(),
        };
        let mut bytes = Vec::with_capacity(shape.total().unwrap_or_default());
        bytes.extend_from_slice(types);
        bytes.extend_from_slice(strings);
        bytes.extend(offsets.iter().flat_map(|offset| offset.to_le_bytes()));
        by_name.write(&mut bytes);
        let bytes = SharedBytes::new(bytes);
        Ok(Self { bytes, shape })
    }

    /// Returns the types and their index as flat bytes, with the sizes of the parts.
    /// [`cached`](super::cached) stores them.
    pub(super) fn table(&self) -> (&[u8], Shape) {
        (self.bytes.as_bytes(), self.shape)
    }

    /// Makes types from what [`table`](Self::table) returned. Returns `None` if the length does not
    /// match the shape. Bytes from elsewhere make wrong types.
    pub(super) fn from_table(bytes: SharedBytes, shape: Shape) -> Option<Self> {
        (shape.total()? == bytes.as_bytes().len()).then_some(Self { bytes, shape })
    }

    /// Returns `length` bytes from `start`; empty if they are out of bounds.
    fn section(&self, start: usize, length: usize) -> &[u8] {
        let bytes = self.bytes.as_bytes();
        bytes.get(start..start + length).unwrap_or_default()
    }

    fn types(&self) -> &[u8] {
        self.section(0, self.shape.types)
    }

    fn strings(&self) -> &[u8] {
        self.section(self.shape.types, self.shape.strings)
    }

    /// Returns the offset of each type's record, from type 1 on.
    fn offsets(&self) -> &[u8] {
        let start = self.shape.types + self.shape.strings;
        self.section(start, self.shape.count * OFFSET)
    }

    fn by_name(&self) -> NameIndex<'_> {
        let length = self.shape.named * KEY;
        let start = self.bytes.as_bytes().len().saturating_sub(length);
        NameIndex::new(self.section(start, length))
    }

    /// Returns the number of types, without `void`.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.count
    }

    /// Checks whether there are no types.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shape.count == 0
    }

    /// Returns the first type called `name` of one of `kinds`.
    #[must_use]
    pub fn find(&self, name: &str, kinds: &[Kind]) -> Option<TypeId> {
        self.find_all(name, kinds).next()
    }

    /// Returns every type called `name` of one of `kinds`, in file order. Source files may each
    /// define a struct of that name.
    fn find_all(&self, name: &str, kinds: &[Kind]) -> impl Iterator<Item = TypeId> {
        self.by_name()
            .candidates(name.as_bytes())
            .map(TypeId)
            .filter(move |id| {
                self.record(*id).is_some_and(|r| {
                    kinds.contains(&r.kind) && self.string(r.name) == name.as_bytes()
                })
            })
    }

    /// Returns the size in bytes of the struct, union or typedef called `name`.
    #[must_use]
    pub fn size_of(&self, name: &str) -> Option<u64> {
        let id = self.find(name, &[Kind::Struct, Kind::Union, Kind::Typedef])?;
        self.size(id)
    }

    /// Returns the size in bytes of the variable called `name`. A kernel's types describe its
    /// per-CPU variables.
    #[must_use]
    pub fn variable_size(&self, name: &str) -> Option<u64> {
        let variable = self.record(self.find(name, &[Kind::Variable])?)?;
        self.size(TypeId(variable.size_or_type))
    }

    /// Returns the record of a type; `None` for `void` and for numbers out of range.
    fn record(&self, id: TypeId) -> Option<Record<'_>> {
        let index = usize::try_from(id.0.checked_sub(1)?).ok()?;
        let offset = u32_at(self.offsets(), index.checked_mul(OFFSET)?)?;
        Record::at(self.types(), usize::try_from(offset).ok()?).map(|(record, _)| record)
    }

    /// Returns the name at `offset`, as bytes.
    fn string(&self, offset: u32) -> &[u8] {
        string_at(self.strings(), offset)
    }

    /// Returns the name at `offset`; empty if it is not UTF-8.
    fn name(&self, offset: u32) -> &str {
        std::str::from_utf8(self.string(offset)).unwrap_or_default()
    }

    /// Follows typedefs, qualifiers and tags to the type behind them. Returns `None` if the chain
    /// does not end.
    fn bare(&self, mut id: TypeId) -> Option<TypeId> {
        for _ in 0..MAX_CHAIN {
            match self.record(id) {
                Some(record) if record.kind.is_transparent() => id = TypeId(record.size_or_type),
                _ => return Some(id),
            }
        }
        None
    }

    /// Returns the size of a type in bytes; `None` for `void`, functions, forward declarations and
    /// endless chains.
    #[must_use]
    pub fn size(&self, id: TypeId) -> Option<u64> {
        let (mut id, mut elements) = (id, 1u64);
        for _ in 0..MAX_CHAIN {
            id = self.bare(id)?;
            let record = self.record(id)?;
            let size = match record.kind {
                Kind::Pointer => 8,
                Kind::Array => {
                    let (element, count) = record.array()?;
                    elements = elements.checked_mul(u64::from(count))?;
                    id = element;
                    continue;
                }
                kind if kind.has_size() => u64::from(record.size_or_type),
                _ => return None,
            };
            return elements.checked_mul(size);
        }
        None
    }
}

/// Returns the string at `offset` of the string section, cut after [`MAX_NAME`] bytes; empty if out
/// of bounds.
fn string_at(strings: &[u8], offset: u32) -> &[u8] {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let rest = strings.get(start..).unwrap_or_default();
    let rest = rest.get(..MAX_NAME).unwrap_or(rest);
    rest.get(..memchr::memchr(0, rest).unwrap_or(rest.len()))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::test_types::{TestBtf, task_types};
    use super::*;

    #[test]
    fn types_are_found_by_name_and_kind() {
        let btf = Btf::parse(&task_types().bytes()).unwrap();
        assert_eq!(btf.size_of("task_struct"), Some(128));
        assert_eq!(btf.size_of("pid_t"), Some(4));
        assert_eq!(btf.size_of("no_such"), None);
        assert_eq!(btf.find("task_struct", &[Kind::Union]), None);
        assert!(btf.find("vfs_read", &[Kind::Function]).is_some());
    }

    #[test]
    fn files_that_are_no_btf_say_why() {
        let good = task_types().bytes();
        let with = |offset: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[offset] = value;
            bytes
        };
        let types = u32_at(&good, 12).unwrap() as usize;
        for (bytes, expected) in [
            (Vec::new(), BtfError::NoHeader { length: 0 }),
            (good[..20].to_vec(), BtfError::NoHeader { length: 20 }),
            (
                b"\x7fELF and more than a header of text".to_vec(),
                BtfError::NotBtf { found: 0x457f },
            ),
            (
                b"\xeb\x9f\x01\0 more than a header of text".to_vec(),
                BtfError::BigEndian,
            ),
            (with(2, 2), BtfError::Version { found: 2 }),
            (with(4, 8), BtfError::NoHeader { length: good.len() }),
            (
                with(15, 1),
                BtfError::Truncated {
                    section: "type",
                    offset: 0,
                    length: 1 << 24 | types as u32,
                    available: good.len() - 24,
                },
            ),
            (
                with(24 + 7, 0x1f),
                BtfError::BadType {
                    id: 1,
                    offset: 0,
                    info: 0x1f00_0000,
                },
            ),
        ] {
            assert_eq!(Btf::parse(&bytes).unwrap_err(), expected);
        }
    }

    #[test]
    fn chains_that_never_end_have_no_size() {
        let mut types = TestBtf::default();
        types.add("loop", Kind::Typedef, 0, 2, &[]);
        types.add("", Kind::Const, 0, 1, &[]);
        types.add("", Kind::Array, 0, 0, &[3, 3, 5]);
        types.add("holder", Kind::Typedef, 0, 3, &[]);
        let btf = Btf::parse(&types.bytes()).unwrap();
        assert_eq!(btf.size_of("loop"), None);
        assert_eq!(btf.size_of("holder"), None);
        btf.member("loop.x").unwrap_err();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn damage_never_panics(damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12)) {
            let mut bytes = task_types().bytes();
            for (place, value) in damage {
                let place = place.index(bytes.len());
                bytes[place] = value;
            }
            if let Ok(btf) = Btf::parse(&bytes) {
                prop_assert!(btf.len() <= bytes.len() / 12);
                for path in ["task_struct.pid", "task_struct.se.vruntime", "pcpu_hot.current_task", "task_struct.mm.x"] {
                    if let Ok(member) = btf.member(path) {
                        prop_assert!(member.type_name.len() <= 16384);
                    }
                }
                if let Ok(prototype) = btf.func_proto_args("vfs_read") {
                    prop_assert!(prototype.parameters.len() <= bytes.len() / 8);
                }
            }
        }
    }
}
