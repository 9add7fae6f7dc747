//! A machine: guest RAM, devices, vCPU threads and traps, from boot or restore to its end.
//!
//! The caller owns the kernel file, the terminal and what it does with traps ([`crate::TrapSink`]);
//! a [`Machine`] owns everything else and ends its threads when dropped. It is made paused, by
//! [`boot()`] or by [`crate::snapshot::restore`], so that probes can stand before the first
//! instruction; [`Machine::start`] lets it go.

mod boot;
pub mod console;
pub(crate) mod control;
mod debugging;
mod end;
mod handle;
mod panic;
pub(crate) mod shared;
pub(crate) mod virtio;
mod watch;
pub(crate) mod watchpoints;

use std::fmt;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use devices::acpi::AcpiPorts;
use devices::pci::PciPorts;
use devices::{BusStats, Cmos, ConsoleOutput, ResetPort, Serial};
use introspect::Gva;
use introspect::x86_64::paging::AddressSpace;

pub use boot::{BootedMachine, MAX_CPUS, MachineConfig, MachineError, boot};
pub(crate) use boot::{MachineParts, assemble, check_cpus, create_vcpus, launch, new_vm};
pub use control::Paused;
pub use devices::virtio::console::{
    EndOfFile, NullBackend, PortBackend, PortConfig, PortStats, Size, WhenFull,
};
pub use end::RunEnd;
pub use handle::{EndWatch, Handle};
pub use panic::{PanicReport, PanicWitness};
pub use virtio::{
    BlockBackend, ConsoleConfig, ConsolePorts, DiskConfig, DiskReader, ETHERNET_MTU, FIRST_CID,
    ImageError, ImageFormat, MAX_DEVICES, NetConfig, NetConnection, Overlay, TapError, Transport,
    VirtioConfig, VirtioError, VirtioStats, VsockConfig, VsockSocket,
};

use crate::boot::AcpiConfig;
use crate::tape::Replay;
use crate::trap::{ArmError, Purpose, SiteId};
use shared::Shared;

pub use crate::x86_64::watchpoint::{Access, WatchError, Watchpoint};

/// The machine's devices, as its owner accesses them.
pub(crate) struct Devices {
    pub(crate) serial: Arc<Mutex<Serial>>,
    pub(crate) cmos: Arc<Mutex<Cmos>>,
    pub(crate) reset_port: Arc<Mutex<ResetPort>>,
    /// The ports of the PCI bus, if there is one.
    pub(crate) pci_ports: Option<Arc<Mutex<PciPorts>>>,
    pub(crate) acpi: Option<AcpiDevice>,
    pub(crate) virtio: virtio::Devices,
}

/// The ACPI registers, and the configuration by which the guest finds them.
pub(crate) struct AcpiDevice {
    pub(crate) config: AcpiConfig,
    pub(crate) ports: Arc<Mutex<AcpiPorts>>,
}

/// A machine with running or paused vCPUs.
pub struct Machine {
    handle: Handle,
    devices: Devices,
    threads: Vec<JoinHandle<()>>,
    /// The device thread, if there are virtio devices.
    worker: Option<virtio::Worker>,
    watchdog: Option<watch::Watchdog>,
    /// The pause until [`Machine::start`].
    held: Option<Paused>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("threads", &self.threads.len())
            .finish_non_exhaustive()
    }
}

/// A thread of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineThread {
    /// A thread that executes the guest and handles hits.
    Vcpu,
    /// The thread that serves the virtio devices.
    Devices,
}

/// The counters of a machine.
#[derive(Debug, Clone)]
pub struct MachineStats {
    /// The number of port accesses that left the guest.
    pub port_exits: u64,
    /// The number of memory accesses to devices or to nothing.
    pub mmio_exits: u64,
    /// The number of traps delivered to the sink.
    pub traps: u64,
    /// The number of reinjected foreign int3s.
    pub guest_int3: u64,
    /// The number of repaired system calls.
    pub syscalls_repaired: u64,
    /// The number of changes of registers and memory by debuggers.
    pub changes: u64,
    /// (Instruction, times) completed for the guest.
    pub completed: Vec<(String, u64)>,
    /// (Instruction, times) that could not be completed. The guest got #UD.
    pub refused: Vec<(String, u64)>,
    /// The accesses to ports without a device.
    pub ports: BusStats,
    /// The accesses to memory without a device.
    pub memory: BusStats,
    /// The counters of the virtio devices.
    pub virtio: Vec<VirtioStats>,
}

impl Machine {
    pub(crate) fn assemble(
        shared: Arc<Shared>,
        devices: Devices,
        threads: Vec<JoinHandle<()>>,
        worker: Option<virtio::Worker>,
        held: Paused,
    ) -> Self {
        Self {
            handle: Handle { shared },
            devices,
            threads,
            worker,
            watchdog: None,
            held: Some(held),
        }
    }

