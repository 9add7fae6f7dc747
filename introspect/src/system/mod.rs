//! Combines the readers of this crate for one running Linux guest.
//!
//! A [`System`] is made once for a running kernel, from its symbols and types, and kept. A
//! [`PausedSystem`] is made from it for each pause, with memory and CPUs, and dropped before the
//! guest resumes.
//!
//! Missing information affects only what depends on it. A kernel without types still has its
//! symbols. A query that needs the types then returns an error that names what is unavailable and
//! why.

mod containers;
mod generated_code;
mod guest_files;
mod maps;
mod modules;
mod object_symbols;
mod process_files;
mod processes;
mod stacks;
mod stored_files;
mod symbolize;
#[cfg(test)]
mod tests;
mod text_files;
mod user_objects;

pub use guest_files::{GuestFile, GuestFileError};
pub use maps::{Maps, NamedArea};
pub use process_files::{Floating, ProcessFile};
pub use processes::Program;
pub use stacks::ThreadStack;
pub use stored_files::{StoredFile, StoredFiles};
pub use symbolize::SymbolizedAddress;
pub use text_files::{TextFile, TextFiles};
pub use user_objects::{GeneratedPlace, UserObject, UserObjects};

use std::error::Error;
use std::fmt;

use crate::kernel::bpf_symbols::BpfSymbolsLayout;
use crate::kernel::btf::Btf;
use crate::kernel::cgroup::CgroupLayout;
use crate::kernel::cgroup_tree::CgroupTreeLayout;
use crate::kernel::credentials::CredentialsLayout;
use crate::kernel::files::FilesLayout;
use crate::kernel::fpu::FpuLayout;
use crate::kernel::load::LoadLayout;
use crate::kernel::module_readers::ModuleReaders;
use crate::kernel::namespaces::NamespaceLayout;
use crate::kernel::page_cache::PageCacheLayout;
use crate::kernel::path::LinkLayout;
use crate::kernel::process::ProcessLayout;
use crate::kernel::running::RunningKernel;
use crate::kernel::stored_inode::StoredInodeLayout;
use crate::kernel::symbols::Symbols;
use crate::kernel::task::TaskLayout;
use crate::kernel::task_list::TaskListLayout;
use crate::kernel::uptime::UptimeLayout;
use crate::kernel::vma::VmaLayout;
use crate::stack::kernel::KernelUnwinder;
use crate::stack::orc::ModuleOrcLayout;
use crate::user::vdso::VdsoLayout;
use crate::x86_64::{AddressSpace, CpuState};
use crate::{MemoryView, PausedMemory};

/// The error of a query that this kernel cannot answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be read: {reason}")]
pub struct Unavailable {
    /// The subject of the query, such as `processes`.
    pub what: &'static str,
    /// The reason why it is not known.
    pub reason: String,
}

/// A reader, or the reason why there is none.
type Part<T> = Result<T, Unavailable>;

/// Returns a reader for a query.
fn known<T>(part: &Part<T>) -> Result<&T, Unavailable> {
    part.as_ref().map_err(Unavailable::clone)
}

/// A running kernel and the readers of its structures.
pub struct System {
    symbols: Symbols,
    /// Page tables that map the kernel.
    space: AddressSpace,
    current: Part<TaskLayout>,
    tasks: Part<TaskListLayout>,
    processes: Part<ProcessLayout>,
    namespaces: Part<NamespaceLayout>,
    credentials: Part<CredentialsLayout>,
    /// `None` in a kernel without control groups.
    cgroups: Option<CgroupLayout>,
    cgroup_tree: Part<CgroupTreeLayout>,
    files: Part<FilesLayout>,
    areas: Part<VmaLayout>,
    /// `None` if the kernel's types do not describe it.
    floating: Option<FpuLayout>,
    /// `None` in the same way.
    links: Option<LinkLayout>,
    page_cache: Part<PageCacheLayout>,
    /// `None` if the kernel's types do not describe it.
    stored_inodes: Option<StoredInodeLayout>,
    vdso: Part<VdsoLayout>,
    /// The module readers. `None` in a kernel that cannot load modules.
    modules: Part<Option<ModuleReaders>>,
    load: Part<LoadLayout>,
    uptime: Part<UptimeLayout>,
    /// `None` in a kernel without BPF.
    bpf: Option<BpfSymbolsLayout>,
    unwinder: Part<KernelUnwinder>,
    module_orc: Option<ModuleOrcLayout>,
}

impl fmt::Debug for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("System")
            .field("space", &self.space)
            .finish_non_exhaustive()
    }
}

