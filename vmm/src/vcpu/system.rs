//! A vCPU's registers: in KVM's shared page if the host has SYNC_REGS, else by ioctl.
//!
//! With SYNC_REGS an exit leaves the general registers in the shared page, and the next KVM_RUN
//! loads the changed ones. The hit path makes no other system call.
//!
//! On the CPU, the system registers cost KVM more than all the rest of an exit by a trap. They are
//! read one by one from the CPU's structure. Most hits need none. They are synced only at exits
//! where the need is foreseen, and read by ioctl otherwise.
//!
//! Valid between an exit and the next KVM_RUN, on the vCPU's own thread.

use std::cell::{Cell, OnceCell};
use std::os::fd::{AsRawFd, RawFd};

use kvm_bindings::{KVMIO, kvm_regs, kvm_sregs};
use kvm_ioctls::{SyncReg, VcpuFd};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_ior_nr;

use crate::vm::{KvmError, NameCall};

/// The register access of one vCPU.
pub(crate) struct Registers {
    sync: bool,
    /// Whether every exit syncs the system registers.
    always: bool,
    /// Whether the next exit syncs the system registers.
    expected: Cell<bool>,
    /// Whether the system registers in the shared page are those of the last exit, or newer.
    fresh: Cell<bool>,
    /// The number of further exits that sync the system registers after one needed them without
    /// having them.
    habit: Cell<u8>,
}

/// The number of exits that sync system registers after they were missed once, because the need
/// tends to recur.
const HABIT: u8 = 100;

/// An address of page tables without RAM: a walk ends at its first entry.
const NO_TABLES: u64 = 0x000f_ffff_ffff_f000;

/// The system registers of a vCPU at an exit, read when they are first needed.
pub(crate) struct System<'v> {
    source: Source<'v>,
    read: OnceCell<kvm_sregs>,
}

