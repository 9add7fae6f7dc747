//! A running machine, shared by the threads that watch it: the command's own, the control socket's, the trace's.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use introspect::Gva;
use introspect::memory_budget::{self, Purpose};
use introspect::system::PausedSystem;
use probes::clock::Clock;
use probes::engine::{Engine, EngineLimits};
use probes::kernel_view::{KernelView, KernelViewError};
use probes::name::ProbePattern;
use probes::provider::{self, Traceable};
use probes::{ptrace, trace};
use vmm::machine::Handle;
use vmm::snapshot::{Checks, SnapshotInfo};
use vmm::{Machine, RunEnd};

use crate::control::{
    Answer, Command, Info, ListedProbe, MemoryCount, SiteCount, Stat, Unknown, saving, server,
};
use crate::guest_kernel::GuestKernel;
use crate::host::Host;
use crate::inspection::Inspector;
use crate::registry::VmName;
use crate::signals::StopSignals;
use crate::tail::Tail;

/// How often a booting guest is paused (for some tens of microseconds) to see how far it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What a kernel calls when it cannot go on.
const PANIC: &str = "panic";

/// A machine and what belongs to it.
pub struct Vm {
    /// The machine.
    pub machine: Machine,
    /// Its host.
    pub host: Host,
    /// Its name.
    pub name: VmName,
    /// The command line its kernel was booted with.
    pub command_line: String,
    /// Its kernel, if the file is at hand.
    pub kernel: Option<GuestKernel>,
    /// When it was made.
    pub started: Instant,
    /// The end of what its guest has printed.
    pub console: Tail,
    /// What is known of its kernel's structures.
    pub inspector: Inspector,
    /// Its probe engine, from the first trace on.
    pub engine: OnceLock<Engine>,
    /// Checks of its memory, if it was restored.
    pub checks: Option<Checks>,
    /// Its devices trace(3) and ptrace(3), from when they are first used.
    pub devices: TraceDevices,
}

/// The devices trace(3) and ptrace(3) of a machine.
#[derive(Default)]
pub struct TraceDevices {
    trace: OnceLock<trace::Device>,
    ptrace: OnceLock<ptrace::Device>,
}

/// A VM and the view of its running kernel: the guest as providers and scripts see it.
pub struct TraceableVm<'v> {
    vm: &'v Vm,
    view: &'v KernelView,
}

impl Traceable for TraceableVm<'_> {
    fn view(&self) -> &KernelView {
        self.view
    }

    fn machine(&self) -> Handle {
        self.vm.machine.handle()
    }

    fn inspect(&self, ask: &mut dyn FnMut(PausedSystem<'_>)) -> Result<(), String> {
        let Vm {
            machine, kernel, ..
        } = self.vm;
        self.vm.inspector.look(machine, kernel.as_ref(), ask)
    }
}

/// What a look at a booting guest came to.
pub enum Located {
    /// Its kernel is there.
    Kernel(Box<KernelView>),
    /// The run has ended before.
    Ended(RunEnd),
    /// The time is up.
    TimedOut,
}

impl Vm {
    /// The running kernel, if it has booted far enough and its file is at hand.
    ///
    /// # Errors
    /// If it will never be found.
    pub fn locate(&self) -> Result<Option<KernelView>, KernelViewError> {
        let Some(kernel) = &self.kernel else {
            return Ok(None);
        };
        kernel.locate(&self.machine, &self.machine.pause())
    }

    /// The running kernel, for a client that has asked for something of it.
    ///
    /// # Errors
    /// Why it cannot be traced.
    pub fn kernel_view(&self) -> Result<Arc<KernelView>, String> {
        let view = self.locate().map_err(|error| error.to_string())?.ok_or(
            "the guest's kernel has not booted far enough to be traced, or its file is not at hand",
        )?;
        Ok(Arc::new(view))
    }

    /// Lets the guest run until its kernel can be found; at most until `deadline`.
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

