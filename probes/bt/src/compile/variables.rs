//! Compiles variables, which live for one run of a rule or for the whole script.

use super::extent::Extent;
use super::types::Type;
use super::{RuleCompiler, nearest, with};
use crate::ast::{Aggregation, BinaryOperator, Expression, Lvalue, LvalueKind, Span};
use crate::maps::MapKind;
use crate::names;
use crate::program::Operation;

impl RuleCompiler<'_, '_> {
    /// Puts the value of a variable.
    pub(super) fn read_place(&mut self, place: &Lvalue) -> Type {
        match &place.kind {
            LvalueKind::Local(name) => self.read_local(name, place.span),
            LvalueKind::Global { name, keys } => {
                let Some(map) = self.map(name, keys.len(), place.span) else {
                    return Type::Any;
                };
                let kind = self.shared.kind_of(map);
                if let MapKind::Aggregation(aggregation) = kind
                    && !self.is_strict()
                    && is_histogram(aggregation)
                {
                    return self.refuse(
                        place.span,
                        format!(
                            "@{name} is aggregated by {} and has no value; print it",
                            names::aggregation_name(aggregation)
                        ),
                    );
                }
                let keys = self.keys(map, keys);
                let of = self.type_of(map);
                self.own_extent = match kind {
                    MapKind::Scalar => self.extent_of_map(map, 0),
                    MapKind::Aggregation(_) => None,
                };
                self.gives(Operation::Global { map, keys }, of)
            }
        }
    }

    /// Returns the extent of a map's values (0) or keys (1), as far as it is known.
    pub(super) fn extent_of_map(&self, map: usize, which: usize) -> Option<Extent> {
        let found = self.shared.maps.get(map)?.extents.get(which)?;
        Some(match found {
            Extent::Unset => Extent::Unknown,
            known => known.clone(),
        })
    }

    /// Returns the type of a map's values, as far as it is known.
    pub(super) fn type_of(&self, map: usize) -> Type {
        match self.shared.kind_of(map) {
            MapKind::Aggregation(_) => Type::Number,
            MapKind::Scalar => {
                let known = self.shared.maps.get(map).and_then(|map| map.of.clone());
                known.unwrap_or(Type::Any)
            }
        }
    }

    fn read_local(&mut self, name: &str, span: Span) -> Type {
        let input = self.scopes.iter().rev().find(|(known, ..)| known == name);
        if let Some((_, slot, of)) = input {
            let (slot, of) = (*slot, of.clone());
            return self.gives(Operation::Local(slot), of);
        }
        let local = self.locals.iter().rev().find(|local| local.name == name);
        if let Some(local) = local {
            let (slot, of) = (local.slot, local.of.clone());
            self.own_extent = Some(local.extent.clone());
            return self.gives(Operation::Local(slot), of);
        }
        if self.declared.contains(name) {
            let slot = self.local(name, Type::Number);
            return self.gives(Operation::Local(slot), Type::Number);
        }
        if self.is_strict() {
            self.constant(0);
            return Type::Any;
        }
        let names = self.locals.iter().map(|local| local.name.as_str());
        let nearest = nearest(name, names).into_iter().map(|n| format!("${n}"));
        let message = format!("${name} is read before it is set");
        self.refuse_with(with(span, message, nearest.collect()))
    }

    /// Compiles the keys of an entry of the map, and returns their number.
    pub(super) fn keys(&mut self, map: usize, keys: &[Expression]) -> usize {
        let known = self.shared.maps.get(map).and_then(|map| map.key.clone());
        let (mut types, mut extents) = (Vec::new(), Vec::new());
        for (at, key) in keys.iter().enumerate() {
            let found = self.value(key);
            let wanted = match &known {
                Some(Type::Tuple(items)) if keys.len() > 1 => items.get(at),
                known => known.as_ref().filter(|_| keys.len() == 1),
            };
            types.push(match wanted {
                Some(wanted) => self.arrange(found, wanted),
                None => found,
            });
            extents.push(self.extent.clone());
        }
        let (of, extent) = match types.len() {
            1 => (types.swap_remove(0), extents.swap_remove(0)),
            _ => (Type::Tuple(types), Extent::Items(extents)),
        };
        if let Some(map) = self.shared.maps.get_mut(map) {
            join(&mut map.key, of);
            join_extent(map.extents.get_mut(1), extent);
        }
        keys.len()
    }

