//! Model-specific registers that exotrace names, and KVM's lists of them. Source: AMD64 APM volume
//! 2, Intel SDM volume 4.

use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_msr_entry};

use crate::vm::KvmError;

/// The segment selectors of SYSCALL (bits 47:32) and SYSRET (63:48).
pub const STAR: u32 = 0xc000_0081;
/// The target of SYSCALL in 64-bit mode.
pub const LSTAR: u32 = 0xc000_0082;
/// The RFLAGS bits that SYSCALL clears.
pub const SYSCALL_MASK: u32 = 0xc000_0084;
/// The base of GS that SWAPGS loads.
pub const KERNEL_GS_BASE: u32 = 0xc000_0102;
/// The deadline of the local APIC's timer in TSC ticks.
pub const TSC_DEADLINE: u32 = 0x6e0;
/// The time stamp counter.
pub const TSC: u32 = 0x10;

/// Returns KVM's structure for (index, value) of MSRs, up to the maximum that it holds.
pub(crate) fn list(msrs: impl IntoIterator<Item = (u32, u64)>) -> Result<Msrs, KvmError> {
    let entries: Vec<kvm_msr_entry> = msrs
        .into_iter()
        .take(KVM_MAX_MSR_ENTRIES)
        .map(|(index, data)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        })
        .collect();
    Msrs::from_entries(&entries).map_err(|_| KvmError {
        call: "MSR list",
        source: kvm_ioctls::Error::new(libc::E2BIG),
    })
}
