//! The kernel's table of unwind information (ORC, Documentation/arch/x86/orc-unwinder.rst). For
//! each range of code, it describes the step from a function's stack to its caller's.
//!
//! The table has two parallel arrays: 32-bit distances and records ([`OrcFormat`]). A distance is
//! that from its own element to the first address of its record. They ascend. Kernels before 5.6
//! sort them at boot, later ones when they are built, modules when they are loaded. In a running
//! guest the table is read in place ([`OrcTable`]). From an image, or if it may be unsorted, it is
//! copied ([`OrcCopy`]). Both find records by binary search over a bounded number of elements.

use super::orc_versions::{ENTRY_SIZE, OrcEntry, OrcFormat, OrcType};
use crate::bytes::u32_at;
use crate::kernel::btf::Btf;
use crate::kernel::image::KernelImage;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::structure::{Structure, StructureError};
use crate::kernel::symbols::Symbols;
use crate::x86_64::ReadVirtualError;
use crate::{Gva, MemoryView};

/// The size of a distance in bytes.
const DISTANCE: u64 = 4;
/// The maximum number of records of one table. A distribution's kernel has about half a million.
const MAX_RECORDS: u64 = 1 << 24;
/// The purpose of the symbols around the table, for errors.
const USED_FOR: &str = "bounds the kernel's unwind information";

/// The reason why there is no usable table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrcError {
    /// The symbols around the table, or a module's members, are missing.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The sizes of the two arrays do not match.
    #[error(
        "the unwind information at {ips} has {ip_bytes:#x} bytes of addresses and {entry_bytes:#x} bytes of records: \
         they do not fit together"
    )]
    Mismatch {
        /// The address of the array of addresses.
        ips: Gva,
        /// The size of the array of addresses in bytes.
        ip_bytes: u64,
        /// The size of the array of records in bytes.
        entry_bytes: u64,
    },
    /// The image does not hold the table.
    #[error("the kernel image does not hold the unwind information at {ips}")]
    NotInImage {
        /// The link address of the array of addresses.
        ips: Gva,
    },
    /// The table of a running kernel cannot be read.
    #[error("the kernel's unwind information cannot be read: {0}")]
    NotInMemory(ReadVirtualError),
    /// A module's description cannot be read.
    #[error(transparent)]
    Module(#[from] StructureError),
}

/// The location of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    ips: u64,
    entries: u64,
    count: u64,
}

impl Place {
    fn new(ips: u64, ip_bytes: u64, entries: u64, entry_bytes: u64) -> Result<Self, OrcError> {
        let count = ip_bytes / DISTANCE;
        let whole = ip_bytes.is_multiple_of(DISTANCE)
            && count.checked_mul(ENTRY_SIZE as u64) == Some(entry_bytes);
        match whole && count <= MAX_RECORDS && count > 0 {
            true => Ok(Self {
                ips,
                entries,
                count,
            }),
            false => Err(OrcError::Mismatch {
                ips: Gva(ips),
                ip_bytes,
                entry_bytes,
            }),
        }
    }

    /// Finds the kernel's own table by the symbols around it.
    fn of_kernel(symbols: &Symbols) -> Result<Self, OrcError> {
        let symbol = |name: &'static str| {
            let missing = LayoutError::Symbol {
                name,
                used_for: USED_FOR,
            };
            symbols.address_of(name).ok_or(missing)
        };
        let (ips, ips_end) = (
            symbol("__start_orc_unwind_ip")?,
            symbol("__stop_orc_unwind_ip")?,
        );
        let (entries, end) = (symbol("__start_orc_unwind")?, symbol("__stop_orc_unwind")?);
        let bytes = |start: u64, end: u64| end.checked_sub(start).unwrap_or(u64::MAX);
        Self::new(ips, bytes(ips, ips_end), entries, bytes(entries, end))
    }
}

/// A sorted table in a running guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrcTable {
    place: Place,
    format: OrcFormat,
}

impl OrcTable {
    /// Finds the kernel's own table. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel has no such symbols (it is built with another unwinder), or they do not bound
    /// a table.
    pub fn of_kernel(symbols: &Symbols, format: OrcFormat) -> Result<Self, OrcError> {
        let place = Place::of_kernel(symbols)?;
        Ok(Self { place, format })
    }

    /// Returns the format of the records.
    #[must_use]
    pub fn format(&self) -> OrcFormat {
        self.format
    }

