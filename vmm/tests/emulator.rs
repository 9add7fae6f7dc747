//! The emulator against the CPU: the same instruction in the guest and by [`vmm::emulate`] leaves
//! the same registers, flags, memory and RIP.
//!
//! Cases are made from a seed, new at every run. `EXOTRACE_EMULATOR_SEED=N` runs those of a seed
//! again. In user mode the CPU executes the guest's instructions on every host. In kernel mode an
//! interpreting KVM does. The few that it lacks there are the emulator's in both. An instruction
//! that the host's CPU does not have is left out, and named.
#![allow(clippy::unwrap_used)]

#[path = "emulator/instructions.rs"]
mod instructions;
#[path = "emulator/operands.rs"]
mod operands;
mod support;

use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;
use std::hash::{BuildHasher, RandomState};

use guest::micro::exec::{DATA_SIZE, SLOT_SIZE, Slot, State};
use iced_x86::{Code, FlowControl, Instruction, Mnemonic, OpKind, RflagsBits};
use instructions::Case;
use introspect::{Gpa, PhysicalMemory};
use kvm_bindings::kvm_regs;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use support::{Host, micro};
use vmm::emulate::{self, EmulateError, test_utils::Machine, vector::DIVIDE_ERROR};

/// The flags that arithmetic sets.
const STATUS: u64 = 0x8d5;
const IF: u64 = 1 << 9;
const DF: u64 = 1 << 10;
const ID: u64 = 1 << 21;
/// The one bit that is always set.
const FIXED: u64 = 2;
/// The environment variable with the seed.
const SEED: &str = "EXOTRACE_EMULATOR_SEED";

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Kernel,
    User,
}

/// The state after an instruction.
#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    state: State,
    data: [u8; DATA_SIZE],
}

/// Returns the registers by their numbers.
fn by_number(regs: &mut kvm_regs) -> [&mut u64; 16] {
    [
        &mut regs.rax,
        &mut regs.rcx,
        &mut regs.rdx,
        &mut regs.rbx,
        &mut regs.rsp,
        &mut regs.rbp,
        &mut regs.rsi,
        &mut regs.rdi,
        &mut regs.r8,
        &mut regs.r9,
        &mut regs.r10,
        &mut regs.r11,
        &mut regs.r12,
        &mut regs.r13,
        &mut regs.r14,
        &mut regs.r15,
    ]
}

fn to_kvm(state: &State, mode: Mode) -> kvm_regs {
    let fixed = match mode {
        Mode::Kernel => FIXED,
        Mode::User => FIXED | IF,
    };
    let mut regs = kvm_regs {
        rip: state.rip,
        rflags: state.rflags | fixed,
        ..kvm_regs::default()
    };
    for (register, value) in by_number(&mut regs).into_iter().zip(state.registers) {
        *register = value;
    }
    regs
}

fn from_kvm(mut regs: kvm_regs) -> State {
    State {
        registers: by_number(&mut regs).map(|register| *register),
        rflags: regs.rflags,
        rip: regs.rip,
    }
}

/// Returns the memory of a case, and the rest of a vCPU as the micro guest sets it up.
fn machine(case: &Case, mode: Mode) -> Machine {
    Machine {
        base: case.slot.data(),
        memory: case.data.to_vec(),
        writable: DATA_SIZE,
        cpl: match mode {
            Mode::Kernel => 0,
            Mode::User => 3,
        },
        // PG and PE; PAE. No shadow stacks, 48-bit addresses.
        cr0: 0x8000_0001,
        cr4: 0x20,
        xcr0: Some(1),
        ..Machine::default()
    }
}

