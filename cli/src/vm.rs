//! A running machine, shared by the threads that serve it: the command's own, the control socket's,
//! the trace's.

mod moments;

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use introspect::Gva;
use introspect::system::{PausedSystem, System};
use probes::clock::Clock;
use probes::engine::{Engine, EngineLimits};
use probes::kernel_view::{KernelView, KernelViewError};
use probes::provider::{Inspectable, Traceable};
use probes::text_hash::TextHash;
use trace_devices::{ptrace, trace};
use vmm::machine::Handle;
use vmm::snapshot::{self, Checks, KernelReference, Saved, SnapshotInfo};
use vmm::{Machine, RunEnd};

use crate::guest_kernel::GuestKernel;
use crate::history::{self, KeepError, Keeper};
use crate::host::Host;
use crate::inspection::{Inspection, Inspector};
use crate::panic_witness;
use crate::passt::Watch;
use crate::protocol::cost::Budget;
use crate::protocol::error::{ErrorKind, RequestError};
use crate::protocol::inspection::{Maps, ProcessName, Processes, Stacks};
use crate::registry::VmName;
use crate::signals::StopSignals;
use crate::tail::Tail;

/// The interval at which a booting guest is paused (for some tens of microseconds) to check its
/// progress.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The time that a guest may take to read a typed line.
const TYPING_LIMIT: Duration = Duration::from_secs(60);
/// The interval at which a typed line is offered to a full serial port.
const TYPING_INTERVAL: Duration = Duration::from_millis(1);

/// The function that a kernel calls when it cannot go on.
const PANIC: &str = "panic";

/// A machine with all that belongs to it.
pub struct Vm {
    /// The machine.
    pub(crate) machine: Machine,
    /// Its host.
    pub(crate) host: Host,
    /// Its name.
    pub(crate) name: VmName,
    /// The command line its kernel was booted with.
    pub(crate) command_line: String,
    /// The reference to its kernel's file, for snapshots, whether that is at hand or not.
    pub(crate) reference: Option<KernelReference>,
    /// Its kernel, if the file is at hand.
    pub(crate) kernel: Option<GuestKernel>,
    /// When it was made.
    pub(crate) started: Instant,
    /// The end of what its guest has printed.
    pub(crate) console: Tail,
    /// The knowledge of its kernel's structures.
    pub(crate) inspector: Inspector,
    /// The share of its vCPUs' time that all traces together may cost.
    pub(crate) budget: Option<Budget>,
    /// Its probe engine, from the first trace on.
    pub(crate) engine: OnceLock<Engine>,
    /// Checks of its memory, if it was restored.
    pub(crate) checks: Option<Checks>,
    /// Its devices trace(3) and ptrace(3), from when they are first used.
    pub(crate) devices: TraceDevices,
    /// The watch for the end of its network's program.
    pub(crate) network: Option<Watch>,
    /// The keeper of its moments.
    pub(crate) keeper: Keeper,
}

impl fmt::Debug for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("name", &self.name)
            .field("command_line", &self.command_line)
            .finish_non_exhaustive()
    }
}

/// The devices trace(3) and ptrace(3) of a machine.
#[derive(Default)]
pub struct TraceDevices {
    trace: OnceLock<trace::Device>,
    ptrace: OnceLock<ptrace::Device>,
}

/// A VM and the view of its running kernel: the guest as providers and scripts see it.
#[derive(Debug)]
pub struct TraceableVm<'v> {
    vm: &'v Vm,
    view: &'v KernelView,
}

impl Inspectable for TraceableVm<'_> {
    fn view(&self) -> &KernelView {
        self.view
    }

    fn running(&self) -> Option<Handle> {
        Some(self.machine())
    }

    fn inspect(&self, ask: &mut dyn FnMut(PausedSystem<'_>)) -> Result<(), String> {
        let looked = self.vm.inspection().look(ask);
        looked.map_err(|error| error.message)
    }
}

impl Traceable for TraceableVm<'_> {
    fn machine(&self) -> Handle {
        self.vm.machine.handle()
    }
}

