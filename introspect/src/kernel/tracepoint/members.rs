//! A `struct tracepoint`, and the lists of all.
//!
//! The lists hold distances (`CONFIG_HAVE_ARCH_PREL32_RELOCATIONS`) or addresses, according to the
//! kernel's types.

use super::{Tracepoint, TracepointError};
use crate::bytes::{u32_at, u64_at};
use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::modules::Module;
use crate::kernel::section_table::{
    SectionNames, SectionTable, SectionTableError, Table, TableOwner,
};
use crate::kernel::structure::{Structure, StructureError};
use crate::kernel::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The maximum number of tracepoints of the kernel and all modules; a distribution kernel has about
/// 2,000.
const MAX_TRACEPOINTS: u64 = 1 << 14;
/// The maximum length of a name in bytes. The kernel's longest have 45.
const MAX_NAME: usize = 256;

/// The members of a `struct tracepoint`.
#[derive(Debug, Clone)]
pub(super) struct Members {
    pointers: SectionTable,
    /// Whether a pointer is a 4-byte distance from itself; otherwise it is an 8-byte address.
    relative: bool,
    name: u64,
    key: u64,
    pub(super) funcs: u64,
    /// Both exist since Linux 5.10.
    iterator: Option<u64>,
    call_trampoline: Option<u64>,
    registration: Registration,
}

/// The location of `regfunc`.
#[derive(Debug, Clone, Copy)]
enum Registration {
    Inside(u64),
    /// Since Linux 6.13: behind a pointer.
    Behind {
        pointer: u64,
        regfunc: u64,
    },
}

impl Members {
    /// Looks up lists and offsets.
    ///
    /// # Errors
    /// If the kernel's types or symbols do not describe them.
    pub(super) fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        // All x86-64 kernels since 4.19 have distances, and types that say so.
        let pointer = btf.size_of("tracepoint_ptr_t").unwrap_or(4);
        let relative = match pointer {
            4 => true,
            8 => false,
            found => {
                return Err(LayoutError::Size {
                    path: "tracepoint_ptr_t".to_owned(),
                    found,
                    expected: 4,
                });
            }
        };
        let names = SectionNames {
            kind: "list of tracepoints",
            bounds: ["__start___tracepoints_ptrs", "__stop___tracepoints_ptrs"],
            used_for: "lists its tracepoints",
            module: ["module.tracepoints_ptrs", "module.num_tracepoints"],
            entry: pointer,
            most: MAX_TRACEPOINTS,
        };
        let registration = match offset(btf, "tracepoint.ext", 8) {
            Ok(pointer) => Registration::Behind {
                pointer,
                regfunc: offset(btf, "tracepoint_ext.regfunc", 8)?,
            },
            Err(_) => Registration::Inside(offset(btf, "tracepoint.regfunc", 8)?),
        };
        Ok(Self {
            pointers: SectionTable::new(btf, symbols, &names)?,
            relative,
            name: offset(btf, "tracepoint.name", 8)?,
            key: btf.member("tracepoint.key")?.byte_offset,
            funcs: offset(btf, "tracepoint.funcs", 8)?,
            iterator: offset(btf, "tracepoint.iterator", 8).ok(),
            call_trampoline: offset(btf, "tracepoint.static_call_tramp", 8).ok(),
            registration,
        })
    }

    /// Reads the addresses of all tracepoints, with their owners.
    pub(super) fn pointers(
        &self,
        view: MemoryView<'_>,
        modules: &[Module],
        unread: &mut Vec<TracepointError>,
    ) -> Vec<(TableOwner, Gva)> {
        let mut left = self.pointers.most();
        let mut all = Vec::new();
        let mut take = |owner: TableOwner, table: Result<Table, SectionTableError>| match table {
            Ok(table) => all.extend(self.decode(&table).map(|at| (owner.clone(), at))),
            Err(error) => unread.push(error.into()),
        };
        take(TableOwner::Kernel, self.pointers.kernel(view, &mut left));
        for module in modules {
            let table = self.pointers.module(view, module, &mut left);
            take(TableOwner::of(module), table);
        }
        all
    }

    fn decode(&self, table: &Table) -> impl Iterator<Item = Gva> {
        let relative = self.relative;
        table.entries().map(move |(at, entry)| {
            let distance = || u32_at(entry, 0).unwrap_or_default().cast_signed();
            match relative {
                true => Gva(at.0.wrapping_add_signed(distance().into())),
                false => Gva(u64_at(entry, 0).unwrap_or_default()),
            }
        })
    }

    /// Reads a tracepoint, without the data that is stored elsewhere.
    pub(super) fn read(
        &self,
        view: MemoryView<'_>,
        owner: &TableOwner,
        address: Gva,
    ) -> Result<Tracepoint, TracepointError> {
        let broken = |source| TracepointError::Structure {
            owner: owner.clone(),
            source,
        };
        let structure = Structure::at(view, "tracepoint", address).map_err(broken)?;
        let name = structure
            .string(self.name, "name of a tracepoint", MAX_NAME)
            .map_err(broken)?
            .unwrap_or_default();
        // The characters of a C name.
        let fits = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        let name = String::from_utf8(name)
            .ok()
            .filter(|name| !name.is_empty() && name.len() < MAX_NAME)
            .filter(|name| name.bytes().all(|byte| fits(&byte)));
        let optional = |member: Option<u64>| match member {
            Some(offset) => structure.pointer(offset).map_err(broken),
            None => Ok(None),
        };
        Ok(Tracepoint {
            name: name.ok_or_else(|| self.bad_name(&structure, owner))?,
            system: None,
            class: None,
            module: owner.module().map(str::to_owned),
            address,
            key: structure.member(self.key),
            funcs: structure.member(self.funcs),
            listening: optional(Some(self.funcs))?.is_some(),
            has_registration: self.has_registration(&structure).map_err(broken)?,
            sites: Vec::new(),
            iterator: optional(self.iterator)?,
            call_trampoline: optional(self.call_trampoline)?,
            parameters: None,
        })
    }

    fn bad_name(&self, structure: &Structure<'_>, owner: &TableOwner) -> TracepointError {
        let name = structure.string(self.name, "name of a tracepoint", MAX_NAME);
        let name = name.ok().flatten().unwrap_or_default();
        TracepointError::BadName {
            owner: owner.clone(),
            address: structure.address(),
            found: String::from_utf8_lossy(&name).into_owned(),
        }
    }

    fn has_registration(&self, tracepoint: &Structure<'_>) -> Result<bool, StructureError> {
        let function = match self.registration {
            Registration::Inside(offset) => tracepoint.pointer(offset)?,
            Registration::Behind { pointer, regfunc } => {
                match tracepoint.follow(pointer, "tracepoint_ext")? {
                    Some(behind) => behind.pointer(regfunc)?,
                    None => None,
                }
            }
        };
        Ok(function.is_some())
    }
}
