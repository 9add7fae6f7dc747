//! Operands of an instruction, and memory operands whose registers lead to a given address.

use iced_x86::{Instruction, OpCodeOperandKind, OpKind, Register};

use super::instructions::{Case, Chooser};

const HIGH: [Register; 4] = [Register::AH, Register::CH, Register::DH, Register::BH];

/// The shape of a memory operand.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// A 64-bit register, RIP or none.
    pub base: Register,
    /// A 64-bit register other than RSP, or none.
    pub index: Register,
    scale: u32,
    /// The size of the displacement in bytes: 0, 1 or 4.
    displacement: u32,
    /// Whether an address-size prefix cuts addresses to 32 bits.
    pub short: bool,
}

fn register_of(number: usize, size: usize) -> Register {
    let first = match size {
        1 if number < 4 => return Register::AL + number as u32,
        1 => return Register::SPL + (number as u32 - 4),
        2 => Register::AX,
        4 => Register::EAX,
        _ => Register::RAX,
    };
    first + number as u32
}

fn register(size: usize, choices: &mut Chooser<'_>) -> Register {
    if size == 1 && choices.one_in(5) {
        return HIGH[choices.below(4)];
    }
    register_of(choices.below(16), size)
}

/// Chooses all operands. Returns `None` if one is of a kind without choices. A memory operand is
/// only chosen, and placed later.
pub fn choose(insn: &mut Instruction, choices: &mut Chooser<'_>) -> Option<Option<Memory>> {
    use OpCodeOperandKind as Kind;
    let op_code = insn.op_code();
    let prefers_memory = !choices.one_in(3);
    let mut memory = None;
    for operand in 0..op_code.op_count() {
        let kind = op_code.op_kind(operand);
        let (size, may_be_memory) = match kind {
            Kind::r8_reg | Kind::r8_opcode => (1, false),
            Kind::r16_reg | Kind::r16_rm | Kind::r16_opcode => (2, false),
            Kind::r32_reg | Kind::r32_rm | Kind::r32_opcode => (4, false),
            Kind::r64_reg | Kind::r64_rm | Kind::r64_opcode => (8, false),
            Kind::r8_or_mem => (1, true),
            Kind::r16_or_mem => (2, true),
            Kind::r32_or_mem => (4, true),
            Kind::r64_or_mem => (8, true),
            Kind::mem | Kind::mem_offs => (0, true),
            _ => (0, false),
        };
        if may_be_memory && (size == 0 || prefers_memory) {
            insn.set_op_kind(operand, OpKind::Memory);
            memory = Some(shape(kind == Kind::mem_offs, choices));
            continue;
        }
        let fixed = match kind {
            Kind::al => Some(Register::AL),
            Kind::cl => Some(Register::CL),
            Kind::ax => Some(Register::AX),
            Kind::dx => Some(Register::DX),
            Kind::eax => Some(Register::EAX),
            Kind::rax => Some(Register::RAX),
            _ if size != 0 => Some(register(size, choices)),
            _ => None,
        };
        if let Some(register) = fixed {
            insn.set_op_kind(operand, OpKind::Register);
            insn.set_op_register(operand, register);
            continue;
        }
        if matches!(kind, Kind::br64_1 | Kind::br64_4) {
            insn.set_op_kind(operand, OpKind::NearBranch64);
            continue;
        }
        immediate(insn, operand, kind, choices)?;
    }
    Some(memory)
}

fn immediate(
    insn: &mut Instruction,
    operand: u32,
    kind: OpCodeOperandKind,
    choices: &mut Chooser<'_>,
) -> Option<()> {
    use OpCodeOperandKind as Kind;
    const EDGES: [u64; 8] = [
        0,
        1,
        u64::MAX,
        0x7f,
        0x7fff_ffff,
        0xffff_ffff_8000_0000,
        0x8000_0000,
        1 << 63,
    ];
    let random = u64::from(choices.word()) << 32 | u64::from(choices.word());
    let value = EDGES.get(choices.below(16)).copied().unwrap_or(random);
    let signed = |bits: u32| ((value << (64 - bits)) as i64 >> (64 - bits)) as u64;
    let (op_kind, value) = match kind {
        Kind::imm8 => (OpKind::Immediate8, value & 0xff),
        Kind::imm8_const_1 => (OpKind::Immediate8, 1),
        Kind::imm8sex16 => (OpKind::Immediate8to16, signed(8)),
        Kind::imm8sex32 => (OpKind::Immediate8to32, signed(8)),
        Kind::imm8sex64 => (OpKind::Immediate8to64, signed(8)),
        // RET would move the stack pointer to any address, which is acceptable.
        Kind::imm16 => (OpKind::Immediate16, value & 0xffff),
        Kind::imm32 => (OpKind::Immediate32, value & 0xffff_ffff),
        Kind::imm32sex64 => (OpKind::Immediate32to64, signed(32)),
        Kind::imm64 => (OpKind::Immediate64, value),
        _ => return None,
    };
    insn.set_op_kind(operand, op_kind);
    insn.set_immediate_u64(operand, value);
    Some(())
}

fn shape(plain: bool, choices: &mut Chooser<'_>) -> Memory {
    let short = choices.one_in(8);
    let kind = choices.below(16);
    let mut base = register_of(choices.below(16), 8);
    let mut index = register_of(choices.below(16), 8);
    if index == Register::RSP || kind >= 8 {
        index = Register::None;
    }
    if kind == 0 || kind == 15 {
        base = Register::None;
    }
    if kind == 14 {
        base = Register::RIP;
    }
    if plain {
        (base, index) = (Register::None, Register::None);
    }
    Memory {
        base,
        index,
        scale: 1 << choices.below(4),
        displacement: [0, 1, 4][choices.below(3)],
        short,
    }
}

