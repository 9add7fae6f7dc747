//! Code of a session that runs at its probes' hits instead of recording them.
//!
//! It runs on the thread of the vCPU, which is stopped meanwhile. The other vCPUs run on, and may
//! change the memory that it reads. It must be quick, must not wait and must not panic. It puts its
//! results into the session's ring as words of its own.
//! [`Session::drain_records`](super::Session::drain_records) returns them in time order.

use std::cell::OnceCell;
use std::fmt;
use std::iter::repeat;

use introspect::x86_64::GeneralRegisters;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_virtual;
use introspect::{Gva, PhysicalMemory};
use vmm::StoppedVcpu;
use vmm::machine::Paused;

use super::hit::{Hit, HitData, HitPath};
use super::plan::Enabled;
use super::strings;
use crate::event::{COMM_LENGTH, EventKind, MAX_FRAMES, StringState};
use crate::fields::{MOST_BYTES, RECORD};
use crate::ring::{SlotWriter, Visit};

/// A program that runs at hits.
pub trait Program: Send + Sync {
    /// Runs at a hit that the probe's filter has admitted.
    fn run(&self, hit: &ProbeHit<'_>) -> HitOutcome;

    /// Checks whether a return probe needs the return of a call that is made now. A call whose
    /// return is not needed costs no second hit.
    fn wants_return(&self, _who: TaskIdentity) -> bool {
        true
    }

    /// Returns a number that this program has in common with all programs of the session that use
    /// the same variables. A budget stops and wakes their probes together. `None` if it uses none.
    fn shares(&self) -> Option<u64> {
        None
    }

    /// Checks whether a hit may [hold](ProbeHit::hold_here) the machine.
    fn may_hold(&self) -> bool {
        false
    }
}

/// The task that runs at a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskIdentity {
    /// The address of the current `task_struct`; 0 if not known.
    pub task: u64,
    /// The process (the kernel's tgid), also in interrupt context, where it is the interrupted one;
    /// `None` if not known.
    pub process: Option<u32>,
    /// The thread (the kernel's pid), in the same way.
    pub thread: Option<u32>,
    /// Whether the task is known, and interrupted by a hard interrupt or an NMI.
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

/// A program's result for a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HitOutcome {
    /// The hit is wanted; counted as recorded.
    Accepted,
    /// The hit is not wanted; counted as filtered.
    Filtered,
}

/// One hit as a program sees it.
pub struct ProbeHit<'h> {
    pub(super) path: &'h HitPath,
    pub(super) hit: &'h Hit<'h>,
    pub(super) probe: &'h Enabled,
    pub(super) fired: &'h HitData<'h>,
    /// The ring's visit, which gives all records of the hit one time.
    pub(super) visit: &'h Visit<'h>,
    /// The record of a tracepoint's event, made when it is first asked for.
    pub(super) record: OnceCell<Option<Vec<u8>>>,
}

impl fmt::Debug for ProbeHit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeHit").finish_non_exhaustive()
    }
}

