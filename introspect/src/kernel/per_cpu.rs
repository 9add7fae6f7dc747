//! The per-CPU data of all CPUs, by the kernel's own table of them.

use super::layout::LayoutError;
use super::symbols::Symbols;
use crate::x86_64::ReadVirtualError;
use crate::{Gva, MemoryView};

/// The maximum number of CPUs that are looked at (`NR_CPUS` of distributions is 8192).
const MOST_CPUS: u32 = 8192;

/// The kernel's table of per-CPU data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerCpuTable {
    offsets: Gva,
    count: Gva,
}

impl PerCpuTable {
    /// Looks up the table. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel does not name it.
    pub fn new(symbols: &Symbols) -> Result<Self, LayoutError> {
        let symbol = |name| {
            let used_for = "finds the data of each CPU";
            let nameless = LayoutError::Symbol { name, used_for };
            symbols.address_of(name).map(Gva).ok_or(nameless)
        };
        Ok(Self {
            offsets: symbol("__per_cpu_offset")?,
            count: symbol("nr_cpu_ids")?,
        })
    }

    /// Returns the base of each CPU's data, or the error of reading it: a variable of that CPU is
    /// at its own address plus this.
    ///
    /// # Errors
    /// If the number of CPUs cannot be read.
    pub fn bases<'v>(
        &self,
        view: MemoryView<'v>,
    ) -> Result<impl Iterator<Item = Result<u64, ReadVirtualError>> + use<'v>, ReadVirtualError>
    {
        let offsets = self.offsets.0;
        let cpus = 0..u64::from(view.u32(self.count)?.min(MOST_CPUS));
        Ok(cpus.map(move |cpu| view.u64(Gva(offsets.wrapping_add(cpu * 8)))))
    }
}
