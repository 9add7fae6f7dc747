//! Errors in a script, and how they are shown.
//!
//! A [`Diagnostic`] knows its place in the text. The caller keeps the text and its file's name, and
//! passes them to [`Diagnostic::render`]. The form is that of btrace(8): `FILE:LINE:COLUMN:
//! message:`, the line, and a mark under it.

use crate::ast::Span;
use introspect::kernel::nearest::nearest;

/// The greatest number of messages about one script; reading stops at it.
pub const MOST_ERRORS: usize = 64;

/// The greatest number of bytes of a line that are shown, the same as btrace(8)'s.
const LONGEST_LINE: usize = 1023;

/// The greatest number of characters of a message; a script may have long words.
const LONGEST_MESSAGE: usize = 2048;

/// The greatest number of names suggested for an unknown one.
const MOST_SUGGESTIONS: usize = 3;

/// The number of columns of a tab.
const TAB: usize = 8;

/// An error in a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// The place of the error.
    pub span: Span,
    /// The message, without the place and without a full stop.
    pub message: String,
    /// The names that may have been meant, the most likely first.
    pub suggestions: Vec<String>,
    /// How the place is shown.
    pub place: Place,
}

/// The form in which an error's place is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Line and column of the span's first byte, and a mark under its part of that line.
    Span,
    /// The numbers of btrace(8), and its mark.
    Counted(Counted),
    /// None, and no line: btrace(8) does not know it any more when it begins to trace.
    Unknown,
}

/// A place as btrace(8) counts it while it reads a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    /// The line, from 1.
    pub line: usize,
    /// The column of the last byte read, from 1. It is 0 at the begin of a line, and -1 before it.
    pub column: isize,
    /// The offset of the byte with which the shown line begins.
    pub line_start: usize,
}

impl Diagnostic {
    /// Makes an error of the normal dialect.
    #[must_use]
    pub fn new(span: Span, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if let Some((end, _)) = message.char_indices().nth(LONGEST_MESSAGE) {
            message.truncate(end);
            message += "...";
        }
        Self {
            span,
            message,
            suggestions: Vec::new(),
            place: Place::Span,
        }
    }

    /// Makes an error at a place that was counted while the script was read.
    #[must_use]
    pub fn counted(span: Span, place: Counted, message: impl Into<String>) -> Self {
        Self {
            place: Place::Counted(place),
            ..Self::new(span, message)
        }
    }

    /// Makes an error that is shown without its place.
    #[must_use]
    pub fn unplaced(span: Span, message: impl Into<String>) -> Self {
        Self {
            place: Place::Unknown,
            ..Self::new(span, message)
        }
    }

    /// Adds suggestions: those `names` that are similar to `wanted`.
    #[must_use]
    pub fn suggest<'a>(mut self, wanted: &str, names: impl Iterator<Item = &'a str>) -> Self {
        self.suggestions = similar(wanted, names)
            .into_iter()
            .map(str::to_owned)
            .collect();
        self
    }

    /// Renders the message with its place, the line of `text` and a mark under it, each line ended
    /// by a newline. `text` is the parsed text, `file` its name.
    ///
    /// Bytes that a terminal might obey are shown as `?`, except in the form of btrace(8), which
    /// shows them.
    #[must_use]
    pub fn render(&self, file: &str, text: &[u8]) -> String {
        let mut out = match self.place {
            Place::Span => self.with_span(file, text),
            Place::Counted(place) => self.with_count(place, file, text),
            Place::Unknown => format!("exotrace: {}\n", harmless(&self.message)),
        };
        if !self.suggestions.is_empty() {
            out += &format!("did you mean: {}?\n", self.suggestions.join(", "));
        }
        out
    }

    fn with_span(&self, file: &str, text: &[u8]) -> String {
        let at = self.span.start.min(text.len());
        let start = line_start(text, at);
        let line = 1 + text.iter().take(at).filter(|byte| **byte == b'\n').count();
        let column = at - start + 1;
        let source = line_from(text, start, |byte| byte == b'\n');
        let from = self.span.start - start.min(self.span.start);
        let mark = underline(source, from, self.span);
        let shown = harmless(&String::from_utf8_lossy(source));
        let message = harmless(&self.message);
        format!("{file}:{line}:{column}: {message}:\n{shown}\n{mark}\n")
    }

    fn with_count(&self, place: Counted, file: &str, text: &[u8]) -> String {
        let Counted {
            line,
            column,
            line_start,
        } = place;
        let source = line_from(text, line_start, |byte| matches!(byte, b'\n' | 0));
        // All tabs of the line count, also those behind the mark.
        let tabs = source.iter().filter(|byte| **byte == b'\t').count();
        let width = column.saturating_add_unsigned(tabs * (TAB - 1));
        let before = usize::try_from(width - 1).unwrap_or_default();
        let mark = " ".repeat(before) + "^";
        let shown = String::from_utf8_lossy(source);
        let message = &self.message;
        format!("{file}:{line}:{column}: {message}:\n{shown}\n{mark}\n")
    }
}

