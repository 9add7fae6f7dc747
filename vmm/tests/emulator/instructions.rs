//! The instructions that are compared, and cases of them, with operands of every kind.
//!
//! Registers and state make the instruction stay inside its case's data and end at one of its
//! landing pads.

use guest::micro::exec::{DATA_SIZE, Slot, State};
use iced_x86::{Code, Encoder, EncodingKind, Instruction, Mnemonic, OpKind, Register};
use proptest::prelude::*;
use vmm::emulate::{self, test_utils::EDGES};

use super::operands::{self, Memory};
use super::{DF, ID, STATUS};

/// The number of choices that one case may use.
const CHOICES: usize = 64;

/// The parts of a case besides its instruction's opcode.
#[derive(Debug, Clone)]
pub struct Draw {
    /// The choices of operands, prefixes and targets.
    choices: Vec<u8>,
    registers: [u64; 16],
    rflags: u64,
    data: Vec<u64>,
}

/// Returns numbers at which arithmetic changes its behaviour, and others.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u64>(), prop::sample::select(&EDGES), 0..70u64]
}

/// Returns the ingredients of cases.
pub fn draw() -> impl Strategy<Value = Draw> {
    let data = prop::collection::vec(value(), DATA_SIZE / 8);
    let choices = prop::collection::vec(any::<u8>(), CHOICES);
    let registers = prop::array::uniform16(value());
    (choices, registers, any::<u64>(), data).prop_map(|(choices, registers, rflags, data)| Draw {
        choices,
        registers,
        rflags: rflags & (STATUS | DF | ID),
        data,
    })
}

/// An iterator over choices.
pub struct Chooser<'a>(std::slice::Iter<'a, u8>);

impl Chooser<'_> {
    pub fn byte(&mut self) -> u8 {
        *self.0.next().expect("more choices are drawn than are used")
    }

    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    /// Returns true one time in `times`.
    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }
}

/// One instruction and the state before it.
#[derive(Debug, Clone)]
pub struct Case {
    pub slot: Slot,
    pub bytes: Vec<u8>,
    pub insn: Instruction,
    pub state: State,
    pub data: [u8; DATA_SIZE],
}

impl Case {
    fn new(slot: Slot, draw: &Draw) -> Self {
        let mut data = [0; DATA_SIZE];
        for (to, from) in data.as_chunks_mut::<8>().0.iter_mut().zip(&draw.data) {
            *to = from.to_le_bytes();
        }
        let state = State {
            registers: draw.registers,
            rflags: draw.rflags,
            rip: slot.entry(),
        };
        Self {
            slot,
            bytes: Vec::new(),
            insn: Instruction::default(),
            state,
            data,
        }
    }

    pub fn register(&mut self, register: Register) -> &mut u64 {
        &mut self.state.registers[register.full_register().number()]
    }

    /// Stores bytes in the data.
    fn store(&mut self, address: u64, bytes: &[u8]) {
        let start = (address - self.slot.data()) as usize;
        self.data[start..start + bytes.len()].copy_from_slice(bytes);
    }
}

/// The mnemonics under test.
///
/// Others have tests of their own: those that only a kernel may execute, that use segments, or that
/// the emulator leaves to the host CPU.
#[rustfmt::skip]
const MNEMONICS: &[Mnemonic] = {
    use Mnemonic::*;
    &[
        Nop, Reservednop, Pause, Endbr64, Endbr32, Prefetchw, Prefetchnta, Prefetcht0, Prefetcht1, Prefetcht2,
        Lfence, Mfence, Sfence,
        Push, Pop, Pushfq, Pushf, Popfq, Popf, Leave,
        Mov, Movzx, Movsx, Movsxd, Movnti, Lea, Cbw, Cwde, Cdqe, Cwd, Cdq, Cqo,
        Add, Adc, Sub, Sbb, And, Or, Xor, Cmp, Test, Inc, Dec, Neg, Not, Mul, Imul, Div, Idiv,
        Shl, Sal, Shr, Sar, Rol, Ror, Rcl, Rcr, Shld, Shrd, Bt, Bts, Btr, Btc, Bsf, Bsr, Bswap,
        Xchg, Xadd, Cmpxchg, Cmpxchg8b, Cmpxchg16b,
        Clc, Stc, Cmc, Cld, Std, Lahf, Sahf,
        Call, Jmp, Ret, Jrcxz, Jecxz, Loop, Loope, Loopne,
        Ja, Jae, Jb, Jbe, Je, Jg, Jge, Jl, Jle, Jne, Jno, Jnp, Jns, Jo, Jp, Js,
        Seta, Setae, Setb, Setbe, Sete, Setg, Setge, Setl, Setle, Setne, Setno, Setnp, Setns, Seto, Setp, Sets,
        Cmova, Cmovae, Cmovb, Cmovbe, Cmove, Cmovg, Cmovge, Cmovl, Cmovle, Cmovne, Cmovno, Cmovnp, Cmovns, Cmovo,
        Cmovp, Cmovs,
    ]
};

