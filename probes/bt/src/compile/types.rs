//! The types of a script's expressions: those of the guest's kernel by its BTF, those that the
//! script defines, and C's own numbers.
//!
//! A structure or array is represented by its address: no more is read than the requested member.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use introspect::kernel::btf::{Btf, Form, MemberError, TypeId};

use crate::ast::{Structure, TypeName};

/// The type of an expression's value, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Type {
    /// The contents of a map or variable that are not known before it runs.
    Any,
    /// A number.
    Number,
    /// A number that comes from an unsigned one of 64 bits. It is compared as such.
    Unsigned,
    /// Text.
    Text,
    /// Bytes, a symbol, a stack: a value that can only be shown.
    Shown,
    /// A stack.
    Stack,
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

    /// Returns the type of a value that has this type or another.
    pub(super) fn joined(self, other: Self) -> Self {
        match (self, other) {
            (one, other) if one == other => one,
            (Self::Number | Self::Unsigned, Self::Number | Self::Unsigned) => Self::Number,
            _ => Self::Any,
        }
    }
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
    own: &'t [Structure],
    /// The layouts of the script's structures that have been used.
    layouts: RefCell<Vec<State>>,
}

/// The progress of a structure's layout.
#[derive(Clone)]
enum State {
    Unknown,
    /// The layout has begun: a structure used again in this state contains itself.
    Begun,
    /// The layout is done; `None` if it is impossible.
    Done(Option<Rc<Layout>>),
}

/// The layout of a structure of the script's, as C does it on x86-64.
struct Layout {
    /// The place of each member.
    members: Vec<Member>,
    size: u64,
    alignment: u64,
}

/// The greatest depth of nested pointers, arrays and structures that is followed.
const DEEPEST: usize = 32;
/// The greatest size in bytes of a structure that a script may define.
const LARGEST: u64 = 1 << 20;

impl<'t> Types<'t> {
    pub(super) fn new(btf: Option<&'t Btf>, own: &'t [Structure]) -> Self {
        Self {
            btf,
            own,
            layouts: RefCell::new(vec![State::Unknown; own.len()]),
        }
    }

    pub(super) fn has_kernel_types(&self) -> bool {
        self.btf.is_some()
    }