/// Returns the text from `start` to the first byte that `ends` it, cut to what is shown.
fn line_from(text: &[u8], start: usize, ends: impl Fn(u8) -> bool) -> &[u8] {
    let rest = text.get(start..).unwrap_or_default();
    let end = rest.iter().take(LONGEST_LINE).position(|byte| ends(*byte));
    let end = end.unwrap_or(rest.len().min(LONGEST_LINE));
    rest.get(..end).unwrap_or_default()
}

/// Returns those of `names` that are similar to `wanted`, the most likely first. Names with the
/// same letters in another order precede those by edit distance.
pub(crate) fn similar<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let letters = |name: &str| {
        let mut letters = name.as_bytes().to_vec();
        letters.sort_unstable();
        letters
    };
    let of_wanted = letters(wanted);
    let names: Vec<&str> = names.collect();
    let mut found: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| letters(name) == of_wanted)
        .collect();
    let near = nearest(wanted, names.iter().copied(), MOST_SUGGESTIONS);
    found.extend(near.into_iter().filter(|name| letters(name) != of_wanted));
    found.truncate(MOST_SUGGESTIONS);
    found
}

/// Replaces characters that a terminal might obey. A string over several lines is quoted as such.
fn harmless(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\t' | '\n' => c,
            _ if c.is_control() => '?',
            _ => c,
        })
        .collect()
}

/// Returns the start of the line that contains byte `at`.
fn line_start(text: &[u8], at: usize) -> usize {
    text.get(..at)
        .and_then(|before| before.iter().rposition(|byte| *byte == b'\n'))
        .map_or(0, |newline| newline + 1)
}

/// Returns `^~~~` under the bytes of `span` that are on its first line, `from` bytes into it.
fn underline(source: &[u8], from: usize, span: Span) -> String {
    let from = from.min(source.len());
    let to = from
        .saturating_add(span.end.saturating_sub(span.start))
        .min(source.len());
    let before = source.get(..from).unwrap_or_default();
    let under = source.get(from..to).unwrap_or_default();
    let start = width(before, 0);
    let end = width(under, start);
    let tildes = end.saturating_sub(start + 1);
    " ".repeat(start) + "^" + &"~".repeat(tildes)
}

