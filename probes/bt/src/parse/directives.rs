//! Directives of C's preprocessor, as far as scripts use them: conditions over names, constants,
//! and includes.
//!
//! Lines of directives, and groups that a condition leaves out, become blanks. All other text stays
//! at its place, so messages point at the script as it was written. `#include` is passed over: the
//! types of the guest's kernel come from its BTF. Comments and strings are respected, so a `#` in
//! them begins nothing.

use std::collections::HashMap;
use std::ops::Range;

use super::Parsed;
use crate::ast::Span;
use crate::diagnostic::Diagnostic;
use crate::lex::normal::{Lexer, TokenKind};

/// The greatest depth of conditions in one another, of both kinds.
const DEEPEST: usize = 64;

/// A name that `bpftrace` defines where the kernel has BTF. Without BTF, the types are missing
/// either way.
const DEFINED: &str = "BPFTRACE_HAVE_BTF";

/// The text without its directives.
pub(super) struct Directed {
    /// The text, as long as the script's.
    pub(super) text: Vec<u8>,
    /// The constants of `#define NAME value`: the name's place and the value's.
    pub(super) constants: Vec<(Span, Range<usize>)>,
    /// The errors.
    pub(super) errors: Vec<Diagnostic>,
}

/// A condition whose `#endif` has not come yet.
struct Condition {
    /// The `#if`.
    span: Span,
    /// Whether its present group is part of the script.
    is_on: bool,
    /// Whether a group of it has been part of the script.
    was_on: bool,
    /// Whether `#else` has come.
    is_last: bool,
}

/// Carries out the directives of a script.
pub(super) fn carry_out(text: &[u8]) -> Directed {
    let mut out = Directives {
        script: text,
        directed: Directed {
            text: text.to_vec(),
            constants: Vec::new(),
            errors: Vec::new(),
        },
        defined: HashMap::from([(DEFINED.to_owned(), 1)]),
        open: Vec::new(),
    };
    let mut at = if text.starts_with(b"#!") {
        line_end(text, 0)
    } else {
        0
    };
    while at < text.len() {
        at = out.line(at);
    }
    if let Some(open) = out.open.first() {
        let message = "this condition has no #endif";
        out.directed
            .errors
            .push(Diagnostic::new(open.span, message));
    }
    out.directed
}

struct Directives<'t> {
    script: &'t [u8],
    directed: Directed,
    /// The names that are defined, with their values where these are numbers, else 0.
    defined: HashMap<String, i64>,
    open: Vec<Condition>,
}

