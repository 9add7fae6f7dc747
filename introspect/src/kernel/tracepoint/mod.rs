//! Tracepoints: the places that the kernel's authors marked for tracers, in the kernel and its
//! modules, found without running guest code.
//!
//! The caller pauses the CPUs and has the list of modules ([`modules`](super::modules)). This
//! module finds every tracepoint with its event system, parameters and sites, and the targets
//! of the sites. It does not find the registers of the arguments at a site, which are the
//! compiler's choice. Nor does it find parameters of modules' tracepoints, whose types are not in
//! the kernel's own BTF.
//!
//! A branch obeys the tracepoint's key. Some precede the tracepoint's call. Others are of
//! `trace_NAME_enabled()`, which checks the same key to prepare something or to call a function
//! with the call. The branch's target distinguishes the two. Of the branches of tracepoints in
//! locks, most are of the second kind.
//!
//! Structures: include/linux/tracepoint-defs.h, include/linux/tracepoint.h.

mod events;
mod members;
mod parameters;
mod record;
#[cfg(test)]
mod tests;

pub use events::EventError;
pub use parameters::parameters;
pub use record::{EventField, EventRecord};

use events::EventsLayout;
use members::Members;
use record::RecordLayout;

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

/// The maximum size in bytes of all parameters, including names of types; a distribution kernel has
/// about half a megabyte.
const MAX_PARAMETER_BYTES: usize = 8 << 20;

/// A tracepoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tracepoint {
    /// The tracepoint's name: `sched_switch`.
    pub name: String,
    /// The event system: the folder under `events` of tracefs that has the event of this name, such
    /// as `sched`. `None` for a tracepoint without an event, which only the kernel's own code and
    /// modules can use. Also `None` in kernels without events.
    pub system: Option<String>,
    /// The address of the event's `trace_event_class`, if there is an event.
    pub class: Option<Gva>,
    /// The name of its module; `None` for the kernel itself.
    pub module: Option<String>,
    /// The address of the `struct tracepoint`.
    pub address: Gva,
    /// The address of the `static_key`, which switches the branches.
    pub key: Gva,
    /// The address of the pointer to the listeners' functions (`funcs`), which is null if there are
    /// none.
    pub funcs: Gva,
    /// Whether the guest has a listener now.
    pub listening: bool,
    /// Whether the kernel must do more before the tracepoint fires (`regfunc`). Otherwise its
    /// branches may never be reached. An example is `sys_enter`.
    pub has_registration: bool,
    /// The branches that its key switches, ascending by address. None if the kernel never uses it,
    /// or was built without jump labels.
    pub sites: Vec<Site>,
    /// The function that calls all listeners (`__traceiter_NAME`). It takes a pointer of its own,
    /// then the parameters.
    pub iterator: Option<Gva>,
    /// The trampoline that sites call (`__SCT__tp_func_NAME`), with the same arguments as the
    /// iterator.
    pub call_trampoline: Option<Gva>,
    /// The parameters passed to listeners. `None` if the kernel's types do not describe them.
    pub parameters: Option<Vec<Parameter>>,
}

/// A branch to a tracepoint's call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// The first byte of the instruction: a NOP of 2 or 5 bytes, or, while the key is on, a JMP of
    /// the same length.
    pub address: Gva,
    /// The target of the JMP.
    pub target: Gva,
    /// Whether the site is in initialisation code, whose memory is reused afterwards.
    pub init: bool,
}

/// All tracepoints, and the errors of reading them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tracepoints {
    /// The tracepoints of the kernel in its own order, then those of each module. Modules may
    /// repeat a name.
    pub items: Vec<Tracepoint>,
    /// The errors.
    pub unread: Vec<TracepointError>,
}

