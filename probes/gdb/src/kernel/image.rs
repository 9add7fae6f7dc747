//! The running kernel as a file for the debugger: an executable without contents, with sections
//! where the kernel and its modules are, their symbols, the call frames of their functions, and the
//! kernel's types and arguments.
//!
//! It is made of what the guest's memory tells, so it fits a kernel of which nobody has a file.
//! All addresses are those of the running kernel.

use std::ops::Range;

use introspect::kernel::loaded_modules::LoadedModules;
use introspect::kernel::module_memory::RangeKind;
use introspect::kernel::modules::Module;
use introspect::kernel::symbols::{Symbol, Symbols};
use introspect::stack::orc::OrcCopy;
use object::Endianness;
use object::build::Error;
use object::build::elf::{Builder, Header, SectionData, SectionId};
use object::elf;

use super::call_frames::CallFrames;
use super::code_frames;
use super::text::Text;
use super::types::Sections;

/// The section of a range of addresses.
struct Home {
    range: Range<u64>,
    section: SectionId,
    is_text: bool,
}

/// The sections, which need not be in order.
#[derive(Default)]
struct Homes(Vec<Home>);

impl Homes {
    /// Adds a section without contents.
    fn add(&mut self, file: &mut Builder<'_>, name: &str, range: Range<u64>, is_text: bool) {
        let Some(size) = range.end.checked_sub(range.start).filter(|size| *size > 0) else {
            return;
        };
        let section = file.sections.add();
        section.name = name.to_owned().into_bytes().into();
        section.sh_type = elf::SHT_NOBITS;
        let flags = match is_text {
            true => elf::SHF_EXECINSTR,
            false => elf::SHF_WRITE,
        };
        section.sh_flags = (elf::SHF_ALLOC | flags).into();
        section.sh_addr = range.start;
        section.sh_size = size;
        section.sh_addralign = 1;
        section.data = SectionData::UninitializedData(size);
        self.0.push(Home {
            range,
            section: section.id(),
            is_text,
        });
    }

    fn of(&self, address: u64) -> Option<&Home> {
        self.0.iter().find(|home| home.range.contains(&address))
    }
}

/// The most bytes of a function that are searched for its frames.
const LONGEST: u64 = 1 << 20;
/// The number of records found in code at which the search ends. A distribution's kernel has half a
/// million.
const MOST_FOUND: usize = 1 << 21;
/// The code by which functions change to a CPU's interrupt stack: `mov %rsp,(%r11)` and
/// `mov %r11,%rsp` (arch/x86/include/asm/irq_stack.h, since Linux 5.12).
const SWITCH: [u8; 6] = [0x49, 0x89, 0x23, 0x4c, 0x89, 0xdc];
/// The functions that did so before.
const SWITCHERS: [&str; 3] = [
    "asm_call_on_stack",
    "asm_call_irq_on_stack",
    "asm_call_sysvec_on_stack",
];