impl Directives<'_> {
    /// Handles the line that begins at `at`. Returns the start of the next one.
    fn line(&mut self, at: usize) -> usize {
        let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
        let rest = self.script.get(at..).unwrap_or_default();
        let indent = rest.iter().take_while(|byte| is_blank(byte)).count();
        if rest.get(indent) != Some(&b'#') {
            let end = self.plain_end(at);
            if !self.is_on() {
                self.blank(at..end);
            }
            return end;
        }
        let end = directive_end(self.script, at);
        if let Err(error) = self.directive(at + indent, end) {
            self.directed.errors.push(error);
        }
        self.blank(at..end);
        end
    }

    /// Returns the end of a line of the script, or of the line on which a comment ends that begins
    /// on it.
    fn plain_end(&self, start: usize) -> usize {
        let (text, mut at) = (self.script, start);
        let starts = |at: usize, sign: &[u8]| text.get(at..).is_some_and(|r| r.starts_with(sign));
        let mut in_text = false;
        while let Some(byte) = text.get(at) {
            match byte {
                b'\n' => return at + 1,
                b'\\' if in_text && text.get(at + 1) != Some(&b'\n') => at += 1,
                b'"' => in_text = !in_text,
                b'/' if !in_text && starts(at, b"//") => return line_end(text, at),
                // `/bin/*sh` in a probe's name is no comment.
                b'/' if !in_text && starts(at, b"/*") && self.is_comment(start, at) => {
                    let inside = text.get(at + 2..).unwrap_or_default();
                    match inside.windows(2).position(|two| two == b"*/") {
                        Some(length) => at += 2 + length + 1,
                        None => return text.len(),
                    }
                }
                _ => {}
            }
            at += 1;
        }
        text.len()
    }

    /// Checks whether `/*` at `at` begins a comment on the line from `start`: nothing before it, or
    /// a blank or a bracket.
    fn is_comment(&self, start: usize, at: usize) -> bool {
        let before = at.checked_sub(1).filter(|before| *before >= start);
        before
            .and_then(|before| self.script.get(before))
            .is_none_or(|byte| {
                !byte.is_ascii_alphanumeric() && !matches!(byte, b'/' | b'*' | b':' | b'.')
            })
    }

    /// Checks whether the text here is part of the script.
    fn is_on(&self) -> bool {
        self.open.iter().all(|open| open.is_on)
    }

    /// Replaces a part of the text by blanks; its lines stay.
    fn blank(&mut self, range: Range<usize>) {
        for byte in self.directed.text.get_mut(range).unwrap_or_default() {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
    }

    /// Carries out the directive at `start`, which ends before `end`.
    fn directive(&mut self, start: usize, end: usize) -> Parsed<()> {
        let line = self.script.get(..end).unwrap_or_default();
        let mut lexer = Lexer::at(line, start + 1);
        let word = lexer.next()?;
        let TokenKind::Word(name) = word.kind else {
            // `#` alone is allowed.
            return Ok(());
        };
        let span = Span {
            start,
            end: start + 1,
        }
        .to(word.span);
        match name {
            "ifdef" | "ifndef" => {
                let holds = match self.is_on() {
                    true => self.is_defined(&mut lexer)? == (name == "ifdef"),
                    false => false,
                };
                self.begin(span, holds)
            }
            "if" => {
                let holds = match self.is_on() {
                    true => self.condition(&mut lexer, span),
                    false => Ok(false),
                };
                self.begin(span, *holds.as_ref().unwrap_or(&false))?;
                holds.map(|_| ())
            }
            "elif" | "else" | "endif" => self.go_on(name, span, &mut lexer),
            _ if !self.is_on() => Ok(()),
            "define" => self.define(&mut lexer, end),
            "undef" => {
                let name = word_of(&mut lexer)?.0;
                self.defined.remove(name);
                let script = self.script;
                let is_it = |(span, _): &(Span, _)| of(script, span) == name.as_bytes();
                self.directed.constants.retain(|known| !is_it(known));
                Ok(())
            }
            "include" | "pragma" | "warning" | "line" => Ok(()),
            "error" => {
                let said = self.script.get(word.span.end..end).unwrap_or_default();
                let said = String::from_utf8_lossy(said.trim_ascii()).into_owned();
                Err(Diagnostic::new(span, format!("the script says: {said}")))
            }
            _ => Err(Diagnostic::new(
                span,
                format!(
                    "unknown directive '#{name}'; known are #if, #ifdef, #ifndef, #elif, #else, #endif, #define, #undef, #include and #error"
                ),
            )),
        }
    }

    /// Begins a condition.
    fn begin(&mut self, span: Span, is_on: bool) -> Parsed<()> {
        if self.open.len() >= DEEPEST {
            let message = format!("more than {DEEPEST} conditions in one another");
            return Err(Diagnostic::new(span, message));
        }
        self.open.push(Condition {
            span,
            is_on,
            was_on: is_on,
            is_last: false,
        });
        Ok(())
    }

    /// Carries out `#elif`, `#else` and `#endif`.
    fn go_on(&mut self, name: &str, span: Span, lexer: &mut Lexer<'_>) -> Parsed<()> {
        let Some(mut open) = self.open.pop() else {
            let message = format!("this #{name} belongs to no #if");
            return Err(Diagnostic::new(span, message));
        };
        if name == "endif" {
            return Ok(());
        }
        if open.is_last {
            let message = format!("#{name} after #else");
            return Err(Diagnostic::new(span, message));
        }
        open.is_last = name == "else";
        let may = self.is_on() && !open.was_on;
        open.is_on = may && (open.is_last || self.condition(lexer, span)?);
        open.was_on |= open.is_on;
        self.open.push(open);
        Ok(())
    }

    /// Carries out `#define NAME value`.
    fn define(&mut self, lexer: &mut Lexer<'_>, end: usize) -> Parsed<()> {
        let (name, span) = word_of(lexer)?;
        if self.script.get(span.end) == Some(&b'(') {
            let message = format!(
                "#define {name}(...) is not offered; write macro {name}(x) {{ x }} instead"
            );
            return Err(Diagnostic::new(span, message));
        }
        let mut ahead = lexer.clone();
        let value = match (ahead.next()?.kind, ahead.next()?.kind) {
            (TokenKind::Number(number), TokenKind::End) => i64::try_from(number).unwrap_or(0),
            _ => 0,
        };
        self.defined.insert(name.to_owned(), value);
        let script = self.script;
        let is_it = |(known, _): &(Span, _)| of(script, known) == name.as_bytes();
        self.directed.constants.retain(|known| !is_it(known));
        self.directed.constants.push((span, span.end..end));
        Ok(())
    }

    /// Reads a name. Checks whether it is defined.
    fn is_defined(&self, lexer: &mut Lexer<'_>) -> Parsed<bool> {
        let (name, _) = word_of(lexer)?;
        Ok(self.defined.contains_key(name))
    }

    /// Reads the rest of `#if`: numbers, names, `defined`, `!`, comparisons, `&&` and `||`.
    fn condition(&self, lexer: &mut Lexer<'_>, directive: Span) -> Parsed<bool> {
        let before = lexer.position();
        if lexer.next()?.kind == TokenKind::End {
            return Err(unusable(directive));
        }
        lexer.rewind(before);
        let value = self.value(lexer, 0, DEEPEST)?;
        match lexer.next()? {
            token if token.kind == TokenKind::End => Ok(value != 0),
            token => Err(unusable(token.span)),
        }
    }

    /// Reads operators that bind as tight as `least`, or tighter.
    fn value(&self, lexer: &mut Lexer<'_>, least: u8, depth: usize) -> Parsed<i64> {
        let mut left = self.operand(lexer, depth)?;
        loop {
            let before = lexer.position();
            let token = lexer.next()?;
            let rank = match token.kind {
                TokenKind::Punctuation("||") => 1,
                TokenKind::Punctuation("&&") => 2,
                TokenKind::Punctuation("==" | "!=") => 3,
                TokenKind::Punctuation("<" | ">" | "<=" | ">=") => 4,
                _ => 0,
            };
            if rank == 0 || rank < least {
                lexer.rewind(before);
                return Ok(left);
            }
            let depth = depth.checked_sub(1).ok_or_else(|| unusable(token.span))?;
            let right = self.value(lexer, rank + 1, depth)?;
            left = i64::from(match token.kind {
                TokenKind::Punctuation("||") => left != 0 || right != 0,
                TokenKind::Punctuation("&&") => left != 0 && right != 0,
                TokenKind::Punctuation("==") => left == right,
                TokenKind::Punctuation("!=") => left != right,
                TokenKind::Punctuation("<") => left < right,
                TokenKind::Punctuation("<=") => left <= right,
                TokenKind::Punctuation(">") => left > right,
                _ => left >= right,
            });
        }
    }

    fn operand(&self, lexer: &mut Lexer<'_>, depth: usize) -> Parsed<i64> {
        let token = lexer.next()?;
        let depth = depth.checked_sub(1).ok_or_else(|| unusable(token.span))?;
        match token.kind {
            TokenKind::Punctuation("!") => Ok((self.operand(lexer, depth)? == 0).into()),
            TokenKind::Punctuation("(") => {
                let value = self.value(lexer, 0, depth)?;
                match lexer.next()? {
                    end if end.kind == TokenKind::Punctuation(")") => Ok(value),
                    end => Err(unusable(end.span)),
                }
            }
            TokenKind::Number(number) => Ok(i64::try_from(number).unwrap_or(i64::MAX)),
            TokenKind::Word("defined") => {
                let before = lexer.position();
                let in_brackets = lexer.next()?.kind == TokenKind::Punctuation("(");
                if !in_brackets {
                    lexer.rewind(before);
                }
                let is_defined = self.is_defined(lexer)?;
                if in_brackets {
                    lexer.next()?;
                }
                Ok(is_defined.into())
            }
            // As in C, other names are 0.
            TokenKind::Word(name) => Ok(self.defined.get(name).copied().unwrap_or(0)),
            _ => Err(unusable(token.span)),
        }
    }
}

