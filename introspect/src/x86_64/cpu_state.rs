//! The registers of a paused CPU as plain values, from which stack walks start.
//!
//! The caller fills it from the CPU's source: a paused vCPU or a core file. Names are the CPU's
//! (Intel SDM volume 1, section 3.4, and volume 3A, section 2.5).

use super::AddressSpace;
use super::paging::ADDRESS;
use crate::{CpuRegisters, Gpa, Gva};

/// CR4.LA57: paging has five levels.
const CR4_LA57: u64 = 1 << 12;
/// The bits of a selector that hold the privilege level.
const PRIVILEGE: u16 = 3;

/// General registers, instruction pointer and flags, in the order of KVM's `struct kvm_regs`.
#[allow(missing_docs, reason = "the CPU's own names")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct GeneralRegisters {
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rsp: u64,
    pub rbp: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
    pub rip: u64,
    pub rflags: u64,
}

impl GeneralRegisters {
    /// Makes registers of their values, in the order of the members.
    #[must_use]
    pub const fn from_words(w: [u64; 18]) -> Self {
        Self {
            rax: w[0],
            rbx: w[1],
            rcx: w[2],
            rdx: w[3],
            rsi: w[4],
            rdi: w[5],
            rsp: w[6],
            rbp: w[7],
            r8: w[8],
            r9: w[9],
            r10: w[10],
            r11: w[11],
            r12: w[12],
            r13: w[13],
            r14: w[14],
            r15: w[15],
            rip: w[16],
            rflags: w[17],
        }
    }

    /// Returns the values, in the order of the members.
    #[must_use]
    pub const fn words(&self) -> [u64; 18] {
        let r = self;
        [
            r.rax, r.rbx, r.rcx, r.rdx, r.rsi, r.rdi, r.rsp, r.rbp, r.r8, r.r9, r.r10, r.r11,
            r.r12, r.r13, r.r14, r.r15, r.rip, r.rflags,
        ]
    }
}

/// The registers of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuState {
    /// The general registers, RIP and RFLAGS.
    pub general: GeneralRegisters,
    /// The selector of the code segment. Its low two bits are the privilege level.
    pub cs: u16,
    /// The current base of GS.
    pub gs_base: u64,
    /// IA32_KERNEL_GS_BASE: the base of GS after the next SWAPGS.
    pub swapped_gs_base: u64,
    /// The base of FS, a user thread's thread-local storage.
    pub fs_base: u64,
    /// The base of the interrupt descriptor table.
    pub idt_base: u64,
    /// CR3, the root of the page tables.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
}

impl CpuState {
    /// Returns the address space in which the CPU runs.
    #[must_use]
    pub fn address_space(&self) -> AddressSpace {
        AddressSpace::of(self)
    }
}

impl CpuRegisters for CpuState {
    fn page_table_root(&self) -> Gpa {
        Gpa(self.cr3 & ADDRESS)
    }

    fn five_level_paging(&self) -> bool {
        self.cr4 & CR4_LA57 != 0
    }

    /// In the few instructions around SWAPGS at the kernel's entries, the other base may be the
    /// right one. A kernel address is then right, because Linux keeps its per-CPU data in the upper
    /// half and sets no such base for processes. A process that sets one with WRGSBASE is believed
    /// for those instructions.
    fn kernel_gs_base(&self) -> Gva {
        let now_is_kernel = self.gs_base >> 63 == 1;
        let (expected, other) = match self.in_user_mode() {
            true => (self.swapped_gs_base, self.gs_base),
            false => (self.gs_base, self.swapped_gs_base),
        };
        match self.in_user_mode() || now_is_kernel {
            true => Gva(expected),
            false => Gva(other),
        }
    }

    fn instruction_pointer(&self) -> Gva {
        Gva(self.general.rip)
    }

    fn in_user_mode(&self) -> bool {
        self.cs & PRIVILEGE == PRIVILEGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_gs_base_is_found_in_every_mode() {
        let (kernel, user) = (0xffff_8880_0700_0000, 0x7f00_0000_1000);
        for (what, cs, now, swapped) in [
            ("kernel mode", 0x10, kernel, user),
            ("user mode", 0x33, user, kernel),
            ("kernel mode before SWAPGS", 0x10, user, kernel),
        ] {
            let cpu = CpuState {
                cs,
                gs_base: now,
                swapped_gs_base: swapped,
                ..CpuState::default()
            };
            assert_eq!(cpu.kernel_gs_base(), Gva(kernel), "{what}");
        }
    }

    #[test]
    fn page_tables_are_those_of_the_control_registers() {
        let cpu = CpuState {
            cr3: 1 << 63 | 0x1234_5fff,
            cr4: 0x20,
            ..CpuState::default()
        };
        let root = Gpa(0x1234_5000);
        assert_eq!(cpu.address_space(), AddressSpace { root, levels: 4 });
        let wide = CpuState { cr4: 0x1020, ..cpu };
        assert_eq!(wide.address_space(), AddressSpace { root, levels: 5 });
    }
}
