//! The BPF programs and trampolines that the kernel has compiled, by the names that
//! `/proc/kallsyms` gives them: `bpf_prog_TAG_NAME [bpf]`.
//!
//! They come and go at any time, so they are read anew each time that the guest is paused. The
//! list is `bpf_kallsyms` (kernel/bpf/core.c), since Linux 5.8 of `struct bpf_ksym`.

use super::btf::Btf;
use super::layout::offset;
use super::list::{List, ListError};
use super::loaded_modules::ModuleSymbols;
use super::module_memory::{ModuleRange, RangeKind};
use super::modules::{Module, ModuleState};
use super::structure::{Structure, StructureError, is_kernel_address};
use super::symbols::{Symbols, SymbolsBuilder};
use crate::{Gva, MemoryView};

/// The name that the kernel shows in place of a module's.
const MODULE: &str = "bpf";
/// The maximum number of programs that are read. Busy systems have some hundred.
const MAX_PROGRAMS: usize = 1 << 14;
/// The maximum size of a program's code in bytes. The largest have about a megabyte.
const MAX_CODE: u64 = 1 << 26;
/// The sizes in bytes of a name with its NUL (`KSYM_NAME_LEN`): 512 since Linux 6.1.
const NAMES: [u64; 2] = [512, 128];

/// An error in reading the programs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BpfSymbolsError {
    /// The list is broken.
    #[error("some BPF programs have no name: {0}")]
    List(#[from] ListError),
    /// An entry is broken.
    #[error("some BPF programs have no name: {0}")]
    Structure(#[from] StructureError),
    /// A program's range is impossible.
    #[error(
        "some BPF programs have no name: the bpf_ksym at {at} reaches from {start:#x} to {end:#x}"
    )]
    Range {
        /// The address of the `bpf_ksym`.
        at: Gva,
        /// Its `start`.
        start: u64,
        /// Its `end`.
        end: u64,
    },
}

/// The location of a kernel's BPF programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BpfSymbolsLayout {
    /// The address of the list's head.
    head: Gva,
    /// Offsets in `bpf_ksym`.
    start: u64,
    end: u64,
    name: u64,
    link: u64,
    /// The size of the name in bytes.
    length: usize,
}

impl BpfSymbolsLayout {
    /// Looks up the offsets; `None` in a kernel that has no BPF or does not name the list.
    /// `symbols` must have the slide of the running kernel.
    #[must_use]
    pub fn new(btf: &Btf, symbols: &Symbols) -> Option<Self> {
        let mut names = NAMES.into_iter();
        let (name, length) = names.find_map(|length| {
            let place = offset(btf, "bpf_ksym.name", length).ok()?;
            Some((place, usize::try_from(length).ok()?))
        })?;
        Some(Self {
            head: Gva(symbols.address_of("bpf_kallsyms")?),
            start: offset(btf, "bpf_ksym.start", 8).ok()?,
            end: offset(btf, "bpf_ksym.end", 8).ok()?,
            name,
            link: offset(btf, "bpf_ksym.lnode", 16).ok()?,
            length,
        })
    }

    /// Reads all programs, as the symbols of a module. Also returns the first error.
    #[must_use]
    pub fn read(&self, view: MemoryView<'_>) -> (ModuleSymbols, Option<BpfSymbolsError>) {
        let list = List {
            name: "bpf_kallsyms",
            head: self.head,
            member: self.link,
            limit: MAX_PROGRAMS,
        };
        let walk = list.walk(view);
        let mut error = walk.error.map(BpfSymbolsError::from);
        let mut symbols = SymbolsBuilder::default();
        let mut ranges = Vec::new();
        for entry in walk.items {
            match self.entry(view, entry) {
                Ok((start, end, name)) => {
                    // There is room for far more names than are read.
                    if symbols.push(&name, start, b't', false).is_ok() {
                        ranges.push(ModuleRange {
                            kind: RangeKind::Text,
                            addresses: start..end,
                        });
                    }
                }
                Err(broken) => error = error.or(Some(broken)),
            }
        }
        let end = ranges.iter().map(|range| range.addresses.end).max();
        let module = Module {
            address: self.head,
            name: MODULE.to_owned(),
            state: ModuleState::Live,
            ranges,
        };
        (ModuleSymbols::new(module, symbols.finish(end)), error)
    }

