//! The result of a stack walk: the frames, how each was found, and why the walk ended. Also the
//! registers that interrupts, exceptions and system calls save on kernel stacks.

use std::fmt;

use crate::bytes::u64_at;
use crate::x86_64::{CpuState, GeneralRegisters, ReadVirtualError};
use crate::{Gva, MemoryView};

/// The source of a frame's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The instruction pointer of a CPU, or of a task that was switched away from before its first
    /// instruction.
    Register,
    /// Registers that an interrupt, an exception or a signal saved.
    Interrupted,
    /// A return address found by the unwind information of the kernel or the program. In a kernel
    /// that is built with frame pointers, also one found by their chain.
    Return,
    /// A return address that is right only if an assumption holds.
    Guess(Guess),
}

/// An assumption of an unreliable frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guess {
    /// The code keeps frame pointers, although no information says so.
    FramePointer,
    /// A function without a frame has nothing on the stack but its return address.
    TopOfStack,
    /// The function has no unwind information, and this is the first return address on the stack
    /// of a call of it.
    Caller,
}

/// A kernel facility that replaced a return address on the stack by its own, to be called when the
/// function returns.
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
    /// The source of the address.
    pub found: Found,
    /// True if this and all inner frames were found without an assumption.
    pub reliable: bool,
    /// The trampoline that had replaced the return address on the stack, if any.
    /// [`address`](Self::address) is then the original address. If the original was not found, it
    /// is the trampoline's, and the frame is not reliable.
    pub trampoline: Option<ReturnTrampoline>,
}

impl Frame {
    /// Checks whether the instruction at [`address`](Self::address) itself belongs to the frame. A
    /// return address may not, because a call may be the last instruction of its function.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        matches!(self.found, Found::Register | Found::Interrupted)
    }

    /// Returns the address for lookups of symbols and source lines. It is inside the instruction
    /// that the frame is at.
    #[must_use]
    pub fn lookup_address(&self) -> u64 {
        match self.is_exact() {
            true => self.address.0,
            false => self.address.0.wrapping_sub(1),
        }
    }
}

/// The reason why a walk found no further frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The kernel was entered from a process here. The process's stack continues with
    /// [`Stack::entry`].
    UserMode,
    /// The outermost frame: a thread's first function, or one that has no caller by the unwind
    /// information.
    Bottom,
    /// A page that is needed is not in memory.
    NotPresent {
        /// The first byte that could not be read.
        gva: Gva,
    },
    /// No information describes how to unwind the function.
    NoUnwindInfo {
        /// An address in the function.
        address: Gva,
    },
    /// The unwind information is malformed, or uses an unsupported feature.
    BadUnwindInfo {
        /// An address in the function that the information is for.
        address: Gva,
    },
    /// The unwind information needs a register that is not known in this frame.
    LostRegister {
        /// An address in the function.
        address: Gva,
        /// DWARF's number of the register (System V ABI for AMD64, figure 3.36).
        register: u16,
    },
    /// A return address is not in code.
    NotCode {
        /// The return address.
        address: Gva,
    },
    /// A stack or frame pointer points outside every stack of the task and its CPU.
    OffStack {
        /// The pointer.
        pointer: Gva,
    },
    /// The next frame is not further out than this one. The stack is damaged, or was read while it
    /// changed.
    NotOutwards {
        /// The next stack or frame pointer.
        pointer: Gva,
    },
    /// The requested maximum of frames was found, and there are more.
    TooLong,
    /// The task has no stack any more, because it has ended and waits for its parent to reap it.
    NoStack,
    /// The program is 32-bit. Its frames are not read.
    ThirtyTwoBit,
    /// The CPU is just entering or leaving the kernel. Some of the program's registers are in
    /// memory and some in the CPU.
    AtBorder,
}

impl End {
    /// Checks whether the stack is complete.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        matches!(self, Self::UserMode | Self::Bottom)
    }

    /// Reads the word at `at`, or ends the walk there.
    pub(super) fn word(view: MemoryView<'_>, at: u64) -> Result<u64, Self> {
        let gva = Gva(at);
        view.u64(gva).map_err(|_| Self::NotPresent { gva })
    }

    /// Reads the registers saved at `at`, or ends the walk there.
    pub(super) fn registers(view: MemoryView<'_>, at: u64) -> Result<SavedRegisters, Self> {
        let gva = Gva(at);
        SavedRegisters::read(view, gva).map_err(|_| Self::NotPresent { gva })
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
            Self::NotCode { address } => write!(f, "return address {address} is not in code"),
            Self::OffStack { pointer } => write!(f, "{pointer} is not on a stack of the task"),
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
    /// The frames, innermost first.
    pub frames: Vec<Frame>,
    /// The reason why the walk ended.
    pub end: End,
    /// The process's registers, if they are known completely. Only for a kernel stack that ended in
    /// [`End::UserMode`].
    pub entry: Option<SavedRegisters>,
}

