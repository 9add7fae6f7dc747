//! System calls at a hit of the kernel function that dispatches them. The number selects the
//! probes. Arguments and result are in the caller's saved registers.

use introspect::Gva;
use introspect::x86_64::virtual_memory::read_virtual;

use super::hit::{Arm, Hit, HitData, HitPath, return_is_wanted};
use super::plan::SystemCalls;
use super::returns::FunctionKey;
use crate::event::MAX_ARGUMENTS;

/// Offsets of a system call's arguments in `pt_regs`: di, si, dx, r10, r8, r9
/// (arch/x86/include/asm/ptrace.h). They are part of the ABI of ptrace(2) since x86-64 began.
const SYSTEM_CALL_ARGUMENTS: [usize; MAX_ARGUMENTS] = [112, 104, 96, 56, 72, 64];
/// The offset of the result in `pt_regs`: ax.
pub(super) const SYSTEM_CALL_RESULT: u64 = 80;
/// The size of `pt_regs` in bytes.
const PT_REGS: usize = 168;
/// The base of system calls' keys among those of functions: no address has these bits.
const SYSTEM_CALL_KEY: u64 = 0x5ca1_1000_0000_0000;
/// System calls that do not return to their caller: rt_sigreturn, exit, exit_group.
const NO_RETURN: [u64; 3] = [15, 60, 231];

/// Returns the key of a system call's return.
pub(crate) fn system_call_key(number: u64) -> FunctionKey {
    SYSTEM_CALL_KEY | number
}

impl HitPath {
    /// Fires the probes of the system call that begins here, and expects its return if that is
    /// probed.
    pub(super) fn enter_system_call(
        &self,
        hit: &Hit<'_>,
        calls: &SystemCalls,
        pc: u64,
        arm: &dyn Arm,
    ) {
        let registers = hit.arguments();
        let register = |number: usize| registers.get(number).copied().unwrap_or_default();
        // The kernel passes an int.
        let number = register(calls.layout.number) & 0xffff_ffff;
        let plan = usize::try_from(number)
            .ok()
            .and_then(|n| calls.plans.get(n));
        let Some(plan) = plan else { return };
        if plan.entries.is_empty() && !plan.returns {
            return;
        }
        let arguments = self.system_call_arguments(hit, register(calls.layout.registers));
        let fired = HitData {
            arguments: &arguments,
            ..HitData::at(pc)
        };
        for probe in &plan.entries {
            self.fire(hit, probe, &fired);
        }
        let key = system_call_key(number);
        if !plan.returns || NO_RETURN.contains(&number) {
            return;
        }
        let wanted = self.return_plan(hit, key);
        if wanted.is_some_and(|plan| return_is_wanted(hit, &plan)) {
            self.expect_return(hit, key, &arguments, None, arm);
        }
    }

    /// Returns the arguments that the caller's saved `registers` hold.
    fn system_call_arguments(&self, hit: &Hit<'_>, registers: u64) -> [u64; MAX_ARGUMENTS] {
        let mut bytes = [0; PT_REGS];
        // The guest's stack pointer may be wrong: no arguments then.
        if read_virtual(hit.memory, self.space, Gva(registers), &mut bytes).is_err() {
            return [0; MAX_ARGUMENTS];
        }
        SYSTEM_CALL_ARGUMENTS.map(|at| {
            let word = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
            u64::from_le_bytes(word.unwrap_or_default())
        })
    }
}
