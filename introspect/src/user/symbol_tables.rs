//! Reads the tables that name an object's functions: `.symtab`, `.dynsym`, and what `.gnu_debugdata` packs.

use object::LittleEndian;
use object::elf;
use object::read::elf::Sym;

use super::code_ranges::CodeRanges;
use super::debugdata;
use super::dynamic_table;
use super::lost::{Lost, LostReason, Part};
use super::object_file::{ObjectFile, Section};
use super::sparse_bytes::SparseBytes;
use super::symbols::{
    Binding, Builder, FunctionKind, FunctionSymbols, MAX_NAME, MAX_NAME_BYTES, MAX_SYMBOLS,
    RawFunction, SymbolTable,
};

/// Most bytes of a symbol table, in either class.
const MAX_TABLE_BYTES: u64 = MAX_SYMBOLS as u64 * 24;

/// What of the object can be named.
pub(super) fn read(object: &ObjectFile<'_>) -> FunctionSymbols {
    let mut builder = Builder::default();
    builder.lost.extend_from_slice(object.lost());
    let whole = full_table(object, &mut builder, SymbolTable::Full);
    if !whole {
        if let Some(unpacked) = debug_data(object, &mut builder) {
            add_debug_data(&unpacked, &mut builder);
        }
        dynamic_table(object, &mut builder);
    }
    builder.finish(&CodeRanges::of(object))
}

/// Unpacks `.gnu_debugdata`, if there is one.
fn debug_data(object: &ObjectFile<'_>, builder: &mut Builder) -> Option<Vec<u8>> {
    let section = object.section(".gnu_debugdata")?;
    let unpacked = object
        .section_bytes(section, debugdata::MAX_PACKED)
        .and_then(|packed| {
            debugdata::unpack(&packed)
                .map_err(|error| Lost::section(section, LostReason::Damaged(error.to_string())))
        });
    unpacked.map_err(|lost| builder.lost.push(lost)).ok()
}

fn add_debug_data(unpacked: &[u8], builder: &mut Builder) {
    let before = builder.lost.len();
    match ObjectFile::parse(&unpacked) {
        Ok(object) => {
            builder.lost.extend_from_slice(object.lost());
            full_table(&object, builder, SymbolTable::DebugData);
        }
        Err(error) => builder.lost.push(Lost {
            part: Part::SectionHeaders,
            reason: LostReason::Damaged(error.to_string()),
        }),
    }
    for lost in builder.lost.iter_mut().skip(before) {
        let part = std::mem::replace(&mut lost.part, Part::SectionHeaders);
        lost.part = Part::InDebugData(Box::new(part));
    }
}

/// Adds the functions of `.symtab`. Answers whether there is one, all of it.
fn full_table(object: &ObjectFile<'_>, builder: &mut Builder, from: SymbolTable) -> bool {
    let mut sections = object.sections().iter();
    let Some(section) = sections.find(|section| section.kind == elf::SHT_SYMTAB) else {
        return false;
    };
    section_table(object, section, builder, from)
}

/// Adds the exported functions: by the sections if these are there, else as the dynamic linker finds them.
fn dynamic_table(object: &ObjectFile<'_>, builder: &mut Builder) {
    let mut sections = object.sections().iter();
    if let Some(section) = sections.find(|section| section.kind == elf::SHT_DYNSYM) {
        section_table(object, section, builder, SymbolTable::Dynamic);
        return;
    }
    let found = match dynamic_table::find(object) {
        Ok(Some(found)) => found,
        Ok(None) => return,
        Err(reason) => {
            let part = Part::DynamicTable;
            builder.lost.push(Lost { part, reason });
            return;
        }
    };
    let lost = |name: &str| {
        let part = Part::Section(name.to_owned());
        move |reason| Lost { part, reason }
    };
    let size = found.count.saturating_mul(symbol_size(object) as u64);
    let read = LostReason::bounded(size, MAX_TABLE_BYTES)
        .and_then(|_| object.sparse_at(found.symbols, size))
        .map_err(lost(".dynsym"))
        .and_then(|symbols| {
            let most = found.strings_size.min(MAX_NAME_BYTES as u64);
            let names = object
                .sparse_at(found.strings, most)
                .map_err(lost(".dynstr"))?;
            Ok((symbols, names))
        });
    match read {
        Ok((symbols, names)) => {
            for (name, table) in [(".dynsym", &symbols), (".dynstr", &names)] {
                builder
                    .lost
                    .extend(LostReason::of_pages(table).map(lost(name)));
            }
            add(object, &symbols, &names, builder, SymbolTable::Dynamic);
        }
        Err(lost) => builder.lost.push(lost),
    }
}

