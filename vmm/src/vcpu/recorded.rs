//! Exits as KVM has reported them, recorded while the host record was measured with the micro
//! guest.
//!
//! SVM: kvm_amd of Linux 6.1.192 on QEMU 7.2's TCG. VMX: kvm_intel of Linux 6.1.192 on Bochs 3.0.
//! Both have reported the same, bit for bit. Software: a KVM of Linux 6.18.44 that interprets guest
//! kernel mode.

use kvm_bindings::kvm_debug_exit_arch;

/// The event in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Met {
    Int3,
    Breakpoint,
    Step,
}

const fn arch(exception: u32, pc: u64, dr6: u64, dr7: u64) -> kvm_debug_exit_arch {
    kvm_debug_exit_arch {
        exception,
        pad: 1,
        pc,
        dr6,
        dr7,
    }
}

/// The recorded KVM_EXIT_DEBUG exits, with their hosts and causes.
pub(crate) const DEBUG_EXITS: [(&str, Met, kvm_debug_exit_arch); 8] = [
    ("SVM, VMX: kernel", Met::Int3, arch(3, 0x10_10c4, 0, 0)),
    ("SVM, VMX: program", Met::Int3, arch(3, 0x10_3044, 0, 0)),
    (
        "SVM, VMX: kernel",
        Met::Breakpoint,
        arch(1, 0x10_1033, 0xffff_0ff1, 0x402),
    ),
    (
        "SVM, VMX: program",
        Met::Breakpoint,
        arch(1, 0x10_3000, 0xffff_0ff1, 0x402),
    ),
    (
        "SVM, VMX: kernel",
        Met::Step,
        arch(1, 0x10_1034, 0xffff_4ff0, 0x400),
    ),
    (
        "SVM, VMX: program",
        Met::Step,
        arch(1, 0x10_3001, 0xffff_4ff0, 0x400),
    ),
    // DR7 has the bytes that were in the shared page.
    (
        "software: kernel",
        Met::Breakpoint,
        arch(1, 0x10_1033, 0xffff_0ff1, 0xe08e_c031_c08e_d88e),
    ),
    (
        "software: kernel",
        Met::Step,
        arch(1, 0x10_1034, 0xffff_4ff0, 0xe08e_c031_c08e_d88e),
    ),
];

/// The KVM_EXIT_INTERNAL_ERROR with suberror 1 of the software KVM at an int3 in guest kernel mode.
/// Fields: `ndata`, `flags`, `insn_size`, `insn_bytes`.
pub(crate) const FAILED_INT3: (u32, u64, u8, [u8; 15]) = (
    8,
    1,
    15,
    [
        0xcc, 0x48, 0xff, 0xcb, 0x75, 0xfa, 0xc3, 0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 0x10,
    ],
);
