//! The kernel's types and functions (BTF) as the debugger reads them: `.debug_info`,
//! `.debug_abbrev`, `.debug_str` and `.debug_loc` of DWARF 4.
//!
//! All types are entries of one unit, in their order; functions follow. Arguments have places in a
//! function's first instructions alone, as long as these are sure to keep them. `.debug_str` is the
//! section of names of the BTF itself. Written by hand, because each entry has one of a few shapes:
//! a library that keeps half a million entries with their attributes needs some hundred MB.

use std::ops::Range;

use gimli::constants::{
    self, DW_AT_bit_size, DW_AT_byte_size, DW_AT_const_value, DW_AT_count, DW_AT_data_bit_offset,
    DW_AT_data_member_location, DW_AT_declaration, DW_AT_encoding, DW_AT_high_pc, DW_AT_language,
    DW_AT_location, DW_AT_low_pc, DW_AT_name, DW_AT_producer, DW_AT_prototyped, DW_AT_type,
    DW_FORM_addr, DW_FORM_data1, DW_FORM_data4, DW_FORM_flag_present, DW_FORM_ref4, DW_FORM_sdata,
    DW_FORM_sec_offset, DW_FORM_string, DW_FORM_strp, DwAt, DwAte, DwForm, DwTag,
};
use introspect::kernel::btf::{Btf, Declaration, DeclaredMember, Encoding, Qualifier, TypeId};

/// The version of DWARF.
const VERSION: u16 = 4;
/// The size of the unit's header in bytes, and of the length that begins it.
const HEADER: usize = 11;
const LENGTH: usize = 4;
/// The size of an address in bytes.
const ADDRESS: u8 = 8;

/// An entry's shape: its tag, whether it has children, and its attributes. The number of its
/// abbreviation is its place in [`SHAPES`], from 1 on.
type Shape = (DwTag, bool, &'static [(DwAt, DwForm)]);

const NAME: (DwAt, DwForm) = (DW_AT_name, DW_FORM_strp);
const SIZE: (DwAt, DwForm) = (DW_AT_byte_size, DW_FORM_data4);
const TYPE: (DwAt, DwForm) = (DW_AT_type, DW_FORM_ref4);
const DECLARED: (DwAt, DwForm) = (DW_AT_declaration, DW_FORM_flag_present);

#[derive(Debug, Clone, Copy)]
enum Entry {
    Unit,
    Void,
    Base,
    Pointer,
    Const,
    Volatile,
    Restrict,
    Typedef,
    Array,
    Bounds,
    NoBounds,
    Struct,
    AnonymousStruct,
    Union,
    AnonymousUnion,
    StructDeclared,
    UnionDeclared,
    Member,
    AnonymousMember,
    BitField,
    Enum,
    AnonymousEnum,
    Enumerator,
    Prototype,
    Parameter,
    MoreParameters,
    Function,
    Argument,
    LostArgument,
}

const SHAPES: [Shape; 29] = [
    (
        constants::DW_TAG_compile_unit,
        true,
        &[
            (DW_AT_producer, DW_FORM_string),
            (DW_AT_language, DW_FORM_data1),
            (DW_AT_name, DW_FORM_string),
            (DW_AT_low_pc, DW_FORM_addr),
            (DW_AT_high_pc, DW_FORM_data4),
        ],
    ),
    (
        constants::DW_TAG_unspecified_type,
        false,
        &[(DW_AT_name, DW_FORM_string)],
    ),
    (
        constants::DW_TAG_base_type,
        false,
        &[NAME, SIZE, (DW_AT_encoding, DW_FORM_data1)],
    ),
    (constants::DW_TAG_pointer_type, false, &[SIZE, TYPE]),
    (constants::DW_TAG_const_type, false, &[TYPE]),
    (constants::DW_TAG_volatile_type, false, &[TYPE]),
    (constants::DW_TAG_restrict_type, false, &[TYPE]),
    (constants::DW_TAG_typedef, false, &[NAME, TYPE]),
    (constants::DW_TAG_array_type, true, &[TYPE]),
    (
        constants::DW_TAG_subrange_type,
        false,
        &[(DW_AT_count, DW_FORM_data4)],
    ),
    (constants::DW_TAG_subrange_type, false, &[]),
    (constants::DW_TAG_structure_type, true, &[NAME, SIZE]),
    (constants::DW_TAG_structure_type, true, &[SIZE]),
    (constants::DW_TAG_union_type, true, &[NAME, SIZE]),
    (constants::DW_TAG_union_type, true, &[SIZE]),
    (constants::DW_TAG_structure_type, false, &[NAME, DECLARED]),
    (constants::DW_TAG_union_type, false, &[NAME, DECLARED]),
    (
        constants::DW_TAG_member,
        false,
        &[NAME, TYPE, (DW_AT_data_member_location, DW_FORM_data4)],
    ),
    (
        constants::DW_TAG_member,
        false,
        &[TYPE, (DW_AT_data_member_location, DW_FORM_data4)],
    ),
    (
        constants::DW_TAG_member,
        false,
        &[
            NAME,
            TYPE,
            (DW_AT_data_bit_offset, DW_FORM_data4),
            (DW_AT_bit_size, DW_FORM_data1),
        ],
    ),
    (constants::DW_TAG_enumeration_type, true, &[NAME, SIZE]),
    (constants::DW_TAG_enumeration_type, true, &[SIZE]),
    (
        constants::DW_TAG_enumerator,
        false,
        &[NAME, (DW_AT_const_value, DW_FORM_sdata)],
    ),
    (
        constants::DW_TAG_subroutine_type,
        true,
        &[(DW_AT_prototyped, DW_FORM_flag_present), TYPE],
    ),
    (constants::DW_TAG_formal_parameter, false, &[TYPE]),
    (constants::DW_TAG_unspecified_parameters, false, &[]),
    (
        constants::DW_TAG_subprogram,
        true,
        &[
            NAME,
            (DW_AT_low_pc, DW_FORM_addr),
            (DW_AT_high_pc, DW_FORM_data4),
            (DW_AT_prototyped, DW_FORM_flag_present),
            TYPE,
        ],
    ),
    (
        constants::DW_TAG_formal_parameter,
        false,
        &[NAME, TYPE, (DW_AT_location, DW_FORM_sec_offset)],
    ),
    (constants::DW_TAG_formal_parameter, false, &[NAME, TYPE]),
];

/// DWARF's operations for the registers of arguments, in their order: RDI, RSI, RDX, RCX, R8, R9
/// (System V ABI for x86-64, 3.2.3 and figure 3.36).
const ARGUMENTS: [u8; 6] = [0x55, 0x54, 0x51, 0x52, 0x58, 0x59];

/// A function of the kernel's image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Code {
    /// The number of its entry in the BTF.
    pub(super) id: TypeId,
    /// The first address.
    pub(super) start: u64,
    /// Size in bytes.
    pub(super) size: u64,
    /// The address behind the instructions before which all arguments are in their registers.
    pub(super) kept: u64,
}

