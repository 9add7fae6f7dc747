//! The interface of a running machine: memory, registers, pauses, traps. Its owner has a [`Handle`]
//! and may pass it on.
//!
//! A handle does not keep the vCPU threads alive. Once the machine is gone, pauses are immediate
//! and there are no registers. Traps are then armed and disarmed in memory that nobody runs any
//! more.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use introspect::Gva;
use introspect::x86_64::CpuState;
use introspect::x86_64::paging::AddressSpace;

use super::shared::Shared;
use super::{Machine, MachineError, Paused};
use crate::host::{HostProfile, Int3};
use crate::memory::GuestRam;
use crate::trap::{ArmError, Purpose, SiteId, TrapTable};
use crate::vcpu::TrapSink;
use crate::vcpu::{Vcpu, VcpuRegisters};
use crate::x86_64::debug_exception::VECTOR_BP;
use crate::x86_64::msr;

/// A shared handle of a machine.
#[derive(Clone)]
pub struct Handle {
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

/// A call that is made at the end of the run, unless this is dropped before.
pub struct EndWatch {
    number: u64,
    shared: Arc<Shared>,
}

impl fmt::Debug for EndWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndWatch")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

impl Drop for EndWatch {
    fn drop(&mut self) {
        self.shared.control.unwatch_end(self.number);
    }
}

impl Deref for Machine {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

impl Handle {
    #[cfg(feature = "test-utils")]
    pub(crate) fn of(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Pauses all vCPUs until the result is dropped. Pauses nest.
    pub fn pause(&self) -> Paused {
        self.shared.control.pause()
    }

    /// Calls `at_end` when the run ends, or at once if it has ended. It must not wait. Drop the
    /// result to prevent that.
    pub fn watch_end(&self, at_end: impl FnOnce() + Send + 'static) -> EndWatch {
        EndWatch {
            number: self.shared.control.watch_end(Box::new(at_end)),
            shared: self.shared.clone(),
        }
    }

    /// Returns the number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.shared.control.vcpus()
    }

    /// Returns the guest memory.
    pub fn ram(&self) -> &GuestRam {
        &self.shared.ram
    }

    /// Returns the host record by which this machine decides.
    pub fn profile(&self) -> &HostProfile {
        &self.shared.profile
    }

    /// Returns the int3 sites.
    pub fn traps(&self) -> &TrapTable {
        &self.shared.traps
    }

    /// Returns the registers of a vCPU of the paused machine. `None` if there is no such vCPU or it
    /// is gone.
    pub fn registers(&self, paused: &Paused, vcpu: usize) -> Option<VcpuRegisters> {
        paused
            .on_vcpu(vcpu, |v| v.snapshot_registers().ok())
            .flatten()
    }

    /// Returns the state of a vCPU of the paused machine that introspection needs. `None` if there
    /// is no such vCPU or it is gone.
    pub fn cpu_state(&self, paused: &Paused, vcpu: usize) -> Option<CpuState> {
        let registers = self.registers(paused, vcpu)?;
        let swapped = paused.on_vcpu(vcpu, |v| v.read_msr(msr::KERNEL_GS_BASE));
        Some(registers.cpu_state(swapped.flatten()?))
    }

    /// Returns the address at which SYSCALL enters the kernel on a vCPU of the paused machine
    /// (IA32_LSTAR).
    pub fn syscall_entry(&self, paused: &Paused, vcpu: usize) -> Option<Gva> {
        let entry = paused.on_vcpu(vcpu, |v| v.read_msr(msr::LSTAR));
        entry.flatten().map(Gva)
    }

    /// Returns the ticks per second of the guest's time stamp counter. 10^9 if the host does not
    /// report it.
    pub fn tsc_hz(&self, paused: &Paused) -> u64 {
        let khz = paused.on_vcpu(0, |v| v.tsc_khz()).flatten();
        khz.map_or(1_000_000_000, |khz| u64::from(khz) * 1000)
    }

    /// Returns the handler address in a gate of a vCPU's interrupt descriptor table.
    pub fn interrupt_handler(&self, paused: &Paused, vcpu: usize, vector: u8) -> Option<Gva> {
        paused
            .on_vcpu(vcpu, move |v| v.interrupt_handler(vector))
            .flatten()
            .map(Gva)
    }

    /// Runs vCPU `vcpu` of the paused machine until the int3 of the site at `address` was hit
    /// `hits` times.
    ///
    /// The first hit is handled as every trap. Each later one only moves RIP past the int3.
    ///
    /// With `system`, each exit syncs the system registers as usual, else the general ones alone.
    /// The rest is KVM's own part of a hit. The displaced instruction must be a NOP of one byte,
    /// and KVM must report the int3 by an exit. The other vCPUs are paused meanwhile.
    ///
    /// # Errors
    /// If the guest leaves for anything else after the first hit, or its run ends. `None` if there
    /// is no such vCPU.
    #[cfg(feature = "test-utils")]
    pub fn run_bare(
        &self,
        paused: &Paused,
        vcpu: usize,
        address: Gva,
        hits: u64,
        system: bool,
    ) -> Option<Result<(), crate::RunEnd>> {
        paused.on_vcpu(vcpu, move |v| v.run_bare(address.0, hits, system))
    }

