//! Parses expressions: C's operators with C's precedences, with variables, functions and casts as
//! operands.

use super::tree::Tall;
use super::{Parsed, Parser, too_high};
use crate::ast::{
    Call, Expression, ExpressionKind, Function, Lvalue, LvalueKind, Span, UnaryOperator,
};
use crate::diagnostic::Diagnostic;
use crate::lex::normal::TokenKind;
use crate::names;

/// The greatest number of arguments of a call, keys of a map and items of a tuple.
pub(super) const MOST_ITEMS: usize = 64;

/// Makes an expression on top of others, of which the highest has `below` levels.
pub(super) fn node(kind: ExpressionKind, span: Span, below: usize) -> Parsed<Tall> {
    Tall::new(kind, span, below).map_err(|_| too_high(span))
}

/// Makes the value of a variable, on top of keys of which the highest has `below` levels.
fn variable(kind: LvalueKind, span: Span, below: usize) -> Parsed<Tall> {
    let place = Lvalue { kind, span };
    node(ExpressionKind::Lvalue(Box::new(place)), span, below)
}

/// Returns the number `value`, or its negation.
fn number(value: u64, negative: bool) -> ExpressionKind {
    match i64::try_from(value) {
        Ok(value) if negative => ExpressionKind::Number(-value),
        Ok(value) => ExpressionKind::Number(value),
        Err(_) if negative => ExpressionKind::Number(0i64.wrapping_sub_unsigned(value)),
        Err(_) => ExpressionKind::Unsigned(value),
    }
}