/// The sections.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Sections {
    /// `.debug_info`.
    pub(super) info: Vec<u8>,
    /// `.debug_abbrev`.
    pub(super) abbreviations: Vec<u8>,
    /// `.debug_str`.
    pub(super) strings: Vec<u8>,
    /// `.debug_loc`.
    pub(super) places: Vec<u8>,
}

/// Makes the sections of all types, and of functions in the kernel's `text`. Returns `None` if they
/// are too large for 32-bit DWARF.
pub(super) fn sections(btf: &Btf, text: Range<u64>, functions: &[Code]) -> Option<Sections> {
    let mut strings = btf.names().to_vec();
    // The last name may be cut off.
    strings.push(0);
    let mut writer = Writer {
        btf,
        info: vec![0; HEADER],
        places: Vec::new(),
        base: text.start,
        references: Vec::new(),
        names: u32::try_from(strings.len()).ok()?,
    };
    writer.entry(Entry::Unit);
    writer.text("exotrace");
    writer.byte(u8::try_from(constants::DW_LANG_C99.0).ok()?);
    writer.text("vmlinux");
    writer.long(text.start);
    writer.word(u32::try_from(text.end.checked_sub(text.start)?).ok()?);
    let mut places = vec![u32::try_from(writer.info.len()).ok()?];
    writer.entry(Entry::Void);
    writer.text("void");
    for number in 1..=u32::try_from(btf.len()).ok()? {
        places.push(u32::try_from(writer.info.len()).ok()?);
        if let Some(declaration) = btf.declaration(TypeId(number)) {
            writer.add(&declaration);
        }
    }
    for function in functions {
        writer.function(function)?;
    }
    writer.end();
    Some(Sections {
        places: std::mem::take(&mut writer.places),
        info: writer.finish(&places)?,
        abbreviations: abbreviations(),
        strings,
    })
}

