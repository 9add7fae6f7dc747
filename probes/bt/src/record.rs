//! Encodes values as words of a ring's record.
//!
//! A record is its emission's number with the number of values, then the values. Each value is a
//! word of kind and length, then its own words. A record without room is dropped whole, and the
//! ring counts it.

use std::sync::Arc;

use probes::ring::SlotWriter;

use crate::value::{MOST_LEVELS, Value};

const INT: u64 = 0;
const UNSIGNED: u64 = 1;
const TEXT: u64 = 2;
const BYTES: u64 = 3;
const TUPLE: u64 = 4;
const KERNEL_SYMBOL: u64 = 5;
const USER_SYMBOL: u64 = 6;
const KERNEL_STACK: u64 = 7;
const USER_STACK: u64 = 8;
const RECORD: u64 = 9;
const ARRAY: u64 = 10;
const KIND_BITS: u32 = 8;
/// The greatest depth of nested values that is read back. [`Value::tuple`] makes no more, but
/// damaged words could say so.
const DEEPEST: usize = MOST_LEVELS + 1;

/// The number of words of a record before its values.
pub(crate) const HEADER: usize = 1;

/// Writes a record.
pub(crate) fn write(slot: &mut SlotWriter<'_>, emission: usize, values: &[Value]) {
    let head = emission as u64 | (values.len() as u64) << 32;
    let fits = slot.push_word(head) && values.iter().all(|value| put(slot, value));
    if !fits {
        slot.give_up();
    }
}

fn put(slot: &mut SlotWriter<'_>, value: &Value) -> bool {
    let head = |slot: &mut SlotWriter<'_>, kind: u64, length: usize| {
        slot.push_word(kind | (length as u64) << KIND_BITS)
    };
    match value {
        Value::Int(number) | Value::Enumerator { number, .. } => {
            head(slot, INT, 0) && slot.push_word(number.cast_unsigned())
        }
        Value::Bool(truth) => head(slot, INT, 0) && slot.push_word((*truth).into()),
        Value::Unsigned(number) | Value::Address(number) | Value::Cgroup(number) => {
            head(slot, UNSIGNED, 0) && slot.push_word(*number)
        }
        Value::Text(bytes) => head(slot, TEXT, bytes.len()) && put_bytes(slot, bytes),
        Value::Bytes(bytes) => head(slot, BYTES, bytes.len()) && put_bytes(slot, bytes),
        Value::Array(items) => {
            head(slot, ARRAY, items.len()) && items.iter().all(|item| put(slot, item))
        }
        Value::Tuple(items) => {
            head(slot, TUPLE, items.len()) && items.iter().all(|item| put(slot, item))
        }
        Value::Record { names, items } => {
            let mut members = names.iter().zip(items.iter());
            head(slot, RECORD, items.len())
                && members.all(|(name, item)| {
                    head(slot, TEXT, name.len())
                        && put_bytes(slot, name.as_bytes())
                        && put(slot, item)
                })
        }
        Value::KernelSymbol(address) => head(slot, KERNEL_SYMBOL, 0) && slot.push_word(*address),
        Value::UserSymbol { pid, address } => {
            head(slot, USER_SYMBOL, 0) && slot.push_word((*pid).into()) && slot.push_word(*address)
        }
        Value::StackAs { stack, .. } => put(slot, stack),
        Value::KernelStack(frames) => {
            head(slot, KERNEL_STACK, frames.len()) && put_words(slot, frames)
        }
        Value::UserStack { pid, frames } => {
            head(slot, USER_STACK, frames.len())
                && slot.push_word((*pid).into())
                && put_words(slot, frames)
        }
    }
}

fn put_words(slot: &mut SlotWriter<'_>, words: &[u64]) -> bool {
    words.iter().all(|word| slot.push_word(*word))
}

fn put_bytes(slot: &mut SlotWriter<'_>, bytes: &[u8]) -> bool {
    bytes.chunks(8).all(|chunk| {
        let mut word = [0; 8];
        for (place, byte) in word.iter_mut().zip(chunk) {
            *place = *byte;
        }
        slot.push_word(u64::from_le_bytes(word))
    })
}

/// Returns the emission and the values of a record; `None` if the words are invalid.
pub(crate) fn read(words: &[u64]) -> Option<(usize, Vec<Value>)> {
    let (head, mut rest) = words.split_first()?;
    let values = (0..head >> 32)
        .map(|_| take(&mut rest, DEEPEST))
        .collect::<Option<_>>()?;
    Some((usize::try_from(head & 0xffff_ffff).ok()?, values))
}

