//! Text into a script's tree.
//!
//! The caller brings the text and says which dialect it is in; the text may be any bytes. What comes back is a tree that can be said
//! to make sense without a guest, or all that is wrong with it. Time and memory are bounded by the text's length, and the tree's height
//! and the parser's own depth by [`HIGHEST`].
//!
//! The normal dialect is read by `rules`, `timers`, `statements`, `expressions`, `types` and `translators`, the strict one by `strict`.

mod expressions;
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

use super::ast::{Dialect, Script, Span};
use super::check;
use super::diagnostic::{Diagnostic, MOST_ERRORS};
use super::lex::normal::{Lexer, Token, TokenKind};
pub use tree::HIGHEST;

/// Most bytes of a script.
pub const LONGEST: usize = 1 << 20;

/// Reads a script and checks what can be checked without a guest.
///
/// # Errors
/// All that is wrong, in the text's order; at least one.
pub fn parse(text: &[u8], dialect: Dialect) -> Result<Script, Vec<Diagnostic>> {
    if text.len() > LONGEST {
        let message = format!("a script of {} bytes; {LONGEST} are the most", text.len());
        return Err(vec![Diagnostic {
            dialect,
            ..Diagnostic::new(Span::default(), message)
        }]);
    }
    let script = match dialect {
        Dialect::Strict => strict::parse(text)?,
        Dialect::Normal => {
            let mut parser = Parser::new(text);
            let script = parser.script();
            if !parser.errors.is_empty() {
                return Err(in_order(parser.errors));
            }
            script
        }
    };
    let errors = check::check(&script, dialect);
    if errors.is_empty() {
        return Ok(script);
    }
    Err(in_order(errors))
}

/// As they stand in the text, and no more than one wants to read.
fn in_order(mut errors: Vec<Diagnostic>) -> Vec<Diagnostic> {
    errors.sort_by_key(|error| error.span.start);
    errors.truncate(MOST_ERRORS);
    errors
}

type Parsed<T> = Result<T, Diagnostic>;

/// The normal dialect's parser.
struct Parser<'t> {
    lexer: Lexer<'t>,
    /// The token looked at, and where the lexer was before it.
    ahead: Option<(Token<'t>, usize)>,
    /// Where the last token that was read stands.
    last: Span,
    /// How deep calls are in one another.
    depth: usize,
    /// `/` before `{` ends the expression.
    in_filter: bool,
    /// What the translator being read calls its input.
    input: Option<String>,
    errors: Vec<Diagnostic>,
}

impl<'t> Parser<'t> {
    fn new(text: &'t [u8]) -> Self {
        Self {
            lexer: Lexer::new(text),
            ahead: None,
            last: Span::default(),
            depth: 0,
            in_filter: false,
            input: None,
            errors: Vec::new(),
        }
    }

    /// The next token, which is not read.
    fn peek(&mut self) -> Parsed<Token<'t>> {
        if let Some((token, _)) = self.ahead {
            return Ok(token);
        }
        let before = self.lexer.position();
        let token = self.lexer.next()?;
        self.ahead = Some((token, before));
        Ok(token)
    }

    /// The next token.
    fn next(&mut self) -> Parsed<Token<'t>> {
        let token = self.peek()?;
        self.ahead = None;
        self.last = token.span;
        Ok(token)
    }

    /// Where the parser is, for [`rewind`](Self::rewind).
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

    /// Whether this comes next, which is then read.
    fn eat(&mut self, punctuation: &str) -> Parsed<bool> {
        let found = self.is(punctuation)?;
        if found {
            self.next()?;
        }
        Ok(found)
    }

    /// Whether this word comes next, which is then read.
    fn eat_word(&mut self, word: &str) -> Parsed<bool> {
        let found = matches!(self.peek()?.kind, TokenKind::Word(found) if found == word);
        if found {
            self.next()?;
        }
        Ok(found)
    }

    /// Reads `punctuation`, which `what` says the place of.
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

    /// Something else than `wanted` comes next.
    fn unexpected(&mut self, wanted: &str) -> Diagnostic {
        match self.peek() {
            Ok(token) => Diagnostic::new(
                token.span,
                format!("{wanted} is expected here; found {}", token.kind.describe()),
            ),
            Err(diagnostic) => diagnostic,
        }
    }

    /// From `start` to the last token that was read.
    fn since(&self, start: Span) -> Span {
        start.to(self.last)
    }

    /// Where the next token stands.
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

    /// Notes a message. False once there are enough of them.
    fn report(&mut self, diagnostic: Diagnostic) -> bool {
        // One mistake is told once, whoever meets it.
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
