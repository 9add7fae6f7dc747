//! The form of a type for a reader of its values: a number of some size, a pointer, or something
//! with members.
//!
//! For readers whose types are unknown until a user names them. Readers of known structures look up
//! [members by path](Btf::member).

use super::{Btf, Kind, Member, MemberError, TypeId};

/// BTF_INT_SIGNED, BTF_INT_CHAR and BTF_INT_BOOL of an int's encoding
/// (include/uapi/linux/btf.h).
pub(super) const INT_SIGNED: u32 = 1;
pub(super) const INT_CHAR: u32 = 2;
pub(super) const INT_BOOL: u32 = 4;
/// The greatest depth of anonymous structs in one another.
const MOST_ANONYMOUS: usize = 8;

/// A type's form, without typedefs and qualifiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A number.
    Int {
        /// Size in bytes.
        bytes: u64,
        /// Whether the number is signed.
        signed: bool,
    },
    /// A byte of text.
    Char,
    /// A byte that is true or false.
    Bool,
    /// A number of an enum.
    Enum {
        /// The enum itself, without typedefs.
        id: TypeId,
        /// Size in bytes.
        bytes: u64,
        /// Whether the number is signed.
        signed: bool,
    },
    /// A pointer, including a pointer to `void`.
    Pointer(TypeId),
    /// An array.
    Array {
        /// The type of an element.
        element: TypeId,
        /// The number of elements; 0 where the source states none.
        elements: u32,
    },
    /// A struct or union.
    Composite {
        /// The struct or union itself, without typedefs.
        id: TypeId,
        /// Size in bytes.
        bytes: u64,
    },
    /// A type without readable values: `void`, a function, a struct that is only declared.
    Opaque,
}

impl Btf {
    /// Returns the form of a type.
    #[must_use]
    pub fn form(&self, id: TypeId) -> Form {
        let Some(id) = self.bare(id) else {
            return Form::Opaque;
        };
        let Some(record) = self.record(id) else {
            return Form::Opaque;
        };
        let bytes = u64::from(record.size_or_type);
        match record.kind {
            Kind::Int => {
                let encoding = record.encoding().unwrap_or_default() >> 24;
                // GCC does not set the char encoding: go by size and name.
                let name = self.name(record.name);
                if bytes == 1 && (encoding & INT_CHAR != 0 || name == "char") {
                    Form::Char
                } else if bytes == 1 && encoding & INT_BOOL != 0 {
                    Form::Bool
                } else {
                    Form::Int {
                        bytes,
                        signed: encoding & INT_SIGNED != 0,
                    }
                }
            }
            Kind::Enum | Kind::Enum64 => Form::Enum {
                id,
                bytes,
                signed: record.flag,
            },
            Kind::Pointer => Form::Pointer(TypeId(record.size_or_type)),
            Kind::Array => match record.array() {
                Some((element, elements)) => Form::Array { element, elements },
                None => Form::Opaque,
            },
            Kind::Struct | Kind::Union => Form::Composite { id, bytes },
            _ => Form::Opaque,
        }
    }

    /// Returns the member `name` of the struct or union `owner`. Typedefs of `owner` are followed.
    /// Members of its anonymous structs count as its own.
    ///
    /// # Errors
    /// If it has no member of this name.
    pub fn member_of(&self, owner: TypeId, name: &str) -> Result<Member, MemberError> {
        let path = format!("{}.{name}", self.type_name(owner));
        self.walk(&path, owner, name)
    }

