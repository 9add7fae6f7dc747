//! Parses the texts of arguments in [the module's](super) syntax.

use super::{ArgumentError, MAX_ARGUMENTS, MAX_TEXT, Operand, Place, Sum, ValueKind};
use crate::user::static_probes::register::Register;

/// Returns the texts of a site's arguments, at most [`MAX_ARGUMENTS`].
pub(super) fn texts(arguments: &str) -> impl Iterator<Item = &str> {
    arguments.split_ascii_whitespace().take(MAX_ARGUMENTS)
}

/// Returns the names in a site's arguments that may be symbols. Not all of them are.
pub(in super::super) fn symbols_in(arguments: &str) -> impl Iterator<Item = &str> {
    texts(arguments)
        .filter(|text| text.len() <= MAX_TEXT)
        .flat_map(|text| text.split(|c: char| "@$%(),+-".contains(c)))
        .filter(|word| is_symbol(word))
}

fn is_symbol(word: &str) -> bool {
    let may_be_in = |c: char| c.is_ascii_alphanumeric() || "_.$".contains(c) || !c.is_ascii();
    !word.is_empty()
        && !word.starts_with(|c: char| c.is_ascii_digit())
        && word.chars().all(may_be_in)
}

pub(super) fn size(text: &str) -> Result<ValueKind, ArgumentError> {
    let (signed, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (floating, size) = match rest.strip_suffix('f') {
        Some(size) => (true, size),
        None => (false, rest),
    };
    let size = match size {
        "1" => 1,
        "2" => 2,
        "4" => 4,
        "8" => 8,
        _ => return Err(ArgumentError::Size(text.to_owned())),
    };
    Ok(ValueKind {
        size,
        signed,
        floating,
    })
}

pub(super) fn operand(
    text: &str,
    address_of: &dyn Fn(&str) -> Option<u64>,
) -> Result<Operand, ArgumentError> {
    let syntax = || ArgumentError::Syntax(text.to_owned());
    if let Some(constant) = text.strip_prefix('$') {
        return sum(constant, address_of).map(Operand::Constant);
    }
    if text.starts_with('%') {
        return register(text).map(Operand::Register);
    }
    let Some((displacement, rest)) = text.split_once('(') else {
        // Memory at a fixed address.
        return Ok(Operand::Memory(Place {
            displacement: sum(text, address_of)?,
            base: None,
            index: None,
        }));
    };
    let registers = rest.strip_suffix(')').ok_or_else(syntax)?;
    let displacement = match displacement {
        "" => Sum::default(),
        text => sum(text, address_of)?,
    };
    let parts: Vec<&str> = registers.split(',').collect();
    let (base, index, scale) = match *parts.as_slice() {
        [base] => (base, "", ""),
        [base, index] => (base, index, ""),
        [base, index, scale] => (base, index, scale),
        _ => return Err(syntax()),
    };
    let base = match base {
        "" => None,
        name => Some(register(name)?),
    };
    let scale = match scale {
        "" | "1" => 1,
        "2" => 2,
        "4" => 4,
        "8" => 8,
        _ => return Err(syntax()),
    };
    let index = match index {
        "" => None,
        name => Some((register(name)?, scale)),
    };
    // Nothing in between, or parts that cannot form an address.
    let mut registers = base.iter().chain(index.iter().map(|(index, _)| index));
    if base.is_none() && index.is_none() || registers.any(|register| register.size() < 4) {
        return Err(syntax());
    }
    Ok(Operand::Memory(Place {
        displacement,
        base,
        index,
    }))
}

fn register(text: &str) -> Result<Register, ArgumentError> {
    let name = text
        .strip_prefix('%')
        .ok_or_else(|| ArgumentError::Syntax(text.to_owned()))?;
    Register::of(name).ok_or_else(|| ArgumentError::Register(name.to_owned()))
}

fn sum(text: &str, address_of: &dyn Fn(&str) -> Option<u64>) -> Result<Sum, ArgumentError> {
    let syntax = || ArgumentError::Syntax(text.to_owned());
    let mut sum = Sum::default();
    let (mut rest, mut negative) = match text.strip_prefix('-') {
        Some(rest) => (rest, true),
        None => (text.strip_prefix('+').unwrap_or(text), false),
    };
    loop {
        let end = rest.find(['+', '-']).unwrap_or(rest.len());
        let (term, behind) = rest.split_at_checked(end).ok_or_else(syntax)?;
        let number = match integer(term) {
            Some(number) => number,
            None if is_symbol(term) && !negative && !sum.is_address => {
                sum.is_address = true;
                address_of(term).ok_or_else(|| ArgumentError::Symbol(term.to_owned()))?
            }
            None => return Err(syntax()),
        };
        sum.number = match negative {
            true => sum.number.wrapping_sub(number),
            false => sum.number.wrapping_add(number),
        };
        let mut signs = behind.chars();
        match signs.next() {
            None => return Ok(sum),
            Some(sign) => {
                negative = sign == '-';
                rest = signs.as_str();
                // Assemblers write `symbol+-8`.
                if let Some(number) = rest.strip_prefix('-') {
                    negative = !negative;
                    rest = number;
                }
            }
        }
    }
}

/// Parses a decimal, hexadecimal (0x) or octal (0) number of up to 64 bits.
fn integer(text: &str) -> Option<u64> {
    let digits = |text: &str, radix| match text.starts_with('+') {
        true => None,
        false => u64::from_str_radix(text, radix).ok(),
    };
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hexadecimal) => digits(hexadecimal, 16),
        None => match text.strip_prefix('0').filter(|rest| !rest.is_empty()) {
            Some(octal) => digits(octal, 8),
            None => digits(text, 10),
        },
    }
}