struct Writer<'b> {
    btf: &'b Btf,
    info: Vec<u8>,
    /// The section of places.
    places: Vec<u8>,
    /// The address to which its addresses are relative.
    base: u64,
    /// The places of references, and the types that they refer to.
    references: Vec<(usize, TypeId)>,
    /// The size of the names in bytes.
    names: u32,
}

impl Writer<'_> {
    fn entry(&mut self, entry: Entry) {
        self.byte(entry as u8 + 1);
    }

    fn byte(&mut self, byte: u8) {
        self.info.push(byte);
    }

    fn word(&mut self, word: u32) {
        self.info.extend(word.to_le_bytes());
    }

    fn long(&mut self, word: u64) {
        self.info.extend(word.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.info.extend(text.as_bytes());
        self.byte(0);
    }

    /// Adds a name. One outside of the section is the empty one.
    fn name(&mut self, name: u32) {
        self.word(if name < self.names { name } else { 0 });
    }

    /// Adds a reference, which [`finish`](Self::finish) fills in.
    fn reference(&mut self, to: TypeId) {
        self.references.push((self.info.len(), to));
        self.word(0);
    }

    /// Adds a number in signed LEB128.
    fn signed(&mut self, number: i64) {
        let mut rest = number;
        loop {
            let byte = (rest & 0x7f) as u8;
            rest >>= 7;
            let is_last = rest == if byte & 0x40 == 0 { 0 } else { -1 };
            self.byte(if is_last { byte } else { byte | 0x80 });
            if is_last {
                return;
            }
        }
    }

    /// Ends the children of an entry.
    fn end(&mut self) {
        self.byte(0);
    }

    /// Adds an entry whose name may be empty.
    fn named(&mut self, name: u32, named: Entry, unnamed: Entry) {
        match self.btf.is_unnamed(name) {
            true => self.entry(unnamed),
            false => {
                self.entry(named);
                self.name(name);
            }
        }
    }

    fn base(&mut self, name: u32, bytes: u32, encoding: DwAte) {
        self.entry(Entry::Base);
        self.name(name);
        self.word(bytes);
        self.byte(encoding.0);
    }

    fn add(&mut self, declaration: &Declaration) {
        match declaration {
            Declaration::Int {
                name,
                bytes,
                encoding,
            } => {
                // As compilers describe bytes.
                let encoding = match (encoding, bytes) {
                    (Encoding::Bool, _) => constants::DW_ATE_boolean,
                    (Encoding::Char, _) | (Encoding::Signed, 1) => constants::DW_ATE_signed_char,
                    (Encoding::Unsigned, 1) => constants::DW_ATE_unsigned_char,
                    (Encoding::Signed, _) => constants::DW_ATE_signed,
                    (Encoding::Unsigned, _) => constants::DW_ATE_unsigned,
                };
                self.base(*name, *bytes, encoding);
            }
            Declaration::Float { name, bytes } => {
                self.base(*name, *bytes, constants::DW_ATE_float);
            }
            Declaration::Pointer(to) => {
                self.entry(Entry::Pointer);
                self.word(u32::from(ADDRESS));
                self.reference(*to);
            }
            Declaration::Qualified(qualifier, of) => {
                self.entry(match qualifier {
                    Qualifier::Const => Entry::Const,
                    Qualifier::Volatile => Entry::Volatile,
                    Qualifier::Restrict => Entry::Restrict,
                });
                self.reference(*of);
            }
            Declaration::Typedef { name, of } => {
                self.entry(Entry::Typedef);
                self.name(*name);
                self.reference(*of);
            }
            Declaration::Array { element, elements } => {
                self.entry(Entry::Array);
                self.reference(*element);
                match elements {
                    0 => self.entry(Entry::NoBounds),
                    elements => {
                        self.entry(Entry::Bounds);
                        self.word(*elements);
                    }
                }
                self.end();
            }
            Declaration::Composite {
                name,
                is_union,
                bytes,
                members,
            } => {
                match is_union {
                    true => self.named(*name, Entry::Union, Entry::AnonymousUnion),
                    false => self.named(*name, Entry::Struct, Entry::AnonymousStruct),
                }
                self.word(*bytes);
                members.iter().for_each(|member| self.member(member));
                self.end();
            }
            Declaration::Forward { name, is_union } => {
                self.entry(match is_union {
                    true => Entry::UnionDeclared,
                    false => Entry::StructDeclared,
                });
                self.name(*name);
            }
            Declaration::Enum {
                name,
                bytes,
                enumerators,
            } => {
                self.named(*name, Entry::Enum, Entry::AnonymousEnum);
                self.word(*bytes);
                for (name, value) in enumerators {
                    self.entry(Entry::Enumerator);
                    self.name(*name);
                    self.signed(*value);
                }
                self.end();
            }
            Declaration::Prototype {
                returns,
                parameters,
                variadic,
            } => {
                self.entry(Entry::Prototype);
                self.reference(*returns);
                for (_, parameter) in parameters {
                    self.entry(Entry::Parameter);
                    self.reference(*parameter);
                }
                if *variadic {
                    self.entry(Entry::MoreParameters);
                }
                self.end();
            }
            Declaration::Function { .. } | Declaration::Other => {}
        }
    }

    /// Adds a function. One that is none in the BTF is left out.
    fn function(&mut self, code: &Code) -> Option<()> {
        let Some(Declaration::Function { name, prototype }) = self.btf.declaration(code.id) else {
            return Some(());
        };
        let Some(Declaration::Prototype {
            returns,
            parameters,
            variadic,
        }) = self.btf.declaration(prototype)
        else {
            return Some(());
        };
        self.entry(Entry::Function);
        self.name(name);
        self.long(code.start);
        self.word(u32::try_from(code.size).ok()?);
        self.reference(returns);
        let mut registers = ARGUMENTS.into_iter();
        for (name, parameter) in parameters {
            let register = match self.btf.size(parameter) {
                Some(..=8) => registers.next(),
                // In two registers, if there are two.
                Some(9..=16) => {
                    registers.nth(1);
                    None
                }
                // On the stack.
                _ => None,
            };
            self.entry(match register {
                Some(_) => Entry::Argument,
                None => Entry::LostArgument,
            });
            self.name(name);
            self.reference(parameter);
            if let Some(register) = register {
                self.word(u32::try_from(self.places.len()).ok()?);
                self.place(code, register);
            }
        }
        if variadic {
            self.entry(Entry::MoreParameters);
        }
        self.end();
        Some(())
    }

    /// Adds a list of places: the register as long as the arguments are kept.
    fn place(&mut self, code: &Code, register: u8) {
        for address in [code.start, code.kept] {
            let relative = address.wrapping_sub(self.base);
            self.places.extend(relative.to_le_bytes());
        }
        self.places.extend(1u16.to_le_bytes());
        self.places.push(register);
        self.places.extend([0; 16]);
    }

    fn member(&mut self, member: &DeclaredMember) {
        if member.bits > 0 {
            self.entry(Entry::BitField);
            self.name(member.name);
            self.reference(member.type_id);
            self.word(member.bit_offset);
            self.byte(u8::try_from(member.bits).unwrap_or(u8::MAX));
            return;
        }
        self.named(member.name, Entry::Member, Entry::AnonymousMember);
        self.reference(member.type_id);
        self.word(member.bit_offset / 8);
    }

    /// Fills in the references and the header. `places` are those of the types, by number. A type
    /// that is none, or whose chain has no end, is `void`.
    fn finish(self, places: &[u32]) -> Option<Vec<u8>> {
        let mut info = self.info;
        let void = *places.first()?;
        for (at, to) in self.references {
            let to = self.btf.untagged(to).filter(|to| {
                let declaration = self.btf.declaration(*to);
                let is_none = |of: &Declaration| {
                    matches!(of, Declaration::Other | Declaration::Function { .. })
                };
                declaration.is_some_and(|of| !is_none(&of))
            });
            let place = to.and_then(|to| places.get(usize::try_from(to.0).ok()?));
            let place = place.copied().unwrap_or(void);
            info.get_mut(at..at + 4)?
                .copy_from_slice(&place.to_le_bytes());
        }
        let length = u32::try_from(info.len() - LENGTH).ok()?;
        let mut header = length.to_le_bytes().to_vec();
        header.extend(VERSION.to_le_bytes());
        // The abbreviations begin at 0.
        header.extend(0u32.to_le_bytes());
        header.push(ADDRESS);
        info.get_mut(..HEADER)?.copy_from_slice(&header);
        Some(info)
    }
}

/// Returns `.debug_abbrev`. All numbers in it have 7 bits.
fn abbreviations() -> Vec<u8> {
    let mut section = Vec::new();
    for (number, (tag, has_children, attributes)) in (1u8..).zip(SHAPES) {
        section.push(number);
        section.push(tag.0 as u8);
        section.push(u8::from(has_children));
        for (attribute, form) in attributes {
            section.extend([attribute.0 as u8, form.0 as u8]);
        }
        section.extend([0, 0]);
    }
    section.push(0);
    section
}

#[cfg(test)]
mod tests;