/// Returns the emulator's result of a case. `None` if a CPU would raise #DE or leaves the result
/// undefined.
fn emulated(case: &Case, mode: Mode) -> Result<Option<Outcome>, EmulateError> {
    let before = machine(case, mode);
    let mut machine = before.clone();
    let mut regs = to_kvm(&case.state, mode);
    let executed = emulate::execute(&case.insn, &mut regs, &mut machine);
    let data = std::mem::replace(&mut machine.memory, before.memory.clone());
    assert_eq!(
        machine, before,
        "`{}` changes what is not compared",
        case.insn
    );
    match executed {
        Ok(()) => Ok(Some(Outcome {
            state: from_kvm(regs),
            data: data.try_into().unwrap(),
        })),
        Err(EmulateError::Exception { vector, .. }) if vector == DIVIDE_ERROR => Ok(None),
        // By more than the operand's bits.
        Err(EmulateError::Unsupported { .. })
            if matches!(case.insn.mnemonic(), Mnemonic::Shld | Mnemonic::Shrd) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns the flags that are the same on every CPU after the instruction.
fn defined_flags(case: &Case) -> u64 {
    let undefined = [
        (RflagsBits::CF, 1),
        (RflagsBits::PF, 4),
        (RflagsBits::AF, 0x10),
        (RflagsBits::ZF, 0x40),
        (RflagsBits::SF, 0x80),
        (RflagsBits::OF, 0x800),
    ]
    .into_iter()
    .filter(|(bit, _)| case.insn.rflags_undefined() & bit != 0)
    .fold(0, |all, (_, flag)| all | flag);
    // OF is defined only for rotations by one, after masking the count. A whole turn through CF,
    // such as nine bits of a byte, leaves the operand unchanged, and OF on some CPUs only.
    let through_carry = matches!(case.insn.mnemonic(), Mnemonic::Rcl | Mnemonic::Rcr);
    let by_more = case.insn.op1_kind() == OpKind::Immediate8 && case.insn.immediate8() & 0x1f > 1;
    let overflow = if through_carry && by_more { 0x800 } else { 0 };
    (STATUS | DF | ID) & !undefined & !overflow
}

/// Describes the difference of two outcomes of a case. `None` if there is none.
fn difference(case: &Case, mode: Mode, guest: &Outcome, ours: &Outcome) -> Option<String> {
    let mut text = String::new();
    let names = [
        "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12",
        "r13", "r14", "r15",
    ];
    let flags = defined_flags(case);
    let words = |o: &Outcome| {
        let mut words = o.state.registers.to_vec();
        words.extend([o.state.rflags & flags, o.state.rip]);
        words
    };
    let names = names.into_iter().chain(["rflags", "rip"]);
    for ((name, guest), ours) in names.zip(words(guest)).zip(words(ours)) {
        if guest != ours {
            let _ = writeln!(
                text,
                "  {name}: {guest:#x} in the guest, {ours:#x} emulated"
            );
        }
    }
    for (at, (guest, ours)) in guest.data.iter().zip(&ours.data).enumerate() {
        if guest != ours {
            let address = case.slot.data() + at as u64;
            let _ = writeln!(
                text,
                "  [{address:#x}]: {guest:#04x} in the guest, {ours:#04x} emulated"
            );
        }
    }
    if text.is_empty() {
        return None;
    }
    let insn = &case.insn;
    let _ = writeln!(text, "  before: {:x?}", case.state);
    if insn.is_stack_instruction() || insn.op_kinds().any(|kind| kind == OpKind::Memory) {
        let words = case.data.as_chunks::<8>().0.iter();
        let words: Vec<u64> = words.map(|word| u64::from_le_bytes(*word)).collect();
        let _ = writeln!(text, "  data at {:#x}: {words:x?}", case.slot.data());
    }
    Some(format!(
        "{mode:?} mode: `{insn}` ({:?}), bytes {:02x?}\n{text}",
        insn.code(),
        case.bytes,
    ))
}

/// An instruction that a CPU has or lacks: its opcode, and whether its operand is a register.
///
/// No-operations have no opcode of their own, and are identified by their bytes.
type Form = (Code, Option<OpKind>, Vec<u8>);

fn form(case: &Case) -> Form {
    let is_hint = matches!(case.insn.mnemonic(), Mnemonic::Nop | Mnemonic::Reservednop);
    let bytes = if is_hint {
        case.bytes.clone()
    } else {
        Vec::new()
    };
    let operand = (case.insn.op_count() > 0).then(|| case.insn.op0_kind());
    (case.insn.code(), operand, bytes)
}

/// The instructions at which the host's CPU raises #UD, though the emulator has them.
#[derive(Default)]
struct Refused {
    forms: HashSet<Form>,
    names: BTreeSet<String>,
    cases: usize,
}

impl Refused {
    fn has(&self, case: &Case) -> bool {
        self.forms.contains(&form(case))
    }

    fn add(&mut self, case: &Case) {
        assert!(
            may_be_refused(&case.insn),
            "`{}`, bytes {:02x?}: every CPU has it, and this one raises #UD",
            case.insn,
            case.bytes
        );
        assert!(self.forms.insert(form(case)), "`{}`", case.insn);
        let code = case.insn.code();
        self.names.insert(format!("{code:?} {:02x?}", case.bytes));
    }
}

/// Checks whether a CPU may lack the instruction.
///
/// It came with a CPUID bit, or its opcode was reserved before it became one that does nothing.
fn may_be_refused(insn: &Instruction) -> bool {
    use iced_x86::CpuidFeature as Feature;
    let base = |feature: &Feature| {
        let name = format!("{feature:?}");
        name.starts_with("INTEL") || matches!(name.as_str(), "X64" | "MULTIBYTENOP" | "FPU" | "SMM")
    };
    let does_nothing = insn.flow_control() == FlowControl::Next && insn.rflags_modified() == 0;
    does_nothing
        && matches!(
            insn.mnemonic(),
            Mnemonic::Nop
                | Mnemonic::Reservednop
                | Mnemonic::Prefetchw
                | Mnemonic::Prefetchnta
                | Mnemonic::Prefetcht0
                | Mnemonic::Prefetcht1
                | Mnemonic::Prefetcht2
                | Mnemonic::Endbr64
                | Mnemonic::Endbr32
        )
        || !insn.cpuid_features().iter().all(base)
}

/// Runs a table of cases in a new guest, with a `nop` for those that are refused.
///
/// If the CPU raises #UD, returns the case at which it does.
fn attempt<'c>(
    host: &Host,
    mode: Mode,
    cases: &'c [Case],
    refused: &Refused,
) -> Result<Vec<Outcome>, &'c Case> {
    const NOP: &[u8] = &[0x90];
    let program = match mode {
        Mode::Kernel => "execk",
        Mode::User => "execu",
    };
    let mut guest = micro(host, &format!("{program} {}", cases.len()));
    for case in cases {
        let bytes = if refused.has(case) { NOP } else { &case.bytes };
        let bytes = case.slot.fill(bytes, &case.state, &case.data);
        guest.write(case.slot.address(), &bytes.unwrap());
    }
    guest.machine.start();
    guest.end();
    let text = guest.serial.text();
    if let Some((_, trap)) = text.split_once("micro: trap 6 at 0x") {
        let digits = trap.split_whitespace().next().unwrap();
        let address = u64::from_str_radix(digits, 16).unwrap();
        let at = cases.iter().find(|case| case.slot.entry() == address);
        return Err(at.unwrap_or_else(|| panic!("{}", guest.situation())));
    }
    assert_eq!(guest.count(), cases.len() as u64, "{}", guest.situation());
    let outcome = |case: &Case| {
        let mut bytes = [0; SLOT_SIZE];
        let address = Gpa(case.slot.address());
        guest
            .machine
            .ram()
            .read_physical(address, &mut bytes)
            .unwrap();
        let (state, data) = Slot::outcome(&bytes);
        Outcome {
            state,
            data: data.try_into().unwrap(),
        }
    };
    Ok(cases.iter().map(outcome).collect())
}

