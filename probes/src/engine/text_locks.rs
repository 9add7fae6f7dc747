//! The locks that the guest's kernel holds while it reads or writes its own text.
//!
//! The watches of [`guest_text`](super::guest_text) see calls that begin. A call in progress when
//! the first probe is enabled is detected by its lock. Until the lock is free, sites on the
//! instructions that such calls read stay suspended.
//!
//! Structure: `struct mutex`, include/linux/mutex.h.

use introspect::kernel::layout::offset;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use introspect::{Gva, PhysicalMemory};

use crate::kernel_view::KernelView;

/// The locks held while text is written (kernel/extable.c), and while jump labels are read or
/// changed (kernel/jump_label.c).
const LOCKS: [&str; 2] = ["text_mutex", "jump_label_mutex"];
/// The flags in the owner word of a mutex, beside the address (kernel/locking/mutex.h).
const FLAGS: u64 = 7;

/// The addresses of the locks' owner words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextLocks {
    owners: Vec<Gva>,
    space: AddressSpace,
}

impl TextLocks {
    /// Looks up the locks. A lock that is not found counts as free.
    pub(super) fn new(view: &KernelView) -> Self {
        let owner = view
            .kernel
            .btf()
            .and_then(|btf| offset(btf, "mutex.owner", 8).ok());
        let locks = LOCKS
            .iter()
            .filter_map(|name| view.kernel.symbols.address_of(name));
        let owners = owner.map(|owner| locks.map(|lock| Gva(lock.wrapping_add(owner))).collect());
        Self {
            owners: owners.unwrap_or_default(),
            space: view.kernel.space,
        }
    }

    /// Checks whether a task holds one of the locks.
    pub(super) fn are_held(&self, memory: &impl PhysicalMemory) -> bool {
        let owner = |at: &Gva| read_u64(memory, self.space, *at).unwrap_or_default() & !FLAGS;
        self.owners.iter().any(|at| owner(at) != 0)
    }
}
