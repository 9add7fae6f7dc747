//! The locks that the guest's kernel holds while it reads or writes its own text.
//!
//! The watches of [`guest_text`](super::guest_text) see calls that begin. A call that is under way when the first probe is
//! enabled is known by its lock. Until that is free, traps stay off the instructions that such calls look at.
//!
//! Structure: `struct mutex`, include/linux/mutex.h.

use introspect::kernel::layout::offset;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use introspect::{Gva, PhysicalMemory};

use crate::kernel_view::KernelView;

/// Held while text is written (kernel/extable.c), and while jump labels are read or changed (kernel/jump_label.c).
const LOCKS: [&str; 2] = ["text_mutex", "jump_label_mutex"];
/// Flags of a mutex beside the address of its owner (kernel/locking/mutex.h).
const FLAGS: u64 = 7;

/// Where the owners of the locks are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextLocks {
    owners: Vec<Gva>,
    space: AddressSpace,
}

impl TextLocks {
    /// Looks them up. A lock that the kernel does not tell of is taken to be free.
    pub(super) fn new(view: &KernelView) -> Self {
        let owner = view
            .btf
            .as_ref()
            .and_then(|btf| offset(btf, "mutex.owner", 8).ok());
        let locks = LOCKS
            .iter()
            .filter_map(|name| view.symbols.address_of(name));
        let owners = owner.map(|owner| locks.map(|lock| Gva(lock.wrapping_add(owner))).collect());
        Self {
            owners: owners.unwrap_or_default(),
            space: view.space,
        }
    }

    /// Returns whether a task holds one of them.
    pub(super) fn are_held(&self, memory: &impl PhysicalMemory) -> bool {
        let owner = |at: &Gva| read_u64(memory, self.space, *at).unwrap_or_default() & !FLAGS;
        self.owners.iter().any(|at| owner(at) != 0)
    }
}
