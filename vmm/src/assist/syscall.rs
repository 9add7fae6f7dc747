//! Repair of SYSCALL on hosts where it arrives at LSTAR with the user's privilege.
//!
//! There, the first instruction fetch at LSTAR takes a page fault in user mode, with RCX and R11 as
//! SYSCALL left them. A hardware breakpoint watches the guest's page-fault entry. It leaves the
//! guest's text unchanged, and the guest's boot-time patching cannot remove it.
//!
//! A fault is turned into the kernel entry of SYSCALL if it has all its marks. RIP is LSTAR, and CS
//! is the user's. The flags are masked as in R11, and a SYSCALL instruction ends at RCX. Any other
//! fault is left alone: a program that jumps to LSTAR has made no system call.

use kvm_bindings::{kvm_regs, kvm_sregs};

use crate::x86_64::exception_frame::ExceptionFrame;
use crate::x86_64::{rflags, segments};

/// The MSRs of SYSCALL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SyscallMsrs {
    pub(crate) star: u64,
    pub(crate) lstar: u64,
    pub(crate) mask: u64,
}

/// Checks whether the fault is a failed SYSCALL. `regs` are those at the page-fault entry.
///
/// SYSCALL has masked the flags, the interrupt flag among them, and left the program's own in R11.
/// A program that jumps here cannot mask the interrupt flag. Otherwise it could choose the flags
/// that SYSRET loads from R11, I/O privilege among them.
pub(crate) fn is_syscall(frame: &ExceptionFrame, msrs: &SyscallMsrs, regs: &kvm_regs) -> bool {
    msrs.lstar != 0
        && frame.rip == msrs.lstar
        && frame.cs & segments::RPL_MASK == 3
        && frame.rflags & msrs.mask & !rflags::RF == 0
        && (regs.r11 ^ frame.rflags) & !(msrs.mask | rflags::RF) == 0
}

/// Turns the registers at the page-fault entry into those at the SYSCALL entry.
pub(crate) fn repair(
    frame: &ExceptionFrame,
    msrs: &SyscallMsrs,
    regs: &mut kvm_regs,
    sregs: &mut kvm_sregs,
) {
    let selector = (msrs.star >> 32) as u16 & !3;
    regs.rip = msrs.lstar;
    regs.rsp = frame.rsp;
    regs.rflags = frame.rflags & !msrs.mask & !rflags::RF | rflags::FIXED;
    sregs.cs = segments::code64(selector);
    sregs.ss = segments::data(selector.wrapping_add(8));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSRS: SyscallMsrs = SyscallMsrs {
        star: 0x0023_0010 << 32,
        lstar: 0xffff_ffff_81c0_0080,
        mask: 0x257fd5,
    };

    fn frame(rip: u64, cs: u64) -> ExceptionFrame {
        ExceptionFrame {
            rip,
            cs,
            rflags: 0x1_0002,
            rsp: 0x7ffe_0000,
            ss: 0x2b,
        }
    }

    #[test]
    fn only_a_user_fetch_at_lstar_is_a_syscall() {
        let regs = kvm_regs {
            r11: 0x246,
            ..Default::default()
        };
        assert!(is_syscall(&frame(MSRS.lstar, 0x33), &MSRS, &regs));
        assert!(!is_syscall(&frame(MSRS.lstar, 0x10), &MSRS, &regs));
        assert!(!is_syscall(&frame(0x40_1000, 0x33), &MSRS, &regs));
        assert!(!is_syscall(&frame(0, 0x33), &SyscallMsrs::default(), &regs));
        let jump = ExceptionFrame {
            rflags: 0x1_0246,
            ..frame(MSRS.lstar, 0x33)
        };
        assert!(
            !is_syscall(&jump, &MSRS, &regs),
            "interrupts are on: a jump"
        );
        let raised = kvm_regs {
            r11: 0x8_0246,
            ..Default::default()
        };
        assert!(
            !is_syscall(&frame(MSRS.lstar, 0x33), &MSRS, &raised),
            "flags that the program does not have"
        );
    }

    #[test]
    fn any_selector_that_a_guest_writes_is_taken() {
        let msrs = SyscallMsrs {
            star: u64::MAX,
            ..MSRS
        };
        let mut sregs = kvm_sregs::default();
        repair(
            &frame(MSRS.lstar, 0x33),
            &msrs,
            &mut kvm_regs::default(),
            &mut sregs,
        );
        assert_eq!((sregs.cs.selector, sregs.ss.selector), (0xfffc, 4));
    }

    #[test]
    fn the_repaired_registers_are_those_of_syscall() {
        let mut regs = kvm_regs {
            rcx: 0x40_1002,
            r11: 0x246,
            rsp: 1,
            ..Default::default()
        };
        let mut sregs = kvm_sregs::default();
        repair(&frame(MSRS.lstar, 0x33), &MSRS, &mut regs, &mut sregs);
        assert_eq!((regs.rip, regs.rsp), (MSRS.lstar, 0x7ffe_0000));
        assert_eq!(regs.rflags, 2, "RF cleared");
        assert_eq!((sregs.cs.selector, sregs.cs.dpl, sregs.cs.l), (0x10, 0, 1));
        assert_eq!((sregs.ss.selector, sregs.ss.dpl), (0x18, 0));
        assert_eq!((regs.rcx, regs.r11), (0x40_1002, 0x246));
    }
}
