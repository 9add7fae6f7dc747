//! A running machine, shared by the threads that watch it: the command's own, the control socket's, the trace's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use introspect::Gva;
use probes::kernel_view::{KernelView, KernelViewError};
use vmm::snapshot::SnapshotInfo;
use vmm::{Machine, RunEnd};

use crate::control::{Answer, Command, Info, Stat, Unknown, server};
use crate::guest_kernel::GuestKernel;
use crate::host::Host;
use crate::inspection::Inspector;
use crate::registry::VmName;
use crate::signals::StopSignals;

/// How often a booting guest is paused (for some tens of microseconds) to see how far it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What a kernel calls when it cannot go on.
const PANIC: &str = "panic";

/// A machine and what belongs to it.
pub struct Session {
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
    /// What is known of its kernel's structures.
    pub inspector: Inspector,
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

impl Session {
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

    /// Keeps the registers of the kernel's panic, so that the end of the run can tell of it. Without that, a panic
    /// is only seen as the reset that follows.
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
            if let Some(session) = weak.upgrade() {
                session.machine.stop();
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

    fn snapshot(&self, folder: &std::path::Path) -> Answer {
        if !folder.is_absolute() {
            return Answer::Error {
                message: format!("snapshot {}: not an absolute path", folder.display()),
            };
        }
        if let Some(end) = self.machine.wait(Some(Duration::ZERO)) {
            return Answer::Error {
                message: format!("cannot be saved any more: {end}"),
            };
        }
        let start = Instant::now();
        let paused = self.machine.pause();
        let saved = vmm::snapshot::save(
            &self.host.kvm,
            &self.machine,
            &paused,
            &self.snapshot_info(),
            folder,
        );
        drop(paused);
        let paused_us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        match saved {
            Ok(()) => Answer::Saved { paused_us },
            Err(error) => Answer::Error {
                message: error.to_string(),
            },
        }
    }

    fn stat(&self) -> Stat {
        let stats = self.machine.stats();
        let [unknown_ports, unknown_memory] = [stats.ports, stats.memory].map(|bus| {
            let unknown = bus.unknown.into_iter().map(|u| Unknown {
                address: u.address,
                reads: u.reads,
                writes: u.writes,
            });
            unknown.collect()
        });
        Stat {
            name: self.name.to_string(),
            port_exits: stats.port_exits,
            mmio_exits: stats.mmio_exits,
            traps: stats.traps,
            guest_int3: stats.guest_int3,
            syscalls_repaired: stats.syscalls_repaired,
            completed: stats.completed,
            unknown_ports,
            unknown_memory,
        }
    }
}

impl server::Machine for Arc<Session> {
    fn answer(&self, command: Command) -> Answer {
        match command {
            Command::Info => Answer::Info(self.info()),
            Command::Snapshot { folder } => self.snapshot(&folder),
            Command::Stat => Answer::Stat(self.stat()),
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
            Command::Stop => {
                self.machine.stop();
                Answer::Stopping
            }
        }
    }
}

fn answer<T>(found: Result<T, String>, answer: fn(T) -> Answer) -> Answer {
    found.map_or_else(|message| Answer::Error { message }, answer)
}
