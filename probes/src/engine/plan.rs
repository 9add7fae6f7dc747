//! The actions at each site. A plan is immutable, is looked up by the site's physical byte, and is
//! replaced as a whole when probes change.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::Gva;

use super::budget::meter::{Account, Payers};
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
    /// The number of the argument that points to the string, from 0.
    pub argument: usize,
    /// The largest number of bytes to read, at most [`MAX_STRING`].
    pub length: usize,
}

/// The values that are recorded at a hit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capture {
    /// The number of arguments, at most [`MAX_ARGUMENTS`]; for static probes at most
    /// [`MAX_STATIC_ARGUMENTS`]. At a return, the result is recorded if this is not 0.
    pub arguments: usize,
    /// Whether the thread's name is recorded.
    pub comm: bool,
    /// The number of kernel stack frames, at most [`MAX_FRAMES`].
    pub kernel_stack: usize,
    /// The number of the program's stack frames, at most [`MAX_FRAMES`].
    pub user_stack: usize,
    /// Strings that arguments point to; at a return, the call's own arguments.
    pub strings: Vec<StringArgument>,
}

impl Default for Capture {
    /// Returns a capture of all arguments and nothing else.
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
    /// Checks whether only arguments are captured.
    fn is_plain(&self) -> bool {
        !self.comm && self.kernel_stack == 0 && self.user_stack == 0 && self.strings.is_empty()
    }

    /// Returns the largest number of words of a record.
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

/// The counters of one enabled probe; each hit is in one of the first three. Exact while the guest
/// is paused.
#[derive(Debug, Default)]
pub(crate) struct ProbeCounters {
    pub(crate) filtered: AtomicU64,
    pub(crate) recorded: AtomicU64,
    pub(crate) dropped: AtomicU64,
    /// Sites that the machine has given up.
    pub(crate) given_up: AtomicU64,
}

/// A probe that a session has enabled, at all its sites.
pub(crate) struct Enabled {
    pub(crate) number: u32,
    pub(crate) kind: EventKind,
    pub(crate) filter: HitFilter,
    pub(crate) capture: Capture,
    /// Whether every admitted hit is recorded, with nothing but arguments.
    pub(crate) is_usual: bool,
    /// The program that runs instead of recording.
    pub(crate) program: Option<Arc<dyn Program>>,
    pub(crate) session: Arc<SessionShared>,
    pub(crate) counters: ProbeCounters,
    /// The account that its hits are charged to.
    pub(crate) account: Arc<Account>,
    /// The time stamp counter when the probe was enabled, or last woken. Calls entered before have
    /// no return event.
    pub(crate) since: AtomicU64,
}

impl Enabled {
    pub(crate) fn new(
        number: u32,
        kind: EventKind,
        filter: HitFilter,
        capture: Capture,
        program: Option<Arc<dyn Program>>,
        account: Arc<Account>,
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
            session: account.session.clone(),
            counters: ProbeCounters::default(),
            account,
            since: since.into(),
        }
    }

    /// Checks whether its hits may hold the machine.
    pub(crate) fn may_hold(&self) -> bool {
        let program = self.program.as_ref();
        program.is_some_and(|program| program.may_hold())
    }
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The probes of one system call.
#[derive(Default, Clone)]
pub(crate) struct SystemCallPlan {
    pub(crate) entries: Vec<Arc<Enabled>>,
    /// Whether the return is probed.
    pub(crate) returns: bool,
}

/// All system calls, by number.
#[derive(Clone)]
pub(crate) struct SystemCalls {
    pub(crate) layout: SystemCallRegisters,
    pub(crate) plans: Vec<SystemCallPlan>,
}

impl SystemCalls {
    /// Returns the numbers of those whose return is probed.
    pub(super) fn returning(&self) -> impl Iterator<Item = u64> {
        let numbered = self.plans.iter().zip(0..);
        numbered
            .filter(|(plan, _)| plan.returns)
            .map(|(_, number)| number)
    }
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

/// The actions at one site.
#[derive(Default, Clone)]
pub(crate) struct SitePlan {
    /// The address that events report if it is not the site's own. For a function whose trap is
    /// behind the bytes that the guest patches, it is the first byte.
    pub(crate) reported: Option<u64>,
    /// Probes that fire at the site.
    pub(crate) probes: Vec<Arc<Enabled>>,
    /// The function that begins at the site, if its return is probed or watched.
    pub(crate) returns: Option<FunctionKey>,
    pub(crate) system_calls: Option<Arc<SystemCalls>>,
    /// Tracepoints, with the target of the branch at the site.
    pub(crate) tracepoints: Vec<(Arc<TracepointPlan>, Gva)>,
    /// Static probes; their notes say where their arguments are.
    pub(crate) statics: Vec<Arc<StaticPlan>>,
    /// The engine's own watches.
    pub(crate) watches: Vec<Arc<dyn Watch>>,
}

impl SitePlan {
    /// Checks whether only probes fire at the site, and possibly a return is expected.
    pub(crate) fn is_plain(&self) -> bool {
        self.system_calls.is_none()
            && self.tracepoints.is_empty()
            && self.statics.is_empty()
            && self.watches.is_empty()
    }

    /// Adds the payers of a hit of vCPU `vcpu` at the site.
    pub(super) fn add_payers(&self, vcpu: usize, payers: &mut Payers) {
        let calls = self.system_calls.iter().flat_map(|calls| &calls.plans);
        let tracepoints = self.tracepoints.iter().map(|(plan, _)| &plan.probe);
        let probes = self.probes.iter().chain(tracepoints);
        let probes = probes.chain(self.statics.iter().map(|plan| &plan.probe));
        for probe in probes.chain(calls.flat_map(|plan| &plan.entries)) {
            payers.add(vcpu, &probe.account);
        }
    }

    /// Checks whether the site has no action left.
    pub(crate) fn is_empty(&self) -> bool {
        self.probes.is_empty()
            && self.returns.is_none()
            && self.system_calls.is_none()
            && self.tracepoints.is_empty()
            && self.statics.is_empty()
            && self.watches.is_empty()
    }
}

/// The actions at a function's return.
#[derive(Default, Clone)]
pub(crate) struct ReturnPlan {
    /// Whether the result is in `pt_regs`, which the stack pointer leads to. Otherwise it is in
    /// RAX.
    pub(crate) result_in_memory: bool,
    pub(crate) probes: Vec<Arc<Enabled>>,
    pub(crate) watches: Vec<Arc<dyn Watch>>,
}

impl ReturnPlan {
    pub(crate) fn is_empty(&self) -> bool {
        self.probes.is_empty() && self.watches.is_empty()
    }

    /// Adds the payers of a hit of vCPU `vcpu` at the function's entry or return.
    pub(super) fn add_payers(&self, vcpu: usize, payers: &mut Payers) {
        for probe in &self.probes {
            payers.add(vcpu, &probe.account);
        }
    }

    /// Removes a probe.
    pub(crate) fn forget(&mut self, enabled: &Arc<Enabled>) {
        self.probes.retain(|probe| !Arc::ptr_eq(probe, enabled));
    }
}