/// Runs a table of cases, and adds to the refused ones.
fn in_guest(host: &Host, mode: Mode, cases: &[Case], refused: &mut Refused) -> Vec<Outcome> {
    loop {
        // User mode comes first, because the #UD of a kernel without a stack may be its end.
        match (attempt(host, Mode::User, cases, refused), mode) {
            (Ok(outcomes), Mode::User) => return outcomes,
            (Ok(_), Mode::Kernel) => break,
            (Err(case), _) => refused.add(case),
        }
    }
    attempt(host, Mode::Kernel, cases, refused)
        .unwrap_or_else(|case| panic!("`{}` in kernel mode alone: #UD", case.insn))
}

/// Returns the requested seed, or a new one.
fn seed() -> u64 {
    match std::env::var(SEED) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|e| panic!("{SEED}={text}: {e}; give a decimal number")),
        Err(_) => RandomState::new().hash_one(0),
    }
}

/// A maker of cases of all opcodes in turn.
struct Maker {
    runner: TestRunner,
    codes: Vec<Code>,
    turn: usize,
    mode: Mode,
}

impl Maker {
    fn new(mode: Mode, seed: u64) -> Self {
        let bytes = [seed; 4].map(u64::to_le_bytes).concat();
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        Self {
            runner: TestRunner::new_with_rng(Config::default(), rng),
            codes: instructions::codes(),
            turn: 0,
            mode,
        }
    }

