//! Tokens of the strict dialect: those of OpenBSD's btrace(8), with its treatment of numbers, names
//! and slashes.
//!
//! * A number ends at a blank or one of `) / { ; ] , =`; otherwise it is a word. `1+2` is the word
//!   `1` and more.
//! * `/` before `{` or `/` ends a predicate, whatever precedes it.
//! * Words of the language are plain words in a probe's name, which the parser marks with
//!   [`Lexer::in_probe`].
//! * A message belongs to the last byte read, not to the wrong text.
//!
//! Lines and columns are counted byte by byte as btrace counts them. Newlines in texts count as no
//! lines, those in comments do not begin a column anew, and a byte is put back even at the end of
//! the text, so that it is read twice.

use super::{in_word, is_blank, literal};
use crate::ast::Span;
use crate::diagnostic::{Counted, Diagnostic, MOST_ERRORS};
use crate::names::{self, StrictWord};

/// A length in bytes that no token reaches.
const TOKEN_LIMIT: usize = 1024;

/// The error of a token of [`TOKEN_LIMIT`] bytes.
#[derive(Debug)]
struct TooLong;

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
    /// The line from 1, as counted.
    line: usize,
    /// The column of the last byte read, as counted. It is -1 if a newline was put back.
    column: isize,
    /// The offset of the last token.
    start: usize,
    /// How often a token was cut off by the end of the text.
    cut_off: usize,
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
            line: 1,
            column: 0,
            start: 0,
            cut_off: 0,
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
            let place = Counted {
                line: self.line,
                column: self.column,
                line_start: self.at.saturating_add_signed(-self.column),
            };
            let diagnostic = Diagnostic::counted(self.span(), place, message);
            self.errors.push(diagnostic);
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn bump(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        self.column += 1;
        Some(byte)
    }

    /// Puts the last byte back. At the end of the text, where nothing was read, that is the last
    /// byte of a token.
    fn put_back(&mut self) {
        if self.at > 0 {
            self.at -= 1;
            self.column -= 1;
        }
    }

    fn new_line(&mut self) {
        self.line += 1;
        self.column = 0;
    }

    /// Reads as long as bytes are `wanted`, and puts the next one back. Returns the text from
    /// `from` to there, and the byte behind it.
    fn take_while(
        &mut self,
        from: usize,
        wanted: impl Fn(u8) -> bool,
    ) -> Result<(String, Option<u8>), TooLong> {
        let mut end = self.at;
        let next = loop {
            if end - from >= TOKEN_LIMIT {
                return Err(TooLong);
            }
            match self.bump() {
                Some(byte) if wanted(byte) => end = self.at,
                next => break next,
            }
        };
        self.put_back();
        self.cut_off += usize::from(next.is_none());
        let text = self.text.get(from..end).unwrap_or_default();
        Ok((String::from_utf8_lossy(text).into_owned(), next))
    }

    /// Skips blanks, comments and the `#!` line, and reads the byte behind them. A comment without
    /// an end reaches to the end of the text.
    fn skip(&mut self) -> Option<u8> {
        loop {
            let byte = loop {
                match self.bump()? {
                    b'\n' => self.new_line(),
                    byte if is_blank(byte) => {}
                    byte => break byte,
                }
            };
            let is_magic = self.line == 1 && self.column == 1;
            match (byte, self.peek()) {
                (b'/', Some(b'/')) => self.skip_line()?,
                (b'#', Some(b'!')) if is_magic => self.skip_line()?,
                (b'/', Some(b'*')) => self.skip_comment()?,
                _ => return Some(byte),
            }
        }
    }

    fn skip_line(&mut self) -> Option<()> {
        while self.bump()? != b'\n' {}
        self.new_line();
        Some(())
    }

    /// Skips the rest behind the `/` of `/*`. `/*/` is a whole comment.
    fn skip_comment(&mut self) -> Option<()> {
        let mut before = 0;
        loop {
            let byte = self.bump()?;
            match byte {
                b'/' if before == b'*' => return Some(()),
                b'\n' => self.line += 1,
                _ => {}
            }
            before = byte;
        }
    }

    /// Reads the next token.
    pub fn next(&mut self) -> Token {
        // The last byte would be read for ever: the first token that repeats it is enough.
        if self.cut_off > 1 {
            return Token::End;
        }
        let byte = self.skip();
        self.start = self.at;
        let Some(byte) = byte else {
            return Token::End;
        };
        self.start -= 1;
        let next = self.peek();
        match byte {
            b'=' | b'!' | b'<' | b'>' if next == Some(b'=') => {
                self.bump();
                Token::Double(byte)
            }
            b'&' | b'|' if next == Some(byte) => {
                self.bump();
                Token::Double(byte)
            }
            b'/' => {
                while self.peek().is_some_and(is_blank) {
                    if self.bump() == Some(b'\n') {
                        self.new_line();
                    }
                }
                match self.peek() {
                    Some(b'{' | b'/') => Token::FilterEnd,
                    _ => Token::Byte(b'/'),
                }
            }
            b'$' => self.dollar().unwrap_or_else(|long| self.too_long(long)),
            b'@' => self.global().unwrap_or_else(|long| self.too_long(long)),
            b'"' => self.string(),
            b'0'..=b'9' => self.number().unwrap_or_else(|long| self.too_long(long)),
            byte if in_word(byte) => self.word().unwrap_or_else(|long| self.too_long(long)),
            byte => Token::Byte(byte),
        }
    }

    fn too_long(&mut self, _: TooLong) -> Token {
        self.wrong("line too long");
        Token::Wrong
    }

    /// Reads the rest of a word whose first byte was read.
    fn word(&mut self) -> Result<Token, TooLong> {
        let (word, _) = self.take_while(self.start, in_word)?;
        let Some(keyword) = names::strict_word(&word) else {
            return Ok(Token::Word(word));
        };
        if self.in_probe {
            return Ok(Token::Word(word));
        }
        if self.in_begin_or_end && matches!(keyword, StrictWord::ProbeArgument(_)) {
            self.wrong(format!(
                "the {word} builtin cannot be used with BEGIN or END probes"
            ));
        }
        Ok(Token::Keyword(keyword))
    }

    /// Reads the rest of a number whose first digit was read, or the word that it is instead.
    fn number(&mut self) -> Result<Token, TooLong> {
        let (first, column) = (self.at, self.column);
        let in_number = |byte: u8| byte.is_ascii_hexdigit() || matches!(byte, b'x' | b'X');
        let (digits, next) = self.take_while(self.start, in_number)?;
        if next.is_some() && !ends_number(next) {
            (self.at, self.column) = (first, column);
            return self.word();
        }
        Ok(match c_number(digits.as_bytes()) {
            Some(value) => Token::Number(value),
            None => {
                self.wrong("overflow");
                Token::Wrong
            }
        })
    }

    /// Reads the rest behind `$`.
    fn dollar(&mut self) -> Result<Token, TooLong> {
        let from = self.at;
        match self.bump() {
            Some(b'#') => Ok(Token::ArgumentCount),
            Some(byte) if byte.is_ascii_digit() => {
                let (digits, next) = self.take_while(from, |byte| byte.is_ascii_digit())?;
                if next.is_some() && !ends_number(next) {
                    return Ok(self.bad_name('$', &digits, next));
                }
                let problem = match digits.parse::<i32>() {
                    Ok(0) => "too small",
                    Ok(number) => return Ok(Token::Argument(number.unsigned_abs() as usize)),
                    Err(_) => "too large",
                };
                self.wrong(format!("'${digits}' is {problem}"));
                Ok(Token::Wrong)
            }
            Some(byte) if byte.is_ascii_alphabetic() => {
                Ok(Token::Local(self.take_while(from, in_word)?.0))
            }
            next => Ok(self.bad_name('$', "", next)),
        }
    }

    /// Reads the rest behind `@`.
    fn global(&mut self) -> Result<Token, TooLong> {
        let from = self.at;
        match self.bump() {
            Some(byte) if byte.is_ascii_alphabetic() => {
                Ok(Token::Global(self.take_while(from, in_word)?.0))
            }
            next if ends_number(next) || next == Some(b'[') => {
                self.put_back();
                Ok(Token::Global(String::new()))
            }
            next => Ok(self.bad_name('@', "", next)),
        }
    }

    /// Reports a wrong name and the byte behind it.
    fn bad_name(&mut self, sign: char, name: &str, next: Option<u8>) -> Token {
        let next = next.map_or_else(String::new, |next| char::from(next).to_string());
        self.wrong(format!("'{sign}{name}{next}' is an invalid variable name"));
        Token::Wrong
    }

    /// Reads the rest of a string whose first quote was read, and the strings that follow it.
    fn string(&mut self) -> Token {
        let mut value = Vec::new();
        loop {
            let byte = match self.bump() {
                None => return self.unended(&value),
                // The blanks behind a string are read with it, and count for the place of a
                // message.
                Some(b'"') => {
                    let next = self.skip();
                    if next == Some(b'"') {
                        continue;
                    }
                    self.put_back();
                    if next.is_none() {
                        return self.unended(&value);
                    }
                    return Token::Text(value);
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

    /// Reports a string that ends with the text, closed or not.
    fn unended(&mut self, value: &[u8]) -> Token {
        let value = String::from_utf8_lossy(value);
        self.wrong(format!("\"{value}\" invalid EOF"));
        Token::Wrong
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
            let ended = format!("{text}\n");
            assert_eq!(tokens(&ended), (expected, Vec::new()), "{text}");
        }
        // The last byte of all is read twice.
        for (text, expected) in [
            ("ab", vec![word("ab"), word("b")]),
            ("12", vec![Number(12), Number(2)]),
            ("@ab", vec![global("ab"), word("b")]),
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
            tokens(&format!("{longest} ")),
            (vec![Token::Word(longest.clone())], vec![])
        );
    }
}
