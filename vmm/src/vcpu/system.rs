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

    /// Replaces the system registers before the next KVM_RUN.
    pub(crate) fn set_system(&self, fd: &mut VcpuFd, sregs: &kvm_sregs) -> Result<(), KvmError> {
        if self.sync {
            fd.sync_regs_mut().sregs = *sregs;
            fd.set_sync_dirty_reg(SyncReg::SystemRegister);
            Ok(())
        } else {
            fd.set_sregs(sregs).call("KVM_SET_SREGS")
        }
    }
}
