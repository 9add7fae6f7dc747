//! Builds an instruction of any opcode, with chosen operands.

use iced_x86::{Code, Encoder, Instruction, OpCodeOperandKind, OpKind, Register};

use super::super::decode;

/// The address of the instruction.
pub const IP: u64 = 0x40_0000;

/// Returns all 15 general registers except RSP, which is never a data operand here.
pub fn general_registers() -> impl Iterator<Item = Register> {
    Register::values().filter(|r| r.is_gpr64() && *r != Register::RSP)
}

/// The choice of a memory operand, and the choices for everything else: any bytes will do, at least
/// one.
#[derive(Debug)]
pub struct Choices<'a>(pub &'a [u8]);

impl Choices<'_> {
    fn at(&self, index: usize) -> usize {
        usize::from(self.0[index % self.0.len()])
    }

    /// Returns a part of `size` bytes of a general register.
    fn register(&self, index: usize, size: usize) -> Register {
        const HIGH: [Register; 4] = [Register::AH, Register::CH, Register::DH, Register::BH];
        let choice = self.at(index);
        if size == 1 && choice >= 200 {
            return HIGH[choice % HIGH.len()];
        }
        let whole = general_registers().nth(choice % 15).unwrap();
        let of_size =
            |register: &Register| register.size() == size && register.full_register() == whole;
        Register::values()
            .filter(|r| r.is_gpr() && !HIGH.contains(r))
            .find(of_size)
            .unwrap()
    }
}

/// Returns the instruction with opcode `code`, decoded from its bytes at [`IP`]. Memory is `[RSI]`.
///
/// Returns `None` if the choices cannot be encoded, or an operand is not a general or XMM register,
/// memory or an immediate.
pub fn build(code: Code, choices: &Choices<'_>) -> Option<Instruction> {
    let mut insn = Instruction::default();
    insn.set_code(code);
    let op_code = code.op_code();
    let in_memory = choices.at(0).is_multiple_of(2);
    for operand in 0..op_code.op_count() {
        let choice = choices.at(operand as usize + 1);
        let signed = choice as u8 as i8 as u64;
        let mut register = |register| {
            insn.set_op_kind(operand, OpKind::Register);
            insn.set_op_register(operand, register);
        };
        use OpCodeOperandKind as Kind;
        let kind = op_code.op_kind(operand);
        let size = match kind {
            Kind::r8_reg | Kind::r8_opcode | Kind::r8_or_mem => 1,
            Kind::r16_reg | Kind::r16_rm | Kind::r16_opcode | Kind::r16_or_mem => 2,
            Kind::r32_reg | Kind::r32_rm | Kind::r32_opcode | Kind::r32_or_mem | Kind::r32_vvvv => {
                4
            }
            Kind::r64_reg | Kind::r64_rm | Kind::r64_opcode | Kind::r64_or_mem | Kind::r64_vvvv => {
                8
            }
            _ => 0,
        };
        match kind {
            Kind::r8_or_mem
            | Kind::r16_or_mem
            | Kind::r32_or_mem
            | Kind::r64_or_mem
            | Kind::xmm_or_mem
                if in_memory =>
            {
                memory(&mut insn, operand);
            }
            Kind::mem => memory(&mut insn, operand),
            _ if size != 0 => register(choices.register(operand as usize + 1, size)),
            Kind::xmm_reg | Kind::xmm_rm | Kind::xmm_or_mem => {
                register(Register::XMM0 + choice as u32 % 16);
            }
            Kind::al => register(Register::AL),
            Kind::cl => register(Register::CL),
            Kind::ax => register(Register::AX),
            Kind::dx => register(Register::DX),
            Kind::eax => register(Register::EAX),
            Kind::rax => register(Register::RAX),
            Kind::imm8 => immediate(&mut insn, operand, OpKind::Immediate8, choice as u64),
            Kind::imm8_const_1 => immediate(&mut insn, operand, OpKind::Immediate8, 1),
            Kind::imm8sex16 => immediate(&mut insn, operand, OpKind::Immediate8to16, signed),
            Kind::imm8sex32 => immediate(&mut insn, operand, OpKind::Immediate8to32, signed),
            Kind::imm8sex64 => immediate(&mut insn, operand, OpKind::Immediate8to64, signed),
            Kind::imm16 => immediate(
                &mut insn,
                operand,
                OpKind::Immediate16,
                choice as u64 * 0x101,
            ),
            Kind::imm32 => immediate(
                &mut insn,
                operand,
                OpKind::Immediate32,
                choice as u64 * 0x0101_0101,
            ),
            Kind::imm32sex64 => {
                immediate(
                    &mut insn,
                    operand,
                    OpKind::Immediate32to64,
                    (choice as i32).wrapping_mul(0x0101_0101) as u64,
                );
            }
            Kind::imm64 => immediate(
                &mut insn,
                operand,
                OpKind::Immediate64,
                choice as u64 * 0x0101_0101_0101_0101,
            ),
            _ => return None,
        }
    }
    let mut encoder = Encoder::new(64);
    encoder.encode(&insn, IP).ok()?;
    let decoded = decode(&encoder.take_buffer(), IP).ok()?;
    // If the instruction has several encodings, another may have been chosen.
    (decoded.code() == code).then_some(decoded)
}

fn memory(insn: &mut Instruction, operand: u32) {
    insn.set_op_kind(operand, OpKind::Memory);
    insn.set_memory_base(Register::RSI);
}

fn immediate(insn: &mut Instruction, operand: u32, kind: OpKind, value: u64) {
    insn.set_op_kind(operand, kind);
    insn.set_immediate_u64(operand, value);
}
