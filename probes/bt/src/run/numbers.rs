//! Arithmetic on values.
//!
//! Numbers have 64 bits, and a sign that depends on their source. Results are mathematically exact
//! if they fit in either kind, and wrap otherwise. In the strict dialect everything is C's `long`.

use std::cmp::Ordering;

use crate::ast::{BinaryOperator, Dialect, UnaryOperator};
use crate::value::Value;

/// The number of bytes that `str` returns and comparisons use in the strict dialect: OpenBSD's
/// limit for a string argument.
pub(crate) const STRICT_TEXT: usize = 127;

/// Returns the number in a value: its address if it has one, 0 if it is no number.
pub(super) fn number(value: &Value, dialect: Dialect) -> i128 {
    let found = match value {
        Value::Int(number) => i128::from(*number),
        Value::Unsigned(number) | Value::Address(number) => i128::from(*number),
        Value::Bool(truth) => i128::from(*truth),
        Value::Enumerator { number, .. } => i128::from(*number),
        Value::Cgroup(id) => i128::from(*id),
        Value::KernelSymbol(address) | Value::UserSymbol { address, .. } => i128::from(*address),
        Value::Text(text) => text_number(text),
        Value::Bytes(_)
        | Value::Tuple(_)
        | Value::Array(_)
        | Value::Record { .. }
        | Value::StackAs { .. }
        | Value::KernelStack(_)
        | Value::UserStack { .. } => 0,
    };
    match dialect {
        Dialect::Normal => found,
        Dialect::Strict => i128::from(found as i64),
    }
}

/// Returns the number in an argument of the script, as bt(5) reads it: its whole text as a number,
/// or 1; empty text is 0.
fn text_number(text: &[u8]) -> i128 {
    if text.is_empty() {
        return 0;
    }
    let parsed = std::str::from_utf8(text).ok().and_then(|t| t.parse().ok());
    parsed.map_or(1, |number: i64| i128::from(number))
}

/// Returns the value of a number: `Int` if it fits.
pub(crate) fn value(number: i128, dialect: Dialect) -> Value {
    if dialect == Dialect::Strict {
        return Value::Int(number as i64);
    }
    match i64::try_from(number) {
        Ok(number) => Value::Int(number),
        Err(_) => unsigned(number as u64),
    }
}

/// Returns the value of an unsigned word.
pub(crate) fn unsigned(word: u64) -> Value {
    match i64::try_from(word) {
        Ok(number) => Value::Int(number),
        Err(_) => Value::Unsigned(word),
    }
}

/// Returns the low `bytes` of a word as a number.
pub(crate) fn extend(word: u64, bytes: u8, signed: bool) -> Value {
    let shift = 64 - 8 * u32::from(bytes.clamp(1, 8));
    match signed {
        true => Value::Int((word << shift).cast_signed() >> shift),
        false => unsigned(word << shift >> shift),
    }
}

/// Returns the bytes of a word as an array of numbers, the lowest first.
pub(super) fn split(word: u64, bytes: u8, signed: bool, elements: usize) -> Value {
    let width = 8 * u32::from(bytes.clamp(1, 8));
    let parts = (0..elements.min(8)).map(|at| {
        let shift = width.saturating_mul(at as u32);
        extend(word.checked_shr(shift).unwrap_or(0), bytes, signed)
    });
    Value::Array(parts.collect())
}

/// Returns the number whose bytes are the elements of an array, the lowest first.
pub(super) fn join(array: &Value, bytes: u8, dialect: Dialect) -> Value {
    let Value::Array(items) = array else {
        return Value::ZERO;
    };
    let width = 8 * u32::from(bytes.clamp(1, 8));
    let mask = u64::MAX >> (64 - width);
    let parts = items.iter().zip(0u32..).map(|(item, at)| {
        let part = number(item, dialect) as u64 & mask;
        part.checked_shl(width.saturating_mul(at)).unwrap_or(0)
    });
    unsigned(parts.fold(0, |word, part| word | part))
}

