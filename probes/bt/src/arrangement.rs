//! The order in which the members of a record are wanted.
//!
//! The compiler finds it from two types, and a rule puts its values into it. Tuples may have
//! records in them.

use std::sync::Arc;

use crate::value::Value;

/// The order in which a value's members are wanted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Arrangement {
    /// As they are.
    #[default]
    Same,
    /// Those of the items of a tuple.
    Items(Vec<Arrangement>),
    /// A record's.
    Members {
        /// The names, as they are wanted.
        names: Arc<[Arc<str>]>,
        /// The place of each among those that there are, and the order of its own.
        members: Vec<(usize, Arrangement)>,
    },
}

impl Arrangement {
    /// Returns a value in this order; another value is left as it is.
    pub(crate) fn of(&self, value: &Value) -> Value {
        match (self, value) {
            (Self::Items(inner), Value::Tuple(items)) => Value::Tuple(
                items
                    .iter()
                    .zip(inner)
                    .map(|(item, by)| by.of(item))
                    .collect(),
            ),
            (Self::Members { names, members }, Value::Record { items, .. }) => {
                let members = members.iter().map(|(place, by)| {
                    let item = items.get(*place).unwrap_or(&Value::ZERO);
                    by.of(item)
                });
                Value::Record {
                    names: names.clone(),
                    items: members.collect(),
                }
            }
            (_, value) => value.clone(),
        }
    }
}
