//! The facts about the running kernel that a tracer needs, collected once.
//!
//! The caller provides the kernel's image and a paused guest. The guest must have booted far enough
//! to have its final entry points; before that [`running_symbols`] fails. The view is valid as long
//! as the guest runs the same kernel. It holds no machine.

use crate::syscall_entry::{FUNCTIONS, REGISTERS, SystemCallRegisters};
use std::fmt;
use std::ops::Range;

use introspect::kernel::btf::{Btf, Parameter};
use introspect::kernel::loaded_modules::LoadedModules;
use introspect::kernel::module_readers::ModuleReaders;
use introspect::kernel::running::{KERNEL_TABLES, RunningKernel};
use introspect::kernel::slide::{self, LiveEntries, SlideError};
use introspect::kernel::symbols::{Function, Symbols};
use introspect::kernel::task::TaskLayout;
use introspect::x86_64::paging::{AddressSpace, TranslateError, translate};
use introspect::x86_64::virtual_memory::read_u32;
use introspect::{Gva, MemoryView, PausedMemory, PhysicalMemory};
use vmm::Machine;
use vmm::machine::Paused;

use crate::syscall_entry::registers_by_code;
use crate::text_hash::{TextHash, TextHashError, hash_text};

/// The function that runs a loaded module's initialisation. Its first argument is the module. The
/// kernel keeps it out of line, as a place for breakpoints (kernel/module/main.c).
const MODULE_START: &str = "do_init_module";
const DIVIDE_ERROR: u8 = 0;
const PAGE_FAULT: u8 = 14;

/// A running kernel, and what a tracer needs of it.
pub struct KernelView {
    /// The kernel.
    pub kernel: RunningKernel,
    /// The modules that were loaded when the view was made; none if they cannot be read.
    pub modules: LoadedModules,
    /// The layout of tasks, if symbols and types define it; else the reason, for the user.
    pub tasks: Result<TaskLayout, String>,
    /// The argument of `do_syscall_64` that is the address of `pt_regs`, if the kernel's code shows
    /// it.
    pub(crate) system_call_registers: Option<usize>,
    /// The first address from which the image's functions are freed.
    freed_from: Option<u64>,
}

impl fmt::Debug for KernelView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelView")
            .field("space", &self.kernel.space)
            .field("tasks", &self.tasks)
            .finish_non_exhaustive()
    }
}

/// The kernel's function that all system calls of 64-bit programs pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SystemCallEntry {
    /// The address of the function.
    pub address: Gva,
    /// The index of the argument that is the system call's number, from 0.
    pub number: usize,
}

/// The reason that the running kernel cannot be examined.
#[derive(Debug, thiserror::Error)]
pub enum KernelViewError {
    /// The vCPU's registers cannot be read.
    #[error("the registers of vCPU 0 cannot be read: it has ended")]
    NoVcpu,
    /// The kernel's page tables are not mapped.
    #[error(
        "the kernel's page tables ({KERNEL_TABLES} at {address}) are not mapped on vCPU 0: {source}"
    )]
    PageTables {
        /// The address by the symbol.
        address: Gva,
        /// The error of the page walk.
        source: TranslateError,
    },
}

impl KernelView {
    /// Creates the view of a paused Linux guest's kernel.
    #[must_use]
    pub fn new(kernel: RunningKernel, machine: &Machine, _paused: &Paused) -> Self {
        Self::read(kernel, machine.ram())
    }

    /// Creates the view of a Linux guest's kernel in memory that nothing writes meanwhile.
    #[must_use]
    pub fn read(kernel: RunningKernel, ram: &dyn PhysicalMemory) -> Self {
        let mut view = Self::of(kernel);
        let memory = PausedMemory::new(ram);
        let memory = memory.view(view.kernel.space);
        view.system_call_registers = registers_by_code(&view.kernel.symbols, |address, code| {
            memory.read(address, code).is_ok()
        });
        view.modules = loaded_modules(&view, memory);
        view.freed_from = freed_from(&view, ram);
        view
    }

