//! Symbols of loaded modules, which the kernel keeps with each module.
//!
//! The caller has the modules ([`modules`](super::modules)) and pauses the CPUs. A module keeps its
//! whole symbol table while its initialisation runs. Afterwards it keeps the part that stays in
//! memory: functions, and with `CONFIG_KALLSYMS_ALL` data.
//!
//! Structures: `mod_kallsyms` in include/linux/module.h, kernel/module/kallsyms.c; ELF symbols.

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::loaded_modules::{LoadedModules, ModuleSymbols};
use super::modules::{Module, ModuleState};
use super::structure::{Structure, StructureError};
use super::symbols::{SymbolsBuilder, TooManySymbols};
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::{Gva, MemoryView};

/// Size of an ELF symbol in bytes.
const SYMBOL: usize = 24;
/// The maximum number of symbols of one module; the largest have about 50,000.
const MAX_SYMBOLS: u32 = 1 << 18;
/// The maximum number of symbols of all modules; a busy system has about 100,000. With the longest
/// names they take about 256 MiB at most.
const MAX_ALL: u32 = 1 << 19;
/// The maximum length of a name in bytes (`KSYM_NAME_LEN` is 512 since Linux 6.1).
const MAX_NAME: usize = 512;
/// The section number of a symbol that the module does not define.
const UNDEFINED: u16 = 0;

/// The location of a module's symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleSymbolsLayout {
    /// Offset in `module`.
    kallsyms: u64,
    /// Offsets in `mod_kallsyms`.
    symbols: u64,
    count: u64,
    names: u64,
    /// Since Linux 5.2. Before that, the letters are in the symbols themselves.
    kinds: Option<u64>,
}

/// An error in reading a module's symbols.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModuleSymbolsError {
    /// A structure or table cannot be read.
    #[error("module {module}: {source}")]
    Structure {
        /// The module's name.
        module: String,
        /// The cause.
        source: StructureError,
    },
    /// The number of symbols is absurd.
    #[error(
        "module {module}: invalid symbol table: found {found} symbols, more than {MAX_SYMBOLS} or than all modules \
         may have"
    )]
    TooMany {
        /// The module's name.
        module: String,
        /// The number of symbols claimed.
        found: usize,
    },
}

