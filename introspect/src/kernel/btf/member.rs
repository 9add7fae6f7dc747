//! Offsets of struct members, by path.

use super::{Btf, Kind, TypeId};
use crate::kernel::nearest;

/// The maximum number of members that one search looks at, including those of anonymous structs and
/// unions. Bounds the cost of a damaged file whose structs contain themselves.
const MAX_MEMBERS: usize = 1 << 16;
/// The maximum number of structs of one name that are tried.
const MAX_NAMESAKES: usize = 64;
/// The maximum nesting depth of anonymous structs and unions.
const MAX_DEPTH: usize = 16;

/// A member's position and type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Offset from the start of the outermost struct, in bits.
    pub bit_offset: u64,
    /// Offset in bytes; for a bitfield, of the byte that holds its first bit.
    pub byte_offset: u64,
    /// Width in bits; only for a bitfield.
    pub bits: Option<u32>,
    /// Size of the member's type in bytes; 0 for a flexible array.
    pub size: u64,
    /// The member's type.
    pub type_id: TypeId,
    /// The member's type, as C writes it.
    pub type_name: String,
}

/// An error in resolving a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemberError {
    /// The path names no member.
    #[error("invalid member {path:?}: expected struct_name.member or struct_name.member.member")]
    NoPath {
        /// The requested path.
        path: String,
    },
    /// The struct, union or typedef does not exist.
    #[error("{path}: the kernel has no struct, union or typedef {name:?}")]
    NoType {
        /// The requested path.
        path: String,
        /// The first part of the path.
        name: String,
    },
    /// The struct has no such member.
    #[error("{path}: {owner} has no member {name:?}{}", near_text(near))]
    NoMember {
        /// The requested path.
        path: String,
        /// The struct searched, as C writes it.
        owner: String,
        /// The part not found.
        name: String,
        /// The struct's members with similar names.
        near: Vec<String>,
    },
    /// The path leads through a pointer.
    #[error(
        "{path}: {owner:?} before {name:?} is a pointer; read it, then name the member of its target"
    )]
    ThroughPointer {
        /// The requested path.
        path: String,
        /// Type of the pointer, as C writes it.
        owner: String,
        /// The part after the pointer.
        name: String,
    },
    /// The path leads through a type without members.
    #[error("{path}: {owner} has no members, so no {name:?}")]
    NotComposite {
        /// The requested path.
        path: String,
        /// The type, as C writes it.
        owner: String,
        /// The part after that type.
        name: String,
    },
}

fn near_text(near: &[String]) -> String {
    match near.is_empty() {
        true => String::new(),
        false => format!(" (it has {})", near.join(", ")),
    }
}

/// A member found, relative to the struct searched.
struct Found {
    bit_offset: u64,
    bits: u32,
    type_id: TypeId,
}

impl Btf {
    /// Returns the position of the member at `path`: `task_struct.pid`, or through embedded structs
    /// `task_struct.se.vruntime`. The first part names a struct, union or typedef. Members of
    /// anonymous structs and unions are named as in C, as if they belonged to the enclosing struct.
    /// Of several structs of one name, the first that has the member counts.
    ///
    /// # Errors
    /// If a part is not found, or a pointer would have to be followed.
    pub fn member(&self, path: &str) -> Result<Member, MemberError> {
        let (first, rest) = path
            .split_once('.')
            .filter(|(first, rest)| !first.is_empty() && !rest.is_empty())
            .ok_or_else(|| MemberError::NoPath {
                path: path.to_owned(),
            })?;
        let mut failure = None;
        for kinds in [&[Kind::Struct, Kind::Union][..], &[Kind::Typedef]] {
            for owner in self.find_all(first, kinds).take(MAX_NAMESAKES) {
                match self.walk(path, owner, rest) {
                    Ok(member) => return Ok(member),
                    Err(error) => failure = failure.or(Some(error)),
                }
            }
        }
        Err(failure.unwrap_or_else(|| MemberError::NoType {
            path: path.to_owned(),
            name: first.to_owned(),
        }))
    }

    /// Follows the parts of `rest` from `owner`.
    pub(super) fn walk(
        &self,
        path: &str,
        mut owner: TypeId,
        rest: &str,
    ) -> Result<Member, MemberError> {
        let (mut bit_offset, mut bits) = (0u64, 0);
        for name in rest.split('.') {
            let found = self.step(path, owner, name)?;
            // A sum of 32-bit offsets, one for each part of the path, cannot overflow.
            bit_offset = bit_offset.saturating_add(found.bit_offset);
            (owner, bits) = (found.type_id, found.bits);
        }
        Ok(Member {
            bit_offset,
            byte_offset: bit_offset / 8,
            bits: (bits != 0).then_some(bits),
            size: self.size(owner).unwrap_or(0),
            type_id: owner,
            type_name: self.type_name(owner),
        })
    }

    /// Resolves one part of a path.
    fn step(&self, path: &str, owner: TypeId, name: &str) -> Result<Found, MemberError> {
        let bare = self.bare(owner).unwrap_or(owner);
        let kind = self.record(bare).map(|record| record.kind);
        let (path, name) = (path.to_owned(), name.to_owned());
        if !kind.is_some_and(Kind::is_composite) {
            let owner = self.type_name(owner);
            return Err(match kind {
                Some(Kind::Pointer) => MemberError::ThroughPointer { path, owner, name },
                _ => MemberError::NotComposite { path, owner, name },
            });
        }
        let mut budget = MAX_MEMBERS;
        self.search(bare, &name, MAX_DEPTH, &mut budget)
            .ok_or_else(|| {
                let mut names = Vec::new();
                self.collect_names(bare, MAX_DEPTH, &mut names);
                let near = nearest::nearest(&name, names.into_iter(), 3);
                let near = near.into_iter().map(str::to_owned).collect();
                let owner = self.type_name(owner);
                MemberError::NoMember {
                    path,
                    owner,
                    name,
                    near,
                }
            })
    }