    /// Creates the view of a kernel by its symbols and types alone.
    #[must_use]
    pub fn of(kernel: RunningKernel) -> Self {
        let tasks = kernel.types.as_ref().map_err(String::clone);
        let tasks = tasks.and_then(|btf| {
            TaskLayout::new(btf, &kernel.symbols).map_err(|error| error.to_string())
        });
        Self {
            kernel,
            modules: LoadedModules::default(),
            tasks,
            system_call_registers: None,
            freed_from: None,
        }
    }

    /// Creates the view of a kernel with known names only. None of its events belongs to a process.
    #[must_use]
    pub fn without_types(symbols: Symbols, space: AddressSpace) -> Self {
        let types = Err("the kernel has no types".to_owned());
        Self::of(RunningKernel::new(symbols, types, space))
    }

    /// Checks whether the kernel has freed its image's function at `address`, which runs at boot
    /// only. Its memory then has other uses.
    #[must_use]
    pub fn has_freed(&self, address: u64) -> bool {
        self.freed_from.is_some_and(|start| address >= start)
    }

    /// Returns the function that all system calls pass; `None` if the kernel has none with a known
    /// name.
    #[must_use]
    pub fn system_call_entry(&self) -> Option<SystemCallEntry> {
        let (address, registers) = entry_function(self)?;
        Some(SystemCallEntry {
            address,
            number: registers.number,
        })
    }

    /// Returns the functions of the kernel's image that are not freed, ascending.
    pub fn text_functions(&self) -> impl Iterator<Item = Function<'_>> {
        let functions = self.kernel.symbols.text_functions();
        functions.filter(|function| !self.has_freed(function.symbol.address))
    }

    /// Returns the view with its page tables marked as lasting, for a kernel with a single set of
    /// them that no symbol names.
    #[must_use]
    pub fn with_lasting_space(mut self) -> Self {
        self.kernel.space_lasts = true;
        self
    }

    /// Returns the distance in bytes of the kernel above its link address.
    #[must_use]
    pub fn slide(&self) -> u64 {
        self.kernel.symbols.slide()
    }

    /// Returns the range of the kernel's text: `_stext` to `_etext`.
    ///
    /// # Errors
    /// If the symbols are missing or out of order.
    pub fn text(&self) -> Result<Range<u64>, TextHashError> {
        let [start, end] = ["_stext", "_etext"].map(|name| self.kernel.symbols.address_of(name));
        match (start, end) {
            (Some(first), Some(last)) if first < last => Ok(first..last),
            _ => Err(TextHashError::NoBounds { start, end }),
        }
    }

    /// Returns the SHA-256 of the kernel's text in the memory of the paused guest.
    ///
    /// # Errors
    /// If the text's bounds are not known or it cannot be read.
    pub fn text_hash(
        &self,
        machine: &Machine,
        _paused: &Paused,
    ) -> Result<TextHash, TextHashError> {
        hash_text(machine.ram(), self.kernel.space, self.text()?)
    }

    /// Returns the first state of the system in which boot-only code is freed, if the types define
    /// it. Since Linux 5.16 that is a state of its own.
    fn running_state(&self) -> Option<i64> {
        let btf = self.kernel.btf()?;
        ["SYSTEM_FREEING_INITMEM", "SYSTEM_RUNNING"]
            .into_iter()
            .find_map(|state| btf.enumerator(&format!("system_states.{state}")).ok())
    }

    /// Returns the function that starts a loaded module; `None` in a kernel without one.
    pub(crate) fn module_start(&self) -> Option<Gva> {
        self.kernel.symbols.address_of(MODULE_START).map(Gva)
    }

    /// Returns the readers of the kernel's modules; `None` if it has none or they are not known.
    pub(crate) fn module_readers(&self) -> Option<ModuleReaders> {
        ModuleReaders::new(self.kernel.btf()?, &self.kernel.symbols).ok()?
    }

    /// Checks whether the kernel can be watched for modules that it loads.
    pub(crate) fn reports_modules(&self) -> bool {
        self.module_start().is_some() && self.module_readers().is_some()
    }

    /// Returns the number of argument registers of the function `name`, if BTF has it.
    #[must_use]
    pub fn argument_registers(&self, name: &str) -> Option<usize> {
        let prototype = self.kernel.btf()?.func_proto_args(name).ok()?;
        if prototype.variadic {
            return None;
        }
        let registers = prototype
            .parameters
            .iter()
            .map(|parameter| match parameter.size {
                ..=8 => 1,
                9..=16 => 2,
                // System V ABI: larger structs are passed on the stack.
                _ => 0,
            });
        Some(registers.sum())
    }
}