impl ModuleSymbolsLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        Ok(Self {
            kallsyms: offset(btf, "module.kallsyms", 8)?,
            symbols: offset(btf, "mod_kallsyms.symtab", 8)?,
            count: offset(btf, "mod_kallsyms.num_symtab", 4)?,
            names: offset(btf, "mod_kallsyms.strtab", 8)?,
            kinds: offset(btf, "mod_kallsyms.typetab", 8).ok(),
        })
    }

    /// Reads the symbols of one module; none while it is unformed.
    ///
    /// # Errors
    /// If its tables are not all in memory, or too large.
    pub fn read(
        &self,
        view: MemoryView<'_>,
        module: Module,
    ) -> Result<ModuleSymbols, ModuleSymbolsError> {
        self.read_within(view, module, &mut { MAX_SYMBOLS })
    }

    /// Does the same as [`read`](Self::read). Subtracts the module's number of symbols from `left`.
    fn read_within(
        &self,
        view: MemoryView<'_>,
        module: Module,
        left: &mut u32,
    ) -> Result<ModuleSymbols, ModuleSymbolsError> {
        let symbols = match module.state {
            ModuleState::Unformed => SymbolsBuilder::default(),
            _ => self.tables(view, &module, left)?,
        };
        let ends = module.ranges.iter().map(|range| range.addresses.end);
        let symbols = symbols.finish(ends.max());
        Ok(ModuleSymbols::new(module, symbols))
    }

    /// Reads the symbols of all modules. Returns them with the errors of those that could not be
    /// read.
    #[must_use]
    pub fn read_all(
        &self,
        view: MemoryView<'_>,
        modules: Vec<Module>,
    ) -> (LoadedModules, Vec<ModuleSymbolsError>) {
        let (mut read, mut errors) = (Vec::new(), Vec::new());
        let mut left = MAX_ALL;
        for module in modules {
            match self.read_within(view, module, &mut left) {
                Ok(found) => read.push(found),
                Err(error) => errors.push(error),
            }
        }
        (LoadedModules::new(read), errors)
    }

    fn tables(
        &self,
        view: MemoryView<'_>,
        module: &Module,
        left: &mut u32,
    ) -> Result<SymbolsBuilder, ModuleSymbolsError> {
        let structure = |source| ModuleSymbolsError::Structure {
            module: module.name.clone(),
            source,
        };
        let too_many = |found: usize| ModuleSymbolsError::TooMany {
            module: module.name.clone(),
            found,
        };
        let table = |kind, length: usize, at: Gva| {
            let structure = Structure::at(view, kind, at)?;
            let bytes = view.bytes(structure.address(), length);
            bytes.map_err(|source| structure.unreadable(source))
        };
        let owner = Structure::at(view, "module", module.address).map_err(structure)?;
        let Some(tables) = owner
            .follow(self.kallsyms, "mod_kallsyms")
            .map_err(structure)?
        else {
            return Ok(SymbolsBuilder::default());
        };
        let count = tables.u32(self.count).map_err(structure)?;
        let size = usize::try_from(count).unwrap_or(usize::MAX);
        *left = match left.checked_sub(count) {
            Some(left) if count <= MAX_SYMBOLS => left,
            _ => return Err(too_many(size)),
        };
        let pointer = |offset| tables.u64(offset).map(Gva).map_err(structure);
        let entries = pointer(self.symbols)?;
        let entries = table("module symbol table", size * SYMBOL, entries).map_err(structure)?;
        let kinds = match self.kinds {
            Some(kinds) => {
                let kinds = pointer(kinds)?;
                Some(table("module symbol kinds", size, kinds).map_err(structure)?)
            }
            None => None,
        };
        let names = Structure::at(view, "module symbol names", pointer(self.names)?);
        let names = names.map_err(structure)?;
        let mut builder = SymbolsBuilder::with_capacity(size);
        for (index, entry) in entries.as_chunks::<SYMBOL>().0.iter().enumerate() {
            let Some(entry) = ElfSymbol::from_bytes(entry).filter(|e| e.section != UNDEFINED)
            else {
                continue;
            };
            let name = names.text(entry.name.into(), MAX_NAME).map_err(structure)?;
            if name.is_empty() || is_label(&name) {
                continue;
            }
            let kind = match &kinds {
                Some(kinds) => kinds.get(index).copied().unwrap_or_default(),
                None => entry.kind,
            };
            // A letter, or the kernel's mark for an unknown kind.
            let kind = if kind.is_ascii_graphic() { kind } else { b'?' };
            builder
                .push(&name, entry.value, kind, kind == b'a')
                .map_err(|TooManySymbols { symbols, .. }| too_many(symbols))?;
        }
        Ok(builder)
    }
}

/// The parts of an ELF symbol that are read.
struct ElfSymbol {
    name: u32,
    section: u16,
    value: u64,
    /// The letter that kernels before 5.2 store there: over the type byte, or in 5.0 and 5.1 over
    /// the size.
    kind: u8,
}

impl ElfSymbol {
    fn from_bytes(bytes: &[u8; SYMBOL]) -> Option<Self> {
        let (info, size) = (bytes[4], bytes[16]);
        Some(Self {
            name: u32_at(bytes, 0)?,
            section: u16_at(bytes, 6)?,
            value: u64_at(bytes, 8)?,
            kind: match info.is_ascii_alphabetic() {
                true => info,
                false => size,
            },
        })
    }
}

