//! The stacks of the threads of a process, in the kernel and in the program.

use super::{PausedSystem, Unavailable, known};
use crate::kernel::btf::Btf;
use crate::kernel::layout::LayoutError;
use crate::kernel::module_memory::RangeKind;
use crate::kernel::modules::Module;
use crate::kernel::symbols::Symbols;
use crate::kernel::task_list::TaskInfo;
use crate::stack::code::ModuleCode;
use crate::stack::frames::{End, SavedRegisters, Stack};
use crate::stack::kernel::{KernelUnwinder, Method};
use crate::stack::orc::OrcTable;
use crate::stack::orc_versions::OrcFormat;
use crate::stack::user::{DEFAULT_FRAMES, UserUnwinder};
use crate::x86_64::CpuState;
use crate::{CpuRegisters, Gva, MemoryView};

/// The maximum length of `linux_banner` in bytes.
const MAX_BANNER: usize = 1024;

/// The stack of one thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadStack {
    /// The kernel stack, or `None` for a thread that runs in user mode.
    pub kernel: Option<Stack>,
    /// The program's stack, or `None` for a kernel thread.
    pub user: Option<Stack>,
}

/// Determines the format of a kernel's unwind information.
pub(super) fn orc_format(
    view: MemoryView<'_>,
    btf: Option<&Btf>,
    symbols: &Symbols,
) -> Option<OrcFormat> {
    let banner = symbols
        .address_of("linux_banner")
        .and_then(|at| view.c_string(Gva(at), MAX_BANNER).ok())
        .map(|text| String::from_utf8_lossy(&text).into_owned());
    OrcFormat::of(btf, banner.as_deref()).ok()
}

/// Makes the unwinder of a running kernel.
pub(super) fn kernel_unwinder(
    view: MemoryView<'_>,
    btf: &Btf,
    symbols: &Symbols,
    orc: Option<OrcFormat>,
) -> Result<KernelUnwinder, LayoutError> {
    let table = orc.and_then(|format| OrcTable::of_kernel(symbols, format).ok());
    KernelUnwinder::new(btf, symbols, Method::of(view, symbols, table))
}

