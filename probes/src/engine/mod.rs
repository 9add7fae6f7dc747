//! The probe engine of one machine: traps, the hit path, sessions.
//!
//! The caller owns the machine and keeps one engine for it (which takes the machine's one
//! [`vmm::TrapSink`]), makes a [`Session`] for everyone who probes, and drains it often enough.
//! Sessions share traps and see nothing of each other.
//!
//! Returns: at a function's entry its return address gets a return trap. The trap stays until no
//! probe of the function's return is left. A hit there counts as a return only if the same task
//! waits for it with the same stack pointer. Other code that passes by is counted and ignored. So
//! calls entered before the probe was enabled have no return event. Neither have `__switch_to` (the
//! current task changes inside) and an `execve` by which a thread takes over its leader's number.

mod arguments;
mod arming;
mod budget;
mod calls;
mod current;
mod filter;
mod guest_files;
mod guest_modules;
mod guest_pages;
mod guest_processes;
mod guest_text;
mod hit;
mod listeners;
mod plan;
mod processes;
mod program;
mod return_sites;
mod return_targets;
mod returns;
mod seen;
mod semaphores;
mod session;
mod sink;
mod splices;
mod stacks;
mod strings;
mod system_call;
#[cfg(test)]
mod tests;
mod text_locks;
mod timers;
mod tracepoint;
mod user_text;
mod watch;
mod watchlist;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use introspect::stack::kernel::KernelUnwinder;
use introspect::{CpuRegisters, Gva};
use vmm::machine::Handle;
use vmm::sharded_map::{Changes, ShardedMap};

pub use crate::doorbell::{LONGEST_WAIT, WatchedStream, Woken};
pub(crate) use arming::ArmedAt;
pub use arming::EnableError;
pub use budget::{Cost, SessionCost, Share, ShareError, Unwatched};
pub use filter::{Filter, Match};
pub use guest_files::{NewFile, NewFiles};
pub use guest_modules::{NewModule, NewModules};
pub use plan::{Capture, StringArgument};
pub use program::{HitOutcome, ProbeHit, Program, TaskIdentity};
pub use session::{ProbeStats, RingSize, Session, SessionError, SessionStats, Waiter};

use crate::kernel_view::KernelView;
use crate::kernel_view::entry_function;
use crate::syscall_entry::SystemCallRegisters;
use budget::ExitTicks;
use budget::keeper::Keeper;
use budget::meter::{Bell, meters};
use current::Tasks;
use filter::HitFilter;
use guest_files::FileListeners;
use guest_modules::ModuleListeners;
use guest_pages::GuestPages;
use guest_processes::Followers;
use hit::{Counters, HitPath};
use processes::Followed;
use return_sites::ReturnSites;
use return_targets::ReturnTargets;
use returns::PendingReturns;
use semaphores::Semaphores;
use sink::Sink;
use stacks::Stacks;
use text_locks::TextLocks;
use user_text::UserSites;

/// Limits of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineLimits {
    /// The largest number of return addresses that get a trap, for the kernel and for programs
    /// each.
    pub return_sites: usize,
    /// The approximate number of calls that can wait for their return at a time; at least 1024.
    pub pending_returns: usize,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            return_sites: 1 << 16,
            pending_returns: 1 << 15,
        }
    }
}

/// The counters of an engine, over all its sessions. Exact while the machine is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Hits of return traps by code that returned from no probed call.
    pub unpaired_returns: u64,
    /// Calls whose return will not be seen: they never returned, or too many waited.
    pub lost_returns: u64,
    /// Calls whose return address could not get a trap.
    pub without_return: u64,
    /// The number of times that a trap was suspended while the guest read or wrote its own text.
    /// Hits may have been missed then.
    pub suspended: u64,
    /// Those of them in programs.
    pub suspended_in_programs: u64,
    /// Traps in programs that are suspended now. Their hits are missed for as long.
    pub suspended_now_in_programs: u64,
    /// Traps evicted because the guest freed their text.
    pub freed: u64,
    /// Sites in programs' text whose page is not in memory. Their traps wait for it.
    pub waiting_pages: u64,
    /// Trap bytes that were restored in what the guest has read or copied of programs' text.
    pub hidden: u64,
    /// Timer ticks that came before a vCPU had taken the previous one. The two count as one.
    pub joined_ticks: u64,
    /// Hits of tracepoints and of programs' static probes with unknown arguments. Their events have
    /// zeros instead.
    pub without_arguments: u64,
    /// Sites in programs that were given up: this host could not execute their instruction in the
    /// state that the program was in.
    pub given_up: u64,
    /// Calls that have not returned yet.
    pub waiting_returns: u64,
    /// Hits at which the kernel's current task could not be read. They belong to no process.
    pub unknown_task: u64,
}

/// The state that an engine shares with its sessions.
struct Inner {
    machine: Handle,
    view: Arc<KernelView>,
    path: Arc<HitPath>,
    /// `None` if the kernel's page cache layout is not known.
    pages: Option<Arc<GuestPages>>,
    /// The function that all system calls pass; `None` in a kernel without one.
    system_calls: Option<(Gva, SystemCallRegisters)>,
    armed: Mutex<arming::Armed>,
    text_locks: TextLocks,
    /// Whether sites are suspended for a change of the guest's text that had begun before the first
    /// probe.
    keeps_free: Arc<AtomicBool>,
    followers: Followers,
    file_listeners: Arc<FileListeners>,
    module_listeners: ModuleListeners,
    ticker: timers::Ticker,
    keeper: Keeper,
    /// The host's time stamp counter when the engine was made.
    began: u64,
}

/// The engine of one machine. Clones share it. When the last clone and the last session are
/// dropped, the guest holds no trap.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

