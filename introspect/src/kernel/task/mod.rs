//! The task that a CPU runs, read from the kernel's own structures.
//!
//! The caller pauses the CPU and passes its address space and the base of its per-CPU area. This
//! only reads: it walks no lists and takes no locks. The data for a hit is read without allocating,
//! by a page walk and three short reads ([`TaskLayout::current_thread_at`],
//! [`TaskLayout::preempt_count`]).
//!
//! The current task is in per-CPU data. Linux up to 6.1, and from 6.15 on, has the variable
//! `current_task`; versions in between have the struct `pcpu_hot`. The variable's address is the
//! per-CPU symbol plus the per-CPU base. This holds both where such symbols are small offsets
//! (absolute, Linux up to 6.14) and where they are addresses in the image.

mod preempt;
#[cfg(test)]
mod tests;

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::structure::is_kernel_address;
use super::symbols::Symbols;
use crate::x86_64::{AddressSpace, ReadVirtualError, TranslateError, read_virtual, translate};
use crate::{Gpa, Gva, PhysicalMemory, PhysicalReadError};

pub use preempt::{PreemptCount, PreemptForm};

/// Size of `task_struct.comm` (`TASK_COMM_LEN`).
pub const COMM_LENGTH: usize = 16;

/// The location of the current task's data in a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskLayout {
    /// The per-CPU address of the pointer to the current task, relative to a CPU's per-CPU base.
    pub current: u64,
    /// The per-CPU address of the preemption counter, if the kernel names it.
    pub preempt_count: Option<u64>,
    /// The layout of the counter's bits.
    pub preempt_form: PreemptForm,
    /// Offset of `task_struct.pid` in bytes.
    pub pid: u64,
    /// Offset of `task_struct.tgid` in bytes.
    pub tgid: u64,
    /// Offset of `task_struct.comm` in bytes.
    pub comm: u64,
}

/// An error that prevents reading tasks in this kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskLayoutError {
    /// A struct is not as expected.
    #[error("the kernel's types do not describe a task: {0}")]
    Layout(#[from] LayoutError),
    /// The kernel names no per-CPU variable of the current task.
    #[error(
        "the kernel names neither current_task nor pcpu_hot, so the current task is not known; \
         build it with CONFIG_KALLSYMS_ALL=y"
    )]
    NoCurrent,
}

/// An error in reading a CPU's task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TaskError {
    /// The per-CPU variable is not mapped: the per-CPU base or the page tables are not the
    /// kernel's.
    #[error("the per-CPU data at {base} is not mapped: {source}")]
    NoPerCpu {
        /// The per-CPU base passed.
        base: Gva,
        /// The error of the page walk.
        source: TranslateError,
    },
    /// The per-CPU variable is not in RAM.
    #[error("the per-CPU data cannot be read: {0}")]
    PerCpu(#[from] PhysicalReadError),
    /// The pointer to the task is invalid.
    #[error(
        "the task's pointer is {found}, expected a kernel address; a CPU that is not set up yet has no task"
    )]
    NotATask {
        /// The pointer.
        found: Gva,
    },
    /// The task cannot be read.
    #[error("the task at {task} cannot be read: {source}")]
    Unreadable {
        /// The address of the `task_struct`.
        task: Gva,
        /// The cause.
        source: ReadVirtualError,
    },
}

/// The physical addresses of one CPU's variables. They stay valid for as long as the guest runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerCpu {
    current: Gpa,
    preempt_count: Option<Gpa>,
    /// The distance in bytes from the physical to the virtual address of `current`.
    distance: u64,
    /// The same distance for the kernel's direct map, if known.
    direct_map: Option<u64>,
}

impl PerCpu {
    /// Returns a copy that finds tasks without a page walk if `task` is in the direct map. The
    /// direct map has all RAM at one distance, and nothing else is that far from RAM. If the
    /// per-CPU variables and `task` have the same distance, it is that of the direct map.
    #[must_use]
    pub fn in_direct_map(
        self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        task: Gva,
    ) -> Self {
        let place = translate(memory, space, task).map(|page| page.gpa);
        let distance = place.map(|place| task.0.wrapping_sub(place.0));
        let is_same = distance == Ok(self.distance);
        Self {
            direct_map: is_same.then_some(self.distance),
            ..self
        }
    }
}

/// A task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// The address of the `task_struct`.
    pub address: Gva,
    /// The kernel's pid: the number of the thread, in the initial pid namespace; 0 for an idle
    /// task.
    pub pid: i32,
    /// The number of the process: the pid of user programs.
    pub tgid: i32,
    /// The name, NUL-padded.
    pub comm: [u8; COMM_LENGTH],
}

/// Returns a task's name without its padding.
pub(super) fn name_of(comm: &[u8]) -> &[u8] {
    comm.split(|byte| *byte == 0).next().unwrap_or_default()
}

impl Task {
    /// Returns the name without its padding. It may contain any bytes, because a task sets its own
    /// name.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        name_of(&self.comm)
    }
}

/// The numbers of a task that a hit needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thread {
    /// The address of the `task_struct`.
    pub task: Gva,
    /// The number of the thread; see [`Task::pid`].
    pub pid: i32,
    /// The number of the process; see [`Task::tgid`].
    pub tgid: i32,
}