impl Parser<'_> {
    /// Parses an expression.
    pub(super) fn expression(&mut self) -> Parsed<Expression> {
        let found = self.tall()?;
        self.highest = self.highest.max(found.height);
        Ok(found.expression)
    }

    /// Parses an expression and its height.
    pub(super) fn tall(&mut self) -> Parsed<Tall> {
        self.deeper(Self::conditional)
    }

    /// Runs `parse` inside brackets, where `/` divides, whatever follows it.
    pub(super) fn inside<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        let in_filter = std::mem::replace(&mut self.in_filter, false);
        let parsed = parse(self);
        self.in_filter = in_filter;
        parsed
    }

    fn conditional(&mut self) -> Parsed<Tall> {
        let condition = self.binary(0)?;
        if !self.eat("?")? {
            return Ok(condition);
        }
        // `c ?: x` is the condition's value, if it is not 0.
        let then = match self.is(":")? {
            true => None,
            false => Some(self.tall()?),
        };
        self.expect(":", "between the two values of '?'")?;
        let otherwise = self.tall()?;
        let span = condition.expression.span.to(otherwise.expression.span);
        let between = then.as_ref().map_or(0, |then| then.height);
        let below = condition.height.max(between).max(otherwise.height);
        let kind = ExpressionKind::Conditional {
            condition: Box::new(condition.expression),
            then: then.map(|then| Box::new(then.expression)),
            otherwise: Box::new(otherwise.expression),
        };
        node(kind, span, below)
    }

    /// Parses operators that bind as tight as `least`, or tighter.
    fn binary(&mut self, least: u8) -> Parsed<Tall> {
        let mut left = self.unary()?;
        loop {
            let TokenKind::Punctuation(text) = self.peek()?.kind else {
                return Ok(left);
            };
            let found = names::BINARY_OPERATORS
                .iter()
                .find(|(known, _, rank)| *known == text && *rank >= least);
            let Some((_, operator, rank)) = found else {
                return Ok(left);
            };
            // The slash is already the token ahead, so the upcoming byte is behind it.
            if text == "/" && self.in_filter && self.lexer.upcoming() == Some(b'{') {
                return Ok(left);
            }
            self.next()?;
            let right = self.binary(rank + 1)?;
            let span = left.expression.span.to(right.expression.span);
            let below = left.height.max(right.height);
            let (first, second) = (Box::new(left.expression), Box::new(right.expression));
            left = node(
                ExpressionKind::Binary(*operator, first, second),
                span,
                below,
            )?;
        }
    }

    fn unary(&mut self) -> Parsed<Tall> {
        let token = self.peek()?;
        let TokenKind::Punctuation(text) = token.kind else {
            return self.postfix();
        };
        let operator = match text {
            "-" => UnaryOperator::Negate,
            "!" => UnaryOperator::Not,
            "~" => UnaryOperator::Complement,
            "*" => UnaryOperator::Dereference,
            "++" | "--" => {
                self.next()?;
                let operand = self.deeper(Self::unary)?;
                return step(operand, text, token.span, false);
            }
            "(" => {
                let Some((to, below)) = self.cast()? else {
                    return self.postfix();
                };
                let of = self.deeper(Self::unary)?;
                let span = self.since(token.span);
                let below = below.max(of.height);
                let of = Box::new(of.expression);
                return node(ExpressionKind::Cast { to, of }, span, below);
            }
            "&" => UnaryOperator::Address,
            _ => return self.postfix(),
        };
        self.next()?;
        if operator == UnaryOperator::Negate
            && let TokenKind::Number(value) = self.peek()?.kind
        {
            let span = token.span.to(self.next()?.span);
            if value > i64::MIN.unsigned_abs() {
                let message = format!("the number -{value} is below {}", i64::MIN);
                return Err(Diagnostic::new(span, message));
            }
            return node(number(value, true), span, 0);
        }
        let operand = self.deeper(Self::unary)?;
        let span = token.span.to(operand.expression.span);
        let below = operand.height;
        let kind = ExpressionKind::Unary(operator, Box::new(operand.expression));
        node(kind, span, below)
    }

    /// Parses the rest behind an operand: `.x`, `->x`, `[i]`, `++`.
    fn postfix(&mut self) -> Parsed<Tall> {
        let start = self.here()?;
        let mut found = self.operand()?;
        loop {
            let TokenKind::Punctuation(text) = self.peek()?.kind else {
                return Ok(found);
            };
            found = match text {
                "." | "->" => self.member_of(found, start)?,
                "[" => {
                    self.next()?;
                    let index = self.inside(Self::tall)?;
                    self.expect("]", "after the index")?;
                    let below = found.height.max(index.height);
                    let kind = ExpressionKind::Index {
                        of: Box::new(found.expression),
                        index: Box::new(index.expression),
                    };
                    node(kind, self.since(start), below)?
                }
                "++" | "--" => {
                    self.next()?;
                    step(found, text, self.last, true)?
                }
                _ => return Ok(found),
            };
        }
    }

    /// Parses `.name`, `->name` or `.0` behind an operand that begins at `start`; the sign is
    /// ahead.
    fn member_of(&mut self, of: Tall, start: Span) -> Parsed<Tall> {
        let arrow = self.is("->")?;
        self.next()?;
        let below = of.height;
        let of = Box::new(of.expression);
        let token = self.peek()?;
        let kind = match token.kind {
            TokenKind::Number(index) if !arrow => ExpressionKind::Item {
                of,
                index: usize::try_from(index).unwrap_or(usize::MAX),
            },
            TokenKind::Word(name) => ExpressionKind::Member {
                of,
                name: name.to_owned(),
                name_span: token.span,
                arrow,
            },
            _ => {
                let sign = if arrow { "->" } else { "." };
                return Err(self.unexpected(&format!("a member's name after '{sign}'")));
            }
        };
        self.next()?;
        node(kind, self.since(start), below)
    }

    fn operand(&mut self) -> Parsed<Tall> {
        let token = self.peek()?;
        let kind = match token.kind {
            TokenKind::Punctuation("(") => return self.parentheses(),
            TokenKind::Punctuation("{") => return self.block_operand(),
            TokenKind::Word(word) => return self.word(word, token.span),
            TokenKind::Number(value) => number(value, false),
            TokenKind::Text => return self.text(),
            TokenKind::Argument(number) => ExpressionKind::Argument(number),
            TokenKind::ArgumentCount => ExpressionKind::ArgumentCount,
            TokenKind::Local(name) => {
                self.next()?;
                return variable(LvalueKind::Local(name.to_owned()), token.span, 0);
            }
            TokenKind::Global(name) => {
                self.next()?;
                return self.global(name, token.span);
            }
            _ => return Err(self.unexpected("an expression")),
        };
        self.next()?;
        node(kind, token.span, 0)
    }

    /// Parses `"a" "b"`: one string.
    fn text(&mut self) -> Parsed<Tall> {
        let start = self.here()?;
        let mut value = Vec::new();
        while self.peek()?.kind == TokenKind::Text {
            let span = self.next()?.span;
            value.extend(self.lexer.text_value(span)?);
        }
        node(ExpressionKind::Text(value), self.since(start), 0)
    }

    /// Parses `@name` or `@name[keys]`, of which the name was read. A single tuple as the key is
    /// equivalent to its items.
    fn global(&mut self, name: &str, start: Span) -> Parsed<Tall> {
        let (mut keys, below) = if self.eat("[")? {
            if self.is("]")? {
                return Err(self.unexpected(&format!("a key of '@{name}'")));
            }
            self.items("]", "after the keys")?
        } else {
            (Vec::new(), 0)
        };
        if let [key] = keys.as_mut_slice()
            && let ExpressionKind::Tuple(items) = &mut key.kind
        {
            keys = std::mem::take(items);
        }
        let span = self.since(start);
        let kind = LvalueKind::Global {
            name: name.to_owned(),
            keys,
        };
        variable(kind, span, below)
    }

    /// Parses expressions with commas between, up to `end`, which is read; possibly none. Returns
    /// also the height of the highest.
    pub(super) fn items(&mut self, end: &str, what: &str) -> Parsed<(Vec<Expression>, usize)> {
        let (items, below, _) = self.list(end, what, false)?;
        Ok((items, below))
    }

    /// Parses the same; a comma may stand behind the last one if it `may_trail`. Returns also
    /// whether it does.
    fn list(
        &mut self,
        end: &str,
        what: &str,
        may_trail: bool,
    ) -> Parsed<(Vec<Expression>, usize, bool)> {
        let mut items = Vec::new();
        let mut below = 0;
        if self.eat(end)? {
            return Ok((items, below, false));
        }
        loop {
            let item = self.inside(Self::tall)?;
            below = below.max(item.height);
            items.push(item.expression);
            if self.eat(end)? {
                return Ok((items, below, false));
            }
            if items.len() >= MOST_ITEMS {
                let message = format!("more than {MOST_ITEMS} in one list");
                return Err(Diagnostic::new(self.here()?, message));
            }
            if !self.eat(",")? {
                return Err(self.unexpected(&format!("',' or '{end}' {what}")));
            }
            if may_trail && self.eat(end)? {
                return Ok((items, below, true));
            }
        }
    }

    /// Parses `(x)`, a tuple, or a record. `(x,)` is a tuple of one item, `()` of none.
    fn parentheses(&mut self) -> Parsed<Tall> {
        let start = self.next()?.span;
        if let TokenKind::Word(_) = self.peek()?.kind
            && self.lexer.is_single_equals()
        {
            return self.record(start);
        }
        let (mut items, below, is_tuple) = self.list(")", "after the expression", true)?;
        let span = self.since(start);
        if items.len() == 1
            && !is_tuple
            && let Some(mut only) = items.pop()
        {
            only.span = span;
            return Ok(Tall {
                expression: only,
                height: below,
            });
        }
        node(ExpressionKind::Tuple(items), span, below)
    }

    /// Parses `(x = 1, y = 2)`, of which the `(` was read.
    fn record(&mut self, start: Span) -> Parsed<Tall> {
        let (mut members, mut below) = (Vec::<(String, Expression)>::new(), 0);
        while !self.eat(")")? {
            let (name, span) = self.expect_word("a member's name")?;
            if members.iter().any(|(known, _)| known == name) {
                let message = format!("the record has a member '{name}' already");
                return Err(Diagnostic::new(span, message));
            }
            if members.len() >= MOST_ITEMS {
                let message = format!("more than {MOST_ITEMS} in one list");
                return Err(Diagnostic::new(span, message));
            }
            self.expect("=", "after the member's name")?;
            let value = self.inside(Self::tall)?;
            below = below.max(value.height);
            members.push((name.to_owned(), value.expression));
            if !self.eat(",")? && !self.is(")")? {
                return Err(self.unexpected("',' or ')' after the member"));
            }
        }
        node(ExpressionKind::Record(members), self.since(start), below)
    }

    /// Parses a word that is an operand, or begins one.
    fn word(&mut self, word: &str, span: Span) -> Parsed<Tall> {
        if self.input.as_deref() == Some(word) {
            self.next()?;
            return variable(LvalueKind::Local(word.to_owned()), span, 0);
        }
        match word {
            "sizeof" => return self.size_of(),
            "offsetof" => return self.offset_of(),
            "typeinfo" => return self.type_info(),
            "if" => return self.if_value(),
            "xlate" => {
                self.next()?;
                return self.translate(span);
            }
            _ => {}
        }
        self.next()?;
        // bpftrace's own name of a value.
        let word = word.strip_prefix("__builtin_").unwrap_or(word);
        // Conditions that are known are found without it.
        if word == "comptime" && self.at_operand()? {
            return self.operand();
        }
        if self.is("(")? {
            if let Some(found) = self.value_in_mode(word, span)? {
                return Ok(found);
            }
            match names::builtin(word) {
                // A value may be written as a function without arguments.
                Some(builtin) if names::signature(word).is_none() => {
                    let start = self.position();
                    self.next()?;
                    if self.eat(")")? {
                        return node(ExpressionKind::Builtin(builtin), self.since(span), 0);
                    }
                    self.rewind(start);
                }
                _ => {}
            }
            return self.call(word, span);
        }
        if let Some(builtin) = names::builtin(word) {
            return node(ExpressionKind::Builtin(builtin), span, 0);
        }
        match word {
            "NULL" => return node(ExpressionKind::Number(0), span, 0),
            "true" | "false" => return node(ExpressionKind::Boolean(word == "true"), span, 0),
            _ => {}
        }
        if names::KEYWORDS.contains(&word) || names::is_function(word) {
            return Err(self.unknown(word, span));
        }
        // Only the guest knows its enums, and only the whole script its macros.
        let kind = match names::is_constant(word) {
            true => ExpressionKind::Constant(word.to_owned()),
            false => ExpressionKind::Named {
                name: word.to_owned(),
                arguments: None,
            },
        };
        node(kind, span, 0)
    }

    /// Returns the error for a word of the language in a wrong place.
    fn unknown(&self, word: &str, span: Span) -> Diagnostic {
        if let Some(signature) = names::signature(word) {
            let message = format!("{word} is a function: {}", signature.usage);
            return Diagnostic::new(span, message);
        }
        if let Some(gatherer) = names::gatherer(word) {
            let message = format!("{word} is a function: @x = {}", gatherer.usage);
            return Diagnostic::new(span, message);
        }
        Diagnostic::new(span, format!("'{word}' does not belong here"))
    }

    /// Parses `name(arguments)`, of which the name was read.
    fn call(&mut self, word: &str, name_span: Span) -> Parsed<Tall> {
        let Some(signature) = names::signature(word) else {
            let message = if let Some(gatherer) = names::gatherer(word) {
                format!(
                    "{word}() gathers values in a variable: @x = {}; it cannot be part of an expression",
                    gatherer.usage
                )
            } else {
                self.next()?;
                let what = format!("after the arguments of {word}()");
                let (arguments, below) = self.items(")", &what)?;
                let kind = ExpressionKind::Named {
                    name: word.to_owned(),
                    arguments: Some(arguments),
                };
                return node(kind, self.since(name_span), below);
            };
            return Err(Diagnostic::new(name_span, message));
        };
        self.next()?;
        let mode = self.stack_mode(signature.function)?;
        let (mut arguments, below) =
            self.items(")", &format!("after the arguments of {word}()"))?;
        arguments.splice(0..0, mode);
        let call = Call {
            function: signature.function,
            name_span,
            arguments,
        };
        node(ExpressionKind::Call(call), self.since(name_span), below)
    }

    /// Parses the form of a stack as the first argument, and the comma behind it.
    fn stack_mode(&mut self, function: Function) -> Parsed<Option<Expression>> {
        let is_stack = matches!(function, Function::KernelStack | Function::UserStack);
        let TokenKind::Word(word) = self.peek()?.kind else {
            return Ok(None);
        };
        if !is_stack || names::stack_form(word).is_none() {
            return Ok(None);
        }
        let span = self.next()?.span;
        self.eat(",")?;
        let kind = ExpressionKind::Text(word.as_bytes().to_vec());
        Ok(Some(Expression { kind, span }))
    }

    /// Parses `(mode)` behind a value that has modes; the `(` is ahead. Empty parentheses are the
    /// value itself.
    fn value_in_mode(&mut self, word: &str, span: Span) -> Parsed<Option<Tall>> {
        let modes = names::modes(word);
        if modes.is_empty() {
            return Ok(None);
        }
        self.next()?;
        let meant = match self.peek()?.kind {
            TokenKind::Punctuation(")") => Some(word),
            TokenKind::Word(mode) => {
                let found = modes.iter().find(|(known, _)| *known == mode);
                self.next()?;
                found.map(|(_, meant)| *meant)
            }
            _ => None,
        };
        let Some(meant) = meant else {
            let known: Vec<&str> = modes.iter().map(|(known, _)| *known).collect();
            let message = format!("{word}() takes a mode: {}", known.join(", "));
            return Err(Diagnostic::new(self.since(span), message));
        };
        self.expect(")", "after the mode")?;
        let kind = match names::builtin(meant) {
            Some(builtin) => ExpressionKind::Builtin(builtin),
            None => ExpressionKind::Named {
                name: meant.to_owned(),
                arguments: None,
            },
        };
        node(kind, self.since(span), 0).map(Some)
    }
}