/// Returns the ascending addresses at which the kernel changes to another stack.
pub(super) fn switches(symbols: &Symbols, text: &Text) -> Vec<u64> {
    let named = SWITCHERS.iter().filter_map(|name| symbols.address_of(name));
    let mut found: Vec<u64> = named.chain(text.find(&SWITCH)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Makes the file. `tables` are the unwind information of the kernel and of its modules; without
/// any, the frames of the kernel's functions are found in its `text`. `switches` are the places of
/// [`switches`]. `types` are none for a kernel without them.
///
/// # Errors
/// If it becomes too large.
pub(super) fn make(
    symbols: &Symbols,
    modules: &[Module],
    loaded: &LoadedModules,
    tables: &[OrcCopy],
    text: &Text,
    switches: &[u64],
    types: Option<Sections>,
) -> Result<Vec<u8>, Error> {
    let mut file = Builder::new(Endianness::Little, true);
    file.header = Header {
        e_type: elf::ET_EXEC,
        e_machine: elf::EM_X86_64,
        ..Header::default()
    };
    let mut homes = Homes::default();
    let address = |name: &str| symbols.address_of(name);
    let start = address("_stext").or_else(|| address("_text"));
    let (end, last) = (address("_etext"), address("_end"));
    if let (Some(start), Some(end)) = (start, end) {
        homes.add(&mut file, ".text", start..end, true);
        homes.add(&mut file, ".data", end..last.unwrap_or(end), false);
    }
    for module in modules {
        for range in &module.ranges {
            let is_text = matches!(range.kind, RangeKind::Text | RangeKind::InitText);
            let kind = if is_text { ".text" } else { ".data" };
            let name = format!("{kind}.{}", module.name);
            homes.add(&mut file, &name, range.addresses.clone(), is_text);
        }
    }
    let mut all: Vec<Symbol<'_>> = symbols.iter().collect();
    for module in loaded.modules() {
        all.extend(module.symbols().iter());
    }
    let sizes = sizes(symbols, loaded);
    for symbol in all.into_iter().filter(|symbol| !symbol.absolute) {
        let home = homes.of(symbol.address);
        let added = file.symbols.add();
        added.name = symbol.name.as_bytes().to_vec().into();
        match home {
            Some(home) => added.section = Some(home.section),
            None => added.st_shndx = elf::SHN_ABS,
        }
        let binding = match symbol.kind.is_ascii_uppercase() {
            true => elf::STB_GLOBAL,
            false => elf::STB_LOCAL,
        };
        let is_function = symbol.is_text() && home.is_none_or(|home| home.is_text);
        let kind = match is_function {
            true => elf::STT_FUNC,
            false => elf::STT_OBJECT,
        };
        added.set_st_info(binding, kind);
        added.st_value = symbol.address;
        let size = sizes.binary_search_by_key(&symbol.address, |(address, _)| *address);
        let size = size.ok().and_then(|at| sizes.get(at));
        added.st_size = size.filter(|_| is_function).map_or(0, |(_, size)| *size);
    }
    let types = types.unwrap_or_default();
    for (name, alignment, data) in [
        (
            ".debug_frame",
            8,
            frames_of(symbols, loaded, tables, text, switches),
        ),
        (".debug_info", 1, types.info),
        (".debug_abbrev", 1, types.abbreviations),
        (".debug_str", 1, types.strings),
        (".debug_loc", 1, types.places),
    ] {
        if data.is_empty() {
            continue;
        }
        let section = file.sections.add();
        section.name = name.into();
        section.sh_type = elf::SHT_PROGBITS;
        section.sh_addralign = alignment;
        section.data = SectionData::Data(data.into());
    }
    for (name, data) in [
        (".symtab", SectionData::Symbol),
        (".strtab", SectionData::String),
        (".shstrtab", SectionData::SectionString),
    ] {
        let section = file.sections.add();
        section.name = name.into();
        section.data = data;
    }
    let mut out = Vec::new();
    file.write(&mut out)?;
    Ok(out)
}

/// Returns the addresses and sizes of all functions, ascending.
fn sizes(symbols: &Symbols, loaded: &LoadedModules) -> Vec<(u64, u64)> {
    let own = functions(symbols.text_functions());
    let modules = loaded.modules().iter();
    let modules = modules.flat_map(|module| functions(module.text_functions()));
    let mut all: Vec<_> = own.into_iter().chain(modules).collect();
    all.sort_unstable();
    all
}

/// Returns the addresses and sizes of functions, each place once.
fn functions<'a>(
    functions: impl Iterator<Item = introspect::kernel::symbols::Function<'a>>,
) -> Vec<(u64, u64)> {
    let mut all: Vec<_> = functions
        .map(|function| (function.symbol.address, function.size))
        .filter(|(_, size)| *size > 0)
        .collect();
    all.dedup_by_key(|(address, _)| *address);
    all
}

/// The first functions of tasks, which have no caller.
const FIRST: [&str; 2] = ["ret_from_fork", "ret_from_fork_asm"];

/// Returns the call frames of the functions of each table's owner, or of the kernel's functions if
/// there is no table.
fn frames_of(
    symbols: &Symbols,
    loaded: &LoadedModules,
    tables: &[OrcCopy],
    text: &Text,
    switches: &[u64],
) -> Vec<u8> {
    let mut frames = CallFrames::new();
    if tables.is_empty() {
        let named = FIRST.iter().filter_map(|name| symbols.address_of(name));
        let first: Vec<u64> = named.collect();
        let mut found = 0;
        for (start, size) in functions(symbols.text_functions()) {
            if found >= MOST_FOUND {
                break;
            }
            let code = text.at(start, size.min(LONGEST) as usize);
            let rows = match first.contains(&start) {
                true => vec![(start, None)],
                false => code_frames::rows(start, code),
            };
            // Of other functions, such as those of the boot, a debugger makes its own guess.
            if !code.is_empty() {
                found += rows.len();
                frames.add_found(start, size, &rows, switches);
            }
        }
    }
    for table in tables {
        let first = table.iter().next().map(|(start, _)| start);
        let module = first.and_then(|first| loaded.module_at(first));
        let functions = match module {
            Some(module) => functions(module.text_functions()),
            None => functions(symbols.text_functions()),
        };
        frames.add(functions.into_iter(), table, switches);
    }
    frames.into_section()
}
