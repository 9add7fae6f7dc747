//! A running kernel without its image file: symbols, types and banner, found in guest memory from
//! one CPU's registers.
//!
//! The caller pauses the CPUs and passes the state of one. The kernel image is mapped in a window
//! of 1 GiB at the top of the address space. Its read-only data is searched for kallsyms, and the
//! symbols lead to the rest. The symbols are checked against the CPU's interrupt descriptor table,
//! because tables of another kernel may be left in memory. Read-only pages are read first, others
//! only if nothing is found there.
//!
//! Kernels without kallsyms are not supported (their image has the ELF symbols). Without registers
//! the page tables are searched for.

mod entries;
mod identity;
mod mapping;
mod search;

use super::btf::{Btf, BtfError};
use super::kallsyms::{self, KallsymsError};
use super::running::{KERNEL_TABLES, RunningKernel};
use super::slide::{self, SlideError};
use super::symbols::Symbols;
use crate::x86_64::{AddressSpace, CpuState, ReadVirtualError};
use crate::{CpuRegisters, Gpa, Gva, MemoryView};

pub use entries::live_entries;

/// The maximum size of BTF in bytes; a distribution kernel's has about 5 MB.
const MAX_BTF: u64 = 64 << 20;
/// The maximum size of kernel memory searched in all, in bytes.
const MAX_SEARCHED: usize = 512 << 20;
/// The maximum number of ranges with damaged kallsyms that are searched. Each may cost the
/// decoder's bound.
const MAX_BROKEN: usize = 8;

/// An error in finding the kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LiveError {
    /// Nothing is mapped in the window of the kernel image.
    #[error(
        "the page tables at {root} map no RAM from 0xffffffff80000000 to 0xffffffffc0000000, where Linux keeps its \
         image: the CPU runs no Linux, or not yet"
    )]
    NotMapped {
        /// The CPU's top page table.
        root: Gpa,
    },
    /// The mapped memory holds no kallsyms.
    #[error(
        "no kallsyms in the {searched:#x} bytes of kernel memory from {first} to {last}: {source}"
    )]
    NoKallsyms {
        /// The number of bytes searched.
        searched: usize,
        /// The first address mapped.
        first: Gva,
        /// The end of the last range.
        last: Gva,
        /// The error of the table that came furthest. Offsets count from the start of its range.
        source: KallsymsError,
    },
    /// The symbols found do not match the CPU's entry points.
    #[error("the symbols found in memory are not those of the running kernel: {0}")]
    Entries(#[from] SlideError),
}

