//! The form of a trace, and the options of `trace` that exclude each other.

#[cfg(feature = "export")]
use std::path::Path;

use clap::ValueEnum;

use super::{DEFAULT_STRLEN, Trace};
use crate::protocol::trace::DEFAULT_SLOTS;

impl Trace {
    /// Returns the form of events that is asked for, in words or by the file's name.
    pub fn wanted_format(&self) -> Option<Format> {
        #[cfg(feature = "export")]
        if self.format.is_none() && self.output.as_deref().is_some_and(is_table) {
            return Some(Format::Parquet);
        }
        self.format
    }

    #[cfg(feature = "export")]
    fn has_spans(&self) -> bool {
        self.exports.collector.otlp_spans
    }

    #[cfg(not(feature = "export"))]
    fn has_spans(&self) -> bool {
        false
    }

    #[cfg(feature = "export")]
    fn is_table(&self) -> bool {
        self.wanted_format() == Some(Format::Parquet)
    }

    #[cfg(not(feature = "export"))]
    fn is_table(&self) -> bool {
        false
    }

    /// Returns the given options that have no effect for a script, or for probes.
    pub fn without_meaning(&self, is_script: bool) -> Vec<&'static str> {
        let given = match is_script {
            true => [
                ("--stack", self.stack > 0),
                ("--ustack", self.ustack > 0),
                ("--buffer", self.buffer != DEFAULT_SLOTS),
                ("a table in Parquet", self.is_table()),
                ("--otlp-spans", self.has_spans()),
            ]
            .to_vec(),
            false => [
                ("-n", self.parse_only),
                ("--strict", self.strict),
                ("-L", !self.library.is_empty()),
                ("--strlen", self.strlen != DEFAULT_STRLEN),
                ("--format collapsed", self.format == Some(Format::Collapsed)),
            ]
            .to_vec(),
        };
        let given = given.into_iter().filter(|(_, given)| *given);
        given.map(|(name, _)| name).collect()
    }
}

/// The form of trace events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A line for people
    Events,
    /// Of probes, entries and returns as lines of 121 bytes as trace(3) prints them; of a script,
    /// its own text
    Text,
    /// One JSON object a line
    Json,
    /// Of a script, its maps as folded stacks for flame graphs
    Collapsed,
    #[cfg(feature = "export")]
    /// Of probes, a table for DuckDB and others, a row for each hit; usual for FILE.parquet
    Parquet,
}

/// Checks whether a file's name asks for a table.
#[cfg(feature = "export")]
pub fn is_table(file: &Path) -> bool {
    file.extension().is_some_and(|ending| ending == "parquet")
}
