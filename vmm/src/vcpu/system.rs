//! A vCPU's registers, in KVM's shared page where the host has SYNC_REGS, else by ioctl.
//!
//! With SYNC_REGS an exit leaves the general registers in the shared page, and what is changed there goes back with the
//! next KVM_RUN: the hit path makes no other system call. The system registers cost KVM more than all the rest of an exit
//! by a trap on the CPU (they are read one by one from the CPU's structure), and most hits need none. They come out at
//! exits only where that is foreseen, and are asked for otherwise. Valid between an exit and the next KVM_RUN, on the
//! vCPU's own thread.

use std::cell::{Cell, OnceCell};
use std::os::fd::{AsRawFd, RawFd};

use kvm_bindings::{KVMIO, kvm_regs, kvm_sregs};
use kvm_ioctls::{SyncReg, VcpuFd};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_ior_nr;

use crate::vm::{KvmError, NameCall};

/// Register access of one vCPU.
pub(crate) struct Registers {
    sync: bool,
    /// System registers come out at every exit.
    always: bool,
    /// They come out at the next exit.
    expected: Cell<bool>,
    /// Those in the shared page are of the last exit, or newer.
    fresh: Cell<bool>,
    /// Exits for which they are expected since one needed them that had not.
    habit: Cell<u8>,
}

/// Exits at which system registers come out after they were missed once: who needs them does so again.
const HABIT: u8 = 100;

/// An address of page tables at which no RAM is: a walk ends at its first entry.
const NO_TABLES: u64 = 0x000f_ffff_ffff_f000;

/// The system registers of a vCPU that stands at an exit, read when they are first needed.
pub(crate) struct System<'v> {
    source: Source<'v>,
    read: OnceCell<kvm_sregs>,
}

enum Source<'v> {
    Vcpu(&'v Registers, RawFd),
    Known(&'v kvm_sregs),
}

// VcpuFd's own cannot be called while the shared page is borrowed.
ioctl_ior_nr!(KVM_GET_SREGS, KVMIO, 0x83, kvm_sregs);

fn get_sregs(fd: RawFd) -> Result<kvm_sregs, KvmError> {
    let mut sregs = kvm_sregs::default();
    // SAFETY: KVM_GET_SREGS writes one kvm_sregs, which `sregs` is; a descriptor of something else is refused.
    let result = unsafe { ioctl_with_mut_ref(&fd, KVM_GET_SREGS(), &mut sregs) };
    match result {
        0 => Ok(sregs),
        _ => Err(kvm_ioctls::Error::last()).call("KVM_GET_SREGS"),
    }
}

impl<'v> System<'v> {
    /// Of a vCPU, which has `shared` in its page.
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

    /// Of a vCPU whose registers were read before.
    pub(crate) fn known_as(sregs: &'v kvm_sregs) -> Self {
        Self {
            source: Source::Known(sregs),
            read: OnceCell::new(),
        }
    }

    /// Those that were read already.
    pub(crate) fn get(&self) -> &kvm_sregs {
        let (registers, fd) = match self.source {
            Source::Known(sregs) => return sregs,
            Source::Vcpu(registers, fd) => (registers, fd),
        };
        self.read.get_or_init(|| {
            registers.missed();
            get_sregs(fd).unwrap_or_else(|error| {
                // Of a vCPU that KVM has: nothing is mapped then.
                log::error!("system registers: {error}");
                kvm_sregs {
                    cr3: NO_TABLES,
                    ..kvm_sregs::default()
                }
            })
        })
    }

    /// They, if they were needed.
    pub(crate) fn known(&self) -> Option<kvm_sregs> {
        match self.source {
            Source::Known(sregs) => Some(*sregs),
            Source::Vcpu(..) => self.read.get().copied(),
        }
    }
}

impl Registers {
    /// Asks KVM to keep the registers in the shared page if it can (`sync`), the system registers too at `always` every
    /// exit.
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

    /// To be called before each KVM_RUN: whether the exit is likely to need the system registers.
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

    /// Returns the registers as of the last exit, where they are in the shared page, and the system registers. What is
    /// changed goes back with the next KVM_RUN once it is [said](Self::changed).
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

    /// Says that the general registers in the shared page were changed.
    #[inline]
    pub(crate) fn changed(&self, fd: &mut VcpuFd) {
        fd.set_sync_dirty_reg(SyncReg::Register);
    }

    /// General registers as of the last exit.
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

    /// System registers as of the last exit.
    pub(crate) fn system(&self, fd: &VcpuFd) -> Result<kvm_sregs, KvmError> {
        if self.sync && self.fresh.get() {
            return Ok(fd.sync_regs().sregs);
        }
        self.missed();
        fd.get_sregs().call("KVM_GET_SREGS")
    }

    /// Notes that system registers were needed which had not come out.
    fn missed(&self) {
        self.habit.set(HABIT);
    }

    /// Replaces the system registers before the next KVM_RUN. Interrupts on their way into the guest are left as they
    /// are: KVM only ever sets bits of `interrupt_bitmap` in the shared page and takes those written back for
    /// interrupts to inject, so that one of long ago would come again, whether or not the guest takes any now.
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

    /// Lets KVM take and give registers without running the guest.
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
            // As the shared page looks once the timer's interrupt was in flight at an exit.
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