/// Adds the functions of a symbol table that has a section. Answers whether all of it is there.
fn section_table(
    object: &ObjectFile<'_>,
    section: &Section,
    builder: &mut Builder,
    from: SymbolTable,
) -> bool {
    let before = builder.lost.len();
    let read = || {
        let lost = |reason| Lost::section(section, reason);
        let strings = object
            .sections()
            .get(section.link as usize)
            .ok_or_else(|| {
                let reason = format!(
                    "its names are in section {}, which does not exist",
                    section.link
                );
                lost(LostReason::Damaged(reason))
            })?;
        if section.entry_size != symbol_size(object) as u64 {
            let reason = format!("symbols of {} bytes each", section.entry_size);
            return Err(lost(LostReason::Damaged(reason)));
        }
        let symbols = object
            .sparse_section(section, MAX_TABLE_BYTES)
            .map_err(lost)?;
        let names = object
            .sparse_section(strings, MAX_NAME_BYTES as u64)
            .map_err(|reason| Lost::section(strings, reason))?;
        let symbols_lost = LostReason::of_pages(&symbols).map(lost);
        let names_lost = LostReason::of_pages(&names).map(|reason| Lost::section(strings, reason));
        Ok((symbols, names, symbols_lost.into_iter().chain(names_lost)))
    };
    match read() {
        Ok((symbols, names, lost)) => {
            builder.lost.extend(lost);
            add(object, &symbols, &names, builder, from);
        }
        Err(lost) => builder.lost.push(lost),
    }
    builder.lost.len() == before
}

fn symbol_size(object: &ObjectFile<'_>) -> usize {
    match object.is_64_bit() {
        true => size_of::<elf::Sym64<LittleEndian>>(),
        false => size_of::<elf::Sym32<LittleEndian>>(),
    }
}

fn add(
    object: &ObjectFile<'_>,
    symbols: &SparseBytes,
    names: &SparseBytes,
    builder: &mut Builder,
    from: SymbolTable,
) {
    let before = builder.len();
    let full = match object.is_64_bit() {
        true => add_each::<elf::Sym64<LittleEndian>>(object, symbols, names, builder),
        false => add_each::<elf::Sym32<LittleEndian>>(object, symbols, names, builder),
    };
    if let Err(reason) = full {
        let name = match from {
            SymbolTable::Full | SymbolTable::DebugData => ".strtab",
            SymbolTable::Dynamic => ".dynstr",
        };
        let part = Part::Section(name.to_owned());
        builder.lost.push(Lost { part, reason });
    }
    if builder.len() > before {
        builder.tables.push(from);
    }
}

fn add_each<S: Sym<Endian = LittleEndian>>(
    object: &ObjectFile<'_>,
    symbols: &SparseBytes,
    names: &SparseBytes,
    builder: &mut Builder,
) -> Result<(), LostReason> {
    let size = size_of::<S>();
    let code = CodeRanges::of(object);
    let mut wasted = 0usize;
    for index in 0..symbols.len() / size {
        let bytes = symbols.get(index * size..(index + 1) * size);
        let Some(Ok((symbol, _))) = bytes.map(object::pod::from_bytes::<S>) else {
            continue;
        };
        let Some(function) = function(symbol, &code) else {
            continue;
        };
        let name = names.c_string(symbol.st_name(LittleEndian) as usize, MAX_NAME);
        let name = match name {
            Ok([]) => continue,
            Ok(name) => name,
            Err(looked_at) => {
                // A table without NULs would be looked through again for every symbol.
                wasted = wasted.saturating_add(looked_at);
                if wasted > MAX_NAME_BYTES {
                    return Err(LostReason::Damaged("its names do not end".to_owned()));
                }
                continue;
            }
        };
        if !builder.push(name, function) {
            return Err(LostReason::TooMuch {
                found: (symbols.len() / size) as u64,
                most: builder.len() as u64,
            });
        }
    }
    Ok(())
}

/// What a symbol says, if it is a function of this object.
fn function<S: Sym<Endian = LittleEndian>>(symbol: &S, code: &CodeRanges) -> Option<RawFunction> {
    if symbol.st_shndx(LittleEndian) == elf::SHN_UNDEF {
        return None;
    }
    let address = symbol.st_value(LittleEndian).into();
    let binding = Binding::of(symbol.st_bind());
    let kind = match symbol.st_type() {
        elf::STT_FUNC => FunctionKind::Function,
        elf::STT_GNU_IFUNC => FunctionKind::Indirect,
        elf::STT_NOTYPE if binding != Binding::Local && code.end_of(address).is_some() => {
            FunctionKind::Label
        }
        _ => return None,
    };
    Some(RawFunction {
        address,
        size: symbol.st_size(LittleEndian).into(),
        kind,
        binding,
    })
}
