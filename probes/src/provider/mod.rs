//! Where probes come from. Each provider lists the probes whose names match a pattern, as far as they can be listed, with what the
//! guest's types tell of their arguments.

mod dispatch;
pub mod kprobe;
pub mod system_calls;
pub mod timer;
pub mod tracepoint;
pub mod uprobe;
pub mod usdt;

pub use dispatch::{NotFound, Traceable, find, find_tracepoints, find_user, may_come};

use crate::kernel_view::KernelView;
use crate::name::ProbePattern;
use crate::probe::Probe;

/// Names offered for one that does not exist.
const SUGGESTIONS: usize = 3;

/// What a pattern stands for.
#[derive(Debug, Clone, Default)]
pub struct Matches {
    /// The probes.
    pub probes: Vec<Probe>,
    /// Names that look like the function meant, where no probe was found; best first.
    pub nearest: Vec<String>,
}

/// The probes of the kernel that match a pattern: those of all providers but of programs' text.
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

/// A name that stands for no function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownFunction {
    /// What was asked for.
    pub name: String,
    /// Names that look like it, best first.
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
