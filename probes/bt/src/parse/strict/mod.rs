//! The strict dialect: the grammar of OpenBSD's bt(5), no more and no less.
//!
//! OpenBSD's parser looks one token ahead, and only if it must; its messages stand where its lexer
//! is at that time. This parser does the same: it looks at a token ([`Parser::peek`]) only if the
//! grammar cannot go on without it. After a message it skips to the next possible start of a rule,
//! and reports nothing before three tokens fit again.

mod expressions;
mod statements;

use super::tree::{HIGHEST, Tall, TooHigh};
use crate::ast::{ExpressionKind, ProbeKind, ProbeSpec, Rule, Script, Span};
use crate::diagnostic::{Diagnostic, MOST_ERRORS};
use crate::lex::strict::{Lexer, Token};
use crate::names::StrictWord;

/// The number of tokens that must fit after a message before the next one.
const QUIET: usize = 3;

/// The units of `profile` and `interval`, and the greatest number of each: no period may be above
/// `i64::MAX` nanoseconds.
const UNITS: &[(&str, i64)] = &[
    ("hz", 1_000_000),
    ("us", i64::MAX / 1_000),
    ("ms", i64::MAX / 1_000_000),
    ("s", i64::MAX / 1_000_000_000),
];

/// The error of a text that does not match the grammar.
#[derive(Debug)]
struct SyntaxError;

impl From<TooHigh> for SyntaxError {
    fn from(_: TooHigh) -> Self {
        Self
    }
}

type Parsed<T> = Result<T, SyntaxError>;

struct Parser<'t> {
    lexer: Lexer<'t>,
    /// The token ahead.
    ahead: Option<Token>,
    /// The number of tokens that fitted since the last syntax error.
    fitted: usize,
    /// The depth of nested calls.
    depth: usize,
}

/// Parses all of `text`.
pub fn parse(text: &[u8]) -> Result<Script, Vec<Diagnostic>> {
    let mut parser = Parser {
        lexer: Lexer::new(text),
        ahead: None,
        fitted: QUIET,
        depth: 0,
    };
    let script = parser.script();
    if parser.lexer.errors.is_empty() {
        Ok(script)
    } else {
        Err(parser.lexer.errors)
    }
}

impl Parser<'_> {
    fn script(&mut self) -> Script {
        let mut script = Script::default();
        while self.lexer.errors.len() < MOST_ERRORS {
            let quiet = self.fitted < QUIET;
            match self.peek() {
                Token::End => break,
                Token::Word(_) | Token::Keyword(StrictWord::Begin | StrictWord::End) => {
                    match self.rule() {
                        Ok(rule) => script.rules.push(rule),
                        Err(SyntaxError) => self.syntax_error(),
                    }
                }
                _ if quiet => {
                    self.next();
                    self.fitted = 0;
                }
                _ => self.syntax_error(),
            }
        }
        script
    }

    /// Reports that the token ahead does not fit, unless there is a message there or shortly
    /// before.
    fn syntax_error(&mut self) {
        self.peek();
        if self.fitted >= QUIET {
            self.lexer.wrong("syntax error");
        }
        self.fitted = 0;
        self.depth = 0;
    }

    fn peek(&mut self) -> &Token {
        let lexer = &mut self.lexer;
        self.ahead.get_or_insert_with(|| lexer.next())
    }

    fn next(&mut self) -> Token {
        self.fitted += 1;
        match self.ahead.take() {
            Some(token) => token,
            None => self.lexer.next(),
        }
    }

    /// Reads the next token if it is this byte. Returns whether it was.
    fn eat(&mut self, byte: u8) -> bool {
        let found = *self.peek() == Token::Byte(byte);
        if found {
            self.next();
        }
        found
    }

    fn expect(&mut self, byte: u8) -> Parsed<()> {
        self.eat(byte).then_some(()).ok_or(SyntaxError)
    }

    /// Returns the span from `start` to the last byte read, less a token only looked at.
    fn from(&self, start: Span) -> Span {
        match self.ahead {
            None => start.to(self.lexer.span()),
            Some(_) => Span {
                start: start.start,
                end: self.lexer.span().start.max(start.end),
            },
        }
    }

    /// Returns the span of the next token.
    fn here(&mut self) -> Span {
        self.peek();
        self.lexer.span()
    }

    /// Runs `parse` one level deeper.
    fn deeper<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.depth >= HIGHEST {
            self.too_high();
            return Err(SyntaxError);
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth = self.depth.saturating_sub(1);
        parsed
    }

    fn too_high(&mut self) {
        self.lexer
            .wrong(format!("nested more than {HIGHEST} levels deep"));
        // The message is there already.
        self.fitted = 0;
    }

    fn node(&mut self, kind: ExpressionKind, span: Span, below: usize) -> Parsed<Tall> {
        Tall::new(kind, span, below).map_err(|too_high| {
            self.too_high();
            too_high.into()
        })
    }

    fn rule(&mut self) -> Parsed<Rule> {
        let mut probes = vec![self.probe()?];
        while self.eat(b',') {
            probes.push(self.probe()?);
        }
        let filter = if self.eat(b'/') {
            let filter = self.expression()?.expression;
            match self.peek() {
                Token::FilterEnd => self.next(),
                _ => return Err(SyntaxError),
            };
            Some(filter)
        } else {
            None
        };
        let body = self.action()?;
        self.lexer.in_begin_or_end = false;
        Ok(Rule {
            probes,
            filter,
            body,
        })
    }

    fn probe(&mut self) -> Parsed<ProbeSpec> {
        let start = self.here();
        let kind = match self.peek().clone() {
            Token::Keyword(StrictWord::Begin) => {
                self.lexer.in_begin_or_end = true;
                self.next();
                ProbeKind::Begin
            }
            Token::Keyword(StrictWord::End) => {
                self.lexer.in_begin_or_end = true;
                self.next();
                ProbeKind::End
            }
            Token::Word(provider) => {
                self.lexer.in_probe = true;
                self.next();
                self.expect(b':')?;
                let Token::Word(function) = self.peek().clone() else {
                    return Err(SyntaxError);
                };
                self.next();
                self.expect(b':')?;
                let name = match self.peek().clone() {
                    Token::Word(name) => {
                        self.next();
                        name
                    }
                    Token::Number(number) => {
                        self.next();
                        self.check_unit(&function, number);
                        number.to_string()
                    }
                    _ => return Err(SyntaxError),
                };
                self.lexer.in_probe = false;
                ProbeKind::Pattern(format!("{provider}:{function}:{name}"))
            }
            _ => return Err(SyntaxError),
        };
        Ok(ProbeSpec {
            kind,
            span: self.from(start),
        })
    }

    /// Checks `unit:number`.
    fn check_unit(&mut self, unit: &str, number: i64) {
        match UNITS.iter().find(|(known, _)| *known == unit) {
            None => self.lexer.wrong(format!("Invalid unit: {unit}")),
            Some(_) if number < 1 => self.lexer.wrong(format!("Number is invalid: {number}")),
            Some((_, most)) if number > *most => {
                self.lexer.wrong(format!("Number is too large: {number}"));
            }
            Some(_) => {}
        }
    }
}