/// Returns the image's symbols at their addresses in a paused Linux guest; `linked` has the link
/// addresses. Reads vCPU 0.
///
/// # Errors
/// If the guest does not (yet) run this kernel.
pub fn running_symbols(
    linked: &Symbols,
    machine: &Machine,
    paused: &Paused,
) -> Result<Symbols, SlideError> {
    let gate = |vector| {
        machine
            .interrupt_handler(paused, 0, vector)
            .map_or(0, |gva| gva.0)
    };
    let live = LiveEntries {
        syscall: machine.syscall_entry(paused, 0).map_or(0, |gva| gva.0),
        page_fault: gate(PAGE_FAULT),
        divide_error: gate(DIVIDE_ERROR),
    };
    Ok(linked.with_slide(slide::find(linked, live)?))
}

/// Returns page tables that map the kernel for as long as it runs; `symbols` are those of
/// [`running_symbols`]. Reads vCPU 0.
///
/// # Errors
/// If the kernel's own page tables cannot be found.
pub fn kernel_space(
    symbols: &Symbols,
    machine: &Machine,
    paused: &Paused,
) -> Result<AddressSpace, KernelViewError> {
    let registers = machine
        .registers(paused, 0)
        .ok_or(KernelViewError::NoVcpu)?;
    kernel_tables(machine.ram(), registers.address_space(), symbols)
}

/// Reads the modules of a paused guest. Unreadable parts are left out: functions there have no
/// names.
fn loaded_modules(kernel: &KernelView, view: MemoryView<'_>) -> LoadedModules {
    let Some(readers) = kernel.module_readers() else {
        return LoadedModules::default();
    };
    let (loaded, unread) = readers.symbols(view, readers.list(view));
    for error in unread {
        log::warn!("not all functions of the guest's modules are known: {error}");
    }
    loaded
}

/// Returns the address from which the kernel has freed its functions, which are the last in its
/// image (arch/x86/kernel/vmlinux.lds.S). `None` if they are not freed, or if that is not known.
///
/// From a certain state on, the kernel has freed them or is about to (`kernel_init`, init/main.c).
/// If the state cannot be read, the page tables show it: freed pages are not executable
/// (`free_init_pages`, arch/x86/mm/init.c).
fn freed_from(view: &KernelView, memory: &dyn PhysicalMemory) -> Option<u64> {
    let start = view.kernel.symbols.address_of("_sinittext")?;
    let state = view.kernel.symbols.address_of("system_state");
    let state = state.and_then(|state| read_u32(memory, view.kernel.space, Gva(state)).ok());
    let is_freed = match (state, view.running_state()) {
        (Some(state), Some(running)) => i64::from(state) >= running,
        _ => translate(memory, view.kernel.space, Gva(start)).is_ok_and(|page| page.no_execute),
    };
    is_freed.then_some(start)
}

/// Returns page tables for the kernel that outlive the current process, if a symbol names them.
fn kernel_tables(
    memory: &impl PhysicalMemory,
    live: AddressSpace,
    symbols: &Symbols,
) -> Result<AddressSpace, KernelViewError> {
    let Some(address) = symbols.address_of(KERNEL_TABLES).map(Gva) else {
        return Ok(live);
    };
    let found = translate(memory, live, address)
        // This data is not mapped in user mode with page table isolation.
        .or_else(|_| translate(memory, live.isolated_kernel_view(), address))
        .map_err(|source| KernelViewError::PageTables { address, source })?;
    Ok(AddressSpace {
        root: found.gpa,
        ..live
    })
}

