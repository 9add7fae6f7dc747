//! The types of a script's expressions: those of the guest's kernel by its BTF, those that the
//! script defines, and C's own numbers.
//!
//! A structure or array is represented by its address: no more is read than the requested member.

use std::cell::RefCell;
use std::sync::Arc;

use introspect::kernel::btf::{Btf, Form, MemberError, TypeId};

use super::c_types::{c_number, kernel_enum, own_enum, own_typedef};
use super::layout::State;
use crate::ast::{Enum, Structure, TypeName};
use crate::shape::{EnumNames, Shape};
use crate::value::StackForm;

/// The type of an expression's value, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Type {
    /// The contents of a map or variable that are not known before it runs.
    Any,
    /// A number.
    Number,
    /// A number that comes from an unsigned one of 64 bits. It is compared as such.
    Unsigned,
    /// A number that is true or false.
    Bool,
    /// A number of an enum.
    Enum(Arc<EnumNames>),
    /// Text.
    Text,
    /// The elements of an array.
    Array {
        element: Box<MemoryType>,
        elements: u64,
    },
    /// Bytes, a symbol, a stack: a value that can only be shown.
    Shown,
    /// The number of a control group, shown by its path.
    Cgroup,
    /// A stack.
    Stack(StackForm),
    /// A tuple.
    Tuple(Vec<Type>),
    /// A record, with the names of its members.
    Record(Vec<(Arc<str>, Type)>),
    /// An address of such a thing.
    Pointer(MemoryType),
    /// The thing itself; its address is on the stack.
    Lvalue(MemoryType),
    /// A thing that a translator makes of the input, whose value is on the stack.
    Translated {
        /// The translator's number.
        translator: usize,
        /// The input's type.
        input: Box<Type>,
    },
}

impl Type {
    /// Returns the type of a number of so many bytes.
    pub(super) fn of_number(bytes: u8, signed: bool) -> Self {
        match bytes == 8 && !signed {
            true => Self::Unsigned,
            false => Self::Number,
        }
    }

    /// Checks whether the value is a number, and no address.
    pub(super) fn is_number(&self) -> bool {
        matches!(
            self,
            Self::Number | Self::Unsigned | Self::Bool | Self::Enum(_)
        )
    }

    /// Returns the form in which the value is shown.
    pub(super) fn shape(&self) -> Shape {
        match self {
            Self::Bool => Shape::Bool,
            Self::Enum(names) => Shape::Enum(names.clone()),
            Self::Pointer(_) => Shape::Address,
            Self::Cgroup => Shape::Cgroup,
            Self::Stack(StackForm::Names) => Shape::Plain,
            Self::Stack(form) => Shape::Stack(*form),
            Self::Array { element, .. } => {
                Shape::elements(element.as_ref().clone().value().shape())
            }
            Self::Tuple(items) => Shape::items(items.iter().map(Self::shape).collect()),
            Self::Record(members) => {
                Shape::items(members.iter().map(|(_, of)| of.shape()).collect())
            }
            Self::Any
            | Self::Number
            | Self::Unsigned
            | Self::Text
            | Self::Shown
            | Self::Lvalue(_)
            | Self::Translated { .. } => Shape::Plain,
        }
    }

    /// Returns the type of a value that has this type or another.
    pub(super) fn joined(self, other: Self) -> Self {
        match (self, other) {
            (one, other) if one == other => one,
            (one, other) if one.is_number() && other.is_number() => Self::Number,
            (Self::Tuple(one), Self::Tuple(other)) if one.len() == other.len() => {
                let both = one.into_iter().zip(other);
                Self::Tuple(both.map(|(one, other)| one.joined(other)).collect())
            }
            (Self::Record(one), Self::Record(other)) if have_same_names(&one, &other) => {
                let both = one.into_iter().zip(other);
                let members = both.map(|((name, one), (_, other))| (name, one.joined(other)));
                Self::Record(members.collect())
            }
            _ => Self::Any,
        }
    }
}

/// Checks whether two records have members of the same names, in the same order.
fn have_same_names(one: &[(Arc<str>, Type)], other: &[(Arc<str>, Type)]) -> bool {
    one.iter()
        .map(|(name, _)| name)
        .eq(other.iter().map(|(name, _)| name))
}

