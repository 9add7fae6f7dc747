//! The working copy of a vCPU on which one instruction is executed: registers, operands and
//! effective addresses.
//!
//! The one outside effect is held back until nothing can fail any more.

use iced_x86::{EncodingKind, Instruction, OpKind, Register};
use kvm_bindings::kvm_regs;

use super::environment::{ControlRegister, Environment, FxState, Segment};
use super::{EmulateError, flags, unsupported, vector};

const CR4_LA57: u64 = 1 << 12;

/// The effect of an instruction outside the general registers, done last.
enum Effect {
    None,
    Write {
        address: u64,
        data: [u8; 8],
        length: usize,
    },
    WriteBlock {
        address: u64,
        data: Vec<u8>,
    },
    Exchange {
        address: u64,
        old: [u8; 16],
        new: [u8; 16],
        length: usize,
    },
    Fx(Box<FxState>),
    SegmentBase {
        segment: Segment,
        base: u64,
    },
    InhibitInterrupts,
    Halt,
}

/// The outcome of [`Cpu::commit`].
pub(super) enum Commit {
    /// The effect happened. The registers may follow.
    Done,
    /// Another CPU changed the memory operand at `address` since it was read. Nothing happened.
    Raced { address: u64 },
}

/// A vCPU in the middle of one instruction.
pub(super) struct Cpu<'a> {
    /// The instruction being executed.
    pub(super) insn: &'a Instruction,
    /// The registers after the instruction. RIP is the next instruction's from the start.
    pub(super) regs: kvm_regs,
    /// The machine around the registers. Handlers read from it; writes go through the `put_`
    /// functions.
    pub(super) env: &'a mut dyn Environment,
    effect: Effect,
}

impl<'a> Cpu<'a> {
    pub(super) fn new(
        insn: &'a Instruction,
        mut regs: kvm_regs,
        env: &'a mut dyn Environment,
    ) -> Self {
        regs.rip = insn.next_ip();
        regs.rflags &= !flags::RF;
        Self {
            insn,
            regs,
            env,
            effect: Effect::None,
        }
    }

    /// Performs the effect. The caller copies the registers back only after [`Commit::Done`].
    pub(super) fn commit(self) -> Result<Commit, EmulateError> {
        match self.effect {
            Effect::None => {}
            Effect::Write {
                address,
                data,
                length,
            } => self.env.write(address, &data[..length])?,
            Effect::WriteBlock { address, data } => self.env.write(address, &data)?,
            Effect::Exchange {
                address,
                old,
                new,
                length,
            } => {
                if !self
                    .env
                    .compare_exchange(address, &old[..length], &new[..length])?
                {
                    return Ok(Commit::Raced { address });
                }
            }
            Effect::Fx(state) => self.env.set_fx_state(&state)?,
            Effect::SegmentBase { segment, base } => self.env.set_segment_base(segment, base)?,
            Effect::InhibitInterrupts => self.env.inhibit_interrupts()?,
            Effect::Halt => self.env.halt()?,
        }
        Ok(Commit::Done)
    }

    pub(super) fn unsupported(&self, reason: &'static str) -> EmulateError {
        unsupported(self.insn, reason)
    }

    pub(super) fn exception(&self, vector: u8) -> EmulateError {
        EmulateError::Exception {
            ip: self.insn.ip(),
            instruction: self.insn.to_string(),
            vector,
        }
    }

    // --- flags ---

    pub(super) fn flag(&self, flag: u64) -> bool {
        self.regs.rflags & flag != 0
    }

    /// Replaces the flags in `affected` by those of `value`.
    pub(super) fn set_flags(&mut self, affected: u64, value: u64) {
        self.regs.rflags = (self.regs.rflags & !affected) | (value & affected);
    }

    // --- registers ---