fn unusable(span: Span) -> Diagnostic {
    let message =
        "expected numbers, names, defined(NAME), comparisons, '!', '&&' and '||' in this condition";
    Diagnostic::new(span, message)
}

/// Returns the text of a place.
fn of<'t>(text: &'t [u8], span: &Span) -> &'t [u8] {
    text.get(span.start..span.end).unwrap_or_default()
}

/// Reads a name.
fn word_of<'t>(lexer: &mut Lexer<'t>) -> Parsed<(&'t str, Span)> {
    let token = lexer.next()?;
    match token.kind {
        TokenKind::Word(name) => Ok((name, token.span)),
        _ => Err(Diagnostic::new(
            token.span,
            "expected a name in this directive",
        )),
    }
}

/// Returns the start of the line behind the one of `at`.
fn line_end(text: &[u8], at: usize) -> usize {
    let rest = text.get(at..).unwrap_or_default();
    let length = rest.iter().position(|byte| *byte == b'\n');
    length.map_or(text.len(), |length| at + length + 1)
}

/// Returns the end of a directive: of its line, or of the last of those that end in `\`.
fn directive_end(text: &[u8], start: usize) -> usize {
    let mut end = line_end(text, start);
    while text.get(..end).is_some_and(|line| line.ends_with(b"\\\n")) && end < text.len() {
        end = line_end(text, end);
    }
    end
}
