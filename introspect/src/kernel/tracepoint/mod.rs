//! Tracepoints: the places that the kernel's authors marked for tracers, in the kernel and its modules, found without asking
//! the guest.
//!
//! The caller pauses the CPUs and has the list of modules ([`modules`](super::modules)). Solved: every tracepoint with its
//! event system, its parameters, the branches in the code that lead to its call, and what stands at their other end. Not solved:
//! which arguments are in which register at a branch, which is the compiler's choice; parameters of modules'
//! tracepoints, whose types the kernel's own BTF has not.
//!
//! A branch obeys the tracepoint's key. Some stand before the tracepoint's call, but `trace_NAME_enabled()` asks the same
//! key, to prepare something or to call a function that has the call: what a branch leads to tells. Of tracepoints in
//! locks these are most.
//!
//! Structures: include/linux/tracepoint-defs.h, include/linux/tracepoint.h.

mod events;
mod members;
mod parameters;
#[cfg(test)]
mod tests;

pub use events::EventError;
pub use parameters::parameters;

use events::EventsLayout;
use members::Members;

use std::collections::HashSet;

use super::btf::{Btf, Parameter};
use super::jump_label::{
    JumpEntry, JumpLabelLayout, JumpLabelLayoutError, JumpLabels, JumpTableError,
};
use super::layout::LayoutError;
use super::modules::Module;
use super::section_table::{SectionTableError, TableOwner};
use super::structure::StructureError;
use super::symbols::Symbols;
use crate::{Gva, MemoryView};

/// Bytes of all parameters together, names of types included; a distribution kernel has about half a megabyte.
const MAX_PARAMETER_BYTES: usize = 8 << 20;

/// A tracepoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tracepoint {
    /// Its name: `sched_switch`.
    pub name: String,
    /// The event system, the folder under `events` of tracefs that has the event of this name: `sched`. `None` for a tracepoint
    /// without an event, which only the kernel's own code and modules can use, and in kernels without events.
    pub system: Option<String>,
    /// Name of the module it is in; `None` for the kernel itself.
    pub module: Option<String>,
    /// Address of its `struct tracepoint`.
    pub address: Gva,
    /// Address of its `static_key`, which switches the branches.
    pub key: Gva,
    /// Where its pointer to the functions of those who listen stands (`funcs`); null while nobody does.
    pub funcs: Gva,
    /// Whether somebody in the guest listens now.
    pub listening: bool,
    /// Whether the kernel must do something more before it fires (`regfunc`): without that, its branches may never be reached.
    /// `sys_enter` is such a one.
    pub has_registration: bool,
    /// The branches that its key switches, ascending by address. None if the kernel never uses it, or was built without
    /// jump labels.
    pub sites: Vec<Site>,
    /// The function that calls all who listen (`__traceiter_NAME`). It takes a pointer of its own, then the parameters.
    pub iterator: Option<Gva>,
    /// The trampoline that sites call (`__SCT__tp_func_NAME`), with the same arguments as the iterator.
    pub call_trampoline: Option<Gva>,
    /// What it passes to those who listen. `None` if the kernel's types do not tell.
    pub parameters: Option<Vec<Parameter>>,
}

/// A branch to a tracepoint's call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// First byte of the instruction: a NOP of 2 or 5 bytes, or, while the key is on, a JMP of as many.
    pub address: Gva,
    /// Where the JMP leads.
    pub target: Gva,
    /// Whether it stands in code of initialisation: after that, other things stand there.
    pub init: bool,
}

/// All tracepoints, and what is broken about them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tracepoints {
    /// Those of the kernel in its own order, then those of each module. Modules may have one of the same name.
    pub items: Vec<Tracepoint>,
    /// What could not be read.
    pub unread: Vec<TracepointError>,
}

/// What of the tracepoints could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TracepointError {
    /// A list of them: there are more.
    #[error(transparent)]
    Table(#[from] SectionTableError),
    /// One: it is left out.
    #[error("{owner}: {source}")]
    Structure {
        /// Whose it is.
        owner: TableOwner,
        /// What the read said.
        source: StructureError,
    },
    /// One: it is left out.
    #[error("{owner}: the tracepoint at {address} is called {found:?}, which is no name of one")]
    BadName {
        /// Whose it is.
        owner: TableOwner,
        /// Its address.
        address: Gva,
        /// Its name, at most 256 bytes of it.
        found: String,
    },
    /// One that is on the lists already: it is told once.
    #[error("{owner}: the tracepoint at {address} is listed twice")]
    Twice {
        /// On whose list it is the second time.
        owner: TableOwner,
        /// Its address.
        address: Gva,
    },
    /// Branches: a tracepoint may have more.
    #[error(transparent)]
    JumpTable(#[from] JumpTableError),
    /// The kernel's types: those behind have no parameters.
    #[error(
        "the parameters of the kernel's tracepoints from {name} on take more than {MAX_PARAMETER_BYTES} bytes: refused"
    )]
    LongParameters {
        /// The first of them.
        name: String,
    },
    /// Events: a tracepoint may have a system.
    #[error("the systems of some tracepoints are not known: {0}")]
    Event(#[from] EventError),
}