    /// Returns a general register of 1, 2, 4 or 8 bytes, zero-extended.
    pub(super) fn register(&self, register: Register) -> Result<u64, EmulateError> {
        let mut regs = self.regs;
        let whole =
            *slot(&mut regs, register).ok_or_else(|| self.unsupported("register operand"))?;
        let value = if is_high_byte(register) {
            whole >> 8
        } else {
            whole
        };
        Ok(value & flags::mask(register.size()))
    }

    /// Sets a general register from the low bits of `value`. Four bytes clear the upper half. One
    /// and two keep the rest.
    pub(super) fn set_register(
        &mut self,
        register: Register,
        value: u64,
    ) -> Result<(), EmulateError> {
        let Some(whole) = slot(&mut self.regs, register) else {
            return Err(self.unsupported("register operand"));
        };
        *whole = match register.size() {
            8 => value,
            4 => value & 0xffff_ffff,
            size => {
                let shift = if is_high_byte(register) { 8 } else { 0 };
                let mask = flags::mask(size) << shift;
                (*whole & !mask) | ((value << shift) & mask)
            }
        };
        Ok(())
    }

    // --- operands ---

    /// Returns the size of a register or memory operand in bytes.
    pub(super) fn size(&self, operand: u32) -> usize {
        operand_size(self.insn, operand)
    }

    /// Returns the value of an operand, zero-extended from its size.
    ///
    /// An immediate is extended as the instruction says, and cut to the size of operand 0.
    pub(super) fn operand(&mut self, operand: u32) -> Result<u64, EmulateError> {
        match self.insn.op_kind(operand) {
            OpKind::Register => self.register(self.insn.op_register(operand)),
            OpKind::Memory => {
                let address = self.address()?;
                self.load(address, self.size(operand))
            }
            kind if is_immediate(kind) => {
                Ok(self.insn.immediate(operand) & flags::mask(self.size(0)))
            }
            _ => Err(self.unsupported("operand kind")),
        }
    }

    /// Sets a register or memory operand.
    pub(super) fn set_operand(&mut self, operand: u32, value: u64) -> Result<(), EmulateError> {
        match self.insn.op_kind(operand) {
            OpKind::Register => self.set_register(self.insn.op_register(operand), value),
            OpKind::Memory => {
                let address = self.address()?;
                self.put(address, self.size(operand), value)
            }
            _ => Err(self.unsupported("operand kind")),
        }
    }

    /// Sets a register or memory operand whose value was `old`. The update is atomic if the
    /// instruction is locked.
    pub(super) fn update_operand(
        &mut self,
        operand: u32,
        old: u64,
        new: u64,
    ) -> Result<(), EmulateError> {
        if self.insn.op_kind(operand) == OpKind::Memory && self.insn.has_lock_prefix() {
            let address = self.address()?;
            return self.put_exchange(address, self.size(operand), old.into(), new.into());
        }
        self.set_operand(operand, new)
    }

    // --- memory ---

    /// Returns the address of the memory operand before the segment base, as LEA computes it.
    pub(super) fn effective_address(&self) -> Result<u64, EmulateError> {
        let (base, index) = (self.insn.memory_base(), self.insn.memory_index());
        // The decoder has already added a RIP base.
        let mut address = self.insn.memory_displacement64();
        if base != Register::None && !self.insn.is_ip_rel_memory_operand() {
            address = address.wrapping_add(self.register(base)?);
        }
        if index != Register::None {
            let scale = u64::from(self.insn.memory_index_scale());
            address = address.wrapping_add(self.register(index)?.wrapping_mul(scale));
        }
        Ok(if has_short_address(self.insn) {
            address & 0xffff_ffff
        } else {
            address
        })
    }

    /// Returns the linear address of the memory operand.
    pub(super) fn address(&mut self) -> Result<u64, EmulateError> {
        let offset = self.effective_address()?;
        let base = match self.insn.memory_segment() {
            Register::FS => self.env.segment_base(Segment::Fs)?,
            Register::GS => self.env.segment_base(Segment::Gs)?,
            _ => 0,
        };
        Ok(base.wrapping_add(offset))
    }

