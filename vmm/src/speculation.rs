//! Speculation: following the guest kernel's code from some instruction on, on a copy of a vCPU's
//! registers.
//!
//! Stores are buffered. Nothing in the guest changes, and no other vCPU notices.
//!
//! This finds what the kernel computes only on request: behind a branch that is off, or in a
//! function that it would call there. The caller chooses the start and the end of the path, and
//! bounds it.

mod buffer;
mod search;
mod strings;

use std::fmt;
use std::ops::ControlFlow;

use iced_x86::FlowControl;
use introspect::Gva;
use introspect::x86_64::GeneralRegisters;
use kvm_bindings::kvm_regs;

use crate::vcpu::StoppedVcpu;
use crate::vcpu::general_registers;
use crate::x86_64::emulate::{self, EmulateError, Environment, MemoryFault};
use buffer::{Scratch, StoreBuffer};
pub use search::{Transfer, find_call};

/// The return address of a function that is called on a path. No code is there.
const NOWHERE: Gva = Gva(0);

/// The reason that the path could not be followed to its end.
#[derive(Debug, thiserror::Error)]
pub enum SpeculationError {
    /// The path is longer than allowed.
    #[error("not arrived after {steps} instructions, at {address}")]
    TooLong {
        /// The allowed number of instructions.
        steps: usize,
        /// The address at which it stopped.
        address: Gva,
    },
    /// There is no instruction at an address of the path.
    #[error("no instruction at {address}")]
    NoInstruction {
        /// The address.
        address: Gva,
    },
    /// The function in which the path began has returned to its caller.
    #[error("the function returns to {to}")]
    Returned {
        /// The address in the caller.
        to: Gva,
    },
    /// An instruction faults, or has effects that cannot be buffered.
    #[error("{0}")]
    Instruction(String),
}

impl From<MemoryFault> for SpeculationError {
    fn from(fault: MemoryFault) -> Self {
        Self::Instruction(fault.to_string())
    }
}

impl From<EmulateError> for SpeculationError {
    fn from(error: EmulateError) -> Self {
        Self::Instruction(error.to_string())
    }
}

/// The state at the end of a path, from which it can be followed further.
pub struct SpeculationResult<'c> {
    buffer: StoreBuffer<'c>,
    registers: kvm_regs,
}

impl fmt::Debug for SpeculationResult<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpeculationResult")
            .field("registers", &self.registers)
            .finish_non_exhaustive()
    }
}

impl SpeculationResult<'_> {
    /// Returns the registers at the end of the path.
    pub fn registers(&self) -> GeneralRegisters {
        *general_registers(&self.registers)
    }

    /// Returns a word of memory as it would be there. `None` if it is not mapped.
    pub fn word(&mut self, address: Gva) -> Option<u64> {
        let mut bytes = [0; 8];
        self.buffer.read(address.0, &mut bytes).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Adds `length` zero bytes at `start`, for the path alone. The guest should have no memory
    /// there. It takes the place of the bytes put there before.
    pub fn put_scratch(&mut self, start: Gva, length: usize) {
        self.buffer.set_scratch(Scratch {
            start: start.0,
            bytes: vec![0; length],
        });
    }

    /// Returns the bytes of [`put_scratch`](Self::put_scratch), as the path has left them.
    pub fn scratch(&self) -> &[u8] {
        self.buffer.scratch()
    }

    /// Turns the call at which the path has ended into one of `function`, with `first` as its first
    /// argument. `is_entered` is whether the path is in the called function already, at its first
    /// instruction. Otherwise it is at the CALL.
    ///
    /// # Errors
    /// If the stack cannot be written.
    pub fn enter(
        &mut self,
        function: Gva,
        first: u64,
        is_entered: bool,
    ) -> Result<(), SpeculationError> {
        let registers = &mut self.registers;
        if !is_entered {
            registers.rsp = registers.rsp.wrapping_sub(8);
        }
        self.buffer.write(registers.rsp, &NOWHERE.0.to_le_bytes())?;
        (registers.rip, registers.rdi) = (function.0, first);
        Ok(())
    }

    /// Returns `value` from the function at whose first instruction the path has ended.
    ///
    /// # Errors
    /// If the return address cannot be read.
    pub fn return_at_once(&mut self, value: u64) -> Result<(), SpeculationError> {
        let mut to = [0; 8];
        self.buffer.read(self.registers.rsp, &mut to)?;
        self.registers.rsp = self.registers.rsp.wrapping_add(8);
        (self.registers.rip, self.registers.rax) = (u64::from_le_bytes(to), value);
        Ok(())
    }

    /// Follows the path for at most `steps` more instructions, as
    /// [`speculate`](StoppedVcpu::speculate) does.
    ///
    /// # Errors
    /// If the path does not reach its end.
    pub fn follow<B>(
        &mut self,
        steps: usize,
        mut look: impl FnMut(Gva) -> ControlFlow<B, Gva>,
    ) -> Result<B, SpeculationError> {
        let mut taken = 0usize;
        while taken < steps {
            match look(Gva(self.registers.rip)) {
                ControlFlow::Break(found) => return Ok(found),
                ControlFlow::Continue(address) => self.registers.rip = address.0,
            }
            taken = taken.saturating_add(self.step()?);
        }
        Err(SpeculationError::TooLong {
            steps,
            address: Gva(self.registers.rip),
        })
    }

    /// Executes the next instruction. Returns the number of steps that it counts as: each
    /// repetition of a string instruction is one.
    fn step(&mut self) -> Result<usize, SpeculationError> {
        let (registers, buffer) = (&mut self.registers, &mut self.buffer);
        let address = Gva(registers.rip);
        if address == NOWHERE {
            return Err(SpeculationError::Returned { to: address });
        }
        let code = buffer.code(address);
        let instruction = emulate::decode(code, address.0)
            .map_err(|_| SpeculationError::NoInstruction { address })?;
        if let Some(repetitions) = strings::execute(&instruction, registers, buffer)? {
            return Ok(repetitions.max(1));
        }
        // Return addresses of calls on the path are in the buffer. Those of earlier calls are not.
        let slot = (instruction.flow_control() == FlowControl::Return).then_some(registers.rsp);
        emulate::execute(&instruction, registers, buffer)?;
        match slot.is_some_and(|slot| !buffer.has_written(slot)) {
            true => Err(SpeculationError::Returned {
                to: Gva(registers.rip),
            }),
            false => Ok(1),
        }
    }
}

impl StoppedVcpu<'_> {
    /// Follows the kernel's code from `start` on, with this vCPU's registers, for at most `steps`
    /// instructions.
    ///
    /// `look` is called with the address before each instruction. It lets the path continue (at the
    /// same address or another one), or ends it. `forced` are words of memory that read as other
    /// values.
    ///
    /// # Errors
    /// If the path does not reach its end.
    pub fn speculate<B>(
        &self,
        start: Gva,
        steps: usize,
        forced: &[(Gva, u64)],
        look: impl FnMut(Gva) -> ControlFlow<B, Gva>,
    ) -> Result<(B, SpeculationResult<'_>), SpeculationError> {
        let mut path = SpeculationResult {
            buffer: StoreBuffer::new(self, forced),
            registers: *self.regs(),
        };
        path.registers.rip = start.0;
        let found = path.follow(steps, look)?;
        Ok((found, path))
    }
}
