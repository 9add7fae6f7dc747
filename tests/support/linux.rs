//! A Linux machine and its output.

use std::sync::Arc;
use std::time::{Duration, Instant};

use exotrace::Vm;
use introspect::system::{PausedSystem, System};
use introspect::x86_64::CpuState;
use introspect::{Gpa, PhysicalMemory};
use probes::engine::Engine;
use probes::kernel_view::KernelView;
use probes::text_hash::TextHash;
use vmm::boot::EntryProtocol;
use vmm::machine::{Machine, Paused, RunEnd, VirtioConfig};

use crate::host::Host;
use crate::kernel::Kernel;
use crate::serial::SerialLog;

/// Returns the guest memory in bytes: distributions' kernels need more than our own.
pub(crate) fn memory() -> u64 {
    match Kernel::given() {
        Some(_) => 256 << 20,
        None => 64 << 20,
    }
}
/// The interval at which a running machine is polled for its end while its output is waited for.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Returns the command line of a guest with a shell.
pub(crate) fn command_line() -> String {
    let own = guest::build::kernel::cmdline();
    match Kernel::given() {
        // Debian's kernels since 6.12 let only a tracer write to a program's text by /proc/PID/mem.
        Some(_) => format!("{own} proc_mem.force_override=always"),
        None => own,
    }
}

/// A machine that runs one of the tests' kernels.
pub struct Linux {
    /// The kernel.
    pub kernel: &'static Kernel,
    /// The machine, and what the library knows of its guest.
    pub vm: Arc<Vm>,
    /// The guest's output so far.
    pub serial: SerialLog,
}

/// The parameters of a boot.
pub struct BootOptions<'a> {
    /// The kernel.
    pub kernel: &'static Kernel,
    /// The initramfs.
    pub initramfs: Option<&'a [u8]>,
    /// The words of the command line; the machine adds its own.
    pub command_line: &'a str,
    /// The number of vCPUs.
    pub cpus: u8,
    /// The protocol by which the kernel is entered.
    pub protocol: Option<EntryProtocol>,
    /// The virtio devices.
    pub virtio: VirtioConfig,
}

impl Linux {
    /// Boots a kernel. The machine runs when this returns.
    ///
    /// # Panics
    /// If the machine cannot be made.
    pub fn boot(host: &Host, options: &BootOptions<'_>) -> Self {
        let serial = SerialLog::default();
        let mut builder = Vm::builder()
            .profile(host.profile.clone())
            .kernel(&options.kernel.path)
            .command_line(options.command_line)
            .memory(memory())
            .cpus(options.cpus)
            .virtio(options.virtio.clone())
            .console(serial.clone());
        if let Some(protocol) = options.protocol {
            builder = builder.entry(protocol);
        }
        if let Some(initramfs) = options.initramfs {
            builder = builder.initramfs_contents(initramfs);
        }
        Self {
            kernel: options.kernel,
            vm: builder.start().unwrap_or_else(|e| panic!("{e}")),
            serial,
        }
    }

    /// Returns the machine.
    pub fn machine(&self) -> &Machine {
        self.vm.machine()
    }