    /// Returns the number of records.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.place.count
    }

    /// Checks whether there are no records.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.place.count == 0
    }

    /// Copies the whole table.
    ///
    /// # Errors
    /// If the table is not in memory.
    pub fn copy(&self, view: MemoryView<'_>) -> Result<OrcCopy, OrcError> {
        let Place {
            ips,
            entries,
            count,
        } = self.place;
        let bytes = |at: u64, size: u64| {
            let length = usize::try_from(count * size).unwrap_or(usize::MAX);
            view.bytes(Gva(at), length).map_err(OrcError::NotInMemory)
        };
        let addresses = bytes(ips, DISTANCE)?;
        let records = bytes(entries, ENTRY_SIZE as u64)?;
        OrcCopy::from_bytes(ips, &addresses, &records, self.format)
    }

    /// Finds the record for the instruction at `ip`: the last one that starts at or before it.
    /// Returns `None` if there is none, or it cannot be decoded.
    ///
    /// # Errors
    /// If the table is not in memory.
    pub fn find(
        &self,
        view: MemoryView<'_>,
        ip: u64,
    ) -> Result<Option<OrcEntry>, ReadVirtualError> {
        let Place {
            ips,
            entries,
            count,
        } = self.place;
        let (mut low, mut high) = (0, count);
        // Elements before `low` start at or before `ip`, those from `high` on start after it.
        while low < high {
            let middle = low + (high - low) / 2;
            let at = ips.wrapping_add(middle * DISTANCE);
            let distance = view.u32(Gva(at))?.cast_signed();
            match at.wrapping_add_signed(distance.into()) <= ip {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        let Some(index) = low.checked_sub(1) else {
            return Ok(None);
        };
        let at = entries.wrapping_add(index * ENTRY_SIZE as u64);
        Ok(self.format.decode(view.array(Gva(at))?))
    }
}

/// The offsets of the members by which a module names its table (`struct module`, `arch`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleOrcLayout {
    count: u64,
    ips: u64,
    entries: u64,
    format: OrcFormat,
}

impl ModuleOrcLayout {
    /// Finds the offsets.
    ///
    /// # Errors
    /// If the kernel's modules have no such tables, because it has no modules or another unwinder.
    pub fn new(btf: &Btf, format: OrcFormat) -> Result<Self, LayoutError> {
        Ok(Self {
            count: offset(btf, "module.arch.num_orcs", 4)?,
            ips: offset(btf, "module.arch.orc_unwind_ip", 8)?,
            entries: offset(btf, "module.arch.orc_unwind", 8)?,
            format,
        })
    }

    /// Returns the table of the module whose `struct module` is at `module`, or `None` if it has
    /// none.
    ///
    /// # Errors
    /// If the members cannot be read or do not describe a table.
    pub fn table(&self, view: MemoryView<'_>, module: Gva) -> Result<Option<OrcTable>, OrcError> {
        let module = Structure::at(view, "module", module)?;
        let count = u64::from(module.u32(self.count)?);
        let (ips, entries) = (module.u64(self.ips)?, module.u64(self.entries)?);
        if count == 0 || ips == 0 || entries == 0 {
            return Ok(None);
        }
        let place = Place::new(ips, count * DISTANCE, entries, count * ENTRY_SIZE as u64)?;
        Ok(Some(OrcTable {
            place,
            format: self.format,
        }))
    }
}

/// A sorted table, copied from an image.
#[derive(Debug, Clone)]
pub struct OrcCopy {
    /// The first address of each record, ascending.
    starts: Vec<u64>,
    entries: Vec<[u8; ENTRY_SIZE]>,
    format: OrcFormat,
}

impl OrcCopy {
    /// Copies the table of a kernel image. `symbols` are the image's, without slide.
    ///
    /// # Errors
    /// If the image has no such symbols, does not hold the table, or they do not bound one.
    pub fn of_image(
        image: &KernelImage,
        symbols: &Symbols,
        format: OrcFormat,
    ) -> Result<Self, OrcError> {
        let place = Place::of_kernel(&symbols.with_slide(0))?;
        let missing = OrcError::NotInImage {
            ips: Gva(place.ips),
        };
        let bytes = |address: u64, size: u64| {
            let length = usize::try_from(place.count.checked_mul(size)?).ok()?;
            image.read_at_vaddr(address, length)
        };
        let ips = bytes(place.ips, DISTANCE);
        let entries = bytes(place.entries, ENTRY_SIZE as u64);
        match (ips, entries) {
            (Some(ips), Some(entries)) => Self::from_bytes(place.ips, ips, entries, format),
            _ => Err(missing),
        }
    }

