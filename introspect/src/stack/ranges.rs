//! The stacks that a task's kernel code may be on, as address ranges. They are its own, and for a
//! running task those of its CPU for interrupts, exceptions and the entry code.
//!
//! A walk reads nothing outside them, and enters each at most once. So it ends, whatever they hold.

use std::ops::Range;

use super::frames::{End, SavedRegisters};
use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::symbols::Symbols;
use crate::x86_64::PAGE;
use crate::{Gva, MemoryView};

/// The size in bytes of a task's stack, and of an interrupt stack. Both are four pages, or eight
/// with KASAN (`THREAD_SIZE` and `IRQ_STACK_SIZE`, arch/x86/include/asm/page_64_types.h). The types
/// show the size of the interrupt stack.
const DEFAULT_STACK: u64 = 4 * PAGE;
const MOST_STACK: u64 = 64 * PAGE;
/// The bytes that kernels with FRED support leave free above the saved registers
/// (`TOP_OF_KERNEL_STACK_PADDING`).
const FRED_PADDING: u64 = 16;
const FRED_ENTRY: &str = "asm_fred_entrypoint_user";

/// A kind of stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StackKind {
    /// The task's stack.
    Task,
    /// The CPU's stack for device interrupts and softirqs.
    Interrupt,
    /// The CPU's stack for one kind of exception, by its index in `struct cea_exception_stacks`.
    Exception(u8),
    /// The CPU's stack for the first instructions of an entry from user mode.
    Entry,
}

/// The members of `struct cea_exception_stacks` (arch/x86/include/asm/cpu_entry_area.h). A kernel
/// has some of them.
const EXCEPTION_STACKS: [&str; 8] = [
    "DF_stack",
    "NMI_stack",
    "DB_stack",
    "DB1_stack",
    "DB2_stack",
    "MCE_stack",
    "VC_stack",
    "VC2_stack",
];

/// The location of a kernel's stacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StackLayout {
    /// Offsets in `task_struct`.
    task_stack: u64,
    thread_sp: u64,
    stack_size: u64,
    padding: u64,
    /// The `struct inactive_task_frame` that a task leaves at its stack pointer when it is switched
    /// away from.
    pub(super) inactive: InactiveFrame,
    /// The per-CPU addresses of pointers to stacks.
    interrupt: Option<u64>,
    exceptions: Option<u64>,
    /// The ranges of the exception stacks, relative to the start of all of them.
    exception_stacks: Vec<(StackKind, Range<u64>)>,
    /// The distance from the start of the entry stack to them.
    entry_before: Option<u64>,
}

/// The offsets in `struct inactive_task_frame`, and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InactiveFrame {
    /// Those of RBX and R12 to R15.
    pub(super) others: [u64; 5],
    pub(super) bp: u64,
    pub(super) return_address: u64,
    pub(super) size: u64,
}