/// A question or a trace that the guest does not allow.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GuestError {
    /// The run has ended.
    #[error("the guest has ended: {0}")]
    Ended(RunEnd),
    /// The guest has not booted far enough in time.
    #[error("the guest has not booted far enough after {} s", .0.as_secs())]
    NotBooted(Duration),
    /// The request cannot be carried out.
    #[error(transparent)]
    Refused(#[from] RequestError),
}

/// The result of waiting for a booting guest.
#[derive(Debug)]
pub enum Located {
    /// The kernel was found.
    Kernel(Box<KernelView>),
    /// The run ended first.
    Ended(RunEnd),
    /// The time is up.
    TimedOut,
}

impl Vm {
    /// Returns the VM of a machine that has not started, and watches for panics of its kernel.
    pub(crate) fn new(
        host: Host,
        name: VmName,
        machine: Machine,
        kernel: Option<GuestKernel>,
        console: Tail,
    ) -> Self {
        panic_witness::watch(&machine, kernel.as_ref());
        Self {
            machine,
            host,
            name,
            command_line: String::new(),
            reference: kernel.as_ref().map(|kernel| kernel.reference.clone()),
            kernel,
            started: Instant::now(),
            console,
            inspector: Inspector::default(),
            budget: None,
            engine: OnceLock::new(),
            checks: None,
            devices: TraceDevices::default(),
            network: None,
            keeper: Keeper::default(),
        }
    }

    /// Lets the guest run until its kernel can be traced.
    ///
    /// # Errors
    /// If the guest ends before, does not come so far within `limit`, or runs no kernel that can be
    /// made out.
    pub fn wait_booted(&self, limit: Duration) -> Result<(), GuestError> {
        let located = self.wait_for_kernel(Instant::now().checked_add(limit));
        match located.map_err(RequestError::from)? {
            Located::Kernel(_) => Ok(()),
            Located::Ended(end) => Err(GuestError::Ended(end)),
            Located::TimedOut => Err(GuestError::NotBooted(limit)),
        }
    }

    /// Waits for the end of the run, for at most `limit`. Returns `None` if the guest still runs.
    pub fn wait(&self, limit: Option<Duration>) -> Option<RunEnd> {
        self.machine.wait(limit)
    }

    /// Ends the run.
    pub fn stop(&self) {
        self.machine.stop();
    }

    /// Returns the machine: its registers, memory, traps and counts.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the command line that the kernel was booted with, words added for the host included.
    pub fn command_line(&self) -> &str {
        &self.command_line
    }

    /// Returns the last lines that the guest has printed on its serial console.
    pub fn console_lines(&self) -> Vec<String> {
        self.console.lines()
    }

    /// Types a line at the guest's serial console, and a newline behind it.
    ///
    /// # Errors
    /// If the guest ends, or does not read it within a minute.
    pub fn type_line(&self, line: &str) -> Result<(), GuestError> {
        self.type_line_within(line, TYPING_LIMIT)
    }

    /// Types a line as [`Self::type_line`] does, in at most `limit`.
    ///
    /// # Errors
    /// If the guest ends, or does not read it in that time.
    pub fn type_line_within(&self, line: &str, limit: Duration) -> Result<(), GuestError> {
        let deadline = Instant::now().checked_add(limit);
        let line = format!("{line}\n");
        let mut rest = line.as_bytes();
        loop {
            let room = self.machine.serial_input(rest);
            rest = rest.get(room..).unwrap_or_default();
            if rest.is_empty() {
                return Ok(());
            }
            if let Some(end) = self.machine.wait(Some(TYPING_INTERVAL)) {
                return Err(GuestError::Ended(end));
            }
            if deadline.is_some_and(|at| Instant::now() > at) {
                let why = "the guest's console takes no input";
                return Err(RequestError::new(ErrorKind::Busy, why).into());
            }
        }
    }

    /// Lists the guest's processes. The guest is paused meanwhile.
    ///
    /// # Errors
    /// If the kernel's tasks cannot be read.
    pub fn processes(&self) -> Result<Processes, GuestError> {
        Ok(self.inspection().ps(false)?)
    }

