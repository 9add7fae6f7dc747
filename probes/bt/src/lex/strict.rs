//! Tokens of the strict dialect: those of OpenBSD's btrace(8), with its treatment of numbers, names
//! and slashes.
//!
//! * A number ends at a blank or one of `) / { ; ] , =`; otherwise it is a word. `1+2` is the word
//!   `1` and more.
//! * `/` before `{` or `/` ends a predicate, whatever precedes it.
//! * Words of the language are plain words in a probe's name, which the parser marks with
//!   [`Lexer::in_probe`].
//! * A message belongs to the last byte read, not to the wrong text.

use super::{in_word, is_blank, length_of, literal};
use crate::ast::Span;
use crate::diagnostic::{Diagnostic, MOST_ERRORS};
use crate::names::{self, StrictWord};

/// A length in bytes that no token reaches.
const TOKEN_LIMIT: usize = 1024;

/// A token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Token {
    /// A word of the language.
    Keyword(StrictWord),
    /// Another word.
    Word(String),
    /// A number.
    Number(i64),
    /// A string literal, escapes expanded.
    Text(Vec<u8>),
    /// `$name`, without `$`.
    Local(String),
    /// `@name`, without `@`; may be empty.
    Global(String),
    /// `$1`.
    Argument(usize),
    /// `$#`.
    ArgumentCount,
    /// The `/` that ends a predicate.
    FilterEnd,
    /// An operator or a bracket, or any other byte.
    Byte(u8),
    /// `==`, `!=`, `<=`, `>=`, `&&` and `||`, by their first byte.
    Double(u8),
    /// An error that was reported already.
    Wrong,
    /// The end of the text.
    End,
}

/// Splits a text into tokens.
#[derive(Debug)]
pub struct Lexer<'t> {
    text: &'t [u8],
    at: usize,
    /// The offset of the last token.
    start: usize,
    /// Whether words are parts of a probe's name.
    pub in_probe: bool,
    /// Whether the rule is one of `BEGIN` or `END`, in which there is no `arg0`.
    pub in_begin_or_end: bool,
    /// The errors so far: [`MOST_ERRORS`] at most.
    pub errors: Vec<Diagnostic>,
}

/// Checks whether a number, `$1` or `@` may stand before this byte.
fn ends_number(byte: Option<u8>) -> bool {
    byte.is_some_and(|byte| {
        is_blank(byte) || matches!(byte, b')' | b'/' | b'{' | b';' | b']' | b',' | b'=')
    })
}

impl<'t> Lexer<'t> {
    /// Starts at the beginning of `text`.
    #[must_use]
    pub fn new(text: &'t [u8]) -> Self {
        Self {
            text,
            at: 0,
            start: 0,
            in_probe: false,
            in_begin_or_end: false,
            errors: Vec::new(),
        }
    }

    /// Returns the span from the start of the last token to the last byte read.
    #[must_use]
    pub fn span(&self) -> Span {
        Span {
            start: self.start,
            end: self.at,
        }
    }

