//! The kernel's loadable modules: names, states and address ranges.
//!
//! The caller pauses the CPUs. This walks the kernel's list `modules`. A module's symbols are read
//! by [`module_symbols`](super::module_symbols).
//!
//! Structures: include/linux/module.h.

use std::fmt;

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::list::{List, ListError, Partial};
use super::module_memory::{MemoryLayout, ModuleMemoryError, ModuleRange, RangeKind};
use super::structure::{Structure, StructureError};
use super::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The maximum number of modules; a distribution ships about 4,000 and loads a hundred.
const MAX_MODULES: usize = 4096;
/// The valid sizes of `module.name` in bytes (`MODULE_NAME_LEN` is 56).
const NAME: std::ops::RangeInclusive<u64> = 8..=256;

/// The location of a kernel's modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModulesLayout {
    /// The address of the list's head.
    head: Gva,
    list: u64,
    name: u64,
    name_length: u64,
    state: u64,
    memory: MemoryLayout,
}

/// An error that prevents reading modules in this kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModulesLayoutError {
    /// The kernel has no modules.
    #[error("the kernel has no loadable modules (built without CONFIG_MODULES)")]
    NoModules,
    /// A symbol or member is missing or has another size.
    #[error("the kernel's modules are not known: {0}")]
    Layout(#[from] LayoutError),
}

/// The state of a module (`enum module_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleState {
    /// In use.
    Live,
    /// Running its initialisation.
    Coming,
    /// Being removed.
    Going,
    /// Being loaded, without ranges and symbols yet.
    Unformed,
    /// Any other value.
    Unknown(u32),
}

impl ModuleState {
    fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Live,
            1 => Self::Coming,
            2 => Self::Going,
            3 => Self::Unformed,
            other => Self::Unknown(other),
        }
    }
}

impl fmt::Display for ModuleState {
    /// Writes the state as `/proc/modules` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Live => f.pad("Live"),
            Self::Coming => f.pad("Loading"),
            Self::Going => f.pad("Unloading"),
            Self::Unformed => f.pad("Unformed"),
            Self::Unknown(number) => write!(f, "state {number}"),
        }
    }
}

/// A module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// The address of the `struct module`.
    pub address: Gva,
    /// The name, with underscores for dashes as in the kernel.
    pub name: String,
    /// The state.
    pub state: ModuleState,
    /// The address ranges, in the order of [`RangeKind`]; none while it is unformed.
    pub ranges: Vec<ModuleRange>,
}

impl Module {
    /// Returns the range that contains an address.
    #[must_use]
    pub fn range_of(&self, address: u64) -> Option<&ModuleRange> {
        self.ranges
            .iter()
            .find(|range| range.addresses.contains(&address))
    }

    /// Returns the first byte of the text: the address that `/proc/modules` prints.
    #[must_use]
    pub fn base(&self) -> Option<u64> {
        let text = self.ranges.iter().find(|r| r.kind == RangeKind::Text);
        text.or(self.ranges.first()).map(|r| r.addresses.start)
    }
}