impl StackLayout {
    /// Finds the offsets. `symbols` must have the slide of the running kernel. CPU stacks that the
    /// kernel does not describe are omitted; walks end where they would enter one.
    ///
    /// # Errors
    /// If the types do not describe a task's stack.
    pub(super) fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        let inactive = |member: &str, default| {
            let found = offset(btf, &format!("inactive_task_frame.{member}"), 8);
            found.unwrap_or(default)
        };
        let hot = |member: &str| {
            let base = symbols.address_of("pcpu_hot")?;
            let offset = offset(btf, &format!("pcpu_hot.{member}"), 8).ok()?;
            Some(base.wrapping_add(offset))
        };
        let stacks = EXCEPTION_STACKS
            .iter()
            .zip(0u8..)
            .filter_map(|(member, number)| {
                let member = btf.member(&format!("cea_exception_stacks.{member}")).ok()?;
                let end = member.byte_offset.checked_add(member.size)?;
                Some((StackKind::Exception(number), member.byte_offset..end))
            });
        let entry_before = || {
            let stacks = btf.member("cpu_entry_area.estacks").ok()?.byte_offset;
            let entry = btf.member("cpu_entry_area.entry_stack_page").ok()?;
            (entry.size == PAGE).then(|| stacks.checked_sub(entry.byte_offset))?
        };
        let size = btf
            .size_of("irq_stack")
            .filter(|size| *size <= MOST_STACK && size.is_multiple_of(PAGE));
        Ok(Self {
            task_stack: offset(btf, "task_struct.stack", 8)?,
            thread_sp: offset(btf, "task_struct.thread.sp", 8)?,
            stack_size: size.filter(|size| *size > 0).unwrap_or(DEFAULT_STACK),
            padding: symbols.address_of(FRED_ENTRY).map_or(0, |_| FRED_PADDING),
            inactive: InactiveFrame {
                others: [
                    inactive("bx", 32),
                    inactive("r12", 24),
                    inactive("r13", 16),
                    inactive("r14", 8),
                    inactive("r15", 0),
                ],
                bp: inactive("bp", 40),
                return_address: inactive("ret_addr", 48),
                size: btf.size_of("inactive_task_frame").unwrap_or(56),
            },
            interrupt: symbols
                .address_of("hardirq_stack_ptr")
                .or_else(|| hot("hardirq_stack_ptr"))
                .or_else(|| symbols.address_of("irq_stack_ptr")),
            exceptions: symbols.address_of("cea_exception_stacks"),
            exception_stacks: stacks.collect(),
            entry_before: entry_before(),
        })
    }

    /// Returns the range of a task's stack.
    pub(super) fn task_stack(&self, view: MemoryView<'_>, task: Gva) -> Result<Range<u64>, End> {
        let start = End::word(view, task.0.wrapping_add(self.task_stack))?;
        if start == 0 {
            return Err(End::NoStack);
        }
        let off = End::OffStack {
            pointer: Gva(start),
        };
        match (start >> 63 == 1 && start.is_multiple_of(PAGE))
            .then(|| start.checked_add(self.stack_size))
        {
            Some(Some(end)) => Ok(start..end),
            _ => Err(off),
        }
    }

    /// Reads the stack pointer of a task that does not run.
    pub(super) fn saved_sp(&self, view: MemoryView<'_>, task: Gva) -> Result<u64, End> {
        End::word(view, task.0.wrapping_add(self.thread_sp))
    }

    /// Returns the address of the registers of a task's entry from user mode on its stack.
    pub(super) fn entry_registers(&self, stack: &Range<u64>) -> u64 {
        stack.end.wrapping_sub(self.padding + SavedRegisters::SIZE)
    }

    /// Checks whether [`cpu_stacks`](Self::cpu_stacks) can include the interrupt stack.
    pub(super) fn knows_interrupt_stack(&self) -> bool {
        self.interrupt.is_some()
    }

    /// Returns the stacks of the CPU with the per-CPU base `base`. Those that cannot be read are
    /// omitted.
    pub(super) fn cpu_stacks(
        &self,
        view: MemoryView<'_>,
        base: Gva,
    ) -> Vec<(StackKind, Range<u64>)> {
        let pointer = |variable: Option<u64>| {
            let value = view.u64(Gva(base.0.wrapping_add(variable?))).ok()?;
            (value >> 63 == 1).then_some(value)
        };
        let mut stacks = Vec::new();
        // The pointer is the stack's end, or 8 bytes below it (since Linux 5.12).
        let end = pointer(self.interrupt).and_then(|top| top.checked_next_multiple_of(PAGE));
        if let Some(end) = end {
            stacks.push((StackKind::Interrupt, end.wrapping_sub(self.stack_size)..end));
        }
        if let Some(start) = pointer(self.exceptions) {
            let absolute = |offset: u64| start.wrapping_add(offset);
            let exceptions = self.exception_stacks.iter();
            stacks.extend(
                exceptions.map(|(kind, range)| (*kind, absolute(range.start)..absolute(range.end))),
            );
            if let Some(entry) = self
                .entry_before
                .and_then(|before| start.checked_sub(before))
            {
                stacks.push((StackKind::Entry, entry..entry.wrapping_add(PAGE)));
            }
        }
        stacks
    }
}

/// The stacks of one walk.
pub(super) struct Stacks {
    all: Vec<(StackKind, Range<u64>)>,
    current: Option<usize>,
    /// A bit for each stack that was entered.
    entered: u64,
}

impl Stacks {
    pub(super) fn new(all: Vec<(StackKind, Range<u64>)>) -> Self {
        Self {
            all,
            current: None,
            entered: 0,
        }
    }

    /// Returns the number of the stack that the walk is on.
    pub(super) fn current(&self) -> Option<usize> {
        self.current
    }

    /// Checks whether there is a stack with a word at `at`.
    pub(super) fn has(&self, at: u64) -> bool {
        self.all.iter().any(|(_, range)| holds(range, at, 8))
    }

    /// Checks whether the stack that the walk is on holds the `length` bytes at `at`.
    pub(super) fn holds(&self, at: u64, length: u64) -> bool {
        let current = self.current.and_then(|index| self.all.get(index));
        current.is_some_and(|(_, range)| holds(range, at, length))
    }

    /// Moves to the stack that holds the `length` bytes at `at`.
    ///
    /// # Errors
    /// If no stack holds them, or the walk has left that stack before.
    pub(super) fn enter(&mut self, at: u64, length: u64) -> Result<(), End> {
        if self.holds(at, length) {
            return Ok(());
        }
        let off = End::OffStack { pointer: Gva(at) };
        let found = self
            .all
            .iter()
            .position(|(_, range)| holds(range, at, length))
            .ok_or(off)?;
        let bit = u32::try_from(found)
            .ok()
            .and_then(|found| 1u64.checked_shl(found))
            .ok_or(off)?;
        if self.entered & bit != 0 {
            return Err(off);
        }
        self.entered |= bit;
        self.current = Some(found);
        Ok(())
    }
}

fn holds(range: &Range<u64>, at: u64, length: u64) -> bool {
    let end = at.checked_add(length);
    range.start <= at && end.is_some_and(|end| end <= range.end)
}
