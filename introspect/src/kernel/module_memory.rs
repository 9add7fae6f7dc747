//! The address ranges of a module.
//!
//! The caller has the module's structure ([`modules`](super::modules)). Two layouts are supported:
//! `module.core_layout` and `init_layout` (Linux 4.5 to 6.3) and `module.mem[]` (since 6.4).
//!
//! Structures: `module_layout`, `module_memory` and `mod_mem_type` in include/linux/module.h.

use std::ops::Range;

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::structure::{Structure, StructureError, is_kernel_address};
use crate::Gva;

/// The content of a module's range (`enum mod_mem_type`, in its order).
#[allow(missing_docs, reason = "the names say it")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeKind {
    Text,
    Data,
    ReadOnlyData,
    /// Data that is read-only after initialisation.
    ReadOnlyAfterInit,
    /// The four `Init` kinds are freed once the module is live.
    InitText,
    InitData,
    InitReadOnlyData,
}

const KINDS: [RangeKind; 7] = [
    RangeKind::Text,
    RangeKind::Data,
    RangeKind::ReadOnlyData,
    RangeKind::ReadOnlyAfterInit,
    RangeKind::InitText,
    RangeKind::InitData,
    RangeKind::InitReadOnlyData,
];

/// An address range of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleRange {
    /// The content of the range.
    pub kind: RangeKind,
    /// The addresses, end exclusive; not empty.
    pub addresses: Range<u64>,
}

/// An error in reading a module's ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ModuleMemoryError {
    /// The ranges cannot be read.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// A range is impossible.
    #[error(
        "invalid memory of the module at {module}: expected kernel addresses, found {size:#x} bytes at {base}"
    )]
    BadRange {
        /// The address of the `struct module`.
        module: Gva,
        /// The claimed start.
        base: Gva,
        /// The claimed size in bytes.
        size: u32,
    },
}

/// The layout of a module's ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryLayout {
    /// Two blocks, each with text, read-only data, data that becomes read-only, and data.
    Blocks { core: Block, init: Block },
    /// An array with one range of each kind.
    Array {
        first: u64,
        stride: u64,
        count: u64,
        base: u64,
        size: u64,
    },
}

/// The offsets of a `struct module_layout`, from the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    base: u64,
    /// The members with the ends of its parts, from `base`.
    text_end: u64,
    read_only_end: u64,
    /// Since Linux 4.8.
    after_init_end: Option<u64>,
    end: u64,
}

impl MemoryLayout {
    pub(super) fn new(btf: &Btf) -> Result<Self, LayoutError> {
        let Ok(array) = btf.member("module.mem") else {
            return Ok(Self::Blocks {
                core: Block::new(btf, "module.core_layout")?,
                init: Block::new(btf, "module.init_layout")?,
            });
        };
        let base = offset(btf, "module_memory.base", 8)?;
        let stride = btf.size_of("module_memory").filter(|size| *size > 0);
        let stride = stride.ok_or_else(|| LayoutError::Size {
            path: "module_memory".to_owned(),
            found: 0,
            expected: 16,
        })?;
        Ok(Self::Array {
            first: array.byte_offset,
            stride,
            // Kinds beyond the known ones are not read.
            count: (array.size / stride).min(KINDS.len() as u64),
            base,
            size: offset(btf, "module_memory.size", 4)?,
        })
    }

    /// Returns the ranges that exist, in the order of [`RangeKind`].
    pub(super) fn ranges(
        &self,
        module: &Structure<'_>,
    ) -> Result<Vec<ModuleRange>, ModuleMemoryError> {
        let mut ranges = Vec::new();
        match *self {
            Self::Blocks { core, init } => {
                use RangeKind as Kind;
                let live = [
                    Kind::Text,
                    Kind::ReadOnlyData,
                    Kind::ReadOnlyAfterInit,
                    Kind::Data,
                ];
                let initial = [
                    Kind::InitText,
                    Kind::InitReadOnlyData,
                    Kind::InitReadOnlyData,
                    Kind::InitData,
                ];
                core.ranges(module, live, &mut ranges)?;
                init.ranges(module, initial, &mut ranges)?;
                ranges.sort_by_key(|range| KINDS.iter().position(|kind| *kind == range.kind));
            }
            Self::Array {
                first,
                stride,
                count,
                base,
                size,
            } => {
                for (index, kind) in (0..count).zip(KINDS) {
                    let at = first + index * stride;
                    let (base, size) = (module.u64(at + base)?, module.u32(at + size)?);
                    let start = checked_range(module, base, size)?.start;
                    push(&mut ranges, kind, start, 0, size);
                }
            }
        }
        Ok(ranges)
    }
}

impl Block {
    fn new(btf: &Btf, path: &str) -> Result<Self, LayoutError> {
        let member = |name: &str, size| offset(btf, &format!("{path}.{name}"), size);
        Ok(Self {
            base: member("base", 8)?,
            text_end: member("text_size", 4)?,
            read_only_end: member("ro_size", 4)?,
            after_init_end: member("ro_after_init_size", 4).ok(),
            end: member("size", 4)?,
        })
    }

    fn ranges(
        &self,
        module: &Structure<'_>,
        kinds: [RangeKind; 4],
        ranges: &mut Vec<ModuleRange>,
    ) -> Result<(), ModuleMemoryError> {
        let (base, size) = (module.u64(self.base)?, module.u32(self.end)?);
        let start = checked_range(module, base, size)?.start;
        let after_init_end = self.after_init_end.map(|end| module.u32(end)).transpose()?;
        let ends = [
            module.u32(self.text_end)?,
            module.u32(self.read_only_end)?,
            after_init_end.unwrap_or(0),
            size,
        ];
        let mut from = 0;
        for (kind, end) in kinds.into_iter().zip(ends) {
            // A missing part ends where the one before does, or at 0.
            let end = end.clamp(from, size.max(from));
            push(ranges, kind, start, from, end);
            from = end;
        }
        Ok(())
    }
}

/// Adds the bytes from `from` to `end` relative to `start`, if there are any. Their sum was checked
/// before.
fn push(ranges: &mut Vec<ModuleRange>, kind: RangeKind, start: u64, from: u32, end: u32) {
    if from < end {
        let addresses = start.wrapping_add(from.into())..start.wrapping_add(end.into());
        ranges.push(ModuleRange { kind, addresses });
    }
}

/// Checks that `size` bytes from `base` are addresses of the kernel, unless `size` is 0.
fn checked_range(
    module: &Structure<'_>,
    base: u64,
    size: u32,
) -> Result<Range<u64>, ModuleMemoryError> {
    let end = base.checked_add(size.into());
    match end {
        _ if size == 0 => Ok(0..0),
        Some(end) if is_kernel_address(Gva(base)) => Ok(base..end),
        _ => Err(ModuleMemoryError::BadRange {
            module: module.address(),
            base: Gva(base),
            size,
        }),
    }
}
