//! Watchpoints of one vCPU: applies changes of the set, and reports accesses after their
//! instruction.

use introspect::Gva;

use super::Vcpu;
use super::environment::in_user_mode;
use crate::trap::{Trap, TrapKind};
use crate::vm::KvmError;

impl Vcpu {
    /// Applies the machine's watchpoints to the debug registers, if they have changed.
    pub(super) fn apply_watchpoints(&mut self) -> Result<(), KvmError> {
        let watchpoints = &self.machine.watchpoints;
        let changes = watchpoints.changes();
        if changes == self.watchpoint_changes {
            return Ok(());
        }
        self.watchpoint_changes = changes;
        let registers = watchpoints.registers();
        self.debug.set_watchpoints(&self.fd, registers)
    }

    /// Reports the watchpoints that the last instruction has met, once each.
    #[cold]
    pub(super) fn report_watched(&mut self) -> Result<(), KvmError> {
        let met = std::mem::take(&mut self.watched);
        let regs = self.registers.general(&self.fd)?;
        let sregs = self.registers.system(&self.fd)?;
        for number in (0..u8::BITS as u8).filter(|number| met >> number & 1 == 1) {
            let trap = Trap {
                vcpu: self.index,
                address: Gva(regs.rip),
                kind: TrapKind::Watchpoint(number),
                site: None,
            };
            // A sink that pauses the machine here finds the vCPU after its instruction.
            self.deliver(&trap, &regs, &sregs, in_user_mode(&sregs));
        }
        Ok(())
    }
}
