//! What a walk of a stack yields: frames, how each was found, why the walk ended, and the registers that interrupts,
//! exceptions and system calls save on kernel stacks.

use std::fmt;

use crate::bytes::u64_at;
use crate::x86_64::{CpuState, GeneralRegisters, ReadVirtualError};
use crate::{Gva, MemoryView};

/// How a frame's address came to be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// It is the instruction pointer of a CPU, or of a task that was switched away from before its first instruction.
    Register,
    /// It stands in registers that were saved when an interrupt, an exception or a signal came.
    Interrupted,
    /// It is the return address that the kernel's or the program's unwind information points at, or that a chain of
    /// frame pointers does in a kernel that is built with them.
    Return,
    /// It is a return address only if an assumption holds.
    Guess(Guess),
}

/// An assumption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guess {
    /// That the code keeps frame pointers, although nothing says so.
    FramePointer,
    /// That a function without a frame has nothing on the stack but its return address.
    TopOfStack,
}

/// Who replaced a return address on the stack by one of their own, to be called when the function returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReturnTrampoline {
    /// A kretprobe, fprobe or other user of the kernel's rethooks.
    Rethook,
    /// The function graph tracer.
    FunctionGraph,
}

/// One frame, from the innermost outwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// The instruction that runs next in this frame: the instruction pointer, or a return address.
    pub address: Gva,
    /// How it was found.
    pub found: Found,
    /// Whether this and all frames before it were found without an assumption.
    pub reliable: bool,
    /// Set where the return address on the stack had been replaced. [`address`](Self::address) is then the original
    /// one; if that was not found, the trampoline's, and the frame is not reliable.
    pub trampoline: Option<ReturnTrampoline>,
}

impl Frame {
    /// Whether the instruction at [`address`](Self::address) itself belongs to the frame. It need not for a return
    /// address: a call may be the last instruction of its function.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        matches!(self.found, Found::Register | Found::Interrupted)
    }

    /// The address to look symbols and source lines up by: inside the instruction that the frame is at.
    #[must_use]
    pub fn lookup_address(&self) -> u64 {
        match self.is_exact() {
            true => self.address.0,
            false => self.address.0.wrapping_sub(1),
        }
    }
}

/// Why a walk found no further frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The kernel was entered from a process here; its stack goes on with [`Stack::entry`].
    UserMode,
    /// The outermost frame: a thread's first function, or where the unwind information says that nothing called.
    Bottom,
    /// A page that is needed is not in memory.
    NotPresent {
        /// First byte that could not be read.
        gva: Gva,
    },
    /// Nothing says how to leave the function.
    NoUnwindInfo {
        /// An address in it.
        address: Gva,
    },
    /// The unwind information is there and makes no sense, or uses what is not supported.
    BadUnwindInfo {
        /// An address in the function it is for.
        address: Gva,
    },
    /// The unwind information needs a register that is not known in this frame.
    LostRegister {
        /// An address in the function.
        address: Gva,
        /// DWARF's number of the register (System V ABI for AMD64, figure 3.36).
        register: u16,
    },
    /// A return address is no code.
    NotCode {
        /// It.
        address: Gva,
    },
    /// A stack or frame pointer leads out of every stack of the task and its CPU.
    OffStack {
        /// It.
        pointer: Gva,
    },
    /// The next frame is not further out than this one: the stack is damaged, or was read while it changed.
    NotOutwards {
        /// The next stack or frame pointer.
        pointer: Gva,
    },
    /// The most frames asked for were found; there are more.
    TooLong,
    /// The task has no stack any more: it has ended and waits for its parent to notice.
    NoStack,
    /// A 32-bit program, whose frames are not read.
    ThirtyTwoBit,
    /// The CPU is just entering or leaving the kernel: of the program's registers some stand in memory and some in the
    /// CPU.
    AtBorder,
}

impl End {
    /// Whether the stack is complete.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        matches!(self, Self::UserMode | Self::Bottom)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UserMode => write!(f, "entered from user mode"),
            Self::Bottom => write!(f, "outermost frame"),
            Self::NotPresent { gva } => write!(f, "{gva} is not in memory"),
            Self::NoUnwindInfo { address } => write!(f, "no unwind information for {address}"),
            Self::BadUnwindInfo { address } => {
                write!(
                    f,
                    "the unwind information for {address} is damaged or of an unknown kind"
                )
            }
            Self::LostRegister { address, register } => write!(
                f,
                "unwinding {address} needs DWARF register {register}, which is not known there"
            ),
            Self::NotCode { address } => write!(f, "return address {address} is no code"),
            Self::OffStack { pointer } => write!(f, "{pointer} is on no stack of the task"),
            Self::NotOutwards { pointer } => {
                write!(f, "the next frame at {pointer} is not further out")
            }
            Self::TooLong => write!(f, "more frames follow"),
            Self::NoStack => write!(f, "the task has ended and has no stack any more"),
            Self::ThirtyTwoBit => write!(f, "a 32-bit program's stack is not read"),
            Self::AtBorder => write!(
                f,
                "the kernel is just being entered or left, and the program's registers are not all saved"
            ),
        }
    }
}

/// A walked stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Innermost first.
    pub frames: Vec<Frame>,
    /// Why there are no more.
    pub end: End,
    /// Of a kernel stack that ended in [`End::UserMode`]: the process's registers, where they are known whole.
    pub entry: Option<SavedRegisters>,
}