    /// Lists the mappings of a process, as `/proc/PID/maps` has them.
    ///
    /// # Errors
    /// If there is no such process, or its memory cannot be read.
    pub fn maps(&self, process: &ProcessName) -> Result<Maps, GuestError> {
        Ok(self.inspection().maps(process)?)
    }

    /// Reads the stacks of all threads of a process, in the kernel and in the program. `symfs` is a
    /// folder with copies of the guest's files, for symbols that are not in its memory.
    ///
    /// # Errors
    /// If there is no such process, or its tasks cannot be read.
    pub fn stacks(
        &self,
        process: &ProcessName,
        symfs: Option<&Path>,
    ) -> Result<Stacks, GuestError> {
        let symfs = symfs.map(Path::to_path_buf);
        Ok(self.inspection().stack(process, symfs)?)
    }

    /// Pauses the guest and returns the result of `ask` on the structures of its kernel.
    ///
    /// # Errors
    /// If the kernel cannot be recognised.
    pub fn look<T>(&self, ask: impl FnOnce(PausedSystem<'_>) -> T) -> Result<T, GuestError> {
        Ok(self.inspection().look(ask)?)
    }

    /// Returns the readers of the running kernel's structures. They also read a copy of its memory.
    ///
    /// # Errors
    /// If the kernel cannot be recognised.
    pub fn system(&self) -> Result<Arc<System>, GuestError> {
        Ok(self.inspection().system()?)
    }

    /// Returns SHA-256 of the kernel's text as it stands in guest memory.
    ///
    /// # Errors
    /// If the guest has not booted far enough, or its text is not mapped.
    pub fn text_hash(&self) -> Result<TextHash, GuestError> {
        let view = self.kernel_view()?;
        let paused = self.machine.pause();
        let hash = view.text_hash(&self.machine, &paused);
        Ok(hash.map_err(|error| RequestError::new(ErrorKind::Unreadable, error))?)
    }

    /// Saves the VM to a new folder while the guest runs on, but for some milliseconds.
    ///
    /// # Errors
    /// If the folder exists or cannot be written, or KVM does not give its state.
    pub fn snapshot(&self, folder: &Path) -> Result<Saved, KeepError> {
        if let Some(kept) = self.present()? {
            history::write(&kept, folder)?;
            let paused = kept.info().paused;
            return Ok(Saved { paused });
        }
        let info = self.snapshot_info();
        Ok(snapshot::save(
            &self.host.kvm,
            &self.machine,
            &info,
            folder,
        )?)
    }

    /// Returns the running kernel, if it has booted far enough and its file is at hand.
    ///
    /// # Errors
    /// If it will never be found.
    pub fn locate(&self) -> Result<Option<KernelView>, KernelViewError> {
        let Some(kernel) = &self.kernel else {
            return Ok(None);
        };
        kernel.locate(&self.machine, &self.machine.pause())
    }

    /// Returns the running kernel, for a client's request.
    ///
    /// # Errors
    /// The reason why it cannot be traced.
    pub fn kernel_view(&self) -> Result<Arc<KernelView>, RequestError> {
        let view = self.locate()?.ok_or_else(|| {
            let why = "the guest's kernel has not booted far enough to be traced, or its file is not at hand";
            RequestError::new(ErrorKind::NoKernel, why)
        })?;
        Ok(Arc::new(view))
    }

    /// Lets the guest run until its kernel can be found, or until `deadline`.
    ///
    /// # Errors
    /// If it will never be found.
    pub fn wait_for_kernel(&self, deadline: Option<Instant>) -> Result<Located, KernelViewError> {
        loop {
            if let Some(view) = self.locate()? {
                return Ok(Located::Kernel(Box::new(view)));
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(Located::TimedOut);
            }
            let step = left.map_or(LOOK_INTERVAL, |left| left.min(LOOK_INTERVAL));
            if let Some(end) = self.machine.wait(Some(step)) {
                return Ok(Located::Ended(end));
            }
        }
    }

    /// Returns the machine's probe engine. `view` is of its running kernel.
    pub fn engine(&self, view: &Arc<KernelView>) -> Engine {
        let new = || {
            let engine = Engine::new(
                self.machine.handle(),
                view.clone(),
                &EngineLimits::default(),
            );
            engine.set_budget(self.budget.map(|budget| budget.0));
            let unwinder = self.inspection().look(|look| {
                let modules = look
                    .modules()
                    .map(|modules| modules.items)
                    .unwrap_or_default();
                look.kernel_unwinder(&modules)
            });
            match unwinder {
                Ok(Ok(unwinder)) => engine.set_unwinder(unwinder),
                Ok(Err(lost)) => log::info!("stacks have one frame: {lost}"),
                Err(why) => log::info!("stacks have one frame: {why}"),
            }
            engine
        };
        self.engine.get_or_init(new).clone()
    }

    /// Returns the inspection of its processes and structures.
    pub fn inspection(&self) -> Inspection<'_> {
        Inspection::new(&self.machine, self.kernel.as_ref(), &self.inspector)
    }