    /// Builds a table from the bytes of its two arrays. The first array is at `ips_address`.
    ///
    /// # Errors
    /// If the sizes do not match.
    pub fn from_bytes(
        ips_address: u64,
        ips: &[u8],
        entries: &[u8],
        format: OrcFormat,
    ) -> Result<Self, OrcError> {
        Place::new(ips_address, ips.len() as u64, 0, entries.len() as u64)?;
        let (records, _) = entries.as_chunks::<ENTRY_SIZE>();
        let start = |index: usize| {
            let distance = u32_at(ips, index * 4)?.cast_signed();
            let at = ips_address.wrapping_add(index as u64 * DISTANCE);
            Some(at.wrapping_add_signed(distance.into()))
        };
        let mut pairs: Vec<(u64, [u8; ENTRY_SIZE])> = records
            .iter()
            .enumerate()
            .filter_map(|(index, record)| Some((start(index)?, *record)))
            .collect();
        if !pairs.is_sorted_by_key(|(start, _)| *start) {
            // Of several records for one address the last counts. Those that only end the previous
            // range come first.
            pairs.sort_by_key(|(start, record)| (*start, rank(format.decode(*record))));
        }
        let (starts, entries) = pairs.into_iter().unzip();
        Ok(Self {
            starts,
            entries,
            format,
        })
    }

    /// Returns the format of the records.
    #[must_use]
    pub fn format(&self) -> OrcFormat {
        self.format
    }

    /// Finds the record for the instruction at the link address `ip`; see [`OrcTable::find`].
    #[must_use]
    pub fn find(&self, ip: u64) -> Option<OrcEntry> {
        let after = self.starts.partition_point(|start| *start <= ip);
        self.format
            .decode(*self.entries.get(after.checked_sub(1)?)?)
    }

    /// Iterates over all records with the first address of each, ascending. A record that cannot be
    /// decoded is `None`.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u64, Option<OrcEntry>)> {
        let entries = self.entries.iter();
        self.starts
            .iter()
            .zip(entries)
            .map(|(start, record)| (*start, self.format.decode(*record)))
    }
}

