//! JSON strings (RFC 8259).

/// Encodes a JSON string (section 7). Bytes that are not UTF-8 become U+FFFD.
#[must_use]
pub fn string(text: &[u8]) -> String {
    serde_json::Value::from(String::from_utf8_lossy(text)).to_string()
}