/// The type of a thing in the guest's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MemoryType {
    /// `void`, a function, or a struct that is only declared.
    Unknown,
    /// A number of so many bytes.
    Number { bytes: u8, signed: bool },
    /// A byte of text.
    Char,
    /// A byte that is true or false.
    Bool,
    /// A number of an enum.
    Enum {
        bytes: u8,
        signed: bool,
        names: Arc<EnumNames>,
    },
    /// A pointer.
    Pointer(Box<MemoryType>),
    /// An array.
    Array {
        element: Box<MemoryType>,
        elements: u64,
    },
    /// A struct or union of the kernel's.
    Kernel(TypeId),
    /// A struct of the script's, by number.
    Own(usize),
}

impl MemoryType {
    /// Returns the size in bytes and the sign of a number in memory; `None` if it is none.
    pub(super) fn number(&self) -> Option<(u8, bool)> {
        match self {
            Self::Number { bytes, signed } | Self::Enum { bytes, signed, .. } => {
                Some((*bytes, *signed))
            }
            Self::Char => Some((1, true)),
            Self::Bool => Some((1, false)),
            Self::Pointer(_) => Some((8, false)),
            Self::Unknown | Self::Array { .. } | Self::Kernel(_) | Self::Own(_) => None,
        }
    }

    /// Returns the type of such a thing as a value: a number where it is none.
    pub(super) fn value(self) -> Type {
        match self {
            Self::Number { bytes, signed } => Type::of_number(bytes, signed),
            Self::Bool => Type::Bool,
            Self::Enum { names, .. } => Type::Enum(names),
            Self::Pointer(to) => Type::Pointer(*to),
            Self::Array { element, elements } => Type::Array { element, elements },
            Self::Unknown | Self::Char | Self::Kernel(_) | Self::Own(_) => Type::Number,
        }
    }
}

/// The place of a member in its structure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Member {
    /// The offset in bytes from the start of the structure.
    pub(super) offset: u64,
    /// Of a bitfield: its first bit from the offset, and its number of bits.
    pub(super) bits: Option<(u8, u8)>,
    /// Of a bitfield: whether it may be negative. For others, see `thing`.
    pub(super) signed: bool,
    /// The member's type.
    pub(super) thing: MemoryType,
}

/// The reason why there is no such member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NoMember {
    pub(super) message: String,
    pub(super) nearest: Vec<String>,
}

/// All types that a script can name.
pub(super) struct Types<'t> {
    btf: Option<&'t Btf>,
    pub(super) own: &'t [Structure],
    enums: Vec<(&'t str, MemoryType)>,
    /// The layouts of the script's structures that have been used.
    pub(super) layouts: RefCell<Vec<State>>,
}

/// The greatest depth of nested pointers, arrays and structures that is followed.
pub(super) const DEEPEST: usize = 32;
impl<'t> Types<'t> {
    pub(super) fn new(btf: Option<&'t Btf>, own: &'t [Structure], enums: &'t [Enum]) -> Self {
        Self {
            btf,
            own,
            enums: enums
                .iter()
                .map(|one| (&*one.name, own_enum(one)))
                .collect(),
            layouts: RefCell::new(vec![State::Unknown; own.len()]),
        }
    }

    pub(super) fn has_kernel_types(&self) -> bool {
        self.btf.is_some()
    }

    /// Returns the value of a constant of one of the kernel's enums, and its type.
    pub(super) fn constant(&self, name: &str) -> Option<(i64, Type)> {
        let btf = self.btf?;
        let (id, number) = btf.constant(name)?;
        Some((number, Type::Enum(kernel_enum(btf, id))))
    }

    /// Returns the type of the script's enum of this number.
    pub(super) fn own_enum(&self, at: usize) -> Type {
        match self.enums.get(at) {
            Some((_, MemoryType::Enum { names, .. })) => Type::Enum(names.clone()),
            _ => Type::Number,
        }
    }

