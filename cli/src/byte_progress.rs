//! Progress of writing or checking bytes, on standard error if that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// Returns a bar with the label `what`. The caller sets its length and position, and clears it.
pub fn bar(what: &'static str) -> ProgressBar {
    // Draws nothing unless standard error is a terminal.
    let bar = ProgressBar::new(0).with_message(what);
    match ProgressStyle::with_template("{msg} {wide_bar} {bytes} of {total_bytes}") {
        Ok(style) => bar.with_style(style),
        // The default style shows less.
        Err(_) => bar,
    }
}