    /// Sets the sink of all traps from now on, or removes it.
    pub fn set_sink(&self, sink: Option<Box<dyn TrapSink>>) {
        self.shared.sink.store(sink.map(Arc::new));
    }

    /// Sets hardware breakpoint `number` (1 to 3) on an instruction, on every vCPU, or removes it.
    /// Breakpoint 0 is kept for the machine's own use.
    ///
    /// # Errors
    /// If the number is not 1 to 3, or KVM refuses.
    pub fn set_breakpoint(&self, number: usize, address: Option<Gva>) -> Result<(), MachineError> {
        if !(1..=3).contains(&number) {
            return Err(MachineError::BreakpointNumber { asked: number });
        }
        let watchpoints = &self.shared.watchpoints;
        watchpoints.keep_for_breakpoint(number, address.is_some());
        let paused = self.pause();
        for vcpu in 0..self.vcpus() {
            let set = paused.on_vcpu(vcpu, move |v| {
                v.set_breakpoint(number, address.map(|a| a.0))
            });
            set.unwrap_or(Ok(()))?;
        }
        Ok(())
    }

    /// Drops one use of a site, as [`TrapTable::disarm`] does.
    ///
    /// With the last site in user text, the watch on the guest's own #BP entry ends too.
    pub fn disarm(&self, site: SiteId) -> bool {
        let holders = self.lock_user_sites();
        let was_there = self.shared.traps.disarm(site);
        if *holders == 0 {
            self.leave_breakpoint_entry();
        }
        was_there
    }

    fn lock_user_sites(&self) -> MutexGuard<'_, usize> {
        self.shared
            .user_sites
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares the machine for sites in user text by [`TrapTable::arm_user_at`] and
    /// [`TrapTable::disarm`].
    ///
    /// Until [`Self::release_user_traps`], these may be called from a vCPU's own thread too. Holds
    /// nest.
    ///
    /// # Errors
    /// If the guest has no #BP handler yet.
    pub fn hold_user_traps(&self) -> Result<(), ArmError> {
        let mut holders = self.lock_user_sites();
        if self.shared.profile.int3_user == Int3::GuestHandler {
            self.watch_breakpoint_entry(Gva(0))?;
        }
        *holders += 1;
        Ok(())
    }

    /// Ends one [`Self::hold_user_traps`].
    pub fn release_user_traps(&self) {
        let mut holders = self.lock_user_sites();
        *holders = holders.saturating_sub(1);
        if *holders == 0 {
            self.leave_breakpoint_entry();
        }
    }

    /// Makes a running vCPU leave the guest and call [`TrapSink::sample`] with `mask`, soon and
    /// once.
    ///
    /// Masks of several requests before that are joined. Returns the part of `mask` that an earlier
    /// call has requested already.
    pub fn sample(&self, vcpu: usize, mask: u64) -> u64 {
        let Some(wanted) = self.shared.samples.get(vcpu) else {
            return 0;
        };
        let before = wanted.fetch_or(mask, Ordering::SeqCst);
        self.shared.control.interrupt(vcpu);
        before & mask
    }

    /// Arms a site in user text that is mapped at `address` in `space`. See
    /// [`TrapTable::arm_user`].
    ///
    /// On a host that does not report user int3s this also watches the guest's own #BP entry, where
    /// they arrive.
    ///
    /// # Errors
    /// If the site cannot be armed, or the guest has no #BP handler yet.
    pub fn arm_user(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        let holders = self.lock_user_sites();
        if self.shared.profile.int3_user == Int3::GuestHandler {
            self.watch_breakpoint_entry(address)?;
        }
        let armed = self.shared.traps.arm_user(address, space);
        if armed.is_err() && *holders == 0 {
            self.leave_breakpoint_entry();
        }
        armed
    }

    /// Ends the watch on the guest's #BP entry if no user site needs it.
    ///
    /// A program that has hit an int3 of ours, perhaps of a removed site, may be on its way there.
    /// The watch ends only after it has passed.
    fn leave_breakpoint_entry(&self) {
        const ATTEMPTS: usize = 200;
        for _ in 0..ATTEMPTS {
            let traps = &self.shared.traps;
            let Some((site, entry)) = traps.breakpoint_entry() else {
                traps.forget_gone_user_sites();
                return;
            };
            if traps.has_user_sites() {
                return;
            }
            let paused = self.pause();
            let removed = Arc::new(traps.gone_user_sites());
            let under_way = |vcpu| {
                let removed = removed.clone();
                let asked = move |v: &mut Vcpu| v.has_breakpoint_under_way(entry.0, &removed);
                paused.on_vcpu(vcpu, asked).unwrap_or(false)
            };
            if !(0..self.vcpus()).any(under_way) {
                traps.disarm(site);
                traps.forget_gone_user_sites();
                return;
            }
            drop(paused);
            std::thread::sleep(Duration::from_micros(100));
        }
        // As with a debugger that keeps the machine paused at a site that it removes.
        log::info!(
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
        self.shared.traps.arm(
            entry,
            registers.address_space(),
            Purpose::BreakpointEntry,
            None,
        )?;
        Ok(())
    }
}