/// Returns the opcodes under test.
pub fn codes() -> Vec<Code> {
    Code::values()
        .filter(|&code| {
            let op_code = code.op_code();
            op_code.mode64()
                && op_code.encoding() == EncodingKind::Legacy
                && MNEMONICS.contains(&code.mnemonic())
                && !left_out(code)
        })
        .collect()
}

/// Checks whether an opcode of the same mnemonics is not the emulator's.
fn left_out(code: Code) -> bool {
    let mut insn = Instruction::default();
    insn.set_code(code);
    let is_far = insn.is_call_far_indirect() || insn.is_jmp_far_indirect();
    // Segment and control registers.
    let choices = [0; CHOICES];
    let has_others = operands::choose(&mut insn, &mut Chooser(choices.iter())).is_none();
    // A near branch with an operand-size prefix, which Intel and AMD CPUs decode differently.
    let is_vendors = matches!(code, Code::Retnw | Code::Retnw_imm16)
        || insn.op0_kind() == OpKind::NearBranch64 && code.op_code().operand_size() == 16
        || matches!(code, Code::Call_rm16 | Code::Jmp_rm16);
    is_far || has_others || is_vendors || is_refused(code)
}

/// Checks whether the emulator knowingly refuses an opcode.
fn is_refused(code: Code) -> bool {
    matches!(
        code,
        // Undefined.
        Code::Bswap_r16
            // Of registers, #UD on some CPUs.
            | Code::Reservednop_rm16_r16_0F0D
            | Code::Reservednop_rm32_r32_0F0D
            | Code::Reservednop_rm64_r64_0F0D
            // Two bytes of RBP: no compiler emits it.
            | Code::Leavew
            // Counted in ECX.
            | Code::Loop_rel8_64_ECX
            | Code::Loope_rel8_64_ECX
            | Code::Loopne_rel8_64_ECX
    )
}

