//! Reads the structures of the paused guest, and caches what stays the same during one stop.

use std::cell::RefCell;

use introspect::stack::kernel::KernelUnwinder;
use introspect::system::PausedSystem;
use probes::provider::{self, Traceable};

use crate::subject::DebugError;

/// A guest that is read.
pub(crate) struct Reader<'g> {
    guest: &'g dyn Traceable,
    /// The walker of kernel stacks, made once a stop.
    unwinder: RefCell<Option<KernelUnwinder>>,
}

impl<'g> Reader<'g> {
    pub(crate) fn new(guest: &'g dyn Traceable) -> Self {
        Self {
            guest,
            unwinder: RefCell::new(None),
        }
    }

    pub(crate) fn guest(&self) -> &'g dyn Traceable {
        self.guest
    }

    /// Forgets the facts that hold only while the guest is paused.
    pub(crate) fn goes_on(&self) {
        self.unwinder.borrow_mut().take();
    }

    /// Returns an answer of the paused guest.
    pub(crate) fn look<T>(&self, ask: impl FnOnce(PausedSystem<'_>) -> T) -> Result<T, DebugError> {
        provider::inspect(self.guest, ask).map_err(DebugError::Guest)
    }

    /// Asks with the walker of kernel stacks.
    pub(crate) fn with_unwinder<T>(
        &self,
        look: &PausedSystem<'_>,
        ask: impl FnOnce(&KernelUnwinder) -> T,
    ) -> Result<T, DebugError> {
        let mut kept = self.unwinder.borrow_mut();
        let unwinder = match kept.take() {
            Some(unwinder) => unwinder,
            None => {
                let modules = look.modules().map(|modules| modules.items);
                look.kernel_unwinder(&modules.unwrap_or_default())?
            }
        };
        let answer = ask(&unwinder);
        *kept = Some(unwinder);
        Ok(answer)
    }
}
