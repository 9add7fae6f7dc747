//! Text in XML 1.0.

use std::fmt::Write;

/// The substitute for a character that XML cannot hold.
const REPLACEMENT: char = '\u{fffd}';

/// Escapes text between tags, or in an attribute between `"`. Line breaks in attributes are kept,
/// too.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            // Text must not contain `]]>`.
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\r' => escaped.push_str("&#13;"),
            c if is_allowed(c) => escaped.push(c),
            _ => escaped.push(REPLACEMENT),
        }
    }
    escaped
}

/// Adds ` name="value"` to a tag.
pub fn attribute(tag: &mut String, name: &str, value: &str) {
    // A line break in an attribute is read as a blank.
    let value = escape(value).replace('\n', "&#10;").replace('\t', "&#9;");
    // Writing to memory cannot fail.
    let _ = write!(tag, " {name}=\"{value}\"");
}

/// Checks for the characters of XML 1.0, section 2.2.
fn is_allowed(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | '\u{20}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_what_it_is_and_is_no_markup() {
        for (text, escaped) in [
            ("plain é 𝄞", "plain é 𝄞"),
            (
                "a < b && c > \"d\"",
                "a &lt; b &amp;&amp; c &gt; &quot;d&quot;",
            ),
            ("]]>", "]]&gt;"),
            ("two\nlines\tand\r", "two\nlines\tand&#13;"),
            (
                "\0\u{1}\u{b}\u{1b}[2J\u{fffe}\u{ffff}",
                "\u{fffd}\u{fffd}\u{fffd}\u{fffd}[2J\u{fffd}\u{fffd}",
            ),
        ] {
            assert_eq!(escape(text), escaped, "{text:?}");
        }
        let mut tag = "<a".to_owned();
        attribute(&mut tag, "b", "one\ntwo\t\"");
        assert_eq!(tag, "<a b=\"one&#10;two&#9;&quot;\"");
    }
}