impl TaskLayout {
    /// Looks up the offsets. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel's types or symbols do not describe them.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, TaskLayoutError> {
        let (current, preempt_count) = match (
            symbols.address_of("pcpu_hot"),
            symbols.address_of("current_task"),
        ) {
            (Some(hot), _) => {
                let current = offset(btf, "pcpu_hot.current_task", 8)?;
                let preempt = offset(btf, "pcpu_hot.preempt_count", 4)?;
                (hot.wrapping_add(current), Some(hot.wrapping_add(preempt)))
            }
            (None, Some(current)) => (current, symbols.address_of("__preempt_count")),
            (None, None) => return Err(TaskLayoutError::NoCurrent),
        };
        let preempt_form = match btf.variable_size("__preempt_count") {
            Some(8) => PreemptForm::Long,
            _ => PreemptForm::Int,
        };
        Ok(Self {
            current,
            preempt_count,
            preempt_form,
            pid: offset(btf, "task_struct.pid", 4)?,
            tgid: offset(btf, "task_struct.tgid", 4)?,
            comm: offset(btf, "task_struct.comm", COMM_LENGTH as u64)?,
        })
    }

    /// Returns the physical addresses of the variables of the CPU with the per-CPU base `base`.
    /// `space` must map the kernel.
    ///
    /// # Errors
    /// If they are not mapped.
    pub fn per_cpu(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        base: Gva,
    ) -> Result<PerCpu, TaskError> {
        let locate = |variable: u64| {
            translate(memory, space, Gva(base.0.wrapping_add(variable)))
                .map(|page| page.gpa)
                .map_err(|source| TaskError::NoPerCpu { base, source })
        };
        let current = locate(self.current)?;
        Ok(PerCpu {
            current,
            preempt_count: self.preempt_count.map(locate).transpose()?,
            distance: base.0.wrapping_add(self.current).wrapping_sub(current.0),
            direct_map: None,
        })
    }

    /// Reads the task that the CPU with the per-CPU base `base` runs. For repeated reads of one
    /// CPU, keep its [`per_cpu`](Self::per_cpu) and use [`current_at`](Self::current_at).
    ///
    /// # Errors
    /// If per-CPU data or the task cannot be read.
    pub fn current(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        base: Gva,
    ) -> Result<Task, TaskError> {
        self.current_at(memory, space, &self.per_cpu(memory, space, base)?)
    }

    /// Reads the task that a CPU runs.
    ///
    /// # Errors
    /// If per-CPU data or the task cannot be read.
    pub fn current_at(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        per_cpu: &PerCpu,
    ) -> Result<Task, TaskError> {
        self.task(memory, space, current_pointer(memory, per_cpu)?)
    }

    /// Reads the numbers of the thread that a CPU runs and of its process, and no more of its task.
    ///
    /// # Errors
    /// If per-CPU data or the task cannot be read.
    pub fn current_thread_at(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        per_cpu: &PerCpu,
    ) -> Result<Thread, TaskError> {
        let task = current_pointer(memory, per_cpu)?;
        // They are adjacent, usually in one word.
        if self.tgid.wrapping_sub(self.pid) == 4
            && is_kernel_address(task)
            && let Some(word) = word_of(memory, space, per_cpu, task, self.pid)
        {
            let [pid, tgid] = [word as u32, (word >> 32) as u32].map(u32::cast_signed);
            return Ok(Thread { task, pid, tgid });
        }
        self.thread(memory, space, task)
    }

    /// Reads the thread of a task, number by number.
    #[inline(never)]
    fn thread(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        task: Gva,
    ) -> Result<Thread, TaskError> {
        let mut reader = FieldReader::new(memory, space, task)?;
        let (pid, tgid) = (reader.number(self.pid)?, reader.number(self.tgid)?);
        Ok(Thread { task, pid, tgid })
    }

    /// Reads the name of the task that a CPU runs, by the shortest way; `None` where that does not
    /// lead to it, and [`comm`](Self::comm) may.
    #[must_use]
    pub fn current_comm(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        per_cpu: &PerCpu,
        task: Gva,
    ) -> Option<[u8; COMM_LENGTH]> {
        let word = |offset| word_of(memory, space, per_cpu, task, self.comm.wrapping_add(offset));
        if !is_kernel_address(task) {
            return None;
        }
        let (low, high) = (word(0)?, word(8)?);
        Some((u128::from(low) | u128::from(high) << 64).to_le_bytes())
    }

    /// Reads the name of the task whose `task_struct` is at `address`, NUL-padded.
    ///
    /// # Errors
    /// If that is not a kernel address or cannot be read.
    pub fn comm(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        address: Gva,
    ) -> Result<[u8; COMM_LENGTH], TaskError> {
        let mut comm = [0; COMM_LENGTH];
        FieldReader::new(memory, space, address)?.read(self.comm, &mut comm)?;
        Ok(comm)
    }

    /// Reads the task whose `task_struct` is at `address`.
    ///
    /// # Errors
    /// If that is not a kernel address or cannot be read.
    pub fn task(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        address: Gva,
    ) -> Result<Task, TaskError> {
        let mut reader = FieldReader::new(memory, space, address)?;
        let (pid, tgid) = (reader.number(self.pid)?, reader.number(self.tgid)?);
        let mut comm = [0; COMM_LENGTH];
        reader.read(self.comm, &mut comm)?;
        Ok(Task {
            address,
            pid,
            tgid,
            comm,
        })
    }

    /// Reads a CPU's nesting counter; `None` if the kernel does not name it.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn preempt_count(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        per_cpu: &PerCpu,
    ) -> Result<Option<PreemptCount>, TaskError> {
        let Some(place) = per_cpu.preempt_count else {
            return Ok(None);
        };
        let word = read_number(memory, place)?;
        Ok(Some(PreemptCount::of(word, self.preempt_form)))
    }
}

