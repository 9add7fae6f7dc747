//! A machine: guest RAM, devices, vCPU threads, traps, and its life from boot or restore to its end.
//!
//! The caller owns the kernel file, the terminal and what it does with traps ([`crate::trap::TrapSink`]); a
//! [`Machine`] owns everything else and ends its threads when dropped. It is made paused, by [`boot()`] or by
//! [`crate::snapshot::restore`], so that probes can stand before the first instruction; [`Machine::start`] lets it go.

mod boot;
pub mod console;
pub(crate) mod control;
mod end;
pub(crate) mod shared;
mod watch;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use devices::{BusStats, Cmos, ConsoleOutput, ResetPort, Serial};
use introspect::Gva;
use introspect::x86_64::CpuState;
use introspect::x86_64::paging::AddressSpace;

pub use boot::{BootedMachine, MAX_CPUS, MachineConfig, MachineError, boot};
pub(crate) use boot::{MachineParts, assemble, check_cpus, create_vcpus, launch, new_vm};
pub use control::Paused;
pub use end::{PanicReport, RunEnd};

use crate::host::{HostProfile, Int3};
use crate::memory::GuestRam;
use crate::trap::{ArmError, Purpose, SiteId, TrapSink, TrapTable};
use crate::vcpu::{Vcpu, VcpuRegisters};
use crate::x86_64::debug_exception::VECTOR_BP;
use crate::x86_64::msr;
use shared::Shared;

/// The machine's devices, as its owner reaches them.
pub(crate) struct Devices {
    pub(crate) serial: Arc<Mutex<Serial>>,
    pub(crate) cmos: Arc<Mutex<Cmos>>,
    pub(crate) reset_port: Arc<Mutex<ResetPort>>,
}

/// A machine with running or paused vCPUs.
pub struct Machine {
    shared: Arc<Shared>,
    devices: Devices,
    threads: Vec<JoinHandle<()>>,
    watchdog: Option<watch::Watchdog>,
    /// Held until [`Machine::start`].
    held: Option<Paused>,
    /// Taken while user sites, and with them the watch on the guest's #BP entry, come or go.
    user_sites: Mutex<()>,
}

/// What a machine has counted.
#[derive(Debug, Clone)]
pub struct MachineStats {
    /// Port accesses that left the guest.
    pub port_exits: u64,
    /// Memory accesses to devices or to nothing.
    pub mmio_exits: u64,
    /// Traps given to the sink.
    pub traps: u64,
    /// The guest's own int3s given back to it.
    pub guest_int3: u64,
    /// System calls repaired.
    pub syscalls_repaired: u64,
    /// (instruction, times) completed for the guest.
    pub completed: Vec<(String, u64)>,
    /// Ports without a device.
    pub ports: BusStats,
    /// Memory without a device.
    pub memory: BusStats,
}

impl Machine {
    pub(crate) fn assemble(
        shared: Arc<Shared>,
        devices: Devices,
        threads: Vec<JoinHandle<()>>,
        held: Paused,
    ) -> Self {
        Self {
            shared,
            devices,
            threads,
            watchdog: None,
            held: Some(held),
            user_sites: Mutex::default(),
        }
    }

    /// Lets the vCPUs of a machine that was just made run.
    pub fn start(&mut self) {
        self.watchdog = Some(watch::Watchdog::start(self.shared.clone()));
        self.held = None;
    }

    /// Stops all vCPUs until the result is dropped. Pauses nest.
    pub fn pause(&self) -> Paused {
        self.shared.control.pause()
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.shared.control.vcpus()
    }

    /// Guest memory.
    pub fn ram(&self) -> &GuestRam {
        &self.shared.ram
    }

    /// The host's record that this machine decides by.
    pub fn profile(&self) -> &HostProfile {
        &self.shared.profile
    }

    /// The int3 sites.
    pub fn traps(&self) -> &TrapTable {
        &self.shared.traps
    }

    /// Registers of a vCPU of the paused machine; `None` if there is no such vCPU or it is gone.
    pub fn registers(&self, paused: &Paused, vcpu: usize) -> Option<VcpuRegisters> {
        paused
            .on_vcpu(vcpu, |v| v.snapshot_registers().ok())
            .flatten()
    }

    /// All of a vCPU of the paused machine that introspection asks for; `None` if there is no such vCPU or it is gone.
    pub fn cpu_state(&self, paused: &Paused, vcpu: usize) -> Option<CpuState> {
        let registers = self.registers(paused, vcpu)?;
        let swapped = paused.on_vcpu(vcpu, |v| v.read_msr(msr::KERNEL_GS_BASE));
        Some(registers.cpu_state(swapped.flatten()?))
    }

    /// Where SYSCALL enters the kernel on a vCPU of the paused machine (IA32_LSTAR).
    pub fn syscall_entry(&self, paused: &Paused, vcpu: usize) -> Option<Gva> {
        let entry = paused.on_vcpu(vcpu, |v| v.read_msr(msr::LSTAR));
        entry.flatten().map(Gva)
    }

    /// Handler address in a gate of a vCPU's interrupt descriptor table.
    pub fn interrupt_handler(&self, paused: &Paused, vcpu: usize, vector: u8) -> Option<Gva> {
        paused
            .on_vcpu(vcpu, move |v| v.interrupt_handler(vector))
            .flatten()
            .map(Gva)
    }

    /// Gives all traps to `sink` from now on, or to nobody.
    pub fn set_sink(&self, sink: Option<Box<dyn TrapSink>>) {
        self.shared.sink.store(sink.map(Arc::new));
    }

