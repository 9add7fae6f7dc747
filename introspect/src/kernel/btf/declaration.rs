//! Types as they are declared, one by one and with their names: for a writer of another format.
//!
//! Readers of values follow [forms](super::Form) instead.

use super::form::{INT_BOOL, INT_CHAR, INT_SIGNED};
use super::{Btf, Kind, TypeId};

/// The declaration of a type. Names are offsets of [`Btf::names`], whose byte 0 is the empty name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Declaration {
    /// A number, a byte of text, or a truth value.
    Int {
        /// The name.
        name: u32,
        /// Size in bytes.
        bytes: u32,
        /// The meaning of its values.
        encoding: Encoding,
    },
    /// A number with a fraction.
    Float {
        /// The name.
        name: u32,
        /// Size in bytes.
        bytes: u32,
    },
    /// A pointer.
    Pointer(TypeId),
    /// A type with `const`, `volatile` or `restrict`.
    Qualified(Qualifier, TypeId),
    /// Another name of a type.
    Typedef {
        /// The name.
        name: u32,
        /// The type.
        of: TypeId,
    },
    /// An array.
    Array {
        /// The type of an element.
        element: TypeId,
        /// The number of elements; 0 where the source states none.
        elements: u32,
    },
    /// A struct or union.
    Composite {
        /// The name.
        name: u32,
        /// Whether it is a union.
        is_union: bool,
        /// Size in bytes.
        bytes: u32,
        /// The members, in order.
        members: Vec<DeclaredMember>,
    },
    /// A struct or union that is only declared.
    Forward {
        /// The name.
        name: u32,
        /// Whether it is a union.
        is_union: bool,
    },
    /// An enum.
    Enum {
        /// The name.
        name: u32,
        /// Size in bytes.
        bytes: u32,
        /// The names and values, in order.
        enumerators: Vec<(u32, i64)>,
    },
    /// The type of a function.
    Prototype {
        /// The type of the result.
        returns: TypeId,
        /// The names and types of the parameters, in order.
        parameters: Vec<(u32, TypeId)>,
        /// Whether more arguments may follow (`...`).
        variadic: bool,
    },
    /// A function, which is no type.
    Function {
        /// The name.
        name: u32,
        /// Its type.
        prototype: TypeId,
    },
    /// Something else that is no type of C: a variable, a section, a tag.
    Other,
}

/// The meaning of an int's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// A number with a sign.
    Signed,
    /// A number without a sign.
    Unsigned,
    /// A byte of text.
    Char,
    /// A truth value.
    Bool,
}

/// A qualifier of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Qualifier {
    /// `const`.
    Const,
    /// `volatile`.
    Volatile,
    /// `restrict`.
    Restrict,
}

/// A member of a struct or union.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeclaredMember {
    /// The name.
    pub name: u32,
    /// The type.
    pub type_id: TypeId,
    /// Offset from the start of the struct, in bits.
    pub bit_offset: u32,
    /// Width of a bit field in bits; 0 for any other member.
    pub bits: u32,
}

impl Btf {
    /// Returns the section of names, each of which ends with a NUL byte, but for one that is cut
    /// off at the end.
    #[must_use]
    pub fn names(&self) -> &[u8] {
        self.strings()
    }

    /// Checks whether a name of a declaration is empty.
    #[must_use]
    pub fn is_unnamed(&self, name: u32) -> bool {
        self.string(name).is_empty()
    }

    /// Returns the type that `id` names: tags are followed. Returns `None` for `void`, a type that
    /// does not exist, and an endless chain of types.
    #[must_use]
    pub fn untagged(&self, id: TypeId) -> Option<TypeId> {
        let mut behind = self.bare(id)?;
        // An array of itself has no end either.
        for _ in 0..super::MAX_CHAIN {
            match self.record(behind)?.array() {
                Some((element, _)) if self.record(behind)?.kind == Kind::Array => {
                    behind = self.bare(element)?;
                }
                _ => break,
            }
        }
        if self.record(behind)?.kind == Kind::Array {
            return None;
        }
        let mut id = id;
        while let Some(record) = self.record(id).filter(|of| of.kind == Kind::TypeTag) {
            id = TypeId(record.size_or_type);
        }
        self.record(id).map(|_| id)
    }

