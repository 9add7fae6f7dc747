//! The form in which a value is shown, known from its type before the script runs: booleans as
//! words, addresses in hexadecimal, numbers of enums by name.
//!
//! At a hit all of these are plain numbers, which compare and add up as such. A reader dresses them
//! by their [`Shape`] when it shows them, so hits pay nothing for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::value::{StackForm, Value};

/// The names of an enum's numbers.
pub type EnumNames = BTreeMap<i64, Arc<str>>;

/// The form of a value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Shape {
    /// As the value itself says.
    #[default]
    Plain,
    /// `true` or `false`.
    Bool,
    /// `0xffff888004c41480`.
    Address,
    /// The name of an enum's number; the number where it has none.
    Enum(Arc<EnumNames>),
    /// The path of the control group with this number.
    Cgroup,
    /// A stack in another form than by names.
    Stack(StackForm),
    /// The shapes of the items of a tuple, or of the members of a record.
    Items(Arc<[Shape]>),
    /// The shape of the elements of an array.
    Elements(Arc<Shape>),
}

impl Shape {
    /// Makes the shape of a tuple or record.
    pub(crate) fn items(shapes: Vec<Self>) -> Self {
        match shapes.iter().all(|shape| *shape == Self::Plain) {
            true => Self::Plain,
            false => Self::Items(shapes.into()),
        }
    }

    /// Makes the shape of an array.
    pub(crate) fn elements(shape: Self) -> Self {
        match shape {
            Self::Plain => Self::Plain,
            other => Self::Elements(Arc::new(other)),
        }
    }

    /// Returns a value as it is shown. A value of another type stays as it is.
    #[must_use]
    pub fn dress(&self, value: Value) -> Value {
        match (self, value) {
            (Self::Bool, Value::Int(number)) => Value::Bool(number != 0),
            (Self::Address, Value::Int(number)) => Value::Address(number.cast_unsigned()),
            (Self::Address, Value::Unsigned(number)) => Value::Address(number),
            (Self::Cgroup, Value::Int(id)) => Value::Cgroup(id.cast_unsigned()),
            (Self::Cgroup, Value::Unsigned(id)) => Value::Cgroup(id),
            (Self::Enum(names), Value::Int(number)) => match names.get(&number) {
                Some(name) => Value::Enumerator {
                    number,
                    name: name.clone(),
                },
                None => Value::Int(number),
            },
            (Self::Stack(form), stack @ (Value::KernelStack(_) | Value::UserStack { .. })) => {
                Value::StackAs {
                    form: *form,
                    stack: Arc::new(stack),
                }
            }
            (Self::Items(shapes), Value::Tuple(items)) => Value::Tuple(each(shapes, &items)),
            (Self::Items(shapes), Value::Record { names, items }) => Value::Record {
                names,
                items: each(shapes, &items),
            },
            (Self::Elements(shape), Value::Array(items)) => {
                Value::Array(items.iter().map(|item| shape.dress(item.clone())).collect())
            }
            (_, value) => value,
        }
    }

    /// Returns a map's key as it is shown: several keys have the shape of their tuple.
    #[must_use]
    pub fn dress_key(&self, key: &[Value]) -> Arc<[Value]> {
        match (self, key) {
            (Self::Plain, _) => key.into(),
            (Self::Items(shapes), key) if shapes.len() == key.len() => each(shapes, key),
            (shape, [only]) => [shape.dress(only.clone())].into(),
            (_, key) => key.into(),
        }
    }
}

fn each(shapes: &[Shape], items: &[Value]) -> Arc<[Value]> {
    let shapes = shapes.iter().chain(std::iter::repeat(&Shape::Plain));
    let dressed = items.iter().zip(shapes);
    dressed
        .map(|(item, shape)| shape.dress(item.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_another_type_stay_as_they_are() {
        let names = Arc::new(EnumNames::from([(3, Arc::from("THREE"))]));
        let shape = Shape::items(vec![
            Shape::Bool,
            Shape::Address,
            Shape::Enum(names),
            Shape::elements(Shape::Bool),
        ]);
        let text = || Value::text(b"x");
        let strange = Value::Tuple([text(), text(), Value::Int(4), text(), Value::Int(1)].into());
        assert_eq!(shape.dress(strange.clone()), strange);
        assert_eq!(shape.dress(text()), text());
        assert_eq!(*shape.dress_key(&[text(), text()]), [text(), text()]);
        assert_eq!(
            *Shape::Bool.dress_key(&[Value::Int(2)]),
            [Value::Bool(true)]
        );
    }
}