    fn entry(&self, view: MemoryView<'_>, at: Gva) -> Result<(u64, u64, Vec<u8>), BpfSymbolsError> {
        let entry = Structure::at(view, "bpf_ksym", at)?;
        let (start, end) = (entry.u64(self.start)?, entry.u64(self.end)?);
        let size = end
            .checked_sub(start)
            .filter(|size| (1..=MAX_CODE).contains(size));
        if size.is_none() || !is_kernel_address(Gva(start)) {
            return Err(BpfSymbolsError::Range { at, start, end });
        }
        Ok((start, end, entry.text(self.name, self.length)?))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::loaded_modules::LoadedModules;
    use crate::kernel::test_kernel::{BASE, Member, TestKernel, WORD, symbols, types};
    use crate::test_says::assert_says;

    const HEAD: u64 = BASE;
    const FIRST: u64 = BASE + 0x1000;
    const SECOND: u64 = BASE + 0x2000;
    const CODE: u64 = 0xffff_ffff_c000_0000;
    const LINK: u64 = 0x300;

    fn layout(length: u32) -> Option<BpfSymbolsLayout> {
        let types = types(&[(
            "bpf_ksym",
            &[
                ("start", 0, WORD),
                ("end", 8, WORD),
                ("name", 16, Member::Bytes(length)),
                ("lnode", LINK as u32, Member::Bytes(16)),
            ],
        )]);
        BpfSymbolsLayout::new(&types, &symbols(&[("bpf_kallsyms", HEAD)]))
    }

    fn guest() -> TestKernel {
        let mut kernel = TestKernel::default();
        kernel.put_all(&[
            (HEAD, FIRST + LINK, 8),
            (FIRST + LINK, SECOND + LINK, 8),
            (SECOND + LINK, HEAD, 8),
        ]);
        kernel.words(FIRST, &[CODE + 0x1000, CODE + 0x1080]);
        kernel.put(FIRST + 16, "bpf_prog_6deef7357e7b4530_sd_devices\0");
        kernel.words(SECOND, &[CODE, CODE + 0x40]);
        kernel.put(SECOND + 16, "bpf_trampoline_6442453466\0");
        kernel
    }

    /// Returns the names of addresses, and the error.
    fn names(kernel: &TestKernel, length: u32) -> (Vec<Option<String>>, Option<BpfSymbolsError>) {
        let paused = PausedMemory::new(&kernel.memory);
        let (programs, error) = layout(length).unwrap().read(kernel.view(&paused));
        let mut loaded = LoadedModules::default();
        loaded.add(programs);
        let of = |address| {
            let (symbol, offset) = loaded.resolve(address)?;
            Some(format!("{symbol}+{offset:#x}"))
        };
        let asked = [CODE + 8, CODE + 0x40, CODE + 0x107f, CODE + 0x1080];
        (asked.map(of).to_vec(), error)
    }

    const TRAMPOLINE: &str = "bpf_trampoline_6442453466 [bpf]+0x8";
    const PROGRAM: &str = "bpf_prog_6deef7357e7b4530_sd_devices [bpf]+0x7f";

    #[test]
    fn programs_have_the_names_of_kallsyms() {
        for length in [128, 512] {
            let expected = [Some(TRAMPOLINE), None, Some(PROGRAM), None];
            let expected = expected.map(|name| name.map(str::to_owned)).to_vec();
            assert_eq!(names(&guest(), length), (expected, None));
        }
        assert!(layout(64).is_none());
    }

    #[test]
    fn broken_entries_are_left_out_and_told() {
        for (broken, found, part) in [
            (
                (FIRST + 8, CODE + 0x1000, 8),
                [true, false],
                "from 0xffffffffc0001000 to",
            ),
            ((FIRST + 8, CODE, 8), [true, false], "to 0xffffffffc0000000"),
            ((FIRST, 0x1000, 8), [true, false], "reaches from 0x1000"),
            (
                (FIRST + 8, u64::MAX, 8),
                [true, false],
                "to 0xffffffffffffffff",
            ),
            (
                (SECOND + LINK, FIRST + LINK, 8),
                [true, true],
                "it comes back to",
            ),
            ((FIRST + LINK, 0x1000, 8), [false, true], "leads to 0x1000"),
        ] {
            let mut kernel = guest();
            kernel.put_all(&[broken]);
            let (names, error) = names(&kernel, 512);
            assert_eq!([names[0].is_some(), names[2].is_some()], found, "{part}");
            assert_says(error.unwrap(), part);
        }
    }
}
