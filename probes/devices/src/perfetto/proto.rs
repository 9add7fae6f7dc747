//! Protocol buffers, as far as writing a message needs: varints, 64-bit numbers, and fields with a
//! length.

/// The encoding of a field's value (`wire type`).
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const WITH_LENGTH: u64 = 2;
/// The bits of a varint's byte that are value; the remaining one says that more bytes follow.
const VALUE_BITS: u32 = 7;
const MORE: u8 = 0x80;

/// A message that is being written. Fields are written in the order of the calls; a repeated field
/// is written again.
#[derive(Debug, Default)]
pub(super) struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// Makes an empty message.
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Returns the message's bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes a field of type `uint32`, `uint64`, `bool` or an enumeration.
    pub(super) fn number(&mut self, field: u32, value: u64) -> &mut Self {
        self.key(field, VARINT);
        self.varint(value);
        self
    }

    /// Writes a field of type `int32` or `int64`: negative numbers have ten bytes.
    pub(super) fn signed(&mut self, field: u32, value: i64) -> &mut Self {
        self.number(field, value.cast_unsigned())
    }

    /// Writes a field of type `fixed64`.
    pub(super) fn fixed(&mut self, field: u32, value: u64) -> &mut Self {
        self.key(field, FIXED_64);
        self.bytes.extend(value.to_le_bytes());
        self
    }

    /// Writes a field of type `string`.
    pub(super) fn text(&mut self, field: u32, value: &str) -> &mut Self {
        self.with_length(field, value.as_bytes())
    }

    /// Writes a field that is a message itself.
    pub(super) fn message(&mut self, field: u32, value: &Self) -> &mut Self {
        self.with_length(field, &value.bytes)
    }

    fn with_length(&mut self, field: u32, value: &[u8]) -> &mut Self {
        self.key(field, WITH_LENGTH);
        self.varint(value.len() as u64);
        self.bytes.extend(value);
        self
    }

    fn key(&mut self, field: u32, wire_type: u64) {
        self.varint(u64::from(field) << 3 | wire_type);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= u64::from(MORE) {
            self.bytes.push(value as u8 | MORE);
            value >>= VALUE_BITS;
        }
        self.bytes.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first, the third and the last are the examples of the encoding's documentation.
    #[test]
    fn fields_have_the_bytes_of_the_encoding() {
        let mut nested = Message::new();
        nested.number(1, 150);
        for (message, bytes) in [
            (Message::new().number(1, 150), &[0x08, 0x96, 0x01][..]),
            (Message::new().number(16, 0), &[0x80, 0x01, 0x00]),
            (
                Message::new().text(2, "testing"),
                b"\x12\x07testing".as_slice(),
            ),
            (
                Message::new().signed(1, -2),
                &[
                    0x08, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01,
                ],
            ),
            (
                Message::new().number(1, u64::MAX),
                &[
                    0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01,
                ],
            ),
            (
                Message::new().fixed(47, 0x0102),
                &[0xf9, 0x02, 2, 1, 0, 0, 0, 0, 0, 0],
            ),
            (
                Message::new().message(3, &nested),
                &[0x1a, 0x03, 0x08, 0x96, 0x01],
            ),
        ] {
            assert_eq!(message.bytes(), bytes);
        }
    }
}