impl PausedSystem<'_> {
    /// Returns the CPU that runs a task now. While a CPU switches tasks, it runs the task whose
    /// stack it is on.
    #[must_use]
    pub fn cpu_of(&self, task: &TaskInfo) -> Option<&CpuState> {
        let layout = self.system.current.as_ref().ok()?;
        let unwinder = self.system.unwinder.as_ref().ok();
        self.cpus.iter().find(|cpu| {
            let unwinder = unwinder.filter(|_| !cpu.in_user_mode());
            if unwinder.is_some_and(|u| u.is_on_stack(self.view, task.address, cpu.general.rsp)) {
                return true;
            }
            let current = layout.current(
                self.view.physical(),
                self.view.space(),
                cpu.kernel_gs_base(),
            );
            current.is_ok_and(|current| current.address == task.address)
                && !unwinder.is_some_and(|u| u.has_left_stack(self.view, cpu, task.address))
        })
    }

    /// Returns the number of the CPU that runs a task now; see [`cpu_of`](Self::cpu_of).
    #[must_use]
    pub fn cpu_number_of(&self, task: &TaskInfo) -> Option<usize> {
        let cpu = self.cpu_of(task)?;
        self.cpus.iter().position(|one| std::ptr::eq(one, cpu))
    }

    /// Returns all CPUs, by number.
    #[must_use]
    pub fn cpus(&self) -> &[CpuState] {
        self.cpus
    }

    /// Makes a walker of the kernel's stacks that knows these [`modules`](Self::modules), which are
    /// those loaded now.
    ///
    /// # Errors
    /// If the layout of the kernel's stacks is unknown.
    pub fn kernel_unwinder(&self, modules: &[Module]) -> Result<KernelUnwinder, Unavailable> {
        let mut unwinder = self.system.unwinder.clone()?;
        let code = modules.iter().map(|module| ModuleCode {
            text: module
                .ranges
                .iter()
                .filter(|range| matches!(range.kind, RangeKind::Text | RangeKind::InitText))
                .map(|range| range.addresses.clone())
                .collect(),
            orc: self
                .system
                .module_orc
                .and_then(|layout| layout.table(self.view, module.address).ok().flatten()),
        });
        unwinder.set_modules(code.collect());
        Ok(unwinder)
    }

    /// Walks the kernel stack of the task that a CPU runs. It needs only these registers of the
    /// CPU, which may have ended. There are no frames in user mode.
    ///
    /// # Errors
    /// If the kernel's current task is unknown.
    pub fn stack_on(
        &self,
        cpu: &CpuState,
        unwinder: &KernelUnwinder,
    ) -> Result<Stack, Unavailable> {
        let layout = known(&self.system.current)?;
        let (memory, space) = (self.view.physical(), self.view.space());
        let current = layout.current(memory, space, cpu.kernel_gs_base());
        let current = current.map_err(|error| Unavailable {
            what: "the task that the CPU runs",
            reason: error.to_string(),
        })?;
        Ok(unwinder.running(self.view, cpu, current.address))
    }

    /// Walks the stacks of a thread. `unwinder` is [`kernel_unwinder`](Self::kernel_unwinder).
    /// `user` walks the stacks of the thread's process ([`super::UserObjects::unwinder`]).
    #[must_use]
    pub fn stack(
        &self,
        task: &TaskInfo,
        unwinder: &KernelUnwinder,
        user: &mut UserUnwinder<'_>,
    ) -> ThreadStack {
        let cpu = self.cpu_of(task);
        let kernel = self.kernel_stack(task, cpu, unwinder);
        if task.is_kernel_thread() {
            return ThreadStack { kernel, user: None };
        }
        let registers = self.registers_below(task, cpu, kernel.as_ref(), unwinder);
        let user = match registers {
            Ok(Some(registers)) => match self.process_view(task) {
                Some(view) => Some(user.walk(view, &registers, DEFAULT_FRAMES)),
                None => Some(Stack::empty(End::NoStack)),
            },
            Ok(None) => None,
            Err(end) => Some(Stack::empty(end)),
        };
        ThreadStack { kernel, user }
    }

    /// Returns the registers with which a thread of a program goes on: of the CPU that runs it in
    /// user mode, or as its last entry into the kernel has saved them. Returns `None` for a thread
    /// without a program.
    ///
    /// # Errors
    /// If they are not known: the thread is in the first instructions of an entry, or its kernel
    /// stack cannot be walked.
    pub fn user_registers(
        &self,
        task: &TaskInfo,
        unwinder: &KernelUnwinder,
    ) -> Result<Option<SavedRegisters>, End> {
        if task.is_kernel_thread() {
            return Ok(None);
        }
        let cpu = self.cpu_of(task);
        let kernel = self.kernel_stack(task, cpu, unwinder);
        self.registers_below(task, cpu, kernel.as_ref(), unwinder)
    }

    /// Walks the kernel stack of a task; `None` if it runs in user mode.
    fn kernel_stack(
        &self,
        task: &TaskInfo,
        cpu: Option<&CpuState>,
        unwinder: &KernelUnwinder,
    ) -> Option<Stack> {
        match cpu {
            Some(cpu) if cpu.in_user_mode() => None,
            Some(cpu) => Some(unwinder.running(self.view, cpu, task.address)),
            None => Some(unwinder.sleeping(self.view, task.address)),
        }
    }

    /// Returns the program's registers below a kernel stack, or those of the CPU without one.
    fn registers_below(
        &self,
        task: &TaskInfo,
        cpu: Option<&CpuState>,
        kernel: Option<&Stack>,
        unwinder: &KernelUnwinder,
    ) -> Result<Option<SavedRegisters>, End> {
        let Some(stack) = kernel else {
            return Ok(cpu.map(SavedRegisters::of_cpu));
        };
        match stack.entry {
            Some(entry) => Ok(Some(entry)),
            // The registers in the usual place may be of an earlier entry.
            None if cpu.is_some_and(|cpu| {
                is_at_border(stack) || unwinder.is_on_entry_stack(self.view, cpu)
            }) =>
            {
                Err(End::AtBorder)
            }
            None => unwinder.entry_registers(self.view, task.address),
        }
    }
}

impl<'s> PausedSystem<'s> {
    /// Returns the view of a process's memory.
    #[must_use]
    pub fn process_view(&self, task: &TaskInfo) -> Option<MemoryView<'s>> {
        let layout = self.system.processes.as_ref().ok()?;
        let space = layout.address_space(self.view, task.mm?).ok()?;
        Some(self.view.with_space(space))
    }
}

/// Checks whether a kernel stack without the program's registers is in the first instructions of an
/// entry or the last of an exit. From further inside, the registers are found. A new task in its
/// first function has them already.
fn is_at_border(stack: &Stack) -> bool {
    match stack.end {
        End::UserMode => true,
        End::Bottom => stack.frames.len() == 1,
        _ => false,
    }
}