    /// Sets hardware breakpoint `number` (1 to 3) on an instruction, on every vCPU, or takes it away.
    /// Breakpoint 0 is kept for the machine's own use.
    ///
    /// # Errors
    /// If the number is not 1 to 3, or KVM refuses.
    pub fn set_breakpoint(&self, number: usize, address: Option<Gva>) -> Result<(), MachineError> {
        if !(1..=3).contains(&number) {
            return Err(MachineError::BreakpointNumber { asked: number });
        }
        let paused = self.pause();
        for vcpu in 0..self.vcpus() {
            let set = paused.on_vcpu(vcpu, move |v| {
                v.set_breakpoint(number, address.map(|a| a.0))
            });
            set.unwrap_or(Ok(()))?;
        }
        Ok(())
    }

    /// Gives up one use of a site, as [`TrapTable::disarm`] does; with the last site in user text the watch on the
    /// guest's own #BP entry goes, too.
    pub fn disarm(&self, site: SiteId) -> bool {
        let _turn = self
            .user_sites
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let was_there = self.shared.traps.disarm(site);
        self.leave_breakpoint_entry(Some(site));
        was_there
    }

    /// Arms a site in user text that is mapped at `address` in `space`; see [`TrapTable::arm_user`].
    ///
    /// On a host that does not report user int3s this also watches the guest's own #BP entry, where they
    /// arrive.
    ///
    /// # Errors
    /// If the site cannot be armed, or the guest has no #BP handler yet.
    pub fn arm_user(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        let _turn = self
            .user_sites
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if self.shared.profile.int3_user == Int3::GuestHandler {
            self.watch_breakpoint_entry(address)?;
        }
        let armed = self.shared.traps.arm_user(address, space);
        if armed.is_err() {
            self.leave_breakpoint_entry(None);
        }
        armed
    }

    /// Takes the watch off the guest's #BP entry if no user site needs it. A program that has met an int3 of ours, the
    /// one that was just `removed` among them, may be on its way there: it is let through first.
    fn leave_breakpoint_entry(&self, removed: Option<SiteId>) {
        const ATTEMPTS: usize = 200;
        for _ in 0..ATTEMPTS {
            let traps = &self.shared.traps;
            let Some((site, entry)) = traps.breakpoint_entry() else {
                return;
            };
            if traps.has_user_sites() {
                return;
            }
            let paused = self.pause();
            let under_way = move |v: &mut Vcpu| v.has_breakpoint_under_way(entry.0, removed);
            if !(0..self.vcpus()).any(|vcpu| paused.on_vcpu(vcpu, under_way).unwrap_or(false)) {
                traps.disarm(site);
                return;
            }
            drop(paused);
            std::thread::sleep(Duration::from_micros(100));
        }
        log::warn!(
            "the watch on the guest's breakpoint entry stays until the next user site has gone"
        );
    }

    /// Watches the guest's #BP entry, unless that is done already.
    fn watch_breakpoint_entry(&self, address: Gva) -> Result<(), ArmError> {
        if self.shared.traps.breakpoint_entry().is_some() {
            return Ok(());
        }
        let paused = self.pause();
        let entry = self.interrupt_handler(&paused, 0, VECTOR_BP as u8);
        let registers = self.registers(&paused, 0);
        let (Some(entry), Some(registers)) = (entry, registers) else {
            return Err(ArmError::NoBreakpointHandler { address });
        };
        self.shared
            .traps
            .arm(entry, registers.address_space(), Purpose::BreakpointEntry)?;
        Ok(())
    }

    /// Keeps the registers of the guest kernel's panic, whose entry is at `address`; the run then ends as
    /// [`RunEnd::Panic`].
    ///
    /// # Errors
    /// If the address cannot be trapped.
    pub fn watch_panic(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        self.shared.traps.arm(address, space, Purpose::Panic)
    }

    /// Waits for the end of the run, at most for `limit`.
    pub fn wait(&self, limit: Option<Duration>) -> Option<RunEnd> {
        self.shared
            .control
            .wait_end(limit.and_then(|l| Instant::now().checked_add(l)))
    }

    /// Ends the run from outside.
    pub fn stop(&self) {
        self.shared.control.end(RunEnd::Stopped);
    }

    /// Sends bytes to the guest's serial port; gives how many it took.
    pub fn serial_input(&self, bytes: &[u8]) -> usize {
        self.serial().push_input(bytes)
    }

    /// Writes out what the serial port holds back.
    pub fn flush_serial(&self) {
        self.serial().flush_output();
    }

    pub(crate) fn serial(&self) -> MutexGuard<'_, Serial> {
        self.devices
            .serial
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The counts so far.
    pub fn stats(&self) -> MachineStats {
        let counters = &self.shared.counters;
        let load = |c: &std::sync::atomic::AtomicU64| c.load(Ordering::Relaxed);
        MachineStats {
            port_exits: load(&counters.port),
            mmio_exits: load(&counters.mmio),
            traps: load(&counters.traps),
            guest_int3: load(&counters.guest_int3),
            syscalls_repaired: load(&counters.syscalls_repaired),
            completed: self.shared.completed.list(),
            ports: self.shared.pio.stats(),
            memory: self.shared.mmio.stats(),
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.shared.control.leave();
        self.held = None;
        self.watchdog = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::error!("a vCPU thread panicked");
            }
        }
        self.flush_serial();
    }
}

/// Where the serial port's output goes.
pub type SerialOutput = ConsoleOutput;
