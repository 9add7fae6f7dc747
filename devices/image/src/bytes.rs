//! Numbers and names in raw bytes. A number beyond the end is `None`.

/// Returns the bytes at an offset.
pub(crate) fn array<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Returns the byte at an offset.
pub(crate) fn byte(data: &[u8], at: usize) -> Option<u8> {
    data.get(at).copied()
}

/// Returns the little-endian 16 bits at an offset.
pub(crate) fn short(data: &[u8], at: usize) -> Option<u16> {
    array(data, at).map(u16::from_le_bytes)
}

/// Returns the little-endian 32 bits at an offset.
pub(crate) fn word(data: &[u8], at: usize) -> Option<u32> {
    array(data, at).map(u32::from_le_bytes)
}

/// Returns the little-endian 64 bits at an offset.
pub(crate) fn long(data: &[u8], at: usize) -> Option<u64> {
    array(data, at).map(u64::from_le_bytes)
}

/// Returns whether these bytes stand at an offset.
pub(crate) fn has(data: &[u8], at: usize, wanted: &[u8]) -> bool {
    data.get(at..).is_some_and(|rest| rest.starts_with(wanted))
}

/// Returns text that ends with the first zero, or with the bytes; `None` if it is empty.
pub(crate) fn text(data: &[u8]) -> Option<String> {
    let data = data.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(data).trim_end().to_owned();
    (!text.is_empty()).then_some(text)
}

/// Returns a UUID whose bytes stand in the order of its digits, as file systems have it.
pub(crate) fn uuid(bytes: [u8; 16]) -> String {
    let mut out = String::with_capacity(36);
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            out.push('-');
        }
        out.push_str(&format!("{byte:02x}"));
    }
    out
}

/// Returns a GUID as EFI stores it: its first three groups are little-endian numbers.
pub(crate) fn guid(mut bytes: [u8; 16]) -> String {
    let (a, rest) = bytes.split_at_mut(4);
    let (b, rest) = rest.split_at_mut(2);
    let (c, _) = rest.split_at_mut(2);
    for group in [a, b, c] {
        group.reverse();
    }
    uuid(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_written_as_the_tools_do() {
        let bytes = *b"\x28\x73\x2a\xc1\x1f\xf8\xd2\x11\xba\x4b\x00\xa0\xc9\x3e\xc9\x3b";
        assert_eq!(guid(bytes), "c12a7328-f81f-11d2-ba4b-00a0c93ec93b");
        assert_eq!(uuid(bytes), "28732ac1-1ff8-d211-ba4b-00a0c93ec93b");
    }

    #[test]
    fn what_is_beyond_the_end_is_not_there() {
        assert_eq!(word(&[1, 2, 3], 0), None);
        assert_eq!(short(&[1, 2, 3], usize::MAX), None);
        assert!(!has(b"abc", 2, b"cd"));
        assert_eq!(text(b"root\0junk"), Some("root".to_owned()));
        assert_eq!(text(b"\0"), None);
    }
}