    /// Returns the next opcode's case, with the emulator's result.
    fn next(&mut self, slot: Slot) -> (Case, Outcome) {
        let turn = self.turn % (self.codes.len() + instructions::NOP_COUNT);
        self.turn += 1;
        let draws = instructions::draw();
        for _ in 0..100 {
            let draw = draws.new_tree(&mut self.runner).unwrap().current();
            let case = match self.codes.get(turn) {
                Some(&code) => instructions::case(code, slot, &draw),
                None => Some(instructions::nop(turn - self.codes.len(), slot, &draw)),
            };
            let Some(case) = case else { continue };
            if self.mode == Mode::Kernel && is_left_to_user_mode(&case) {
                continue;
            }
            match emulated(&case, self.mode) {
                Ok(Some(outcome)) => return (case, outcome),
                Ok(None) => {}
                Err(error) => panic!(
                    "{:?} mode: `{}`, bytes {:02x?}: {error}\n  before: {:x?}",
                    self.mode, case.insn, case.bytes, case.state
                ),
            }
        }
        panic!("{:?}: no draw gives a case of it", self.codes.get(turn));
    }
}

/// Checks whether a case is left to user mode.
///
/// A KVM that interprets kernel mode clears the upper half of the destination register even if
/// nothing is stored. CPUs keep it, as the same instruction shows in user mode.
fn is_left_to_user_mode(case: &Case) -> bool {
    case.insn.code() == Code::Cmpxchg_rm32_r32 && case.insn.op0_kind() == OpKind::Register
}

/// Compares `tables` tables of cases.
fn compare(mode: Mode, tables: usize) {
    let host = host!();
    let seed = seed();
    eprintln!("{SEED}={seed} makes these cases again");
    let mut maker = Maker::new(mode, seed);
    let (mut compared, mut wrong, mut refused) = (0, Vec::new(), Refused::default());
    for _ in 0..tables {
        let made: Vec<_> = Slot::all().map(|slot| maker.next(slot)).collect();
        let (cases, expected): (Vec<_>, Vec<_>) = made.into_iter().unzip();
        let outcomes = in_guest(host, mode, &cases, &mut refused);
        for ((case, guest), ours) in cases.iter().zip(&outcomes).zip(&expected) {
            if refused.has(case) {
                refused.cases += 1;
            } else {
                compared += 1;
                wrong.extend(difference(case, mode, guest, ours));
            }
        }
    }
    if refused.cases > 0 {
        eprintln!(
            "{mode:?} mode: {} cases left out, of instructions that this CPU has not: {:?}",
            refused.cases, refused.names
        );
    }
    assert!(
        wrong.is_empty(),
        "{} of {compared} cases differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(8)].join("\n")
    );
}

#[test]
fn in_user_mode_the_guest_and_the_emulator_agree() {
    compare(Mode::User, 10);
}

#[test]
fn in_kernel_mode_the_guest_and_the_emulator_agree() {
    compare(Mode::Kernel, 2);
}