impl ProbeHit<'_> {
    /// Wakes the thread that drains the session, though the hit has no record.
    pub fn wake(&self) {
        self.probe.session.doorbell.ring();
    }

    /// Pauses the machine until the result is dropped, this vCPU before the probe's instruction.
    /// The program must say that it [may hold](Program::may_hold). `None` in tests, which have no
    /// vCPU.
    #[must_use]
    pub fn hold_here(&self) -> Option<Paused> {
        self.hit.cpu.map(StoppedVcpu::hold_here)
    }

    /// Sends the guest back to the probe's instruction without executing it: it hits the probe
    /// again, and may run other tasks in between. The program must say that it
    /// [may hold](Program::may_hold).
    pub fn retry(&self) {
        if let Some(cpu) = self.hit.cpu {
            cpu.retry();
        }
    }

    /// Returns the number of the probe within the session.
    #[must_use]
    pub fn probe(&self) -> u32 {
        self.probe.number
    }

    /// Returns the kind of event.
    #[must_use]
    pub fn kind(&self) -> EventKind {
        self.probe.kind
    }

    /// Returns the index of the vCPU.
    #[must_use]
    pub fn vcpu(&self) -> usize {
        self.hit.vcpu
    }

    /// Returns the guest's time stamp counter.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        self.visit.tsc()
    }

    /// Returns the current task.
    #[must_use]
    pub fn who(&self) -> TaskIdentity {
        TaskIdentity::at(self.hit)
    }

    /// Returns the process (the kernel's tgid), in interrupt context the interrupted one; `None` if
    /// not known.
    #[must_use]
    pub fn process(&self) -> Option<u32> {
        u32::try_from(self.hit.current.task().process).ok()
    }

    /// Returns the thread (the kernel's pid), in the same way.
    #[must_use]
    pub fn thread(&self) -> Option<u32> {
        u32::try_from(self.hit.current.task().thread).ok()
    }

    /// Returns the thread's name, padded with NULs.
    #[must_use]
    pub fn comm(&self) -> Option<[u8; COMM_LENGTH]> {
        self.hit.current.comm()
    }

    /// Returns the address of the current `task_struct`; 0 if not known.
    #[must_use]
    pub fn task(&self) -> u64 {
        self.hit.current.task().address
    }

    /// Returns the probe's address: see [`Event::pc`](crate::event::Event::pc).
    #[must_use]
    pub fn pc(&self) -> u64 {
        self.fired.pc
    }

    /// Returns the arguments; at a return those of the call. Empty for a timer.
    #[must_use]
    pub fn arguments(&self) -> &[u64] {
        match self.probe.kind {
            EventKind::Tick => &[],
            _ => self.fired.arguments,
        }
    }

    /// Returns the function's result, at a return.
    #[must_use]
    pub fn returned(&self) -> Option<u64> {
        self.fired.returned
    }

    /// Returns the vCPU's registers.
    #[must_use]
    pub fn registers(&self) -> &GeneralRegisters {
        self.hit.registers
    }

    /// Returns the address of the vCPU's last page fault. At the entry of the fault handler it is
    /// the fault being handled.
    #[must_use]
    pub fn fault_address(&self) -> u64 {
        self.hit.cpu.map_or(0, |cpu| cpu.fault_address().0)
    }

    /// Checks whether there is a record of the tracepoint's event, which is read at [`RECORD`].
    #[must_use]
    pub fn has_record(&self) -> bool {
        self.record().is_some()
    }

    fn record(&self) -> Option<&[u8]> {
        let made = self
            .record
            .get_or_init(|| self.fired.record.and_then(|make| make()));
        made.as_deref()
    }

    /// Reads bytes of the record: zero where there is none. Returns `false` if the address is not
    /// in it.
    fn read_record(&self, address: u64, buffer: &mut [u8]) -> bool {
        let offset = address
            .checked_sub(RECORD)
            .filter(|_| self.fired.record.is_some());
        let offset = offset.and_then(|offset| usize::try_from(offset).ok());
        let Some(offset) = offset.filter(|offset| *offset < MOST_BYTES) else {
            return false;
        };
        let record = self.record().unwrap_or_default();
        let there = record.get(offset..).unwrap_or_default();
        for (place, byte) in buffer.iter_mut().zip(there.iter().chain(repeat(&0))) {
            *place = *byte;
        }
        true
    }

    /// Reads memory at a virtual address of the kernel or the current program. Returns `false` if
    /// part of it is not present.
    #[must_use]
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        if self.read_record(address, buffer) {
            return true;
        }
        read_virtual(self.memory(), self.space(address), Gva(address), buffer).is_ok()
    }

    /// Reads a string up to its NUL, or as much as fits or is present. Returns its length.
    #[must_use]
    pub fn read_string(&self, address: u64, buffer: &mut [u8]) -> (usize, StringState) {
        if self.read_record(address, buffer) {
            return match buffer.iter().position(|byte| *byte == 0) {
                Some(nul) => (nul, StringState::Whole),
                None => (buffer.len(), StringState::Cut),
            };
        }
        strings::fill(self.memory(), self.space(address), Gva(address), buffer)
    }

    /// Fills `frames` with the kernel stack, innermost first. Returns the number of frames; 0 for a
    /// hit in a program.
    #[must_use]
    pub fn kernel_stack(&self, frames: &mut [u64]) -> usize {
        match self.hit.user {
            true => 0,
            false => self.path.stacks.kernel(self.hit, self.fired.pc, frames),
        }
    }

    /// Fills `frames` with the program's stack, in the same way.
    #[must_use]
    pub fn user_stack(&self, frames: &mut [u64]) -> usize {
        let entered = self.probe.kind == EventKind::Entry;
        self.path.stacks.user(self.hit, entered, frames)
    }

    /// Puts a record into the session's ring. Returns `false` if the ring is full, which it counts,
    /// or if `fill` failed.
    pub fn emit(&self, fill: impl FnOnce(&mut SlotWriter<'_>)) -> bool {
        self.visit.push_with(fill)
    }

    fn memory(&self) -> &dyn PhysicalMemory {
        self.hit.memory
    }

    /// Returns the page tables for an address. The kernel's memory needs its own: with page table
    /// isolation, a program's do not map it.
    fn space(&self, address: u64) -> AddressSpace {
        match address >> 63 {
            1 => self.path.space,
            _ => self.hit.space(),
        }
    }
}

/// Space for the frames of a stack.
pub(super) type Frames = [u64; MAX_FRAMES];
