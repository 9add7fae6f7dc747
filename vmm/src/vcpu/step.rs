//! The displaced instruction by KVM's single-step, where it cannot be emulated.
//!
//! The other vCPUs are paused while the original byte is in place. KVM steps by the trap
//! flag, which is cleared from the frames of exceptions that the instruction raises.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use iced_x86::Instruction;
use introspect::Gva;
use introspect::x86_64::read_virtual;
use kvm_bindings::{kvm_debug_exit_arch, kvm_regs};

use super::environment::address_space;
use super::hit::without_resume;
use super::run::Flow;
use super::{Vcpu, debug, kick};
use crate::machine::RunEnd;
use crate::machine::control::ParkOutcome;
use crate::memory::PAGE_SIZE;
use crate::trap::Site;
use crate::x86_64::debug_exception::{DR6_STEP, VECTOR_DB};
use crate::x86_64::rflags;

/// The byte of RFLAGS that contains the trap flag.
const TRAP_FLAG_BYTE: u64 = 1;
/// The maximum number of exits of one stepped instruction, such as a string instruction's port
/// accesses. The next hit does the rest.
const STEP_EXITS: usize = 10_000;
/// The maximum number of stepped rounds of a repeated string instruction before the other vCPUs get
/// their turn.
const STEP_ROUNDS: usize = 2_000;

/// Checks whether a debug exit ends a single step.
pub(super) fn is_step(arch: &kvm_debug_exit_arch) -> bool {
    arch.exception == VECTOR_DB && arch.dr6 & DR6_STEP != 0
}

/// The progress of the guest in its exception handler.
enum Handler {
    JustBegun,
    UnderWay,
}

impl Vcpu {
    /// Restores the original byte, steps the vCPU over it with the others paused, and restores the
    /// int3.
    pub(super) fn step_over(&mut self, site: &Arc<Site>) -> Result<Flow, RunEnd> {
        let machine = self.machine.clone();
        if machine.control.stop_others(self) == ParkOutcome::Leave {
            return Ok(Flow::Interrupted);
        }
        site.counters.stepped.fetch_add(1, Ordering::Relaxed);
        let suspended = machine.traps.suspend_for_step(site);
        let result = self.step_displaced(site);
        if suspended {
            machine.traps.put_back(site);
        }
        machine.control.resume_others();
        result
    }

    /// Performs the step, and records the registers with which the guest may return to an
    /// unfinished one.
    fn step_displaced(&mut self, site: &Arc<Site>) -> Result<Flow, RunEnd> {
        let start = self.registers.general(&self.fd)?;
        let instruction = site.instruction_at(start.rip);
        let flow = self.step(instruction)?;
        let mut end = self.registers.general(&self.fd)?;
        if start.rflags & rflags::TF != 0 && end.rip == instruction.next_ip() {
            // KVM has cleared the flag with its own. The guest's own stepping keeps it.
            end.rflags |= rflags::TF;
            self.registers.set_general(&mut self.fd, &end)?;
            debug::raise_step(&self.fd)?;
        }
        let again = if end.rip == start.rip {
            (end != start).then_some(end)
        } else if end.rip != instruction.next_ip() {
            // The guest is in a handler, which returns with the registers that it has interrupted.
            self.clean_frame(&start, &end)?
                .map(|handler| match handler {
                    Handler::JustBegun => kvm_regs {
                        rip: start.rip,
                        rsp: start.rsp,
                        rflags: start.rflags,
                        ..end
                    },
                    Handler::UnderWay => start,
                })
        } else {
            None
        };
        self.again = again.map(|regs| (site.clone(), without_resume(regs)));
        Ok(flow)
    }