impl Stack {
    /// Returns a stack without frames, with only the reason for its end.
    pub(crate) fn empty(end: End) -> Self {
        Self {
            frames: Vec::new(),
            end,
            entry: None,
        }
    }

    /// Checks whether every frame was found without an assumption and the stack is complete.
    #[must_use]
    pub fn is_reliable(&self) -> bool {
        self.end.is_complete() && self.frames.iter().all(|frame| frame.reliable)
    }
}

/// Registers as the kernel's entry code saves them on a stack (`struct pt_regs`,
/// arch/x86/include/asm/ptrace.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedRegisters {
    /// The general registers, RIP and RFLAGS.
    pub general: GeneralRegisters,
    /// The selector of the code segment.
    pub cs: u16,
    /// The number of the system call, or the value that other entry code keeps there.
    pub orig_rax: u64,
}

/// The selector of 32-bit user code (`__USER32_CS`, arch/x86/include/asm/segment.h).
const USER32_CS: u16 = 0x23;

impl SavedRegisters {
    /// The size of a `pt_regs` in bytes.
    pub const SIZE: u64 = 21 * 8;
    /// The size in bytes of the part that the CPU pushes: RIP, CS, RFLAGS, RSP, SS.
    pub(super) const HARDWARE_SIZE: u64 = 5 * 8;
    /// The number of the word in a `pt_regs` of each general register.
    const PLACES: [usize; 18] = [10, 5, 11, 12, 13, 14, 19, 4, 9, 8, 7, 6, 3, 2, 1, 0, 16, 18];

    /// Reads the registers saved at `at`.
    ///
    /// # Errors
    /// If they are not in memory.
    pub fn read(view: MemoryView<'_>, at: Gva) -> Result<Self, ReadVirtualError> {
        let bytes = view.array::<{ Self::SIZE as usize }>(at)?;
        Ok(Self::of_words(std::array::from_fn(|index| {
            u64_at(&bytes, index * 8).unwrap_or_default()
        })))
    }

    /// Returns the registers in the words of a `pt_regs`.
    #[must_use]
    pub fn of_words(words: [u64; 21]) -> Self {
        let word = |index: usize| words.get(index).copied().unwrap_or_default();
        Self {
            general: GeneralRegisters::from_words(Self::PLACES.map(word)),
            // Kernels that support FRED keep other data in the upper bits.
            cs: word(17) as u16,
            orig_rax: word(15),
        }
    }

    /// Stores the general registers and the number of the system call in the bytes of a `pt_regs`.
    pub fn store(&self, bytes: &mut [u8; Self::SIZE as usize]) {
        let words = self.general.words();
        let places = Self::PLACES.into_iter().chain([15]);
        for (place, word) in places.zip(words.into_iter().chain([self.orig_rax])) {
            let at = bytes.iter_mut().skip(place * 8);
            at.zip(word.to_le_bytes()).for_each(|(at, byte)| *at = byte);
        }
    }

    /// Returns the registers of a CPU that is in user mode, and so in no system call.
    pub(crate) fn of_cpu(cpu: &CpuState) -> Self {
        Self {
            general: cpu.general,
            cs: cpu.cs,
            orig_rax: u64::MAX,
        }
    }

    /// Checks whether the registers are those of a process.
    #[must_use]
    pub fn in_user_mode(&self) -> bool {
        self.cs & 3 == 3
    }

    /// Checks whether a process resumes with these registers. A thread of a process that never
    /// leaves the kernel, such as an io_uring worker, keeps some user-mode registers. It has
    /// neither an instruction nor a stack (`copy_thread`, arch/x86/kernel/process.c).
    pub(super) fn are_of_entry(&self) -> bool {
        self.in_user_mode() && (self.general.rip, self.general.rsp) != (0, 0)
    }

    /// Checks whether the registers are those of 32-bit user code.
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
        SavedRegisters::read(paused.view(space), Gva(0x5f80)).unwrap_err();
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
