//! Parses text to a script's tree.
//!
//! The caller brings the text and its dialect; the text may be any bytes. The result is a tree that
//! makes sense as far as that is known without a guest, or all its errors. Time and memory are
//! bounded by the text's length, and the tree's height and the parser's own depth by [`HIGHEST`].
//!
//! The normal dialect is read by `directives`, parsed by `rules`, `timers`, `statements`,
//! `expressions`, `types`, `enums`, `macros` and `translators`, and rid of macros by `expand`. The
//! strict one is parsed by `strict`.

mod directives;
mod enums;
mod expand;
mod expressions;
mod gather;
mod macros;
mod rules;
mod statements;
mod strict;
mod timers;
mod translators;
mod tree;
mod types;

#[cfg(test)]
mod cases;
#[cfg(test)]
mod dump;
#[cfg(test)]
mod random_tests;

use std::sync::LazyLock;

use crate::ast::{Dialect, Macro, Script, Span};
use crate::check;
use crate::diagnostic::{Diagnostic, MOST_ERRORS};
use crate::lex::normal::{Lexer, Token, TokenKind};
pub(crate) use gather::linear_histogram;
pub(crate) use rules::probe_kind;
pub(crate) use timers::has_argument;
pub use tree::HIGHEST;

/// The macros of the language itself.
static PRELUDE: LazyLock<Vec<Macro>> = LazyLock::new(|| {
    let text = include_str!("../prelude.bt");
    Parser::new(text.as_bytes()).script().macros
});

/// The greatest number of bytes of a script.
pub const LONGEST: usize = 1 << 20;

/// Parses a script and checks it as far as possible without a guest.
///
/// # Errors
/// All errors, in the text's order; at least one.
pub fn parse(text: &[u8], dialect: Dialect) -> Result<Script, Vec<Diagnostic>> {
    if text.len() > LONGEST {
        let message = format!("a script of {} bytes; {LONGEST} are the most", text.len());
        return Err(vec![Diagnostic::new(Span::default(), message)]);
    }
    let mut script = match dialect {
        Dialect::Strict => strict::parse(text)?,
        Dialect::Normal => {
            let directed = directives::carry_out(text);
            let mut parser = Parser::new(&directed.text);
            parser.errors = directed.errors;
            let mut script = parser.script();
            let constants = Parser::constants(text, &directed.constants);
            script.macros.extend(constants);
            let errors = expand::expand(&mut script, &PRELUDE);
            parser.errors.extend(errors);
            if !parser.errors.is_empty() {
                return Err(in_order(parser.errors));
            }
            script
        }
    };
    script.lines = line_starts(text);
    let errors = match dialect {
        Dialect::Normal => check::check(&script),
        Dialect::Strict => Vec::new(),
    };
    if errors.is_empty() {
        return Ok(script);
    }
    Err(in_order(errors))
}

/// Returns the first byte of each line.
fn line_starts(text: &[u8]) -> Vec<usize> {
    let ends = text.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    std::iter::once(0)
        .chain(ends.map(|(at, _)| at + 1))
        .collect()
}

/// Sorts the errors by their place in the text, and cuts them to a readable number.
fn in_order(mut errors: Vec<Diagnostic>) -> Vec<Diagnostic> {
    errors.sort_by_key(|error| error.span.start);
    errors.truncate(MOST_ERRORS);
    errors
}

type Parsed<T> = Result<T, Diagnostic>;

/// The normal dialect's parser.
struct Parser<'t> {
    lexer: Lexer<'t>,
    /// The token ahead, and the lexer's position before it.
    ahead: Option<(Token<'t>, usize)>,
    /// The span of the last token read.
    last: Span,
    /// The depth of nested calls.
    depth: usize,
    /// Whether `/` before `{` ends the expression.
    in_filter: bool,
    /// The name of the input in the translator being parsed.
    input: Option<String>,
    /// The height of the highest expression since this was set to 0.
    highest: usize,
    /// Whether the last statement ended in a `;`.
    ended_by_semicolon: bool,
    errors: Vec<Diagnostic>,
}

impl<'t> Parser<'t> {
    fn new(text: &'t [u8]) -> Self {
        Self::of(Lexer::new(text))
    }

