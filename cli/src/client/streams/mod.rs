//! Streams of events on their way to a file or standard output: what they are shown as, and where they go.
//!
//! [`shape`] makes a format of whole records; [`sink`] writes that, and begins files anew. Neither knows where the records come from.

pub mod shape;
pub mod sink;

use clap::ValueEnum;

/// How the events of a port are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StreamFormat {
    /// A line an event, as the device's own tools print it
    Text,
    /// The bytes that the device gives
    Raw,
    /// One JSON object a line
    Json,
    /// A timeline for ui.perfetto.dev
    Perfetto,
    /// Of trace, folded stacks for flame graphs, at the end
    Collapsed,
    /// Of ptrace, a picture of the timeline, at the end
    Svg,
}
