//! Compiles arrays and structures as values: read whole from the guest's memory, or made of a
//! number's bytes.
//!
//! An array or structure in memory is an address until it is kept or shown. As a value it is
//! bounded: a larger array is bytes, and a larger structure is refused.

use super::RuleCompiler;
use super::extent::Extent;
use super::types::{MemoryType, Type};
use crate::ast::{Expression, Span};
use crate::program::Operation;
use crate::run::MOST_BYTES;

/// The greatest number of elements of an array as a value, those of arrays in it included.
const MOST_ELEMENTS: u64 = 256;
/// The greatest number of members of a structure as a value, those of structures in it included.
const MOST_MEMBERS: usize = 128;
/// The greatest depth of structures in a structure as a value.
const DEEPEST: usize = 8;

impl RuleCompiler<'_, '_> {
    /// Replaces the address of an array on the stack by its elements. They are bytes where the
    /// array has none of its own, too many, or elements that are no numbers.
    pub(super) fn array_value(&mut self, element: MemoryType, elements: u64) -> Type {
        let (innermost, all) = flattened(&element, elements);
        let number = innermost
            .number()
            .filter(|_| *innermost != MemoryType::Char);
        match (number, usize::try_from(all)) {
            (Some((bytes, signed)), Ok(all)) if is_bounded(bytes, all) => {
                self.put(Operation::ReadArray {
                    bytes,
                    signed,
                    elements: all,
                });
                self.group(&element);
                Type::Array {
                    element: Box::new(element),
                    elements,
                }
            }
            _ => {
                let size = self.shared.types.size(&element).unwrap_or(1);
                self.quantity(elements.saturating_mul(size));
                let most = self.shared.options.longest_text;
                self.gives(Operation::ReadBytes { most }, Type::Shown)
            }
        }
    }

    /// Divides the elements on the stack into the arrays that the elements are.
    fn group(&mut self, element: &MemoryType) {
        if let MemoryType::Array { element, elements } = element {
            self.group(element);
            self.put(Operation::Group(
                usize::try_from(*elements).unwrap_or(usize::MAX),
            ));
        }
    }

    /// Compiles an element of the array on the stack.
    pub(super) fn element_of_value(
        &mut self,
        element: MemoryType,
        elements: u64,
        index: &Expression,
    ) -> Type {
        self.check_index(elements, index);
        self.number(Some(index));
        self.put(Operation::Element);
        element.value()
    }

    /// Refuses an index behind the end of an array. One element may stand for any number of them,
    /// as old structures of C end in it.
    pub(super) fn check_index(&mut self, elements: u64, index: &Expression) {
        if let Some(at) = index.as_number()
            && elements > 1
            && u64::try_from(at).map_or(true, |at| at >= elements)
        {
            let message =
                format!("the index {at} is out of bounds for an array of {elements} elements");
            self.refuse(index.span, message);
        }
    }

    /// Compiles `(element[elements])value`: the bytes of a number, the lowest first, or the same
    /// elements by another type. Without a number of elements, the value has as many as it has
    /// room for.
    pub(super) fn cast_to_array(
        &mut self,
        (from, extent): (Type, Extent),
        value: &Expression,
        (element, elements): (MemoryType, u64),
        span: Span,
    ) -> Type {
        let Some((bytes, signed)) = element.number().filter(|(bytes, _)| *bytes > 0) else {
            return self.refuse(span, "a value is cast to arrays of numbers alone");
        };
        let size = match &from {
            Type::Lvalue(thing) => self.shared.types.size(thing),
            Type::Array { element, elements } => {
                let size = self.shared.types.size(element);
                size.map(|size| size.saturating_mul(*elements))
            }
            Type::Bool => Some(1),
            _ => Some(u64::from(extent.bytes())),
        };
        let mut size = size.unwrap_or(8);
        // A number in the script's text has the size that is wanted, if it fits.
        let wanted = elements.saturating_mul(bytes.into());
        if let Extent::Literal(..) = extent
            && from.is_number()
            && (size..=8).contains(&wanted)
        {
            size = wanted;
        }
        let room = size / u64::from(bytes);
        let elements = if elements == 0 { room } else { elements };
        if elements == 0 || elements.checked_mul(bytes.into()) != Some(size) {
            let message = format!(
                "a value of {size} bytes is no array of {elements} elements of {bytes} bytes"
            );
            return self.refuse(span, message);
        }
        match from {
            Type::Lvalue(MemoryType::Array { .. }) => return self.array_value(element, elements),
            from => {
                let settled = self.settle(from, value.span);
                match &settled {
                    Type::Array { element, elements } => {
                        let whole = MemoryType::Number {
                            bytes: 8,
                            signed: false,
                        };
                        self.join_array(element, *elements, &whole, value.span);
                    }
                    other => self.must_be_number(other, value.span),
                }
            }
        }
        self.put(Operation::SplitNumber {
            bytes,
            signed,
            elements: usize::try_from(elements).unwrap_or_default(),
        });
        Type::Array {
            element: Box::new(element),
            elements,
        }
    }