enum Source<'v> {
    Vcpu(&'v Registers, RawFd),
    Known(&'v kvm_sregs),
}

// The method of `VcpuFd` cannot be called while the shared page is borrowed.
ioctl_ior_nr!(KVM_GET_SREGS, KVMIO, 0x83, kvm_sregs);

fn get_sregs(fd: RawFd) -> Result<kvm_sregs, KvmError> {
    let mut sregs = kvm_sregs::default();
    // SAFETY: KVM_GET_SREGS writes one kvm_sregs, which `sregs` is. A descriptor of another kind is
    // refused.
    let result = unsafe { ioctl_with_mut_ref(&fd, KVM_GET_SREGS(), &mut sregs) };
    match result {
        0 => Ok(sregs),
        _ => Err(kvm_ioctls::Error::last()).call("KVM_GET_SREGS"),
    }
}

impl<'v> System<'v> {
    /// Returns the registers of a vCPU that has `shared` in its page.
    #[inline]
    pub(crate) fn of(registers: &'v Registers, fd: RawFd, shared: &'v kvm_sregs) -> Self {
        let source = match registers.fresh.get() {
            true => Source::Known(shared),
            false => Source::Vcpu(registers, fd),
        };
        Self {
            source,
            read: OnceCell::new(),
        }
    }

    /// Returns the registers of a vCPU that were read before.
    pub(crate) fn known_as(sregs: &'v kvm_sregs) -> Self {
        Self {
            source: Source::Known(sregs),
            read: OnceCell::new(),
        }
    }

    /// Returns the registers, and reads them if that was not done yet.
    pub(crate) fn get(&self) -> &kvm_sregs {
        let (registers, fd) = match self.source {
            Source::Known(sregs) => return sregs,
            Source::Vcpu(registers, fd) => (registers, fd),
        };
        self.read.get_or_init(|| {
            registers.missed();
            get_sregs(fd).unwrap_or_else(|error| {
                // KVM has this vCPU, so this does not happen. With these registers nothing is
                // mapped.
                log::error!("system registers: {error}");
                kvm_sregs {
                    cr3: NO_TABLES,
                    ..kvm_sregs::default()
                }
            })
        })
    }

    /// Returns the registers if they were read already.
    pub(crate) fn known(&self) -> Option<kvm_sregs> {
        match self.source {
            Source::Known(sregs) => Some(*sregs),
            Source::Vcpu(..) => self.read.get().copied(),
        }
    }
}

impl Registers {
    /// Asks KVM to keep the registers in the shared page if it can (`sync`). With `always`, every
    /// exit syncs the system registers too.
    pub(crate) fn new(fd: &mut VcpuFd, sync: bool, always: bool) -> Self {
        if sync {
            fd.set_sync_valid_reg(SyncReg::Register);
        }
        Self {
            sync,
            always,
            expected: Cell::new(false),
            fresh: Cell::new(false),
            habit: Cell::new(0),
        }
    }

    /// Prepares the next KVM_RUN. `likely` says whether its exit will probably need the system
    /// registers.
    #[inline]
    pub(crate) fn expect_system(&self, fd: &mut VcpuFd, likely: bool) {
        if !self.sync {
            return;
        }
        let habit = self.habit.get();
        self.habit.set(habit.saturating_sub(1));
        let expected = likely || self.always || habit > 0;
        if expected != self.expected.replace(expected) {
            match expected {
                true => fd.set_sync_valid_reg(SyncReg::SystemRegister),
                false => fd.clear_sync_valid_reg(SyncReg::SystemRegister),
            }
        }
        self.fresh.set(expected);
    }

    /// Returns the registers of the last exit if they are in the shared page, and the system
    /// registers.
    ///
    /// The next KVM_RUN loads changed registers after a call of [`changed`](Self::changed).
    #[inline]
    pub(crate) fn shared<'v>(
        &'v self,
        fd: &'v mut VcpuFd,
    ) -> Option<(&'v mut kvm_regs, System<'v>)> {
        if !self.sync {
            return None;
        }
        let descriptor = fd.as_raw_fd();
        let page = fd.sync_regs_mut();
        Some((&mut page.regs, System::of(self, descriptor, &page.sregs)))
    }

    /// Marks the general registers in the shared page as changed.
    #[inline]
    pub(crate) fn changed(&self, fd: &mut VcpuFd) {
        fd.set_sync_dirty_reg(SyncReg::Register);
    }

    /// Returns the general registers of the last exit.
    pub(crate) fn general(&self, fd: &VcpuFd) -> Result<kvm_regs, KvmError> {
        if self.sync {
            Ok(fd.sync_regs().regs)
        } else {
            fd.get_regs().call("KVM_GET_REGS")
        }
    }

    /// Replaces the general registers before the next KVM_RUN.
    pub(crate) fn set_general(&self, fd: &mut VcpuFd, regs: &kvm_regs) -> Result<(), KvmError> {
        if self.sync {
            fd.sync_regs_mut().regs = *regs;
            fd.set_sync_dirty_reg(SyncReg::Register);
            Ok(())
        } else {
            fd.set_regs(regs).call("KVM_SET_REGS")
        }
    }

    /// Returns the system registers of the last exit.
    pub(crate) fn system(&self, fd: &VcpuFd) -> Result<kvm_sregs, KvmError> {
        if self.sync && self.fresh.get() {
            return Ok(fd.sync_regs().sregs);
        }
        self.missed();
        fd.get_sregs().call("KVM_GET_SREGS")
    }

    /// Notes that system registers were needed which the exit had not synced.
    fn missed(&self) {
        self.habit.set(HABIT);
    }

    /// Replaces the system registers before the next KVM_RUN.
    ///
    /// Interrupts on their way into the guest are left as they are. KVM only ever sets bits of
    /// `interrupt_bitmap` in the shared page, and injects the interrupts that are written back. An
    /// old one would come again, whether or not the guest accepts interrupts now.
    pub(crate) fn set_system(&self, fd: &mut VcpuFd, sregs: &kvm_sregs) -> Result<(), KvmError> {
        let sregs = &kvm_sregs {
            interrupt_bitmap: [0; 4],
            ..*sregs
        };
        if self.sync {
            fd.sync_regs_mut().sregs = *sregs;
            self.fresh.set(true);
            fd.set_sync_dirty_reg(SyncReg::SystemRegister);
            Ok(())
        } else {
            fd.set_sregs(sregs).call("KVM_SET_SREGS")
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Makes KVM load and store registers without running the guest.
    fn exchange(fd: &mut VcpuFd) {
        fd.set_kvm_immediate_exit(1);
        assert_eq!(fd.run().unwrap_err().errno(), libc::EINTR);
    }

    #[test]
    fn writing_system_registers_brings_no_interrupt_back() {
        let Some(kvm) = crate::host::test_kvm() else {
            return;
        };
        let vm = kvm.create_vm().unwrap();
        let mut fd = vm.create_vcpu(0).unwrap();
        for (sync, always) in [(false, false), (true, false), (true, true)] {
            let registers = Registers::new(&mut fd, sync, always);
            registers.expect_system(&mut fd, false);
            exchange(&mut fd);
            let mut sregs = registers.system(&fd).unwrap();
            // The shared page looks like this after the timer's interrupt was in flight at an exit.
            sregs.interrupt_bitmap[3] = 1 << 44;
            sregs.cr2 = 0x1234_5000 + u64::from(sync) + 2 * u64::from(always);
            registers.set_system(&mut fd, &sregs).unwrap();
            assert_eq!(
                registers.system(&fd).unwrap().cr2,
                sregs.cr2,
                "before KVM has taken it"
            );
            registers.expect_system(&mut fd, false);
            exchange(&mut fd);
            assert_eq!(registers.system(&fd).unwrap().cr2, sregs.cr2);
            assert_eq!(fd.get_vcpu_events().unwrap().interrupt.injected, 0);
        }
    }
}