    /// Searches a struct or union and its anonymous ones.
    fn search(&self, owner: TypeId, name: &str, depth: usize, budget: &mut usize) -> Option<Found> {
        let record = self
            .record(owner)
            .filter(|record| record.kind.is_composite())?;
        let depth = depth.checked_sub(1)?;
        for member in record.members() {
            *budget = budget.checked_sub(1)?;
            let member_name = self.string(member.name);
            if member_name == name.as_bytes() {
                return Some(Found {
                    bit_offset: u64::from(member.bit_offset),
                    bits: member.bits,
                    type_id: member.type_id,
                });
            }
            if member_name.is_empty() {
                let inner = self
                    .bare(member.type_id)
                    .and_then(|id| self.search(id, name, depth, budget));
                if let Some(found) = inner {
                    return Some(Found {
                        bit_offset: found.bit_offset + u64::from(member.bit_offset),
                        ..found
                    });
                }
            }
        }
        None
    }

    /// Collects the names that [`search`](Self::search) would find, at most [`MAX_MEMBERS`].
    fn collect_names<'a>(&'a self, owner: TypeId, depth: usize, names: &mut Vec<&'a str>) {
        let Some(record) = self
            .record(owner)
            .filter(|record| record.kind.is_composite())
        else {
            return;
        };
        for member in record.members() {
            if depth == 0 || names.len() >= MAX_MEMBERS {
                return;
            }
            // An anonymous member counts as an empty name, so that it consumes the bound as well.
            names.push(self.name(member.name));
            if let ("", Some(inner)) = (self.name(member.name), self.bare(member.type_id)) {
                self.collect_names(inner, depth - 1, names);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::test_types::{TestBtf, task_types};
    use super::*;
    use crate::test_says::assert_says;

    #[test]
    fn members_are_found_through_embedded_and_anonymous_structs() {
        let btf = Btf::parse(&task_types().bytes()).unwrap();
        for (path, bit_offset, bits, size, type_name) in [
            ("task_struct.pid", 32 * 8, None, 4, "pid_t"),
            ("task_struct.comm", 48 * 8, None, 16, "char [16]"),
            ("task_struct.mm", 64 * 8, None, 8, "struct mm_struct *"),
            ("task_struct.se", 72 * 8, None, 16, "struct sched_entity"),
            ("task_struct.se.vruntime", 80 * 8, None, 8, "long int"),
            ("task_struct.in_execve", 96 * 8 + 3, Some(1), 4, "int"),
            ("pcpu_hot.preempt_count", 8 * 8, None, 4, "int"),
            ("pcpu_hot.pad", 0, None, 64, "char [64]"),
        ] {
            let found = btf.member(path).unwrap();
            let expected = (bit_offset, bit_offset / 8, bits, size, type_name);
            let found = (
                found.bit_offset,
                found.byte_offset,
                found.bits,
                found.size,
                found.type_name,
            );
            assert_eq!(
                (found.0, found.1, found.2, found.3, found.4.as_str()),
                expected,
                "{path}"
            );
        }
    }

    #[test]
    fn paths_that_lead_nowhere_say_where_they_end() {
        let btf = Btf::parse(&task_types().bytes()).unwrap();
        for (path, expected) in [
            ("task_struct", "invalid member \"task_struct\""),
            ("", "invalid member"),
            ("task.pid", "no struct, union or typedef \"task\""),
            (
                "task_struct.pud",
                "struct task_struct has no member \"pud\" (it has pid)",
            ),
            (
                "task_struct.mm.pgd",
                "\"struct mm_struct *\" before \"pgd\" is a pointer",
            ),
            ("task_struct.pid.x", "pid_t has no members, so no \"x\""),
            ("task_struct.se.", "has no member \"\""),
        ] {
            assert_says(btf.member(path).unwrap_err(), expected);
        }
    }

    #[test]
    fn of_several_structs_of_one_name_the_one_with_the_member_is_taken() {
        let mut types = TestBtf::default();
        let int = types.add("int", Kind::Int, 0, 4, &[32]);
        types.composite(
            "device",
            Kind::Struct,
            false,
            8,
            &[("first", int, 0), ("id", int, 32)],
        );
        types.composite(
            "device",
            Kind::Struct,
            false,
            8,
            &[("id", int, 0), ("second", int, 32)],
        );
        let btf = Btf::parse(&types.bytes()).unwrap();
        for (path, byte_offset) in [
            ("device.first", Some(0)),
            ("device.second", Some(4)),
            ("device.id", Some(4)),
            ("device.third", None),
        ] {
            assert_eq!(
                btf.member(path).ok().map(|m| m.byte_offset),
                byte_offset,
                "{path}"
            );
        }
    }

    #[test]
    fn structs_that_contain_themselves_are_given_up() {
        let mut types = TestBtf::default();
        let own = types.next();
        let members: Vec<u32> = (0..2000).flat_map(|_| [0, own, 0]).collect();
        types.add("endless", Kind::Struct, 2000, 8, &members);
        let btf = Btf::parse(&types.bytes()).unwrap();
        assert!(matches!(
            btf.member("endless.x"),
            Err(MemberError::NoMember { .. })
        ));
    }
}
