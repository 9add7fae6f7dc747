//! Addresses in commands: full ones, short ones, symbols.
//!
//! A short one has the last digits of a full one: its upper bits are those of KTZERO. So the manual
//! page writes 16c2c6 for ffffffff8016c2c6. Linux's text does not begin where these bits do. A
//! number too small to reach it so is an offset from KTZERO.

use std::ops::RangeInclusive;

use introspect::kernel::symbols::Symbols;

use super::command::BAD_ADDRESS;
use crate::port::{PortError, Refusal};

/// The number of names suggested for an unknown one.
const SUGGESTIONS: usize = 3;

/// Returns the range of the kernel's text: the first byte and the one behind the last (KTZERO and
/// etext). These are `_text` and `_etext`, or the bounds of the functions in a kernel without these
/// symbols.
pub(super) fn text(symbols: &Symbols) -> Result<RangeInclusive<u64>, PortError> {
    let functions = || symbols.text_functions();
    let first = || functions().map(|f| f.symbol.address).min();
    let end_of_last = || {
        let ends = functions().map(|f| f.symbol.address.saturating_add(f.size));
        ends.max()
    };
    let start = symbols.address_of("_text").or_else(first);
    let end = symbols.address_of("_etext").or_else(end_of_last);
    match (start, end) {
        (Some(start), Some(end)) if start < end => Ok(start..=end),
        _ => Err(PortError::new(
            Refusal::Failed,
            "devtrace: the bounds of the guest's kernel text are not known: the kernel has neither _text and _etext \
             nor functions",
        )),
    }
}

/// The bits of an address that a short one has: x86-64 maps Linux's text within the last 2 GiB.
const SHORT: u64 = (1 << 31) - 1;

/// Returns the address that `word` stands for. A hexadecimal word is a number.
pub(super) fn parse(symbols: &Symbols, word: &str) -> Result<u64, PortError> {
    let text = text(symbols)?;
    let address = match hexadecimal(word) {
        Some(number) if number < text.start() & SHORT => text.start().checked_add(number),
        Some(number) if number <= SHORT => Some((text.start() & !SHORT) | number),
        Some(number) => Some(number),
        None => Some(named(symbols, word)?),
    };
    address
        .filter(|address| text.contains(address))
        .ok_or_else(|| PortError::new(Refusal::Invalid, BAD_ADDRESS))
}

fn hexadecimal(word: &str) -> Option<u64> {
    let digits = word.strip_prefix("0x").unwrap_or(word);
    // A sign is no digit.
    let is_number = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number
        .then(|| u64::from_str_radix(digits, 16).ok())
        .flatten()
}

fn named(symbols: &Symbols, word: &str) -> Result<u64, PortError> {
    let (name, offset) = match word.split_once('+') {
        Some((name, offset)) => (name, hexadecimal(offset)),
        None => (word, Some(0)),
    };
    let bad = |more: String| PortError::new(Refusal::Invalid, format_args!("{BAD_ADDRESS}{more}"));
    let Some(offset) = offset else {
        return Err(bad(format!(
            ": invalid offset in {word}: expected a hexadecimal number after +"
        )));
    };
    let mut found = symbols.all_of(name).filter(|symbol| !symbol.absolute);
    let Some(symbol) = found.next() else {
        let nearest = symbols.nearest_names(name, SUGGESTIONS);
        let nearest = match nearest.is_empty() {
            true => String::new(),
            false => format!(" (did you mean {}?)", nearest.join(", ")),
        };
        return Err(bad(format!(": the kernel has no symbol {name:?}{nearest}")));
    };
    if found.any(|other| other.address != symbol.address) {
        return Err(bad(format!(
            ": several symbols of the kernel are named {name}; give an address"
        )));
    }
    symbol
        .address
        .checked_add(offset)
        .ok_or_else(|| bad(String::new()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::kernel::symbols::SymbolsBuilder;

    use super::*;

    /// Start of the text, a word, and its address; `None` if it is refused.
    #[test]
    fn short_addresses_have_the_upper_bits_of_the_text() {
        const USUAL: u64 = 0xffff_ffff_8100_0000;
        const MOVED: u64 = 0xffff_ffff_9e20_0000;
        // As on Plan 9, where the text begins with the bits.
        const PLAN9: u64 = 0xffff_ffff_8000_0000;
        for (start, word, expected) in [
            (PLAN9, "16c2c6", Some(0xffff_ffff_8016_c2c6)),
            (PLAN9, "ffffffff8016c2c6", Some(0xffff_ffff_8016_c2c6)),
            (USUAL, "116c2c6", Some(0xffff_ffff_8116_c2c6)),
            (USUAL, "0x1a00000", Some(0xffff_ffff_81a0_0000)),
            (USUAL, "16c2c6", Some(0xffff_ffff_8116_c2c6)),
            (USUAL, "ffffffff8116c2c6", Some(0xffff_ffff_8116_c2c6)),
            (USUAL, "3000000", None),
            (USUAL, "7fffffff", None),
            (USUAL, "80000000", None),
            (USUAL, "ffffffff80ffffff", None),
            (MOVED, "1e36c2c6", Some(0xffff_ffff_9e36_c2c6)),
            (MOVED, "16c2c6", Some(0xffff_ffff_9e36_c2c6)),
            (MOVED, "116c2c6", Some(0xffff_ffff_9f36_c2c6)),
            (USUAL, "_text", Some(USUAL)),
            (USUAL, "_text+16c2c6", Some(0xffff_ffff_8116_c2c6)),
        ] {
            let mut symbols = SymbolsBuilder::default();
            for (name, address) in [("_text", start), ("_etext", start + 0x1e0_0000)] {
                symbols.push(name.as_bytes(), address, b'T', false).unwrap();
            }
            let found = parse(&symbols.finish(None), word).ok();
            assert_eq!(found, expected, "{start:x} {word}");
        }
    }
}