/// Ranks a record by how much information it has.
fn rank(entry: Option<OrcEntry>) -> u8 {
    match entry.map(|entry| entry.kind) {
        None | Some(OrcType::Undefined) => 0,
        Some(OrcType::EndOfStack) => 1,
        Some(_) => 2,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::btf::Kind;
    use crate::kernel::btf::test_types::TestBtf;
    use crate::kernel::test_kernel;
    use crate::test_memory::{Flags, TestMemory};
    use crate::test_says::assert_says;

    const IPS: u64 = 0xffff_ffff_8200_0000;
    const ENTRIES: u64 = IPS + 0x100;
    const TEXT: u64 = 0xffff_ffff_8100_0000;

    fn format() -> OrcFormat {
        OrcFormat::of(None, Some("Linux version 6.1.0")).unwrap()
    }

    /// Builds a record of a call with this distance to the caller's stack, or one that ends a range
    /// if it is 0.
    fn record(sp_offset: u8) -> [u8; 6] {
        match sp_offset {
            0 => [0; 6],
            _ => [sp_offset, 0, 0, 0, 5, 0],
        }
    }

    /// Builds the two arrays of records at these offsets in the text.
    fn arrays(records: &[(u64, u8)]) -> (Vec<u8>, Vec<u8>) {
        let (mut ips, mut entries) = (Vec::new(), Vec::new());
        for (index, (start, sp_offset)) in (0u64..).zip(records) {
            let distance = (TEXT + start).wrapping_sub(IPS + index * 4);
            ips.extend((distance as u32).to_le_bytes());
            entries.extend(record(*sp_offset));
        }
        (ips, entries)
    }

    fn symbols(ip_bytes: u64, entry_bytes: u64) -> Symbols {
        test_kernel::symbols(&[
            ("__start_orc_unwind_ip", IPS),
            ("__stop_orc_unwind_ip", IPS.wrapping_add(ip_bytes)),
            ("__start_orc_unwind", ENTRIES),
            ("__stop_orc_unwind", ENTRIES.wrapping_add(entry_bytes)),
        ])
    }

    /// Pairs of an IP in the text and the distance to the caller's stack.
    const LOOKUPS: [(u64, Option<i16>); 7] = [
        (0xfff, None),
        (0x1000, Some(8)),
        (0x1003, Some(8)),
        (0x1004, Some(16)),
        (0x1fff, Some(16)),
        (0x2000, Some(24)),
        (0x9000, Some(24)),
    ];

    #[test]
    fn records_are_found_in_memory_at_any_slide() {
        let slide = 0x1e00_0000;
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        memory.map(space, IPS + slide, 0x18_0000, 4096, Flags::default());
        let (ips, entries) = arrays(&[(0x1000, 8), (0x1004, 16), (0x2000, 0), (0x2000, 24)]);
        memory.write(0x18_0000, &ips);
        memory.write(0x18_0100, &entries);
        let paused = PausedMemory::new(&memory);
        let view = paused.view(space);
        let table = OrcTable::of_kernel(&symbols(16, 24).with_slide(slide), format()).unwrap();
        for (ip, expected) in LOOKUPS {
            let found = table.find(view, TEXT + slide + ip).unwrap();
            assert_eq!(found.map(|entry| entry.sp_offset), expected, "{ip:#x}");
        }
        let unmapped = OrcTable::of_kernel(&symbols(16, 24), format()).unwrap();
        unmapped.find(view, TEXT).unwrap_err();
    }

    #[test]
    fn copies_are_sorted_if_the_kernel_sorts_them_when_it_boots() {
        for records in [
            [(0x1000, 8), (0x1004, 16), (0x2000, 0), (0x2000, 24)],
            [(0x2000, 24), (0x1004, 16), (0x2000, 0), (0x1000, 8)],
        ] {
            let (ips, entries) = arrays(&records);
            let copy = OrcCopy::from_bytes(IPS, &ips, &entries, format()).unwrap();
            for (ip, expected) in LOOKUPS {
                let found = copy.find(TEXT + ip);
                assert_eq!(
                    found.map(|entry| entry.sp_offset),
                    expected,
                    "{ip:#x} in {records:?}"
                );
            }
            assert!(copy.iter().is_sorted_by_key(|(start, _)| start));
        }
    }

    #[test]
    fn tables_that_do_not_fit_together_are_refused() {
        for (ip_bytes, entry_bytes) in [
            (0, 0),
            (16, 18),
            (15, 24),
            (u64::MAX - IPS + 1, 6),
            ((MAX_RECORDS + 1) * 4, (MAX_RECORDS + 1) * 6),
        ] {
            let symbols = symbols(ip_bytes, entry_bytes);
            let error = OrcTable::of_kernel(&symbols, format()).unwrap_err();
            assert!(
                matches!(error, OrcError::Mismatch { .. }),
                "{ip_bytes:#x}: {error}"
            );
        }
        let error = OrcTable::of_kernel(&test_kernel::symbols(&[]), format()).unwrap_err();
        assert_says(error, "__start_orc_unwind_ip");
    }

    #[test]
    fn modules_bring_their_own() {
        let mut t = TestBtf::default();
        let word = t.add("unsigned int", Kind::Int, 0, 4, &[0x20]);
        let pointer = t.add("", Kind::Pointer, 0, word, &[]);
        let members = [
            ("num_orcs", word, 0),
            ("orc_unwind_ip", pointer, 64),
            ("orc_unwind", pointer, 128),
        ];
        let arch = t.composite("mod_arch_specific", Kind::Struct, false, 24, &members);
        t.composite("module", Kind::Struct, false, 88, &[("arch", arch, 64 * 8)]);
        let btf = Btf::parse(&t.bytes()).unwrap();
        let layout = ModuleOrcLayout::new(&btf, format()).unwrap();
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        memory.map(space, IPS, 0x18_0000, 4096, Flags::default());
        let (ips, entries) = arrays(&[(0x1000, 8), (0x1004, 16), (0x2000, 24)]);
        memory.write(0x18_0000, &ips);
        memory.write(0x18_0100, &entries);
        let module = IPS + 0x800;
        for (count, expected) in [(3u32, Ok(Some(3))), (0, Ok(None)), (u32::MAX, Err(()))] {
            memory.write(0x18_0840, &count.to_le_bytes());
            memory.write(0x18_0848, &IPS.to_le_bytes());
            memory.write(0x18_0850, &ENTRIES.to_le_bytes());
            let paused = PausedMemory::new(&memory);
            let table = layout.table(paused.view(space), Gva(module));
            let records = table
                .map(|table| table.map(|table| table.place.count))
                .map_err(|_| ());
            assert_eq!(records, expected, "{count} records");
        }
        let paused = PausedMemory::new(&memory);
        let error = layout.table(paused.view(space), Gva(0x1000)).unwrap_err();
        assert!(matches!(error, OrcError::Module(_)), "{error}");
        let none = Btf::parse(&TestBtf::default().bytes()).unwrap();
        ModuleOrcLayout::new(&none, format()).unwrap_err();
    }
}
