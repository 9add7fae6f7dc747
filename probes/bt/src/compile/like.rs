//! Types that a script takes from its values: `typeof(x)` and `sizeof(x)`. The value is compiled
//! for its type alone, and not evaluated.
//!
//! A number that is read from the guest or cast has a width, also in a local variable. Another one
//! has 64 bits: one in a map, and the results of operators.

use std::mem::discriminant;

use super::RuleCompiler;
use super::types::{MemoryType, Type, around, pointer};
use crate::ast::{Expression, ExpressionKind, LvalueKind, TypeName, UnaryOperator};
use crate::program::Operation;

/// The width of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// Each that it fits into, as a number in the script's text: 64 bits where nothing else counts.
    Any,
    /// So many bytes, and whether they have a sign.
    Of(u8, bool),
}

impl Width {
    /// 64 bits.
    pub(super) const WHOLE: Self = Self::Of(8, true);

    /// Returns the number of bytes.
    pub(super) fn bytes(self) -> u8 {
        match self {
            Self::Any => 8,
            Self::Of(bytes, _) => bytes,
        }
    }
}

impl RuleCompiler<'_, '_> {
    /// Returns the type that a script names, if there is one in the guest's memory.
    pub(super) fn named(&mut self, name: &TypeName) -> Option<MemoryType> {
        match &name.like {
            Some(like) => Some(around(self.type_alone(like).1?, name)),
            None => self.shared.types.named(name),
        }
    }

    /// Returns the type of a value, and that of such a thing in the guest's memory.
    pub(super) fn type_alone(&mut self, of: &Expression) -> (Type, Option<MemoryType>) {
        let before = self.here();
        let found = self.expression(of);
        let (bytes, signed) = match self.width_of(of, &found, before) {
            Width::Of(bytes, signed) if bytes < 8 => (bytes, signed),
            _ => (8, found != Type::Unsigned),
        };
        self.code.truncate(before);
        let thing = match &found {
            Type::Lvalue(thing) => Some(thing.clone()),
            Type::Pointer(to) => Some(pointer(to.clone())),
            Type::Bool => Some(MemoryType::Bool),
            Type::Enum(names) => Some(MemoryType::Enum {
                bytes,
                signed,
                names: names.clone(),
            }),
            Type::Number | Type::Unsigned => Some(MemoryType::Number { bytes, signed }),
            Type::Array { element, elements } => Some(MemoryType::Array {
                element: element.clone(),
                elements: *elements,
            }),
            Type::Any
            | Type::Text
            | Type::Shown
            | Type::Stack(_)
            | Type::Tuple(_)
            | Type::Record(_)
            | Type::Translated { .. } => None,
        };
        (found, thing)
    }

    /// Returns the width of a number that has been compiled to the code from `before` on.
    pub(super) fn width_of(&self, of: &Expression, found: &Type, before: usize) -> Width {
        if !found.is_number() {
            return Width::WHOLE;
        }
        let last = self.code.get(before..).and_then(<[_]>::last);
        match (&of.kind, last) {
            (ExpressionKind::Number(_) | ExpressionKind::Boolean(_), _) => Width::Any,
            (ExpressionKind::Lvalue(place), _) => match &place.kind {
                LvalueKind::Local(name) => {
                    let local = self.locals.iter().rev().find(|local| local.name == *name);
                    local.map_or(Width::WHOLE, |local| local.width)
                }
                LvalueKind::Global { .. } => Width::WHOLE,
            },
            (
                ExpressionKind::Member { .. }
                | ExpressionKind::Index { .. }
                | ExpressionKind::Cast { .. }
                | ExpressionKind::Builtin(_)
                | ExpressionKind::Unary(UnaryOperator::Dereference, _),
                Some(Operation::Load { bytes, signed } | Operation::Extend { bytes, signed }),
            ) => Width::Of(*bytes, *signed),
            (ExpressionKind::Call(_), Some(Operation::SwapBytes(bytes))) => {
                Width::Of(*bytes, false)
            }
            _ => Width::WHOLE,
        }
    }

    /// Widens a local variable to numbers of this width.
    pub(super) fn widen(&mut self, name: &str, width: Width) {
        if let Some(local) = self.locals.iter_mut().rev().find(|l| l.name == name) {
            local.width = match (local.width, width) {
                (Width::Any, other) | (other, Width::Any) => other,
                (one, other) if one.bytes() < other.bytes() => other,
                (one, _) => one,
            };
        }
    }

    /// Compiles a cast to the type of a value that is none of the guest's memory. Only another of
    /// that type has it.
    pub(super) fn cast_to_same(&mut self, same: &Type, to: &TypeName, value: &Expression) -> Type {
        if to.pointers > 0 || to.elements.is_some() {
            return self.no_type(to);
        }
        let found = self.value(value);
        let is_known = [same, &found].iter().all(|of| **of != Type::Any);
        match is_known && discriminant(same) != discriminant(&found) {
            true => self.refuse(value.span, "this value is of another type than typeof's"),
            false => found,
        }
    }

    /// Compiles `sizeof` of an expression.
    pub(super) fn size_of_value(&mut self, of: &Expression) -> Type {
        let size = match self.type_alone(of) {
            (_, Some(thing)) => self.shared.types.size(&thing),
            (other, None) => size_of(&other),
        };
        match size {
            Some(size) => self.quantity(size),
            None => self.refuse(
                of.span,
                "the size of this is not known before the script runs",
            ),
        }
    }
}

/// Returns the number of bytes of a value that is not in memory. Items of a tuple stand one behind
/// the other.
fn size_of(of: &Type) -> Option<u64> {
    match of {
        Type::Bool => Some(1),
        of if of.is_number() || matches!(of, Type::Pointer(_)) => Some(8),
        Type::Tuple(items) => items.iter().map(size_of).sum(),
        Type::Record(members) => members.iter().map(|(_, of)| size_of(of)).sum(),
        _ => None,
    }
}
