//! The extents of values: the bytes that they would take in memory.
//!
//! A number that is read from the guest, cast or written in the script has a width, also in a
//! variable; results of operators have 64 bits. Text has room for its NUL. Items of tuples and
//! records stand at C's places.

use super::RuleCompiler;
use super::types::{MemoryType, Type};
use crate::ast::{Builtin, Expression, ExpressionKind, UnaryOperator};
use crate::program::Operation;

/// The extent of a value, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Extent {
    /// That of a variable that is not set yet.
    Unset,
    /// A number in the script's text: it fits into so many bytes, and whether they have a sign.
    /// Larger ones may hold it, too.
    Literal(u8, bool),
    /// A number of so many bytes, and whether they have a sign.
    Number(u8, bool),
    /// Text, with its NUL.
    Text(u64),
    /// The items of a tuple, or the members of a record.
    Items(Vec<Extent>),
    /// Another value's.
    Unknown,
}

impl Extent {
    /// 64 bits.
    pub(super) const WHOLE: Self = Self::Number(8, true);

    /// Returns the extent of a number in the script's text.
    fn of_literal(number: i64) -> Self {
        let (significant, signed) = match number {
            0.. => (64 - number.leading_zeros(), false),
            _ => (65 - number.leading_ones(), true),
        };
        let bytes = significant.div_ceil(8).next_power_of_two().clamp(1, 8);
        Self::Literal(bytes as u8, signed)
    }

    /// Returns the size of a number in bytes.
    pub(super) fn bytes(&self) -> u8 {
        match self {
            Self::Literal(bytes, _) | Self::Number(bytes, _) => *bytes,
            _ => 8,
        }
    }

    /// Returns the extent of an item, if this is a tuple's.
    pub(super) fn item(&self, at: usize) -> Self {
        match self {
            Self::Items(items) => items.get(at).cloned().unwrap_or(Self::Unknown),
            _ => Self::Unknown,
        }
    }

    /// Returns the extent of a variable that holds values of this one and of another.
    pub(super) fn joined(self, other: Self) -> Self {
        match (self, other) {
            (Self::Unset, one) | (one, Self::Unset) => one,
            (Self::Literal(one, a), Self::Literal(other, b)) => {
                let (bytes, signed) = common((one, a), (other, b));
                Self::Literal(bytes, signed)
            }
            (
                Self::Literal(one, a) | Self::Number(one, a),
                Self::Literal(other, b) | Self::Number(other, b),
            ) => {
                let (bytes, signed) = common((one, a), (other, b));
                Self::Number(bytes, signed)
            }
            (Self::Text(one), Self::Text(other)) => Self::Text(one.max(other)),
            (Self::Items(one), Self::Items(other)) if one.len() == other.len() => {
                let both = one.into_iter().zip(other);
                Self::Items(both.map(|(one, other)| one.joined(other)).collect())
            }
            (one, other) if one == other => one,
            _ => Self::Unknown,
        }
    }
}

/// Returns the bytes and the sign of numbers that hold those of two others.
fn common((one, a): (u8, bool), (other, b): (u8, bool)) -> (u8, bool) {
    match (a, b) {
        (true, false) => common((other, b), (one, a)),
        // An unsigned number needs another bit, so twice the bytes.
        (false, true) if one >= other => ((2 * one).min(8), true),
        _ => (one.max(other), b),
    }
}

impl RuleCompiler<'_, '_> {
    /// Returns the extent of a value that has been compiled to the code from `before` on.
    pub(super) fn extent_of(&self, of: &Expression, found: &Type, before: usize) -> Extent {
        let last = self.code.get(before..).and_then(<[_]>::last);
        match (found, &of.kind, last) {
            (Type::Bool, ..) => Extent::Literal(1, false),
            (Type::Text, ExpressionKind::Text(text), _) => {
                let end = text.iter().position(|byte| *byte == 0);
                Extent::Text(end.unwrap_or(text.len()) as u64 + 1)
            }
            (Type::Text, ExpressionKind::Builtin(Builtin::Comm), _) => {
                // TASK_COMM_LEN of linux/sched.h.
                Extent::Text(16)
            }
            (Type::Text, _, Some(Operation::ReadText { most })) => Extent::Text(*most as u64),
            (_, ExpressionKind::Number(number) | ExpressionKind::Enumerator { number, .. }, _) => {
                Extent::of_literal(*number)
            }
            (
                Type::Number | Type::Unsigned | Type::Enum(_),
                ExpressionKind::Member { .. }
                | ExpressionKind::Index { .. }
                | ExpressionKind::Cast { .. }
                | ExpressionKind::Builtin(_)
                | ExpressionKind::Unary(UnaryOperator::Dereference, _),
                Some(Operation::Load { bytes, signed } | Operation::Extend { bytes, signed }),
            ) => Extent::Number(*bytes, *signed),
            (Type::Number, ExpressionKind::Call(_), Some(Operation::SwapBytes(bytes))) => {
                Extent::Number(*bytes, false)
            }
            (Type::Unsigned, ..) => Extent::Number(8, false),
            (Type::Number | Type::Enum(_), ..) => Extent::WHOLE,
            _ => Extent::Unknown,
        }
    }

    /// Returns the size of a value in bytes, if it is known.
    pub(super) fn size_of(&self, of: &Type, extent: &Extent) -> Option<u64> {
        self.layout_of(of, extent).map(|(size, _)| size)
    }

