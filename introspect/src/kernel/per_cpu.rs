//! The per-CPU data of all CPUs, by the kernel's own table of them.

use super::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The maximum number of CPUs that are looked at (`NR_CPUS` of distributions is 8192).
const MOST_CPUS: u32 = 8192;

/// Returns the base of each CPU's data: a variable of that CPU is at its own address plus this.
/// Returns `None` if the kernel does not name its table (`__per_cpu_offset`), or it is unreadable.
#[must_use]
pub fn bases(view: MemoryView<'_>, symbols: &Symbols) -> Option<Vec<u64>> {
    let symbol = |name| symbols.address_of(name).map(Gva);
    let offsets = symbol("__per_cpu_offset")?;
    let count = view.u32(symbol("nr_cpu_ids")?).ok()?;
    let base = |cpu: u64| view.u64(Gva(offsets.0.wrapping_add(cpu * 8))).ok();
    let cpus = 0..u64::from(count.min(MOST_CPUS));
    Some(cpus.filter_map(base).collect())
}