    /// Clears the trap flag that KVM steps by from the frame of an exception that the stepped
    /// instruction has raised.
    ///
    /// The guest is in its handler then. It would return with the flag and take a #DB. Returns
    /// `None` if there is no such frame. If the handler has just begun, the general registers are
    /// still the interrupted ones.
    fn clean_frame(&mut self, start: &kvm_regs, end: &kvm_regs) -> Result<Option<Handler>, RunEnd> {
        /// The maximum number of words up to the end of the frame in a handler that has just begun.
        /// Below it are an error code and the words that the first instruction has pushed.
        const FIRST_WORDS: usize = 12;
        /// The size in bytes of a kernel stack (THREAD_SIZE of Linux, with KASAN). Its first words
        /// are the program's frame.
        const STACK: usize = 32 << 10;
        let sregs = self.registers.system(&self.fd)?;
        let space = address_space(&sregs);
        let mut stack = Vec::new();
        // Reads page by page, as far as the stack is mapped.
        while stack.len() < STACK {
            let at = end.rsp.wrapping_add(stack.len() as u64);
            let mut piece = [0; PAGE_SIZE as usize];
            let length = (PAGE_SIZE - at % PAGE_SIZE) as usize;
            let piece = piece.get_mut(..length).unwrap_or_default();
            if read_virtual(&self.machine.ram, space, Gva(at), piece).is_err() {
                break;
            }
            stack.extend_from_slice(piece);
        }
        let words: Vec<u64> = stack
            .chunks_exact(8)
            .map(|word| word.try_into().map_or(0, u64::from_le_bytes))
            .collect();
        // RIP, CS, RFLAGS, RSP and SS of the interrupted registers.
        let frames = words.windows(5).enumerate().filter(|(_, frame)| {
            frame[0] == start.rip && frame[3] == start.rsp && frame[1] & !3 != 0
        });
        let mut found = None;
        for (place, frame) in frames {
            found.get_or_insert(match place + 5 <= FIRST_WORDS {
                true => Handler::JustBegun,
                false => Handler::UnderWay,
            });
            let flags = frame.get(2).copied().unwrap_or_default();
            if flags & rflags::TF == 0 || start.rflags & rflags::TF != 0 {
                continue;
            }
            let offset = (place as u64 + 2) * 8 + TRAP_FLAG_BYTE;
            if let Some(gpa) = self.physical(&sregs, end.rsp.wrapping_add(offset)) {
                let byte = ((flags & !rflags::TF) >> (8 * TRAP_FLAG_BYTE)) as u8;
                // The bytes were just read there, so the write cannot fail.
                let _ = self.machine.ram.write_physical(gpa, &[byte]);
            }
        }
        Ok(found)
    }

    /// Executes one guest instruction by KVM's single-step.
    ///
    /// A repeated string instruction stops after every round. It is stepped to its end, to the
    /// limit, or until this vCPU is to be paused.
    pub(super) fn step(&mut self, instruction: Instruction) -> Result<Flow, RunEnd> {
        let repeats = instruction.has_rep_prefix() || instruction.has_repne_prefix();
        let start = self.registers.general(&self.fd)?.rip;
        self.debug.set_step(&self.fd, Some(start))?;
        let mut kicked = false;
        let mut rounds = 0;
        // An instruction that takes more exits is hit, and stepped, again.
        let mut outcome = Ok(Flow::Run);
        for _ in 0..STEP_EXITS {
            match self.enter() {
                Ok(Flow::Stepped) => {
                    rounds += 1;
                    let more = repeats && self.registers.general(&self.fd)?.rip == start;
                    if !more || kicked || rounds == STEP_ROUNDS {
                        outcome = Ok(Flow::Run);
                        break;
                    }
                }
                // Completed for the guest, or the guest has hit a trap in a handler.
                Ok(Flow::Trapped) => {
                    outcome = Ok(Flow::Run);
                    break;
                }
                Ok(Flow::Run) => {}
                Ok(Flow::Interrupted) => {
                    // The kicker waits until the step is done.
                    kicked = true;
                    self.clear_kick();
                }
                Err(end) => {
                    outcome = Err(end);
                    break;
                }
            }
        }
        self.debug.set_step(&self.fd, None)?;
        if kicked {
            kick::set_immediate_exit(&mut self.fd, true);
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::super::recorded::{DEBUG_EXITS, Met};
    use super::*;

    #[test]
    fn of_recorded_exits_only_steps_end_a_step() {
        for (host, met, arch) in DEBUG_EXITS {
            assert_eq!(is_step(&arch), met == Met::Step, "{host}: {met:?}");
        }
    }
}
