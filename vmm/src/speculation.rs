//! Speculation: following the guest kernel's code from some instruction on, on a copy of a vCPU's
//! registers.
//!
//! Stores are buffered. Nothing in the guest changes, and no other vCPU notices.
//!
//! This finds arguments that the kernel computes only on request: behind a branch that is off. The
//! caller chooses the start and the end of the path, and bounds it.

use std::fmt;
use std::ops::ControlFlow;

use iced_x86::FlowControl;
use introspect::x86_64::GeneralRegisters;
use introspect::x86_64::paging::{self, AddressSpace};
use introspect::{Gpa, Gva, PhysicalMemory};
use kvm_bindings::kvm_regs;

use crate::memory::{GuestRam, PAGE_SIZE};
use crate::trap::TrapTable;
use crate::vcpu::StoppedVcpu;
use crate::vcpu::general_registers;
use crate::x86_64::emulate::{
    self, ControlRegister, EmulateError, Environment, FxState, MemoryFault, Segment, StateError,
};

/// The maximum number of bytes that are written on the path.
const PAD: usize = 1024;

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

impl From<EmulateError> for SpeculationError {
    fn from(error: EmulateError) -> Self {
        Self::Instruction(error.to_string())
    }
}

/// The state at the end of a path.
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
        mut look: impl FnMut(Gva) -> ControlFlow<B, Gva>,
    ) -> Result<(B, SpeculationResult<'_>), SpeculationError> {
        let mut buffer = StoreBuffer {
            cpu: self,
            space: self.address_space(),
            forced: forced.to_vec(),
            written: Vec::with_capacity(64),
        };
        let mut registers = *self.regs();
        registers.rip = start.0;
        for _ in 0..steps {
            match look(Gva(registers.rip)) {
                ControlFlow::Break(found) => {
                    return Ok((found, SpeculationResult { buffer, registers }));
                }
                ControlFlow::Continue(address) => registers.rip = address.0,
            }
            let address = Gva(registers.rip);
            let code = self.traps().read_code(address, buffer.space);
            let instruction = emulate::decode(&code, address.0)
                .map_err(|_| SpeculationError::NoInstruction { address })?;
            // Return addresses of calls on the path are in the buffer. Those of earlier calls are
            // not.
            let slot = (instruction.flow_control() == FlowControl::Return).then_some(registers.rsp);
            emulate::execute(&instruction, &mut registers, &mut buffer)?;
            if slot.is_some_and(|slot| !buffer.has_written(slot)) {
                let to = Gva(registers.rip);
                return Err(SpeculationError::Returned { to });
            }
        }
        Err(SpeculationError::TooLong {
            steps,
            address: Gva(registers.rip),
        })
    }
}

/// An instruction that transfers control to a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The address of the instruction.
    pub at: Gva,
    /// Whether it is a CALL, which pushes a return address. Otherwise it is a JMP.
    pub is_call: bool,
}

/// Returns the CALL or JMP to one of `wanted` that the code at `start` leads to, within at most
/// `most` instructions.
///
/// If `divert` returns another address for one, the search continues there.
pub fn find_call(
    traps: &TrapTable,
    space: AddressSpace,
    start: Gva,
    wanted: &[Gva],
    divert: &dyn Fn(Gva) -> Option<Gva>,
    most: usize,
) -> Option<Transfer> {
    let mut open = vec![start];
    let mut seen = std::collections::HashSet::new();
    while let Some(at) = open.pop() {
        if seen.len() >= most || !seen.insert(at) {
            continue;
        }
        if let Some(to) = divert(at) {
            open.push(to);
            continue;
        }
        let code = traps.read_code(at, space);
        let Ok(found) = emulate::decode(&code, at.0) else {
            continue;
        };
        let to = Gva(found.near_branch_target());
        let next = Gva(found.next_ip());
        let flow = found.flow_control();
        match flow {
            FlowControl::Call | FlowControl::UnconditionalBranch if wanted.contains(&to) => {
                let is_call = flow == FlowControl::Call;
                return Some(Transfer { at, is_call });
            }
            FlowControl::Next | FlowControl::Call | FlowControl::IndirectCall => open.push(next),
            FlowControl::ConditionalBranch => open.extend([to, next]),
            FlowControl::UnconditionalBranch => open.push(to),
            _ => {}
        }
    }
    None
}

