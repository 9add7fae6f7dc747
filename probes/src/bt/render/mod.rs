//! What a script puts out, and the forms in which it is shown.
//!
//! Programs run while a vCPU stands still, so they hand over an [`Output`]: values and snapshots, with addresses in place of names. Whoever
//! reads it brings the [`Names`](super::value::Names) and picks a form: [`text`] as on a terminal, [`json`] in the way of bpftrace's
//! `-f json`, [`collapsed`] for flame graphs. Text is raw bytes: what guests say may hold anything, terminals are the caller's to
//! protect.

pub mod collapsed;
pub mod json;
pub mod text;

mod map;
#[cfg(test)]
mod map_tests;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use super::format::Format;
use super::maps::MapSnapshot;
use super::time::TimeFormat;
use super::value::Value;

/// What one statement has put out.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// `printf`, `errorf`, `warnf`.
    Printf {
        /// The format.
        format: Arc<Format>,
        /// Its values.
        arguments: Vec<Value>,
        /// Whether it goes to standard error.
        to_stderr: bool,
    },
    /// `print(value)`.
    Print(Value),
    /// `print(@map)`, and the end of a script.
    Map {
        /// The map.
        snapshot: MapSnapshot,
        /// How many entries are shown at most: those with the largest values. What a script's number means that is negative, or 0 with
        /// bpftrace (all), is the caller's to know.
        top: Option<usize>,
        /// What numbers are divided by before they are shown, means and counts of histograms too, `stats` not; 0 counts as 1.
        divisor: Option<i64>,
    },
    /// `time`.
    Time {
        /// The format.
        format: Arc<TimeFormat>,
        /// The event's time in nanoseconds since 1970.
        unix_ns: i64,
    },
    /// `join`.
    Join {
        /// The texts.
        parts: Vec<Arc<[u8]>>,
        /// What stands between them.
        separator: Arc<[u8]>,
    },
    /// `assert`: the script has failed.
    Fail {
        /// Its message.
        message: Arc<str>,
    },
}

impl Output {
    /// Whether it goes to standard error.
    #[must_use]
    pub fn is_for_stderr(&self) -> bool {
        matches!(
            self,
            Self::Printf {
                to_stderr: true,
                ..
            } | Self::Fail { .. }
        )
    }
}
