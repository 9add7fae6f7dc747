//! Operations that read the guest's memory, and those on the resulting texts.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::{Machine, count, number_names, numbers};
use crate::context::Context;
use crate::program::Operation;
use crate::value::Value;

/// The greatest length in bytes of a text or run of bytes that is read at once.
pub(crate) const MOST_BYTES: usize = 1024;
/// The greatest number of pointers followed in an array of strings.
pub(crate) const MOST_STRINGS: usize = 16;

impl<C: Context + ?Sized> Machine<'_, C> {
    pub(super) fn on_memory(&mut self, operation: &Operation) {
        let value = match operation {
            Operation::Load { bytes, signed } => {
                let address = self.word();
                numbers::extend(self.load(address, *bytes), *bytes, *signed)
            }
            Operation::LoadBits {
                shift,
                width,
                signed,
            } => {
                let address = self.word();
                let bytes = (u32::from(*shift) + u32::from(*width)).div_ceil(8);
                let word = self.load(address, bytes.min(8) as u8);
                bits(word, *shift, *width, *signed)
            }
            Operation::Extend { bytes, signed } => {
                let word = self.word();
                numbers::extend(word, *bytes, *signed)
            }
            Operation::ReadTextOf { most } => {
                let length = self.length(*most);
                let address = self.word();
                self.text(address, length)
            }
            Operation::CutText => {
                let most = self.length(MOST_BYTES);
                let of = self.pop();
                Value::text(cut(text_of(&of), most))
            }
            Operation::ReadBytes { most } => {
                let length = self.length(*most);
                match self.pop() {
                    // Text is no pointer: its own bytes, and zeros behind them.
                    Value::Text(own) | Value::Bytes(own) => padded(&own, length),
                    other => {
                        let address = numbers::number(&other, self.shared.dialect) as u64;
                        self.bytes(address, length)
                    }
                }
            }
            Operation::Length => {
                let length = match self.pop() {
                    Value::Text(bytes) | Value::Bytes(bytes) => bytes.len(),
                    Value::KernelStack(frames) | Value::UserStack { frames, .. } => frames.len(),
                    Value::Tuple(items) | Value::Array(items) => items.len(),
                    _ => 0,
                };
                Value::Int(i64::try_from(length).unwrap_or(i64::MAX))
            }
            Operation::UserStack(most) => {
                let context = self.context;
                Value::UserStack {
                    pid: context.process(),
                    frames: (self.scratch).frames(*most, |room| context.user_stack(room)),
                }
            }
            Operation::KernelSymbol => Value::KernelSymbol(self.word()),
            Operation::UserSymbol => Value::UserSymbol {
                pid: self.context.process(),
                address: self.word(),
            },
            Operation::AddressText { bytes } => match self.pop() {
                Value::Bytes(own) => of_octets(&own),
                other => {
                    let address = numbers::number(&other, self.shared.dialect) as u64;
                    self.address_text(address, *bytes)
                }
            },
            Operation::Ipv4Text => {
                // In memory the first byte is the lowest of the number.
                let number = self.word() as u32;
                text(&Ipv4Addr::from(number.to_le_bytes()).to_string())
            }
            Operation::MacText => {
                let address = self.word();
                let mut mac = [0; 6];
                self.fill(address, &mut mac);
                let parts = mac.map(|byte| format!("{byte:02X}"));
                text(&parts.join(":"))
            }
            Operation::CompareText => {
                let most = self.length(MOST_BYTES);
                let (right, left) = (self.pop(), self.pop());
                let (left, right) = (text_of(&left), text_of(&right));
                let (left, right) = (cut(left, most), cut(right, most));
                Value::Int((left != right).into())
            }
            Operation::CompareBytes => {
                let most = self.length(MOST_BYTES);
                let (right, left) = (self.pop(), self.pop());
                let (left, right) = (bytes_of(&left), bytes_of(&right));
                // Text ends in zeros.
                let byte = |of: &[u8], at: usize| of.get(at).copied().unwrap_or(0);
                let differing = (0..most).find(|at| byte(left, *at) != byte(right, *at));
                let difference = differing.map_or(0, |at| {
                    i64::from(byte(left, at)) - i64::from(byte(right, at))
                });
                Value::Int(difference)
            }
            Operation::Contains => {
                let (needle, haystack) = (self.pop(), self.pop());
                let (needle, haystack) = (text_of(&needle), text_of(&haystack));
                let found =
                    needle.is_empty() || haystack.windows(needle.len()).any(|part| part == needle);
                Value::Int(found.into())
            }
            Operation::GlobMatch => {
                let (pattern, text) = (self.pop(), self.pop());
                Value::Int(probes::name::glob(text_of(&pattern), text_of(&text)).into())
            }
            Operation::Find => {
                let (needle, haystack) = (self.pop(), self.pop());
                let (needle, haystack) = (text_of(&needle), text_of(&haystack));
                let found = match needle.len() {
                    0 => Some(0),
                    length => haystack.windows(length).position(|part| part == needle),
                };
                Value::Int(found.and_then(|at| i64::try_from(at).ok()).unwrap_or(-1))
            }
            Operation::ReadArray {
                bytes,
                signed,
                elements,
            } => {
                let address = self.word();
                self.array(address, *bytes, *signed, *elements)
            }
            Operation::Concatenate => {
                let (right, left) = (self.pop(), self.pop());
                let both = [text_of(&left), text_of(&right)].concat();
                Value::text(cut(&both, MOST_BYTES))
            }
            Operation::Text(kind) => {
                let number = self.word().cast_signed();
                text(&number_names::name_of(*kind, number))
            }
            Operation::SwapBytes(bytes) => {
                let word = self.word();
                let bytes = (*bytes).clamp(1, 8);
                let turned = word.swap_bytes() >> (64 - 8 * u32::from(bytes));
                numbers::unsigned(turned)
            }
            Operation::TimeText(format) => {
                let ns = i64::try_from(self.word()).unwrap_or(i64::MAX);
                Value::text(&format.render(ns))
            }
            Operation::Join { emission, most } => {
                let array = self.word();
                let strings = self.strings(array, *most);
                let emitted = self.context.emit(*emission, &strings);
                return self.note(emitted);
            }
            _ => return,
        };
        self.push(value);
    }

    fn fill(&self, address: u64, buffer: &mut [u8]) {
        if !self.context.read(address, buffer) {
            buffer.fill(0);
            count(&self.shared.faults.reads);
        }
    }

    fn load(&self, address: u64, bytes: u8) -> u64 {
        let mut word = [0; 8];
        if let Some(part) = word.get_mut(..usize::from(bytes)) {
            self.fill(address, part);
        }
        u64::from_le_bytes(word)
    }

    /// Takes a length from the stack: a negative one counts as 0.
    fn length(&mut self, most: usize) -> usize {
        let value = self.pop();
        let number = numbers::number(&value, self.shared.dialect);
        usize::try_from(number.max(0)).map_or(most, |length| length.min(most))
    }

    pub(super) fn text(&mut self, address: u64, most: usize) -> Value {
        let (context, shared) = (self.context, self.shared);
        Value::Text(self.scratch.text(most, |room| {
            // A null pointer is empty text and no failed read, as in a script that checks it first.
            let (length, is_there) = match address {
                0 => (0, true),
                _ => context.read_string(address, room),
            };
            if !is_there {
                count(&shared.faults.reads);
            }
            length
        }))
    }

    fn bytes(&self, address: u64, length: usize) -> Value {
        let mut buffer = [0; MOST_BYTES];
        let room = buffer.get_mut(..length.min(MOST_BYTES)).unwrap_or_default();
        self.fill(address, room);
        Value::Bytes((&*room).into())
    }

    /// Reads numbers of so many bytes each.
    fn array(&self, address: u64, bytes: u8, signed: bool, elements: usize) -> Value {
        let width = usize::from(bytes.clamp(1, 8));
        let mut buffer = [0; MOST_BYTES];
        let room = width.saturating_mul(elements).min(MOST_BYTES);
        let room = buffer.get_mut(..room).unwrap_or_default();
        self.fill(address, room);
        let items = room.chunks_exact(width).map(|chunk| {
            let mut word = [0; 8];
            for (place, byte) in word.iter_mut().zip(chunk) {
                *place = *byte;
            }
            numbers::extend(u64::from_le_bytes(word), bytes, signed)
        });
        Value::Array(items.collect())
    }

    fn strings(&mut self, array: u64, most: usize) -> Vec<Value> {
        let mut found = Vec::new();
        for index in 0..MOST_STRINGS as u64 {
            let Some(at) = array.checked_add(8 * index) else {
                break;
            };
            match self.load(at, 8) {
                0 => break,
                pointer => found.push(self.text(pointer, most)),
            }
        }
        found
    }

    fn address_text(&self, address: u64, bytes: u8) -> Value {
        let mut octets = [0; 16];
        if bytes == 4 {
            let mut four = [0; 4];
            self.fill(address, &mut four);
            return text(&Ipv4Addr::from(four).to_string());
        }
        self.fill(address, &mut octets);
        text(&Ipv6Addr::from(octets).to_string())
    }
}