    /// Returns the size of a value in bytes, and the number that its place is a multiple of.
    fn layout_of(&self, of: &Type, extent: &Extent) -> Option<(u64, u64)> {
        let whole = |bytes: u8| Some((bytes.into(), bytes.into()));
        match (of, extent) {
            (Type::Bool, _) => whole(1),
            (Type::Text, Extent::Text(bytes)) => Some((*bytes, 1)),
            (Type::Tuple(items), _) => self.layout_of_items(items.iter(), extent),
            (Type::Record(members), _) => {
                self.layout_of_items(members.iter().map(|(_, of)| of), extent)
            }
            (Type::Array { element, elements }, _) => {
                let size = self.shared.types.size(element)?;
                Some((
                    size.checked_mul(*elements)?,
                    self.shared.types.alignment(element),
                ))
            }
            (Type::Lvalue(thing), _) => Some((
                self.shared.types.size(thing)?,
                self.shared.types.alignment(thing),
            )),
            (of, extent) if of.is_number() => whole(extent.bytes()),
            (Type::Pointer(_), _) => whole(8),
            _ => None,
        }
    }

    fn layout_of_items<'t>(
        &self,
        items: impl Iterator<Item = &'t Type>,
        extent: &Extent,
    ) -> Option<(u64, u64)> {
        let (mut end, mut widest) = (0u64, 1);
        for (at, item) in items.enumerate() {
            let (size, alignment) = self.layout_of(item, &extent.item(at))?;
            end = end.checked_next_multiple_of(alignment.max(1))?;
            end = end.checked_add(size)?;
            widest = alignment.max(widest);
        }
        Some((end.checked_next_multiple_of(widest)?, widest))
    }

    /// Returns a type as bpftrace names it: its kind, and the whole of it.
    pub(super) fn names_of(&self, of: &Type, extent: &Extent) -> (&'static str, String) {
        let list = |items: Vec<String>| items.join(",");
        match (of, extent) {
            (Type::Bool, _) => ("bool", "bool".to_owned()),
            (Type::Enum(_), _) => ("int", "enum".to_owned()),
            (
                Type::Number | Type::Unsigned,
                Extent::Literal(bytes, signed) | Extent::Number(bytes, signed),
            ) => {
                let number = MemoryType::Number {
                    bytes: *bytes,
                    signed: *signed,
                };
                ("int", self.shared.types.describe(&number))
            }
            (Type::Number, _) => ("int", "int64".to_owned()),
            (Type::Unsigned, _) => ("int", "uint64".to_owned()),
            (Type::Text, Extent::Text(bytes)) => ("string", format!("string[{bytes}]")),
            (Type::Text, _) => ("string", "string".to_owned()),
            (Type::Pointer(to), _) => ("pointer", format!("{} *", self.shared.types.describe(to))),
            (Type::Array { element, elements }, _) => (
                "array",
                format!("{}[{elements}]", self.shared.types.describe(element)),
            ),
            (Type::Tuple(items), _) => {
                let items = items.iter().enumerate();
                let names = items.map(|(at, of)| self.names_of(of, &extent.item(at)).1);
                ("tuple", format!("({})", list(names.collect())))
            }
            (Type::Record(members), _) => {
                let members = members.iter().enumerate();
                let names = members.map(|(at, (name, of))| {
                    format!(".{name} = {}", self.names_of(of, &extent.item(at)).1)
                });
                (
                    "record",
                    format!("{{ {} }}", names.collect::<Vec<_>>().join(", ")),
                )
            }
            (Type::Lvalue(thing @ MemoryType::Array { element, .. }), _) => {
                let base = match **element == MemoryType::Char {
                    true => "string",
                    false => "array",
                };
                (base, self.shared.types.describe(thing))
            }
            (Type::Lvalue(thing), _) => ("record", self.shared.types.describe(thing)),
            (Type::Stack(_), _) => ("stack", "stack".to_owned()),
            (Type::Shown, _) => ("buffer", "buffer".to_owned()),
            (Type::Cgroup, _) => ("cgroup_path", "cgroup_path".to_owned()),
            (Type::Any | Type::Translated { .. }, _) => ("none", "none".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Extent::{Literal, Number};
    use super::*;

    #[test]
    fn numbers_take_the_bytes_that_they_need() {
        for (number, expected) in [
            (0, Literal(1, false)),
            (255, Literal(1, false)),
            (256, Literal(2, false)),
            (70_000, Literal(4, false)),
            (i64::MAX, Literal(8, false)),
            (-1, Literal(1, true)),
            (-128, Literal(1, true)),
            (-129, Literal(2, true)),
            (i64::MIN, Literal(8, true)),
        ] {
            assert_eq!(Extent::of_literal(number), expected, "{number}");
        }
    }

    #[test]
    fn a_variable_has_room_for_all_that_it_holds() {
        for (one, other, expected) in [
            (Literal(1, false), Literal(2, false), Literal(2, false)),
            (Literal(1, false), Literal(2, true), Literal(2, true)),
            (Literal(1, false), Literal(1, true), Literal(2, true)),
            (Number(1, true), Literal(1, false), Number(2, true)),
            (Number(4, false), Literal(1, false), Number(4, false)),
            (Number(8, false), Number(8, true), Number(8, true)),
            (Extent::Text(3), Extent::Text(7), Extent::Text(7)),
            (Extent::Text(3), Number(8, true), Extent::Unknown),
        ] {
            assert_eq!(one.clone().joined(other.clone()), expected);
            assert_eq!(other.joined(one), expected);
        }
    }
}