fn take(words: &mut &[u64], depth: usize) -> Option<Value> {
    let depth = depth.checked_sub(1)?;
    let head = next(words)?;
    let length = usize::try_from(head >> KIND_BITS).ok()?;
    Some(match head & ((1 << KIND_BITS) - 1) {
        INT => Value::Int(next(words)?.cast_signed()),
        UNSIGNED => Value::Unsigned(next(words)?),
        TEXT => Value::Text(bytes(words, length)?),
        BYTES => Value::Bytes(bytes(words, length)?),
        TUPLE => {
            let items = (0..length).map(|_| take(words, depth));
            Value::Tuple(items.collect::<Option<_>>()?)
        }
        ARRAY => {
            let items = (0..length).map(|_| take(words, depth));
            Value::Array(items.collect::<Option<_>>()?)
        }
        RECORD => {
            let (mut names, mut items) = (Vec::new(), Vec::new());
            for _ in 0..length {
                let Value::Text(name) = take(words, 1)? else {
                    return None;
                };
                names.push(Arc::from(String::from_utf8_lossy(&name)));
                items.push(take(words, depth)?);
            }
            Value::Record {
                names: names.into(),
                items: items.into(),
            }
        }
        KERNEL_SYMBOL => Value::KernelSymbol(next(words)?),
        USER_SYMBOL => Value::UserSymbol {
            pid: u32::try_from(next(words)?).ok()?,
            address: next(words)?,
        },
        KERNEL_STACK => Value::KernelStack(part(words, length)?.into()),
        USER_STACK => Value::UserStack {
            pid: u32::try_from(next(words)?).ok()?,
            frames: part(words, length)?.into(),
        },
        _ => return None,
    })
}

fn next(words: &mut &[u64]) -> Option<u64> {
    let (first, rest) = words.split_first()?;
    *words = rest;
    Some(*first)
}

fn part<'w>(words: &mut &'w [u64], length: usize) -> Option<&'w [u64]> {
    let (part, rest) = words.split_at_checked(length)?;
    *words = rest;
    Some(part)
}

fn bytes(words: &mut &[u64], length: usize) -> Option<Arc<[u8]>> {
    let part = part(words, length.div_ceil(8))?;
    let all = part.iter().flat_map(|word| word.to_le_bytes());
    Some(all.take(length).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use probes::ring::Ring;

    use super::*;

    /// Returns the number of words of one value.
    fn words(value: &Value) -> usize {
        match value {
            Value::Int(_)
            | Value::Unsigned(_)
            | Value::KernelSymbol(_)
            | Value::Bool(_)
            | Value::Address(_)
            | Value::Cgroup(_)
            | Value::Enumerator { .. } => 2,
            Value::UserSymbol { .. } => 3,
            Value::Text(bytes) | Value::Bytes(bytes) => 1 + bytes.len().div_ceil(8),
            Value::StackAs { stack, .. } => words(stack),
            Value::KernelStack(frames) => 1 + frames.len(),
            Value::UserStack { frames, .. } => 2 + frames.len(),
            Value::Tuple(items) | Value::Array(items) => 1 + items.iter().map(words).sum::<usize>(),
            Value::Record { names, items } => {
                let names = names.iter().map(|name| 1 + name.len().div_ceil(8));
                1 + names.sum::<usize>() + items.iter().map(words).sum::<usize>()
            }
        }
    }

    fn values() -> Vec<Value> {
        vec![
            Value::Int(-7),
            Value::Unsigned(u64::MAX),
            Value::text(b""),
            Value::text(b"twelve bytes"),
            Value::Bytes(b"\0\xff".as_slice().into()),
            Value::Tuple([Value::Int(1), Value::text(b"x")].into()),
            Value::Array([Value::Int(1), Value::Int(2)].into()),
            Value::Record {
                names: ["a".into(), "longer name".into()].into(),
                items: [Value::Int(1), Value::text(b"x")].into(),
            },
            Value::KernelSymbol(1 << 63),
            Value::UserSymbol {
                pid: 7,
                address: 0x40_1000,
            },
            Value::KernelStack([1, 2, 3].into()),
            Value::UserStack {
                pid: 7,
                frames: [].into(),
            },
        ]
    }

    fn record(slot_words: usize, values: &[Value]) -> Option<Vec<u64>> {
        let ring = Ring::new(2, slot_words).unwrap();
        let pushed = ring.visit(|| 1).push_with(|slot| write(slot, 9, values));
        let mut record = Vec::new();
        ring.pop(&mut record);
        pushed.then_some(record)
    }

    #[test]
    fn values_survive_their_words_and_take_as_many_as_is_said() {
        let values = values();
        let words: usize = HEADER + values.iter().map(words).sum::<usize>();
        let record = record(words, &values).unwrap();
        assert_eq!(record.len(), words);
        assert_eq!(read(&record), Some((9, values)));
    }

    #[test]
    fn the_highest_tuple_is_read_back() {
        let mut highest = Value::ZERO;
        while let Some(higher) = Value::tuple(std::slice::from_ref(&highest)) {
            highest = higher;
        }
        let values = vec![highest];
        let record = record(1024, &values).unwrap();
        assert_eq!(read(&record), Some((9, values)));
    }

    #[test]
    fn what_has_no_room_is_given_up_whole() {
        let text = Value::text(&[b'x'; 64]);
        let all = HEADER + words(&text);
        for (room, fits) in [(all, true), (all - 1, false), (1, false)] {
            assert_eq!(record(room, std::slice::from_ref(&text)).is_some(), fits);
        }
    }

    #[test]
    fn words_that_were_cut_off_are_no_values() {
        let values = values();
        let all = record(128, &values).unwrap();
        for end in 0..all.len() {
            assert_eq!(read(&all[..end]), None, "{end}");
        }
        assert_eq!(read(&[1 << 32, 0xff, 0]), None);
    }
}
