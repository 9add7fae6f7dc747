//! The part of a machine's interface for debuggers: the registers of floating point, and changes of
//! the guest, which are counted.

use std::sync::atomic::Ordering;

use introspect::Gpa;
use introspect::kernel::fpu::FXSAVE;
use introspect::x86_64::GeneralRegisters;
use kvm_bindings::kvm_regs;

use super::{Handle, Paused};

impl Handle {
    /// Returns the registers of floating point and vectors of a vCPU of the paused machine, as
    /// FXSAVE stores them. `None` if there is no such vCPU or it is gone.
    pub fn floating(&self, paused: &Paused, vcpu: usize) -> Option<[u8; FXSAVE]> {
        paused.on_vcpu(vcpu, |v| v.floating().ok()).flatten()
    }

    /// Replaces the general registers of a vCPU of the paused machine, RIP and RFLAGS included.
    /// Returns whether it did.
    pub fn change_registers(
        &self,
        paused: &Paused,
        vcpu: usize,
        registers: &GeneralRegisters,
    ) -> bool {
        let words = registers.words();
        let changed = paused.on_vcpu(vcpu, move |v| v.change_registers(&in_kvm_form(words)));
        let changed = changed.is_some_and(|changed| changed.is_ok());
        self.count_change(changed)
    }

    /// Replaces bytes of guest memory. Returns whether it did: not if a trap stands in them.
    pub fn change_memory(&self, _: &Paused, address: Gpa, bytes: &[u8]) -> bool {
        let range = address.0..address.0.saturating_add(bytes.len() as u64);
        let is_free = self.traps().user_originals(range).is_empty();
        let changed = is_free && self.ram().write_physical(address, bytes).is_ok();
        self.count_change(changed)
    }

    fn count_change(&self, changed: bool) -> bool {
        let changes = &self.shared.counters.changes;
        changes.fetch_add(u64::from(changed), Ordering::Relaxed);
        changed
    }
}

fn in_kvm_form(w: [u64; 18]) -> kvm_regs {
    kvm_regs {
        rax: w[0],
        rbx: w[1],
        rcx: w[2],
        rdx: w[3],
        rsi: w[4],
        rdi: w[5],
        rsp: w[6],
        rbp: w[7],
        r8: w[8],
        r9: w[9],
        r10: w[10],
        r11: w[11],
        r12: w[12],
        r13: w[13],
        r14: w[14],
        r15: w[15],
        rip: w[16],
        rflags: w[17],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu::general_registers;

    #[test]
    fn registers_are_the_same_in_both_forms() {
        let words = std::array::from_fn(|word| word as u64);
        assert_eq!(general_registers(&in_kvm_form(words)).words(), words);
    }
}
