//! Visits the nodes of a script's tree.
//!
//! [`parse`](crate::parse::parse) bounds the depth of every tree, so these functions may be
//! recursive.

use crate::ast::{
    Block, Expression, ExpressionKind, Lvalue, LvalueKind, Rule, Statement, StatementKind,
};

/// Calls a function with each direct child of an expression, given its kind and the functions that
/// make iterators and find the keys of a variable.
macro_rules! visit_children {
    ($kind:expr, $each:expr, $iter:ident, $keys:ident) => {
        match $kind {
            ExpressionKind::Number(_)
            | ExpressionKind::Unsigned(_)
            | ExpressionKind::Text(_)
            | ExpressionKind::Builtin(_)
            | ExpressionKind::Argument(_)
            | ExpressionKind::ArgumentCount
            | ExpressionKind::Boolean(_)
            | ExpressionKind::Constant(_)
            | ExpressionKind::Enumerator { .. } => {}
            ExpressionKind::SizeOfType(of)
            | ExpressionKind::TypeInfo(of)
            | ExpressionKind::OffsetOf { of, .. } => {
                of.like.$iter().for_each(|like| $each(like));
            }
            ExpressionKind::Named { arguments, .. } => arguments.$iter().flatten().for_each($each),
            // Its statements are visited as statements.
            ExpressionKind::Block(of) => of.value.$iter().for_each($each),
            ExpressionKind::Record(members) => members.$iter().for_each(|(_, value)| $each(value)),
            ExpressionKind::Lvalue(place) | ExpressionKind::Step { place, .. } => {
                $keys(place).$iter().for_each($each);
            }
            ExpressionKind::Unary(_, of)
            | ExpressionKind::SizeOfValue(of)
            | ExpressionKind::Member { of, .. }
            | ExpressionKind::Item { of, .. }
            | ExpressionKind::Translate { of, .. } => $each(of),
            ExpressionKind::Cast { to, of } => {
                to.like.$iter().for_each(|like| $each(like));
                $each(of);
            }
            ExpressionKind::Binary(_, left, right) => {
                $each(left);
                $each(right);
            }
            ExpressionKind::Conditional {
                condition,
                then,
                otherwise,
            } => {
                $each(condition);
                then.$iter().for_each(|then| $each(then));
                $each(otherwise);
            }
            ExpressionKind::Call(call) => call.arguments.$iter().for_each($each),
            ExpressionKind::Index { of, index } => {
                $each(of);
                $each(index);
            }
            ExpressionKind::Tuple(items) => items.$iter().for_each($each),
        }
    };
}

/// Calls `each` with the direct child expressions of one.
pub fn children<'a>(of: &'a Expression, each: &mut dyn FnMut(&'a Expression)) {
    visit_children!(&of.kind, each, iter, keys);
}

/// Calls `each` with the direct child expressions of one, to change them. Statements of a block are
/// none.
pub fn children_mut(of: &mut Expression, each: &mut dyn FnMut(&mut Expression)) {
    visit_children!(&mut of.kind, each, iter_mut, keys_mut);
}

/// Returns the keys of a variable, to change them.
fn keys_mut(place: &mut Lvalue) -> &mut [Expression] {
    match &mut place.kind {
        LvalueKind::Local(_) => &mut [],
        LvalueKind::Global { keys, .. } => keys,
    }
}

/// Calls `each` with the expressions directly under a statement, to change them.
pub fn expressions_mut(of: &mut Statement, each: &mut dyn FnMut(&mut Expression)) {
    match &mut of.kind {
        StatementKind::Assign { place, value, .. } => {
            keys_mut(place).iter_mut().for_each(&mut *each);
            each(value);
        }
        StatementKind::Aggregate { place, value, .. } => {
            keys_mut(place).iter_mut().for_each(&mut *each);
            value.iter_mut().for_each(each);
        }
        StatementKind::Expression(value)
        | StatementKind::If {
            condition: value, ..
        }
        | StatementKind::While {
            condition: value, ..
        }
        | StatementKind::Repeat { times: value, .. } => each(value),
        StatementKind::Return(value) => value.iter_mut().for_each(each),
        StatementKind::ForRange { first, end, .. } => {
            each(first);
            each(end);
        }
        StatementKind::Declare { .. }
        | StatementKind::ForMap { .. }
        | StatementKind::Break
        | StatementKind::Continue => {}
    }
}

/// Returns the blocks directly under a statement, to change them.
pub fn blocks_mut(of: &mut Statement) -> [Option<&mut Block>; 2] {
    match &mut of.kind {
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

/// Adds the number of expressions in one, those in its statements included.
pub fn count(of: &Expression, number: &mut usize) {
    *number += 1;
    children(of, &mut |child| count(child, number));
    if let ExpressionKind::Block(inner) = &of.kind {
        directly_in(&inner.block, &mut |value| count(value, number));
    }
}

/// Calls `each` with the expressions directly under the statements of a block and of its inner
/// blocks.
pub fn directly_in<'a>(of: &'a Block, each: &mut dyn FnMut(&'a Expression)) {
    for statement in &of.statements {
        expressions(statement, each);
        for block in blocks(statement).into_iter().flatten() {
            directly_in(block, each);
        }
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
        StatementKind::Return(value) => value.iter().for_each(each),
        StatementKind::ForRange { first, end, .. } => {
            each(first);
            each(end);
        }
        StatementKind::Declare { .. }
        | StatementKind::ForMap { .. }
        | StatementKind::Break
        | StatementKind::Continue => {}
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

/// Calls `each` with every statement of a block, including those of inner blocks and of blocks in
/// expressions, each before its contents.
pub fn statements<'a>(of: &'a Block, each: &mut dyn FnMut(&'a Statement)) {
    for statement in &of.statements {
        each(statement);
        expressions(statement, &mut |value| statements_within(value, each));
        for block in blocks(statement).into_iter().flatten() {
            statements(block, each);
        }
    }
}

/// Calls `each` with every statement of the blocks in an expression.
pub fn statements_within<'a>(of: &'a Expression, each: &mut dyn FnMut(&'a Statement)) {
    below(of, &mut |part| {
        if let ExpressionKind::Block(inner) = &part.kind {
            statements(&inner.block, each);
        }
    });
}

/// Calls `each` with every statement of a rule, those in its predicate included.
pub fn statements_of_rule<'a>(of: &'a Rule, each: &mut dyn FnMut(&'a Statement)) {
    if let Some(filter) = &of.filter {
        statements_within(filter, each);
    }
    statements(&of.body, each);
}

/// Calls `each` with the expressions of a rule that are not part of another one: its predicate, and
/// those of its statements.
pub fn of_rule<'a>(of: &'a Rule, each: &mut dyn FnMut(&'a Expression)) {
    of.filter.iter().for_each(&mut *each);
    statements_of_rule(of, &mut |statement| expressions(statement, each));
}

/// Calls `each` with an expression and all under it, each before its contents.
pub fn below<'a>(of: &'a Expression, each: &mut dyn FnMut(&'a Expression)) {
    each(of);
    children(of, &mut |child| below(child, each));
}