/// An error in reading tracepoints.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TracepointError {
    /// A list of tracepoints is broken: some are missing.
    #[error(transparent)]
    Table(#[from] SectionTableError),
    /// A tracepoint cannot be read and is left out.
    #[error("{owner}: {source}")]
    Structure {
        /// The owner of the tracepoint.
        owner: TableOwner,
        /// The cause.
        source: StructureError,
    },
    /// A tracepoint's name is invalid, and it is left out.
    #[error("{owner}: invalid name of the tracepoint at {address}: found {found:?}")]
    BadName {
        /// The owner of the tracepoint.
        owner: TableOwner,
        /// The tracepoint's address.
        address: Gva,
        /// The name found, cut after 256 bytes.
        found: String,
    },
    /// A tracepoint is listed twice, and returned once.
    #[error("{owner}: the tracepoint at {address} is listed twice")]
    Twice {
        /// The owner of the second list.
        owner: TableOwner,
        /// The tracepoint's address.
        address: Gva,
    },
    /// A jump table is broken: a tracepoint may have more sites.
    #[error(transparent)]
    JumpTable(#[from] JumpTableError),
    /// The kernel's types are too large: the tracepoints from here on have no parameters.
    #[error(
        "the parameters of the kernel's tracepoints from {name} on take more than {MAX_PARAMETER_BYTES} bytes: refused"
    )]
    LongParameters {
        /// The name of the first of them.
        name: String,
    },
    /// The events are broken: a tracepoint may have a system that was not found.
    #[error("the systems of some tracepoints are not known: {0}")]
    Event(#[from] EventError),
}

/// An error that prevents reading tracepoints in this kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TracepointLayoutError {
    /// A symbol or member is missing or has another size.
    #[error("the kernel's tracepoints are not known: {0}")]
    Layout(#[from] LayoutError),
    /// A symbol or member of the branches is missing or has another size.
    #[error("the sites of the kernel's tracepoints are not known: {0}")]
    JumpLabels(JumpLabelLayoutError),
}

/// The location of a kernel's tracepoints.
#[derive(Debug, Clone)]
pub struct TracepointLayout {
    btf: Btf,
    /// The lists and members; `None` for a kernel without tracepoints.
    members: Option<Members>,
    /// The jump labels; `None` for a kernel without them.
    jump_labels: Option<JumpLabelLayout>,
    /// The events; `None` for a kernel without them.
    events: Option<EventsLayout>,
    /// The fields of events; `None` if the kernel's types do not describe them.
    records: Option<RecordLayout>,
}

impl TracepointLayout {
    /// Looks up the lists and the offsets. A kernel without tracepoints has an empty list.
    /// `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel's types or symbols do not describe them.
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
            records: RecordLayout::new(btf).ok(),
        })
    }

    /// Returns the offset in `struct tracepoint` of the pointer that is null while there are no
    /// listeners. Returns `None` in a kernel without tracepoints.
    #[must_use]
    pub fn funcs_offset(&self) -> Option<u64> {
        self.members.as_ref().map(|members| members.funcs)
    }

    /// Reads the record that the kernel writes for an event. Returns `None` for a tracepoint
    /// without an event, or if the fields of events are not known.
    ///
    /// # Errors
    /// If the guest's list of fields is broken.
    pub fn record(
        &self,
        view: MemoryView<'_>,
        tracepoint: &Tracepoint,
    ) -> Result<Option<EventRecord>, EventError> {
        match (&self.records, tracepoint.class) {
            (Some(layout), Some(class)) => layout.read(view, class),
            _ => Ok(None),
        }
    }

    /// Reads the tracepoints of the kernel and of these modules.
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
        let (mut events, error) =
            events.map_or_else(Default::default, |all| all.read(view, &known));
        let told = labels.unread.drain(..).map(TracepointError::from);
        found
            .unread
            .extend(told.chain(error.map(TracepointError::from)));
        let mut left = Some(MAX_PARAMETER_BYTES);
        for (owner, address) in pointers {
            // Each once, so that no branch is reported more than once.
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
            if let Some(event) = events.remove(&address) {
                tracepoint.system = Some(event.system.to_string());
                tracepoint.class = Some(event.class);
            }
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