impl Engine {
    /// Creates an engine for a machine whose kernel is known. It takes over the machine's traps.
    #[must_use]
    pub fn new(machine: Handle, view: Arc<KernelView>, limits: &EngineLimits) -> Self {
        let paused = machine.pause();
        let cpu = |vcpu| machine.cpu_state(&paused, vcpu);
        let bases: Vec<Option<Gva>> = (0..machine.vcpus())
            .map(|vcpu| Some(cpu(vcpu)?.kernel_gs_base()).filter(|base| base.0 >> 63 == 1))
            .collect();
        let tsc_hz = machine.tsc_hz(&paused);
        drop(paused);
        let symbol = |name| view.kernel.symbols.address_of(name);
        let entries = symbol("__entry_text_start").zip(symbol("__entry_text_end"));
        let entries = entries.map_or(0..0, |(start, end)| start..end);
        let types = view.kernel.btf();
        let pages = types.and_then(|btf| match GuestPages::new(btf, &view) {
            Ok(pages) => Some(Arc::new(pages)),
            Err(error) => {
                log::info!("pages of programs' text are not watched: {error}");
                None
            }
        });
        let system_calls = entry_function(&view);
        let changes = Changes::default();
        let path = Arc::new(HitPath {
            pages: pages.clone(),
            user_sites: UserSites::default(),
            semaphores: Semaphores::default(),
            plans: ShardedMap::counted_by(&changes),
            return_plans: ShardedMap::counted_by(&changes),
            timers: ArcSwap::default(),
            watchpoints: ArcSwap::default(),
            tasks: Tasks::new(
                view.tasks.as_ref().ok().copied(),
                view.kernel.space,
                entries,
                machine.ram(),
                &bases,
            ),
            stacks: Stacks::new(view.kernel.space),
            space: view.kernel.space,
            space_lasts: view.kernel.space_lasts,
            returns: PendingReturns::new(limits.pending_returns),
            kernel_returns: ReturnSites::new(limits.return_sites, &changes),
            user_returns: ReturnSites::new(limits.return_sites, &changes),
            return_targets: ReturnTargets::new(view.clone()),
            counters: Counters::default(),
            tsc_hz,
            changes,
            seen: bases.iter().map(|_| Default::default()).collect(),
            meters: meters(bases.len()),
            exit_ticks: ExitTicks::of(machine.profile(), tsc_hz),
            bell: Bell::default(),
            active: true.into(),
        });
        machine.set_sink(Some(Box::new(Sink(path.clone()))));
        Self(Arc::new(Inner {
            ticker: timers::Ticker::new(machine.clone()),
            keeper: Keeper::default(),
            began: vmm::host_tsc(),
            text_locks: TextLocks::new(&view),
            keeps_free: Arc::default(),
            machine,
            view,
            system_calls,
            path,
            pages,
            armed: Mutex::default(),
            followers: Followers::default(),
            file_listeners: Arc::default(),
            module_listeners: ModuleListeners::default(),
        }))
    }

    /// Creates a session without probes.
    ///
    /// # Errors
    /// If rings of this size cannot be allocated.
    pub fn session(&self, size: RingSize) -> Result<Session, SessionError> {
        Session::new(self.clone(), size)
    }

    /// Sets the unwinder for kernel stacks. The first one stays.
    pub fn set_unwinder(&self, unwinder: KernelUnwinder) {
        self.0.path.stacks.set_unwinder(unwinder);
    }

    /// Returns the kernel that is probed.
    #[must_use]
    pub fn view(&self) -> &KernelView {
        &self.0.view
    }

    /// Returns the machine.
    #[must_use]
    pub fn machine(&self) -> &Handle {
        &self.0.machine
    }

    /// Returns the frequency of the guest's time stamp counter in Hz.
    #[must_use]
    pub fn tsc_hz(&self) -> u64 {
        self.0.path.tsc_hz
    }

    /// Returns the counters of all sessions together.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let path = &self.0.path;
        EngineStats {
            unpaired_returns: load(&path.counters.unpaired),
            without_return: load(&path.counters.without_return),
            suspended: load(&path.counters.suspended),
            suspended_in_programs: load(&path.counters.suspended_in_programs),
            suspended_now_in_programs: self.0.machine.traps().suspended_user() as u64,
            freed: load(&path.counters.freed),
            waiting_pages: path.user_sites.waiting() as u64,
            hidden: load(&path.counters.hidden),
            joined_ticks: self.0.ticker.joined(),
            without_arguments: load(&path.counters.without_arguments),
            given_up: load(&path.counters.given_up),
            lost_returns: path.returns.lost(),
            waiting_returns: path.returns.waiting(),
            unknown_task: load(&path.tasks.unknown),
        }
    }

    /// Releases what the vCPUs' lookaside lists still hold of disabled probes: their rings and
    /// programs.
    fn let_go(&self) {
        self.0.path.let_go();
    }

    fn vcpus(&self) -> usize {
        self.0.machine.vcpus()
    }

    fn hit_filter(&self, filter: Filter) -> HitFilter {
        let followed = match &filter.pids {
            Match::In(pids) if filter.follow => {
                let followed = Followed::new(pids.iter().copied());
                let followers = &self.0.followers;
                let mut followers = followers.lock().unwrap_or_else(PoisonError::into_inner);
                followers.retain(Followed::is_used);
                followers.push(followed.clone());
                drop(followers);
                self.watch_processes();
                Some(followed)
            }
            _ => None,
        };
        HitFilter::new(filter, followed)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Sessions hold the engine, so none is left, and their traps are disarmed.
        self.path.active.store(false, Ordering::Relaxed);
        self.machine.set_sink(None);
    }
}
