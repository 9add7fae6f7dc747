//! Reads the tables that name an object's functions: `.symtab`, `.dynsym`, and those packed into
//! `.gnu_debugdata`.

use std::collections::{BTreeSet, HashMap};

use object::LittleEndian;
use object::elf;
use object::read::elf::Sym;

use super::code_ranges::CodeRanges;
use super::debugdata;
use super::dynamic_table;
use super::lost::{LostPart, LostReason, Part};
use super::object_file::{ObjectFile, Section};
use super::sparse_bytes::SparseBytes;
use super::symbols::{
    Binding, Builder, FunctionKind, FunctionSymbols, MAX_NAME, MAX_NAME_BYTES, MAX_SYMBOLS,
    RawFunction, SymbolTable,
};

/// The maximum size of a symbol table in bytes, in either class.
const MAX_TABLE_BYTES: u64 = MAX_SYMBOLS as u64 * 24;

/// Reads the functions of the object that have names.
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
                .map_err(|error| LostPart::section(section, LostReason::Damaged(error.to_string())))
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
        Err(error) => builder.lost.push(LostPart {
            part: Part::SectionHeaders,
            reason: LostReason::Damaged(error.to_string()),
        }),
    }
    for lost in builder.lost.iter_mut().skip(before) {
        let part = std::mem::replace(&mut lost.part, Part::SectionHeaders);
        lost.part = Part::InDebugData(Box::new(part));
    }
}

/// Adds the functions of `.symtab`. Returns whether the table exists and is complete.
fn full_table(object: &ObjectFile<'_>, builder: &mut Builder, from: SymbolTable) -> bool {
    let mut sections = object.sections().iter();
    let section = sections.find(|section| section.kind == elf::SHT_SYMTAB);
    section.is_some_and(|section| add(object, by_section(object, section), builder, from))
}

/// Adds the exported functions, by the sections if available, else as the dynamic linker finds
/// them.
fn dynamic_table(object: &ObjectFile<'_>, builder: &mut Builder) {
    let mut sections = object.sections().iter();
    let section = sections.find(|section| section.kind == elf::SHT_DYNSYM);
    let found = match section {
        Some(section) => by_section(object, section).map(Some),
        None => by_dynamic_table(object),
    };
    if let Some(found) = found.transpose() {
        add(object, found, builder, SymbolTable::Dynamic);
    }
}

/// Returns the link-time addresses of the functions and variables called `names`, as far as the
/// tables are available. Of several symbols of one name, the exported one is used. Without an
/// exported one, none is.
pub(super) fn addresses(object: &ObjectFile<'_>, names: &BTreeSet<&str>) -> HashMap<String, u64> {
    let mut found = HashMap::new();
    for kind in [elf::SHT_SYMTAB, elf::SHT_DYNSYM] {
        let mut sections = object.sections().iter();
        let section = sections.find(|section| section.kind == kind);
        let Some(Ok((symbols, strings))) = section.map(|section| by_section(object, section))
        else {
            continue;
        };
        match object.is_64_bit() {
            true => note::<elf::Sym64<LittleEndian>>(&symbols, &strings, names, &mut found),
            false => note::<elf::Sym32<LittleEndian>>(&symbols, &strings, names, &mut found),
        }
    }
    let known = found.into_iter();
    known
        .filter_map(|(name, (_, address))| Some((name, address?)))
        .collect()
}

/// Notes the addresses of the symbols of a table that have one of the `names`, and whether they are
/// exported.
fn note<S: Sym<Endian = LittleEndian>>(
    symbols: &Table,
    strings: &Table,
    names: &BTreeSet<&str>,
    found: &mut HashMap<String, (bool, Option<u64>)>,
) {
    let size = size_of::<S>();
    let mut wasted = 0usize;
    for index in 0..symbols.bytes.len() / size {
        let bytes = symbols.bytes.get(index * size..(index + 1) * size);
        let Some(Ok((symbol, _))) = bytes.map(object::pod::from_bytes::<S>) else {
            continue;
        };
        let is_wanted = matches!(
            symbol.st_type(),
            elf::STT_NOTYPE | elf::STT_OBJECT | elf::STT_FUNC | elf::STT_COMMON
        );
        if !is_wanted || symbol.st_shndx(LittleEndian) == elf::SHN_UNDEF {
            continue;
        }
        let name = strings
            .bytes
            .c_string(symbol.st_name(LittleEndian) as usize, MAX_NAME);
        let Ok(name) = name.map_err(|looked_at| wasted = wasted.saturating_add(looked_at)) else {
            if wasted > MAX_NAME_BYTES {
                return;
            }
            continue;
        };
        let name = std::str::from_utf8(name)
            .ok()
            .filter(|name| names.contains(name));
        let Some(name) = name else { continue };
        let address = Some(symbol.st_value(LittleEndian).into());
        let exported = symbol.st_bind() != elf::STB_LOCAL;
        let known = found.entry(name.to_owned()).or_insert((exported, address));
        match (known.0, exported) {
            (false, true) => *known = (true, address),
            (was, is) if was == is && known.1 != address => known.1 = None,
            _ => {}
        }
    }
}

