//! Executes a pure data instruction (SSE, AES, BMI and the like) on the host CPU, with the guest's
//! registers.
//!
//! The instruction is encoded anew with its memory operand pointing into a host buffer. It is put
//! between code that loads and stores the guest's registers ([`stub`]). A strict list decides what
//! may run. It has only the instruction set extensions named in [`available`]. Operands may only be
//! general registers other than RSP, XMM registers, immediates and one explicit memory operand.
//! Such an instruction cannot branch, change segments or privilege, or reach host memory.
//!
//! A guest must not be able to make the host fault. All SSE exceptions are masked, the buffer is
//! aligned for every instruction, and the guest's alignment is checked here. The guest's x87 state
//! never reaches the host CPU. An SSE exception that the guest has unmasked is detected by the
//! flags that the instruction leaves (`simd`).

mod code_memory;
mod simd;
mod stub;

use std::arch::is_x86_feature_detected as detected;
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use iced_x86::{
    CpuidFeature, Encoder, Instruction, InstructionInfoFactory, MemorySize, Mnemonic, OpAccess,
    OpKind, Register,
};

use super::cpu::{Cpu, is_immediate, slot};
use super::environment::FxState;
use super::{EmulateError, flags, fpu, vector};
use simd::Exceptions;
use stub::{Context, Stub};

/// The number of cached stubs per thread.
const CACHED: usize = 64;
/// The largest memory operand in bytes.
const MEMORY_MAX: usize = stub::MEMORY_SIZE;

thread_local! {
    /// The instructions seen by this thread. `None` for those that are refused.
    static PLANS: RefCell<HashMap<Instruction, Option<Rc<Plan>>>> = RefCell::new(HashMap::new());
}

/// Allocates the memory of stubs, before this process is forbidden to make any executable.
pub(crate) fn prepare() {
    code_memory::prepare();
}

pub(super) fn is_supported(insn: &Instruction) -> bool {
    plan(insn).is_some()
}

/// The way to execute one instruction.
struct Plan {
    /// The instruction as it will run on the host.
    redirected: Instruction,
    /// The register that points to the [`Context`] meanwhile.
    scratch: Register,
    memory: Option<Memory>,
    /// Whether the instruction uses XMM registers or MXCSR.
    sse: bool,
    /// The stub, assembled at the first run.
    stub: OnceCell<Stub>,
}

struct Memory {
    /// The size in bytes, 1 to [`MEMORY_MAX`].
    size: usize,
    read: bool,
    written: bool,
    /// Whether an address that is no multiple of 16 raises #GP.
    aligned: bool,
}

/// Returns the plan for an instruction, if it is on the list and the host has it.
fn plan(insn: &Instruction) -> Option<Rc<Plan>> {
    if !permitted(insn) {
        return None;
    }
    PLANS.with_borrow_mut(|plans| {
        if let Some(plan) = plans.get(insn) {
            return plan.clone();
        }
        if plans.len() >= CACHED {
            plans.clear();
        }
        let plan = Plan::new(insn).map(Rc::new);
        plans.insert(*insn, plan.clone());
        plan
    })
}

fn permitted(insn: &Instruction) -> bool {
    // These belong to the named extensions too, but do more than compute: MXCSR, implicit memory,
    // x87 registers.
    let more_than_data = matches!(
        insn.mnemonic(),
        Mnemonic::Ldmxcsr
            | Mnemonic::Stmxcsr
            | Mnemonic::Maskmovq
            | Mnemonic::Maskmovdqu
            | Mnemonic::Fisttp
    );
    let features = insn.cpuid_features();
    !more_than_data && !features.is_empty() && features.iter().all(|&feature| available(feature))
}

