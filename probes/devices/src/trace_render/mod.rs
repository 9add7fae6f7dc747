//! Renders the lines of trace(3) in other forms: JSON lines, a timeline for Perfetto's UI, stacks
//! for flame graphs.
//!
//! The caller brings the lines in the order in which they were read, names for addresses, and the
//! clock that converts ticks to times. A return names its return address, but not its function: it
//! ends the last call of its process that has not returned. That is right if no line is missing. A
//! call from before the first line, or whose entry is lost, leaves a surplus return. A function
//! that never returns (`do_exit`), or whose return is lost, takes the return of its caller.

mod calls;
mod collapsed;
mod json;
mod perfetto;
#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;

pub use calls::Calls;
pub use collapsed::Collapsed;
pub use json::Json;
pub use perfetto::Perfetto;

/// Names an address: `vfs_read`, or `vfs_read+0x1c` within the function; `None` if it is not known.
pub type Symbols = Box<dyn Fn(u64) -> Option<String> + Send>;

/// The greatest number of processes whose open calls are kept. Those of the processes seen longest
/// ago are forgotten.
pub const MAX_TASKS: NonZeroUsize = NonZeroUsize::new(65_536).unwrap();

/// Returns the name of an address, or the address itself.
fn named(symbols: &Symbols, pc: u64) -> String {
    symbols(pc).unwrap_or_else(|| format!("{pc:#x}"))
}