    /// Returns the end of a message about a missing type.
    pub(super) fn why_none(&self) -> &'static str {
        match self.has_kernel_types() {
            true => "",
            false => "; the guest's kernel has no types (BTF) in it",
        }
    }

    /// Returns the type that a script names. A struct must be defined somewhere.
    pub(super) fn named(&self, name: &TypeName) -> Option<MemoryType> {
        self.base(&name.base)
            .filter(|thing| *thing != MemoryType::Unknown || name.base == "void")
            .map(|thing| around(thing, name))
    }

    /// Returns the type that BTF's readers write as `const char *`, `struct page * *`, `char [16]`.
    pub(super) fn written(&self, text: &str) -> Option<MemoryType> {
        let words = text.replace('*', " * ");
        let words = words
            .split_whitespace()
            .filter(|word| !matches!(*word, "const" | "volatile" | "restrict"));
        let (mut base, mut pointers, mut elements) = (Vec::new(), 0, None);
        for word in words {
            match word {
                "*" => pointers += 1,
                word if word.starts_with('[') => {
                    elements = word.trim_matches(['[', ']']).parse().ok();
                }
                word if word.contains(['(', ')']) => return None,
                word => base.push(word),
            }
        }
        let thing = self.base(&base.join(" "))?;
        let thing = (0..pointers.min(DEEPEST)).fold(thing, |to, _| pointer(to));
        Some(elements.into_iter().fold(thing, array))
    }

    fn base(&self, name: &str) -> Option<MemoryType> {
        if let Some(number) = c_number(name) {
            return Some(number);
        }
        let own = name.strip_prefix("struct ");
        let own = own.or_else(|| name.strip_prefix("union ")).unwrap_or(name);
        if let Some(at) = self.own.iter().position(|known| known.name == own) {
            return Some(MemoryType::Own(at));
        }
        if let Some(own) = name.strip_prefix("enum ")
            && let Some((_, found)) = self.enums.iter().find(|(known, _)| *known == own)
        {
            return Some(found.clone());
        }
        match self.btf.and_then(|btf| btf.named(name)) {
            Some(id) => Some(self.kernel(id, DEEPEST)),
            // A pointer to a type that is only declared is still a pointer.
            None if name.contains(' ') => Some(MemoryType::Unknown),
            None => own_typedef(name),
        }
    }

    fn kernel(&self, id: TypeId, depth: usize) -> MemoryType {
        let Some((btf, depth)) = self.btf.zip(depth.checked_sub(1)) else {
            return MemoryType::Unknown;
        };
        match btf.form(id) {
            Form::Int { bytes, signed } => match u8::try_from(bytes) {
                Ok(bytes @ 1..=8) => MemoryType::Number { bytes, signed },
                _ => MemoryType::Unknown,
            },
            Form::Enum { id, bytes, signed } => match u8::try_from(bytes) {
                Ok(bytes @ 1..=8) => MemoryType::Enum {
                    bytes,
                    signed,
                    names: kernel_enum(btf, id),
                },
                _ => MemoryType::Unknown,
            },
            Form::Bool => MemoryType::Bool,
            Form::Char => MemoryType::Char,
            Form::Pointer(to) => match btf.form(to) {
                // Structures are examined only when a member is used, because they lead everywhere.
                Form::Composite { id, .. } => pointer(MemoryType::Kernel(id)),
                _ => pointer(self.kernel(to, depth)),
            },
            Form::Array { element, elements } => {
                array(self.kernel(element, depth), elements.into())
            }
            Form::Composite { id, .. } => MemoryType::Kernel(id),
            Form::Opaque => MemoryType::Unknown,
        }
    }

    /// Returns the size of a thing in bytes.
    pub(super) fn size(&self, thing: &MemoryType) -> Option<u64> {
        self.size_within(thing, DEEPEST)
    }

    fn size_within(&self, thing: &MemoryType, depth: usize) -> Option<u64> {
        let depth = depth.checked_sub(1)?;
        match thing {
            MemoryType::Unknown => None,
            MemoryType::Number { bytes, .. } | MemoryType::Enum { bytes, .. } => {
                Some((*bytes).into())
            }
            MemoryType::Char | MemoryType::Bool => Some(1),
            MemoryType::Pointer(_) => Some(8),
            MemoryType::Array { element, elements } => {
                self.size_within(element, depth)?.checked_mul(*elements)
            }
            MemoryType::Kernel(id) => self.btf?.size(*id),
            MemoryType::Own(at) => self.layout(*at).map(|layout| layout.size),
        }
    }

    pub(super) fn alignment(&self, thing: &MemoryType) -> u64 {
        match thing {
            MemoryType::Array { element, .. } => self.alignment(element),
            MemoryType::Own(at) => self.layout(*at).map_or(1, |layout| layout.alignment),
            MemoryType::Kernel(_) => 8,
            other => self.size(other).unwrap_or(1).clamp(1, 8),
        }
    }

    /// Finds a member of a struct or union.
    pub(super) fn member(&self, of: &MemoryType, name: &str) -> Result<Member, NoMember> {
        match (of, self.btf) {
            (MemoryType::Kernel(id), Some(btf)) => self.kernel_member(btf, *id, name),
            (MemoryType::Own(at), _) => self.own_member(*at, name),
            _ => Err(NoMember {
                message: format!("{} has no members, so no {name:?}", self.describe(of)),
                nearest: Vec::new(),
            }),
        }
    }

    fn kernel_member(&self, btf: &Btf, id: TypeId, name: &str) -> Result<Member, NoMember> {
        let found = btf.member_of(id, name).map_err(|error| match error {
            MemberError::NoMember {
                owner, name, near, ..
            } => NoMember {
                message: format!("{owner} has no member {name:?}"),
                nearest: near,
            },
            other => NoMember {
                message: other.to_string(),
                nearest: Vec::new(),
            },
        })?;
        let thing = self.kernel(found.type_id, DEEPEST);
        let signed = is_signed(&thing);
        let bits = found.bits.and_then(|width| {
            let shift = u8::try_from(found.bit_offset % 8).ok()?;
            Some((shift, u8::try_from(width).ok()?))
        });
        Ok(Member {
            offset: found.byte_offset,
            bits,
            signed,
            thing,
        })
    }

    /// Returns the names of the members of a struct or union.
    pub(super) fn member_names(&self, of: &MemoryType) -> Vec<String> {
        match (of, self.btf) {
            (MemoryType::Kernel(id), Some(btf)) => btf.member_names(*id),
            (MemoryType::Own(at), _) => {
                let mut names = Vec::new();
                self.add_member_names(*at, &mut names, DEEPEST);
                names
            }
            _ => Vec::new(),
        }
    }

    /// Returns a thing's type as C writes it.
    pub(super) fn describe(&self, thing: &MemoryType) -> String {
        match thing {
            MemoryType::Unknown => "a value of unknown type".to_owned(),
            MemoryType::Number { bytes, signed } => {
                format!(
                    "{}int{}",
                    if *signed { "" } else { "u" },
                    8 * u32::from(*bytes)
                )
            }
            MemoryType::Char => "char".to_owned(),
            MemoryType::Bool => "bool".to_owned(),
            MemoryType::Enum { .. } => "enum".to_owned(),
            MemoryType::Pointer(to) => format!("{} *", self.describe(to)),
            MemoryType::Array { element, elements } => {
                format!("{}[{elements}]", self.describe(element))
            }
            MemoryType::Kernel(id) => self.btf.map_or_else(String::new, |btf| btf.type_name(*id)),
            MemoryType::Own(at) => {
                let own = self.own.get(*at);
                format!("struct {}", own.map_or("", |own| own.name.as_str()))
            }
        }
    }
}