    /// The machine's probe engine. `view` is of its running kernel.
    pub fn engine(&self, view: &Arc<KernelView>) -> Engine {
        let new = || {
            let engine = Engine::new(
                self.machine.handle(),
                view.clone(),
                &EngineLimits::default(),
            );
            let unwinder = self
                .inspector
                .look(&self.machine, self.kernel.as_ref(), |look| {
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

    /// Returns the guest as providers see it. `view` is of its running kernel.
    pub fn traceable<'v>(&'v self, view: &'v KernelView) -> TraceableVm<'v> {
        TraceableVm { vm: self, view }
    }

    /// The machine's device trace(3).
    ///
    /// # Errors
    /// Why its guest cannot be traced now.
    pub fn trace_device(&self) -> Result<trace::Device, String> {
        if let Some(device) = self.devices.trace.get() {
            return Ok(device.clone());
        }
        let engine = self.engine(&self.kernel_view()?);
        let new = || trace::Device::new(engine);
        Ok(self.devices.trace.get_or_init(new).clone())
    }

    /// The machine's device ptrace(3).
    ///
    /// # Errors
    /// As [`trace_device`](Self::trace_device).
    pub fn ptrace_device(&self) -> Result<ptrace::Device, String> {
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

    /// Ticks of the guest's time stamp counter in a second.
    pub fn tsc_hz(&self) -> u64 {
        self.engine.get().map_or(1_000_000_000, Engine::tsc_hz)
    }

    /// Whether the run has ended.
    pub fn has_ended(&self) -> bool {
        self.machine.wait(Some(Duration::ZERO)).is_some()
    }

    /// SHA-256 of the kernel's text as it stands in memory, or why there is none.
    fn text_hash(&self) -> String {
        let view = match self.locate() {
            Ok(Some(view)) => view,
            Ok(None) => return "the guest's kernel has not booted far enough".into(),
            Err(error) => return error.to_string(),
        };
        let paused = self.machine.pause();
        match view.text_hash(&self.machine, &paused) {
            Ok(hash) => hash.to_string(),
            Err(error) => error.to_string(),
        }
    }

    fn list(&self, pattern: &str) -> Result<Vec<ListedProbe>, String> {
        let pattern = match pattern {
            "" => "*:::",
            pattern => pattern,
        };
        let pattern = ProbePattern::parse(pattern).map_err(|error| error.to_string())?;
        let view = self.kernel_view()?;
        let probes = provider::find(&self.traceable(&view), &pattern);
        let probes = probes.map_err(|error| error.to_string())?;
        let listed = probes.into_iter().map(|probe| {
            let argument = |a: &probes::probe::Argument| {
                let space = if a.type_name.ends_with('*') { "" } else { " " };
                format!("{}{space}{}", a.type_name, a.name)
                    .trim_end()
                    .to_owned()
            };
            let arguments = probe.signature.as_ref();
            ListedProbe {
                name: probe.name.to_string(),
                arguments: arguments.map(|s| s.arguments.iter().map(argument).collect()),
                returns: probe.signature.and_then(|s| s.returns),
            }
        });
        Ok(listed.collect())
    }

    /// Keeps the registers of the kernel's panic, so that the end of the run can tell where it was called. That
    /// there was one is known without.
    pub fn watch_panic(&self, view: &KernelView) {
        let Some(address) = view.symbols.address_of(PANIC) else {
            return;
        };
        if let Err(error) = self.machine.watch_panic(Gva(address), view.space) {
            log::warn!("the kernel's panic is not watched: {error}");
        }
    }

    /// Ends the run when a signal asks for it. The watch does not keep the session alive.
    pub fn stop_on(self: &Arc<Self>, signals: &StopSignals) {
        let weak = Arc::downgrade(self);
        signals.on_stop(move || {
            if let Some(vm) = weak.upgrade() {
                vm.machine.stop();
            }
        });
    }

    /// What a snapshot of this machine should say of it.
    pub fn snapshot_info(&self) -> SnapshotInfo {
        SnapshotInfo {
            command_line: self.command_line.clone(),
            kernel: self.kernel.as_ref().map(|k| k.reference.clone()),
        }
    }

    fn info(&self) -> Info {
        Info {
            name: self.name.to_string(),
            pid: std::process::id(),
            memory: self.machine.ram().size(),
            cpus: self.machine.vcpus(),
            kernel: match &self.kernel {
                Some(kernel) => kernel.reference.path.display().to_string(),
                None => "unknown".into(),
            },
            running_s: self.started.elapsed().as_secs(),
        }
    }

    fn stat(&self, hash: bool) -> Stat {
        let stats = self.machine.stats();
        let [unknown_ports, unknown_memory] = [stats.ports, stats.memory].map(|bus| {
            let unknown = bus.unknown.into_iter().map(|u| Unknown {
                address: u.address,
                reads: u.reads,
                writes: u.writes,
            });
            unknown.collect()
        });
        let symbols = self.engine.get().map(|engine| &engine.view().symbols);
        let sites = self.machine.traps().stats().into_iter().map(|site| {
            let symbol = symbols
                .filter(|_| !site.user)
                .and_then(|s| s.resolve(site.address.0));
            SiteCount {
                address: site.address.0,
                symbol: match symbol {
                    Some((symbol, 0)) => symbol.name.to_owned(),
                    Some((symbol, offset)) => format!("{}+{offset:#x}", symbol.name),
                    None => String::new(),
                },
                hits: site.hits,
                stepped: site.stepped,
                suspended: site.suspended,
                given_up: site.given_up,
            }
        });
        Stat {
            text: hash.then(|| self.text_hash()),
            restored_memory: self.checks.as_ref().map(|checks| (&checks.stats()).into()),
            sites: sites.collect(),
            engine: self.engine.get().map(engine_counts).unwrap_or_default(),
            name: self.name.to_string(),
            port_exits: stats.port_exits,
            mmio_exits: stats.mmio_exits,
            traps: stats.traps,
            guest_int3: stats.guest_int3,
            syscalls_repaired: stats.syscalls_repaired,
            completed: stats.completed,
            refused: stats.refused,
            virtio: stats.virtio.iter().map(Into::into).collect(),
            memory: MemoryCount {
                guest: self.machine.ram().size(),
                held: Purpose::ALL
                    .map(|p| (p.name().to_owned(), p.held()))
                    .to_vec(),
                most: memory_budget::LIMIT,
            },
            unknown_ports,
            unknown_memory,
        }
    }
}

fn engine_counts(engine: &Engine) -> Vec<(String, u64)> {
    let stats = engine.stats();
    let counts = [
        ("returns unpaired", stats.unpaired_returns),
        ("returns lost", stats.lost_returns),
        ("calls without return", stats.without_return),
        ("calls waiting", stats.waiting_returns),
        ("hits without process", stats.unknown_task),
        ("traps out of the way", stats.suspended),
        ("traps in freed text", stats.freed),
        ("pages waited for", stats.waiting_pages),
        ("hidden bytes", stats.hidden),
        ("ticks joined", stats.joined_ticks),
        ("without arguments", stats.without_arguments),
        ("traps given up", stats.given_up),
    ];
    counts
        .map(|(name, count)| (name.to_owned(), count))
        .to_vec()
}

impl server::Machine for Arc<Vm> {
    fn stream(&self, command: Command, stream: UnixStream) {
        let served = match command {
            Command::Trace(request) => crate::tracing::stream::serve(self, &request, stream),
            Command::Script(request) => crate::scripting::stream::serve(self, &request, stream),
            _ => Ok(()),
        };
        if let Err(error) = served {
            log::debug!("trace: the client went away: {error}");
        }
    }

    fn save(&self, descriptors: Vec<OwnedFd>, client: &UnixStream) -> Answer {
        answer(saving::save(self, descriptors, client), |saved| {
            Answer::Saved {
                bytes: self.machine.ram().size(),
                paused_us: u64::try_from(saved.paused.as_micros()).unwrap_or(u64::MAX),
            }
        })
    }

    fn answer(&self, command: Command) -> Answer {
        match command {
            Command::Info => Answer::Info(self.info()),
            Command::Stat { hash } => Answer::Stat(Box::new(self.stat(hash))),
            Command::Ps { threads } => {
                let found = self
                    .inspector
                    .ps(&self.machine, self.kernel.as_ref(), threads);
                answer(found, Answer::Ps)
            }
            Command::Maps { process } => {
                let found = self
                    .inspector
                    .maps(&self.machine, self.kernel.as_ref(), &process);
                answer(found, Answer::Maps)
            }
            Command::Sym {
                what,
                process,
                symfs,
            } => {
                let (machine, kernel) = (&self.machine, self.kernel.as_ref());
                let found = self
                    .inspector
                    .sym(machine, kernel, &what, process.as_ref(), symfs);
                answer(found, Answer::Sym)
            }
            Command::Stack { process, symfs } => {
                let (machine, kernel) = (&self.machine, self.kernel.as_ref());
                let found = self.inspector.stack(machine, kernel, &process, symfs);
                answer(found, Answer::Stack)
            }
            Command::List { pattern } => {
                answer(self.list(&pattern), |probes| Answer::Probes { probes })
            }
            // Answered elsewhere.
            Command::Trace(_) | Command::Script(_) | Command::Snapshot => Answer::Error {
                message: "a trace is a stream, and a snapshot needs files".into(),
            },
            Command::Stop => {
                self.machine.stop();
                Answer::Stopping
            }
        }
    }
}

fn answer<T>(found: Result<T, String>, answer: impl FnOnce(T) -> Answer) -> Answer {
    found.map_or_else(|message| Answer::Error { message }, answer)
}
