//! Replaces calls of a script's macros and functions by their bodies, and names of its enums by
//! their numbers.
//!
//! Variables of a body that are no parameters get names of their own at each call, so that a macro
//! never changes a caller's variable by accident. Bodies may call other macros, but not without
//! end: depth and size are bounded.

use std::collections::HashMap;

use super::expressions::misspelt;
use super::macros::assignment;
use super::tree::HIGHEST;
use crate::ast::{
    Block, BlockExpression, Expression, ExpressionKind, Lvalue, LvalueKind, Macro, Parameter,
    Script, Span, Statement, StatementKind,
};
use crate::diagnostic::{Diagnostic, MOST_ERRORS};
use crate::names;
use crate::walk;

/// The greatest depth of macros that call one another.
const DEEPEST: usize = 32;
/// The greatest number of expressions that all calls of a script may add.
const MOST_ADDED: usize = 1 << 16;

/// Replaces all calls and names in a script. `prelude` are the macros of the language itself.
/// Returns the errors.
pub(super) fn expand(script: &mut Script, prelude: &[Macro]) -> Vec<Diagnostic> {
    let macros = std::mem::take(&mut script.macros);
    let enums = std::mem::take(&mut script.enums);
    let members = enums.iter().enumerate().flat_map(|(of, one)| {
        let members = one.members.iter();
        members.map(move |(name, number)| (&**name, (of, *number)))
    });
    let mut expander = Expander {
        macros: HashMap::new(),
        prelude: prelude.iter().map(|one| (one.key(), one)).collect(),
        numbers: members.collect(),
        added: 0,
        calls: 0,
        errors: Vec::new(),
    };
    for one in &macros {
        if expander.macros.insert(one.key(), one).is_some() {
            let message = format!("'{}' is defined twice", one.name);
            expander.tell(Diagnostic::new(one.span, message));
        }
    }
    for rule in &mut script.rules {
        if let Some(filter) = &mut rule.filter {
            expander.expression(filter, 0);
        }
        expander.block(&mut rule.body, 0);
    }
    for translator in &mut script.translators {
        for (_, value) in &mut translator.members {
            expander.expression(value, 0);
            walk::below(value, &mut |part| {
                if matches!(part.kind, ExpressionKind::Block(_)) {
                    let message = "a translator's member is one expression, without statements";
                    expander.errors.push(Diagnostic::new(part.span, message));
                }
            });
        }
    }
    let errors = expander.errors;
    script.macros = macros;
    script.enums = enums;
    if errors.is_empty() && !is_low_enough(script) {
        let message = format!("nested more than {HIGHEST} levels deep, with its macros");
        return vec![Diagnostic::new(Span::default(), message)];
    }
    errors
}

