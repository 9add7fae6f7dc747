//! Code of a session that runs at its probes' hits, on the vCPU's own thread, in place of a record being kept.
//!
//! The vCPU stands still meanwhile, the others do not: a program reads the guest's memory as the hit's own code sees it, and what other
//! vCPUs write may change under it. It must be quick, must not wait, and must not panic. What it has to say it puts into the session's ring, in
//! words of its own that [`Session::drain_records`](super::Session::drain_records) gives back in time order.

use introspect::x86_64::GeneralRegisters;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_virtual;
use introspect::{Gva, PhysicalMemory};

use super::hit::{Hit, HitData, HitPath};
use super::plan::Enabled;
use super::strings;
use crate::event::{COMM_LENGTH, EventKind, MAX_FRAMES, StringState};
use crate::ring::{SlotWriter, Visit};

/// What runs at hits.
pub trait Program: Send + Sync {
    /// Runs at one hit that the probe's filter has let through.
    fn run(&self, hit: &ProbeHit<'_>) -> HitOutcome;

    /// Whether, of a probe of returns, the return is wanted of a call that is made now: one that is not costs no second hit.
    fn wants_return(&self, _who: TaskIdentity) -> bool {
        true
    }
}

/// Who runs at a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskIdentity {
    /// Address of the current `task_struct`, 0 if not known.
    pub task: u64,
    /// The process (the kernel's tgid), in interrupt context that which is interrupted; `None` if it is not known.
    pub process: Option<u32>,
    /// The same of the thread (the kernel's pid).
    pub thread: Option<u32>,
    /// It is known, and is interrupted: by a hard interrupt or an NMI.
    pub interrupted: bool,
}

impl TaskIdentity {
    pub(super) fn at(hit: &Hit<'_>) -> Self {
        let task = hit.current.task();
        let thread = u32::try_from(task.thread).ok();
        Self {
            task: task.address,
            process: u32::try_from(task.process).ok(),
            thread,
            interrupted: thread.is_some() && task.identity.tid.is_none(),
        }
    }
}

/// What a program made of a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HitOutcome {
    /// It is one of those wanted; counted as recorded.
    Accepted,
    /// It is not; counted as filtered.
    Filtered,
}

/// One hit, as programs see it.
pub struct ProbeHit<'h> {
    pub(super) path: &'h HitPath,
    pub(super) hit: &'h Hit<'h>,
    pub(super) probe: &'h Enabled,
    pub(super) fired: &'h HitData<'h>,
    /// All that the program emits has one time.
    pub(super) visit: &'h Visit<'h>,
}

impl ProbeHit<'_> {
    /// The session's number of the probe.
    #[must_use]
    pub fn probe(&self) -> u32 {
        self.probe.number
    }

    /// What happened.
    #[must_use]
    pub fn kind(&self) -> EventKind {
        self.probe.kind
    }

    /// Index of the vCPU.
    #[must_use]
    pub fn vcpu(&self) -> usize {
        self.hit.vcpu
    }

    /// The guest's time stamp counter.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        self.visit.tsc()
    }

    /// Who runs.
    #[must_use]
    pub fn who(&self) -> TaskIdentity {
        TaskIdentity::at(self.hit)
    }

    /// The process (the kernel's tgid), in interrupt context that which is interrupted; `None` if it is not known.
    #[must_use]
    pub fn process(&self) -> Option<u32> {
        u32::try_from(self.hit.current.task().process).ok()
    }

    /// The same of the thread (the kernel's pid).
    #[must_use]
    pub fn thread(&self) -> Option<u32> {
        u32::try_from(self.hit.current.task().thread).ok()
    }

    /// The thread's name, NUL-padded.
    #[must_use]
    pub fn comm(&self) -> Option<[u8; COMM_LENGTH]> {
        self.hit.current.comm()
    }

    /// Address of the current `task_struct`, 0 if not known.
    #[must_use]
    pub fn task(&self) -> u64 {
        self.hit.current.task().address
    }

    /// Where the probe is: see [`Event::pc`](crate::event::Event::pc).
    #[must_use]
    pub fn pc(&self) -> u64 {
        self.fired.pc
    }

    /// Arguments; at a return those of the call. None of a timer.
    #[must_use]
    pub fn arguments(&self) -> &[u64] {
        match self.probe.kind {
            EventKind::Tick => &[],
            _ => self.fired.arguments,
        }
    }

    /// At a return, the value returned.
    #[must_use]
    pub fn returned(&self) -> Option<u64> {
        self.fired.returned
    }

    /// The vCPU's registers.
    #[must_use]
    pub fn registers(&self) -> &GeneralRegisters {
        self.hit.registers
    }

    /// The address of the vCPU's last page fault: where its handler is entered, of the one that is handled.
    #[must_use]
    pub fn fault_address(&self) -> u64 {
        self.hit.cpu.map_or(0, |cpu| cpu.fault_address().0)
    }

    /// Reads memory at a virtual address, the kernel's or the current program's; `false` if not all of it is there.
    #[must_use]
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        read_virtual(self.memory(), self.space(address), Gva(address), buffer).is_ok()
    }

    /// Reads a string up to its NUL, or as much as fits or is there; gives its length.
    #[must_use]
    pub fn read_string(&self, address: u64, buffer: &mut [u8]) -> (usize, StringState) {
        strings::fill(self.memory(), self.space(address), Gva(address), buffer)
    }

    /// Fills `frames` with the kernel stack, innermost first; gives how many there are: none of a hit in a program.
    #[must_use]
    pub fn kernel_stack(&self, frames: &mut [u64]) -> usize {
        match self.hit.user {
            true => 0,
            false => self.path.stacks.kernel(self.hit, self.fired.pc, frames),
        }
    }

    /// The same of the program's stack.
    #[must_use]
    pub fn user_stack(&self, frames: &mut [u64]) -> usize {
        let entered = self.probe.kind == EventKind::Entry;
        self.path.stacks.user(self.hit, entered, frames)
    }

    /// Puts a record into the session's ring; `false` if it is full, which the ring counts, or `fill` gave up.
    pub fn emit(&self, fill: impl FnOnce(&mut SlotWriter<'_>)) -> bool {
        self.visit.push_with(fill)
    }

    fn memory(&self) -> &dyn PhysicalMemory {
        self.hit.memory
    }

    /// The kernel's memory by its own page tables: with page table isolation those of a program do not have it.
    fn space(&self, address: u64) -> AddressSpace {
        match address >> 63 {
            1 => self.path.space,
            _ => self.hit.space(),
        }
    }
}

/// Room for a stack.
pub(super) type Frames = [u64; MAX_FRAMES];
