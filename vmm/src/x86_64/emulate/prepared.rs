//! Instructions whose execution is prepared once, when a trap is armed over them. They are the most
//! frequent ones at the start of functions and at return addresses.
//!
//! A [`Prepared`] does the same as [`execute`](super::execute), at any address, or nothing. The
//! caller then uses [`execute`](super::execute). It changes general registers, RIP and RFLAGS, and
//! may store one word at an address that is a multiple of 8.

use std::mem::offset_of;

use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register};
use kvm_bindings::kvm_regs;

use super::cpu::{is_canonical, is_immediate};
use super::flags::{self, RF, STATUS, TF};

/// The size in bytes of a word on the stack.
const WORD: u64 = 8;
/// The address bits that every CPU has. The rest repeat the topmost.
const ADDRESS_BITS: u32 = 48;

/// The number of general registers that instructions name.
const REGISTERS: usize = 16;

/// A 64-bit general register, as its index in KVM's structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Place {
    Rax,
    Rbx,
    Rcx,
    Rdx,
    Rsi,
    Rdi,
    Rsp,
    Rbp,
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
}

impl Place {
    fn of(register: Register) -> Option<Self> {
        Some(match register.full_register() {
            Register::RAX => Self::Rax,
            Register::RBX => Self::Rbx,
            Register::RCX => Self::Rcx,
            Register::RDX => Self::Rdx,
            Register::RSI => Self::Rsi,
            Register::RDI => Self::Rdi,
            Register::RSP => Self::Rsp,
            Register::RBP => Self::Rbp,
            Register::R8 => Self::R8,
            Register::R9 => Self::R9,
            Register::R10 => Self::R10,
            Register::R11 => Self::R11,
            Register::R12 => Self::R12,
            Register::R13 => Self::R13,
            Register::R14 => Self::R14,
            Register::R15 => Self::R15,
            _ => return None,
        })
    }

    #[inline]
    fn in_regs(self, regs: &mut kvm_regs) -> &mut u64 {
        &mut in_order(regs)[self as usize]
    }
}

/// Returns the registers in the order of [`Place`].
#[inline]
fn in_order(regs: &mut kvm_regs) -> &mut [u64; REGISTERS] {
    macro_rules! ordered {
        ($($field:ident $place:ident),*) => {
            $(const {
                assert!(offset_of!(kvm_regs, $field) == Place::$place as usize * size_of::<u64>())
            };)*
        };
    }
    ordered!(
        rax Rax, rbx Rbx, rcx Rcx, rdx Rdx, rsi Rsi, rdi Rdi, rsp Rsp, rbp Rbp, r8 R8, r9 R9, r10 R10, r11 R11,
        r12 R12, r13 R13, r14 R14, r15 R15
    );
    let registers: *mut kvm_regs = regs;
    // SAFETY: `kvm_regs` is `repr(C)` and begins with these registers in this order, which the
    // assertions above ensure. The result borrows `regs`.
    unsafe { &mut *registers.cast() }
}

/// The second operand: a whole register, or a number extended to 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Register(Place),
    Number(u64),
}

impl Source {
    fn value(self, regs: &mut kvm_regs) -> u64 {
        match self {
            Self::Register(place) => *place.in_regs(regs),
            Self::Number(number) => number,
        }
    }
}

/// An operation on two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Move,
    Add,
    Subtract,
    Compare,
    And,
    Test,
    Or,
    Xor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// No operation: only RIP changes.
    Nothing,
    /// A push of the register's 64 bits.
    Push(Place),
    /// An operation on registers and numbers of `size` bytes, 4 or 8.
    Combine {
        operation: Operation,
        to: Place,
        from: Source,
        size: u8,
    },
    /// A LEA of 64 bits without RIP: `base + index * scale + displacement`.
    Address {
        to: Place,
        base: Option<Place>,
        index: Option<Place>,
        scale: u8,
        displacement: u64,
    },
    /// A JMP by this distance from the next instruction.
    Jump(u64),
}

/// An instruction that is ready to be executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prepared {
    kind: Kind,
    length: u8,
}

impl Prepared {
    /// Prepares an instruction. Returns `None` for all but the simplest.
    pub(crate) fn of(instruction: &Instruction) -> Option<Self> {
        // LOCK on a register is #UD. Other uses of REP are left to the emulator.
        let prefixed = instruction.has_lock_prefix()
            || instruction.has_rep_prefix()
            || instruction.has_repne_prefix();
        let kind = match instruction.mnemonic() {
            Mnemonic::Nop | Mnemonic::Endbr64 => Kind::Nothing,
            _ if prefixed => return None,
            Mnemonic::Push => push(instruction)?,
            Mnemonic::Lea => lea(instruction)?,
            Mnemonic::Jmp => jump(instruction)?,
            mnemonic => combine(operation(mnemonic)?, instruction)?,
        };
        let length = u8::try_from(instruction.len()).ok()?;
        Some(Self { kind, length })
    }

