//! Repairing SYSCALL on hosts where it arrives at LSTAR with the user's privilege.
//!
//! There, the first instruction fetch at LSTAR takes a page fault in user mode, with RCX and R11 as SYSCALL
//! left them. The page-fault entry of the guest is watched by a hardware breakpoint (so that the guest's
//! text stays as it is, and its own boot-time patching cannot remove the watch); a fault with RIP = CR2 =
//! LSTAR and a user CS is turned into the kernel entry that SYSCALL should have been. Any other fault goes
//! its way.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};

use crate::x86_64::segments;

/// RFLAGS.RF
const RESUME: u64 = 1 << 16;
/// RFLAGS bit 1 is always set.
const ALWAYS: u64 = 2;

/// The exception frame with error code that the CPU pushed, from low to high addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FaultFrame {
    pub(crate) error: u64,
    pub(crate) rip: u64,
    pub(crate) cs: u64,
    pub(crate) rflags: u64,
    pub(crate) rsp: u64,
    pub(crate) ss: u64,
}

impl FaultFrame {
    /// Bytes on the stack.
    pub(crate) const SIZE: usize = 48;

    pub(crate) fn from_bytes(bytes: &[u8; Self::SIZE]) -> Self {
        let word = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[i * 8..i * 8 + 8]);
            u64::from_le_bytes(word)
        };
        Self { error: word(0), rip: word(1), cs: word(2), rflags: word(3), rsp: word(4), ss: word(5) }
    }
}

/// The MSRs of SYSCALL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SyscallMsrs {
    pub(crate) star: u64,
    pub(crate) lstar: u64,
    pub(crate) mask: u64,
}

/// Whether the fault is a SYSCALL that went wrong.
pub(crate) fn is_syscall(frame: &FaultFrame, msrs: &SyscallMsrs) -> bool {
    msrs.lstar != 0 && frame.rip == msrs.lstar && frame.cs & segments::RPL_MASK == 3
}

/// Turns the registers at the page-fault entry into those at the SYSCALL entry.
pub(crate) fn repair(
    frame: &FaultFrame,
    msrs: &SyscallMsrs,
    regs: &mut kvm_regs,
    sregs: &mut kvm_sregs,
) {
    let selector = (msrs.star >> 32) as u16 & !3;
    regs.rip = msrs.lstar;
    regs.rsp = frame.rsp;
    regs.rflags = frame.rflags & !msrs.mask & !RESUME | ALWAYS;
    sregs.cs = segments::code64(selector);
    let stack: kvm_segment = segments::data(selector + 8);
    sregs.ss = stack;
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSRS: SyscallMsrs =
        SyscallMsrs { star: 0x0023_0010 << 32, lstar: 0xffff_ffff_81c0_0080, mask: 0x47700 };

    fn frame(rip: u64, cs: u64) -> FaultFrame {
        FaultFrame { error: 0x15, rip, cs, rflags: 0x1_0246, rsp: 0x7ffe_0000, ss: 0x2b }
    }

    #[test]
    fn only_a_user_fetch_at_lstar_is_a_syscall() {
        assert!(is_syscall(&frame(MSRS.lstar, 0x33), &MSRS));
        assert!(!is_syscall(&frame(MSRS.lstar, 0x10), &MSRS));
        assert!(!is_syscall(&frame(0x40_1000, 0x33), &MSRS));
        assert!(!is_syscall(&frame(0, 0x33), &SyscallMsrs::default()));
    }

    #[test]
    fn the_repaired_registers_are_those_of_syscall() {
        let mut regs = kvm_regs { rcx: 0x40_1002, r11: 0x246, rsp: 1, ..Default::default() };
        let mut sregs = kvm_sregs::default();
        repair(&frame(MSRS.lstar, 0x33), &MSRS, &mut regs, &mut sregs);
        assert_eq!((regs.rip, regs.rsp), (MSRS.lstar, 0x7ffe_0000));
        assert_eq!(regs.rflags, 0x46, "IF and RF cleared, ZF and PF kept");
        assert_eq!((sregs.cs.selector, sregs.cs.dpl, sregs.cs.l), (0x10, 0, 1));
        assert_eq!((sregs.ss.selector, sregs.ss.dpl), (0x18, 0));
        assert_eq!((regs.rcx, regs.r11), (0x40_1002, 0x246));
    }
}