impl System {
    /// Makes the readers for a running kernel.
    #[must_use]
    pub fn new(kernel: &RunningKernel, memory: &PausedMemory<'_>) -> Self {
        let view = memory.view(kernel.space);
        let symbols = kernel.symbols.clone();
        let types = kernel.types.as_ref().map_err(String::as_str);
        let orc = stacks::orc_format(view, types.ok(), &symbols);
        let module_orc = types
            .ok()
            .zip(orc)
            .and_then(|(btf, format)| ModuleOrcLayout::new(btf, format).ok());
        Self {
            current: part("which task a CPU runs", types, |btf| {
                TaskLayout::new(btf, &symbols)
            }),
            tasks: part("processes", types, |btf| TaskListLayout::new(btf, &symbols)),
            processes: part("what a process is made of", types, ProcessLayout::new),
            namespaces: part("namespaces", types, |btf| {
                NamespaceLayout::new(btf, &symbols)
            }),
            credentials: part("users", types, CredentialsLayout::new),
            cgroups: types.ok().and_then(|btf| CgroupLayout::new(btf).ok()),
            cgroup_tree: part("control groups", types, |btf| {
                CgroupTreeLayout::new(btf, &symbols)
            }),
            files: part("open files", types, FilesLayout::new),
            links: types.ok().and_then(|btf| LinkLayout::new(btf).ok()),
            floating: types.ok().and_then(|btf| FpuLayout::new(btf).ok()),
            areas: part("mappings", types, |btf| VmaLayout::new(btf, &symbols)),
            page_cache: part("the page cache", types, |btf| {
                PageCacheLayout::new(btf, &symbols)
            }),
            stored_inodes: types.ok().and_then(|btf| StoredInodeLayout::new(btf).ok()),
            vdso: part("the vdso", types, VdsoLayout::new),
            modules: part("modules", types, |btf| ModuleReaders::new(btf, &symbols)),
            load: part("the load", types, |btf| LoadLayout::new(btf, &symbols)),
            uptime: part("the uptime", types, |btf| UptimeLayout::new(btf, &symbols)),
            bpf: types
                .ok()
                .and_then(|btf| BpfSymbolsLayout::new(btf, &symbols)),
            unwinder: part("kernel stacks", types, |btf| {
                stacks::kernel_unwinder(view, btf, &symbols, orc)
            }),
            module_orc,
            space: kernel.space,
            symbols,
        }
    }

    /// Returns the kernel's symbols, at the addresses where it runs.
    #[must_use]
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// Returns the page tables that map the kernel.
    #[must_use]
    pub fn space(&self) -> AddressSpace {
        self.space
    }

    /// Returns the layout of the kernel's page cache.
    ///
    /// # Errors
    /// If it is unknown.
    pub fn page_cache(&self) -> Result<&PageCacheLayout, Unavailable> {
        known(&self.page_cache)
    }

    /// Returns the queries that this kernel cannot answer, with reasons.
    pub fn lost(&self) -> impl Iterator<Item = &Unavailable> {
        [
            self.current.as_ref().err(),
            self.tasks.as_ref().err(),
            self.processes.as_ref().err(),
            self.namespaces.as_ref().err(),
            self.credentials.as_ref().err(),
            self.files.as_ref().err(),
            self.areas.as_ref().err(),
            self.page_cache.as_ref().err(),
            self.vdso.as_ref().err(),
            self.modules.as_ref().err(),
            self.load.as_ref().err(),
            self.uptime.as_ref().err(),
            self.unwinder.as_ref().err(),
        ]
        .into_iter()
        .flatten()
    }

    /// Returns the paused system. `cpus` are all CPUs, by number.
    #[must_use]
    pub fn look<'s>(
        &'s self,
        memory: &'s PausedMemory<'s>,
        cpus: &'s [CpuState],
    ) -> PausedSystem<'s> {
        PausedSystem {
            system: self,
            view: memory.view(self.space),
            cpus,
            stored: None,
        }
    }
}

/// A paused system.
#[derive(Clone, Copy)]
pub struct PausedSystem<'s> {
    system: &'s System,
    view: MemoryView<'s>,
    cpus: &'s [CpuState],
    stored: Option<&'s dyn StoredFiles>,
}

impl fmt::Debug for PausedSystem<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PausedSystem")
            .field("system", &self.system)
            .field("cpus", &self.cpus.len())
            .finish_non_exhaustive()
    }
}

impl<'s> PausedSystem<'s> {
    /// Returns the kernel's memory.
    #[must_use]
    pub fn kernel(&self) -> MemoryView<'s> {
        self.view
    }

    /// Returns the system.
    #[must_use]
    pub fn system(&self) -> &'s System {
        self.system
    }
}

fn part<T, E: Error>(
    what: &'static str,
    types: Result<&Btf, &str>,
    make: impl FnOnce(&Btf) -> Result<T, E>,
) -> Part<T> {
    let lost = |reason| Unavailable { what, reason };
    let btf = types.map_err(|why| lost(why.to_owned()))?;
    make(btf).map_err(|error| lost(error.to_string()))
}
