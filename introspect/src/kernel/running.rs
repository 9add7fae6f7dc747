//! The kernel that a guest runs, as it is for as long as it runs: its symbols at their addresses,
//! its types and its page tables.
//!
//! [`RunningKernel::new`] takes what is known from the kernel's image.
//! [`RunningKernel::find`] finds the same in a guest's memory.

use super::btf::Btf;
use super::symbols::Symbols;
use crate::build_id::BuildId;
use crate::x86_64::AddressSpace;

/// The kernel's own page tables, which no process owns (arch/x86/kernel/head_64.S).
pub const KERNEL_TABLES: &str = "init_top_pgt";

/// A running kernel.
#[derive(Debug, Clone)]
pub struct RunningKernel {
    /// The symbols at their running addresses. If [`slide`](Self::slide) is known, so are the link
    /// addresses; else [`Symbols::slide`] is 0.
    pub symbols: Symbols,
    /// The kernel's types, or the reason that there are none, for the user.
    pub types: Result<Btf, String>,
    /// Page tables that map the kernel: its own, which stay while it runs. If the kernel does not
    /// name them, they are those of a CPU's process. With page table isolation, they are then the
    /// ones for kernel mode.
    pub space: AddressSpace,
    /// Whether [`space`](Self::space) is the kernel's own. Else it is a process's, which the guest
    /// may free.
    pub space_lasts: bool,
    /// The distance in bytes from the link address. A kernel found in memory reports it
    /// (`KERNELOFFSET` of vmcoreinfo), or it is `None` (`CONFIG_CRASH_CORE`). Running addresses do
    /// not depend on it.
    pub slide: Option<u64>,
    /// The line that starts with `Linux version`, without its newline, of a kernel found in memory.
    pub banner: Option<String>,
    /// The build id (ELF note of GNU type 3), usually 20 bytes, of a kernel found in memory.
    pub build_id: Option<BuildId>,
}

impl RunningKernel {
    /// Returns a kernel known from its image. `symbols` include the slide. `space` maps the kernel;
    /// it is the kernel's own if [`KERNEL_TABLES`] is a symbol.
    #[must_use]
    pub fn new(symbols: Symbols, types: Result<Btf, String>, space: AddressSpace) -> Self {
        Self {
            space_lasts: symbols.address_of(KERNEL_TABLES).is_some(),
            slide: Some(symbols.slide()),
            symbols,
            types,
            space,
            banner: None,
            build_id: None,
        }
    }

    /// Returns the types, if there are any.
    #[must_use]
    pub fn btf(&self) -> Option<&Btf> {
        self.types.as_ref().ok()
    }
}
