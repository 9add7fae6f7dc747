//! Addresses in commands: full ones, offsets from the start of the kernel's text, symbols.

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

/// Returns the address that `word` stands for. A hexadecimal word is a number: from `_text` on, or
/// from 0.
pub(super) fn parse(symbols: &Symbols, word: &str) -> Result<u64, PortError> {
    let text = text(symbols)?;
    let address = match hexadecimal(word) {
        // Added rather than or-ed, because Linux's text is longer than its start's alignment.
        Some(number) if number < *text.start() => text.start().checked_add(number),
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
