//! Checks local variables: a name that is read but never set is mistyped.

use super::unset;
use crate::ast::{ExpressionKind, LvalueKind, Rule, Span, StatementKind};
use crate::diagnostic::Diagnostic;
use crate::walk;
use std::collections::{BTreeMap, BTreeSet};

/// Adds an error for each variable of a rule that is read but never set in it.
pub fn check(rule: &Rule, errors: &mut Vec<Diagnostic>) {
    let mut set: BTreeSet<&str> = BTreeSet::new();
    let mut read: BTreeMap<&str, Span> = BTreeMap::new();
    let mut look = |expression| {
        walk::below(expression, &mut |part| match &part.kind {
            ExpressionKind::Lvalue(place) => {
                if let LvalueKind::Local(name) = &place.kind {
                    read.entry(name).or_insert(place.span);
                }
            }
            ExpressionKind::Step { place, .. } => {
                if let LvalueKind::Local(name) = &place.kind {
                    set.insert(name);
                }
            }
            _ => {}
        });
    };
    walk::of_rule(rule, &mut look);
    walk::statements_of_rule(rule, &mut |statement| match &statement.kind {
        StatementKind::Assign { place, .. } => {
            if let LvalueKind::Local(name) = &place.kind {
                set.insert(name);
            }
        }
        StatementKind::ForMap { variable, .. }
        | StatementKind::ForRange { variable, .. }
        | StatementKind::Declare { variable } => {
            set.insert(variable);
        }
        _ => {}
    });
    unset('$', read.into_iter(), &set, errors);
}