/// An error in reading the modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ModulesError {
    /// The list is broken.
    #[error(transparent)]
    List(#[from] ListError),
    /// A module's structure is broken.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// A module's memory ranges are invalid.
    #[error(transparent)]
    Memory(#[from] ModuleMemoryError),
}

impl ModulesLayout {
    /// Looks up the list and the offsets. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel has no modules, or its types or symbols do not describe them.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, ModulesLayoutError> {
        if btf.member("module.state").is_err() {
            return Err(ModulesLayoutError::NoModules);
        }
        let used_for = "lists its modules";
        // Functions may have that name as well.
        let head = symbols.all_of("modules").find(|symbol| !symbol.is_text());
        let head = head.ok_or(LayoutError::Symbol {
            name: "modules",
            used_for,
        })?;
        let name = btf.member("module.name").map_err(LayoutError::from)?;
        if !NAME.contains(&name.size) {
            let path = "module.name".to_owned();
            let (found, expected) = (name.size, *NAME.start());
            return Err(LayoutError::Size {
                path,
                found,
                expected,
            }
            .into());
        }
        Ok(Self {
            head: Gva(head.address),
            list: offset(btf, "module.list.next", 8)?,
            name: name.byte_offset,
            name_length: name.size,
            state: offset(btf, "module.state", 4)?,
            memory: MemoryLayout::new(btf)?,
        })
    }

    /// Reads the modules, newest first, as the kernel lists them.
    #[must_use]
    pub fn modules(&self, view: MemoryView<'_>) -> Partial<Module, ModulesError> {
        let list = List {
            name: "modules",
            head: self.head,
            member: self.list,
            limit: MAX_MODULES,
        };
        list.walk(view)
            .read_each(|address| self.module_at(view, address))
    }

    /// Reads the name of the module whose `struct module` is at `address`.
    ///
    /// # Errors
    /// If the structure cannot be read.
    pub fn name_at(&self, view: MemoryView<'_>, address: Gva) -> Result<String, ModulesError> {
        let module = Structure::at(view, "module", address)?;
        Ok(self.name_of(&module)?)
    }

    fn name_of(&self, module: &Structure<'_>) -> Result<String, StructureError> {
        let length = usize::try_from(self.name_length).unwrap_or_default();
        let name = module.text(self.name, length)?;
        Ok(String::from_utf8_lossy(&name).into_owned())
    }

    /// Reads the module whose `struct module` is at `address`.
    ///
    /// # Errors
    /// If the structure cannot be read, or its memory ranges are invalid.
    pub fn module_at(&self, view: MemoryView<'_>, address: Gva) -> Result<Module, ModulesError> {
        let module = Structure::at(view, "module", address)?;
        let name = self.name_of(&module)?;
        let state = ModuleState::from_number(module.u32(self.state)?);
        let ranges = match state {
            ModuleState::Unformed => Vec::new(),
            _ => self.memory.ranges(&module)?,
        };
        Ok(Module {
            address,
            name,
            state,
            ranges,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::test_kernel::{
        BASE, HALF, Member, Struct, TestKernel, WORD, symbols, types,
    };
    use crate::test_says::assert_says;

    const HEAD: u64 = BASE;
    const MODULE: u64 = BASE + 0x1000;
    const TEXT: u64 = 0xffff_ffff_c010_0000;

    const LIST: Struct<'static> = ("list_head", &[("next", 0, WORD), ("prev", 8, WORD)]);

    /// Makes the types of Linux 6.1, with offsets of its Debian build.
    fn blocks() -> Btf {
        types(&[
            LIST,
            (
                "module_layout",
                &[
                    ("base", 0, WORD),
                    ("size", 8, HALF),
                    ("text_size", 12, HALF),
                    ("ro_size", 16, HALF),
                    ("ro_after_init_size", 20, HALF),
                    ("mtn", 24, Member::Bytes(56)),
                ],
            ),
            (
                "module",
                &[
                    ("state", 0, HALF),
                    ("list", 8, Member::Of("list_head")),
                    ("name", 24, Member::Bytes(56)),
                    ("core_layout", 320, Member::Of("module_layout")),
                    ("init_layout", 400, Member::Of("module_layout")),
                ],
            ),
        ])
    }

    /// Makes the types of Linux 6.12, with a state of another size if `state` is.
    fn array(state: Member) -> Btf {
        types(&[
            LIST,
            (
                "module_memory",
                &[
                    ("base", 0, WORD),
                    ("size", 8, HALF),
                    ("mtn", 16, Member::Bytes(56)),
                ],
            ),
            (
                "module",
                &[
                    ("state", 0, state),
                    ("list", 8, Member::Of("list_head")),
                    ("name", 24, Member::Bytes(56)),
                    ("mem", 320, Member::Bytes(7 * 72)),
                ],
            ),
        ])
    }

    /// Links modules into the list; each has a state and a name.
    fn kernel(modules: &[(u32, &str)]) -> TestKernel {
        let mut kernel = TestKernel::default();
        let mut link = HEAD;
        for (index, (state, name)) in (0..).zip(modules) {
            let module = MODULE + index * 0x1000;
            kernel.put(link, (module + 8).to_le_bytes());
            kernel.put(module, state.to_le_bytes());
            kernel.put(module + 24, name);
            link = module + 8;
        }
        kernel.put(link, HEAD.to_le_bytes());
        kernel
    }

    fn walk(kernel: &TestKernel, btf: &Btf) -> Partial<Module, ModulesError> {
        let layout = ModulesLayout::new(btf, &symbols(&[("modules", HEAD)])).unwrap();
        let paused = PausedMemory::new(&kernel.memory);
        layout.modules(kernel.view(&paused))
    }

    /// Reads one module by its address, and its name alone.
    fn one(kernel: &TestKernel, btf: &Btf, address: u64) -> Module {
        let layout = ModulesLayout::new(btf, &symbols(&[("modules", HEAD)])).unwrap();
        let paused = PausedMemory::new(&kernel.memory);
        let view = kernel.view(&paused);
        let module = layout.module_at(view, Gva(address)).unwrap();
        let name = layout.name_at(view, Gva(address)).unwrap();
        assert_eq!(name, module.name);
        module
    }

    fn shown(module: &Module) -> Vec<(RangeKind, u64, u64)> {
        let ranges = module.ranges.iter();
        ranges
            .map(|r| (r.kind, r.addresses.start, r.addresses.end))
            .collect()
    }

    #[test]
    fn two_blocks_are_split_into_their_parts() {
        let mut kernel = kernel(&[(1, "kvm"), (0, "virtio_net"), (3, "late")]);
        for (at, base, size, text, read_only, after_init) in [
            (MODULE + 320, TEXT, 0x8000u64, 0x3000u64, 0x4000u64, 0x5000),
            (MODULE + 400, TEXT + 0x10_0000, 0x2000, 0x1000, 0x1000, 0),
            (MODULE + 0x1320, TEXT + 0x8000, 0x2000, 0x1000, 0x1000, 0),
        ] {
            kernel.put_all(&[
                (at, base, 8),
                (at + 8, size, 4),
                (at + 12, text, 4),
                (at + 16, read_only, 4),
                (at + 20, after_init, 4),
            ]);
        }
        // An unformed module's ranges are not looked at.
        kernel.put(MODULE + 0x2000 + 320, [0x55; 16]);
        kernel.put(MODULE + 0x1000 + 320, (TEXT + 0x8000).to_le_bytes());
        kernel.put_all(&[
            (MODULE + 0x1000 + 328, 0x2000, 4),
            (MODULE + 0x1000 + 332, 0x1000, 4),
        ]);
        let modules = walk(&kernel, &blocks()).complete().unwrap();
        let names: Vec<_> = modules
            .iter()
            .map(|m| (m.name.as_str(), m.state.to_string()))
            .collect();
        let state = |text: &str| text.to_owned();
        assert_eq!(
            names,
            [
                ("kvm", state("Loading")),
                ("virtio_net", state("Live")),
                ("late", state("Unformed"))
            ]
        );
        use RangeKind as Kind;
        assert_eq!(
            shown(&modules[0]),
            [
                (Kind::Text, TEXT, TEXT + 0x3000),
                (Kind::Data, TEXT + 0x5000, TEXT + 0x8000),
                (Kind::ReadOnlyData, TEXT + 0x3000, TEXT + 0x4000),
                (Kind::ReadOnlyAfterInit, TEXT + 0x4000, TEXT + 0x5000),
                (Kind::InitText, TEXT + 0x10_0000, TEXT + 0x10_1000),
                (Kind::InitData, TEXT + 0x10_1000, TEXT + 0x10_2000),
            ]
        );
        assert_eq!(
            shown(&modules[1]),
            [
                (Kind::Text, TEXT + 0x8000, TEXT + 0x9000),
                (Kind::Data, TEXT + 0x9000, TEXT + 0xa000)
            ]
        );
        assert_eq!(shown(&modules[2]), []);
        assert_eq!(modules[0].base(), Some(TEXT));
        assert_eq!(one(&kernel, &blocks(), MODULE + 0x1000), modules[1]);
        let kind = |address| modules[0].range_of(address).map(|r| r.kind);
        assert_eq!(kind(TEXT + 0x2fff), Some(Kind::Text));
        assert_eq!(kind(TEXT + 0x8000), None);
    }

    #[test]
    fn an_array_has_a_range_of_each_kind() {
        let mut kernel = kernel(&[(0, "kvm")]);
        for (kind, base, size) in [
            (0, TEXT, 0x3000),
            (1, TEXT + 0x9000, 0x1000),
            (3, TEXT + 0x7000, 0x800),
        ] {
            let at = MODULE + 320 + kind * 72;
            kernel.put_all(&[(at, base, 8), (at + 8, size, 4)]);
        }
        let modules = walk(&kernel, &array(HALF)).complete().unwrap();
        assert_eq!(
            shown(&modules[0]),
            [
                (RangeKind::Text, TEXT, TEXT + 0x3000),
                (RangeKind::Data, TEXT + 0x9000, TEXT + 0xa000),
                (RangeKind::ReadOnlyAfterInit, TEXT + 0x7000, TEXT + 0x7800),
            ]
        );
    }

    #[test]
    fn what_is_broken_is_named_and_the_rest_is_kept() {
        let mut kernel = kernel(&[(0, "good"), (0, "bad"), (7, "odd")]);
        kernel.put_all(&[
            (MODULE + 0x1000 + 320, 0x40_0000, 8),
            (MODULE + 0x1000 + 328, 0x1000, 4),
        ]);
        let names = |walk: &Partial<Module, ModulesError>| -> Vec<String> {
            walk.items.iter().map(|m| m.name.clone()).collect()
        };
        let found = walk(&kernel, &array(HALF));
        assert_eq!(names(&found), ["good", "odd"]);
        let text = found.error.unwrap().to_string();
        assert!(
            text.ends_with("expected kernel addresses, found 0x1000 bytes at 0x400000"),
            "{text}"
        );
        assert_eq!(found.items[1].state.to_string(), "state 7");
        kernel.put(MODULE + 0x2000 + 8, (MODULE + 8).to_le_bytes());
        let found = walk(&kernel, &array(HALF));
        assert_eq!(names(&found), ["good", "odd"]);
        let text = found.error.unwrap().to_string();
        assert_says(&text, "list modules is broken");
    }

    #[test]
    fn kernels_without_modules_say_so() {
        let none = types(&[LIST]);
        let found = ModulesLayout::new(&none, &symbols(&[]));
        assert_eq!(found, Err(ModulesLayoutError::NoModules));
        let error = ModulesLayout::new(&array(HALF), &symbols(&[])).unwrap_err();
        let text = error.to_string();
        assert_says(&text, "the kernel names no modules");
        let error = ModulesLayout::new(&array(WORD), &symbols(&[("modules", HEAD)])).unwrap_err();
        let text = error.to_string();
        assert_says(&text, "module.state is 8 bytes");
    }
}