    /// Returns the value of a constant of one of the kernel's enums.
    pub(super) fn constant(&self, name: &str) -> Option<i64> {
        self.btf?.constant(name)
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
            .map(|thing| (0..name.pointers.min(DEEPEST)).fold(thing, |to, _| pointer(to)))
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
        Some(match elements {
            Some(elements) => MemoryType::Array {
                element: Box::new(thing),
                elements,
            },
            None => thing,
        })
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
            Form::Char => MemoryType::Char,
            Form::Pointer(to) => match btf.form(to) {
                // Structures are examined only when a member is used, because they lead everywhere.
                Form::Composite { id, .. } => pointer(MemoryType::Kernel(id)),
                _ => pointer(self.kernel(to, depth)),
            },
            Form::Array { element, elements } => MemoryType::Array {
                element: Box::new(self.kernel(element, depth)),
                elements: elements.into(),
            },
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
            MemoryType::Number { bytes, .. } => Some((*bytes).into()),
            MemoryType::Char => Some(1),
            MemoryType::Pointer(_) => Some(8),
            MemoryType::Array { element, elements } => {
                self.size_within(element, depth)?.checked_mul(*elements)
            }
            MemoryType::Kernel(id) => self.btf?.size(*id),
            MemoryType::Own(at) => self.layout(*at).map(|layout| layout.size),
        }
    }

    fn alignment(&self, thing: &MemoryType) -> u64 {
        match thing {
            MemoryType::Array { element, .. } => self.alignment(element),
            MemoryType::Own(at) => self.layout(*at).map_or(1, |layout| layout.alignment),
            MemoryType::Kernel(_) => 8,
            other => self.size(other).unwrap_or(1).clamp(1, 8),
        }
    }

    /// Returns the layout of a structure of the script's, made once. It is `None` if a member has
    /// an unknown type, or is the structure itself.
    fn layout(&self, at: usize) -> Option<Rc<Layout>> {
        let state = self.layouts.borrow().get(at).cloned();
        match state? {
            State::Done(layout) => return layout,
            State::Begun => return None,
            State::Unknown => {}
        }
        self.set_layout(at, State::Begun);
        let layout = self.lay_out(at).map(Rc::new);
        self.set_layout(at, State::Done(layout.clone()));
        layout
    }

    fn set_layout(&self, at: usize, state: State) {
        if let Some(place) = self.layouts.borrow_mut().get_mut(at) {
            *place = state;
        }
    }

    fn lay_out(&self, at: usize) -> Option<Layout> {
        let own = self.own.get(at)?;
        // The end in bits of the member before, and of all so far.
        let (mut members, mut bit, mut end, mut widest) = (Vec::new(), 0u64, 0u64, 1);
        for member in &own.members {
            let mut thing = self.named(&member.type_name)?;
            if let Some(elements) = member.elements {
                thing = MemoryType::Array {
                    element: Box::new(thing),
                    elements,
                };
            }
            let alignment = self.alignment(&thing);
            let size = self.size(&thing)?.checked_mul(8)?;
            if own.is_union {
                bit = 0;
            }
            let width = match member.bits {
                // A bit field lies in one number of its type.
                Some(width @ 1..) if width <= size && bit % size + width <= size => width,
                Some(width) if width <= size => {
                    bit = bit.checked_next_multiple_of(size.max(8))?;
                    width
                }
                Some(_) => return None,
                None => {
                    bit = bit.checked_next_multiple_of(alignment.checked_mul(8)?)?;
                    size
                }
            };
            let bits = match member.bits {
                Some(width) => Some((u8::try_from(bit % 8).ok()?, u8::try_from(width).ok()?)),
                None => None,
            };
            members.push(Member {
                offset: bit / 8,
                bits,
                signed: matches!(thing, MemoryType::Number { signed: true, .. }),
                thing,
            });
            bit = bit.checked_add(width)?;
            end = end.max(bit);
            widest = widest.max(alignment);
            if end / 8 > LARGEST {
                return None;
            }
        }
        Some(Layout {
            members,
            size: end.div_ceil(8).checked_next_multiple_of(widest)?,
            alignment: widest,
        })
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
        let signed = matches!(thing, MemoryType::Number { signed: true, .. });
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

    fn own_member(&self, at: usize, name: &str) -> Result<Member, NoMember> {
        if let Some(found) = self.found_in(at, name, DEEPEST) {
            return Ok(found);
        }
        let own = self.own.get(at);
        let members = own.map_or(&[][..], |own| &own.members);
        let struct_name = own.map_or("", |own| own.name.as_str());
        let names = members.iter().map(|member| member.name.as_str());
        Err(NoMember {
            message: match members.iter().any(|member| member.name == name) {
                true => format!("struct {struct_name} has a member of an unknown type"),
                false => format!("struct {struct_name} has no member {name:?}"),
            },
            nearest: super::nearest(name, names.filter(|name| !name.is_empty())),
        })
    }

    /// Returns a member of a structure, or of a structure without a name inside it.
    fn found_in(&self, at: usize, name: &str, depth: usize) -> Option<Member> {
        let depth = depth.checked_sub(1)?;
        let (own, layout) = (self.own.get(at)?, self.layout(at)?);
        let mut all = own.members.iter().zip(&layout.members);
        let direct = all.clone().find(|(member, _)| member.name == name);
        if let Some((_, place)) = direct {
            return Some(place.clone());
        }
        all.find_map(|(member, place)| match place.thing {
            MemoryType::Own(inner) if member.name.is_empty() => {
                let found = self.found_in(inner, name, depth)?;
                Some(Member {
                    offset: place.offset + found.offset,
                    ..found
                })
            }
            _ => None,
        })
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

pub(super) fn pointer(to: MemoryType) -> MemoryType {
    MemoryType::Pointer(Box::new(to))
}

/// Returns C's number of x86-64 with this name, its words in any order, or one that bpftrace and
/// stdint.h name.
fn c_number(name: &str) -> Option<MemoryType> {
    let number = |bytes, signed| Some(MemoryType::Number { bytes, signed });
    let mut words: Vec<&str> = name.split(' ').collect();
    words.sort_unstable();
    let unsigned = words.contains(&"unsigned");
    words.retain(|word| !matches!(*word, "unsigned" | "signed"));
    let named = words.len() < name.split(' ').count();
    match words.as_slice() {
        ["void"] => Some(MemoryType::Unknown),
        ["char"] if !named => Some(MemoryType::Char),
        ["char"] => number(1, !unsigned),
        ["_Bool" | "bool"] if !named => number(1, false),
        ["short"] | ["int", "short"] => number(2, !unsigned),
        ["int"] => number(4, !unsigned),
        [] if named => number(4, !unsigned),
        ["long"] | ["int", "long"] | ["long", "long"] | ["int", "long", "long"] => {
            number(8, !unsigned)
        }
        _ if named => None,
        ["int8" | "int8_t"] => number(1, true),
        ["int16" | "int16_t"] => number(2, true),
        ["int32" | "int32_t"] => number(4, true),
        ["int64" | "int64_t"] => number(8, true),
        ["uint8" | "uint8_t"] => number(1, false),
        ["uint16" | "uint16_t"] => number(2, false),
        ["uint32" | "uint32_t"] => number(4, false),
        ["uint64" | "uint64_t" | "uintptr_t"] => number(8, false),
        _ => None,
    }
}

/// Returns a well-known typedef, for guests whose kernel has no types, and for the arguments of
/// system calls there.
fn own_typedef(name: &str) -> Option<MemoryType> {
    let (bytes, signed) = match name {
        "size_t" | "u64" | "__u64" | "dev_t" | "umode_t_long" | "aio_context_t" => (8, false),
        "ssize_t" | "off_t" | "loff_t" | "s64" | "__s64" | "time_t" => (8, true),
        "u32" | "__u32" | "uid_t" | "gid_t" | "qid_t" | "rwf_t" => (4, false),
        "pid_t" | "s32" | "__s32" | "key_t" | "clockid_t" | "timer_t" | "mqd_t"
        | "key_serial_t" => (4, true),
        "u16" | "__u16" | "umode_t" => (2, false),
        "s16" | "__s16" => (2, true),
        "u8" | "__u8" => (1, false),
        "s8" | "__s8" => (1, true),
        _ => return None,
    };
    Some(MemoryType::Number { bytes, signed })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ast::{Span, StructureMember};

    const INT: MemoryType = MemoryType::Number {
        bytes: 4,
        signed: true,
    };

    #[test]
    fn types_are_known_as_c_and_its_readers_write_them() {
        let types = Types::new(None, &[]);
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

    #[test]
    fn structures_of_a_script_are_laid_out_as_c_does() {
        let member = |base: &str, name: &str, elements| StructureMember {
            type_name: TypeName {
                base: base.into(),
                pointers: 0,
                span: Span::default(),
            },
            name: name.into(),
            elements,
            bits: None,
        };
        let structure = |name: &str, members| Structure {
            name: name.into(),
            is_union: false,
            members,
            span: Span::default(),
        };
        let own = [
            structure(
                "inner",
                vec![member("uint8", "a", None), member("uint32", "b", None)],
            ),
            structure(
                "outer",
                vec![
                    member("uint8", "c", Some(3)),
                    member("struct inner", "d", None),
                    member("uint64", "e", None),
                    member("uint16", "f", None),
                ],
            ),
            structure("endless", vec![member("struct endless", "g", None)]),
        ];
        let types = Types::new(None, &own);
        let offset =
            |of: usize, name: &str| types.member(&MemoryType::Own(of), name).map(|m| m.offset);
        assert_eq!(types.size(&MemoryType::Own(0)), Some(8));
        assert_eq!(types.size(&MemoryType::Own(1)), Some(32));
        for (name, expected) in [("c", 0), ("d", 4), ("e", 16), ("f", 24)] {
            assert_eq!(offset(1, name), Ok(expected), "{name}");
        }
        assert_eq!(types.size(&MemoryType::Own(2)), None);
        let error = offset(2, "g").unwrap_err();
        assert_eq!(
            error.message,
            "struct endless has a member of an unknown type"
        );
        let error = offset(1, "x").unwrap_err();
        assert_eq!(error.message, "struct outer has no member \"x\"");
    }
}