    /// Reads 1, 2, 4 or 8 bytes, zero-extended.
    pub(super) fn load(&mut self, address: u64, size: usize) -> Result<u64, EmulateError> {
        let mut bytes = [0; 8];
        self.load_bytes(address, bytes.get_mut(..size).unwrap_or_default())?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Fills `buf` from linear `address`.
    pub(super) fn load_bytes(&mut self, address: u64, buf: &mut [u8]) -> Result<(), EmulateError> {
        self.check_operand(address, buf.len())?;
        Ok(self.env.read(address, buf)?)
    }

    /// Schedules a write of the low `size` (1, 2, 4 or 8) bytes of `value`.
    pub(super) fn put(
        &mut self,
        address: u64,
        size: usize,
        value: u64,
    ) -> Result<(), EmulateError> {
        self.check_operand(address, size)?;
        self.set_effect(Effect::Write {
            address,
            data: value.to_le_bytes(),
            length: size.min(8),
        })
    }

    /// Schedules a write of `data`.
    pub(super) fn put_bytes(&mut self, address: u64, data: Vec<u8>) -> Result<(), EmulateError> {
        self.check_operand(address, data.len())?;
        self.set_effect(Effect::WriteBlock { address, data })
    }

    /// Schedules an atomic replacement of `size` (1 to 16) bytes of `old` by `new`. The instruction
    /// starts over if `old` is gone.
    pub(super) fn put_exchange(
        &mut self,
        address: u64,
        size: usize,
        old: u128,
        new: u128,
    ) -> Result<(), EmulateError> {
        self.check_operand(address, size)?;
        let (old, new) = (old.to_le_bytes(), new.to_le_bytes());
        self.set_effect(Effect::Exchange {
            address,
            old,
            new,
            length: size.min(16),
        })
    }

    /// Schedules a replacement of x87 and SSE state.
    pub(super) fn put_fx(&mut self, state: Box<FxState>) -> Result<(), EmulateError> {
        self.set_effect(Effect::Fx(state))
    }

    /// Schedules a change of the base of FS or GS.
    pub(super) fn put_segment_base(
        &mut self,
        segment: Segment,
        base: u64,
    ) -> Result<(), EmulateError> {
        self.check_canonical(base)?;
        self.set_effect(Effect::SegmentBase { segment, base })
    }

    /// Schedules an interrupt shadow for one instruction.
    pub(super) fn put_interrupt_shadow(&mut self) -> Result<(), EmulateError> {
        self.set_effect(Effect::InhibitInterrupts)
    }

    /// Schedules a halt of the vCPU after the instruction.
    pub(super) fn put_halt(&mut self) -> Result<(), EmulateError> {
        self.set_effect(Effect::Halt)
    }

    /// Sets the effect. Refuses a second one, because two could not be undone together.
    fn set_effect(&mut self, effect: Effect) -> Result<(), EmulateError> {
        if !matches!(self.effect, Effect::None) {
            return Err(self.unsupported("more than one effect outside the registers"));
        }
        self.effect = effect;
        Ok(())
    }

    /// Raises #GP unless RIP is canonical. A CPU faults on fetching, and KVM accepts no such RIP.
    pub(super) fn check_rip(&mut self) -> Result<(), EmulateError> {
        self.check_canonical(self.regs.rip)
    }

    fn check_canonical(&mut self, address: u64) -> Result<(), EmulateError> {
        self.check_range(address, 1, vector::GENERAL_PROTECTION)
    }

    /// Raises #SS unless `length` bytes of the stack have canonical addresses.
    pub(super) fn check_stack(&mut self, address: u64, length: usize) -> Result<(), EmulateError> {
        self.check_range(address, length, vector::STACK_FAULT)
    }

    /// Checks a memory operand likewise. Raises #GP, or #SS if it is addressed through RSP or RBP.
    fn check_operand(&mut self, address: u64, length: usize) -> Result<(), EmulateError> {
        let stack = self.insn.memory_segment() == Register::SS
            && self.insn.op_kinds().any(|kind| kind == OpKind::Memory);
        let vector = if stack {
            vector::STACK_FAULT
        } else {
            vector::GENERAL_PROTECTION
        };
        self.check_range(address, length, vector)
    }

    fn check_range(&mut self, address: u64, length: usize, vector: u8) -> Result<(), EmulateError> {
        let last = address.checked_add((length as u64).saturating_sub(1));
        let fits = |bits: u32| {
            last.is_some_and(|last| is_canonical(address, bits) && is_canonical(last, bits))
        };
        if fits(48) {
            return Ok(());
        }
        if fits(57) && self.env.control_register(ControlRegister::Cr4)? & CR4_LA57 != 0 {
            return Ok(());
        }
        Err(self.exception(vector))
    }
}

/// Checks whether the bits above `bits` all equal the one below them.
pub(super) fn is_canonical(address: u64, bits: u32) -> bool {
    let unused = 64 - bits;
    ((address << unused) as i64 >> unused) as u64 == address
}

fn is_high_byte(register: Register) -> bool {
    matches!(
        register,
        Register::AH | Register::BH | Register::CH | Register::DH
    )
}

/// Checks whether an address-size prefix cuts the memory operand's address to 32 bits.
pub(super) fn has_short_address(insn: &Instruction) -> bool {
    let (base, index) = (insn.memory_base(), insn.memory_index());
    // The prefix leaves no 64-bit register. Without any register the size of the displacement
    // decides.
    base.size() == 4
        || index.size() == 4
        || base == Register::None && index == Register::None && insn.memory_displ_size() == 4
}

/// Returns the 64-bit register that `register` is part of.
pub(super) fn slot(regs: &mut kvm_regs, register: Register) -> Option<&mut u64> {
    Some(match register.full_register() {
        Register::RAX => &mut regs.rax,
        Register::RBX => &mut regs.rbx,
        Register::RCX => &mut regs.rcx,
        Register::RDX => &mut regs.rdx,
        Register::RSI => &mut regs.rsi,
        Register::RDI => &mut regs.rdi,
        Register::RSP => &mut regs.rsp,
        Register::RBP => &mut regs.rbp,
        Register::R8 => &mut regs.r8,
        Register::R9 => &mut regs.r9,
        Register::R10 => &mut regs.r10,
        Register::R11 => &mut regs.r11,
        Register::R12 => &mut regs.r12,
        Register::R13 => &mut regs.r13,
        Register::R14 => &mut regs.r14,
        Register::R15 => &mut regs.r15,
        _ => return None,
    })
}

/// Returns the size of a register or memory operand in bytes. It is 0 for other operands, and for
/// memory without a size (LEA).
pub(super) fn operand_size(insn: &Instruction, operand: u32) -> usize {
    match insn.op_kind(operand) {
        OpKind::Register => insn.op_register(operand).size(),
        OpKind::Memory => insn.memory_size().size(),
        _ => 0,
    }
}

pub(super) fn is_immediate(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Immediate8
            | OpKind::Immediate16
            | OpKind::Immediate32
            | OpKind::Immediate64
            | OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
            | OpKind::Immediate32to64
    )
}

/// Checks whether all operands are general registers, immediates, or memory of 1, 2, 4 or 8 bytes.
pub(super) fn has_general_operands(insn: &Instruction) -> bool {
    insn.encoding() == EncodingKind::Legacy
        && (0..insn.op_count()).all(|operand| match insn.op_kind(operand) {
            OpKind::Register => insn.op_register(operand).is_gpr(),
            OpKind::Memory => matches!(operand_size(insn, operand), 1 | 2 | 4 | 8),
            kind => is_immediate(kind),
        })
}
