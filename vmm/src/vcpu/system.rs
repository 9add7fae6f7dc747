//! A vCPU's registers: the general ones in KVM's shared page, the system ones by ioctl with a short-lived copy.
//!
//! The hit path makes no system call: it reads general registers from the shared page, and of the system
//! registers only GS base and a page-table root for kernel addresses, which change only while a kernel sets
//! itself up. Those come from a copy that is renewed when it is older than [`COPY_LIFETIME`]. Whoever needs
//! the exact ones (user addresses, privilege) asks for them and pays one ioctl.

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::{SyncReg, VcpuFd};

use crate::clock::host_tsc;
use crate::vm::{KvmError, NameCall};

/// In TSC ticks: 5 to 10 ms on today's CPUs, so that renewing costs under a thousandth.
const COPY_LIFETIME: u64 = 20_000_000;

/// Register access of one vCPU.
pub(crate) struct Registers {
    sync: bool,
    /// System registers seen in kernel mode with the kernel's GS base in place, and when (TSC).
    recent: Option<(kvm_sregs, u64)>,
}

impl Registers {
    /// Asks KVM to keep the general registers in the shared page if it can (`sync`).
    pub(crate) fn new(fd: &mut VcpuFd, sync: bool) -> Self {
        if sync {
            fd.set_sync_valid_reg(SyncReg::Register);
        }
        Self { sync, recent: None }
    }

    /// General registers as of the last exit.
    pub(crate) fn general(&self, fd: &VcpuFd) -> Result<kvm_regs, KvmError> {
        if self.sync { Ok(fd.sync_regs().regs) } else { fd.get_regs().call("KVM_GET_REGS") }
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

    /// System registers as they are now.
    pub(crate) fn system(&mut self, fd: &VcpuFd) -> Result<kvm_sregs, KvmError> {
        let sregs = fd.get_sregs().call("KVM_GET_SREGS")?;
        // Before SWAPGS, kernel mode still has the user's GS base: no copy of that is kept.
        let kernel_gs = (sregs.gs.base as i64) < 0;
        if kernel_gs && sregs.cs.selector & 3 == 0 {
            self.recent = Some((sregs, host_tsc()));
        }
        Ok(sregs)
    }

    /// System registers as they were a moment ago in kernel mode: good for GS base there and for
    /// translating kernel addresses.
    pub(crate) fn recent_system(&mut self, fd: &VcpuFd) -> Result<kvm_sregs, KvmError> {
        match &self.recent {
            Some((sregs, at)) if host_tsc().wrapping_sub(*at) < COPY_LIFETIME => Ok(*sregs),
            _ => self.system(fd),
        }
    }

    /// Replaces the system registers before the next KVM_RUN.
    pub(crate) fn set_system(&mut self, fd: &mut VcpuFd, sregs: &kvm_sregs) -> Result<(), KvmError> {
        self.recent = None;
        fd.set_sregs(sregs).call("KVM_SET_SREGS")
    }
}