/// Checks for names made by assemblers, which the kernel leaves out as well. These are `.L…`, and
/// the marks `$a`, `$d`, `$t`, `$x` of other architectures.
fn is_label(name: &[u8]) -> bool {
    match name {
        [b'.', b'L', ..] => true,
        [b'$', b'a' | b'd' | b't' | b'x', rest @ ..] => {
            rest.first().is_none_or(|byte| *byte == b'.')
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::module_memory::RangeKind;
    use crate::kernel::test_kernel::{self, BASE, HALF, TestKernel, WORD, types};

    const MODULE: u64 = BASE + 0x1000;
    const TABLES: u64 = MODULE + 552;
    const SYMBOLS: u64 = BASE + 0x4000;
    const NAMES: u64 = BASE + 0x6000;
    const KINDS: u64 = BASE + 0x7000;
    const TEXT: u64 = 0xffff_ffff_c010_0000;

    /// Makes the layout of Linux from 5.2 on, or before.
    fn layout(with_kinds: bool) -> ModuleSymbolsLayout {
        let tables = [
            ("symtab", 0, WORD),
            ("num_symtab", 8, HALF),
            ("strtab", 16, WORD),
            ("typetab", 24, WORD),
        ];
        let tables = &tables[..if with_kinds { 4 } else { 3 }];
        let module = [("kallsyms", 544, WORD)];
        let btf = types(&[("mod_kallsyms", tables), ("module", &module)]);
        ModuleSymbolsLayout::new(&btf).unwrap()
    }

    fn module() -> Module {
        test_kernel::module(MODULE, "kvm", &[(RangeKind::Text, TEXT..TEXT + 0x1000)])
    }

    /// Writes symbols of (name, section, address, letter). The letter is in the table of kinds and
    /// in the symbol.
    fn kernel(symbols: &[(&str, u16, u64, u8)]) -> TestKernel {
        let mut kernel = TestKernel::default();
        kernel.put_all(&[
            (MODULE + 544, TABLES, 8),
            (TABLES, SYMBOLS, 8),
            (TABLES + 8, symbols.len() as u64, 4),
            (TABLES + 16, NAMES, 8),
            (TABLES + 24, KINDS, 8),
        ]);
        let mut name_at = 0;
        for (index, (name, section, value, letter)) in (0..).zip(symbols) {
            let at = SYMBOLS + index * SYMBOL as u64;
            kernel.put_all(&[
                (at, name_at, 4),
                (at + 4, (*letter).into(), 1),
                (at + 6, (*section).into(), 2),
                (at + 8, *value, 8),
                (KINDS + index, (*letter).into(), 1),
            ]);
            kernel.put(NAMES + name_at, name);
            name_at += name.len() as u64 + 1;
        }
        kernel
    }

    const LIST: [(&str, u16, u64, u8); 8] = [
        ("", 0, 0, b'?'),
        ("kvm_init", 1, TEXT, b't'),
        ("imported", 0, 0, b'U'),
        ("", 1, TEXT + 8, b't'),
        (".Ltmp", 1, TEXT + 16, b't'),
        ("$x.1", 1, TEXT + 24, b't'),
        ("kvm_exit", 1, TEXT + 0x100, b't'),
        ("running", 5, 0x1200, b'a'),
    ];

    fn read(kernel: &TestKernel, with_kinds: bool) -> Result<ModuleSymbols, ModuleSymbolsError> {
        let paused = PausedMemory::new(&kernel.memory);
        layout(with_kinds).read(kernel.view(&paused), module())
    }

    #[test]
    fn symbols_are_those_the_kernel_shows_in_every_layout() {
        for with_kinds in [true, false] {
            let found = read(&kernel(&LIST), with_kinds).unwrap();
            let found: Vec<_> = found
                .symbols()
                .iter()
                .map(|s| (s.name, s.address, s.kind, s.absolute))
                .collect();
            assert_eq!(
                found,
                [
                    ("running", 0x1200, 'a', true),
                    ("kvm_init", TEXT, 't', false),
                    ("kvm_exit", TEXT + 0x100, 't', false),
                ],
                "with a table of kinds: {with_kinds}"
            );
        }
    }

    #[test]
    fn tables_that_cannot_be_are_refused_by_name() {
        for (address, value, expected) in [
            (
                TABLES + 8,
                0x40_0000,
                "module kvm: invalid symbol table: found 4194304",
            ),
            (TABLES, 0x40_0000, "module kvm: module symbol table: its"),
            (TABLES + 24, 0, "module kvm: module symbol kinds: its"),
            (TABLES + 16, 0, "module kvm: module symbol names: its"),
            (
                TABLES + 16,
                BASE - 0x1000,
                "module kvm: module symbol names at 0xffff888000fff000 cannot be read",
            ),
            (MODULE + 544, 8, "module kvm: mod_kallsyms: its pointer is"),
        ] {
            let mut kernel = kernel(&LIST);
            kernel.put(address, u64::to_le_bytes(value));
            let text = read(&kernel, true).unwrap_err().to_string();
            assert!(text.starts_with(expected), "{text}");
        }
    }

    #[test]
    fn a_module_without_tables_has_no_symbols() {
        let mut kernel = kernel(&LIST);
        kernel.put(MODULE + 544, 0u64.to_le_bytes());
        assert!(read(&kernel, true).unwrap().symbols().is_empty());
    }

    #[test]
    fn one_broken_module_does_not_hide_the_others() {
        let kernel = kernel(&LIST);
        let paused = PausedMemory::new(&kernel.memory);
        let broken = Module {
            address: Gva(0x1000),
            name: "broken".to_owned(),
            ..module()
        };
        let (loaded, errors) = layout(true).read_all(kernel.view(&paused), vec![broken, module()]);
        assert_eq!(loaded.modules().len(), 1);
        let text: Vec<_> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(
            text,
            ["module broken: module: its pointer is 0x1000, expected a kernel address"]
        );
    }
}