/// Returns a message about an unknown word, with those that may have been meant.
pub(super) fn misspelt(word: &str, mut message: Diagnostic) -> Diagnostic {
    let candidates = names::candidates(word).into_iter();
    message.suggestions = candidates.map(str::to_owned).collect();
    message
}

/// Makes `x++` and the like. `sign` stands before or behind the operand.
fn step(operand: Tall, text: &str, sign: Span, postfix: bool) -> Parsed<Tall> {
    let span = if postfix {
        operand.expression.span.to(sign)
    } else {
        sign.to(operand.expression.span)
    };
    let by = if text == "++" { 1 } else { -1 };
    let place = place_of(operand.expression)?;
    let kind = ExpressionKind::Step {
        place: Box::new(place),
        by,
        postfix,
    };
    node(kind, span, operand.height)
}

/// Returns the variable to assign to, if the expression is one.
pub(super) fn place_of(expression: Expression) -> Parsed<Lvalue> {
    let message = match expression.kind {
        ExpressionKind::Lvalue(place) => return Ok(*place),
        ExpressionKind::Builtin(builtin) => format!(
            "'{}' is built in and cannot be set; use a variable, such as ${0}",
            names::builtin_name(builtin)
        ),
        ExpressionKind::Argument(number) => format!(
            "'${number}' is an argument of the script and cannot be set; use a variable, such as $x"
        ),
        ExpressionKind::Member { .. } | ExpressionKind::Index { .. } => {
            "the guest's memory is only read; use a variable, such as $x or @x".to_owned()
        }
        ExpressionKind::Item { .. } => {
            "a tuple's items cannot be set; set the whole tuple".to_owned()
        }
        _ => "expected a variable, such as $x or @x; this cannot be set".to_owned(),
    };
    Err(Diagnostic::new(expression.span, message))
}
