//! Progress of writing or checking bytes, on standard error if that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// Returns a bar with the label `what`. The caller tells it what is [`done`], and clears it.
pub fn bar(what: &'static str) -> ProgressBar {
    // Draws nothing unless standard error is a terminal.
    let bar = ProgressBar::new(0).with_message(what);
    match ProgressStyle::with_template("{msg} {wide_bar} {bytes} of {total_bytes}") {
        Ok(style) => bar.with_style(style),
        // The default style shows less.
        Err(_) => bar,
    }
}

/// Shows that `done` of `total` bytes are done.
pub fn done(bar: &ProgressBar, done: u64, total: u64) {
    // Both at once: it is drawn after each change.
    bar.update(|state| {
        state.set_len(total);
        state.set_pos(done);
    });
}
