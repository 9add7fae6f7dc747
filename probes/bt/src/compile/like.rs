//! Types that a script takes from its values: `typeof(x)`, `sizeof(x)` and `typeinfo(x)`. The
//! value is compiled for its type alone, and not evaluated.

use std::mem::discriminant;
use std::sync::Arc;

use super::RuleCompiler;
use super::extent::Extent;
use super::types::{MemoryType, Type, around, pointer};
use crate::ast::{Expression, Span, TypeName};
use crate::program::Operation;
use crate::value::Value;

/// The members of the record that `typeinfo()` gives, and the names that they had before.
pub(super) const TYPE_INFO: [(&str, &str); 3] = [
    ("btf_id", "btf_id"),
    ("base_type", "base_ty"),
    ("full_type", "full_ty"),
];

/// Returns the place of a member of what `typeinfo()` gives.
pub(super) fn item_of_type_info(name: &str) -> Option<usize> {
    let is_it = |(known, before): &(&str, &str)| [*known, *before].contains(&name);
    TYPE_INFO.iter().position(is_it)
}

impl RuleCompiler<'_, '_> {
    /// Returns the type that a script names, if there is one in the guest's memory.
    pub(super) fn named(&mut self, name: &TypeName) -> Option<MemoryType> {
        match &name.like {
            Some(like) => Some(around(self.type_alone(like).1?, name)),
            None => self.shared.types.named(name),
        }
    }

    /// Returns the type of a value, and that of such a thing in the guest's memory. Its extent is
    /// known then.
    pub(super) fn type_alone(&mut self, of: &Expression) -> (Type, Option<MemoryType>) {
        let before = self.here();
        let found = self.expression(of);
        self.code.truncate(before);
        let (bytes, signed) = match self.extent {
            Extent::Literal(bytes, signed) | Extent::Number(bytes, signed) => (bytes, signed),
            _ => (8, found != Type::Unsigned),
        };
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
            | Type::Cgroup
            | Type::Stack(_)
            | Type::Tuple(_)
            | Type::Record(_)
            | Type::Translated { .. } => None,
        };
        (found, thing)
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

    /// Compiles `(string[N])text`: text of so many bytes, its NUL included.
    pub(super) fn cast_to_text(&mut self, to: &TypeName, value: &Expression) -> Type {
        let found = self.value(value);
        if !matches!(found, Type::Text | Type::Any) {
            return self.refuse(value.span, "only text is cast to string; str() reads it");
        }
        if let Some(room @ 1..) = to.elements {
            self.quantity(room - 1);
            self.put(Operation::CutText);
            self.own_extent = Some(Extent::Text(room));
        }
        Type::Text
    }

    /// Compiles `sizeof` of an expression.
    pub(super) fn size_of_value(&mut self, of: &Expression) -> Type {
        let (found, _) = self.type_alone(of);
        match self.size_of(&found, &self.extent) {
            Some(size) => self.quantity(size),
            None => self.refuse(
                of.span,
                "the size of this is not known before the script runs",
            ),
        }
    }

    /// Compiles `typeinfo`: a record of a number, which is 0, and the names of the type.
    pub(super) fn type_info(&mut self, of: &TypeName, span: Span) -> Type {
        let Some(items) = self.type_names(of) else {
            self.refuse(span, "this type is not known");
            return Type::Any;
        };
        let names = TYPE_INFO.map(|(name, _)| Arc::from(name));
        let types = [Type::Number, Type::Text, Type::Text];
        for item in items {
            self.put(Operation::Constant(item));
        }
        self.record(names.into_iter().zip(types).collect())
    }

    /// Returns the items of what `typeinfo` gives for a type.
    pub(super) fn type_names(&mut self, of: &TypeName) -> Option<[Value; 3]> {
        let (base, full) = match &of.like {
            Some(like) if of.pointers == 0 && of.elements.is_none() => {
                let (found, _) = self.type_alone(like);
                self.names_of(&found, &self.extent)
            }
            _ => {
                let thing = self.named(of)?;
                let full = self.shared.types.describe(&thing);
                let base = match &thing {
                    MemoryType::Pointer(_) => "pointer",
                    MemoryType::Array { .. } => "array",
                    MemoryType::Bool => "bool",
                    MemoryType::Kernel(_) | MemoryType::Own(_) => "record",
                    MemoryType::Number { .. } | MemoryType::Char | MemoryType::Enum { .. } => "int",
                    MemoryType::Unknown => "none",
                };
                (base, full)
            }
        };
        Some([
            Value::ZERO,
            Value::text(base.as_bytes()),
            Value::text(full.as_bytes()),
        ])
    }
}
