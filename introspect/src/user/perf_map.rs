//! The names of code that a program generates, which it writes to `/tmp/perf-PID.map` for perf(1).
//!
//! Each line is `START SIZE NAME`, with hexadecimal numbers
//! (tools/perf/Documentation/jit-interface.txt). The file has no order, and a later line replaces
//! earlier ones of the same addresses. Lines of another form are skipped.

use std::borrow::Cow;

/// The maximum number of lines that are used.
pub const MAX_LINES: usize = 1_000_000;
/// The maximum length of a name in bytes. Longer ones are cut.
const MAX_NAME: usize = 1024;
/// The maximum number of ranges before an address that are looked at.
const MOST_BEFORE: usize = 256;

/// Named ranges of generated code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PerfMap {
    /// Ascending by start, and by line.
    ranges: Vec<Range>,
    names: Vec<u8>,
    /// Whether the lines end before the file does.
    cut: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
    line: u32,
    /// The place of the name in `names`.
    name: u32,
    length: u32,
}

impl PerfMap {
    /// Parses the lines of a file. The end of the last one may be missing.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let mut map = Self::default();
        for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
            if number == MAX_LINES {
                map.cut = true;
                break;
            }
            map.add(number, line);
        }
        map.ranges
            .sort_unstable_by_key(|range| (range.start, range.line));
        map
    }

    fn add(&mut self, number: usize, line: &[u8]) -> Option<()> {
        let line = line.trim_ascii();
        let (start, rest) = number_and_rest(line)?;
        let (size, name) = number_and_rest(rest)?;
        let end = start.checked_add(size).filter(|end| *end > start)?;
        let name = name.get(..name.len().min(MAX_NAME))?;
        if name.is_empty() {
            return None;
        }
        self.ranges.push(Range {
            start,
            end,
            line: u32::try_from(number).ok()?,
            name: u32::try_from(self.names.len()).ok()?,
            length: u32::try_from(name.len()).ok()?,
        });
        self.names.extend(name);
        Some(())
    }

    /// Returns the number of ranges.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Checks whether there are no ranges.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Checks whether lines were left out because there are too many.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// Returns the memory that it takes, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.ranges.capacity() * size_of::<Range>() + self.names.capacity()
    }

    /// Returns the name of the code at an address, and the distance from its start. Of several
    /// ranges, that of the last line counts.
    #[must_use]
    pub fn resolve(&self, address: u64) -> Option<(Cow<'_, str>, u64)> {
        let after = self.ranges.partition_point(|range| range.start <= address);
        let before = self.ranges.get(..after)?.iter().rev().take(MOST_BEFORE);
        let holding = before.filter(|range| address < range.end);
        let found = holding.max_by_key(|range| range.line)?;
        Some((self.name(found), address - found.start))
    }

    /// Finds the addresses of the code of this name.
    pub fn all_of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = u64> {
        let named = self
            .ranges
            .iter()
            .filter(move |range| self.name(range) == name);
        named.map(|range| range.start)
    }

    fn name(&self, range: &Range) -> Cow<'_, str> {
        let start = usize::try_from(range.name).unwrap_or(usize::MAX);
        let length = usize::try_from(range.length).unwrap_or(usize::MAX);
        let bytes = self.names.get(start..).and_then(|rest| rest.get(..length));
        String::from_utf8_lossy(bytes.unwrap_or_default())
    }
}

/// Splits a hexadecimal number from the start of a line.
fn number_and_rest(line: &[u8]) -> Option<(u64, &[u8])> {
    let digits = line.strip_prefix(b"0x").unwrap_or(line);
    let length = digits.iter().take_while(|b| b.is_ascii_hexdigit()).count();
    let (digits, rest) = digits.split_at_checked(length)?;
    if rest.first().is_some_and(|byte| !byte.is_ascii_whitespace()) {
        return None;
    }
    let number = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    Some((number, rest.trim_ascii_start()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn resolve(text: &str, address: u64) -> Option<(String, u64)> {
        let map = PerfMap::parse(text.as_bytes());
        let found = map.resolve(address);
        found.map(|(name, offset)| (name.into_owned(), offset))
    }

    #[test]
    fn code_has_the_name_of_the_last_line_that_holds_it() {
        const MAP: &str = "2000 100 LazyCompile:~run server.js:3\n\
            0x1000 0x40 first\n\
            1000 20 again\r\n\
            3000 1000 outer\n\
            3100 10 inner\n";
        for (address, expected) in [
            (0xfff, None),
            (0x1000, Some(("again", 0))),
            (0x1020, Some(("first", 0x20))),
            (0x1040, None),
            (0x2008, Some(("LazyCompile:~run server.js:3", 8))),
            (0x3105, Some(("inner", 5))),
            (0x3110, Some(("outer", 0x110))),
            (0x4000, None),
            (u64::MAX, None),
        ] {
            let expected = expected.map(|(name, offset)| (name.to_owned(), offset));
            assert_eq!(resolve(MAP, address), expected, "{address:#x}");
        }
        let map = PerfMap::parse(MAP.as_bytes());
        assert_eq!(map.all_of("inner").collect::<Vec<_>>(), [0x3100]);
        assert_eq!((map.len(), map.is_cut()), (5, false));
    }

    #[test]
    fn lines_of_another_form_are_skipped() {
        for line in [
            "",
            "1000",
            "1000 10",
            "1000 10 ",
            "1000 0 empty",
            "x000 10 name",
            "1000x 10 name",
            "+1000 10 name",
            "ffffffffffffffff 10 past_the_end",
            "10000000000000000 10 too_long",
            "1000 10\0 name",
        ] {
            let text = format!("{line}\n5000 10 good");
            let map = PerfMap::parse(text.as_bytes());
            assert_eq!(map.len(), 1, "{line}");
            assert!(map.resolve(0x5000).is_some(), "{line}");
        }
        let long = format!("1000 1 {}", "n".repeat(5000));
        assert_eq!(
            resolve(&long, 0x1000).map(|(name, _)| name.len()),
            Some(MAX_NAME)
        );
        let bytes = PerfMap::parse(b"1000 1 \xff");
        assert_eq!(bytes.resolve(0x1000), Some(("\u{fffd}".into(), 0)));
    }

    #[test]
    fn there_is_a_limit_of_lines() {
        let map = PerfMap::parse(&b"1 1 a\n".repeat(MAX_LINES + 1));
        assert_eq!((map.len(), map.is_cut()), (MAX_LINES, true));
        assert_eq!(map.resolve(1), Some(("a".into(), 0)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed(bytes in prop::collection::vec(any::<u8>(), 0..200), text in "([0-9a-f]{1,17} ?){0,9}\n?") {
            let map = PerfMap::parse(&[bytes.as_slice(), text.as_bytes()].concat());
            let _ = map.resolve(0x1000);
            prop_assert!(map.len() <= 300);
        }
    }
}
