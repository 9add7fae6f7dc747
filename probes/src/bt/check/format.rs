//! What `printf` shows: `%d`, `%-8s`, `%08llx`.

/// Most columns of one value, which is what a script can make the output grow by.
const WIDEST: usize = 4096;

/// Conversions: numbers, characters, text, pointers, bytes.
const CONVERSIONS: &[u8] = b"diuoxXcspr";

/// How many values a format shows.
///
/// # Errors
/// What is wrong with it.
pub fn conversions(format: &[u8]) -> Result<usize, String> {
    let mut count = 0;
    let mut rest = format.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            continue;
        }
        let mut shown = String::from("%");
        let mut width = 0usize;
        let conversion = loop {
            match rest.next() {
                Some(flag @ (b'-' | b'+' | b' ' | b'#' | b'.')) => {
                    shown.push(char::from(flag));
                    width = 0;
                }
                Some(digit @ b'0'..=b'9') => {
                    shown.push(char::from(digit));
                    width = width.saturating_mul(10) + usize::from(digit - b'0');
                    if width > WIDEST {
                        return Err(format!(
                            "a value of {width} columns in a format; {WIDEST} are the most"
                        ));
                    }
                }
                // C's lengths: all numbers have 64 bits.
                Some(length @ (b'l' | b'h' | b'z' | b'j' | b't' | b'q')) => {
                    shown.push(char::from(length));
                }
                other => break other,
            }
            if shown.len() > 32 {
                return Err("a conversion of more than 32 characters in a format".to_owned());
            }
        };
        match conversion {
            Some(b'%') if shown.len() == 1 => {}
            Some(known) if CONVERSIONS.contains(&known) => count += 1,
            Some(b'*') => {
                return Err(format!(
                    "'{shown}*' in a format; a width must be written as a number"
                ));
            }
            Some(unknown) => {
                return Err(format!(
                    "unknown conversion '{shown}{}' in a format; known are %d %i %u %o %x %X %c %s %p %r and %%",
                    unknown.escape_ascii()
                ));
            }
            None => return Err(format!("'{shown}' at the end of a format; write %%")),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_are_counted() {
        for (format, count) in [
            ("", 0),
            ("100%%\n", 0),
            ("%d %s", 2),
            ("%-8s|%08llx|%+d|% d|%#lx|%.3s", 6),
            ("%%%c%%", 1),
            ("%r%p%u%i%o%X", 6),
        ] {
            assert_eq!(conversions(format.as_bytes()), Ok(count), "{format}");
        }
    }

    #[test]
    fn what_is_no_conversion_is_told() {
        for (format, part) in [
            ("%y", "'%y'"),
            ("%5k", "'%5k'"),
            ("%*d", "written as a number"),
            ("100%", "at the end"),
            ("%99999d", "columns"),
            ("%5%", "'%5%'"),
            ("%\u{1b}", "\\x1b"),
            ("%lllllllllllllllllllllllllllllllllllld", "more than 32"),
        ] {
            let message = conversions(format.as_bytes()).expect_err(format);
            assert!(message.contains(part), "{format}: {message}");
        }
    }
}
