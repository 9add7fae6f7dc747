//! Saving and restoring one vCPU.
//!
//! The order matters on restore: the local APIC before the MSRs (else an armed TSC deadline is lost), and the
//! general registers last. Source: Documentation/virt/kvm/api.rst.

use kvm_bindings::{
    kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
    kvm_xsave,
};
use serde::{Deserialize, Serialize};

use super::Vcpu;
use crate::clock::host_tsc;
use crate::host::HostProfile;
use crate::machine::RunEnd;
use crate::vm::{KvmError, NameCall};
use crate::x86_64::msr;

/// One vCPU as KVM describes it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct VcpuState {
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debug_registers: kvm_debugregs,
    events: kvm_vcpu_events,
    mp_state: kvm_mp_state,
    lapic: kvm_lapic_state,
    /// (index, value), in KVM's order.
    msrs: Vec<(u32, u64)>,
}

impl VcpuState {
    /// Value of LSTAR: whether the guest has set up SYSCALL.
    pub(crate) fn lstar(&self) -> u64 {
        self.msr(msr::LSTAR)
    }

    fn msr(&self, index: u32) -> u64 {
        self.msrs
            .iter()
            .find(|(i, _)| *i == index)
            .map_or(0, |(_, value)| *value)
    }

    /// The MSRs as they are to be loaded. Where the host's TSC shows through to the guest, an armed deadline
    /// is moved by what the TSC has moved: it is as far away as it was.
    fn msrs_for(&self, profile: &HostProfile) -> Vec<(u32, u64)> {
        if profile.tsc_settable {
            return self.msrs.clone();
        }
        let moved = host_tsc().wrapping_sub(self.msr(msr::TSC));
        let shift = |(index, value): &(u32, u64)| match *index {
            msr::TSC_DEADLINE if *value != 0 => (*index, value.wrapping_add(moved)),
            _ => (*index, *value),
        };
        self.msrs.iter().map(shift).collect()
    }
}

impl Vcpu {
    /// State of this parked vCPU; `indices` are the MSRs that KVM lists as its state.
    pub(crate) fn save(&self, indices: &[u32]) -> Result<VcpuState, KvmError> {
        let fd = &self.fd;
        Ok(VcpuState {
            msrs: self.save_msrs(indices)?,
            regs: fd.get_regs().call("KVM_GET_REGS")?,
            sregs: fd.get_sregs().call("KVM_GET_SREGS")?,
            xsave: fd.get_xsave().call("KVM_GET_XSAVE")?,
            xcrs: fd.get_xcrs().call("KVM_GET_XCRS")?,
            debug_registers: fd.get_debug_regs().call("KVM_GET_DEBUGREGS")?,
            events: fd.get_vcpu_events().call("KVM_GET_VCPU_EVENTS")?,
            mp_state: fd.get_mp_state().call("KVM_GET_MP_STATE")?,
            lapic: fd.get_lapic().call("KVM_GET_LAPIC")?,
        })
    }

    fn save_msrs(&self, indices: &[u32]) -> Result<Vec<(u32, u64)>, KvmError> {
        let mut saved = Vec::with_capacity(indices.len());
        let mut rest = indices;
        while !rest.is_empty() {
            let mut list = msr::list(rest.iter().map(|index| (*index, 0)))?;
            let got = self.fd.get_msrs(&mut list).call("KVM_GET_MSRS")?;
            saved.extend(list.as_slice().iter().take(got).map(|e| (e.index, e.data)));
            // KVM stops at the first one it does not give: listed, but not there for this CPUID.
            rest = rest.get(got + 1..).unwrap_or_default();
        }
        Ok(saved)
    }

    /// Puts a fresh vCPU into `state`.
    pub(crate) fn load(&mut self, state: &VcpuState) -> Result<(), RunEnd> {
        let fd = &self.fd;
        fd.set_sregs(&state.sregs).call("KVM_SET_SREGS")?;
        fd.set_xcrs(&state.xcrs).call("KVM_SET_XCRS")?;
        // SAFETY: no dynamically enabled XSTATE features are in use (none is ever asked for with
        // arch_prctl), so the structure's 4096 bytes are all that KVM reads.
        unsafe { fd.set_xsave(&state.xsave) }.call("KVM_SET_XSAVE")?;
        fd.set_lapic(&state.lapic).call("KVM_SET_LAPIC")?;
        self.load_msrs(&state.msrs_for(&self.machine.profile))?;
        let fd = &self.fd;
        fd.set_debug_regs(&state.debug_registers)
            .call("KVM_SET_DEBUGREGS")?;
        fd.set_mp_state(state.mp_state).call("KVM_SET_MP_STATE")?;
        fd.set_vcpu_events(&state.events)
            .call("KVM_SET_VCPU_EVENTS")?;
        fd.set_regs(&state.regs).call("KVM_SET_REGS")?;
        if crate::assist::needed(&self.machine.profile).syscall_repair && state.lstar() != 0 {
            self.watch_syscalls()?;
        }
        Ok(())
    }

    fn load_msrs(&self, msrs: &[(u32, u64)]) -> Result<(), KvmError> {
        let mut rest = msrs;
        while !rest.is_empty() {
            let list = msr::list(rest.iter().copied())?;
            let set = self.fd.set_msrs(&list).call("KVM_SET_MSRS")?;
            if let Some((index, _)) = rest.get(set) {
                log::debug!("MSR {index:#x} is not settable on this host");
            }
            rest = rest.get(set + 1..).unwrap_or_default();
        }
        Ok(())
    }
}