/// Divides an array into arrays of so many elements; `None` if they would be too many values.
pub(super) fn group(array: &Value, elements: usize) -> Option<Value> {
    let Value::Array(items) = array else {
        return Some(Value::ZERO);
    };
    let groups: Vec<Value> = items
        .chunks(elements.max(1))
        .map(|items| Value::Array(items.into()))
        .collect();
    Value::array(&groups)
}

/// Checks whether a value counts as true.
pub(crate) fn is_true(value: &Value) -> bool {
    match value {
        Value::Text(text) => !text.is_empty(),
        other => number(other, Dialect::Normal) != 0,
    }
}

pub(crate) fn unary(operator: UnaryOperator, operand: &Value, dialect: Dialect) -> Value {
    match operator {
        UnaryOperator::Not => Value::Int((!is_true(operand)).into()),
        UnaryOperator::Negate => value(-number(operand, dialect), dialect),
        UnaryOperator::Complement => match operand {
            Value::Unsigned(word) => unsigned(!word),
            other => value(!number(other, dialect), dialect),
        },
        // Compiled to a load, and to an addition.
        UnaryOperator::Dereference | UnaryOperator::Address => operand.clone(),
    }
}

/// The error of a division by zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByZero;

/// Returns the result of a division by zero: bpftrace's, or OpenBSD's.
pub(crate) fn by_zero(dialect: Dialect) -> Value {
    Value::Int((dialect == Dialect::Normal).into())
}

/// Applies an operator to two evaluated operands; `&&` and `||` that stop early are jumps.
pub(crate) fn binary(
    operator: BinaryOperator,
    left: &Value,
    right: &Value,
    dialect: Dialect,
) -> Result<Value, ByZero> {
    use BinaryOperator::{
        Add, And, Divide, Equal, Greater, GreaterOrEqual, Less, LessOrEqual, LogicalAnd, LogicalOr,
        Modulo, Multiply, NotEqual, Or, ShiftLeft, ShiftRight, Subtract, Xor,
    };
    let truth = |is: bool| Ok(Value::Int(is.into()));
    // Most numbers are such, and most results fit.
    if let (Value::Int(left), Value::Int(right)) = (left, right) {
        let quick = match operator {
            Add => left.checked_add(*right),
            Subtract => left.checked_sub(*right),
            Multiply => left.checked_mul(*right),
            And => Some(left & right),
            _ => None,
        };
        if let Some(number) = quick {
            return Ok(Value::Int(number));
        }
    }
    match operator {
        LogicalAnd => return truth(is_true(left) && is_true(right)),
        LogicalOr => return truth(is_true(left) || is_true(right)),
        Equal => return truth(compare(left, right, dialect) == Ordering::Equal),
        NotEqual => return truth(compare(left, right, dialect) != Ordering::Equal),
        Less => return truth(compare(left, right, dialect) == Ordering::Less),
        LessOrEqual => return truth(compare(left, right, dialect) != Ordering::Greater),
        Greater => return truth(compare(left, right, dialect) == Ordering::Greater),
        GreaterOrEqual => return truth(compare(left, right, dialect) != Ordering::Less),
        _ => {}
    }
    let (l, r) = (number(left, dialect), number(right, dialect));
    let found = match operator {
        Add => l + r,
        Subtract => l - r,
        Multiply => l.wrapping_mul(r),
        Divide => l.checked_div(r).ok_or(ByZero)?,
        Modulo => l.checked_rem(r).ok_or(ByZero)?,
        And => l & r,
        Or => l | r,
        Xor => l ^ r,
        ShiftLeft => shift(l, r, |l, by| l << by),
        ShiftRight => shift(l, r, |l, by| l >> by),
        _ => 0,
    };
    Ok(value(found, dialect))
}

/// Shifts a number; a shift by more bits than there are leaves none.
fn shift(number: i128, by: i128, shifted: impl Fn(i128, u32) -> i128) -> i128 {
    match u32::try_from(by) {
        Ok(by) if by < u64::BITS => shifted(number, by),
        _ => 0,
    }
}