    /// Waits until `done` finds a match in the output from position `from` on.
    ///
    /// # Panics
    /// If `limit` passes or the machine ends before; `what` names the awaited condition.
    pub fn wait<T>(
        &self,
        what: &str,
        from: usize,
        limit: Duration,
        mut done: impl FnMut(&str) -> Option<T>,
    ) -> T {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(found) = self.serial.wait(from, LOOK_INTERVAL, &mut done) {
                return found;
            }
            let end = self.machine().wait(Some(Duration::ZERO));
            assert!(
                end.is_none(),
                "ended before {what}: {end:?}\n{}",
                self.situation()
            );
            assert!(
                Instant::now() < deadline,
                "no {what} in {limit:?}\n{}",
                self.situation()
            );
        }
    }

    /// Waits for a text anywhere in the output.
    ///
    /// # Panics
    /// As [`Self::wait`].
    pub fn wait_for(&self, text: &str, limit: Duration) {
        self.wait(&format!("{text:?}"), 0, limit, |printed| {
            printed.contains(text).then_some(())
        });
    }

    /// Waits for the end of the run.
    ///
    /// # Panics
    /// If the run does not end within `limit`.
    pub fn end(&self, limit: Duration) -> RunEnd {
        let end = self.machine().wait(Some(limit));
        end.unwrap_or_else(|| panic!("still running after {limit:?}\n{}", self.situation()))
    }

    /// Returns the CPUs of the paused machine.
    pub fn cpus(&self, paused: &Paused) -> Vec<CpuState> {
        let machine = self.machine();
        (0..machine.vcpus())
            .filter_map(|vcpu| machine.cpu_state(paused, vcpu))
            .collect()
    }

    /// Returns the view of the running kernel.
    ///
    /// # Panics
    /// If the kernel cannot be found, or its tasks cannot be read.
    pub fn view(&self) -> Arc<KernelView> {
        let view = self.vm.kernel_view();
        let view = view.unwrap_or_else(|e| panic!("{e}\n{}", self.situation()));
        assert!(view.tasks.is_ok(), "{:?}", view.tasks.as_ref().err());
        view
    }

    /// Returns the machine's probe engine. `view` is of its running kernel.
    pub fn engine(&self, view: &Arc<KernelView>) -> Engine {
        self.vm.engine(view)
    }

    /// Reads the kernel's structures while the machine is paused.
    ///
    /// # Panics
    /// If the kernel cannot be found.
    pub fn look<T>(&self, ask: impl FnOnce(PausedSystem<'_>) -> T) -> T {
        let seen = self.vm.look(ask);
        seen.unwrap_or_else(|e| panic!("{e}\n{}", self.situation()))
    }

    /// Returns the readers of the kernel's structures.
    ///
    /// # Panics
    /// If the kernel cannot be found.
    pub fn system(&self) -> Arc<System> {
        let system = self.vm.system();
        system.unwrap_or_else(|e| panic!("{e}\n{}", self.situation()))
    }

    /// Returns the hash of the kernel's text as it is in memory now.
    ///
    /// # Panics
    /// If the text cannot be read.
    pub fn text_hash(&self, view: &KernelView) -> TextHash {
        let paused = self.machine().pause();
        let hash = view.text_hash(self.machine(), &paused);
        hash.unwrap_or_else(|e| panic!("{e}\n{}", self.situation()))
    }

    /// Returns the byte at an address, traps included, while the machine is paused.
    ///
    /// # Panics
    /// If there is no memory.
    pub fn byte(&self, address: Gpa) -> u8 {
        let mut byte = [0];
        let _paused = self.machine().pause();
        let read = self.machine().ram().read_physical(address, &mut byte);
        read.unwrap_or_else(|e| panic!("{e}"));
        byte[0]
    }

    /// Returns the position of each vCPU, for messages.
    pub fn places(&self) -> Vec<String> {
        let symbols = self.kernel.image.symbols();
        let paused = self.machine().pause();
        let place = |vcpu| match self.machine().registers(&paused, vcpu) {
            None => "gone".to_owned(),
            Some(registers) => {
                let rip = registers.regs.rip;
                let found = symbols.as_ref().ok().and_then(|s| s.resolve(rip));
                let name = found.map_or(String::new(), |(s, offset)| {
                    format!(" {}+{offset:#x}", s.name)
                });
                format!("{rip:#x}{name}")
            }
        };
        (0..self.machine().vcpus()).map(place).collect()
    }

    /// Returns output, counts and positions, for messages.
    pub fn situation(&self) -> String {
        format!(
            "printed: {}\nvCPUs at {:?}\n{:?}",
            self.serial.since(0),
            self.places(),
            self.machine().stats()
        )
    }
}
