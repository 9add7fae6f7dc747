//! A probe: its name, what it gives, and where it is. Providers make them, sessions enable them.

use std::sync::Arc;
use std::time::Duration;

use introspect::kernel::page_cache::CachedFile;
use introspect::user::static_probes::SiteArgument;
use introspect::{Gpa, Gva};

use crate::event::EventKind;
use crate::name::ProbeName;

/// An argument, as the guest's types describe it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Argument {
    /// Its name; may be empty.
    pub name: String,
    /// Its type, as C writes it.
    pub type_name: String,
    /// Whether it points to text that is there when the function is entered.
    pub is_string: bool,
    /// The type that a translator makes of it for scripts, if the probe declares one.
    pub translated: Option<String>,
}

/// What a probe gives.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Signature {
    /// Its arguments, in order; at a return those of the call.
    pub arguments: Vec<Argument>,
    /// At a return the type of the value.
    pub returns: Option<String>,
}

/// A probe that can be enabled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Its name.
    pub name: ProbeName,
    /// What it gives, if that is known.
    pub signature: Option<Signature>,
    /// Where it is.
    pub target: Target,
}

impl Probe {
    /// What its events are.
    #[must_use]
    pub fn kind(&self) -> EventKind {
        self.target.kind()
    }
}

/// Which moment of a function's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Moment {
    /// It is entered.
    Entry,
    /// It returns.
    Return,
    /// The instruction at the target's address is about to be executed.
    Point,
}

impl Moment {
    /// As the last part of a name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Entry => "entry",
            Self::Return => "return",
            Self::Point => "point",
        }
    }
}

/// Where a probe is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// In the kernel's text, or a module's.
    Kernel {
        /// First byte of the function, or the instruction.
        address: Gva,
        /// When.
        moment: Moment,
    },
    /// A system call.
    SystemCall {
        /// Its number.
        number: u32,
        /// Entry or return.
        moment: Moment,
    },
    /// In a program's or library's text, by its bytes in the page cache.
    User {
        /// The text.
        text: UserText,
        /// When.
        moment: Moment,
    },
    /// A static probe of a program or library, at all its sites in one file.
    Static(StaticText),
    /// A tracepoint of the kernel.
    Tracepoint(TracepointText),
    /// A timer of the host's.
    Timer {
        /// Time between two ticks.
        period: Duration,
        /// On each vCPU, not on the first alone.
        every_vcpu: bool,
    },
}

/// Where a tracepoint is in the kernel's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracepointText {
    /// The branches that are trapped, and where each leads.
    pub sites: Vec<(Gva, Gva)>,
    /// All branches of the tracepoint, which are taken on the way to its call.
    pub branches: Vec<(Gva, Gva)>,
    /// The functions that are called for those who listen.
    pub calls: Vec<Gva>,
    /// The instructions that call them, as far as the sites were followed. The guest writes over these where its listeners change: what they
    /// call in the meantime may be none of `calls`.
    pub call_sites: Vec<Gva>,
    /// Where the pointer to those who listen stands.
    pub listeners: Gva,
    /// The tracepoint's own structure: memory that is there, in place of those who listen.
    pub structure: Gva,
}

/// A place in a program's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserText {
    /// The file's path, as its mappings show it.
    pub path: String,
    /// Its place in the guest's page cache.
    pub file: CachedFile,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Where the byte stands now; `None` if its page is not in memory: the trap then waits for it.
    pub physical: Option<Gpa>,
    /// What stands there: a whole instruction at least; empty if it is not in memory.
    pub code: Vec<u8>,
}

/// Where a static probe is in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticText {
    /// The process that it is meant in; `None` for all.
    pub process: Option<i32>,
    /// Its sites: at least one.
    pub sites: Vec<StaticPlace>,
    /// Counters that the program looks at to know whether anybody listens.
    pub semaphores: Vec<SemaphoreText>,
}

/// One site of a static probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticPlace {
    /// The text.
    pub text: UserText,
    /// Its link-time address.
    pub address: u64,
    /// Where its arguments stand.
    pub arguments: Arc<[SiteArgument]>,
}

/// A counter of listeners, of two bytes, in the data of a program or library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SemaphoreText {
    /// The file's path, as its mappings show it.
    pub path: String,
    /// Its place in the guest's page cache.
    pub file: CachedFile,
    /// Offset in the file, in bytes.
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
            Self::Tracepoint(_) | Self::Static(_) => EventKind::Point,
            Self::Timer { .. } => EventKind::Tick,
        }
    }
}
