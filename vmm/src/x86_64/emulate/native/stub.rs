//! Machine code around one guest instruction: loads the guest's registers, runs it, stores them,
//! restores the host's.
//!
//! The caller vouches for the instruction. It may use the general registers except RSP and the
//! scratch register, XMM registers, MXCSR flags and status flags. It may access [`Context::memory`]
//! through the scratch register, and nothing else.

use std::mem::offset_of;
use std::ptr;

use iced_x86::code_asm::registers::gpr64::get_gpr64;
use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, ptr as at, qword_ptr, r12, r13, r14, r15, rbp, rbx, rdi,
};
use iced_x86::{IcedError, Instruction, Register};

use super::super::environment::FxState;
use super::code_memory::Place;

/// The size in bytes of the buffer for the memory operand.
pub(super) const MEMORY_SIZE: usize = 64;

/// The general registers that a stub loads and stores, in the order of [`Context::registers`].
///
/// RSP is not among them: a signal may arrive at any instruction, and needs the host's stack.
pub(super) const REGISTERS: [Register; 15] = [
    Register::RAX,
    Register::RCX,
    Register::RDX,
    Register::RBX,
    Register::RBP,
    Register::RSI,
    Register::RDI,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
    Register::R12,
    Register::R13,
    Register::R14,
    Register::R15,
];

/// Candidates for the register that points to the [`Context`]. An instruction uses far fewer, so
/// one is always free.
pub(super) const SCRATCH: [Register; 8] = [
    Register::RDI,
    Register::RSI,
    Register::RBX,
    Register::RBP,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
];

/// The buffer for the memory operand, aligned for every instruction.
#[repr(C, align(64))]
pub(super) struct Buffer(pub(super) [u8; MEMORY_SIZE]);

/// The data that a stub loads and stores.
#[repr(C)]
pub(super) struct Context {
    /// The XMM registers and MXCSR, in and out. The x87 part is loaded too.
    pub(super) fx: FxState,
    host_fx: FxState,
    pub(super) memory: Buffer,
    /// The registers in the order of [`REGISTERS`], in and out. The scratch register's value is
    /// left alone.
    pub(super) registers: [u64; REGISTERS.len()],
    /// The status flags in. The status and system flags out.
    pub(super) rflags: u64,
}

impl Context {
    /// The offset of the buffer for the memory operand.
    pub(super) const MEMORY: usize = offset_of!(Context, memory);
}

impl Default for Context {
    fn default() -> Self {
        Self {
            fx: FxState::default(),
            host_fx: FxState::default(),
            memory: Buffer([0; MEMORY_SIZE]),
            registers: [0; REGISTERS.len()],
            rflags: 2,
        }
    }
}

/// The machine code for one instruction, in a place of its own that is not rewritten while this
/// lives.
pub(super) struct Stub {
    place: Place,
}

impl Stub {
    /// Assembles the stub for an instruction whose memory operand, if any, is `[scratch +
    /// Context::MEMORY]`.
    pub(super) fn new(insn: &Instruction, scratch: Register) -> Result<Self, &'static str> {
        let base = get_gpr64(scratch).ok_or("its scratch register is not a 64-bit register")?;
        let code = assemble(insn, base).map_err(|_| "it cannot be encoded for the host")?;
        let place = Place::with(&code)?;
        Ok(Self { place })
    }

    pub(super) fn run(&self, context: &mut Context) {
        debug_assert!(
            context.fx.mxcsr() & !0xffff == 0,
            "FXRSTOR faults on unknown MXCSR bits"
        );
        // SAFETY: the place holds a whole function made by `assemble`, in the System V calling
        // convention with one pointer argument. It is executable and does not change as long as
        // `self` lives.
        let code: extern "sysv64" fn(*mut Context) =
            unsafe { std::mem::transmute(self.place.address().as_ptr()) };
        // The code writes only inside `context`, which is exclusively ours, and on the stack below
        // its frame.
        code(ptr::from_mut(context));
    }
}

/// Returns the stub's code: `extern "sysv64" fn(context: *mut Context)`. `base` is the scratch
/// register.
fn assemble(insn: &Instruction, base: AsmRegister64) -> Result<Vec<u8>, IcedError> {
    let guest_registers = || {
        REGISTERS
            .iter()
            .enumerate()
            .filter_map(|(index, &register)| {
                Some((
                    get_gpr64(register)?,
                    offset_of!(Context, registers) + index * 8,
                ))
            })
            .filter(|&(register, _)| register != base)
    };
    let callee_saved = [rbx, rbp, r12, r13, r14, r15];

    let mut a = CodeAssembler::new(64)?;
    for register in callee_saved {
        a.push(register)?;
    }
    a.fxsave64(at(rdi + offset_of!(Context, host_fx)))?;
    a.fxrstor64(at(rdi + offset_of!(Context, fx)))?;
    a.push(qword_ptr(rdi + offset_of!(Context, rflags)))?;
    a.popfq()?;
    // From here to the guest's, no instruction changes flags.
    if base != rdi {
        a.mov(base, rdi)?;
    }
    for (register, offset) in guest_registers() {
        a.mov(register, at(base + offset))?;
    }
    a.add_instruction(*insn)?;
    for (register, offset) in guest_registers() {
        a.mov(at(base + offset), register)?;
    }
    a.pushfq()?;
    a.pop(qword_ptr(base + offset_of!(Context, rflags)))?;
    a.fxsave64(at(base + offset_of!(Context, fx)))?;
    a.fxrstor64(at(base + offset_of!(Context, host_fx)))?;
    for register in callee_saved.into_iter().rev() {
        a.pop(register)?;
    }
    a.ret()?;
    a.assemble(0)
}