/// Reads the word at an offset of a task that a CPU runs.
#[inline]
fn word_of(
    memory: &(impl PhysicalMemory + ?Sized),
    space: AddressSpace,
    per_cpu: &PerCpu,
    task: Gva,
    offset: u64,
) -> Option<u64> {
    let address = task.0.wrapping_add(offset);
    // The first task is in the kernel's image, for which this address is not in RAM.
    let direct = per_cpu
        .direct_map
        .map(|distance| address.wrapping_sub(distance));
    match direct.map(|place| memory.read_word(Gpa(place))) {
        Some(Ok(word)) => Some(word),
        _ => memory.word_at(space, Gva(address)),
    }
}

/// Returns the address of the current task of a CPU.
fn current_pointer(
    memory: &(impl PhysicalMemory + ?Sized),
    per_cpu: &PerCpu,
) -> Result<Gva, TaskError> {
    Ok(Gva(memory.read_word(per_cpu.current)?))
}

/// Reads a 32-bit number from the word that contains it.
#[inline]
fn read_number(
    memory: &(impl PhysicalMemory + ?Sized),
    place: Gpa,
) -> Result<u32, PhysicalReadError> {
    if place.0.is_multiple_of(4) {
        let word = memory.read_word(Gpa(place.0 & !7))?;
        return Ok((word >> (place.0 % 8 * 8)) as u32);
    }
    let mut bytes = [0; 4];
    memory.read_physical(place, &mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

/// A reader of fields of one struct, with one page walk for all in the same page. The kernel
/// usually maps its tasks with large pages.
struct FieldReader<'a, M: ?Sized> {
    memory: &'a M,
    space: AddressSpace,
    task: Gva,
    /// The last page walked: virtual address, physical address, and the number of bytes from there
    /// on.
    page: (u64, Gpa, u64),
}

impl<'a, M: PhysicalMemory + ?Sized> FieldReader<'a, M> {
    fn new(memory: &'a M, space: AddressSpace, task: Gva) -> Result<Self, TaskError> {
        if !is_kernel_address(task) {
            return Err(TaskError::NotATask { found: task });
        }
        Ok(Self {
            memory,
            space,
            task,
            page: (task.0, Gpa(0), 0),
        })
    }

    fn failed(&self, source: ReadVirtualError) -> TaskError {
        let task = self.task;
        TaskError::Unreadable { task, source }
    }

    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), TaskError> {
        let gva = Gva(self.task.0.wrapping_add(offset));
        match self.place(gva, buf.len() as u64)? {
            Some(gpa) => {
                let read = self.memory.read_physical(gpa, buf);
                read.map_err(|source| self.failed(ReadVirtualError::Physical { gva, source }))
            }
            None => {
                let read = read_virtual(self.memory, self.space, gva, buf);
                read.map_err(|error| self.failed(error))
            }
        }
    }

    /// Reads a 32-bit number.
    fn number(&mut self, offset: u64) -> Result<i32, TaskError> {
        let gva = Gva(self.task.0.wrapping_add(offset));
        if let Some(gpa) = self.place(gva, 4)? {
            let number = read_number(self.memory, gpa).map(u32::cast_signed);
            return number
                .map_err(|source| self.failed(ReadVirtualError::Physical { gva, source }));
        }
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes)?;
        Ok(i32::from_le_bytes(bytes))
    }

    /// Returns the physical address of `length` bytes at `gva`, if they are in one page.
    fn place(&mut self, gva: Gva, length: u64) -> Result<Option<Gpa>, TaskError> {
        if let Some(place) = self.inside(gva, length) {
            return Ok(Some(place));
        }
        let page = translate(self.memory, self.space, gva);
        let page = page.map_err(|error| self.failed(error.into()))?;
        self.page = (gva.0, page.gpa, page.bytes_left_in_page());
        Ok(self.inside(gva, length))
    }

    /// Returns the physical address of `length` bytes at `gva`, if the last page walked contains
    /// them all.
    fn inside(&self, gva: Gva, length: u64) -> Option<Gpa> {
        let (start, gpa, left) = self.page;
        let distance = gva.0.checked_sub(start)?;
        let fits = distance.checked_add(length)? <= left;
        fits.then_some(Gpa(gpa.0.wrapping_add(distance)))
    }
}
