//! What the records of ptrace(3) are shown as: ptrace(1)'s text, JSON lines, a timeline for Perfetto's UI, a picture.
//!
//! The caller brings the records in the order in which they were read, and the place to write to. Any numbers can be in a record: types
//! that nobody knows are shown by number, and what is kept of processes and CPUs is bounded.

mod json;
mod order;
mod perfetto;
mod svg;
mod tasks;
#[cfg(test)]
mod tests;
mod text;
mod trap;

pub use json::Json;
pub use perfetto::Perfetto;
pub use svg::{MAX_DRAWN, MAX_ROWS, Svg};
pub use text::Text;

/// Most processes that a renderer keeps names and states of. What is known of those that were seen longest ago is forgotten.
const MAX_TASKS: usize = 65_536;
/// The number of every CPU's idle task.
const IDLE: u32 = 0;
/// The name where none is known, as in ptrace(1).
const NO_NAME: &str = "_";
