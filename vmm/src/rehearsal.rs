//! A machine without KVM for rehearsed hits, for benchmarks that count instructions.
//!
//! It has memory, sites and a sink like any machine, and one vCPU's registers as an exit leaves
//! them. The caller puts code, page tables and a stack into the memory. A hit here is all the work
//! that a machine does itself at a usual one (see `vcpu::quick`). Only KVM_RUN and the few steps
//! after its exit are missing.

use std::fmt;
use std::sync::Arc;

use devices::Bus;
use introspect::Gpa;
use kvm_bindings::{kvm_regs, kvm_sregs};

use crate::clock::host_tsc;
use crate::host::HostProfile;
use crate::machine::Handle;
use crate::machine::control::Control;
use crate::machine::shared::{Parts, Shared, Signals};
use crate::memory::{GuestRam, RamError};
use crate::vcpu::SinkCache;
use crate::vcpu::quick::{Caches, Quick, Surroundings};
use crate::vcpu::system::System;

/// The selector of Linux's kernel code.
const KERNEL_CS: u16 = 0x10;
/// CR0: PG, WP, NE, ET, MP, PE.
const CR0: u64 = 0x8001_0033;

/// A machine with one vCPU that never runs.
pub struct Rehearsal {
    shared: Arc<Shared>,
    sink: SinkCache,
    regs: kvm_regs,
    sregs: kvm_sregs,
    caches: Caches,
}

impl fmt::Debug for Rehearsal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rehearsal")
            .field("regs", &self.regs)
            .finish_non_exhaustive()
    }
}

impl Rehearsal {
    /// Creates a machine with `memory` bytes of RAM, zeroed, whose vCPU is in kernel mode with the
    /// page tables at `root`.
    ///
    /// # Errors
    /// If the memory cannot be created.
    pub fn new(memory: u64, root: Gpa) -> Result<Self, RamError> {
        let control = Arc::new(Control::new(1));
        // A pause must not wait for it to park.
        control.gone(0);
        let shared = Shared::new(Parts {
            ram: GuestRam::new(memory)?,
            profile: HostProfile::hardware_example(),
            vm: None,
            pio: Bus::new(),
            mmio: Bus::new(),
            control,
            signals: Arc::new(Signals::default()),
            backlog: None,
            tape: crate::tape::Tape::default(),
        });
        let mut sregs = kvm_sregs {
            cr0: CR0,
            cr3: root.0,
            ..kvm_sregs::default()
        };
        sregs.cs.selector = KERNEL_CS;
        let regs = kvm_regs {
            rflags: 2,
            ..kvm_regs::default()
        };
        Ok(Self {
            sink: SinkCache::new(shared.sink.clone()),
            shared: Arc::new(shared),
            regs,
            sregs,
            caches: Caches::default(),
        })
    }

    /// Returns the machine.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle::of(self.shared.clone())
    }

    /// Returns the vCPU's general registers.
    pub fn regs(&mut self) -> &mut kvm_regs {
        &mut self.regs
    }

    /// Hits the int3 at the vCPU's RIP, in kernel text. Returns whether the vCPU is past the
    /// instruction by the usual way.
    #[inline(never)]
    pub fn hit(&mut self) -> bool {
        let sink = self.sink.load().as_deref().map(|sink| &**sink);
        let surroundings = Surroundings::of(&self.shared, sink, &self.caches.walks, host_tsc());
        let system = System::known_as(&self.sregs);
        let seen = &mut self.caches.kernel_sites;
        let quick = surroundings.kernel_hit(seen, 0, &mut self.regs, &system);
        matches!(quick, Quick::Passed)
    }
}