/// Checks whether an instruction set extension is on the list and the host CPU has it.
fn available(feature: CpuidFeature) -> bool {
    match feature {
        CpuidFeature::SSE | CpuidFeature::SSE2 => true,
        CpuidFeature::SSE3 => detected!("sse3"),
        CpuidFeature::SSSE3 => detected!("ssse3"),
        CpuidFeature::SSE4_1 => detected!("sse4.1"),
        CpuidFeature::SSE4_2 => detected!("sse4.2"),
        CpuidFeature::PCLMULQDQ => detected!("pclmulqdq"),
        CpuidFeature::AES => detected!("aes"),
        CpuidFeature::SHA => detected!("sha"),
        CpuidFeature::MOVBE => detected!("movbe"),
        CpuidFeature::BMI1 => detected!("bmi1"),
        CpuidFeature::BMI2 => detected!("bmi2"),
        CpuidFeature::ADX => detected!("adx"),
        CpuidFeature::POPCNT => detected!("popcnt"),
        CpuidFeature::LZCNT => detected!("lzcnt"),
        _ => false,
    }
}

impl Plan {
    /// Checks the instruction's operands and encodes it anew. Does not check extensions: see
    /// [`permitted`].
    fn new(insn: &Instruction) -> Option<Self> {
        let has_memory =
            (0..insn.op_count()).try_fold(false, |seen, operand| match insn.op_kind(operand) {
                OpKind::Register => Some(seen),
                OpKind::Memory if !seen => Some(true),
                kind if is_immediate(kind) || kind == OpKind::Immediate8_2nd => Some(seen),
                _ => None,
            })?;
        if insn.has_lock_prefix()
            || insn.is_privileged()
            || insn.is_stack_instruction()
            || insn.is_string_instruction()
        {
            return None;
        }
        // Registers of the address do not count, because it is replaced.
        let mut redirected = *insn;
        if has_memory {
            redirected.set_memory_base(Register::None);
            redirected.set_memory_index(Register::None);
            redirected.set_segment_prefix(Register::None);
            redirected.set_memory_displacement64(0);
            redirected.set_memory_displ_size(8);
        }
        let mut factory = InstructionInfoFactory::new();
        let info = factory.info(&redirected);
        let mut used = Vec::new();
        let mut sse = false;
        for register in info.used_registers() {
            match register.register() {
                register if register.is_gpr() => used.push(register.full_register()),
                register if register.is_xmm() => sse = true,
                // The segment of the memory operand, and the registers around it: flat.
                register if has_memory && register.is_segment_register() => {}
                _ => return None,
            }
        }
        if used.contains(&Register::RSP) || info.used_memory().len() > usize::from(has_memory) {
            return None;
        }
        let memory = if has_memory {
            Some(Memory::new(insn, info.used_memory().first()?.access())?)
        } else {
            None
        };
        // Registers without REX come first, because AH and its like cannot be encoded together with
        // one that needs REX.
        let scratch = stub::SCRATCH
            .into_iter()
            .find(|register| !used.contains(register))?;
        if has_memory {
            redirected.set_memory_base(scratch);
            redirected.set_memory_displacement64(Context::MEMORY as u64);
        }
        let mut encoder = Encoder::new(64);
        encoder.encode(&redirected, 0).ok()?;
        Some(Self {
            redirected,
            scratch,
            memory,
            sse,
            stub: OnceCell::new(),
        })
    }

    fn stub(&self) -> Result<&Stub, &'static str> {
        if let Some(stub) = self.stub.get() {
            return Ok(stub);
        }
        let stub = Stub::new(&self.redirected, self.scratch)?;
        Ok(self.stub.get_or_init(|| stub))
    }
}

impl Memory {
    fn new(insn: &Instruction, access: OpAccess) -> Option<Self> {
        let (read, written) = match access {
            OpAccess::Read | OpAccess::CondRead => (true, false),
            OpAccess::Write => (false, true),
            // Unchanged bytes are written back as they were.
            OpAccess::ReadWrite | OpAccess::ReadCondWrite => (true, true),
            _ => return None,
        };
        let size = insn.memory_size().size();
        let unaligned = matches!(
            insn.mnemonic(),
            Mnemonic::Movups
                | Mnemonic::Movupd
                | Mnemonic::Movdqu
                | Mnemonic::Lddqu
                | Mnemonic::Pcmpestri
                | Mnemonic::Pcmpestrm
                | Mnemonic::Pcmpistri
                | Mnemonic::Pcmpistrm
        );
        let known = insn.memory_size() != MemorySize::Unknown && (1..=MEMORY_MAX).contains(&size);
        known.then_some(Self {
            size,
            read,
            written,
            aligned: size >= 16 && !unaligned,
        })
    }
}