/// Returns the function that system calls pass, and the registers of its arguments.
pub(crate) fn entry_function(view: &KernelView) -> Option<(Gva, SystemCallRegisters)> {
    let (name, address) = FUNCTIONS
        .iter()
        .find_map(|name| Some((*name, view.kernel.symbols.address_of(name)?)))?;
    // The order of the two has changed once, with Linux 5.13.
    let registers = view.kernel.btf().and_then(|btf| {
        let is_registers = |p: &Parameter| p.type_name.trim_start_matches("const ") == REGISTERS;
        position(btf, name, is_registers)
    });
    let registers = registers.filter(|at| *at < 2);
    let registers = registers.or(view.system_call_registers).unwrap_or(0);
    let layout = SystemCallRegisters {
        registers,
        number: 1 - registers,
        returns_result: name == FUNCTIONS[0],
    };
    Some((Gva(address), layout))
}

/// Returns the position of a kernel function's parameter `name`.
pub(crate) fn parameter(btf: &Btf, function: &str, name: &str) -> Option<usize> {
    position(btf, function, |parameter| parameter.name == name)
}

fn position(btf: &Btf, function: &str, is_it: impl Fn(&Parameter) -> bool) -> Option<usize> {
    let prototype = btf.func_proto_args(function).ok()?;
    prototype.parameters.iter().position(is_it)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::Gpa;
    use introspect::kernel::symbols::SymbolsBuilder;
    use introspect::test_memory::{Flags, TestMemory};

    use super::*;

    const TABLES: u64 = 0xffff_ffff_8300_2000;

    fn symbols(names: &[(&str, u64)]) -> Symbols {
        let mut builder = SymbolsBuilder::default();
        for (name, address) in names {
            builder
                .push(name.as_bytes(), *address, b'D', false)
                .unwrap();
        }
        builder.finish(None)
    }

    #[test]
    fn the_kernels_own_tables_are_found_in_both_views_of_a_process() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let empty = memory.address_space(4);
        let live = memory.address_space(4);
        // The two tables of an isolated process are adjacent: the even page is the kernel's, the
        // odd page the user's.
        assert_eq!((empty.root.0, live.root.0), (0x10_0000, 0x10_1000));
        memory.map(empty, TABLES, 0x18_0000, 4096, Flags::default());
        let names = symbols(&[(KERNEL_TABLES, TABLES)]);
        for space in [empty, live] {
            let found = kernel_tables(&memory, space, &names).unwrap();
            assert_eq!(
                found,
                AddressSpace {
                    root: Gpa(0x18_0000),
                    levels: 4
                }
            );
        }
        let unnamed = kernel_tables(&memory, live, &symbols(&[])).unwrap();
        assert_eq!(
            unnamed, live,
            "a kernel that does not name them runs on the live ones"
        );
        let elsewhere = symbols(&[(KERNEL_TABLES, TABLES + 4096)]);
        let error = kernel_tables(&memory, live, &elsewhere)
            .unwrap_err()
            .to_string();
        assert!(error.contains("0xffffffff83003000"), "{error}");
    }

    #[test]
    fn text_has_bounds_or_is_refused_with_what_was_found() {
        let space = AddressSpace {
            root: Gpa(0),
            levels: 4,
        };
        for (names, expected) in [
            (
                &[("_stext", 0x1000), ("_etext", 0x3000)][..],
                Ok(0x1000..0x3000),
            ),
            (
                &[("_stext", 0x3000), ("_etext", 0x1000)],
                Err(TextHashError::NoBounds {
                    start: Some(0x3000),
                    end: Some(0x1000),
                }),
            ),
            (
                &[("_stext", 1)],
                Err(TextHashError::NoBounds {
                    start: Some(1),
                    end: None,
                }),
            ),
        ] {
            assert_eq!(
                KernelView::without_types(symbols(names), space).text(),
                expected
            );
        }
    }
}
