//! Streams of events on their way to a file or standard output: what they are shown as, and where they go.
//!
//! [`shape`] makes a format of whole records; [`sink`] writes that, and begins files anew. Neither knows where the records come from.

pub mod shape;
pub mod sink;