/// Why tracepoints cannot be read in this kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TracepointLayoutError {
    /// Something is missing or of another size.
    #[error("the kernel's tracepoints are not known: {0}")]
    Layout(#[from] LayoutError),
    /// The same of the branches to them.
    #[error("the sites of the kernel's tracepoints are not known: {0}")]
    JumpLabels(JumpLabelLayoutError),
}

/// Where a kernel keeps its tracepoints.
#[derive(Debug, Clone)]
pub struct TracepointLayout {
    btf: Btf,
    /// `None` for a kernel without tracepoints.
    members: Option<Members>,
    /// `None` for a kernel without jump labels.
    jump_labels: Option<JumpLabelLayout>,
    /// `None` for a kernel without events.
    events: Option<EventsLayout>,
}

impl TracepointLayout {
    /// Finds the lists and the offsets. A kernel without tracepoints has an empty list. `symbols` must have the slide of the
    /// running kernel.
    ///
    /// # Errors
    /// If types or symbols do not tell.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, TracepointLayoutError> {
        let members = match btf.size_of("tracepoint") {
            Some(_) => Some(Members::new(btf, symbols)?),
            None => None,
        };
        let jump_labels = match JumpLabelLayout::new(btf, symbols) {
            Ok(layout) => Some(layout),
            Err(JumpLabelLayoutError::NoJumpLabels) => None,
            Err(error) => return Err(TracepointLayoutError::JumpLabels(error)),
        };
        Ok(Self {
            btf: btf.clone(),
            members,
            jump_labels,
            events: EventsLayout::new(btf, symbols)?,
        })
    }

    /// Offset in `struct tracepoint` of the pointer that is null while nobody listens; `None` in a kernel without tracepoints.
    #[must_use]
    pub fn funcs_offset(&self) -> Option<u64> {
        self.members.as_ref().map(|members| members.funcs)
    }

    /// The tracepoints of the kernel and of these modules.
    #[must_use]
    pub fn read_all(&self, view: MemoryView<'_>, modules: &[Module]) -> Tracepoints {
        let mut found = Tracepoints::default();
        let Some(members) = &self.members else {
            return found;
        };
        let pointers = members.pointers(view, modules, &mut found.unread);
        if pointers.is_empty() {
            return found;
        }
        let labels = self.jump_labels.as_ref();
        let mut labels = labels.map_or(JumpLabels::default(), |all| all.read_all(view, modules));
        let mut known: HashSet<Gva> = pointers.iter().map(|(_, address)| *address).collect();
        let events = self.events.as_ref();
        let (systems, error) =
            events.map_or_else(Default::default, |all| all.systems(view, &known));
        let told = labels.unread.drain(..).map(TracepointError::from);
        found
            .unread
            .extend(told.chain(error.map(TracepointError::from)));
        let mut left = Some(MAX_PARAMETER_BYTES);
        for (owner, address) in pointers {
            // Each once, so that no branch is told more than once.
            if !known.remove(&address) {
                found.unread.push(TracepointError::Twice { owner, address });
                continue;
            }
            let read = members.read(view, &owner, address);
            let mut tracepoint = match read {
                Ok(tracepoint) => tracepoint,
                Err(error) => {
                    found.unread.push(error);
                    continue;
                }
            };
            let sites = labels.of_key(tracepoint.key).iter();
            tracepoint.sites = sites.map(Site::from).collect();
            tracepoint.system = systems.get(&address).map(|system| system.to_string());
            if let (None, Some(bytes)) = (&tracepoint.module, left) {
                let told = parameters(&self.btf, &tracepoint.name);
                left = bytes.checked_sub(told.as_deref().map_or(0, parameters::bytes));
                match left {
                    Some(_) => tracepoint.parameters = told,
                    None => found.unread.push(TracepointError::LongParameters {
                        name: tracepoint.name.clone(),
                    }),
                }
            }
            found.items.push(tracepoint);
        }
        found
    }
}

impl From<&JumpEntry> for Site {
    fn from(entry: &JumpEntry) -> Self {
        Self {
            address: entry.code,
            target: entry.target,
            init: entry.init,
        }
    }
}
