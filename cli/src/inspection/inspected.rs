//! A guest that exotrace does not run, as providers and scripts see it: its probes can be listed,
//! and it can be iterated over. It has no hits.

use std::fmt;
use std::sync::{Arc, Mutex};

use introspect::PausedMemory;
use introspect::system::{PausedSystem, System};
use probes::kernel_view::KernelView;
use probes::provider::Inspectable;
use vmm::machine::Handle;

use super::{Inspection, Inspector, kernel_of};
use crate::protocol::error::RequestError;
use crate::saved_guest::SavedGuest;

/// A guest that does not run, and its kernel.
pub struct InspectedGuest<'s> {
    saved: &'s SavedGuest,
    inspector: Inspector,
    view: Arc<KernelView>,
}

impl fmt::Debug for InspectedGuest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InspectedGuest")
            .field("view", &self.view)
            .finish_non_exhaustive()
    }
}

impl<'s> InspectedGuest<'s> {
    /// Finds the guest's kernel.
    ///
    /// # Errors
    /// If none is found.
    pub fn new(saved: &'s SavedGuest) -> Result<Self, RequestError> {
        let kernel = kernel_of(saved)?;
        let system = System::new(&kernel, &PausedMemory::new(&*saved.memory));
        Ok(Self {
            saved,
            inspector: Inspector {
                system: Mutex::new(Some(Arc::new(system))),
            },
            view: Arc::new(KernelView::read(kernel, &*saved.memory)),
        })
    }

    /// Returns the inspection of its processes and structures.
    #[must_use]
    pub fn inspection(&self) -> Inspection<'_> {
        Inspection::of_saved(self.saved, &self.inspector)
    }

    /// Returns the kernel, which others may keep.
    pub(crate) fn shared_view(&self) -> &Arc<KernelView> {
        &self.view
    }
}

impl Inspectable for InspectedGuest<'_> {
    fn view(&self) -> &KernelView {
        &self.view
    }

    fn running(&self) -> Option<Handle> {
        None
    }

    fn inspect(&self, ask: &mut dyn FnMut(PausedSystem<'_>)) -> Result<(), String> {
        let looked = self.inspection().look(ask);
        looked.map_err(|error| error.message)
    }
}
