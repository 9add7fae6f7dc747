//! The check of error texts in tests.

/// Checks that an error says `part`.
#[track_caller]
pub(crate) fn assert_says(error: impl ToString, part: &str) {
    let text = error.to_string();
    assert!(text.contains(part), "expected {part:?}, found {text:?}");
}
