//! Reports of the progress of long work.
//!
//! The caller owns the choice of sink; [`Terminal`] draws on stderr, [`Silent`] does nothing.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// A sink for progress. Methods may be called at any rate, from any thread.
pub trait Progress: Sync {
    /// Begins a new phase, described in a few words, such as `building the kernel`.
    fn phase(&self, message: &str);
    /// Reports how much of the phase is done, from 0 to 1. Values beyond are clamped.
    fn fraction(&self, done: f64);
}

/// A sink that prints nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn phase(&self, _message: &str) {}
    fn fraction(&self, _done: f64) {}
}

/// The interval of lines for a sink that is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(30);
/// The number of steps of the bar.
const STEPS: u64 = 1000;

/// A bar on stderr if that is a terminal, else one line for each phase and every 30 s. Clears the
/// bar when dropped.
#[derive(Debug)]
pub struct Terminal(Sink);

#[derive(Debug)]
enum Sink {
    Bar(ProgressBar),
    /// Lines, locked for each report; a panic of the last holder does no harm.
    Lines(Mutex<Lines>),
}

#[derive(Debug)]
struct Lines {
    message: String,
    printed: Instant,
}

impl Terminal {
    /// Makes a sink that suits the present stderr.
    pub fn new() -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(Sink::Lines(Mutex::new(Lines {
                message: String::new(),
                printed: Instant::now(),
            })));
        }
        let bar = ProgressBar::new(STEPS);
        if let Ok(style) =
            ProgressStyle::with_template("{msg} [{bar:30}] {percent:>3} %  {elapsed}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        Self(Sink::Bar(bar))
    }
}

impl Terminal {
    /// Removes the bar for good, before other output.
    pub fn clear(&self) {
        if let Sink::Bar(bar) = &self.0 {
            bar.disable_steady_tick();
            bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        }
    }
}

impl Default for Terminal {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Sink::Bar(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Terminal {
    fn phase(&self, message: &str) {
        match &self.0 {
            Sink::Bar(bar) => {
                bar.set_position(0);
                bar.set_message(message.to_owned());
            }
            Sink::Lines(lines) => {
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                message.clone_into(&mut lines.message);
                lines.print(message);
            }
        }
    }

    fn fraction(&self, done: f64) {
        let done = done.clamp(0.0, 1.0);
        match &self.0 {
            Sink::Bar(bar) => bar.set_position((done * STEPS as f64) as u64),
            Sink::Lines(lines) => {
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                if lines.printed.elapsed() >= LINE_INTERVAL {
                    let text = format!("{}: {:.0} %", lines.message, done * 100.0);
                    lines.print(&text);
                }
            }
        }
    }
}

impl Lines {
    fn print(&mut self, text: &str) {
        // A closed stderr is no reason to stop the work.
        let _ = writeln!(std::io::stderr(), "{text}");
        self.printed = Instant::now();
    }
}
