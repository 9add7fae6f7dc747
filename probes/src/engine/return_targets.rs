//! Checks whether a word on the kernel's stack is a return address, before a trap is armed there.
//!
//! Code that is jumped to has something else on top of its stack: a pointer to data, or a register
//! of a program. Examples are the cold part of a function, and the kernel's exit to programs. An
//! int3 in data would change the guest.

use std::collections::HashSet;
use std::sync::Arc;

use introspect::Gva;
use introspect::kernel::text::{KernelText, Section};
use parking_lot::Mutex;
use vmm::trap::{ArmError, TrapTable};

use crate::kernel_view::KernelView;

/// The addresses in a kernel that code returns to.
pub(crate) struct ReturnTargets {
    view: Arc<KernelView>,
    text: KernelText,
    /// Addresses in the kernel's own text that have passed. Probes that rest arm them again and
    /// again, on a vCPU's thread, and the check takes longer than ten hits.
    passed: Mutex<HashSet<u64>>,
}

/// The most addresses that are remembered.
const MOST_PASSED: usize = 1 << 16;

impl ReturnTargets {
    /// Creates the check for a running kernel.
    pub(super) fn new(view: Arc<KernelView>) -> Self {
        Self {
            text: KernelText::new(&view.kernel.symbols),
            view,
            passed: Mutex::default(),
        }
    }

    /// Checks that a call ends at `address`, or that it is the first byte of a function. The
    /// kernel's own return probes and tracers, and new threads, reach their code through such an
    /// address.
    ///
    /// # Errors
    /// If `address` is data, or is within code that no call returns to.
    pub(super) fn check(&self, table: &TrapTable, address: Gva) -> Result<(), ArmError> {
        let checked = || {
            self.begins_function(address) || table.is_returned_to(address, self.view.kernel.space)
        };
        let is_target = match self.text.section(address.0) {
            Section::Data => false,
            Section::Text => {
                self.passed.lock().contains(&address.0) || (checked() && self.pass(address))
            }
            // Modules come and go.
            Section::Elsewhere => checked(),
        };
        match is_target {
            true => Ok(()),
            false => Err(ArmError::NoReturnAddress { address }),
        }
    }

    /// Remembers an address that has passed.
    fn pass(&self, address: Gva) -> bool {
        let mut passed = self.passed.lock();
        if passed.len() < MOST_PASSED {
            passed.insert(address.0);
        }
        true
    }

    fn begins_function(&self, address: Gva) -> bool {
        let found = self.view.kernel.symbols.resolve(address.0);
        found.is_some_and(|(symbol, offset)| offset == 0 && symbol.is_text())
    }
}
