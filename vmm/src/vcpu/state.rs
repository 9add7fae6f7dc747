//! Saving and restoring one vCPU.
//!
//! The order matters. A restore sets the local APIC before the MSRs, else an armed TSC deadline is
//! lost. It sets the TSC before its deadline, and the general registers last. A save first reads
//! the state of a pending INIT or SIPI, because KVM delivers that when asked. Source:
//! Documentation/virt/kvm/api.rst.

use introspect::kernel::fpu::FXSAVE;
use introspect::x86_64::CpuState;
use kvm_bindings::{
    kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
    kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::{Vcpu, VcpuRegisters};
use crate::clock::host_tsc;
use crate::host::HostProfile;
use crate::machine::RunEnd;
use crate::vm::{KvmError, NameCall};
use crate::x86_64::msr;

/// The state of one vCPU as KVM describes it.
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
    /// The MSRs as (index, value), in KVM's order.
    msrs: Vec<(u32, u64)>,
}

impl VcpuState {
    /// Returns the value of LSTAR. It is not 0 if the guest has set up SYSCALL.
    pub(crate) fn lstar(&self) -> u64 {
        self.msr(msr::LSTAR)
    }

    /// Returns the registers as introspection takes them.
    pub(crate) fn cpu_state(&self) -> CpuState {
        let registers = VcpuRegisters {
            regs: self.regs,
            sregs: self.sregs,
        };
        registers.cpu_state(self.msr(msr::KERNEL_GS_BASE))
    }

    fn msr(&self, index: u32) -> u64 {
        self.msrs
            .iter()
            .find(|(i, _)| *i == index)
            .map_or(0, |(_, value)| *value)
    }

    /// Returns the MSRs as they are to be loaded.
    ///
    /// If the guest sees the host's TSC, an armed deadline is moved by the difference of the TSC.
    /// It remains as far away as it was.
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

impl VcpuState {
    /// Reads the state of a vCPU that does not run. `indices` are the MSRs that KVM lists as its
    /// state.
    fn of(fd: &VcpuFd, indices: &[u32]) -> Result<Self, KvmError> {
        // Delivers messages of other vCPUs, which changes the registers.
        let mp_state = fd.get_mp_state().call("KVM_GET_MP_STATE")?;
        Ok(Self {
            mp_state,
            msrs: save_msrs(fd, indices)?,
            regs: fd.get_regs().call("KVM_GET_REGS")?,
            sregs: fd.get_sregs().call("KVM_GET_SREGS")?,
            xsave: fd.get_xsave().call("KVM_GET_XSAVE")?,
            xcrs: fd.get_xcrs().call("KVM_GET_XCRS")?,
            debug_registers: fd.get_debug_regs().call("KVM_GET_DEBUGREGS")?,
            events: fd.get_vcpu_events().call("KVM_GET_VCPU_EVENTS")?,
            lapic: fd.get_lapic().call("KVM_GET_LAPIC")?,
        })
    }
}

fn save_msrs(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, KvmError> {
    let mut saved = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let mut list = msr::list(rest.iter().map(|index| (*index, 0)))?;
        let got = fd.get_msrs(&mut list).call("KVM_GET_MSRS")?;
        saved.extend(list.as_slice().iter().take(got).map(|e| (e.index, e.data)));
        // KVM stops at the first MSR that it does not return: it is listed, but absent with this
        // CPUID.
        rest = rest.get(got + 1..).unwrap_or_default();
    }
    Ok(saved)
}

/// Sets the TSC of a vCPU that has not run.
///
/// KVM takes a value within a second of the expected one for an attempt to synchronize vCPUs, and
/// keeps its own. A guest saved in its first second has such a value. Its armed deadline came as
/// much too late as it had run. The TSC is therefore first set far away if it is not the requested
/// one (`kvm_synchronize_tsc`, arch/x86/kvm/x86.c).
fn load_tsc(fd: &VcpuFd, value: u64) -> Result<(), KvmError> {
    const KHZ: u64 = 1000;
    /// The longest time in milliseconds that KVM needs between a write and a read.
    const NEAR_MS: u64 = 100;
    const FAR_MS: u64 = 3_600_000;
    let write = |value| {
        let list = msr::list([(msr::TSC, value)])?;
        fd.set_msrs(&list).call("KVM_SET_MSRS (TSC)").map(drop)
    };
    write(value)?;
    let mut list = msr::list([(msr::TSC, 0)])?;
    fd.get_msrs(&mut list).call("KVM_GET_MSRS (TSC)")?;
    let found = list.as_slice().first().map_or(value, |entry| entry.data);
    let khz = fd.get_tsc_khz().map_or(KHZ * KHZ, u64::from);
    if found.wrapping_sub(value) > khz * NEAR_MS {
        write(value.wrapping_add(khz * FAR_MS))?;
        write(value)?;
    }
    Ok(())
}

impl Vcpu {
    /// Returns the registers of floating point and vectors as FXSAVE stores them.
    pub(crate) fn floating(&self) -> Result<[u8; FXSAVE], KvmError> {
        // The first part of KVM's area is the one of FXSAVE.
        let xsave = self.fd.get_xsave().call("KVM_GET_XSAVE")?;
        let mut area = [0; FXSAVE];
        let bytes = xsave.region.iter().flat_map(|word| word.to_le_bytes());
        area.iter_mut()
            .zip(bytes)
            .for_each(|(place, byte)| *place = byte);
        Ok(area)
    }