/// No-operations as compilers and assemblers emit them, with more prefixes than an encoder would
/// use.
const NOPS: &[&[u8]] = &[
    &[0x90],
    &[0x66, 0x90],
    &[0x66, 0x66, 0x90],
    &[0x66, 0x66, 0x66, 0x66, 0x90],
    &[0x48, 0x90],
    &[0x2e, 0x90],
    &[0xf2, 0x90],
    &[0xf3, 0x90],
    &[0x0f, 0x1f, 0x00],
    &[0x0f, 0x1f, 0xc0],
    &[0x0f, 0x1f, 0x40, 0x00],
    &[0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x0f, 0x1f, 0x80, 0x00, 0x00, 0x00, 0x00],
    &[0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
    &[0x66, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
    &[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
    &[
        0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00,
    ],
    &[
        0x66, 0x66, 0x66, 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00,
    ],
    &[
        0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00,
    ],
    &[0x48, 0x0f, 0x1f, 0x00],
    &[0x67, 0x0f, 0x1f, 0x40, 0x00],
    &[0x64, 0x0f, 0x1f, 0x40, 0x7f],
    &[0x41, 0x0f, 0x1f, 0x43, 0x80],
    &[0xf3, 0x0f, 0x1e, 0xfa],
    &[0x3e, 0xf3, 0x0f, 0x1e, 0xfa],
];

/// Returns the case of the entry `index` of [`NOPS`].
pub fn nop(index: usize, slot: Slot, draw: &Draw) -> Case {
    let mut case = Case::new(slot, draw);
    case.bytes = NOPS[index].to_vec();
    case.insn = emulate::decode(&case.bytes, slot.entry()).unwrap();
    case
}

/// The number of no-operations.
pub const NOP_COUNT: usize = NOPS.len();

/// Returns a case of `code` at `slot`. `None` if the draw allows none.
pub fn case(code: Code, slot: Slot, draw: &Draw) -> Option<Case> {
    let mut choices = Chooser(draw.choices.iter());
    let mut case = Case::new(slot, draw);
    let prefix = redundant_prefix(code, &mut choices);

    let mut insn = Instruction::default();
    insn.set_code(code);
    let uses_stack = insn.is_stack_instruction() || code == Code::Leaveq;
    let stack = slot.data() + 0x80 + u64::from(choices.byte());
    if uses_stack {
        *case.register(Register::RSP) = stack;
    }
    if code == Code::Leaveq {
        *case.register(Register::RBP) = stack;
    }
    let target = choices.below(3);
    let memory = operands::choose(&mut insn, &mut choices)?;
    likely_registers(&insn, &mut case, &mut choices);
    if let Some(memory) = memory {
        place_memory(&mut insn, memory, &mut case, &mut choices, uses_stack)?;
    }
    let lockable = memory.is_some()
        && insn.op0_kind() == OpKind::Memory
        && code.op_code().can_use_lock_prefix();
    insn.set_has_lock_prefix(lockable && choices.one_in(4));

    // A branch's length determines its targets, not the other way round.
    let is_direct = insn.op_count() > 0 && insn.op0_kind() == OpKind::NearBranch64;
    if is_direct {
        insn.set_near_branch64(slot.below());
    }
    let length = encode(&insn, slot, prefix)?.len();
    let target = [slot.below(), slot.after(length), slot.above(length)][target];
    if is_direct {
        insn.set_near_branch64(target);
    }
    let bytes = encode(&insn, slot, prefix)?;
    let decoded = emulate::decode(&bytes, slot.entry()).ok()?;
    // If the instruction has several encodings, another may have been chosen.
    if decoded.code() != code || bytes.len() != length {
        return None;
    }
    (case.bytes, case.insn) = (bytes, decoded);
    give_values(&mut case, target, &mut choices)?;
    Some(case)
}

/// Returns the instruction's bytes at its place in `slot`, behind `prefix`.
fn encode(insn: &Instruction, slot: Slot, prefix: Option<u8>) -> Option<Vec<u8>> {
    let before = prefix.map_or(0, |_| 1);
    let mut encoder = Encoder::new(64);
    encoder.encode(insn, slot.entry() + before).ok()?;
    let bytes: Vec<u8> = prefix.into_iter().chain(encoder.take_buffer()).collect();
    (bytes.len() <= 15).then_some(bytes)
}

/// Returns a prefix that changes nothing: a segment without a base, or one of the hints on
/// branches.
fn redundant_prefix(code: Code, choices: &mut Chooser<'_>) -> Option<u8> {
    const SEGMENTS: [u8; 6] = [0x26, 0x2e, 0x36, 0x3e, 0x64, 0x65];
    let choice = choices.below(48);
    match code.mnemonic() {
        Mnemonic::Call | Mnemonic::Jmp if choice == 6 => Some(0xf2),
        Mnemonic::Ret if choice == 6 => Some(0xf2),
        Mnemonic::Ret if choice == 7 => Some(0xf3),
        _ => SEGMENTS.get(choice).copied(),
    }
}

/// Sets values that make the interesting half of an instruction's cases likely.
fn likely_registers(insn: &Instruction, case: &mut Case, choices: &mut Chooser<'_>) {
    match insn.mnemonic() {
        // Quotients that fit.
        Mnemonic::Div | Mnemonic::Idiv if !choices.one_in(4) => {
            *case.register(Register::RAX) &= 0x7fff_ffff_0000_00ff;
            *case.register(Register::RDX) = 0;
        }
        Mnemonic::Loop | Mnemonic::Loope | Mnemonic::Loopne | Mnemonic::Jrcxz | Mnemonic::Jecxz => {
            const COUNTS: [u64; 4] = [0, 1, 2, 1 << 32];
            if let Some(&count) = COUNTS.get(choices.below(6)) {
                *case.register(Register::RCX) = count;
            }
        }
        _ => {}
    }
}

/// Chooses the place of the memory operand of `insn`, and the registers that lead there.
fn place_memory(
    insn: &mut Instruction,
    mut memory: Memory,
    case: &mut Case,
    choices: &mut Chooser<'_>,
    uses_stack: bool,
) -> Option<()> {
    if !accesses(insn) {
        // Any address will do.
        return operands::leave(insn, memory, choices);
    }
    // The stack pointer is what a push and a pop change.
    if uses_stack && memory.base.is_gpr() && choices.one_in(3) {
        memory.base = Register::RSP;
    }
    let reach = 0x90 + u64::from(choices.byte()) % 0xe0;
    let mut address = case.slot.data() + reach;
    if insn.mnemonic() == Mnemonic::Cmpxchg16b {
        address &= !15;
    }
    if is_bit_string(insn) {
        // Refused: the emulator does not define where such an address wraps.
        if memory.short {
            return None;
        }
        let index = insn.op1_register();
        if index.full_register() == memory.base || index.full_register() == memory.index {
            return None;
        }
        // 128 bytes to either side.
        let offset = i64::from(choices.word() as i32) % 1024;
        let whole = case.register(index);
        *whole = match index.size() {
            2 => *whole & !0xffff | offset as u64 & 0xffff,
            4 => *whole & !0xffff_ffff | offset as u64 & 0xffff_ffff,
            _ => offset as u64,
        };
    }
    operands::lead(insn, memory, address, case, choices, uses_stack)
}

/// Checks whether a register selects a bit of memory, which may be outside the operand itself.
fn is_bit_string(insn: &Instruction) -> bool {
    insn.op_count() == 2
        && insn.op1_kind() == OpKind::Register
        && matches!(
            insn.mnemonic(),
            Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc
        )
}

/// Checks whether the memory operand is read or written at all.
fn accesses(insn: &Instruction) -> bool {
    !matches!(
        insn.mnemonic(),
        Mnemonic::Lea
            | Mnemonic::Nop
            | Mnemonic::Reservednop
            | Mnemonic::Prefetchw
            | Mnemonic::Prefetchnta
            | Mnemonic::Prefetcht0
            | Mnemonic::Prefetcht1
            | Mnemonic::Prefetcht2
    )
}

/// Sets registers and memory that are a branch's target, flags, or to be equal.
fn give_values(case: &mut Case, target: u64, choices: &mut Chooser<'_>) -> Option<()> {
    let insn = case.insn;
    let stack = *case.register(Register::RSP);
    let in_memory = (0..insn.op_count()).any(|operand| insn.op_kind(operand) == OpKind::Memory);
    let address = operands::address(&insn, &case.state.registers);
    match insn.mnemonic() {
        Mnemonic::Call | Mnemonic::Jmp if in_memory => {
            case.store(address, &target.to_le_bytes());
        }
        Mnemonic::Call | Mnemonic::Jmp if insn.op0_kind() == OpKind::Register => {
            // It would push onto the code.
            if insn.mnemonic() == Mnemonic::Call && insn.op0_register() == Register::RSP {
                return None;
            }
            *case.register(insn.op0_register()) = target;
        }
        Mnemonic::Ret => case.store(stack, &target.to_le_bytes()),
        Mnemonic::Popfq | Mnemonic::Popf => {
            let flags = case.state.registers[0] & (STATUS | DF | ID);
            case.store(stack, &flags.to_le_bytes());
        }
        Mnemonic::Cmpxchg if choices.one_in(2) => {
            let accumulator = *case.register(Register::RAX);
            if in_memory {
                case.store(address, &accumulator.to_le_bytes());
            } else {
                *case.register(insn.op0_register()) = accumulator;
            }
        }
        Mnemonic::Cmpxchg8b | Mnemonic::Cmpxchg16b if choices.one_in(2) => {
            let half = insn.memory_size().size() / 2;
            for (offset, register) in [(0, Register::RAX), (half as u64, Register::RDX)] {
                let value = case.register(register).to_le_bytes();
                case.store(address + offset, &value[..half]);
            }
        }
        _ => {}
    }
    Some(())
}