/// Executes every instruction on the list, as their [`Handler`](super::Handler). Refuses all
/// others.
pub(super) fn run(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let plan = plan(cpu.insn).ok_or_else(|| cpu.unsupported("outside the emulated set"))?;
    run_plan(cpu, &plan)
}

fn run_plan(cpu: &mut Cpu<'_>, plan: &Plan) -> Result<(), EmulateError> {
    let mut context = Box::new(Context::default());
    let guest_fx = if plan.sse {
        fpu::check_sse(cpu)?;
        let state = cpu.env.fx_state()?;
        let exceptions = Exceptions::of(state.mxcsr())
            .ok_or_else(|| cpu.unsupported("MXCSR has unknown bits"))?;
        // Of the guest's state only MXCSR and the XMM registers. The x87 part stays that of
        // `FNINIT`.
        context.fx.set_u32(FxState::MXCSR, exceptions.to_run_with());
        context.fx.0[FxState::XMM].copy_from_slice(&state.0[FxState::XMM]);
        Some((state, exceptions))
    } else {
        None
    };
    let address = match &plan.memory {
        Some(memory) => {
            let address = cpu.address()?;
            if memory.aligned && !address.is_multiple_of(16) {
                return Err(cpu.exception(vector::GENERAL_PROTECTION));
            }
            if memory.read {
                cpu.load_bytes(
                    address,
                    context.memory.0.get_mut(..memory.size).unwrap_or_default(),
                )?;
            }
            address
        }
        None => 0,
    };
    for (value, &register) in context.registers.iter_mut().zip(&stub::REGISTERS) {
        *value = slot(&mut cpu.regs, register).map_or(0, |slot| *slot);
    }
    context.rflags = flags::FIXED | cpu.regs.rflags & flags::STATUS;

    plan.stub()
        .map_err(|reason| cpu.unsupported(reason))?
        .run(&mut context);

    let guest_fx = match guest_fx {
        None => None,
        Some((mut state, exceptions)) => match exceptions.after(context.fx.mxcsr()) {
            Ok(mxcsr) => Some((state, mxcsr)),
            Err(mxcsr) => {
                state.set_u32(FxState::MXCSR, mxcsr);
                cpu.env.set_fx_state(&state)?;
                let vector = fpu::simd_vector(cpu)?;
                return Err(cpu.exception(vector));
            }
        },
    };
    for (value, &register) in context.registers.iter().zip(&stub::REGISTERS) {
        if let Some(slot) = slot(&mut cpu.regs, register)
            && register != plan.scratch
        {
            *slot = *value;
        }
    }
    cpu.set_flags(flags::STATUS, context.rflags);
    if let Some(memory) = plan.memory.as_ref().filter(|memory| memory.written) {
        cpu.put_bytes(
            address,
            context
                .memory
                .0
                .get(..memory.size)
                .unwrap_or_default()
                .to_vec(),
        )?;
    }
    if let Some((before, mxcsr)) = guest_fx {
        let mut after = before.clone();
        after.set_u32(FxState::MXCSR, mxcsr);
        after.0[FxState::XMM].copy_from_slice(&context.fx.0[FxState::XMM]);
        if after != before {
            cpu.put_fx(Box::new(after))?;
        }
    }
    Ok(())
}

/// Executes any instruction that [`Plan::new`] accepts on the host CPU, as the reference for tests.
///
/// Returns `None` for others, and if the host would decode another instruction (LZCNT for BSR).
#[cfg(any(test, feature = "test-utils"))]
pub(super) fn oracle(cpu: &mut Cpu<'_>) -> Option<Result<(), EmulateError>> {
    let is_count = matches!(
        cpu.insn.mnemonic(),
        Mnemonic::Lzcnt | Mnemonic::Tzcnt | Mnemonic::Popcnt
    );
    if is_count && !permitted(cpu.insn) {
        return None;
    }
    let plan = Plan::new(cpu.insn)?;
    Some(run_plan(cpu, &plan))
}
