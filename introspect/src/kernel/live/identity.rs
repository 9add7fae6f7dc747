//! The identity of a kernel in memory: version, build id, and slide.

use crate::build_id::BuildId;
use crate::kernel::image;
use crate::kernel::symbols::Symbols;
use crate::{Gva, MemoryView};

/// Size of vmcoreinfo in bytes (`VMCOREINFO_BYTES`, include/linux/crash_core.h).
const MAX_VMCOREINFO: u64 = 4096;
/// The maximum size of notes read, in bytes.
const MAX_NOTES: u64 = 64 << 10;
const MAX_BANNER: usize = 512;

/// Finds the banner by its symbol, or else in the memory `around` kallsyms.
pub(super) fn banner(view: MemoryView<'_>, symbols: &Symbols, around: &[u8]) -> Option<String> {
    let named = symbols
        .address_of("linux_banner")
        .and_then(|address| view.c_string(Gva(address), MAX_BANNER).ok())
        .and_then(|text| image::banner(&text));
    named.or_else(|| image::banner(around))
}

/// Finds the build id among the kernel's notes (`NOTES`, include/asm-generic/vmlinux.lds.h).
pub(super) fn build_id(view: MemoryView<'_>, symbols: &Symbols) -> Option<BuildId> {
    let start = symbols.address_of("__start_notes")?;
    let length = symbols.address_of("__stop_notes")?.checked_sub(start)?;
    let length = usize::try_from(length.min(MAX_NOTES)).ok()?;
    let bytes = view.bytes(Gva(start), length).ok()?;
    BuildId::in_notes(&bytes, 4)
}

/// Reads `KERNELOFFSET` of vmcoreinfo (`arch_crash_save_vmcoreinfo`): the distance from link to
/// running addresses. Returns `None` if there is no vmcoreinfo, if it has not been filled in yet,
/// or if its value is impossible.
pub(super) fn kernel_offset(view: MemoryView<'_>, symbols: &Symbols) -> Option<u64> {
    let variable = |name| symbols.address_of(name).map(Gva);
    let data = view.pointer(variable("vmcoreinfo_data")?).ok()??;
    let length = view.u64(variable("vmcoreinfo_size")?).ok()?;
    let length = usize::try_from(length.min(MAX_VMCOREINFO)).ok()?;
    let text = view.bytes(data, length).ok()?;
    let line = text
        .split(|byte| *byte == b'\n')
        .find_map(|line| line.strip_prefix(b"KERNELOFFSET="))?;
    let offset = u64::from_str_radix(std::str::from_utf8(line).ok()?, 16).ok()?;
    crate::kernel::slide::is_plausible(offset).then_some(offset)
}
