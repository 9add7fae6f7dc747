//! KVM_SET_GUEST_DEBUG: hardware breakpoints, watchpoints, single-step and int3 reporting of one
//! vCPU.

use kvm_bindings::{
    KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_INJECT_BP, KVM_GUESTDBG_SINGLESTEP,
    KVM_GUESTDBG_USE_HW_BP, KVM_GUESTDBG_USE_SW_BP, kvm_guest_debug,
};
use kvm_ioctls::VcpuFd;

use crate::host::{HostProfile, Int3};
use crate::machine::watchpoints::Registers;
use crate::vm::{KvmError, NameCall};
use crate::x86_64::debug_exception::{DR6_STEP, VECTOR_DB};
use crate::x86_64::watchpoint::NUMBER;

/// The bits of DR6 for the debug registers whose condition was met (B0 to B3).
const DR6_MET: u64 = (1 << NUMBER) - 1;
/// The breakpoint that watches the guest's page-fault entry if SYSCALL is repaired.
pub(crate) const PAGE_FAULT_ENTRY: usize = 0;

/// The debug features that one vCPU requests from KVM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GuestDebug {
    report_int3: bool,
    breakpoints: [Option<u64>; NUMBER],
    watchpoints: Registers,
    /// The address of the instruction that is being stepped. A breakpoint on it is left out
    /// meanwhile, because a KVM may ignore RFLAGS.RF.
    step: Option<u64>,
    /// Whether KVM has refused KVM_GUESTDBG_BLOCKIRQ, which came with Linux 5.16.
    no_block_irq: bool,
}

impl GuestDebug {
    pub(crate) fn new(profile: &HostProfile) -> Self {
        Self {
            report_int3: profile.int3_kernel == Int3::DebugExit,
            breakpoints: [None; NUMBER],
            watchpoints: [None; NUMBER],
            step: None,
            no_block_irq: false,
        }
    }

    /// Checks whether KVM reports an int3 by a debug exit.
    pub(crate) fn reports_int3(&self) -> bool {
        self.report_int3
    }

    pub(crate) fn breakpoint(&self, number: usize) -> Option<u64> {
        self.breakpoints.get(number).copied().flatten()
    }

    pub(crate) fn set_breakpoint(
        &mut self,
        fd: &VcpuFd,
        number: usize,
        address: Option<u64>,
    ) -> Result<(), KvmError> {
        if let Some(slot) = self.breakpoints.get_mut(number) {
            *slot = address;
        }
        self.apply(fd)
    }

    /// Replaces all watchpoints.
    pub(crate) fn set_watchpoints(
        &mut self,
        fd: &VcpuFd,
        watchpoints: Registers,
    ) -> Result<(), KvmError> {
        self.watchpoints = watchpoints;
        self.apply(fd)
    }

    /// Returns the mask of the watchpoints that a debug exception with this DR6 reports.
    pub(crate) fn watchpoints_met(&self, dr6: u64) -> u8 {
        let set = self.watchpoints.iter().zip(0u8..);
        let mask = set.fold(0, |mask, (set, register)| {
            mask | u8::from(set.is_some()) << register
        });
        mask & (dr6 & DR6_MET) as u8
    }

    /// Starts stepping the instruction at an address, or stops with `None`.
    pub(crate) fn set_step(&mut self, fd: &VcpuFd, address: Option<u64>) -> Result<(), KvmError> {
        self.step = address;
        self.apply(fd)
    }

    /// Returns the address of the instruction that is being stepped.
    pub(crate) fn stepping(&self) -> Option<u64> {
        self.step
    }

    /// Queues a #BP for the guest, as its own int3 would raise.
    ///
    /// Does nothing while another exception is pending: the guest takes that first and returns to
    /// its int3.
    pub(crate) fn inject_breakpoint(&self, fd: &VcpuFd) -> Result<(), KvmError> {
        let mut request = self.request();
        request.control |= KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_INJECT_BP;
        match fd.set_guest_debug(&request) {
            Err(error) if error.errno() == libc::EBUSY => Ok(()),
            result => result.call("KVM_SET_GUEST_DEBUG (inject #BP)"),
        }
    }

    pub(crate) fn apply(&mut self, fd: &VcpuFd) -> Result<(), KvmError> {
        let result = fd.set_guest_debug(&self.request());
        if result.is_err() && self.step.is_some() && !self.no_block_irq {
            self.no_block_irq = true;
            return fd
                .set_guest_debug(&self.request())
                .call("KVM_SET_GUEST_DEBUG");
        }
        result.call("KVM_SET_GUEST_DEBUG")
    }

    fn request(&self) -> kvm_guest_debug {
        let mut request = kvm_guest_debug::default();
        if self.report_int3 {
            request.control |= KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_SW_BP;
        }
        if self.step.is_some() {
            request.control |= KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
            if !self.no_block_irq {
                request.control |= KVM_GUESTDBG_BLOCKIRQ;
            }
        }
        let mut control = 0;
        let registers = self.breakpoints.iter().zip(&self.watchpoints).enumerate();
        for (number, (breakpoint, watchpoint)) in registers {
            let breakpoint = breakpoint.filter(|address| Some(*address) != self.step);
            let (address, bits) = match (breakpoint, watchpoint) {
                (Some(address), _) => (address, 2 << (2 * number)), // global enable; execute, one byte
                (None, Some(watchpoint)) => (watchpoint.address().0, watchpoint.control(number)),
                (None, None) => continue,
            };
            request.arch.debugreg[number] = address;
            control |= bits;
        }
        if control != 0 {
            request.control |= KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
            request.arch.debugreg[7] = 0x400 | control; // that bit is always set in DR7
        }
        request
    }
}

/// Makes the guest take the #DB that follows an instruction under its own RFLAGS.TF.
pub(super) fn raise_step(fd: &VcpuFd) -> Result<(), KvmError> {
    let mut registers = fd.get_debug_regs().call("KVM_GET_DEBUGREGS")?;
    registers.dr6 |= DR6_STEP;
    fd.set_debug_regs(&registers).call("KVM_SET_DEBUGREGS")?;
    queue_exception(fd, VECTOR_DB as u8, None)
}

/// Makes the guest take an exception before its next instruction.
pub(super) fn queue_exception(fd: &VcpuFd, vector: u8, error: Option<u32>) -> Result<(), KvmError> {
    let mut events = fd.get_vcpu_events().call("KVM_GET_VCPU_EVENTS")?;
    events.exception.injected = 1;
    events.exception.nr = vector;
    events.exception.has_error_code = u8::from(error.is_some());
    events.exception.error_code = error.unwrap_or(0);
    fd.set_vcpu_events(&events).call("KVM_SET_VCPU_EVENTS")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int3_is_asked_for_only_where_it_is_reported() {
        let native = GuestDebug::new(&HostProfile::hardware_example()).request();
        assert_eq!(native.control, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_SW_BP);
        assert_eq!(
            GuestDebug::new(&HostProfile::interpreted_example())
                .request()
                .control,
            0
        );
    }

    #[test]
    fn breakpoints_are_execute_breakpoints_in_dr7() {
        let mut debug = GuestDebug::new(&HostProfile::interpreted_example());
        debug.breakpoints[1] = Some(0x1000);
        let request = debug.request();
        assert_eq!(request.arch.debugreg[1], 0x1000);
        assert_eq!(request.arch.debugreg[7], 0x400 | 0b1000);
        debug.step = Some(0x1000);
        assert_eq!(
            debug.request().control & KVM_GUESTDBG_USE_HW_BP,
            0,
            "not while it is stepped itself"
        );
    }
}
