//! A script's output, and the forms in which it is shown.
//!
//! Programs run while a vCPU is stopped, so they hand over an [`Output`]: values and snapshots,
//! with addresses in place of names, and paths in place of files. Its reader brings the [`Names`]
//! and picks a form: [`text`] as on a terminal, [`json`] like bpftrace's `-f json`, [`collapsed`]
//! for flame graphs. Text is raw bytes: the guest may put anything there, and the caller protects
//! terminals.

pub mod collapsed;
pub mod json;
pub mod text;

mod map;
#[cfg(test)]
mod map_tests;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use crate::format::Format;
use crate::maps::MapSnapshot;
use crate::time::TimeFormat;
use crate::value::{Names, Value};

/// The place of an `errorf` or `warnf`, as it stands before the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// Whether it is an error, and no warning.
    pub is_error: bool,
    /// The name of the script.
    pub file: Arc<str>,
    /// The line, from 1.
    pub line: usize,
    /// The columns of the first and of the last byte, from 1.
    pub columns: (usize, usize),
}

/// The path of a file of the guest, whose addresses are shown by their names.
#[derive(Debug, Clone, PartialEq)]
pub struct FilePath {
    /// The format.
    pub format: Arc<Format>,
    /// The values.
    pub arguments: Vec<Value>,
}

impl FilePath {
    /// Returns the path.
    #[must_use]
    pub fn bytes(&self, names: &dyn Names) -> Vec<u8> {
        self.format.render(&self.arguments, names)
    }
}

/// The output of one statement.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// `printf`, `errorf`, `warnf`.
    Printf {
        /// The format.
        format: Arc<Format>,
        /// The values.
        arguments: Vec<Value>,
        /// Its place in the script, if it is a complaint, which goes to standard error.
        complaint: Option<Arc<Complaint>>,
    },
    /// `cat`. Its bytes are those that [`Names::file`] has.
    File {
        /// The path.
        path: FilePath,
        /// The greatest number of bytes shown.
        most: usize,
    },
    /// `print(value)`.
    Print(Value),
    /// `print(@map)`, and the end of a script.
    Map {
        /// The map.
        snapshot: MapSnapshot,
        /// The greatest number of entries shown: those with the largest values. The caller
        /// interprets a negative number, or 0 with bpftrace (all).
        top: Option<usize>,
        /// The divisor of the numbers shown, means and counts of histograms included, but not
        /// `stats`; 0 counts as 1.
        divisor: Option<i64>,
    },
    /// The end of the rules: the maps follow. A line of its own stands before them.
    Ending,
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
        /// The separator between them.
        separator: Arc<[u8]>,
    },
    /// `assert`: the script has failed.
    Fail {
        /// The message.
        message: Arc<str>,
    },
}

impl Output {
    /// Checks whether it goes to standard error.
    #[must_use]
    pub fn is_for_stderr(&self) -> bool {
        matches!(
            self,
            Self::Printf {
                complaint: Some(_),
                ..
            } | Self::Fail { .. }
        )
    }
}