/// A table as far as it is available, and its name for reports.
struct Table {
    bytes: SparseBytes,
    part: Part,
}

impl Table {
    fn new(part: Part, read: Result<SparseBytes, LostReason>) -> Result<Self, LostPart> {
        match read {
            Ok(bytes) => Ok(Self { bytes, part }),
            Err(reason) => Err(LostPart { part, reason }),
        }
    }

    fn lost(&self) -> Option<LostPart> {
        let part = self.part.clone();
        LostReason::of_pages(&self.bytes).map(|reason| LostPart { part, reason })
    }
}

/// Reads a symbol table that has a section, and its names.
fn by_section(object: &ObjectFile<'_>, section: &Section) -> Result<(Table, Table), LostPart> {
    let damaged = |reason| LostPart::section(section, LostReason::Damaged(reason));
    let strings = object
        .sections()
        .get(section.link as usize)
        .ok_or_else(|| {
            damaged(format!(
                "its names are in section {}, which does not exist",
                section.link
            ))
        })?;
    if section.entry_size != symbol_size(object) as u64 {
        let reason = format!("symbols of {} bytes each", section.entry_size);
        return Err(damaged(reason));
    }
    let symbols = object.sparse_section(section, MAX_TABLE_BYTES);
    let symbols = Table::new(Part::of(section), symbols)?;
    let names = object.sparse_section(strings, MAX_NAME_BYTES as u64);
    let names = Table::new(Part::of(strings), names)?;
    Ok((symbols, names))
}

/// Reads the dynamic linker's symbol table and its names. Returns `None` if the object is linked
/// statically.
fn by_dynamic_table(object: &ObjectFile<'_>) -> Result<Option<(Table, Table)>, LostPart> {
    let found = dynamic_table::find(object).map_err(|reason| LostPart {
        part: Part::DynamicTable,
        reason,
    })?;
    let Some(found) = found else { return Ok(None) };
    let size = found.count.saturating_mul(symbol_size(object) as u64);
    let symbols = LostReason::bounded(size, MAX_TABLE_BYTES)
        .and_then(|_| object.sparse_at(found.symbols, size));
    let symbols = Table::new(Part::Section(".dynsym".to_owned()), symbols)?;
    let most = found.strings_size.min(MAX_NAME_BYTES as u64);
    let names = object.sparse_at(found.strings, most);
    let names = Table::new(Part::Section(".dynstr".to_owned()), names)?;
    Ok(Some((symbols, names)))
}

fn symbol_size(object: &ObjectFile<'_>) -> usize {
    match object.is_64_bit() {
        true => size_of::<elf::Sym64<LittleEndian>>(),
        false => size_of::<elf::Sym32<LittleEndian>>(),
    }
}

/// Adds the functions of a symbol table. Returns whether all of it and of its names is available.
fn add(
    object: &ObjectFile<'_>,
    found: Result<(Table, Table), LostPart>,
    builder: &mut Builder,
    from: SymbolTable,
) -> bool {
    let (symbols, names) = match found {
        Ok(tables) => tables,
        Err(lost) => {
            builder.lost.push(lost);
            return false;
        }
    };
    let (functions_before, lost_before) = (builder.len(), builder.lost.len());
    let lost = [&symbols, &names].into_iter().filter_map(Table::lost);
    builder.lost.extend(lost);
    let full = match object.is_64_bit() {
        true => add_each::<elf::Sym64<LittleEndian>>(object, &symbols.bytes, &names.bytes, builder),
        false => {
            add_each::<elf::Sym32<LittleEndian>>(object, &symbols.bytes, &names.bytes, builder)
        }
    };
    if let Err(reason) = full {
        let part = names.part;
        builder.lost.push(LostPart { part, reason });
    }
    if builder.len() > functions_before {
        builder.tables.push(from);
    }
    builder.lost.len() == lost_before
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
                // A table without NULs would be searched again for every symbol.
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

/// Converts a symbol, if it is a function of this object.
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