    /// Starts where the lexer is.
    fn of(lexer: Lexer<'t>) -> Self {
        Self {
            lexer,
            ahead: None,
            last: Span::default(),
            depth: 0,
            in_filter: false,
            input: None,
            highest: 0,
            ended_by_semicolon: false,
            errors: Vec::new(),
        }
    }

    /// Returns the next token without reading it.
    fn peek(&mut self) -> Parsed<Token<'t>> {
        if let Some((token, _)) = self.ahead {
            return Ok(token);
        }
        let before = self.lexer.position();
        let token = self.lexer.next()?;
        self.ahead = Some((token, before));
        Ok(token)
    }

    /// Reads the next token.
    fn next(&mut self) -> Parsed<Token<'t>> {
        let token = self.peek()?;
        self.ahead = None;
        self.last = token.span;
        Ok(token)
    }

    /// Returns the parser's position, for [`rewind`](Self::rewind).
    fn position(&self) -> (usize, Span) {
        let at = match self.ahead {
            Some((_, before)) => before,
            None => self.lexer.position(),
        };
        (at, self.last)
    }

    fn rewind(&mut self, (at, last): (usize, Span)) {
        self.ahead = None;
        self.last = last;
        self.lexer.rewind(at);
    }

    fn is(&mut self, punctuation: &str) -> Parsed<bool> {
        Ok(matches!(self.peek()?.kind, TokenKind::Punctuation(found) if found == punctuation))
    }

    /// Reads this punctuation if it comes next. Returns whether it did.
    fn eat(&mut self, punctuation: &str) -> Parsed<bool> {
        let found = self.is(punctuation)?;
        if found {
            self.next()?;
        }
        Ok(found)
    }

    /// Reads this word if it comes next. Returns whether it did.
    fn eat_word(&mut self, word: &str) -> Parsed<bool> {
        let found = matches!(self.peek()?.kind, TokenKind::Word(found) if found == word);
        if found {
            self.next()?;
        }
        Ok(found)
    }

    /// Reads `punctuation`; `what` describes its place.
    fn expect(&mut self, punctuation: &str, what: &str) -> Parsed<Span> {
        if self.eat(punctuation)? {
            return Ok(self.last);
        }
        Err(self.unexpected(&format!("'{punctuation}' {what}")))
    }

    /// Reads a name.
    fn expect_word(&mut self, what: &str) -> Parsed<(&'t str, Span)> {
        let token = self.peek()?;
        match token.kind {
            TokenKind::Word(word) => {
                self.next()?;
                Ok((word, token.span))
            }
            _ => Err(self.unexpected(what)),
        }
    }

    /// Returns the error for a next token other than `wanted`.
    fn unexpected(&mut self, wanted: &str) -> Diagnostic {
        match self.peek() {
            Ok(token) => Diagnostic::new(
                token.span,
                format!("expected {wanted}, found {}", token.kind.describe()),
            ),
            Err(diagnostic) => diagnostic,
        }
    }

    /// Returns an error, which is `message`, if the next token is `text`.
    fn refuse(&mut self, text: &str, message: &str) -> Parsed<()> {
        match self.is(text)? {
            true => Err(Diagnostic::new(self.here()?, message)),
            false => Ok(()),
        }
    }

    /// Returns the span from `start` to the last token read.
    fn since(&self, start: Span) -> Span {
        start.to(self.last)
    }

    /// Returns the span of the next token.
    fn here(&mut self) -> Parsed<Span> {
        Ok(self.peek()?.span)
    }

    /// Runs `parse` one level deeper.
    fn deeper<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.depth >= HIGHEST {
            return Err(too_high(self.here()?));
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    /// Adds a message. Returns `false` once there are enough of them.
    fn report(&mut self, diagnostic: Diagnostic) -> bool {
        // One mistake is reported only once.
        if self.errors.len() < MOST_ERRORS && self.errors.last() != Some(&diagnostic) {
            self.errors.push(diagnostic);
        }
        self.errors.len() < MOST_ERRORS
    }
}

fn too_high(span: Span) -> Diagnostic {
    Diagnostic::new(
        span,
        format!("nested more than {HIGHEST} levels deep; put parts into variables"),
    )
}