    /// Replaces the general registers.
    pub(crate) fn change_registers(&mut self, regs: &kvm_regs) -> Result<(), KvmError> {
        self.registers.set_general(&mut self.fd, regs)?;
        // Who reads them before the next KVM_RUN does not look into the shared page.
        self.fd.set_regs(regs).call("KVM_SET_REGS")
    }

    /// Returns the state of this parked vCPU. `indices` are the MSRs that KVM lists as its state.
    pub(crate) fn save(&self, indices: &[u32]) -> Result<VcpuState, KvmError> {
        VcpuState::of(&self.fd, indices)
    }

    /// Loads `state` into a new vCPU.
    pub(crate) fn load(&mut self, state: &VcpuState) -> Result<(), RunEnd> {
        let fd = &self.fd;
        fd.set_sregs(&state.sregs).call("KVM_SET_SREGS")?;
        fd.set_xcrs(&state.xcrs).call("KVM_SET_XCRS")?;
        // SAFETY: no dynamically enabled XSTATE features are in use, because none is ever requested
        // with arch_prctl. KVM therefore reads only the structure's 4096 bytes.
        unsafe { fd.set_xsave(&state.xsave) }.call("KVM_SET_XSAVE")?;
        fd.set_lapic(&state.lapic).call("KVM_SET_LAPIC")?;
        if self.machine.profile.tsc_settable {
            load_tsc(fd, state.msr(msr::TSC))?;
        }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_msi};

    use super::*;
    use crate::memory::GuestRam;
    use crate::vm;

    /// The MSI data with which one vCPU starts another (Intel SDM volume 3, figure 11-15).
    const INIT: u32 = 5 << 8;
    const START_UP: u32 = 6 << 8;
    /// The page at which it starts.
    const PAGE: u32 = 8;

    /// Tests half a second and half an hour.
    #[test]
    fn the_tsc_is_what_was_saved_however_long_the_guest_had_run() {
        let Some(kvm) = crate::host::test_kvm() else {
            return;
        };
        let machine = vm::create(&kvm).unwrap();
        let ram = GuestRam::new(4 << 20).unwrap();
        vm::furnish(&machine, &ram, false).unwrap();
        let vcpus = [0, 1].map(|id| machine.create_vcpu(id).unwrap());
        let second = u64::from(vcpus[0].get_tsc_khz().unwrap()) * 1000;
        let read = |fd: &VcpuFd| {
            let mut list = msr::list([(msr::TSC, 0)]).unwrap();
            fd.get_msrs(&mut list).unwrap();
            list.as_slice()[0].data
        };
        // A host whose TSC the guest sees accepts no value.
        let before = read(&vcpus[0]);
        load_tsc(&vcpus[0], before.wrapping_add(3600 * second)).unwrap();
        if read(&vcpus[0]) < before.wrapping_add(3500 * second) {
            eprintln!("not tested: the TSC of a guest cannot be set on this host");
            return;
        }
        for value in [second / 2, 1800 * second, 0] {
            for vcpu in &vcpus {
                load_tsc(vcpu, value).unwrap();
                let found = read(vcpu);
                assert!(
                    (value..value + 60 * second).contains(&found),
                    "{value}: {found}"
                );
            }
        }
    }

    #[test]
    fn a_vcpu_that_was_told_to_start_is_saved_at_its_start() {
        let Some(kvm) = crate::host::test_kvm() else {
            return;
        };
        let machine = vm::create(&kvm).unwrap();
        let ram = GuestRam::new(4 << 20).unwrap();
        vm::furnish(&machine, &ram, false).unwrap();
        let [_first, second] = [0, 1].map(|id| machine.create_vcpu(id).unwrap());
        // Messages reach a vCPU once its APIC has been written.
        second.set_lapic(&second.get_lapic().unwrap()).unwrap();
        for data in [INIT, START_UP | PAGE] {
            let message = kvm_msi {
                address_lo: 0xfee0_0000 | 1 << 12,
                data,
                ..kvm_msi::default()
            };
            assert_eq!(machine.signal_msi(message).unwrap(), 1);
        }
        let state = VcpuState::of(&second, &[]).unwrap();
        assert_eq!(state.mp_state.mp_state, KVM_MP_STATE_RUNNABLE);
        assert_eq!((state.sregs.cs.base, state.regs.rip), (0x8000, 0));
    }
}
