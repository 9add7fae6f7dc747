//! One place where an int3 of ours stands.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iced_x86::Instruction;
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gpa, Gva, PhysicalMemory};

use super::{INT3, Trap, TrapKind};
use crate::memory::{GuestRam, PAGE_SIZE};
use crate::x86_64::LONGEST_INSTRUCTION;
use crate::x86_64::emulate::{self, Prepared};

/// A site's identity: the guest-physical byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SiteId(pub Gpa);

/// What a site is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A probe's: hits go to the sink. In user mode if `user`.
    Probe { user: bool },
    /// The guest's own #BP entry, where user traps arrive on hosts that do not report them.
    BreakpointEntry,
    /// The guest kernel's `panic`: its registers are kept.
    Panic,
}

impl Purpose {
    pub(super) fn is_user(self) -> bool {
        self == Self::Probe { user: true }
    }
}

/// How the displaced instruction is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Displaced {
    /// By the emulator; the int3 stays in place.
    Emulate,
    /// Put back and single-stepped with the other vCPUs standing still.
    Step,
    /// It is an int3 of the guest's own, which the guest gets.
    Breakpoint,
}

/// What a site has counted, for as long as it is armed.
#[derive(Debug, Default)]
pub(crate) struct SiteCounters {
    pub(crate) hits: AtomicU64,
    /// Hits whose instruction was single-stepped.
    pub(crate) stepped: AtomicU64,
}

/// One site. Replaced by another with the same counters where the guest has changed its instruction.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) id: SiteId,
    pub(crate) address: Gva,
    pub(crate) purpose: Purpose,
    /// Page tables that map the kernel for as long as the site stands, where such are known; none of a
    /// site in a program's text.
    pub(crate) tables: Option<AddressSpace>,
    pub(crate) original: u8,
    /// The instruction at [`Self::address`]; see [`Self::instruction_at`].
    instruction: Instruction,
    /// Its bytes, and what follows them up to the length of the longest instruction.
    code: Vec<u8>,
    pub(crate) displaced: Displaced,
    /// Whether STI may stand directly before it, and hold interrupts off until it is done.
    pub(crate) behind_sti: bool,
    /// The same instruction, where it is one of those that are executed without the emulator.
    pub(crate) prepared: Option<Prepared>,
    pub(crate) counters: Arc<SiteCounters>,
}

/// What stands under a site, and how the guest gets past it.
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
        // What STI holds off is the emulator's to end.
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

    /// The trap of a vCPU that has met its int3 at `address`, counted here.
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

    /// Whether it stands in a program's text.
    pub(crate) fn is_user(&self) -> bool {
        self.purpose.is_user()
    }

    /// Whether it was armed for a probe, not for the machine itself.
    pub(crate) fn is_probe(&self) -> bool {
        matches!(self.purpose, Purpose::Probe { .. })
    }

    /// Bytes of its instruction.
    pub(super) fn length(&self) -> u64 {
        self.instruction.len() as u64
    }

    /// The bytes of its instruction.
    pub(super) fn instruction_bytes(&self) -> &[u8] {
        self.code.get(..self.instruction.len()).unwrap_or_default()
    }

    /// Returns whether bytes behind the int3 differ from when the site was armed: a program can write to them by another mapping of
    /// the page. Bytes in the next page are not compared.
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

    /// Makes a site of what stands under the int3 now, with the same counters.
    pub(super) fn renewed(&self, original: Original) -> Self {
        let (purpose, tables) = (self.purpose, self.tables);
        let counters = self.counters.clone();
        Self::new(self.id, self.address, purpose, tables, original, counters)
    }

    /// Returns how many bytes there are from its first to the end of its page.
    pub(super) fn bytes_in_page(&self) -> usize {
        (PAGE_SIZE - self.id.0.0 % PAGE_SIZE) as usize
    }

    /// Returns its instruction and what follows, as they were when it was armed.
    pub(super) fn code(&self) -> &[u8] {
        &self.code
    }

    /// The displaced instruction as it stands at `rip`: the same page may be mapped at several addresses.
    pub(crate) fn instruction_at(&self, rip: u64) -> Instruction {
        if self.instruction.ip() == rip {
            return self.instruction;
        }
        emulate::moved(&self.instruction, rip).unwrap_or_else(|| {
            // The same bytes decode alike wherever they stand.
            emulate::decode(&self.code, rip).unwrap_or(self.instruction)
        })
    }

    /// What it is found by at a hit: kernel text is mapped alike in every address space, a program's is not.
    pub(super) fn key(&self) -> u64 {
        if self.is_user() {
            self.id.0.0
        } else {
            self.address.0
        }
    }
}

/// Whether `code` begins with the same instruction as `expected`, byte for byte. Not if either holds no whole one.
#[must_use]
pub fn same_instruction(expected: &[u8], code: &[u8]) -> bool {
    let instruction = emulate::decode(expected, 0);
    let length = instruction.map_or(0, |found| found.len());
    length > 0 && expected.get(..length) == code.get(..length)
}
