//! Walks the kernel stacks of tasks. The walk of a sleeping task starts at its saved state, that of
//! a running one at its CPU's registers. It crosses interrupts and exceptions, up to the entry from
//! user mode or the task's first function.
//!
//! The caller pauses the CPUs, knows which task each runs, and passes a view of the kernel's
//! address space. Frames come only from the kernel's unwind information (ORC), or from frame
//! pointers in a kernel that is built with them. If a stack cannot be followed further, the frames
//! found end with the reason.

use std::ops::Range;

use super::code::{Code, KernelCode, ModuleCode};
use super::frame_pointer;
use super::frames::{End, Found, Frame, SavedRegisters, Stack};
use super::orc::OrcTable;
use super::orc_walk;
use super::ranges::{StackKind, StackLayout, Stacks};
use super::trampoline::{MAX_HOOKS, ReturnTrampolines};
use crate::kernel::btf::Btf;
use crate::kernel::layout::LayoutError;
use crate::kernel::symbols::Symbols;
use crate::x86_64::{CpuState, GeneralRegisters};
use crate::{CpuRegisters, Gva, MemoryView};

/// The maximum number of frames of a kernel stack. Four pages hold few more of 16 bytes each.
pub const MAX_KERNEL_FRAMES: usize = 1024;
/// The code at which a task starts that has not run yet.
const FIRST_CODE: [&str; 2] = ["ret_from_fork_asm", "ret_from_fork"];
/// Functions that any kernel has, and that have a frame in a kernel with frame pointers.
const FRAMED: [&str; 6] = [
    "schedule",
    "vfs_read",
    "vfs_write",
    "do_exit",
    "kthread",
    "wake_up_process",
];

/// The way in which a kernel's stacks are unwound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By the kernel's unwind information.
    Orc(OrcTable),
    /// By frame pointers, which all its functions keep.
    FramePointers,
    /// None: the kernel has neither. Only the innermost frame is known.
    None,
}

impl Method {
    /// Returns the method for a running kernel. It prefers unwind information to frame pointers,
    /// and uses the latter if its functions set them up.
    #[must_use]
    pub fn of(view: MemoryView<'_>, symbols: &Symbols, orc: Option<OrcTable>) -> Self {
        match orc {
            Some(table) => Self::Orc(table),
            None if frame_pointer::are_kept(view, symbols, &FRAMED) => Self::FramePointers,
            None => Self::None,
        }
    }
}

/// A walker of the stacks of one running kernel.
#[derive(Debug, Clone)]
pub struct KernelUnwinder {
    layout: StackLayout,
    code: KernelCode,
    trampolines: ReturnTrampolines,
    first_code: Vec<u64>,
    method: Method,
}

impl KernelUnwinder {
    /// Finds the layout of this kernel's stacks. `symbols` must have its slide.
    ///
    /// # Errors
    /// If the types do not describe a task's stack.
    pub fn new(btf: &Btf, symbols: &Symbols, method: Method) -> Result<Self, LayoutError> {
        let first_code = FIRST_CODE
            .iter()
            .filter_map(|name| symbols.address_of(name));
        Ok(Self {
            layout: StackLayout::new(btf, symbols)?,
            code: KernelCode::new(symbols),
            trampolines: ReturnTrampolines::new(btf, symbols),
            first_code: first_code.collect(),
            method,
        })
    }

    /// Sets the modules that are loaded now, in place of the previous ones. Code of other modules
    /// is treated as generated code, which makes a stack unreliable.
    pub fn set_modules(&mut self, modules: Vec<ModuleCode>) {
        self.code.modules = modules;
    }

    /// Walks the stack of a task that does not run now. Its frames are those of `/proc/PID/stack`,
    /// preceded by those of the scheduler (see [`is_scheduler`](Self::is_scheduler)).
    #[must_use]
    pub fn sleeping(&self, view: MemoryView<'_>, task: Gva) -> Stack {
        let mut walk = match Walk::new(self, view, task, Vec::new()) {
            Ok(walk) => walk,
            Err(end) => return Stack::empty(end),
        };
        let end = walk.follow_saved_frame();
        walk.finish(end)
    }

    /// Walks the stack of the task that a CPU runs, from the CPU's registers. There are no frames
    /// if the CPU is in user mode.
    #[must_use]
    pub fn running(&self, view: MemoryView<'_>, cpu: &CpuState, task: Gva) -> Stack {
        self.running_at_most(view, cpu, task, MAX_KERNEL_FRAMES)
    }

