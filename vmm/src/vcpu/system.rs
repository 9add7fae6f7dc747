//! A vCPU's registers, in KVM's shared page where the host has SYNC_REGS, else by ioctl.
//!
//! With SYNC_REGS an exit leaves general and system registers in the shared page, and what is changed there goes
//! back with the next KVM_RUN: the hit path makes no other system call. Copying them costs less than a tenth of
//! an exit. Valid between an exit and the next KVM_RUN, on the vCPU's own thread.

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::{SyncReg, VcpuFd};

use crate::vm::{KvmError, NameCall};

/// Register access of one vCPU.
pub(crate) struct Registers {
    sync: bool,
}

impl Registers {
    /// Asks KVM to keep the registers in the shared page if it can (`sync`).
    pub(crate) fn new(fd: &mut VcpuFd, sync: bool) -> Self {
        if sync {
            fd.set_sync_valid_reg(SyncReg::Register);
            fd.set_sync_valid_reg(SyncReg::SystemRegister);
        }
        Self { sync }
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
        if self.sync {
            Ok(fd.sync_regs().sregs)
        } else {
            fd.get_sregs().call("KVM_GET_SREGS")
        }
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
    use std::path::Path;

    use super::*;

    /// Lets KVM take and give registers without running the guest.
    fn exchange(fd: &mut VcpuFd) {
        fd.set_kvm_immediate_exit(1);
        assert_eq!(fd.run().unwrap_err().errno(), libc::EINTR);
    }

    #[test]
    fn writing_system_registers_brings_no_interrupt_back() {
        let kvm = match crate::host::open(Path::new("/dev/kvm")) {
            Ok(kvm) => kvm,
            Err(error) if std::env::var_os("EXOTRACE_NO_KVM").is_some_and(|v| v == "1") => {
                eprintln!("EXOTRACE_NO_KVM=1: NOT RUN: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let vm = kvm.create_vm().unwrap();
        let mut fd = vm.create_vcpu(0).unwrap();
        for sync in [false, true] {
            let registers = Registers::new(&mut fd, sync);
            exchange(&mut fd);
            let mut sregs = registers.system(&fd).unwrap();
            // As the shared page looks once the timer's interrupt was in flight at an exit.
            sregs.interrupt_bitmap[3] = 1 << 44;
            sregs.cr2 = 0x1234_5000 + u64::from(sync);
            registers.set_system(&mut fd, &sregs).unwrap();
            exchange(&mut fd);
            assert_eq!(registers.system(&fd).unwrap().cr2, sregs.cr2);
            assert_eq!(fd.get_vcpu_events().unwrap().interrupt.injected, 0);
        }
    }
}
