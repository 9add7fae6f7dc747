//! Tokens of the normal dialect, which are bpftrace's with those of D's translators.
//!
//! Probes are no tokens: `uprobe:/bin/*sh:main` would be split into a comment and more. The parser
//! knows where they stand and reads them with [`Lexer::probe`].

use super::{in_word, is_blank, length_of, literal};
use crate::ast::Span;
use crate::diagnostic::Diagnostic;

/// Operators and brackets, each before its own prefixes.
const PUNCTUATION: &[&str] = &[
    "<<=", ">>=", "->", "++", "--", "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "+=", "-=",
    "*=", "/=", "%=", "&=", "|=", "^=", "..", "(", ")", "{", "}", "[", "]", ";", ",", ".", ":",
    "?", "=", "<", ">", "+", "-", "*", "/", "%", "&", "|", "^", "!", "~",
];

/// A token and its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token<'t> {
    /// The kind of token.
    pub kind: TokenKind<'t>,
    /// The token's place.
    pub span: Span,
}

/// The kinds of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind<'t> {
    /// Letters, digits and `_`, not beginning with a digit.
    Word(&'t str),
    /// A number.
    Number(u64),
    /// A string literal; see [`Lexer::text_value`].
    Text,
    /// `$name`, without `$`.
    Local(&'t str),
    /// `@name`, without `@`; may be empty.
    Global(&'t str),
    /// `$1`.
    Argument(usize),
    /// `$#`.
    ArgumentCount,
    /// An operator or a bracket.
    Punctuation(&'static str),
    /// The end of the text.
    End,
}

impl TokenKind<'_> {
    /// Describes the token for a message.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Word(word) => format!("'{word}'"),
            Self::Number(_) => "a number".to_owned(),
            Self::Text => "a string".to_owned(),
            Self::Local(name) => format!("'${name}'"),
            Self::Global(name) => format!("'@{name}'"),
            Self::Argument(number) => format!("'${number}'"),
            Self::ArgumentCount => "'$#'".to_owned(),
            Self::Punctuation(text) => format!("'{text}'"),
            Self::End => "the end of the script".to_owned(),
        }
    }
}

/// Splits a text into tokens. Every call advances, also one that returns an error; behind the end
/// all tokens are [`TokenKind::End`].
#[derive(Debug, Clone)]
pub struct Lexer<'t> {
    text: &'t [u8],
    at: usize,
}

impl<'t> Lexer<'t> {
    /// Starts at the beginning of `text`, or behind its `#!` line.
    #[must_use]
    pub fn new(text: &'t [u8]) -> Self {
        let mut lexer = Self { text, at: 0 };
        if text.starts_with(b"#!") {
            lexer.skip_line();
        }
        lexer
    }

    /// Starts at a byte of `text`.
    #[must_use]
    pub fn at(text: &'t [u8], at: usize) -> Self {
        Self { text, at }
    }

    /// Returns the offset of the next byte.
    #[must_use]
    pub fn position(&self) -> usize {
        self.at
    }

    /// Moves to a byte whose offset [`position`](Self::position) returned.
    pub fn rewind(&mut self, at: usize) {
        self.at = at;
    }

