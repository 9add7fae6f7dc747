//! Progress through bytes that are written or checked, on standard error where that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// Returns a bar that says `what` is done with the bytes. The caller sets its length and position, and clears it.
pub fn bar(what: &'static str) -> ProgressBar {
    // Draws nothing where standard error is no terminal.
    let bar = ProgressBar::new(0).with_message(what);
    match ProgressStyle::with_template("{msg} {wide_bar} {bytes} of {total_bytes}") {
        Ok(style) => bar.with_style(style),
        // The default one says less.
        Err(_) => bar,
    }
}