    /// Returns the number of a map.
    pub(super) fn map(&mut self, name: &str, keys: usize, span: Span) -> Option<usize> {
        let map = self.shared.map_numbers.get(name).copied()?;
        if self.shared.is_keyed(map) && keys == 0 && !self.is_strict() {
            let message = format!("@{name} has keys; name one, as in @{name}[pid]");
            self.refuse(span, message);
            return None;
        }
        Some(map)
    }

    /// Compiles `++` and `--`; those of a pointer step over an element, as in C.
    pub(super) fn step(&mut self, place: &Lvalue, by: i64, postfix: bool) -> Type {
        match &place.kind {
            LvalueKind::Local(name) => {
                let of = self.stepped(self.type_of_local(name));
                let by = by.saturating_mul(self.step_of(&of));
                let slot = self.local(name, of.clone());
                self.widen(name, Extent::WHOLE);
                self.put(Operation::StepLocal { slot, by, postfix });
                of
            }
            LvalueKind::Global { name, keys } => {
                let Some(map) = self.map(name, keys.len(), place.span) else {
                    return Type::Number;
                };
                let keys = self.keys(map, keys);
                let of = self.stepped(self.type_of(map));
                let by = by.saturating_mul(self.step_of(&of));
                self.put(Operation::StepGlobal {
                    map,
                    keys,
                    by,
                    postfix,
                });
                self.learn_map(map, of.clone(), Extent::WHOLE);
                of
            }
        }
    }

    /// Returns the type of a local variable, as far as it is known.
    pub(super) fn type_of_local(&self, name: &str) -> Type {
        let local = self.locals.iter().rev().find(|local| local.name == name);
        local.map_or(Type::Number, |local| local.of.clone())
    }

    /// Returns the type of a sum with a variable of the type `of`: a pointer stays one, except in
    /// bt(5).
    pub(super) fn stepped(&self, of: Type) -> Type {
        match of {
            Type::Pointer(_) if !self.is_strict() => of,
            _ => Type::Number,
        }
    }

    /// Returns the number of bytes by which 1 more changes a value of the type `of`.
    pub(super) fn step_of(&self, of: &Type) -> i64 {
        let size = match of {
            Type::Pointer(to) => self.shared.types.size(to),
            _ => None,
        };
        size.and_then(|size| i64::try_from(size).ok()).unwrap_or(1)
    }

    /// Scales the number that has just been put, which is to be added to a value of the type `of`.
    /// Those of a pointer are elements, as in C.
    pub(super) fn scale(&mut self, of: &Type) {
        match self.step_of(of) {
            1 => {}
            size => {
                self.constant(size);
                self.put(Operation::Binary(BinaryOperator::Multiply));
            }
        }
    }

    /// Notes that a map may hold values of this type and extent.
    pub(super) fn learn_map(&mut self, map: usize, of: Type, extent: Extent) {
        if let Some(map) = self.shared.maps.get_mut(map) {
            join(&mut map.of, of);
            join_extent(map.extents.first_mut(), extent);
        }
    }

    /// Returns the slot of a local variable, which holds a value of this type from here on.
    pub(super) fn local(&mut self, name: &str, of: Type) -> usize {
        if let Some(local) = self.locals.iter_mut().rev().find(|l| l.name == name) {
            let known = std::mem::replace(&mut local.of, Type::Any);
            local.of = known.joined(of);
            return local.slot;
        }
        let slot = self.new_slot();
        self.locals.push(super::Local {
            name: name.to_owned(),
            slot,
            of,
            extent: Extent::Unset,
        });
        slot
    }

    /// Notes that a local variable may hold values of this extent.
    pub(super) fn widen(&mut self, name: &str, extent: Extent) {
        if let Some(local) = self.locals.iter_mut().rev().find(|l| l.name == name) {
            join_extent(Some(&mut local.extent), extent);
        }
    }
}

/// Widens what is known of a variable.
fn join_extent(known: Option<&mut Extent>, extent: Extent) {
    if let Some(known) = known {
        *known = std::mem::replace(known, Extent::Unset).joined(extent);
    }
}

/// Reduces a known type to what it has in common with another assignment's.
fn join(known: &mut Option<Type>, of: Type) {
    *known = Some(match known.take() {
        None => of,
        Some(known) => known.joined(of),
    });
}

pub(super) fn is_histogram(aggregation: Aggregation) -> bool {
    matches!(
        aggregation,
        Aggregation::PowerHistogram(_)
            | Aggregation::LinearHistogram { .. }
            | Aggregation::TimeSeries(_)
    )
}
