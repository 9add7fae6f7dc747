//! Finds a kernel in memory alone, without the registers of a CPU: in a crash dump that the guest's
//! own kernel has written, or in the file behind a machine's memory.
//!
//! Any page may be a top page table. One whose last entries lead to tables where those of the
//! kernel's image are is tried: all processes' tables have them. The kernel that is found there
//! must have its banner where its symbols say.

use super::{LiveError, own_tables, running_symbols};
use crate::kernel::per_cpu::PerCpuTable;
use crate::kernel::running::RunningKernel;
use crate::kernel::symbols::Symbols;
use crate::x86_64::{AddressSpace, CpuState, PAGE};
use crate::{Gpa, Gva, MemoryView, PausedMemory, PhysicalMemory};

/// The largest number of page tables that are tried.
const MOST_TRIED: usize = 256;
/// The beginning of a kernel's banner (init/version.c).
const BANNER: &[u8; 14] = b"Linux version ";
/// Bits of an entry of a page table (Intel SDM volume 3A, 4.5).
const PRESENT: u64 = 1 << 0;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The entries that lead to the image, at the levels below the top with four levels: of 512 GiB and
/// of 1 GiB.
const TOP: u64 = 511;
const UPPER: u64 = 510;

impl RunningKernel {
    /// Finds the kernel in memory. Reads two words of each page of RAM.
    ///
    /// # Errors
    /// If there is none.
    pub fn search(memory: &PausedMemory<'_>) -> Result<Self, LiveError> {
        let mut failure = LiveError::NotMapped { root: Gpa(0) };
        for space in candidates(memory.physical()).take(MOST_TRIED) {
            match at(memory.view(space)) {
                Ok(kernel) => return Ok(kernel),
                Err(error) if error.progress() > failure.progress() => failure = error,
                Err(_) => {}
            }
        }
        Err(failure)
    }

    /// Returns what is known of the CPUs without their registers: the bases of their per-CPU data,
    /// by which the tasks are found that they run. Their stacks are not known then.
    #[must_use]
    pub fn cpus_without_registers(&self, memory: &PausedMemory<'_>) -> Vec<CpuState> {
        let table = PerCpuTable::new(&self.symbols).ok();
        let bases = table.and_then(|table| table.bases(memory.view(self.space)).ok());
        bases
            .into_iter()
            .flatten()
            .filter_map(Result::ok)
            .map(|base| CpuState {
                gs_base: base,
                cr3: self.space.root.0,
                ..CpuState::default()
            })
            .collect()
    }
}

/// Returns the page tables that may be a kernel's, with four and five levels.
fn candidates(memory: &dyn PhysicalMemory) -> impl Iterator<Item = AddressSpace> {
    let table = |page: u64, entry: u64| {
        let entry = memory.read_word(Gpa(page + entry * 8)).ok()?;
        let is_table = entry & PRESENT != 0 && entry & LARGE == 0;
        is_table.then_some(entry & ADDRESS)
    };
    memory
        .ram()
        .into_iter()
        .flat_map(|range| range.step_by(PAGE as usize))
        .filter_map(move |page| {
            let next = table(page, TOP)?;
            let (four, five) = (table(next, UPPER), table(next, TOP));
            let levels = match (four, five) {
                (Some(_), _) => 4,
                (None, Some(below)) => table(below, UPPER).map(|_| 5)?,
                (None, None) => return None,
            };
            Some(AddressSpace {
                root: Gpa(page),
                levels,
            })
        })
}

/// Returns the kernel that page tables map.
fn at(view: MemoryView<'_>) -> Result<RunningKernel, LiveError> {
    let (symbols, chunk) = running_symbols(view)?;
    let not_mapped = LiveError::NotMapped {
        root: view.space().root,
    };
    if !has_banner(view, &symbols) {
        return Err(not_mapped);
    }
    let own = own_tables(view, &symbols).ok_or(not_mapped)?;
    let view = view.with_space(own);
    Ok(RunningKernel::of_memory(
        view,
        symbols,
        &chunk,
        0,
        Some(own),
    ))
}

fn has_banner(view: MemoryView<'_>, symbols: &Symbols) -> bool {
    let mut start = [0; BANNER.len()];
    let at = symbols.address_of("linux_banner");
    at.is_some_and(|at| view.read(Gva(at), &mut start).is_ok()) && start == *BANNER
}
