//! A loop around KVM_RUN that does nothing at a trap. Benchmarks measure with it the cost of a hit
//! in KVM alone.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use kvm_bindings::{
    KVM_EXIT_DEBUG, KVM_EXIT_INTERNAL_ERROR, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, kvm_run,
};

use super::Vcpu;
use crate::machine::RunEnd;

/// `_IO(KVMIO, 0x80)` of `linux/kvm.h`.
const KVM_RUN: libc::Ioctl = 0xae80;
/// The length of an int3 in bytes.
const LENGTH: u64 = 1;

impl Vcpu {
    /// Runs the loop. See [`crate::machine::Handle::run_bare`].
    pub(crate) fn run_bare(&mut self, address: u64, hits: u64, system: bool) -> Result<(), RunEnd> {
        let host = |message: String| RunEnd::Host { message };
        if !self.machine.profile.sync_regs {
            let message =
                "this host's KVM has no registers in the shared page: nothing to compare with";
            return Err(host(message.into()));
        }
        self.clear_kick();
        let before = self.machine.counters.traps.load(Ordering::Relaxed);
        while self.machine.counters.traps.load(Ordering::Relaxed) == before {
            self.enter()?;
        }
        let run: *mut kvm_run = self.fd.get_kvm_run();
        // SAFETY: `run` is the vCPU's mapping, which lives as long as `self.fd`. Nobody else uses
        // it meanwhile.
        let asked = unsafe { (*run).kvm_valid_regs };
        let valid = KVM_SYNC_X86_REGS | if system { KVM_SYNC_X86_SREGS } else { 0 };
        // SAFETY: as above.
        unsafe { (*run).kvm_valid_regs = u64::from(valid) };
        let result = self.meet_bare(run, address, hits);
        // SAFETY: as above.
        unsafe { (*run).kvm_valid_regs = asked };
        result
    }

    /// Runs the loop itself on the vCPU's shared page.
    fn meet_bare(&self, run: *mut kvm_run, address: u64, hits: u64) -> Result<(), RunEnd> {
        let host = |message: String| RunEnd::Host { message };
        let fd = self.fd.as_raw_fd();
        for done in 1..hits {
            // SAFETY: KVM_RUN has no argument. The descriptor is this vCPU's and open, on its own
            // thread.
            while unsafe { libc::ioctl(fd, KVM_RUN, 0) } != 0 {
                let error = std::io::Error::last_os_error();
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return Err(host(format!("KVM_RUN failed after {done} hits: {error}")));
                }
            }
            // SAFETY: `run` is the vCPU's mapping, which lives as long as `self.fd`. KVM writes to
            // it in KVM_RUN only, which is over. All members of its unions are integers.
            let (reason, regs) = unsafe { ((*run).exit_reason, &mut (*run).s.regs.regs) };
            let is_trap = matches!(reason, KVM_EXIT_DEBUG | KVM_EXIT_INTERNAL_ERROR);
            if !is_trap || regs.rip != address {
                let rip = regs.rip;
                return Err(host(format!(
                    "exit {reason} at {rip:#x} after {done} of {hits} hits of {address:#x}"
                )));
            }
            regs.rip += LENGTH;
            // SAFETY: as above.
            unsafe { (*run).kvm_dirty_regs = u64::from(KVM_SYNC_X86_REGS) };
        }
        Ok(())
    }
}
