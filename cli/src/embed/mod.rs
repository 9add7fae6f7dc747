//! The library for programs that embed a VM: making one, and what can be asked of it.
//!
//! The methods of [`Vm`](crate::Vm) that need the modules above it stand here: probes, scripts and
//! expectations.

mod builder;
mod expect;
mod script;
mod trace;

pub use builder::{StartError, VmBuilder};
pub(crate) use builder::{check_in_use, read_initramfs, with_overlays};
pub use expect::Expecting;
pub use script::Script;
pub use trace::{Trace, TraceEvent};