/// An error in reading the types of a kernel in memory.
#[derive(Debug, thiserror::Error)]
enum LiveBtfError {
    /// The kernel has no symbols for the bounds of BTF.
    #[error(
        "the kernel names no __start_BTF and __stop_BTF (built without CONFIG_DEBUG_INFO_BTF or CONFIG_KALLSYMS_ALL): \
         tasks (pid, comm), struct members, argument names and modules are not available; function probes and registers \
         are"
    )]
    NoSymbols,
    /// The symbols do not make a range.
    #[error("invalid bounds of BTF: expected a range of a plausible size, found {start} to {stop}")]
    BadRange {
        /// The address of `__start_BTF`.
        start: Gva,
        /// The address of `__stop_BTF`.
        stop: Gva,
    },
    /// The pages of BTF cannot be read.
    #[error("the kernel's BTF cannot be read: {0}")]
    Unreadable(#[from] ReadVirtualError),
    /// The bytes are not valid BTF.
    #[error("the kernel's BTF cannot be used: {0}")]
    Damaged(#[from] BtfError),
}

impl RunningKernel {
    /// Finds the kernel that `cpu` runs. `view` may be of any address space. `syscall_entry` is the
    /// CPU's LSTAR, or 0 if unknown. Two more entry points are read from the interrupt descriptor
    /// table.
    ///
    /// # Errors
    /// If there is none, or its symbols disagree with the CPU.
    pub fn find(
        view: MemoryView<'_>,
        cpu: &CpuState,
        syscall_entry: u64,
    ) -> Result<Self, LiveError> {
        let as_is = cpu.address_space();
        let mut failure = LiveError::NotMapped { root: as_is.root };
        // With page table isolation, a CPU in user mode has tables that map the kernel only in
        // part. Without it, the other tables are most likely invalid.
        let isolated = as_is.isolated_kernel_view();
        let mut spaces = vec![as_is, isolated];
        spaces.dedup();
        if cpu.in_user_mode() {
            spaces.reverse();
        }
        for space in spaces {
            match Self::find_in(view.with_space(space), cpu, syscall_entry) {
                Ok(kernel) => return Ok(kernel),
                Err(error) if error.progress() > failure.progress() => failure = error,
                Err(_) => {}
            }
        }
        Err(failure)
    }

    fn find_in(
        view: MemoryView<'_>,
        cpu: &CpuState,
        syscall_entry: u64,
    ) -> Result<Self, LiveError> {
        let (symbols, chunk) = running_symbols(view)?;
        // Symbols in memory are at their running addresses, because relocation moved their base
        // too. If a kernel keeps them otherwise, this finds the distance.
        let moved = slide::find(&symbols, live_entries(view, cpu.idt_base, syscall_entry))?;
        let symbols = symbols.with_slide(moved);
        let own = own_tables(view, &symbols);
        Ok(Self::of_memory(view, symbols, &chunk, moved, own))
    }

    /// Returns the kernel with these symbols, which `moved` was added to. `chunk` is the memory
    /// that they were found in, `own` the kernel's own page tables.
    fn of_memory(
        view: MemoryView<'_>,
        symbols: Symbols,
        chunk: &[u8],
        moved: u64,
        own: Option<AddressSpace>,
    ) -> Self {
        let slide = match moved {
            0 => identity::kernel_offset(view, &symbols),
            moved => Some(moved),
        };
        Self {
            space: own.unwrap_or(view.space()),
            space_lasts: own.is_some(),
            types: btf(view, &symbols).map_err(|error| error.to_string()),
            banner: identity::banner(view, &symbols, chunk),
            build_id: identity::build_id(view, &symbols),
            symbols: match slide {
                Some(slide) if moved == 0 && slide != 0 => symbols.moved_back(slide),
                _ => symbols,
            },
            slide,
        }
    }
}

impl LiveError {
    /// Returns how far the search came. Of two failures, the one that came further is more
    /// informative.
    fn progress(&self) -> u8 {
        match self {
            Self::NotMapped { .. } => 0,
            Self::NoKallsyms { source, .. } => 1 + source.progress(),
            Self::Entries(_) => u8::MAX,
        }
    }
}

/// Finds the symbols of the kernel mapped by `view`, at running addresses. Returns them with the
/// memory that they were found in.
fn running_symbols(view: MemoryView<'_>) -> Result<(Symbols, Vec<u8>), LiveError> {
    let mut ranges = mapping::ranges(view.physical(), view.space());
    let ends = (ranges.first(), ranges.last());
    let (Some(first), Some(last)) = ends else {
        let root = view.space().root;
        return Err(LiveError::NotMapped { root });
    };
    let (first, last) = (Gva(first.start), Gva(last.end()));
    ranges.sort_by_key(|range| (range.writable, range.executable));
    let (mut searched, mut broken) = (0, 0);
    let mut failure = KallsymsError::NoTokens { searched: 0 };
    'ranges: for range in ranges {
        for (start, chunk) in mapping::chunks(view, range, MAX_SEARCHED - searched) {
            if broken == MAX_BROKEN {
                break 'ranges;
            }
            searched += chunk.len();
            let found = kallsyms::find(&chunk, kallsyms::standing_at(start.0));
            let symbols = found.and_then(|found| found.symbols(None));
            match symbols {
                Ok(symbols) => {
                    let end = symbols.address_of("_end");
                    return Ok((symbols.ending_at(end), chunk));
                }
                Err(KallsymsError::NoTokens { .. }) => {}
                Err(error) => {
                    if error.progress() > failure.progress() {
                        failure = error;
                    }
                    broken += 1;
                }
            }
        }
    }
    if let KallsymsError::NoTokens { searched: bytes } = &mut failure {
        *bytes = searched;
    }
    Err(LiveError::NoKallsyms {
        searched,
        first,
        last,
        source: failure,
    })
}

/// Returns the page tables that belong to no process, if they are named and map themselves where
/// the CPU's do.
fn own_tables(view: MemoryView<'_>, symbols: &Symbols) -> Option<AddressSpace> {
    let tables = Gva(symbols.address_of(KERNEL_TABLES)?);
    let (root, _) = view.locate(tables).ok()?;
    let own = AddressSpace {
        root,
        ..view.space()
    };
    let (same, _) = view.with_space(own).locate(tables).ok()?;
    (same == root).then_some(own)
}

fn btf(view: MemoryView<'_>, symbols: &Symbols) -> Result<Btf, LiveBtfError> {
    let symbol = |name| symbols.address_of(name).ok_or(LiveBtfError::NoSymbols);
    let (start, stop) = (symbol("__start_BTF")?, symbol("__stop_BTF")?);
    let length = stop
        .checked_sub(start)
        .filter(|length| (1..=MAX_BTF).contains(length))
        .and_then(|length| usize::try_from(length).ok());
    let length = length.ok_or(LiveBtfError::BadRange {
        start: Gva(start),
        stop: Gva(stop),
    })?;
    Ok(Btf::parse(&view.bytes(Gva(start), length)?)?)
}

#[cfg(test)]
mod tests;