impl Stack {
    /// A stack of which nothing is known but why.
    pub(crate) fn empty(end: End) -> Self {
        Self {
            frames: Vec::new(),
            end,
            entry: None,
        }
    }

    /// Whether every frame was found without an assumption and the stack is complete.
    #[must_use]
    pub fn is_reliable(&self) -> bool {
        self.end.is_complete() && self.frames.iter().all(|frame| frame.reliable)
    }
}

/// Registers as the kernel's entry code saves them on a stack (`struct pt_regs`, arch/x86/include/asm/ptrace.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedRegisters {
    /// General registers, RIP and RFLAGS.
    pub general: GeneralRegisters,
    /// Selector of the code segment.
    pub cs: u16,
    /// Number of the system call; else what the entry code keeps there.
    pub orig_rax: u64,
}

/// Selector of 32-bit user code (`__USER32_CS`, arch/x86/include/asm/segment.h).
const USER32_CS: u16 = 0x23;

impl SavedRegisters {
    /// Bytes of a `pt_regs`.
    pub const SIZE: u64 = 21 * 8;
    /// Bytes of what the CPU itself pushes: RIP, CS, RFLAGS, RSP, SS.
    pub(super) const HARDWARE_SIZE: u64 = 5 * 8;

    /// The registers saved at `at`.
    ///
    /// # Errors
    /// If they are not in memory.
    pub fn read(view: MemoryView<'_>, at: Gva) -> Result<Self, ReadVirtualError> {
        let bytes = view.array::<{ Self::SIZE as usize }>(at)?;
        let word = |index: usize| u64_at(&bytes, index * 8).unwrap_or_default();
        let general = GeneralRegisters {
            r15: word(0),
            r14: word(1),
            r13: word(2),
            r12: word(3),
            rbp: word(4),
            rbx: word(5),
            r11: word(6),
            r10: word(7),
            r9: word(8),
            r8: word(9),
            rax: word(10),
            rcx: word(11),
            rdx: word(12),
            rsi: word(13),
            rdi: word(14),
            rip: word(16),
            rflags: word(18),
            rsp: word(19),
        };
        Ok(Self {
            general,
            // Kernels that know FRED keep other things in the upper bits.
            cs: word(17) as u16,
            orig_rax: word(15),
        })
    }

    /// Those of a CPU in user mode, which is in no system call.
    pub(crate) fn of_cpu(cpu: &CpuState) -> Self {
        Self {
            general: cpu.general,
            cs: cpu.cs,
            orig_rax: u64::MAX,
        }
    }

    /// Whether they are a process's.
    #[must_use]
    pub fn in_user_mode(&self) -> bool {
        self.cs & 3 == 3
    }

    /// Whether a process goes on with them. A thread of a process that never leaves the kernel, such as a worker of
    /// io_uring, keeps some of user mode with neither an instruction nor a stack (`copy_thread`,
    /// arch/x86/kernel/process.c).
    pub(super) fn are_of_entry(&self) -> bool {
        self.in_user_mode() && (self.general.rip, self.general.rsp) != (0, 0)
    }

    /// Whether they are those of 32-bit user code.
    #[must_use]
    pub fn is_32_bit(&self) -> bool {
        self.cs == USER32_CS
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::test_memory::{Flags, TestMemory};

    #[test]
    fn saved_registers_stand_in_the_kernels_order() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        memory.map(space, 0x5000, 0x18_0000, 4096, Flags::default());
        for index in 0..21u64 {
            memory.write(0x18_0100 + index * 8, &(0x3300 + index).to_le_bytes());
        }
        memory.write(0x18_0100 + 17 * 8, &0xabcd_0033u64.to_le_bytes());
        let paused = PausedMemory::new(&memory);
        let regs = SavedRegisters::read(paused.view(space), Gva(0x5100)).unwrap();
        let general = regs.general;
        for (name, found, index) in [
            ("r15", general.r15, 0),
            ("r14", general.r14, 1),
            ("r13", general.r13, 2),
            ("r12", general.r12, 3),
            ("rbp", general.rbp, 4),
            ("rbx", general.rbx, 5),
            ("r11", general.r11, 6),
            ("r10", general.r10, 7),
            ("r9", general.r9, 8),
            ("r8", general.r8, 9),
            ("rax", general.rax, 10),
            ("rcx", general.rcx, 11),
            ("rdx", general.rdx, 12),
            ("rsi", general.rsi, 13),
            ("rdi", general.rdi, 14),
            ("orig_rax", regs.orig_rax, 15),
            ("rip", general.rip, 16),
            ("rflags", general.rflags, 18),
            ("rsp", general.rsp, 19),
        ] {
            assert_eq!(found, 0x3300 + index, "{name}");
        }
        assert_eq!(
            (regs.cs, regs.in_user_mode(), regs.is_32_bit()),
            (0x33, true, false)
        );
        assert!(SavedRegisters::read(paused.view(space), Gva(0x5f80)).is_err());
    }

    #[test]
    fn return_addresses_are_looked_up_inside_the_call() {
        for (found, lookup) in [
            (Found::Register, 0x1000),
            (Found::Interrupted, 0x1000),
            (Found::Return, 0xfff),
            (Found::Guess(Guess::FramePointer), 0xfff),
        ] {
            let frame = Frame {
                address: Gva(0x1000),
                found,
                reliable: true,
                trampoline: None,
            };
            assert_eq!(frame.lookup_address(), lookup, "{found:?}");
        }
    }
}
