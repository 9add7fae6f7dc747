//! Providers of probes. Each lists the probes whose names match a pattern, as far as they can be
//! listed. It adds the arguments' types from the guest.

mod dispatch;
mod file_forms;
pub mod host_file;
pub mod kprobe;
pub mod module;
mod no_kernel_probe;
pub mod system_calls;
pub mod timer;
pub mod tracepoint;
pub mod uprobe;
pub mod usdt;
mod user_file;
pub mod watchpoint;

pub use dispatch::{
    Inspectable, NotFound, Traceable, find, find_at_path, find_each, find_tracepoints, find_user,
    inspect, to_come,
};
pub(crate) use dispatch::{mapped, no_user_probe};

use crate::kernel_view::KernelView;
use crate::name::ProbePattern;
use crate::probe::Probe;

/// The number of similar names suggested for an unknown one.
const SUGGESTIONS: usize = 3;

/// The result of a search by pattern.
#[derive(Debug, Clone, Default)]
pub struct Matches {
    /// The probes.
    pub probes: Vec<Probe>,
    /// Names similar to the function's, best first, if no probe was found.
    pub nearest: Vec<String>,
}

/// Returns the probes of the kernel that match a pattern, from all providers except those of
/// programs' text.
#[must_use]
pub fn kernel_probes(view: &KernelView, pattern: &ProbePattern) -> Matches {
    let mut found = Matches::default();
    each_of_kernel(view, pattern, &mut |probe| found.probes.push(probe));
    if found.probes.is_empty() {
        found.nearest = nearest_of_kernel(view, pattern);
    }
    found
}

/// Passes the probes of [`kernel_probes`] to `each`.
fn each_of_kernel(view: &KernelView, pattern: &ProbePattern, each: &mut dyn FnMut(Probe)) {
    kprobe::list(view, pattern, each);
    system_calls::list(pattern, each);
    timer::list(pattern, each);
}

/// Returns the names most similar to a pattern's function, best first, if it is one name.
fn nearest_of_kernel(view: &KernelView, pattern: &ProbePattern) -> Vec<String> {
    let function = &pattern.function;
    if !ProbePattern::is_exact(function) {
        return Vec::new();
    }
    if pattern.provider == system_calls::PROVIDER {
        return system_calls::nearest(function, SUGGESTIONS);
    }
    let symbols = &view.kernel.symbols;
    let nearest = symbols.nearest_names(function, SUGGESTIONS).into_iter();
    nearest.map(str::to_owned).collect()
}

/// A name that is no function's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownFunction {
    /// The name.
    pub name: String,
    /// Similar names, best first.
    pub nearest: Vec<String>,
}

impl std::fmt::Display for UnknownFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.name)?;
        if !self.nearest.is_empty() {
            write!(f, " (did you mean {}?)", self.nearest.join(", "))?;
        }
        Ok(())
    }
}
