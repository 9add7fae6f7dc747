//! Visits the nodes of a script's tree.
//!
//! [`parse`](crate::parse::parse) bounds the depth of every tree, so these functions may be
//! recursive.

use crate::ast::{
    Block, Expression, ExpressionKind, Lvalue, LvalueKind, Rule, Statement, StatementKind,
};

/// Calls `each` with the direct child expressions of one.
pub fn children<'a>(of: &'a Expression, each: &mut dyn FnMut(&'a Expression)) {
    match &of.kind {
        ExpressionKind::Number(_)
        | ExpressionKind::Unsigned(_)
        | ExpressionKind::Text(_)
        | ExpressionKind::Builtin(_)
        | ExpressionKind::Argument(_)
        | ExpressionKind::ArgumentCount
        | ExpressionKind::Constant(_)
        | ExpressionKind::SizeOfType(_)
        | ExpressionKind::OffsetOf { .. } => {}
        ExpressionKind::Lvalue(place) | ExpressionKind::Step { place, .. } => {
            keys(place).iter().for_each(each);
        }
        ExpressionKind::Unary(_, of)
        | ExpressionKind::SizeOfValue(of)
        | ExpressionKind::Member { of, .. }
        | ExpressionKind::Item { of, .. }
        | ExpressionKind::Cast { of, .. }
        | ExpressionKind::Translate { of, .. } => each(of),
        ExpressionKind::Binary(_, left, right) => {
            each(left);
            each(right);
        }
        ExpressionKind::Conditional {
            condition,
            then,
            otherwise,
        } => {
            each(condition);
            each(then);
            each(otherwise);
        }
        ExpressionKind::Call(call) => call.arguments.iter().for_each(each),
        ExpressionKind::Index { of, index } => {
            each(of);
            each(index);
        }
        ExpressionKind::Tuple(items) => items.iter().for_each(each),
    }
}

/// Returns the keys of a variable.
#[must_use]
pub fn keys(place: &Lvalue) -> &[Expression] {
    match &place.kind {
        LvalueKind::Local(_) => &[],
        LvalueKind::Global { keys, .. } => keys,
    }
}

/// Calls `each` with the expressions directly under a statement, not those of its blocks.
pub fn expressions<'a>(of: &'a Statement, each: &mut dyn FnMut(&'a Expression)) {
    match &of.kind {
        StatementKind::Assign { place, value, .. } => {
            keys(place).iter().for_each(&mut *each);
            each(value);
        }
        StatementKind::Aggregate { place, value, .. } => {
            keys(place).iter().for_each(&mut *each);
            value.iter().for_each(each);
        }
        StatementKind::Expression(value)
        | StatementKind::If {
            condition: value, ..
        }
        | StatementKind::While {
            condition: value, ..
        }
        | StatementKind::Repeat { times: value, .. } => each(value),
        StatementKind::ForRange { first, end, .. } => {
            each(first);
            each(end);
        }
        StatementKind::ForMap { .. }
        | StatementKind::Break
        | StatementKind::Continue
        | StatementKind::Return => {}
    }
}

/// Returns the blocks directly under a statement.
#[must_use]
pub fn blocks(of: &Statement) -> [Option<&Block>; 2] {
    match &of.kind {
        StatementKind::If {
            then, otherwise, ..
        } => [Some(then), Some(otherwise)],
        StatementKind::While { body, .. }
        | StatementKind::Repeat { body, .. }
        | StatementKind::ForMap { body, .. }
        | StatementKind::ForRange { body, .. } => [Some(body), None],
        _ => [None, None],
    }
}

/// Calls `each` with every statement of a block, including inner blocks, each before its contents.
pub fn statements<'a>(of: &'a Block, each: &mut dyn FnMut(&'a Statement)) {
    for statement in &of.statements {
        each(statement);
        for block in blocks(statement).into_iter().flatten() {
            statements(block, each);
        }
    }
}

/// Calls `each` with the expressions of a rule that are not part of another one: its predicate, and
/// those of its statements.
pub fn of_rule<'a>(of: &'a Rule, each: &mut dyn FnMut(&'a Expression)) {
    of.filter.iter().for_each(&mut *each);
    statements(&of.body, &mut |statement| expressions(statement, each));
}

/// Calls `each` with an expression and all under it, each before its contents.
pub fn below<'a>(of: &'a Expression, each: &mut dyn FnMut(&'a Expression)) {
    each(of);
    children(of, &mut |child| below(child, each));
}