    /// Returns how a type is declared; `None` for `void` and for a number that is no type's.
    #[must_use]
    pub fn declaration(&self, id: TypeId) -> Option<Declaration> {
        let record = self.record(id)?;
        let (name, word) = (record.name, record.size_or_type);
        let qualified = |qualifier| Declaration::Qualified(qualifier, TypeId(word));
        Some(match record.kind {
            Kind::Int => {
                let flags = record.encoding().unwrap_or_default() >> 24;
                let encoding = match flags {
                    _ if flags & INT_BOOL != 0 => Encoding::Bool,
                    // GCC does not set the char encoding.
                    _ if flags & INT_CHAR != 0 || self.name(name) == "char" => Encoding::Char,
                    _ if flags & INT_SIGNED != 0 => Encoding::Signed,
                    _ => Encoding::Unsigned,
                };
                Declaration::Int {
                    name,
                    bytes: word,
                    encoding,
                }
            }
            Kind::Float => Declaration::Float { name, bytes: word },
            Kind::Pointer => Declaration::Pointer(TypeId(word)),
            Kind::Const => qualified(Qualifier::Const),
            Kind::Volatile => qualified(Qualifier::Volatile),
            Kind::Restrict => qualified(Qualifier::Restrict),
            Kind::Typedef => Declaration::Typedef {
                name,
                of: TypeId(word),
            },
            Kind::Array => {
                let (element, elements) = record.array()?;
                Declaration::Array { element, elements }
            }
            Kind::Struct | Kind::Union => {
                let members = record.members().map(|member| DeclaredMember {
                    name: member.name,
                    type_id: member.type_id,
                    bit_offset: member.bit_offset,
                    bits: member.bits,
                });
                Declaration::Composite {
                    name,
                    is_union: record.kind == Kind::Union,
                    bytes: word,
                    members: members.collect(),
                }
            }
            Kind::Forward => Declaration::Forward {
                name,
                is_union: record.flag,
            },
            Kind::Enum | Kind::Enum64 => Declaration::Enum {
                name,
                bytes: word,
                enumerators: record.enumerators().collect(),
            },
            Kind::Prototype => {
                let mut parameters: Vec<_> = record.parameters().collect();
                // A last parameter without name and type stands for `...`.
                let variadic = parameters.pop_if(|last| *last == (0, TypeId(0))).is_some();
                Declaration::Prototype {
                    returns: TypeId(word),
                    parameters,
                    variadic,
                }
            }
            Kind::Function => Declaration::Function {
                name,
                prototype: TypeId(word),
            },
            Kind::Variable | Kind::DataSection | Kind::DeclTag | Kind::TypeTag => {
                Declaration::Other
            }
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::test_types::TestBtf;
    use super::*;

    #[test]
    fn chains_without_an_end_are_no_types() {
        let mut types = TestBtf::default();
        let int = types.add("int", Kind::Int, 0, 4, &[1 << 24 | 32]);
        let tag = types.add("user", Kind::TypeTag, 0, int, &[]);
        let next = types.next();
        let itself = types.add("itself", Kind::Typedef, 0, next, &[]);
        let next = types.next();
        let array = types.add("", Kind::Array, 0, 0, &[next, int, 2]);
        let matrix = types.add("", Kind::Array, 0, 0, &[int, int, 2]);
        let alias = types.add("vector", Kind::Typedef, 0, matrix, &[]);
        let btf = Btf::parse(&types.bytes()).unwrap();
        for (id, expected) in [
            (int, Some(int)),
            (tag, Some(int)),
            (alias, Some(alias)),
            (matrix, Some(matrix)),
            (itself, None),
            (array, None),
            (0, None),
            (9999, None),
        ] {
            assert_eq!(btf.untagged(TypeId(id)), expected.map(TypeId), "{id}");
        }
    }
}