/// Memory with the stores of the path on top.
struct StoreBuffer<'c> {
    cpu: &'c StoppedVcpu<'c>,
    space: AddressSpace,
    forced: Vec<(Gva, u64)>,
    /// (Address, byte), the latest last.
    written: Vec<(u64, u8)>,
}

impl StoreBuffer<'_> {
    fn ram(&self) -> &GuestRam {
        self.cpu.ram()
    }

    /// Checks whether the byte at an address was written on the path.
    fn has_written(&self, address: u64) -> bool {
        self.written.iter().any(|(at, _)| *at == address)
    }

    fn translate(&self, address: u64, write: bool) -> Result<Gpa, MemoryFault> {
        let fault = MemoryFault { address, write };
        let found = paging::translate(self.ram(), self.space, Gva(address)).map_err(|_| fault)?;
        match write && !found.writable {
            true => Err(fault),
            false => Ok(found.gpa),
        }
    }
}

impl Environment for StoreBuffer<'_> {
    fn read(&mut self, address: u64, buf: &mut [u8]) -> Result<(), MemoryFault> {
        let fault = MemoryFault {
            address,
            write: false,
        };
        if let Some((_, value)) = self.forced.iter().find(|(at, _)| at.0 == address) {
            for (place, byte) in buf.iter_mut().zip(value.to_le_bytes()) {
                *place = byte;
            }
            return Ok(());
        }
        let mut done = 0;
        while done < buf.len() {
            let at = address.wrapping_add(done as u64);
            let in_page = (PAGE_SIZE - at % PAGE_SIZE) as usize;
            let end = buf.len().min(done + in_page);
            let gpa = self.translate(at, false)?;
            let part = buf.get_mut(done..end).ok_or(fault)?;
            self.ram().read_physical(gpa, part).map_err(|_| fault)?;
            done = end;
        }
        for (at, byte) in &self.written {
            let offset = usize::try_from(at.wrapping_sub(address)).unwrap_or(usize::MAX);
            if let Some(place) = buf.get_mut(offset) {
                *place = *byte;
            }
        }
        Ok(())
    }

    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), MemoryFault> {
        let fault = MemoryFault {
            address,
            write: true,
        };
        if self.written.len() + data.len() > PAD {
            return Err(fault);
        }
        self.translate(address, true)?;
        self.translate(
            address.wrapping_add(data.len().saturating_sub(1) as u64),
            true,
        )?;
        let places = (0..).map(|offset| address.wrapping_add(offset));
        self.written.extend(places.zip(data.iter().copied()));
        Ok(())
    }

    fn compare_exchange(
        &mut self,
        address: u64,
        old: &[u8],
        new: &[u8],
    ) -> Result<bool, MemoryFault> {
        self.exchange_in_two_steps(address, old, new)
    }

    fn segment_base(&mut self, segment: Segment) -> Result<u64, StateError> {
        Ok(match segment {
            Segment::Fs => self.cpu.sregs().fs.base,
            Segment::Gs => self.cpu.sregs().gs.base,
        })
    }

    fn set_segment_base(&mut self, _: Segment, _: u64) -> Result<(), StateError> {
        Err(outside("write a segment base"))
    }

    fn fx_state(&mut self) -> Result<FxState, StateError> {
        Err(outside("read the FPU state"))
    }

    fn set_fx_state(&mut self, _: &FxState) -> Result<(), StateError> {
        Err(outside("write the FPU state"))
    }

    fn cpl(&mut self) -> Result<u8, StateError> {
        Ok(0)
    }

    fn control_register(&mut self, register: ControlRegister) -> Result<u64, StateError> {
        match register {
            ControlRegister::Cr0 => Ok(self.cpu.sregs().cr0),
            ControlRegister::Cr4 => Ok(self.cpu.sregs().cr4),
            ControlRegister::Xcr0 => Err(outside("read XCR0")),
        }
    }

    fn inhibit_interrupts(&mut self) -> Result<(), StateError> {
        // There are no interrupts on this path.
        Ok(())
    }

    fn halt(&mut self) -> Result<(), StateError> {
        Err(outside("halt"))
    }
}

fn outside(action: &'static str) -> StateError {
    StateError {
        action,
        source: std::io::ErrorKind::Unsupported.into(),
    }
}