    /// Walks the innermost `most` frames of the stack of the task that a CPU runs. If the CPU is
    /// switching to another task and is already on its stack, the stack is that task's.
    #[must_use]
    pub fn running_at_most(
        &self,
        view: MemoryView<'_>,
        cpu: &CpuState,
        task: Gva,
        most: usize,
    ) -> Stack {
        if cpu.in_user_mode() {
            return Stack {
                entry: Some(SavedRegisters::of_cpu(cpu)),
                ..Stack::empty(End::UserMode)
            };
        }
        let stacks = self.layout.cpu_stacks(view, cpu.kernel_gs_base());
        let mut walk = match Walk::new(self, view, task, stacks) {
            Ok(walk) => walk,
            Err(end) => return Stack::empty(end),
        };
        if !walk.stacks.has(cpu.general.rsp)
            && let Some(task) = self.switched_to(view, &cpu.general)
            && let Ok(other) = Walk::new(self, view, task, Vec::new())
        {
            walk = other;
        }
        walk.most = most.min(MAX_KERNEL_FRAMES);
        let end = walk.follow_registers(cpu.general);
        walk.finish(end)
    }

    /// Reads the registers with which a task that does not run goes on in the scheduler: RIP, RSP,
    /// RBP, RBX and R12 to R15. Others are 0: their values are lost.
    ///
    /// # Errors
    /// If they are not in memory.
    pub fn saved_registers(
        &self,
        view: MemoryView<'_>,
        task: Gva,
    ) -> Result<GeneralRegisters, End> {
        let layout = self.layout.inactive;
        let sp = self.layout.saved_sp(view, task)?;
        if !self.is_on_stack(view, task, sp.wrapping_add(layout.size)) {
            return Err(End::OffStack { pointer: Gva(sp) });
        }
        let word = |offset: u64| End::word(view, sp.wrapping_add(offset));
        let [rbx, r12, r13, r14, r15] = layout.others;
        Ok(GeneralRegisters {
            rip: word(layout.return_address)?,
            rsp: sp.wrapping_add(layout.size),
            rbp: word(layout.bp)?,
            rbx: word(rbx)?,
            r12: word(r12)?,
            r13: word(r13)?,
            r14: word(r14)?,
            r15: word(r15)?,
            ..GeneralRegisters::default()
        })
    }

    /// Returns the unwind information of the kernel and of each module, if they have any.
    pub fn tables(&self) -> impl Iterator<Item = OrcTable> {
        let own = match self.method {
            Method::Orc(table) => Some(table),
            Method::FramePointers | Method::None => None,
        };
        let modules = self.code.modules.iter().filter_map(|module| module.orc);
        own.into_iter().chain(modules)
    }

    /// Reads the registers with which a task entered the kernel, from the end of its stack. They
    /// are the process's while it is in a system call, or was interrupted or switched away from.
    /// Returns `None` for a kernel thread, and for a thread of a process that never leaves the
    /// kernel. They are stale for a task that runs in user mode.
    ///
    /// # Errors
    /// If they are not in memory.
    pub fn entry_registers(
        &self,
        view: MemoryView<'_>,
        task: Gva,
    ) -> Result<Option<SavedRegisters>, End> {
        let stack = self.layout.task_stack(view, task)?;
        let saved = End::registers(view, self.layout.entry_registers(&stack))?;
        Ok(saved.are_of_entry().then_some(saved))
    }

    /// Returns the address of a task's registers, saved at its entry into the kernel, as
    /// [`entry_registers`](Self::entry_registers) reads them.
    ///
    /// # Errors
    /// If the task's stack is unknown.
    pub fn entry_place(&self, view: MemoryView<'_>, task: Gva) -> Result<Gva, End> {
        let stack = self.layout.task_stack(view, task)?;
        Ok(Gva(self.layout.entry_registers(&stack)))
    }

    /// Checks whether a stack pointer is on a task's own stack.
    #[must_use]
    pub fn is_on_stack(&self, view: MemoryView<'_>, task: Gva, pointer: u64) -> bool {
        let stack = self.layout.task_stack(view, task);
        stack.is_ok_and(|stack| points_into(&stack, pointer))
    }

