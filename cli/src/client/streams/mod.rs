//! Streams of events on their way to a file or standard output: their format and their sink.
//!
//! [`shape`] converts whole records to a format. [`sink`] writes that, and begins files anew.
//! Neither knows the source of the records.

pub mod shape;
pub mod sink;

use clap::ValueEnum;

/// The form of a port's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StreamFormat {
    /// One line for each event, as the device's own tools print it
    Text,
    /// The device's own bytes
    Raw,
    /// One JSON object a line
    Json,
    /// A timeline for ui.perfetto.dev
    Perfetto,
    /// For trace: folded stacks for flame graphs, at the end
    Collapsed,
    /// For ptrace: a picture of the timeline, at the end
    Svg,
    #[cfg(feature = "export")]
    /// A table for DuckDB and others, a row for each event
    Parquet,
}
