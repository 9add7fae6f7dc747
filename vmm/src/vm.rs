//! A KVM virtual machine with guest RAM, interrupt controllers and timer, before it has vCPUs.

use kvm_bindings::{
    KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MEM_LOG_DIRTY_PAGES, KVM_PIT_SPEAKER_DUMMY,
    kvm_irqchip, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};

use crate::memory::GuestRam;
use crate::memory::PageSet;

/// The address of the three pages that VMX needs for real mode, in the hole below 4 GiB.
const TSS_ADDRESS: usize = 0xfffb_d000;

/// The failure of a KVM call.
#[derive(Debug, thiserror::Error)]
#[error("KVM: {call} failed: {source}")]
pub struct KvmError {
    /// The ioctl or its purpose.
    pub call: &'static str,
    /// The kernel's error.
    pub source: kvm_ioctls::Error,
}

/// A conversion of errors that names the failed call.
pub(crate) trait NameCall<T> {
    fn call(self, call: &'static str) -> Result<T, KvmError>;
}

impl<T> NameCall<T> for Result<T, kvm_ioctls::Error> {
    fn call(self, call: &'static str) -> Result<T, KvmError> {
        self.map_err(|source| KvmError { call, source })
    }
}

/// Creates an empty machine. [`furnish`] adds its parts.
pub(crate) fn create(kvm: &Kvm) -> Result<VmFd, KvmError> {
    kvm.create_vm().call("KVM_CREATE_VM")
}

/// Adds the memory `ram`, the in-kernel interrupt controllers, and the PIT if `pit`.
///
/// The memory slots come first, because KVM then creates the controllers several times faster.
pub(crate) fn furnish(vm: &VmFd, ram: &GuestRam, pit: bool) -> Result<(), KvmError> {
    vm.set_tss_address(TSS_ADDRESS).call("KVM_SET_TSS_ADDR")?;
    set_slots(vm, ram, 0)?;
    vm.create_irq_chip().call("KVM_CREATE_IRQCHIP")?;
    if pit {
        let config = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        vm.create_pit2(config).call("KVM_CREATE_PIT2")?;
    }
    Ok(())
}

/// Masks all inputs of the two 8259s, as firmware does before it starts a system by ACPI.
///
/// KVM's reset leaves them unmasked with vectors from 0. A kernel that knows the machine as
/// hardware-reduced never programs them, and takes their interrupts for exceptions.
pub(crate) fn mask_8259s(vm: &VmFd) -> Result<(), KvmError> {
    for chip_id in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE] {
        let mut chip = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip).call("KVM_GET_IRQCHIP")?;
        chip.chip.pic.imr = u8::MAX;
        vm.set_irqchip(&chip).call("KVM_SET_IRQCHIP")?;
    }
    Ok(())
}

/// Sets KVM's memory slots, or the flags of existing ones.
fn set_slots(vm: &VmFd, ram: &GuestRam, flags: u32) -> Result<(), KvmError> {
    for (slot, (start, length, host)) in (0..).zip(ram.slots()) {
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: start,
            memory_size: length,
            userspace_addr: host,
        };
        // SAFETY: the region is mapped for as long as `ram` lives, and every owner of the VmFd
        // holds a clone of it. Slots do not overlap because the layout's ranges do not.
        unsafe { vm.set_user_memory_region(region) }.call("KVM_SET_USER_MEMORY_REGION")?;
    }
    Ok(())
}

/// Makes KVM start or stop logging the pages of `ram` that the guest writes. The guest may run
/// meanwhile.
pub(crate) fn log_written_pages(vm: &VmFd, ram: &GuestRam, log: bool) -> Result<(), KvmError> {
    set_slots(vm, ram, if log { KVM_MEM_LOG_DIRTY_PAGES } else { 0 })
}

/// Returns the pages of `ram` that the guest, or KVM for it, has written since the last call or the
/// start of the log.
pub(crate) fn written_pages(vm: &VmFd, ram: &GuestRam) -> Result<PageSet, KvmError> {
    let mut written = PageSet::empty(ram);
    for ((region, slot), (_, length, _)) in (0..).zip(0..).zip(ram.slots()) {
        let words = vm.get_dirty_log(slot, length as usize);
        written.add_words(region, &words.call("KVM_GET_DIRTY_LOG")?);
    }
    Ok(written)
}
