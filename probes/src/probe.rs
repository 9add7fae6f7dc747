//! Probes: name, signature and target. Providers create them, sessions enable them.

use std::sync::Arc;
use std::time::Duration;

use introspect::kernel::btf::Parameter;
use introspect::kernel::page_cache::CachedFile;
use introspect::user::static_probes::SiteArgument;
use introspect::{Gpa, Gva};
use vmm::machine::Watchpoint;

use crate::event::EventKind;
use crate::fields::{Field, RecordText};
use crate::name::ProbeName;

/// An argument according to the guest's types.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Argument {
    /// The name; may be empty.
    pub name: String,
    /// The type in C notation.
    pub type_name: String,
    /// Whether it points to a string that is present at the function's entry.
    pub is_string: bool,
    /// The type that a translator converts it to for scripts, if the probe declares one.
    pub translated: Option<String>,
}

impl From<Parameter> for Argument {
    fn from(parameter: Parameter) -> Self {
        Self {
            name: parameter.name,
            // A buffer is of type `char *`, even before it is filled.
            is_string: parameter.type_name == "const char *",
            translated: None,
            type_name: parameter.type_name,
        }
    }
}

/// The arguments and result of a probe.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Signature {
    /// The arguments in order; at a return, those of the call. A function's entry and return share
    /// them.
    pub arguments: Arc<[Argument]>,
    /// The type of the returned value, at a return.
    pub returns: Option<String>,
}

/// A probe that can be enabled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The name.
    pub name: ProbeName,
    /// The signature, if known.
    pub signature: Option<Signature>,
    /// The target.
    pub target: Target,
}

impl Probe {
    /// Returns the kind of its events.
    #[must_use]
    pub fn kind(&self) -> EventKind {
        self.target.kind()
    }

    /// Returns the formatted fields of a tracepoint's event.
    #[must_use]
    pub fn fields(&self) -> &[Field] {
        match &self.target {
            Target::Tracepoint(TracepointText {
                record: Some(record),
                ..
            }) => &record.fields,
            _ => &[],
        }
    }
}

/// A moment in the run of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Moment {
    /// The function's entry.
    Entry,
    /// The function's return.
    Return,
    /// The moment before the instruction at the target's address is executed.
    Point,
}

impl Moment {
    /// Returns the last part of a probe's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Entry => "entry",
            Self::Return => "return",
            Self::Point => "point",
        }
    }
}

/// The target of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The text of the kernel or a module.
    Kernel {
        /// The address of the function or instruction.
        address: Gva,
        /// The moment.
        moment: Moment,
    },
    /// A system call.
    SystemCall {
        /// The number.
        number: u32,
        /// Entry or return.
        moment: Moment,
    },
    /// The text of a program or library, by its bytes in the page cache.
    User {
        /// The text.
        text: UserText,
        /// The moment.
        moment: Moment,
    },
    /// A static probe of a program or library, at all its sites in one file.
    Static(StaticText),
    /// A tracepoint of the kernel.
    Tracepoint(TracepointText),
    /// A timer on the host's clock.
    Timer {
        /// The time between two ticks.
        period: Duration,
        /// Whether it ticks on each vCPU, or on the first only.
        every_vcpu: bool,
    },
    /// Accesses to memory.
    Watchpoint(Watchpoint),
}

/// The places of a tracepoint in the kernel's text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TracepointText {
    /// The branches with traps, and their targets.
    pub sites: Vec<(Gva, Gva)>,
    /// All branches of the tracepoint and their targets, taken on the way to its call.
    pub branches: Vec<(Gva, Gva)>,
    /// The functions that call the listeners.
    pub calls: Vec<Gva>,
    /// The instructions that call these functions, as far as the sites were followed. The guest
    /// writes over them when its listeners change. In the meantime their targets may be none of
    /// `calls`.
    pub call_sites: Vec<Gva>,
    /// The address of the pointer to the listeners.
    pub listeners: Gva,
    /// The tracepoint's own structure: mapped memory that stands in for listeners.
    pub structure: Gva,
    /// The record that the kernel writes for the tracepoint's event, if it has one.
    pub record: Option<RecordText>,
}

/// A place in a program's text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UserText {
    /// The path of the file in its mappings.
    pub path: String,
    /// The file in the guest's page cache.
    pub file: CachedFile,
    /// The offset in the file in bytes.
    pub offset: u64,
    /// The current physical address; `None` if the page is not in memory. The trap then waits for
    /// it.
    pub physical: Option<Gpa>,
    /// The code there: at least a whole instruction; empty if it is not in memory.
    pub code: Vec<u8>,
}

/// The places of a static probe in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticText {
    /// The process that is probed; `None` for all.
    pub process: Option<i32>,
    /// The sites; at least one.
    pub sites: Vec<StaticPlace>,
    /// Counters that the program checks for listeners.
    pub semaphores: Vec<SemaphoreText>,
}

/// One site of a static probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticPlace {
    /// The place in the text.
    pub text: UserText,
    /// The link-time address.
    pub address: u64,
    /// The locations of the arguments.
    pub arguments: Arc<[SiteArgument]>,
}

/// A counter of listeners, two bytes in the data of a program or library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SemaphoreText {
    /// The path of the file in its mappings.
    pub path: String,
    /// The file in the guest's page cache.
    pub file: CachedFile,
    /// The offset in the file in bytes.
    pub offset: u64,
}

impl Target {
    pub(crate) fn kind(&self) -> EventKind {
        match self {
            Self::Kernel { moment, .. }
            | Self::SystemCall { moment, .. }
            | Self::User { moment, .. } => match moment {
                Moment::Entry => EventKind::Entry,
                Moment::Return => EventKind::Return,
                Moment::Point => EventKind::Point,
            },
            Self::Tracepoint(_) | Self::Static(_) | Self::Watchpoint(_) => EventKind::Point,
            Self::Timer { .. } => EventKind::Tick,
        }
    }
}
