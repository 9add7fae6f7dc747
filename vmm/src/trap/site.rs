//! One site: an address with an int3 of ours.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iced_x86::Instruction;
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gpa, Gva, PhysicalMemory};

use super::{INT3, Trap, TrapKind};
use crate::memory::{GuestRam, PAGE_SIZE};
use crate::x86_64::LONGEST_INSTRUCTION;
use crate::x86_64::emulate::{self, Prepared};

/// The identity of a site: its guest-physical byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SiteId(pub Gpa);

/// The purpose of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A probe. Hits go to the sink. It is in user text if `user`.
    Probe { user: bool },
    /// The guest's own #BP entry, where user traps arrive on hosts that do not report them.
    BreakpointEntry,
    /// The guest kernel's `panic`. Its registers are kept.
    Panic,
}

impl Purpose {
    pub(super) fn is_user(self) -> bool {
        self == Self::Probe { user: true }
    }
}

/// The way the displaced instruction is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Displaced {
    /// By the emulator. The int3 stays in place.
    Emulate,
    /// By a single step over the original byte, with the other vCPUs paused.
    Step,
    /// Not executed. It is a foreign int3, which is reinjected.
    Breakpoint,
}

/// The counters of a site, kept for as long as it is armed.
#[derive(Debug, Default)]
pub(crate) struct SiteCounters {
    pub(crate) hits: AtomicU64,
    /// The number of hits whose instruction was single-stepped.
    pub(crate) stepped: AtomicU64,
}

/// One site. If the guest changes its instruction, another one with the same counters replaces it.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) id: SiteId,
    pub(crate) address: Gva,
    pub(crate) purpose: Purpose,
    /// Page tables that map the kernel for as long as the site exists, if such are known. `None`
    /// for a site in a program's text.
    pub(crate) tables: Option<AddressSpace>,
    pub(crate) original: u8,
    /// The instruction at [`Self::address`]. See [`Self::instruction_at`].
    instruction: Instruction,
    /// The bytes of the instruction, and those that follow up to the length of the longest
    /// instruction.
    code: Vec<u8>,
    pub(crate) displaced: Displaced,
    /// Whether STI may stand directly before the site, and hold interrupts off until its
    /// instruction is done.
    pub(crate) behind_sti: bool,
    /// The instruction prepared for execution without the emulator, if it is of that kind.
    pub(crate) prepared: Option<Prepared>,
    pub(crate) counters: Arc<SiteCounters>,
}

/// The original instruction of a site, and the way past it.
pub(super) struct Original {
    pub(super) instruction: Instruction,
    pub(super) code: Vec<u8>,
    pub(super) displaced: Displaced,
    pub(super) behind_sti: bool,
}

impl Site {
    pub(super) fn new(
        id: SiteId,
        address: Gva,
        purpose: Purpose,
        tables: Option<AddressSpace>,
        original: Original,
        counters: Arc<SiteCounters>,
    ) -> Self {
        // Only the emulator ends the interrupt shadow of STI.
        let simple = original.displaced == Displaced::Emulate && !original.behind_sti;
        let prepared = Prepared::of(&original.instruction).filter(|_| simple);
        Self {
            id,
            address,
            purpose,
            tables,
            prepared,
            original: original.code.first().copied().unwrap_or(INT3),
            instruction: original.instruction,
            code: original.code,
            displaced: original.displaced,
            behind_sti: original.behind_sti,
            counters,
        }
    }

    /// Counts a hit of this site's int3 at `address` by a vCPU and returns the trap.
    #[inline]
    pub(crate) fn met(&self, vcpu: usize, kind: TrapKind, address: u64) -> Trap {
        self.counters.hits.fetch_add(1, Ordering::Relaxed);
        Trap {
            vcpu,
            address: Gva(address),
            kind,
            site: Some(self.id),
        }
    }

    /// Checks whether the site is in a program's text.
    pub(crate) fn is_user(&self) -> bool {
        self.purpose.is_user()
    }

    /// Checks whether the site was armed for a probe rather than for the machine itself.
    pub(crate) fn is_probe(&self) -> bool {
        matches!(self.purpose, Purpose::Probe { .. })
    }

    /// Returns the length of the instruction in bytes.
    pub(super) fn length(&self) -> u64 {
        self.instruction.len() as u64
    }

    pub(super) fn instruction_bytes(&self) -> &[u8] {
        self.code.get(..self.instruction.len()).unwrap_or_default()
    }

    /// Checks whether bytes behind the int3 have changed since the site was armed.
    ///
    /// A program can write to them through another mapping of the page. Bytes in the next page are
    /// not compared.
    #[inline]
    pub(crate) fn is_rewritten(&self, ram: &GuestRam) -> bool {
        let bytes = self.instruction_bytes();
        let known = bytes.get(1..self.bytes_in_page().min(bytes.len()));
        let Some(known) = known.filter(|known| !known.is_empty()) else {
            return false;
        };
        let mut now = [0; LONGEST_INSTRUCTION];
        let now = now.get_mut(..known.len()).unwrap_or_default();
        let read = ram.read_physical(Gpa(self.id.0.0 + 1), now);
        read.is_ok() && now != known
    }

    /// Makes a site from the instruction that is now under the int3, with the same counters.
    pub(super) fn renewed(&self, original: Original) -> Self {
        let (purpose, tables) = (self.purpose, self.tables);
        let counters = self.counters.clone();
        Self::new(self.id, self.address, purpose, tables, original, counters)
    }

    /// Returns the number of bytes from the site's first byte to the end of its page.
    pub(super) fn bytes_in_page(&self) -> usize {
        (PAGE_SIZE - self.id.0.0 % PAGE_SIZE) as usize
    }

    /// Returns the instruction and the bytes that follow, as they were when the site was armed.
    pub(super) fn code(&self) -> &[u8] {
        &self.code
    }

    /// Returns the displaced instruction as decoded at `rip`. The same page may be mapped at
    /// several addresses.
    pub(crate) fn instruction_at(&self, rip: u64) -> Instruction {
        if self.instruction.ip() == rip {
            return self.instruction;
        }
        emulate::moved(&self.instruction, rip).unwrap_or_else(|| {
            // The same bytes decode alike at every address.
            emulate::decode(&self.code, rip).unwrap_or(self.instruction)
        })
    }

    /// Returns the key by which a hit finds the site. Kernel text is mapped alike in every address
    /// space, but a program's text is not.
    pub(super) fn key(&self) -> u64 {
        if self.is_user() {
            self.id.0.0
        } else {
            self.address.0
        }
    }
}

/// Checks whether `code` begins with the same instruction as `expected`, byte for byte. Returns
/// false if either holds no whole instruction.
#[must_use]
pub fn same_instruction(expected: &[u8], code: &[u8]) -> bool {
    let instruction = emulate::decode(expected, 0);
    let length = instruction.map_or(0, |found| found.len());
    length > 0 && expected.get(..length) == code.get(..length)
}