    /// Checks whether a CPU is on one of its exception stacks, or on the stack for the first
    /// instructions of an entry. The program's registers are then saved there, and not where
    /// [`entry_registers`](Self::entry_registers) looks.
    #[must_use]
    pub fn is_on_entry_stack(&self, view: MemoryView<'_>, cpu: &CpuState) -> bool {
        let stacks = self.layout.cpu_stacks(view, cpu.kernel_gs_base());
        stacks.iter().any(|(kind, stack)| {
            !matches!(kind, StackKind::Task | StackKind::Interrupt)
                && points_into(stack, cpu.general.rsp)
        })
    }

    /// Checks whether a CPU in kernel mode, whose current task is `current`, is on the stack of
    /// another task. It is then switching to that task and updates the current task only later.
    /// Returns false for kernels whose interrupt stacks are not known.
    #[must_use]
    pub fn has_left_stack(&self, view: MemoryView<'_>, cpu: &CpuState, current: Gva) -> bool {
        let pointer = cpu.general.rsp;
        // In the first instructions of a system call, the stack pointer is the program's.
        if pointer >> 63 == 0 || !self.layout.knows_interrupt_stack() {
            return false;
        }
        let own = self.layout.task_stack(view, current).ok();
        let stacks = self.layout.cpu_stacks(view, cpu.kernel_gs_base());
        let mut stacks = stacks.into_iter().map(|(_, stack)| stack).chain(own);
        !stacks.any(|stack| points_into(&stack, pointer))
    }

    /// Returns the task whose stack the stack pointer is on, if a register points at it.
    /// `__switch_to_asm` and `__switch_to` have the next task in RSI; their callees have it
    /// elsewhere.
    fn switched_to(&self, view: MemoryView<'_>, registers: &GeneralRegisters) -> Option<Gva> {
        let r = registers;
        let candidates = [
            r.rsi, r.rbx, r.r12, r.r13, r.r14, r.r15, r.rbp, r.rdi, r.rax, r.rcx, r.rdx,
        ];
        let mut candidates = candidates
            .into_iter()
            .filter(|task| task >> 63 == 1)
            .map(Gva);
        candidates.find(|task| self.is_on_stack(view, *task, r.rsp))
    }

    /// Checks whether a frame is in a function of the scheduler, which `/proc/PID/stack` omits.
    #[must_use]
    pub fn is_scheduler(&self, frame: &Frame) -> bool {
        self.code.is_scheduler(frame.address.0)
    }
}

/// Checks whether a stack pointer is on a stack, which may be empty. It never is at the start of
/// one.
fn points_into(stack: &Range<u64>, pointer: u64) -> bool {
    stack.start < pointer && pointer <= stack.end
}

/// A walk in progress.
pub(super) struct Walk<'u, 'p> {
    pub(super) unwinder: &'u KernelUnwinder,
    pub(super) view: MemoryView<'p>,
    pub(super) stacks: Stacks,
    /// The address of the registers of the entry from user mode, if there was one.
    pub(super) entry_at: u64,
    pub(super) entry: Option<SavedRegisters>,
    task: Gva,
    frames: Vec<Frame>,
    /// The maximum number of frames.
    most: usize,
    reliable: bool,
    hooks_left: usize,
}

impl<'u, 'p> Walk<'u, 'p> {
    fn new(
        unwinder: &'u KernelUnwinder,
        view: MemoryView<'p>,
        task: Gva,
        mut stacks: Vec<(StackKind, Range<u64>)>,
    ) -> Result<Self, End> {
        let own = unwinder.layout.task_stack(view, task)?;
        let entry_at = unwinder.layout.entry_registers(&own);
        stacks.insert(0, (StackKind::Task, own));
        Ok(Self {
            unwinder,
            view,
            stacks: Stacks::new(stacks),
            entry_at,
            entry: None,
            task,
            frames: Vec::new(),
            most: MAX_KERNEL_FRAMES,
            reliable: true,
            hooks_left: MAX_HOOKS,
        })
    }

    fn finish(self, end: Result<End, End>) -> Stack {
        Stack {
            frames: self.frames,
            end: end.unwrap_or_else(|end| end),
            entry: self.entry,
        }
    }