struct Expander<'m> {
    /// The macros by their names and numbers of parameters.
    macros: HashMap<(&'m str, usize), &'m Macro>,
    /// The macros of the language itself.
    prelude: HashMap<(&'m str, usize), &'m Macro>,
    numbers: HashMap<&'m str, (usize, i64)>,
    /// The number of expressions that calls have added.
    added: usize,
    /// The number of calls, which tells their variables apart.
    calls: usize,
    errors: Vec<Diagnostic>,
}

impl<'m> Expander<'m> {
    fn tell(&mut self, error: Diagnostic) {
        if self.errors.len() < MOST_ERRORS {
            self.errors.push(error);
        }
    }

    fn block(&mut self, of: &mut Block, depth: usize) {
        for statement in &mut of.statements {
            walk::expressions_mut(statement, &mut |value| self.expression(value, depth));
            for inner in walk::blocks_mut(statement).into_iter().flatten() {
                self.block(inner, depth);
            }
        }
    }

    /// Replaces everything in an expression that stands `depth` macros deep.
    fn expression(&mut self, of: &mut Expression, depth: usize) {
        if let ExpressionKind::Block(inner) = &mut of.kind {
            self.block(&mut inner.block, depth);
        }
        walk::children_mut(of, &mut |child| self.expression(child, depth));
        match &mut of.kind {
            ExpressionKind::Constant(name) => {
                let name = std::mem::take(name);
                self.name(of, name, None, depth);
            }
            ExpressionKind::Named { name, arguments } => {
                let (name, arguments) = (std::mem::take(name), arguments.take());
                self.name(of, name, arguments, depth);
            }
            _ => {}
        }
    }

    /// Replaces a name, with the arguments of its call.
    fn name(
        &mut self,
        of: &mut Expression,
        name: String,
        arguments: Option<Vec<Expression>>,
        depth: usize,
    ) {
        let count = arguments.as_ref().map_or(0, Vec::len);
        let key = (name.as_str(), count);
        let own = self.macros.get(&key).map(|found| (*found, None));
        let found = own.or_else(|| self.prelude.get(&key).map(|found| (*found, Some(of.span))));
        if let Some((found, place)) = found {
            match self.call(found, of.span, place, arguments.unwrap_or_default(), depth) {
                Ok(kind) => of.kind = kind,
                Err(error) => {
                    self.tell(error);
                    of.kind = ExpressionKind::Number(0);
                }
            }
            return;
        }
        if arguments.is_none()
            && let Some(number) = self.numbers.get(name.as_str())
        {
            let (of_enum, number) = *number;
            of.kind = ExpressionKind::Enumerator {
                of: of_enum,
                number,
            };
            return;
        }
        if arguments.is_none() && names::is_constant(&name) {
            // One of the kernel's enums may have it.
            of.kind = ExpressionKind::Constant(name);
            return;
        }
        let error = self.unknown(&name, of.span, arguments.is_some().then_some(count));
        self.tell(error);
        of.kind = ExpressionKind::Number(0);
    }

    /// Returns the error of an unknown name, or of a call with this number of arguments.
    fn unknown(&self, name: &str, span: Span, count: Option<usize>) -> Diagnostic {
        let mut known = self.macros.values().chain(self.prelude.values());
        let known = known.find(|known| known.name == name);
        if let Some(known) = known {
            let (wanted, given) = (known.parameters.len(), count.unwrap_or(0));
            let s = |count: usize| if count == 1 { "" } else { "s" };
            let message = format!(
                "{name}() with {given} argument{}; it has {wanted} parameter{}",
                s(given),
                s(wanted)
            );
            return Diagnostic::new(span, message);
        }
        if names::builtin(name).is_some() {
            let message = format!("{name} is not a function; omit the parentheses");
            return Diagnostic::new(span, message);
        }
        let what = if count.is_some() { "function" } else { "name" };
        let span = Span {
            end: span.end.min(span.start + name.len()),
            ..span
        };
        let mut told = misspelt(
            name,
            Diagnostic::new(span, format!("unknown {what} '{name}'")),
        );
        let own = self.macros.keys().chain(self.prelude.keys());
        let own = own.map(|(name, _)| *name);
        told.suggestions.extend(
            crate::diagnostic::similar(name, own.chain(self.numbers.keys().copied()))
                .into_iter()
                .map(str::to_owned),
        );
        told
    }

    /// Returns the body of a macro with these arguments in place of its parameters. Of a macro that
    /// is not in the script, all parts get the `place` of the call.
    fn call(
        &mut self,
        of: &'m Macro,
        span: Span,
        place: Option<Span>,
        arguments: Vec<Expression>,
        depth: usize,
    ) -> Result<ExpressionKind, Diagnostic> {
        let name = &of.name;
        if depth >= DEEPEST {
            let message = format!("'{name}' is called {DEEPEST} calls deep; does it call itself?");
            return Err(Diagnostic::new(span, message));
        }
        if of.body.block.statements.is_empty() && of.body.value.is_none() {
            let message = match of.parameters.is_empty() {
                true => format!("'{name}' has no value that could stand here"),
                false => format!("'{name}' does nothing"),
            };
            return Err(Diagnostic::new(span, message));
        }
        self.calls += 1;
        let mut body = of.body.clone();
        let mut inside = Substitution {
            by: HashMap::new(),
            call: self.calls,
            place,
            room: MOST_ADDED.saturating_sub(self.added),
        };
        let mut bound = Vec::new();
        for (parameter, argument) in of.parameters.iter().zip(arguments) {
            let (sign, name, by) = match parameter {
                Parameter::Expression(name) => ("", name, By::Expression(argument)),
                Parameter::Map(name) => match argument.as_global() {
                    Some((map, [])) => ("@", name, By::Name(map.to_owned())),
                    _ => {
                        let message = format!("'{}' wants a map, such as @x, for @{name}", of.name);
                        return Err(Diagnostic::new(argument.span, message));
                    }
                },
                Parameter::Variable(name) => match (&argument.kind, of.body.is_function) {
                    (ExpressionKind::Lvalue(place), false) => match &place.kind {
                        LvalueKind::Local(local) => ("$", name, By::Name(local.clone())),
                        LvalueKind::Global { .. } => {
                            let own = inside.own(name);
                            bound.push(assignment(&own, argument));
                            ("$", name, By::Name(own))
                        }
                    },
                    _ => {
                        let own = inside.own(name);
                        bound.push(assignment(&own, argument));
                        ("$", name, By::Name(own))
                    }
                },
            };
            inside.by.insert(format!("{sign}{name}"), by);
        }
        let fits = inside.block(&mut body.block)
            && (body.value.iter_mut()).all(|value| inside.expression(value));
        self.added = MOST_ADDED.saturating_sub(inside.room);
        if !fits {
            let message = "this script is too large with the macros that it calls";
            return Err(Diagnostic::new(span, message));
        }
        self.block(&mut body.block, depth + 1);
        if let Some(value) = &mut body.value {
            self.expression(value, depth + 1);
        }
        if !bound.is_empty() {
            bound.append(&mut body.block.statements);
            body.block.statements = bound;
        }
        Ok(match body {
            BlockExpression {
                block,
                value: Some(value),
                is_function: false,
            } if block.statements.is_empty() => value.kind,
            body => ExpressionKind::Block(Box::new(body)),
        })
    }
}

/// The replacement of a parameter.
enum By {
    /// An expression.
    Expression(Expression),
    /// A variable of this name.
    Name(String),
}

/// Replaces parameters in the body of one call.
struct Substitution {
    /// The replacements, by the parameter with its sign.
    by: HashMap<String, By>,
    /// The number of the call.
    call: usize,
    /// The place that all parts get.
    place: Option<Span>,
    /// The number of expressions that may still be added.
    room: usize,
}

impl Substitution {
    /// Returns the name that a variable of the body has at this call. No script can name it.
    fn own(&self, name: &str) -> String {
        format!("{name}~{}", self.call)
    }

    /// Returns the name of a local variable of the body.
    fn local(&self, name: &str) -> String {
        match self.by.get(&format!("${name}")) {
            Some(By::Name(by)) => by.clone(),
            _ => self.own(name),
        }
    }

    fn map(&self, name: &mut String) {
        if let Some(By::Name(by)) = self.by.get(&format!("@{name}")) {
            name.clone_from(by);
        }
    }

    /// Replaces names in a variable. Its keys are expressions of their own.
    fn place(&self, of: &mut Lvalue) {
        of.span = self.place.unwrap_or(of.span);
        match &mut of.kind {
            LvalueKind::Local(name) => *name = self.local(name),
            LvalueKind::Global { name, .. } => self.map(name),
        }
    }

    /// Replaces all in a block. Returns `false` if there is no room.
    fn block(&mut self, of: &mut Block) -> bool {
        of.statements
            .iter_mut()
            .all(|statement| self.statement(statement))
    }

    fn statement(&mut self, of: &mut Statement) -> bool {
        of.span = self.place.unwrap_or(of.span);
        match &mut of.kind {
            StatementKind::Assign { place, .. } | StatementKind::Aggregate { place, .. } => {
                self.place(place);
            }
            StatementKind::ForMap { variable, map, .. } => {
                *variable = self.local(variable);
                self.map(map);
            }
            StatementKind::ForRange { variable, .. } | StatementKind::Declare { variable } => {
                *variable = self.local(variable);
            }
            _ => {}
        }
        let mut fits = true;
        walk::expressions_mut(of, &mut |value| fits = fits && self.expression(value));
        fits && (walk::blocks_mut(of).into_iter().flatten()).all(|inner| self.block(inner))
    }

    fn expression(&mut self, of: &mut Expression) -> bool {
        let Some(room) = self.room.checked_sub(1) else {
            return false;
        };
        self.room = room;
        of.span = self.place.unwrap_or(of.span);
        let name = match &of.kind {
            ExpressionKind::Named {
                name,
                arguments: None,
            }
            | ExpressionKind::Constant(name) => Some(name),
            _ => None,
        };
        if let Some(By::Expression(by)) = name.and_then(|name| self.by.get(name)) {
            let mut size = 0;
            walk::count(by, &mut size);
            let Some(room) = self.room.checked_sub(size) else {
                return false;
            };
            self.room = room;
            *of = by.clone();
            return true;
        }
        if let ExpressionKind::SizeOfType(to)
        | ExpressionKind::TypeInfo(to)
        | ExpressionKind::OffsetOf { of: to, .. } = &mut of.kind
            && to.like.is_none()
            && let Some(By::Expression(by)) = self.by.get(&to.base)
        {
            // The parameter's name was taken for a type's.
            let mut size = 0;
            walk::count(by, &mut size);
            let Some(room) = self.room.checked_sub(size) else {
                return false;
            };
            self.room = room;
            to.like = Some(Box::new(by.clone()));
            if let ExpressionKind::SizeOfType(to) = &mut of.kind
                && to.pointers == 0
                && to.elements.is_none()
                && let Some(like) = to.like.take()
            {
                of.kind = ExpressionKind::SizeOfValue(like);
            }
            return true;
        }
        if let Some(place) = self.place {
            place_names(of, place);
        }
        let mut fits = true;
        match &mut of.kind {
            ExpressionKind::Lvalue(place) | ExpressionKind::Step { place, .. } => self.place(place),
            ExpressionKind::Block(inner) => fits = self.block(&mut inner.block),
            _ => {}
        }
        walk::children_mut(of, &mut |child| fits = fits && self.expression(child));
        fits
    }
}

/// Sets the place of the names in an expression.
fn place_names(of: &mut Expression, place: Span) {
    match &mut of.kind {
        ExpressionKind::Member { name_span, .. } => *name_span = place,
        ExpressionKind::Call(call) => call.name_span = place,
        ExpressionKind::Cast { to, .. }
        | ExpressionKind::SizeOfType(to)
        | ExpressionKind::TypeInfo(to)
        | ExpressionKind::OffsetOf { of: to, .. } => to.span = place,
        _ => {}
    }
}

/// Checks whether all of a script's expressions are low enough for recursive functions.
fn is_low_enough(script: &Script) -> bool {
    let mut fits = true;
    let mut each = |of: &Expression| fits = fits && is_low(of, 2 * HIGHEST);
    for rule in &script.rules {
        walk::of_rule(rule, &mut each);
    }
    for (_, value) in script.translators.iter().flat_map(|one| &one.members) {
        each(value);
    }
    fits
}

/// Checks whether an expression has at most so many levels.
fn is_low(of: &Expression, levels: usize) -> bool {
    let Some(below) = levels.checked_sub(1) else {
        return false;
    };
    let mut fits = true;
    walk::children(of, &mut |child| fits = fits && is_low(child, below));
    if let ExpressionKind::Block(inner) = &of.kind {
        walk::directly_in(&inner.block, &mut |value| {
            fits = fits && is_low(value, below);
        });
    }
    fits
}
