//! Providers of probes. Each lists the probes whose names match a pattern, as far as they can be
//! listed. It adds the arguments' types from the guest.

mod dispatch;
pub mod host_file;
pub mod kprobe;
pub mod module;
pub mod system_calls;
pub mod timer;
pub mod tracepoint;
pub mod uprobe;
pub mod usdt;
pub mod watchpoint;

pub use dispatch::{
    Inspectable, NotFound, Traceable, find, find_tracepoints, find_user, inspect, may_come,
};

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
    let mut each = |probe| found.probes.push(probe);
    kprobe::list(view, pattern, &mut each);
    system_calls::list(pattern, &mut each);
    timer::list(pattern, &mut each);
    if found.probes.is_empty() && ProbePattern::is_exact(&pattern.function) {
        let nearest = match pattern.provider.as_str() {
            system_calls::PROVIDER => system_calls::nearest(&pattern.function, SUGGESTIONS),
            _ => view
                .kernel
                .symbols
                .nearest_names(&pattern.function, SUGGESTIONS)
                .into_iter()
                .map(str::to_owned)
                .collect(),
        };
        found.nearest = nearest;
    }
    found
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