/// Returns the column at which `bytes` end if they are shown from `column` on, which counts from 0.
fn width(bytes: &[u8], column: usize) -> usize {
    String::from_utf8_lossy(bytes)
        .chars()
        .fold(column, |column, c| match c {
            '\t' => (column / TAB + 1) * TAB,
            _ => column + 1,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: usize, end: usize) -> Span {
        Span { start, end }
    }

    #[test]
    fn messages_are_shown_with_their_line_and_a_mark() {
        let counted = |line, column, line_start| {
            let place = Counted {
                line,
                column,
                line_start,
            };
            Diagnostic::counted(span(0, 0), place, "bad")
        };
        let normal = |start, end| Diagnostic::new(span(start, end), "bad");
        let text = b"one {\n\tfoo;\tbar\n";
        for (what, expected) in [
            (
                counted(2, 4, 6),
                "f:2:4: bad:\n\tfoo;\tbar\n                 ^\n",
            ),
            (normal(7, 10), "f:2:2: bad:\n\tfoo;\tbar\n        ^~~\n"),
            (
                normal(12, 15),
                "f:2:7: bad:\n\tfoo;\tbar\n                ^~~\n",
            ),
            (normal(0, 3), "f:1:1: bad:\none {\n^~~\n"),
            // A span over several lines is underlined on its first one.
            (normal(4, 11), "f:1:5: bad:\none {\n    ^\n"),
            (counted(3, 0, 16), "f:3:0: bad:\n\n^\n"),
            (counted(4, -1, 17), "f:4:-1: bad:\n\n^\n"),
            // btrace has not begun a line where a comment did.
            (counted(2, 12, 0), "f:2:12: bad:\none {\n           ^\n"),
            (Diagnostic::unplaced(span(0, 3), "bad"), "exotrace: bad\n"),
            (normal(16, 16), "f:3:1: bad:\n\n^\n"),
            (normal(90, 99), "f:3:1: bad:\n\n^\n"),
        ] {
            assert_eq!(what.render("f", text), expected);
        }
    }

    #[test]
    fn long_lines_and_long_messages_are_cut() {
        let text = "x".repeat(200_000);
        let place = Counted {
            line: 1,
            column: 1024,
            line_start: 0,
        };
        for long in [
            Diagnostic::new(span(150_000, 199_000), text.as_str()),
            Diagnostic::counted(Span::default(), place, text.as_str()),
        ] {
            let shown = long.render("f", text.as_bytes());
            let lines: Vec<usize> = shown.lines().map(str::len).collect();
            assert!(
                matches!(lines.as_slice(), [..2100, 1023, 1024]),
                "{lines:?}"
            );
        }
    }

    #[test]
    fn a_terminal_is_told_nothing_by_a_script() {
        let shown = Diagnostic::new(span(0, 1), "bad").render("f", b"\x1b[2J\xff\n");
        assert_eq!(shown, "f:1:1: bad:\n?[2J\u{fffd}\n^\n");
        // btrace(8) shows the line as it is, up to a NUL.
        let place = Counted {
            line: 1,
            column: 1,
            line_start: 0,
        };
        let shown = Diagnostic::counted(span(0, 1), place, "bad").render("f", b"\x01a\0b");
        assert_eq!(shown, "f:1:1: bad:\n\x01a\n^\n");
        let shown = Diagnostic::new(span(0, 1), "'\x1b[2J\u{9b}'").render("f", b"x");
        assert_eq!(shown, "f:1:1: '?[2J?':\nx\n^\n");
    }

    #[test]
    fn messages_are_cut_by_characters() {
        for (length, cut) in [(LONGEST_MESSAGE, ""), (LONGEST_MESSAGE + 1, "...")] {
            let message = Diagnostic::new(span(0, 1), "\u{e9}".repeat(length)).message;
            assert_eq!(message, "\u{e9}".repeat(LONGEST_MESSAGE) + cut);
        }
    }

    #[test]
    fn names_that_may_be_meant_come_last() {
        let names = ["print", "printf", "time"];
        let shown = Diagnostic::new(span(0, 6), "unknown function prinft")
            .suggest("prinft", names.into_iter())
            .render("-e", b"prinft()");
        assert_eq!(
            shown,
            "-e:1:1: unknown function prinft:\nprinft()\n^~~~~~\ndid you mean: printf, print?\n"
        );
    }
}
