//! Renders the records of ptrace(3): as ptrace(1)'s text, JSON lines, a timeline for Perfetto's UI,
//! or a picture.
//!
//! The caller brings the records in the order in which they were read, and the writer. A record may
//! hold any numbers: unknown types are shown by number, and the state kept of processes and CPUs is
//! bounded.

mod json;
mod order;
mod perfetto;
mod svg;
mod tasks;
#[cfg(test)]
mod tests;
mod text;
mod trap;

use std::num::NonZeroUsize;

pub use json::Json;
pub use perfetto::Perfetto;
pub use svg::{MAX_DRAWN, MAX_ROWS, Svg};
pub use tasks::{Seen, Tasks};
pub use text::Text;
pub use trap::Trap;

/// The greatest number of processes whose names and states a renderer keeps. Those seen longest ago
/// are forgotten.
const MAX_TASKS: NonZeroUsize = NonZeroUsize::new(65_536).unwrap();
/// The number of every CPU's idle task.
const IDLE: u32 = 0;
/// The name shown if none is known, as in ptrace(1).
const NO_NAME: &str = "_";
