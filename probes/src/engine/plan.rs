//! What the hit path does at each site: immutable, looked up by the site's physical byte, replaced whole when probes change.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::Gva;

use super::filter::HitFilter;
use super::program::Program;
use super::returns::FunctionKey;
use super::session::SessionShared;
use super::watch::Watch;
use crate::event::{EventKind, MAX_ARGUMENTS, MAX_FRAMES, MAX_STATIC_ARGUMENTS, MAX_STRING};
use crate::probe::{StaticPlace, TracepointText};
use crate::syscall_entry::SystemCallRegisters;

/// A string argument to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StringArgument {
    /// Number of the argument that points to it, from 0.
    pub argument: usize,
    /// Most bytes of it, at most [`MAX_STRING`].
    pub length: usize,
}

/// What is kept of a hit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capture {
    /// How many arguments, at most [`MAX_ARGUMENTS`], of static probes [`MAX_STATIC_ARGUMENTS`]. At a return the value returned is kept if this is not 0.
    pub arguments: usize,
    /// The thread's name.
    pub comm: bool,
    /// Frames of the kernel stack, at most [`MAX_FRAMES`].
    pub kernel_stack: usize,
    /// Frames of the program's stack, at most [`MAX_FRAMES`].
    pub user_stack: usize,
    /// Strings that arguments point to. At a return they are those of the call's own arguments.
    pub strings: Vec<StringArgument>,
}

impl Default for Capture {
    /// All arguments and nothing else.
    fn default() -> Self {
        Self {
            arguments: MAX_ARGUMENTS,
            comm: false,
            kernel_stack: 0,
            user_stack: 0,
            strings: Vec::new(),
        }
    }
}

impl Capture {
    /// Whether it is of nothing but arguments.
    fn is_plain(&self) -> bool {
        !self.comm && self.kernel_stack == 0 && self.user_stack == 0 && self.strings.is_empty()
    }

    /// Words that a record of it takes at most.
    pub(crate) fn words(&self) -> usize {
        let strings = self.strings.iter();
        let text: usize = strings
            .map(|s| 1 + s.length.min(MAX_STRING).div_ceil(8))
            .sum();
        crate::event::HEADER_WORDS
            + self.arguments.min(MAX_STATIC_ARGUMENTS)
            + if self.comm { 2 } else { 0 }
            + self.kernel_stack.min(MAX_FRAMES)
            + self.user_stack.min(MAX_FRAMES)
            + text
    }
}

/// Counts of one enabled probe; each hit is in one of them. Exact while the guest is paused.
#[derive(Debug, Default)]
pub(crate) struct ProbeCounters {
    pub(crate) filtered: AtomicU64,
    pub(crate) recorded: AtomicU64,
    pub(crate) dropped: AtomicU64,
    /// Its places that the machine has given up.
    pub(crate) given_up: AtomicU64,
}

/// One probe that a session has enabled, at all its places.
pub(crate) struct Enabled {
    pub(crate) number: u32,
    pub(crate) kind: EventKind,
    pub(crate) filter: HitFilter,
    pub(crate) capture: Capture,
    /// Whether it records all that its filter lets through, and nothing but arguments.
    pub(crate) is_usual: bool,
    /// Runs in place of the hit being recorded.
    pub(crate) program: Option<Arc<dyn Program>>,
    pub(crate) session: Arc<SessionShared>,
    pub(crate) counters: ProbeCounters,
    /// Time stamp counter when it was enabled: calls entered before have no return here.
    pub(crate) since: u64,
}

impl Enabled {
    pub(crate) fn new(
        number: u32,
        kind: EventKind,
        filter: HitFilter,
        capture: Capture,
        program: Option<Arc<dyn Program>>,
        session: Arc<SessionShared>,
        since: u64,
    ) -> Self {
        let is_usual = program.is_none()
            && capture.is_plain()
            && !filter.has_rate()
            && kind != EventKind::Tick;
        Self {
            number,
            kind,
            filter,
            capture,
            is_usual,
            program,
            session,
            counters: ProbeCounters::default(),
            since,
        }
    }
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The probes of one system call.
#[derive(Default, Clone)]
pub(crate) struct SystemCallPlan {
    pub(crate) entries: Vec<Arc<Enabled>>,
    /// Whether its return is probed.
    pub(crate) returns: bool,
}

/// All system calls, by number.
#[derive(Clone)]
pub(crate) struct SystemCalls {
    pub(crate) layout: SystemCallRegisters,
    pub(crate) plans: Vec<SystemCallPlan>,
}

/// A tracepoint with a branch at a site.
pub(crate) struct TracepointPlan {
    pub(crate) text: TracepointText,
    pub(crate) probe: Arc<Enabled>,
}

/// A site of a static probe.
pub(crate) struct StaticPlan {
    pub(crate) place: StaticPlace,
    pub(crate) probe: Arc<Enabled>,
}

/// What happens at one site.
#[derive(Default, Clone)]
pub(crate) struct SitePlan {
    /// What events say that the site is at, where this is not its own address: the first byte of a function whose trap stands behind
    /// what the guest patches.
    pub(crate) reported: Option<u64>,
    /// Probes that fire here.
    pub(crate) probes: Vec<Arc<Enabled>>,
    /// The function that is entered here, if its return is probed or watched.
    pub(crate) returns: Option<FunctionKey>,
    pub(crate) system_calls: Option<Arc<SystemCalls>>,
    /// Tracepoints, and where the branch leads that stands here.
    pub(crate) tracepoints: Vec<(Arc<TracepointPlan>, Gva)>,
    /// Static probes, which have their arguments where their notes say.
    pub(crate) statics: Vec<Arc<StaticPlan>>,
    /// The engine's own.
    pub(crate) watches: Vec<Arc<dyn Watch>>,
}

impl SitePlan {
    /// Whether nothing but probes fires here, and a return may be waited for.
    pub(crate) fn is_plain(&self) -> bool {
        self.system_calls.is_none()
            && self.tracepoints.is_empty()
            && self.statics.is_empty()
            && self.watches.is_empty()
    }

    /// Whether nothing happens here any more.
    pub(crate) fn is_empty(&self) -> bool {
        self.probes.is_empty()
            && self.returns.is_none()
            && self.system_calls.is_none()
            && self.tracepoints.is_empty()
            && self.statics.is_empty()
            && self.watches.is_empty()
    }
}

/// What happens when a function returns.
#[derive(Default, Clone)]
pub(crate) struct ReturnPlan {
    /// The result is in `pt_regs`, which the stack pointer leads to; else it is in RAX.
    pub(crate) result_in_memory: bool,
    pub(crate) probes: Vec<Arc<Enabled>>,
    pub(crate) watches: Vec<Arc<dyn Watch>>,
}

impl ReturnPlan {
    pub(crate) fn is_empty(&self) -> bool {
        self.probes.is_empty() && self.watches.is_empty()
    }

    /// Takes a probe away.
    pub(crate) fn forget(&mut self, enabled: &Arc<Enabled>) {
        self.probes.retain(|probe| !Arc::ptr_eq(probe, enabled));
    }
}