    /// Returns the guest as providers see it. `view` is of its running kernel.
    pub fn traceable<'v>(&'v self, view: &'v KernelView) -> TraceableVm<'v> {
        TraceableVm { vm: self, view }
    }

    /// Returns the guest in which the engine has probes, if it has any.
    pub(crate) fn traced(&self) -> Option<TraceableVm<'_>> {
        Some(self.traceable(self.engine.get()?.view()))
    }

    /// Returns the machine's device trace(3).
    ///
    /// # Errors
    /// The reason why its guest cannot be traced now.
    pub fn trace_device(&self) -> Result<trace::Device, RequestError> {
        if let Some(device) = self.devices.trace.get() {
            return Ok(device.clone());
        }
        let engine = self.engine(&self.kernel_view()?);
        let new = || trace::Device::new(engine);
        Ok(self.devices.trace.get_or_init(new).clone())
    }

    /// Returns the machine's device ptrace(3).
    ///
    /// # Errors
    /// As [`trace_device`](Self::trace_device).
    pub fn ptrace_device(&self) -> Result<ptrace::Device, RequestError> {
        if let Some(device) = self.devices.ptrace.get() {
            return Ok(device.clone());
        }
        let engine = self.engine(&self.kernel_view()?);
        let new = || {
            let clock = Clock::now(engine.tsc_hz());
            ptrace::Device::new(engine, clock)
        };
        Ok(self.devices.ptrace.get_or_init(new).clone())
    }

    /// Returns the ticks per second of the guest's time stamp counter.
    pub fn tsc_hz(&self) -> u64 {
        self.engine.get().map_or(1_000_000_000, Engine::tsc_hz)
    }

    /// Checks whether the run has ended.
    pub fn has_ended(&self) -> bool {
        self.machine.wait(Some(Duration::ZERO)).is_some()
    }

    /// Keeps the registers of the kernel's panic, so that the end of the run can report its place.
    /// The panic itself is noticed without them.
    pub fn watch_panic(&self, view: &KernelView) {
        let Some(address) = view.kernel.symbols.address_of(PANIC) else {
            return;
        };
        if let Err(error) = self.machine.watch_panic(Gva(address), view.kernel.space) {
            log::warn!("the kernel's panic is not watched: {error}");
        }
    }

    /// Ends the run on a signal. The watch does not keep the VM alive.
    pub fn stop_on(self: &Arc<Self>, signals: &StopSignals) {
        let weak = Arc::downgrade(self);
        signals.on_stop(move || {
            if let Some(vm) = weak.upgrade() {
                vm.machine.stop();
            }
        });
    }

    /// Returns the description of this machine for a snapshot.
    pub fn snapshot_info(&self) -> SnapshotInfo {
        SnapshotInfo {
            command_line: self.command_line.clone(),
            kernel: self.reference.clone(),
        }
    }
}
