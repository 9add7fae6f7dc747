//! The order of versions: the one of the UAPI group's version format specification, by which boot
//! entries are sorted.

use std::cmp::Ordering;

/// Compares two versions: `6.1.0-9` is less than `6.1.0-10`, and `6.2~rc1` less than `6.2`.
pub(crate) fn compare(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a.as_bytes(), b.as_bytes());
    loop {
        a = skip(a, |c| !is_part(c));
        b = skip(b, |c| !is_part(c));
        let order = marked(&mut a, &mut b, b'~');
        if order.is_ne() {
            return order;
        }
        if a.is_empty() || b.is_empty() {
            return a.len().min(1).cmp(&b.len().min(1));
        }
        for mark in [b'-', b'^', b'.'] {
            let order = marked(&mut a, &mut b, mark);
            if order.is_ne() {
                return order;
            }
        }
        let order = match starts(a, |c| c.is_ascii_digit()) || starts(b, |c| c.is_ascii_digit()) {
            true => {
                let (x, y) = (
                    take(&mut a, |c| c.is_ascii_digit()),
                    take(&mut b, |c| c.is_ascii_digit()),
                );
                let significant = |digits| skip(digits, |c| c == b'0');
                let (n, m) = (significant(x), significant(y));
                // Digits are newer than none.
                let has_digits = (!x.is_empty()).cmp(&!y.is_empty());
                has_digits.then(n.len().cmp(&m.len())).then(n.cmp(m))
            }
            false => {
                let letters = |c: u8| c.is_ascii_alphabetic();
                take(&mut a, letters).cmp(take(&mut b, letters))
            }
        };
        if order.is_ne() {
            return order;
        }
    }
}

fn is_part(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'~' | b'-' | b'^' | b'.')
}

fn starts(text: &[u8], is: fn(u8) -> bool) -> bool {
    text.first().is_some_and(|c| is(*c))
}

fn skip(text: &[u8], is: fn(u8) -> bool) -> &[u8] {
    let end = text.iter().position(|c| !is(*c)).unwrap_or(text.len());
    text.get(end..).unwrap_or_default()
}

fn take<'a>(text: &mut &'a [u8], is: fn(u8) -> bool) -> &'a [u8] {
    let end = text.iter().position(|c| !is(*c)).unwrap_or(text.len());
    let (taken, rest) = text.split_at_checked(end).unwrap_or_default();
    *text = rest;
    taken
}

/// Takes a mark from both; the one that alone has it is older.
fn marked(a: &mut &[u8], b: &mut &[u8], mark: u8) -> Ordering {
    match (a.strip_prefix(&[mark]), b.strip_prefix(&[mark])) {
        (Some(x), Some(y)) => {
            (*a, *b) = (x, y);
            Ordering::Equal
        }
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => Ordering::Equal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_in_order() {
        let ascending = [
            ["6.1.0-9-amd64", "6.1.0-10-amd64"],
            ["6.2~rc1", "6.2"],
            ["6.9", "6.10"],
            ["6.1", "6.1.1"],
            ["0-rescue-abc", "6.5.6-300.fc39.x86_64"],
            ["6.5.6-300.fc39.x86_64", "6.5.6-301.fc39.x86_64"],
            ["6.1.0-13-amd64", "6.1.0-13-cloud-amd64"],
            ["123.rc1", "123.1"],
            ["a", "b"],
            ["", "1"],
            ["1-1", "1^1"],
        ];
        for [lower, higher] in ascending {
            assert_eq!(compare(lower, higher), Ordering::Less, "{lower} {higher}");
            assert_eq!(
                compare(higher, lower),
                Ordering::Greater,
                "{higher} {lower}"
            );
        }
        for [one, other] in [["6.01", "6.1"], ["", ""], ["6.1_", "6.1"]] {
            assert_eq!(compare(one, other), Ordering::Equal, "{one} {other}");
        }
    }
}