    /// Walks from the `struct inactive_task_frame` at a task's saved stack pointer.
    fn follow_saved_frame(&mut self) -> Result<End, End> {
        let layout = self.unwinder.layout.inactive;
        let sp = self.unwinder.layout.saved_sp(self.view, self.task)?;
        self.stacks.enter(sp, layout.size)?;
        let bp_at = sp.wrapping_add(layout.bp);
        match self.unwinder.method {
            Method::FramePointers => frame_pointer::walk(self, bp_at),
            method => {
                let ip = End::word(self.view, sp.wrapping_add(layout.return_address))?;
                let rbp = End::word(self.view, bp_at)?;
                let new = self.is_first_code(ip);
                self.push(ip, if new { Found::Register } else { Found::Return })?;
                let registers = GeneralRegisters {
                    rip: ip,
                    rsp: sp.wrapping_add(layout.size),
                    rbp,
                    ..GeneralRegisters::default()
                };
                match method {
                    Method::Orc(table) => orc_walk::walk(self, table, registers, new, None),
                    _ => Ok(End::NoUnwindInfo { address: Gva(ip) }),
                }
            }
        }
    }

    /// Walks from a CPU's registers.
    fn follow_registers(&mut self, registers: GeneralRegisters) -> Result<End, End> {
        let GeneralRegisters { rip, rsp, rbp, .. } = registers;
        // A call through a null pointer has left its return address on the stack.
        let called_null = rip == 0;
        if !called_null {
            self.push(rip, Found::Register)?;
        }
        match self.unwinder.method {
            Method::Orc(table) => orc_walk::walk(self, table, registers, true, Some(registers)),
            Method::FramePointers => {
                if called_null {
                    self.push_return(rsp, Found::Return)?;
                } else {
                    frame_pointer::leave_frameless(self, rip, rsp)?;
                }
                frame_pointer::walk(self, rbp)
            }
            Method::None => Ok(End::NoUnwindInfo { address: Gva(rip) }),
        }
    }

    /// Checks whether a task starts at `address`, and so has no caller.
    pub(super) fn is_first_code(&self, address: u64) -> bool {
        self.unwinder.first_code.contains(&address)
    }

    pub(super) fn code(&self) -> &'u KernelCode {
        &self.unwinder.code
    }

    /// Reads the word at `at`, which must be on a stack.
    pub(super) fn read_stack(&mut self, at: u64) -> Result<u64, End> {
        self.stacks.enter(at, 8)?;
        End::word(self.view, at)
    }

    /// Reads the registers saved at `at`, which must be on a stack.
    pub(super) fn read_registers(&mut self, at: u64) -> Result<SavedRegisters, End> {
        self.stacks.enter(at, SavedRegisters::SIZE)?;
        End::registers(self.view, at)
    }

    /// Adds a frame.
    pub(super) fn push(&mut self, address: u64, found: Found) -> Result<(), End> {
        self.push_frame(address, found, None)
    }

    fn push_frame(
        &mut self,
        address: u64,
        found: Found,
        trampoline: Option<super::frames::ReturnTrampoline>,
    ) -> Result<(), End> {
        match self.code().at(address) {
            None => {
                return Err(End::NotCode {
                    address: Gva(address),
                });
            }
            Some(Code::Generated) => self.reliable = false,
            Some(_) => self.reliable &= !matches!(found, Found::Guess(_)),
        }
        if self.frames.len() >= self.most {
            return Err(End::TooLong);
        }
        self.frames.push(Frame {
            address: Gva(address),
            found,
            reliable: self.reliable,
            trampoline,
        });
        Ok(())
    }

    /// Adds the frame whose return address is at `slot`, and returns that address. `found` is how
    /// the slot was found.
    pub(super) fn push_return(&mut self, slot: u64, found: Found) -> Result<u64, End> {
        let value = self.read_stack(slot)?;
        let trampolines = &self.unwinder.trampolines;
        let Some(kind) = trampolines.at(value) else {
            // A new task, switched to for the first time.
            let found = match self.is_first_code(value) {
                true => Found::Register,
                false => found,
            };
            self.push(value, found)?;
            return Ok(value);
        };
        let left = &mut self.hooks_left;
        let original = trampolines.original(self.view, self.task, kind, slot, left);
        self.reliable &= original.is_some();
        let address = original.unwrap_or(value);
        self.push_frame(address, found, Some(kind))?;
        match (original, self.unwinder.method) {
            // The trampoline's own unwind information describes a different stack.
            (None, Method::Orc(_)) => Err(End::NoUnwindInfo {
                address: Gva(value),
            }),
            _ => Ok(address),
        }
    }
}