    /// Adds an error at the text read last, unless there are enough of them.
    pub fn wrong(&mut self, message: impl Into<String>) {
        if self.errors.len() < MOST_ERRORS {
            let diagnostic = Diagnostic::strict(self.span(), message);
            self.errors.push(diagnostic);
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn bump(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    /// Reads as long as bytes are `wanted`.
    fn take_while(&mut self, wanted: impl Fn(u8) -> bool) -> &'t [u8] {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let length = length_of(rest, wanted);
        self.at += length;
        rest.get(..length).unwrap_or_default()
    }

    /// Skips blanks, comments and the `#!` line. A comment without an end reaches to the end of the
    /// text.
    fn skip(&mut self) {
        loop {
            self.take_while(is_blank);
            let rest = self.text.get(self.at..).unwrap_or_default();
            if rest.starts_with(b"//") || (self.at == 0 && rest.starts_with(b"#!")) {
                self.take_while(|byte| byte != b'\n');
            } else if rest.starts_with(b"/*") {
                // `/*/` is a whole comment.
                let inside = rest.get(1..).unwrap_or_default();
                self.at = match inside.windows(2).position(|two| two == b"*/") {
                    Some(end) => self.at + 1 + end + 2,
                    None => self.text.len(),
                };
            } else {
                return;
            }
        }
    }

    /// Reads the next token.
    pub fn next(&mut self) -> Token {
        self.skip();
        self.start = self.at;
        let Some(byte) = self.bump() else {
            return Token::End;
        };
        let next = self.peek();
        match byte {
            b'=' | b'!' | b'<' | b'>' if next == Some(b'=') => {
                self.at += 1;
                Token::Double(byte)
            }
            b'&' | b'|' if next == Some(byte) => {
                self.at += 1;
                Token::Double(byte)
            }
            b'/' => {
                self.take_while(is_blank);
                match self.peek() {
                    Some(b'{' | b'/') => Token::FilterEnd,
                    _ => Token::Byte(b'/'),
                }
            }
            b'$' => self.dollar(),
            b'@' => self.global(),
            b'"' => self.string(),
            b'0'..=b'9' => self.number(),
            byte if in_word(byte) => self.word(),
            byte => Token::Byte(byte),
        }
    }

    fn too_long(&mut self) -> Token {
        self.at = self.at.min(self.start + TOKEN_LIMIT);
        self.wrong("line too long");
        Token::Wrong
    }

    /// Reads the rest of a word whose first byte was read.
    fn word(&mut self) -> Token {
        self.at = self.start;
        let word = self.take_while(in_word);
        if word.len() >= TOKEN_LIMIT {
            return self.too_long();
        }
        let word = String::from_utf8_lossy(word).into_owned();
        let Some(keyword) = names::strict_word(&word) else {
            return Token::Word(word);
        };
        if self.in_probe {
            return Token::Word(word);
        }
        if self.in_begin_or_end && matches!(keyword, StrictWord::ProbeArgument(_)) {
            self.wrong(format!(
                "the {word} builtin cannot be used with BEGIN or END probes"
            ));
        }
        Token::Keyword(keyword)
    }

    /// Reads the rest of a number whose first digit was read, or the word that it is instead.
    fn number(&mut self) -> Token {
        self.at = self.start;
        let digits =
            self.take_while(|byte| byte.is_ascii_hexdigit() || matches!(byte, b'x' | b'X'));
        if digits.len() >= TOKEN_LIMIT {
            return self.too_long();
        }
        if self.peek().is_some() && !ends_number(self.peek()) {
            return self.word();
        }
        match c_number(digits) {
            Some(value) => Token::Number(value),
            None => {
                self.wrong("overflow");
                Token::Wrong
            }
        }
    }

    /// Reads the rest behind `$`.
    fn dollar(&mut self) -> Token {
        match self.peek() {
            Some(b'#') => {
                self.at += 1;
                Token::ArgumentCount
            }
            Some(byte) if byte.is_ascii_digit() => {
                let digits = self.take_while(|byte| byte.is_ascii_digit());
                if digits.len() >= TOKEN_LIMIT {
                    return self.too_long();
                }
                let digits = String::from_utf8_lossy(digits).into_owned();
                if self.peek().is_some() && !ends_number(self.peek()) {
                    return self.bad_name('$', &digits);
                }
                let problem = match digits.parse::<i32>() {
                    Ok(0) => "too small",
                    Ok(number) => return Token::Argument(number.unsigned_abs() as usize),
                    Err(_) => "too large",
                };
                self.wrong(format!("'${digits}' is {problem}"));
                Token::Wrong
            }
            Some(byte) if byte.is_ascii_alphabetic() => self.name(Token::Local),
            _ => self.bad_name('$', ""),
        }
    }

    /// Reads the rest behind `@`.
    fn global(&mut self) -> Token {
        match self.peek() {
            Some(byte) if byte.is_ascii_alphabetic() => self.name(Token::Global),
            byte if ends_number(byte) || byte == Some(b'[') => Token::Global(String::new()),
            _ => self.bad_name('@', ""),
        }
    }

    /// Reads a variable's name.
    fn name(&mut self, token: fn(String) -> Token) -> Token {
        let name = self.take_while(in_word);
        if name.len() >= TOKEN_LIMIT {
            return self.too_long();
        }
        token(String::from_utf8_lossy(name).into_owned())
    }

    /// Reads the byte behind a missing name and reports it.
    fn bad_name(&mut self, sign: char, name: &str) -> Token {
        let next = self.bump().map(char::from);
        let next = next.map_or_else(String::new, String::from);
        self.wrong(format!("'{sign}{name}{next}' is an invalid variable name"));
        Token::Wrong
    }

    /// Reads the rest of a string whose first quote was read, and the strings that follow it.
    fn string(&mut self) -> Token {
        let mut value = Vec::new();
        loop {
            let byte = match self.bump() {
                None => {
                    let value = String::from_utf8_lossy(&value).into_owned();
                    self.wrong(format!("\"{value}\" invalid EOF"));
                    return Token::Wrong;
                }
                // The blanks behind a string are read with it, and count for the place of a
                // message.
                Some(b'"') => {
                    self.skip();
                    if self.peek() != Some(b'"') {
                        return Token::Text(value);
                    }
                    self.at += 1;
                    continue;
                }
                Some(b'\\') => match self.escape() {
                    Ok(byte) => byte,
                    Err(shown) => {
                        self.wrong(format!("'{shown}' unsupported escape"));
                        return Token::Wrong;
                    }
                },
                Some(byte) => byte,
            };
            value.push(byte);
            if value.len() >= TOKEN_LIMIT {
                self.wrong("line too long");
                return Token::Wrong;
            }
        }
    }

    /// Reads the byte that `\n` and the like stand for.
    fn escape(&mut self) -> Result<u8, String> {
        let letter = self.bump().ok_or_else(String::new)?;
        literal::of_letter(letter).ok_or_else(|| char::from(letter).to_string())
    }
}

/// Parses digits as C's `strtol` does with base 0: it reads as far as it can. Returns `None` if the
/// number is too large.
fn c_number(digits: &[u8]) -> Option<i64> {
    let (base, digits) = match digits {
        [b'0', b'x' | b'X', rest @ ..] => (16, rest),
        [b'0', rest @ ..] => (8, rest),
        _ => (10, digits),
    };
    let mut value = 0i64;
    for digit in digits {
        let Some(digit) = char::from(*digit).to_digit(base) else {
            break;
        };
        value = value
            .checked_mul(i64::from(base))?
            .checked_add(i64::from(digit))?;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> (Vec<Token>, Vec<String>) {
        let mut lexer = Lexer::new(text.as_bytes());
        let mut out = Vec::new();
        loop {
            match lexer.next() {
                Token::End => break,
                token => out.push(token),
            }
        }
        let errors = lexer.errors.into_iter().map(|error| error.message);
        (out, errors.collect())
    }

    #[test]
    fn text_is_cut_as_btrace_cuts_it() {
        use Token::*;
        let word = |text: &str| Word(text.to_owned());
        let global = |text: &str| Global(text.to_owned());
        for (text, expected) in [
            ("1 + 2", vec![Number(1), Byte(b'+'), Number(2)]),
            ("1+2", vec![word("1"), Byte(b'+'), Number(2)]),
            ("10abc_", vec![word("10abc_")]),
            (
                "0x1f 017 08 12ab",
                vec![Number(31), Number(15), Number(0), Number(12)],
            ),
            ("@=1;", vec![global(""), Byte(b'='), Number(1), Byte(b';')]),
            (
                "@a[@]",
                vec![global("a"), Byte(b'['), global(""), Byte(b']')],
            ),
            ("$#", vec![ArgumentCount]),
            ("$12 ", vec![Argument(12)]),
            ("a / {", vec![word("a"), FilterEnd, Byte(b'{')]),
            ("a / b", vec![word("a"), Byte(b'/'), word("b")]),
            (
                "a /\n\n/b",
                vec![word("a"), FilterEnd, Byte(b'/'), word("b")],
            ),
            (
                "< <= == =",
                vec![Byte(b'<'), Double(b'<'), Double(b'='), Byte(b'=')],
            ),
            (
                "&& & || |",
                vec![Double(b'&'), Byte(b'&'), Double(b'|'), Byte(b'|')],
            ),
            (
                "\"a\" // x\n \"b\\n\" c",
                vec![Text(b"ab\n".to_vec()), word("c")],
            ),
            ("#!x\n#", vec![Byte(b'#')]),
            ("a /* b", vec![word("a")]),
            ("a /*/ b", vec![word("a"), word("b")]),
        ] {
            assert_eq!(tokens(text), (expected, Vec::new()), "{text}");
        }
    }

    #[test]
    fn what_btrace_rejects_is_told_in_its_words() {
        let long = "x".repeat(1024);
        let long_text = format!("\"{}", "x".repeat(1024));
        for (text, message) in [
            ("9223372036854775808 ", "overflow"),
            ("0xffffffffffffffff ", "overflow"),
            ("$0 ", "'$0' is too small"),
            ("$99999999999 ", "'$99999999999' is too large"),
            ("$1+", "'$1+' is an invalid variable name"),
            ("@+", "'@+' is an invalid variable name"),
            ("$_x", "'$_' is an invalid variable name"),
            ("\"\\q\"", "'q' unsupported escape"),
            ("\"abc", "\"abc\" invalid EOF"),
            (long.as_str(), "line too long"),
            (long_text.as_str(), "line too long"),
        ] {
            assert_eq!(tokens(text).1.first().map(String::as_str), Some(message));
        }
        let longest = "x".repeat(1023);
        assert_eq!(
            tokens(&longest),
            (vec![Token::Word(longest.clone())], vec![])
        );
    }
}