    /// Returns the remaining text.
    fn rest(&self) -> &'t [u8] {
        self.text.get(self.at..).unwrap_or_default()
    }

    /// Returns the byte `ahead` of the next one.
    fn byte(&self, ahead: usize) -> Option<u8> {
        self.text.get(self.at + ahead).copied()
    }

    fn span_from(&self, start: usize) -> Span {
        Span {
            start,
            end: self.at,
        }
    }

    /// Moves to the end of the line.
    pub fn skip_line(&mut self) {
        self.at += length_of(self.rest(), |byte| byte != b'\n');
    }

    /// Skips blanks and comments.
    ///
    /// # Errors
    /// A comment is not ended; the position is then the end of the text.
    pub fn skip(&mut self) -> Result<(), Diagnostic> {
        loop {
            self.at += length_of(self.rest(), is_blank);
            let rest = self.rest();
            if rest.starts_with(b"//") {
                self.skip_line();
            } else if rest.starts_with(b"/*") {
                let inside = rest.get(2..).unwrap_or_default();
                let Some(end) = inside.windows(2).position(|two| two == b"*/") else {
                    let span = Span {
                        start: self.at,
                        end: self.at + 2,
                    };
                    self.at = self.text.len();
                    return Err(Diagnostic::new(span, "this comment is not ended by */"));
                };
                self.at += 2 + end + 2;
            } else {
                return Ok(());
            }
        }
    }

    /// Returns the next byte that is neither blank nor in a comment, without moving.
    #[must_use]
    pub fn upcoming(&self) -> Option<u8> {
        let mut ahead = self.clone();
        ahead.skip().ok()?;
        ahead.byte(0)
    }

    /// Checks whether `=` comes next, and not `==`, without moving.
    #[must_use]
    pub fn is_single_equals(&self) -> bool {
        let mut ahead = self.clone();
        ahead.skip().is_ok() && ahead.byte(0) == Some(b'=') && ahead.byte(1) != Some(b'=')
    }

    /// Checks whether `word` comes next, alone, without moving. It serves the words that
    /// distinguish rules.
    #[must_use]
    pub fn at_word(&self, word: &str) -> bool {
        let mut ahead = self.clone();
        ahead.skip().is_ok()
            && ahead.rest().starts_with(word.as_bytes())
            && ahead
                .byte(word.len())
                .is_some_and(|byte| is_blank(byte) || matches!(byte, b'=' | b'{' | b'<' | b'@'))
    }

    /// Reads the next token.
    ///
    /// # Errors
    /// A text that begins no token; it has been read.
    pub fn next(&mut self) -> Result<Token<'t>, Diagnostic> {
        self.skip()?;
        let start = self.at;
        let Some(first) = self.byte(0) else {
            let span = self.span_from(start);
            return Ok(Token {
                kind: TokenKind::End,
                span,
            });
        };
        let kind = match first {
            b'"' => self.string()?,
            b'$' => self.dollar()?,
            b'@' => {
                self.at += 1;
                TokenKind::Global(self.word())
            }
            b'0'..=b'9' => {
                let word = self.word();
                let value = literal::number(word)
                    .map_err(|message| Diagnostic::new(self.span_from(start), message))?;
                TokenKind::Number(value)
            }
            b'a'..=b'z' | b'A'..=b'Z' | b'_' => TokenKind::Word(self.word()),
            _ => self.punctuation()?,
        };
        Ok(Token {
            kind,
            span: self.span_from(start),
        })
    }

    /// Reads letters, digits and `_`, possibly none.
    fn word(&mut self) -> &'t str {
        let rest = self.rest();
        let length = length_of(rest, in_word);
        self.at += length;
        let word = rest.get(..length).unwrap_or_default();
        std::str::from_utf8(word).unwrap_or_default()
    }

    fn punctuation(&mut self) -> Result<TokenKind<'t>, Diagnostic> {
        let rest = self.rest();
        if let Some(found) = PUNCTUATION.iter().find(|text| {
            text.as_bytes().first() == rest.first() && rest.starts_with(text.as_bytes())
        }) {
            self.at += found.len();
            return Ok(TokenKind::Punctuation(found));
        }
        let start = self.at;
        // No character is longer. Examining all of the rest for each character would take quadratic
        // time.
        let first = rest.get(..4).unwrap_or(rest);
        let shown = match first.utf8_chunks().next() {
            Some(chunk) => match chunk.valid().chars().next() {
                Some(c) => {
                    self.at += c.len_utf8();
                    c.escape_debug().to_string()
                }
                None => {
                    self.at += 1;
                    format!("\\x{:02x}", rest.first().copied().unwrap_or_default())
                }
            },
            None => String::new(),
        };
        let hint = match shown.as_str() {
            "\\'" => "; strings are written in \"double quotes\", a character as its number",
            "#" => "; a directive begins its line",
            _ => "",
        };
        Err(Diagnostic::new(
            self.span_from(start),
            format!("unexpected character '{shown}'{hint}"),
        ))
    }

    /// Reads `"..."`, on one line.
    fn string(&mut self) -> Result<TokenKind<'t>, Diagnostic> {
        let start = self.at;
        self.at += 1;
        loop {
            match self.byte(0) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(TokenKind::Text);
                }
                Some(b'\\') if !matches!(self.byte(1), None | Some(b'\n')) => self.at += 2,
                None | Some(b'\n') => {
                    return Err(Diagnostic::new(
                        self.span_from(start),
                        "this string is not ended by \" on its line",
                    ));
                }
                Some(_) => self.at += 1,
            }
        }
    }

    /// Returns the bytes of the string literal at `span`.
    ///
    /// # Errors
    /// The literal has an unknown escape.
    pub fn text_value(&self, span: Span) -> Result<Vec<u8>, Diagnostic> {
        let inner = self
            .text
            .get(span.start + 1..span.end.saturating_sub(1))
            .unwrap_or_default();
        literal::text(inner, span.start + 1)
    }

    /// Reads `$name`, `$1` or `$#`.
    fn dollar(&mut self) -> Result<TokenKind<'t>, Diagnostic> {
        let start = self.at;
        self.at += 1;
        if self.byte(0) == Some(b'#') {
            self.at += 1;
            return Ok(TokenKind::ArgumentCount);
        }
        let word = self.word();
        let wrong = |message: String| Err(Diagnostic::new(self.span_from(start), message));
        if word.is_empty() {
            return wrong("expected a name or a number after '$'".to_owned());
        }
        if !word.starts_with(|c: char| c.is_ascii_digit()) {
            return Ok(TokenKind::Local(word));
        }
        match word.parse::<u32>() {
            Ok(number) if number > 0 => Ok(TokenKind::Argument(number as usize)),
            _ => wrong(format!(
                "unknown argument '${word}': expected $1, $2 and so on, or $# for their number"
            )),
        }
    }

    /// Reads the text of a probe: up to a blank, a comma, `{`, or the `/` that begins a predicate.
    /// A part between colons that begins with `/` or `.` is a file's path, whose slashes belong to
    /// it. Blanks and comments before the probe are read, too.
    ///
    /// # Errors
    /// There is no probe, or it holds what no probe's name does.
    pub fn probe(&mut self) -> Result<(&'t [u8], Span), Diagnostic> {
        self.skip()?;
        let start = self.at;
        let mut in_path = false;
        let mut in_quotes = false;
        let mut part = start;
        while let Some(byte) = self.byte(0) {
            if in_quotes {
                match byte {
                    b'"' => in_quotes = false,
                    b'\n' => break,
                    _ => {}
                }
                self.at += 1;
                continue;
            }
            match byte {
                b'"' => in_quotes = true,
                b':' => {
                    part = self.at + 1;
                    in_path = false;
                }
                b'.' if self.at == part => in_path = true,
                b'/' if self.at == part && part != start => in_path = true,
                b'/' if in_path => {}
                b'_' | b'.' | b'*' | b'?' | b'[' | b']' | b'-' | b'+' | b'@' | b'!' | b'^'
                | b'$' => {}
                byte if byte.is_ascii_alphanumeric() => {}
                _ => break,
            }
            self.at += 1;
        }
        let span = self.span_from(start);
        let text = self.text.get(start..self.at).unwrap_or_default();
        if in_quotes {
            return Err(Diagnostic::new(span, "this probe's name has a \" too few"));
        }
        if text.is_empty() {
            return Err(self.no_probe(start));
        }
        match self.byte(0) {
            None | Some(b',' | b'{' | b'/') => Ok((text, span)),
            Some(byte) if is_blank(byte) => Ok((text, span)),
            Some(_) => {
                let at = self.at;
                Err(self.no_probe(at))
            }
        }
    }

    /// Reads a text at `start` that belongs to no probe's name, and returns the error.
    fn no_probe(&mut self, start: usize) -> Diagnostic {
        self.at = start;
        match self.next() {
            Ok(token) => Diagnostic::new(
                token.span,
                format!(
                    "expected a probe, such as kprobe:vfs_read or BEGIN; found {}",
                    token.kind.describe()
                ),
            ),
            Err(diagnostic) => diagnostic,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn kinds(text: &str) -> Vec<TokenKind<'_>> {
        let mut lexer = Lexer::new(text.as_bytes());
        let mut out = Vec::new();
        loop {
            match lexer.next().unwrap().kind {
                TokenKind::End => return out,
                kind => out.push(kind),
            }
        }
    }

    #[test]
    fn text_is_cut_at_the_longest_operators() {
        use TokenKind::*;
        let p = Punctuation;
        for (text, expected) in [
            ("a>>=b", vec![Word("a"), p(">>="), Word("b")]),
            ("$x++ +1", vec![Local("x"), p("++"), p("+"), Number(1)]),
            ("0..5", vec![Number(0), p(".."), Number(5)]),
            (
                "$t.0.1",
                vec![Local("t"), p("."), Number(0), p("."), Number(1)],
            ),
            ("@[@a]", vec![Global(""), p("["), Global("a"), p("]")]),
            ("$1+$#", vec![Argument(1), p("+"), ArgumentCount]),
            ("a/**/b//c\n\"d\"", vec![Word("a"), Word("b"), Text]),
            ("#!/usr/bin/bt\nx", vec![Word("x")]),
            ("a->b", vec![Word("a"), p("->"), Word("b")]),
        ] {
            assert_eq!(kinds(text), expected, "{text}");
        }
    }

    #[test]
    fn probes_end_where_filters_begin() {
        for (text, expected) in [
            ("kprobe:vfs_read{", "kprobe:vfs_read"),
            ("kprobe:vfs_*/pid/{", "kprobe:vfs_*"),
            ("kprobe:f, k:g", "kprobe:f"),
            (" // one\n k:f /* two */", "k:f"),
            ("uprobe:/bin/busybox:main /1/", "uprobe:/bin/busybox:main"),
            ("uprobe:/bin/busybox:main/1/", "uprobe:/bin/busybox:main"),
            ("uprobe:./a/b:main/1/", "uprobe:./a/b:main"),
            (
                "usdt:/lib/x86_64-linux-gnu/libc.so.6:libc:setjmp {",
                "usdt:/lib/x86_64-linux-gnu/libc.so.6:libc:setjmp",
            ),
            (
                "uprobe:/lib/*/libc*:m[!a]lloc?",
                "uprobe:/lib/*/libc*:m[!a]lloc?",
            ),
            ("kprobe:f+0x10 {", "kprobe:f+0x10"),
            (
                "u:/bin/x:\"a::b(int, char)\" {",
                "u:/bin/x:\"a::b(int, char)\"",
            ),
            ("syscall:::\n{", "syscall:::"),
        ] {
            let (found, span) = Lexer::new(text.as_bytes()).probe().unwrap();
            assert_eq!(String::from_utf8_lossy(found), expected, "{text}");
            assert_eq!(span.end - span.start, expected.len(), "{text}");
        }
        for (text, part) in [
            ("", "end of the script"),
            ("{", "'{'"),
            ("kprobe:f;", "';'"),
            ("u:/x:\"y", "too few"),
            ("kprobe:\u{e9}", "unexpected character"),
        ] {
            let error = Lexer::new(text.as_bytes()).probe().unwrap_err();
            assert!(error.message.contains(part), "{text}: {}", error.message);
        }
    }

    #[test]
    fn what_is_no_token_is_told_and_passed() {
        for (text, part) in [
            ("'a'", "double quotes"),
            ("#define x", "begins its line"),
            ("\u{e9}", "unexpected character '\u{e9}'"),
            ("\"abc\n", "not ended"),
            ("\"abc\\", "not ended"),
            ("/* abc", "not ended"),
            ("$ x", "after '$'"),
            ("$0", "unknown argument"),
            ("$99999999999", "unknown argument"),
            ("5parsecs", "invalid number"),
        ] {
            let mut lexer = Lexer::new(text.as_bytes());
            let error = lexer.next().unwrap_err();
            assert!(error.message.contains(part), "{text}: {}", error.message);
            assert!(lexer.position() > 0, "{text}");
        }
        let mut lexer = Lexer::new(b"\xff");
        assert!(lexer.next().unwrap_err().message.contains("\\xff"));
        assert_eq!(lexer.next().unwrap().kind, TokenKind::End);
    }
}