    /// Executes the instruction on `regs`, whose RIP is its address.
    ///
    /// `store` writes a word at a linear address that is a multiple of 8, and returns whether it
    /// could. Returns false if nothing was done: [`execute`](super::execute) then reports the
    /// reason.
    #[inline]
    pub(crate) fn execute(
        &self,
        regs: &mut kvm_regs,
        store: impl FnOnce(u64, u64) -> bool,
    ) -> bool {
        let mut next = regs.rip.wrapping_add(u64::from(self.length));
        if let Kind::Jump(distance) = self.kind {
            next = next.wrapping_add(distance);
        }
        if regs.rflags & TF != 0 || !is_canonical(next, ADDRESS_BITS) {
            return false;
        }
        match self.kind {
            Kind::Nothing | Kind::Jump(_) => {}
            Kind::Push(place) => {
                let value = *place.in_regs(regs);
                let at = regs.rsp.wrapping_sub(WORD);
                let fits = at.is_multiple_of(WORD) && is_canonical(at, ADDRESS_BITS);
                if !fits || !store(at, value) {
                    return false;
                }
                regs.rsp = at;
            }
            Kind::Combine {
                operation,
                to,
                from,
                size,
            } => combined(regs, operation, to, from, size.into()),
            Kind::Address {
                to,
                base,
                index,
                scale,
                displacement,
            } => {
                let mut part = |place: Option<Place>| place.map_or(0, |p| *p.in_regs(regs));
                let (base, index) = (part(base), part(index));
                let scaled = index.wrapping_mul(scale.into());
                *to.in_regs(regs) = displacement.wrapping_add(base).wrapping_add(scaled);
            }
        }
        regs.rip = next;
        regs.rflags &= !RF;
        true
    }
}

fn combined(regs: &mut kvm_regs, operation: Operation, to: Place, from: Source, size: usize) {
    let mask = flags::mask(size);
    let (a, b) = (*to.in_regs(regs) & mask, from.value(regs) & mask);
    // CF, OF and, on all CPUs, AF are clear then.
    let logic = |result: u64| (result, flags::of_result(size, result), STATUS);
    let (result, set, affected) = match operation {
        Operation::Move => (b, 0, 0),
        Operation::Add => {
            let (result, set) = flags::add(size, a, b, false);
            (result, set, STATUS)
        }
        Operation::Subtract | Operation::Compare => {
            let (result, set) = flags::subtract(size, a, b, false);
            (result, set, STATUS)
        }
        Operation::And | Operation::Test => logic(a & b),
        Operation::Or => logic(a | b),
        Operation::Xor => logic(a ^ b),
    };
    // Four bytes clear the upper half.
    if !matches!(operation, Operation::Compare | Operation::Test) {
        *to.in_regs(regs) = result;
    }
    regs.rflags = (regs.rflags & !affected) | (set & affected);
}

fn operation(mnemonic: Mnemonic) -> Option<Operation> {
    Some(match mnemonic {
        Mnemonic::Mov => Operation::Move,
        Mnemonic::Add => Operation::Add,
        Mnemonic::Sub => Operation::Subtract,
        Mnemonic::Cmp => Operation::Compare,
        Mnemonic::And => Operation::And,
        Mnemonic::Test => Operation::Test,
        Mnemonic::Or => Operation::Or,
        Mnemonic::Xor => Operation::Xor,
        _ => return None,
    })
}

fn push(instruction: &Instruction) -> Option<Kind> {
    let register = instruction.op0_register();
    let whole = instruction.op0_kind() == OpKind::Register
        && register.is_gpr64()
        && instruction.stack_pointer_increment() == -(WORD as i32);
    whole.then_some(Kind::Push(Place::of(register)?))
}

fn lea(instruction: &Instruction) -> Option<Kind> {
    if instruction.code() != Code::Lea_r64_m || instruction.is_ip_rel_memory_operand() {
        return None;
    }
    let part = |register: Register| match register {
        Register::None => Some(None),
        register if register.is_gpr64() => Place::of(register).map(Some),
        _ => None,
    };
    let (base, index) = (
        part(instruction.memory_base())?,
        part(instruction.memory_index())?,
    );
    // Without a register the displacement may have 32 bits.
    if base.is_none() && index.is_none() {
        return None;
    }
    Some(Kind::Address {
        to: Place::of(instruction.op0_register())?,
        base,
        index,
        scale: u8::try_from(instruction.memory_index_scale()).ok()?,
        displacement: instruction.memory_displacement64(),
    })
}

fn jump(instruction: &Instruction) -> Option<Kind> {
    let near = instruction.op0_kind() == OpKind::NearBranch64;
    near.then(|| {
        let target = instruction.near_branch64();
        Kind::Jump(target.wrapping_sub(instruction.next_ip()))
    })
}

fn combine(operation: Operation, instruction: &Instruction) -> Option<Kind> {
    if instruction.op_count() != 2 || instruction.op0_kind() != OpKind::Register {
        return None;
    }
    let to = instruction.op0_register();
    let size = to.size();
    let general = |register: Register| register.is_gpr32() || register.is_gpr64();
    if !general(to) {
        return None;
    }
    let from = match instruction.op1_kind() {
        OpKind::Register => {
            let from = instruction.op1_register();
            let alike = general(from) && from.size() == size;
            Source::Register(Place::of(from).filter(|_| alike)?)
        }
        kind if is_immediate(kind) => Source::Number(instruction.immediate(1)),
        _ => return None,
    };
    Some(Kind::Combine {
        operation,
        to: Place::of(to)?,
        from,
        size: u8::try_from(size).ok()?,
    })
}