/// Returns the type that a script names with this base: pointers to it, an array of it.
pub(super) fn around(base: MemoryType, name: &TypeName) -> MemoryType {
    let thing = (0..name.pointers.min(DEEPEST)).fold(base, |to, _| pointer(to));
    name.elements.into_iter().fold(thing, array)
}

pub(super) fn pointer(to: MemoryType) -> MemoryType {
    MemoryType::Pointer(Box::new(to))
}

pub(super) fn array(of: MemoryType, elements: u64) -> MemoryType {
    MemoryType::Array {
        element: Box::new(of),
        elements,
    }
}

pub(super) fn is_signed(thing: &MemoryType) -> bool {
    thing.number().is_some_and(|(_, signed)| signed) && *thing != MemoryType::Char
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const INT: MemoryType = MemoryType::Number {
        bytes: 4,
        signed: true,
    };

    #[test]
    fn types_are_known_as_c_and_its_readers_write_them() {
        let types = Types::new(None, &[], &[]);
        let number = |bytes, signed| Some(MemoryType::Number { bytes, signed });
        for (text, expected) in [
            ("int", Some(INT)),
            ("const int", Some(INT)),
            ("unsigned", number(4, false)),
            ("long unsigned int", number(8, false)),
            ("unsigned long", number(8, false)),
            ("long long unsigned int", number(8, false)),
            ("short int", number(2, true)),
            ("unsigned char", number(1, false)),
            ("const char *", Some(pointer(MemoryType::Char))),
            ("char * *", Some(pointer(pointer(MemoryType::Char)))),
            ("struct nobody *", Some(pointer(MemoryType::Unknown))),
            ("uint16_t", number(2, false)),
            ("size_t", number(8, false)),
            (
                "char [16]",
                Some(MemoryType::Array {
                    element: Box::new(MemoryType::Char),
                    elements: 16,
                }),
            ),
            ("void (*)(int)", None),
            ("nonsense", None),
            ("", None),
        ] {
            assert_eq!(types.written(text), expected, "{text}");
        }
    }
}