/// Returns the text of the address that these bytes are.
fn of_octets(bytes: &[u8]) -> Value {
    match (<[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
        (Ok(four), _) => text(&Ipv4Addr::from(four).to_string()),
        (_, Ok(sixteen)) => text(&Ipv6Addr::from(sixteen).to_string()),
        _ => text(""),
    }
}

/// Extracts `width` bits of a word from bit `shift` on.
fn bits(word: u64, shift: u8, width: u8, signed: bool) -> Value {
    let (shift, width) = (u32::from(shift), u32::from(width.clamp(1, 64)));
    let up = (64 - width).saturating_sub(shift);
    let shifted = word << up;
    match signed {
        true => Value::Int(shifted.cast_signed() >> (64 - width)),
        false => numbers::unsigned(shifted >> (64 - width)),
    }
}

fn text(text: &str) -> Value {
    Value::text(text.as_bytes())
}

/// Returns the bytes of a text or of bytes.
fn bytes_of(of: &Value) -> &[u8] {
    match of {
        Value::Text(bytes) | Value::Bytes(bytes) => bytes,
        _ => &[],
    }
}

fn text_of(value: &Value) -> &[u8] {
    match value {
        Value::Text(bytes) | Value::Bytes(bytes) => bytes,
        _ => &[],
    }
}

/// Returns the first `length` bytes of some, with zeros behind those that there are.
fn padded(own: &[u8], length: usize) -> Value {
    let length = length.min(MOST_BYTES);
    let own = cut(own, length);
    let zeros = std::iter::repeat_n(0, length - own.len());
    Value::Bytes(own.iter().copied().chain(zeros).collect())
}

fn cut(text: &[u8], most: usize) -> &[u8] {
    text.get(..most).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitfields_are_cut_out_of_their_word() {
        for (word, shift, width, signed, expected) in [
            (0b1011_0100u64, 2, 3, false, 5),
            (0b1011_0100, 2, 3, true, -3),
            (0b1011_0100, 4, 2, true, -1),
            (u64::MAX >> 1, 0, 63, false, i64::MAX),
            (1 << 31, 31, 1, false, 1),
            (1 << 31, 31, 1, true, -1),
        ] {
            let found = bits(word, shift, width, signed);
            assert_eq!(found, Value::Int(expected), "{word:b} {shift} {width}");
        }
    }
}