    /// Returns a shared handle of this machine, for those who arm traps or read memory.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Calls `work` on each thread of a new machine before its guest runs, for example to confine
    /// them.
    ///
    /// # Errors
    /// The first one of `work`, or that a thread is gone.
    pub fn on_threads<E: From<io::Error> + Send + 'static>(
        &self,
        work: impl Fn(MachineThread) -> Result<(), E> + Send + Sync + 'static,
    ) -> Result<(), E> {
        let gone = || Err(io::Error::other("a thread of the machine is gone").into());
        let Some(held) = &self.held else {
            return Err(io::Error::other("the guest runs already").into());
        };
        let work = Arc::new(work);
        for vcpu in 0..self.vcpus() {
            let work = work.clone();
            let done = held.on_vcpu(vcpu, move |_| work(MachineThread::Vcpu));
            done.unwrap_or_else(gone)?;
        }
        let Some(worker) = &self.worker else {
            return Ok(());
        };
        let done = worker.on_thread(move || work(MachineThread::Devices));
        done.unwrap_or_else(gone)
    }

    /// Lets the vCPUs of a new machine run.
    pub fn start(&mut self) {
        self.watchdog = Some(watch::Watchdog::start(self.handle()));
        self.held = None;
    }

    /// Arms a trap that keeps the registers of the guest kernel's panic, whose entry is at
    /// `address`. The run then ends as [`RunEnd::Panic`].
    ///
    /// # Errors
    /// If the address cannot be trapped.
    pub fn watch_panic(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        self.shared.traps.arm(address, space, Purpose::Panic, None)
    }

    /// Waits for the end of the run, at most for `limit`.
    ///
    /// If the guest panicked before it was reset, halted or stopped, the run has ended as
    /// [`RunEnd::Panic`].
    pub fn wait(&self, limit: Option<Duration>) -> Option<RunEnd> {
        let deadline = limit.and_then(|l| Instant::now().checked_add(l));
        let end = self.shared.control.wait_end(deadline)?;
        Some(self.told(end))
    }

    /// Ends the run from outside.
    pub fn stop(&self) {
        self.shared.control.end(RunEnd::Stopped);
    }

    /// Sends bytes to the guest's serial port. Returns the number of bytes that it accepted.
    pub fn serial_input(&self, bytes: &[u8]) -> usize {
        self.serial().push_input(bytes)
    }

    /// Presses the power button, which asks the guest to shut down. Returns `false` if the machine
    /// has none, because it is without ACPI.
    pub fn press_power_button(&self) -> bool {
        let Some(acpi) = &self.devices.acpi else {
            return false;
        };
        let mut ports = acpi.ports.lock().unwrap_or_else(PoisonError::into_inner);
        ports.power_button().press();
        true
    }

    /// Returns the state of the serial port's output, if that has a queue.
    pub fn backlog(&self) -> Option<&Backlog> {
        self.shared.backlog.as_ref()
    }

    pub(crate) fn serial(&self) -> MutexGuard<'_, Serial> {
        self.devices
            .serial
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the ports of the virtio-console, if the machine has one.
    pub fn console_ports(&self) -> Option<&ConsolePorts> {
        self.devices.virtio.console_ports()
    }

    /// Returns the number of disks whose writes go to an overlay, which a snapshot holds.
    pub fn overlays(&self) -> usize {
        self.devices.virtio.overlay_count()
    }

    /// Returns the counters.
    pub fn stats(&self) -> MachineStats {
        let counters = &self.shared.counters;
        let load = |c: &std::sync::atomic::AtomicU64| c.load(Ordering::Relaxed);
        MachineStats {
            port_exits: load(&counters.port),
            mmio_exits: load(&counters.mmio),
            traps: load(&counters.traps),
            guest_int3: load(&counters.guest_int3),
            syscalls_repaired: load(&counters.syscalls_repaired),
            changes: load(&counters.changes),
            completed: self.shared.completed.list(),
            refused: self.shared.refused.list(),
            ports: self.shared.pio.stats(),
            memory: self.shared.mmio.stats(),
            virtio: self.devices.virtio.stats(),
        }
    }

    /// Returns the player of the recording that a restored machine was given, for a thread of its
    /// own. `None` if it was given none.
    pub fn replayer(&self) -> Option<Replayer> {
        self.shared.tape.plays().then(|| Replayer {
            shared: self.shared.clone(),
            serial: self.devices.serial.clone(),
        })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Returns the machine's disks, for reading, in the order in which they were given.
    pub fn disks(&self) -> Vec<DiskReader> {
        self.devices.virtio.disks()
    }

    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }
}

/// Gives a restored machine the input of its recording.
pub struct Replayer {
    shared: Arc<Shared>,
    serial: Arc<Mutex<Serial>>,
}

impl fmt::Debug for Replayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replayer").finish_non_exhaustive()
    }
}

impl Replayer {
    /// Plays to the end of the recording, or of the run. Then the guest gets the host's input.
    /// Returns `None` if there is no recording.
    pub fn play(self) -> Option<Replay> {
        let give = |bytes: &[u8]| {
            let mut serial = self.serial.lock().unwrap_or_else(PoisonError::into_inner);
            serial.push_input(bytes)
        };
        let is_over = || self.shared.control.ended().is_some();
        self.shared.tape.play(give, is_over)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.shared.control.leave();
        self.held = None;
        self.watchdog = None;
        self.worker = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::error!("a vCPU thread panicked");
            }
        }
    }
}

/// The destination of the serial port's output.
pub type SerialOutput = ConsoleOutput;
pub use devices::{Backlog, Promptness};
