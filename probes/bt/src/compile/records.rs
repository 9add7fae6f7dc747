//! Compiles records in another order of members than the one that is wanted: a variable, the keys
//! of a map and a comparison keep the order that they had first, as bpftrace does.

use std::sync::Arc;

use super::RuleCompiler;
use super::extent::Extent;
use super::types::Type;
use crate::arrangement::Arrangement;
use crate::program::Operation;

impl RuleCompiler<'_, '_> {
    /// Puts the members of the value on the stack, which is of the type `from`, into the order of
    /// the type `wanted`. Returns its type and adjusts the extent.
    pub(super) fn arrange(&mut self, from: Type, wanted: &Type) -> Type {
        let Some(by) = arrangement(&from, wanted) else {
            return from;
        };
        self.extent = arranged_extent(&self.extent, &by);
        let found = arranged_type(from, &by);
        self.gives(Operation::Arrange(Arc::new(by)), found)
    }
}

/// Returns the way from the order of one type to that of another; `None` if it is the same, or the
/// types have other members.
pub(super) fn arrangement(from: &Type, to: &Type) -> Option<Arrangement> {
    let (same, inner): (bool, Arrangement) = match (from, to) {
        (Type::Tuple(from), Type::Tuple(to)) if from.len() == to.len() => {
            let items: Vec<Option<Arrangement>> = from
                .iter()
                .zip(to)
                .map(|(from, to)| arrangement(from, to))
                .collect();
            let is_same = items.iter().all(Option::is_none);
            let items = items.into_iter().map(Option::unwrap_or_default).collect();
            (is_same, Arrangement::Items(items))
        }
        (Type::Record(from), Type::Record(to)) if from.len() == to.len() => {
            let mut is_same = true;
            let mut members = Vec::new();
            for (at, (name, wanted)) in to.iter().enumerate() {
                let place = from.iter().position(|(known, _)| known == name)?;
                let inner = arrangement(from.get(place).map(|(_, of)| of)?, wanted);
                is_same &= place == at && inner.is_none();
                members.push((place, inner.unwrap_or_default()));
            }
            let names = to.iter().map(|(name, _)| name.clone()).collect();
            (is_same, Arrangement::Members { names, members })
        }
        _ => return None,
    };
    (!same).then_some(inner)
}

fn arranged_type(of: Type, by: &Arrangement) -> Type {
    match (of, by) {
        (Type::Tuple(items), Arrangement::Items(inner)) => {
            let items = items.into_iter().zip(inner);
            Type::Tuple(items.map(|(of, by)| arranged_type(of, by)).collect())
        }
        (Type::Record(from), Arrangement::Members { names, members }) => {
            let members = names.iter().zip(members).map(|(name, (place, inner))| {
                let of = from.get(*place).map_or(Type::Any, |(_, of)| of.clone());
                (name.clone(), arranged_type(of, inner))
            });
            Type::Record(members.collect())
        }
        (of, _) => of,
    }
}

fn arranged_extent(of: &Extent, by: &Arrangement) -> Extent {
    match (of, by) {
        (Extent::Items(items), Arrangement::Items(inner)) => {
            let items = items.iter().zip(inner);
            Extent::Items(items.map(|(of, by)| arranged_extent(of, by)).collect())
        }
        (Extent::Items(_), Arrangement::Members { members, .. }) => {
            let members = members.iter();
            Extent::Items(
                members
                    .map(|(place, inner)| arranged_extent(&of.item(*place), inner))
                    .collect(),
            )
        }
        (of, _) => of.clone(),
    }
}