    /// Returns the type that C code calls `name`: `struct file`, `union x`, `enum y`, or a
    /// typedef's name. C's built-in number types are not looked up here.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<TypeId> {
        match name.split_once(' ') {
            // A struct that is only declared in one source file is defined in another.
            Some(("struct", name)) => self.find(name, &[Kind::Struct]),
            Some(("union", name)) => self.find(name, &[Kind::Union]),
            Some(("enum", name)) => self.find(name, &[Kind::Enum, Kind::Enum64]),
            Some(_) => None,
            None => self
                .find(name, &[Kind::Typedef])
                .or_else(|| self.find(name, &[Kind::Struct, Kind::Union])),
        }
    }

    /// Returns the enum that has the enumerator `name`, and its value. Searches all types.
    #[must_use]
    pub fn constant(&self, name: &str) -> Option<(TypeId, i64)> {
        let mut all = (1..=u32::try_from(self.len()).ok()?).map(TypeId);
        all.find_map(|id| {
            let record = self.record(id)?;
            let is_enum = matches!(record.kind, Kind::Enum | Kind::Enum64);
            let mut members = is_enum.then(|| record.enumerators())?;
            let (_, value) = members.find(|(at, _)| self.string(*at) == name.as_bytes())?;
            Some((id, value))
        })
    }

    /// Returns the enumerators of an enum: names and values, in the order of its declaration.
    /// Anything else has none.
    #[must_use]
    pub fn enumerators(&self, id: TypeId) -> Vec<(String, i64)> {
        let record = self.bare(id).and_then(|id| self.record(id));
        let Some(record) = record.filter(|of| matches!(of.kind, Kind::Enum | Kind::Enum64)) else {
            return Vec::new();
        };
        let members = record.enumerators();
        members
            .map(|(at, value)| (self.name(at).to_owned(), value))
            .collect()
    }

    /// Returns the names of a struct's or union's members, in the order of its declaration. Members
    /// of its anonymous structs count as its own.
    #[must_use]
    pub fn member_names(&self, id: TypeId) -> Vec<String> {
        let mut names = Vec::new();
        self.add_member_names(id, &mut names, MOST_ANONYMOUS);
        names
    }

    fn add_member_names(&self, id: TypeId, names: &mut Vec<String>, depth: usize) {
        let record = self.bare(id).and_then(|id| self.record(id));
        let Some(record) = record.filter(|of| matches!(of.kind, Kind::Struct | Kind::Union)) else {
            return;
        };
        for member in record.members() {
            match self.name(member.name) {
                "" if depth > 0 => self.add_member_names(member.type_id, names, depth - 1),
                "" => {}
                name => names.push(name.to_owned()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::test_types::{TestBtf, task_types};
    use super::*;

    #[test]
    fn types_are_what_their_values_are_read_as() {
        const SIGNED: u32 = 1 << 24;
        const BOOL: u32 = 4 << 24;
        let mut types = TestBtf::default();
        let int = types.add("int", Kind::Int, 0, 4, &[SIGNED | 32]);
        let byte = types.add("char", Kind::Int, 0, 1, &[SIGNED | 8]);
        let own = types.add("u8", Kind::Int, 0, 1, &[8]);
        let truth = types.add("_Bool", Kind::Int, 0, 1, &[BOOL | 8]);
        let alias = types.add("pid_t", Kind::Typedef, 0, int, &[]);
        let pointer = types.add("", Kind::Pointer, 0, alias, &[]);
        let array = types.add("", Kind::Array, 0, 0, &[byte, int, 16]);
        let one = types.string("ONE");
        let numbers = types.add("numbers", Kind::Enum, 1, 4, &[one, 7]);
        types.composite(
            "pair",
            Kind::Struct,
            false,
            8,
            &[("a", int, 0), ("b", alias, 32)],
        );
        let btf = Btf::parse(&types.bytes()).unwrap();
        let signed = Form::Int {
            bytes: 4,
            signed: true,
        };
        let unsigned = |bytes| Form::Int {
            bytes,
            signed: false,
        };
        for (id, expected) in [
            (int, signed),
            (alias, signed),
            (byte, Form::Char),
            (own, unsigned(1)),
            (
                numbers,
                Form::Enum {
                    id: TypeId(numbers),
                    bytes: 4,
                    signed: false,
                },
            ),
            (truth, Form::Bool),
            (pointer, Form::Pointer(TypeId(alias))),
            (
                array,
                Form::Array {
                    element: TypeId(byte),
                    elements: 16,
                },
            ),
            (0, Form::Opaque),
            (9999, Form::Opaque),
        ] {
            assert_eq!(btf.form(TypeId(id)), expected, "{id}");
        }
        let pair = btf.named("struct pair").unwrap();
        assert_eq!(btf.form(pair), Form::Composite { id: pair, bytes: 8 });
        assert_eq!(btf.member_of(pair, "b").unwrap().byte_offset, 4);
        btf.member_of(pair, "c").unwrap_err();
        assert_eq!(btf.named("pid_t"), Some(TypeId(alias)));
        assert_eq!(btf.named("enum numbers"), Some(TypeId(numbers)));
        assert_eq!(btf.named("struct pid_t"), None);
        assert_eq!(btf.constant("ONE"), Some((TypeId(numbers), 7)));
        assert_eq!(btf.constant("TWO"), None);
        assert_eq!(btf.enumerators(TypeId(numbers)), [("ONE".to_owned(), 7)]);
        let pair = btf.named("struct pair").unwrap();
        assert_eq!(btf.member_names(pair), ["a", "b"]);
    }

    #[test]
    fn members_of_members_are_found_one_by_one() {
        let btf = Btf::parse(&task_types().bytes()).unwrap();
        let task = btf.named("struct task_struct").unwrap();
        let entity = btf.member_of(task, "se").unwrap();
        let own = btf.member_of(entity.type_id, "vruntime").unwrap();
        assert_eq!((entity.byte_offset, own.byte_offset), (72, 8));
    }
}