    /// Replaces the array on the stack by the number that its elements are together.
    pub(super) fn join_array(
        &mut self,
        element: &MemoryType,
        elements: u64,
        to: &MemoryType,
        span: Span,
    ) {
        let wanted = self.shared.types.size(to).unwrap_or(8);
        match element.number() {
            Some((bytes, _)) if u64::from(bytes).saturating_mul(elements) <= wanted => {
                self.put(Operation::JoinNumber { bytes });
            }
            _ => {
                let message = format!("this array has no room in a number of {wanted} bytes");
                self.refuse(span, message);
            }
        }
    }

    /// Replaces the address of a structure on the stack by a record of its members.
    pub(super) fn structure_value(&mut self, of: &MemoryType, span: Span) -> Type {
        let mut room = MOST_MEMBERS;
        self.record_of(of, &mut room, DEEPEST, span)
    }

    fn record_of(&mut self, of: &MemoryType, room: &mut usize, depth: usize, span: Span) -> Type {
        let described = self.shared.types.describe(of);
        let names = self.shared.types.member_names(of);
        let (Some(left), Some(depth)) = (room.checked_sub(names.len()), depth.checked_sub(1))
        else {
            let message =
                format!("{described} has more than {MOST_MEMBERS} members; name the one you want");
            return self.refuse(span, message);
        };
        *room = left;
        if names.is_empty() {
            return self.refuse(span, format!("{described} has no value; name a member"));
        }
        let slot = self.new_slot();
        self.put(Operation::SetLocal(slot));
        let mut members = Vec::new();
        for name in names {
            let said = self.shared.diagnostics.len();
            self.put(Operation::Local(slot));
            let found = self.member_of(Type::Lvalue(of.clone()), &name, span);
            let found = match found {
                Type::Lvalue(inner @ (MemoryType::Kernel(_) | MemoryType::Own(_))) => {
                    self.record_of(&inner, room, depth, span)
                }
                Type::Lvalue(MemoryType::Unknown) => {
                    // An address is all that is known of it.
                    Type::Pointer(MemoryType::Unknown)
                }
                other => self.settle(other, span),
            };
            if self.shared.diagnostics.len() > said {
                return Type::Any;
            }
            members.push((name.as_str().into(), found));
        }
        self.record(members)
    }
}

/// Returns the type of the elements of an array of arrays, and their number in all.
fn flattened(element: &MemoryType, elements: u64) -> (&MemoryType, u64) {
    match element {
        MemoryType::Array {
            element: inner,
            elements: each,
        } => flattened(inner, elements.saturating_mul(*each)),
        other => (other, elements),
    }
}

fn is_bounded(bytes: u8, elements: usize) -> bool {
    elements > 0
        && elements as u64 <= MOST_ELEMENTS
        && usize::from(bytes).saturating_mul(elements) <= MOST_BYTES
}

/// Returns the number of words that an array takes in a record.
pub(super) fn words_of(element: &MemoryType, elements: u64) -> usize {
    let elements = usize::try_from(elements).unwrap_or(usize::MAX);
    let each = match element {
        MemoryType::Array { element, elements } => words_of(element, *elements),
        _ => 2,
    };
    elements.saturating_mul(each).saturating_add(1)
}