fn compare(left: &Value, right: &Value, dialect: Dialect) -> Ordering {
    match (left, right) {
        (Value::Text(left), Value::Text(right)) => {
            let cut = |text: &'_ [u8]| match dialect {
                Dialect::Normal => text.len(),
                Dialect::Strict => text.len().min(STRICT_TEXT),
            };
            let (l, r) = (cut(left), cut(right));
            left.get(..l).cmp(&right.get(..r))
        }
        (Value::Tuple(_), Value::Tuple(_))
        | (Value::Record { .. }, Value::Record { .. })
        | (Value::Array(_), Value::Array(_))
        | (Value::Bytes(_), Value::Bytes(_)) => left.cmp(right),
        (Value::Int(left), Value::Int(right)) => left.cmp(right),
        _ => number(left, dialect).cmp(&number(right, dialect)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_those_of_mathematics_where_they_fit() {
        use BinaryOperator::*;
        let (int, word) = (Value::Int, Value::Unsigned);
        for (left, operator, right, normal, strict) in [
            (int(7), Subtract, int(9), int(-2), -2),
            (word(u64::MAX), Subtract, int(1), word(u64::MAX - 1), -2),
            (word(u64::MAX), Subtract, word(u64::MAX), int(0), 0),
            (int(i64::MAX), Add, int(1), word(1 << 63), i64::MIN),
            (word(u64::MAX), Greater, int(-1), int(1), 0),
            (int(-1), Less, word(u64::MAX), int(1), 0),
            (int(-8), ShiftRight, int(1), int(-4), -4),
            (int(1), ShiftLeft, int(63), word(1 << 63), i64::MIN),
            (int(1), ShiftLeft, int(64), int(0), 0),
            (int(-7), Divide, int(2), int(-3), -3),
            (int(-7), Modulo, int(2), int(-1), -1),
            (word(u64::MAX), Multiply, int(2), word(u64::MAX - 1), -2),
            (
                word(u64::MAX),
                And,
                int(-4096),
                word(u64::MAX - 4095),
                -4096,
            ),
            (word(u64::MAX), Xor, int(-1), int(0), 0),
        ] {
            for (dialect, expected) in [
                (Dialect::Normal, normal.clone()),
                (Dialect::Strict, Value::Int(strict)),
            ] {
                assert_eq!(
                    binary(operator, &left, &right, dialect),
                    Ok(expected),
                    "{left:?} {operator:?} {right:?} {dialect:?}"
                );
            }
        }
        let zero = binary(Divide, &int(1), &int(0), Dialect::Normal);
        assert_eq!(zero, Err(ByZero));
        let least = binary(Divide, &int(i64::MIN), &int(-1), Dialect::Strict);
        assert_eq!(least, Ok(Value::Int(i64::MIN)));
    }

    #[test]
    fn values_are_cut_to_their_type() {
        for (word, bytes, signed, expected) in [
            (0xffff_ff9c, 4, true, Value::Int(-100)),
            (0xffff_ff9c, 4, false, Value::Int(0xffff_ff9c)),
            (0x1234_56ff, 1, true, Value::Int(-1)),
            (u64::MAX, 8, true, Value::Int(-1)),
            (u64::MAX, 8, false, Value::Unsigned(u64::MAX)),
        ] {
            assert_eq!(extend(word, bytes, signed), expected);
        }
    }

    #[test]
    fn texts_are_compared_as_bytes_and_count_as_bt_says() {
        use BinaryOperator::*;
        let (short, long) = (vec![b'x'; 127], vec![b'x'; 128]);
        for (dialect, expected) in [(Dialect::Normal, 0), (Dialect::Strict, 1)] {
            let found = binary(Equal, &Value::text(&short), &Value::text(&long), dialect);
            assert_eq!(found, Ok(Value::Int(expected)));
        }
        for (text, expected) in [(&b""[..], 0), (b"12", 12), (b"-3", -3), (b"word", 1)] {
            assert_eq!(number(&Value::text(text), Dialect::Strict), expected);
        }
    }
}
