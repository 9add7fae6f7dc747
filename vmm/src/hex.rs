//! Formatting of bytes for messages.

/// Formats two digits a byte, with spaces between them.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let digits: Vec<String> = bytes.iter().map(|b| format!("{b:02x}")).collect();
    digits.join(" ")
}