/// Returns a register as an address of this size names it.
fn named(register: Register, short: bool) -> Register {
    match register {
        Register::None => Register::None,
        Register::RIP if short => Register::EIP,
        Register::RIP => Register::RIP,
        register if short => register_of(register.number(), 4),
        register => register,
    }
}

fn set(insn: &mut Instruction, memory: Memory, displacement: u64) {
    insn.set_memory_base(named(memory.base, memory.short));
    insn.set_memory_index(named(memory.index, memory.short));
    insn.set_memory_index_scale(if memory.index == Register::None {
        1
    } else {
        memory.scale
    });
    let wide = if memory.short { 4 } else { 8 };
    // Without a base there is no short displacement.
    let has_base = memory.base != Register::None && memory.base != Register::RIP;
    let size = match memory.displacement {
        0 | 1 if has_base => memory.displacement,
        _ => wide,
    };
    insn.set_memory_displ_size(size);
    let displacement = if memory.short {
        displacement & 0xffff_ffff
    } else {
        displacement
    };
    insn.set_memory_displacement64(displacement);
}

/// Returns a displacement of the shape's size.
fn displacement(memory: Memory, choices: &mut Chooser<'_>) -> i64 {
    let random = choices.word() as i32;
    match memory.displacement {
        _ if memory.base == Register::None => i64::from(random),
        0 => 0,
        1 => i64::from(random as i8),
        _ => i64::from(random),
    }
}

/// Sets any address, for operands that are never accessed.
pub fn leave(insn: &mut Instruction, memory: Memory, choices: &mut Chooser<'_>) -> Option<()> {
    let displacement = match memory.base {
        // Within reach of the instruction.
        Register::RIP => 0x20_0000 + u64::from(choices.word() % 0x1000_0000),
        _ => displacement(memory, choices) as u64,
    };
    set(insn, memory, displacement);
    Some(())
}

/// Makes the operand lead to `target`, by changing the registers of the case. RSP stays the same
/// with `keep_stack`.
pub fn lead(
    insn: &mut Instruction,
    mut memory: Memory,
    target: u64,
    case: &mut Case,
    choices: &mut Chooser<'_>,
    keep_stack: bool,
) -> Option<()> {
    let scale = u64::from(memory.scale);
    let garbage = choices.word();
    let mut displacement = displacement(memory, choices);
    match (memory.base, memory.index) {
        (Register::None | Register::RIP, Register::None) => displacement = target as i64,
        (Register::None, index) => {
            displacement += (target as i64)
                .wrapping_sub(displacement)
                .rem_euclid(scale as i64);
            let value = target.wrapping_sub(displacement as u64) as i64 / scale as i64;
            // The bits that the scale shifts out do not matter.
            let lost = !(u64::MAX >> memory.scale.ilog2());
            *case.register(index) = value as u64 & !lost | u64::from(garbage) << 32 & lost;
        }
        (base, Register::None) if base == Register::RSP && keep_stack => {
            displacement = target.wrapping_sub(*case.register(base)) as i64;
            fit(&mut memory, displacement);
        }
        (base, Register::None) => {
            *case.register(base) = target.wrapping_sub(displacement as u64);
        }
        (base, index) if base == index => {
            // (1 + scale) * register + displacement, with the displacement as small as its size
            // allows.
            let step = scale + 1;
            let rest = displacement.unsigned_abs() / step * step;
            let value = target.wrapping_sub(rest) as i64 / step as i64;
            displacement = target as i64 - value * step as i64;
            *case.register(base) = value as u64;
            fit(&mut memory, displacement);
        }
        (base, index) if base == Register::RSP && keep_stack => {
            let value = u64::from(garbage % 9);
            *case.register(index) = value;
            let sum = case.register(base).wrapping_add(value * scale);
            displacement = target.wrapping_sub(sum) as i64;
            fit(&mut memory, displacement);
        }
        (base, index) => {
            let scaled = case.register(index).wrapping_mul(scale);
            let sum = scaled.wrapping_add(displacement as u64);
            *case.register(base) = target.wrapping_sub(sum);
        }
    }
    if memory.short {
        for register in [memory.base, memory.index] {
            if register.is_gpr() && !(register == Register::RSP && keep_stack) {
                let whole = case.register(register);
                *whole = *whole & 0xffff_ffff | u64::from(garbage) << 32;
            }
        }
    }
    set(insn, memory, displacement as u64);
    Some(())
}

/// Enlarges the displacement's size if the value needs it.
fn fit(memory: &mut Memory, displacement: i64) {
    memory.displacement = match (memory.displacement, displacement) {
        (0, 0) => 0,
        (0 | 1, -128..=127) => 1,
        _ => 4,
    };
}

/// Returns the address of the memory operand, without segments.
pub fn address(insn: &Instruction, registers: &[u64; 16]) -> u64 {
    insn.virtual_address(0, 0, |register, _, _| {
        let whole = match register.full_register() {
            full if full.is_gpr() => registers[full.number()],
            _ => 0,
        };
        Some(match register.size() {
            4 => whole & 0xffff_ffff,
            _ => whole,
        })
    })
    .unwrap_or_default()
}
