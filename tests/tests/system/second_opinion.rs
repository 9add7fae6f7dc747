//! Reads of a kernel's image alone, compared with other projects' programs on the same image: every
//! symbol, every member of every struct, every record of unwind information, and its tracepoints.
//! No KVM is needed; the network only the first time.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs;

use guest::Terminal;
use guest::build::debian;
use introspect::kernel::btf::Btf;
use introspect::kernel::image::KernelImage;
use introspect::kernel::jump_label::JumpLabelLayout;
use introspect::kernel::tracepoint::{TracepointLayout, parameters};
use introspect::stack::orc::{OrcCopy, OrcError};
use introspect::stack::orc_versions::{OrcEntry, OrcFormat, OrcType};
use support::second_opinion::{DEBIAN_VERSIONS, Member, OtherKernel, Structures};
use support::{Kernel, data};
use vmm::boot::KernelFile;

/// The most differences that a failure lists.
const LISTED: usize = 10;

/// Ends the test if there are differences.
fn none_differ<T: Debug>(what: &str, differences: &[T]) {
    let first: Vec<String> = differences
        .iter()
        .take(LISTED)
        .map(|difference| format!("{difference:?}"))
        .collect();
    assert!(
        differences.is_empty(),
        "{what}: {} differ, the first of them:\n{}",
        differences.len(),
        first.join("\n")
    );
}

/// Returns the items that only one of two sorted lists has.
fn differences<T: Ord + Clone>(ours: &[T], theirs: &[T]) -> Vec<(&'static str, T)> {
    let (mut ours, mut theirs) = (ours.iter().peekable(), theirs.iter().peekable());
    let mut found = Vec::new();
    loop {
        match (ours.peek(), theirs.peek()) {
            (Some(our), Some(their)) if our == their => {
                ours.next();
                theirs.next();
            }
            (Some(our), Some(their)) if our > their => {
                found.push(("only theirs", (*their).clone()));
                theirs.next();
            }
            (Some(our), _) => {
                found.push(("only ours", (*our).clone()));
                ours.next();
            }
            (None, Some(their)) => {
                found.push(("only theirs", (*their).clone()));
                theirs.next();
            }
            (None, None) => return found,
        }
    }
}

/// Ends the test unless both lists are equal, in whatever order, and have at least `least` items.
fn same<T: Ord + Clone + Debug>(kernel: &str, mut ours: Vec<T>, mut theirs: Vec<T>, least: usize) {
    let (here, there) = (ours.len(), theirs.len());
    println!("{kernel}: {here} here, {there} there");
    ours.sort_unstable();
    theirs.sort_unstable();
    none_differ(kernel, &differences(&ours, &theirs));
    assert!(here >= least, "{kernel}: only {here}");
}

#[test]
fn every_symbol_is_what_kallsyms_finder_says() {
    for (kernel, least) in OtherKernel::all().iter().zip([80_000, 150_000, 15_000]) {
        let name = &kernel.name;
        let symbols = kernel.image.symbols();
        let symbols = symbols.unwrap_or_else(|e| panic!("{name}: {e}"));
        let ours = symbols
            .iter()
            .map(|symbol| (symbol.address, symbol.kind, symbol.name.to_owned()));
        same(name, ours.collect(), kernel.symbols(), least);
    }
}

/// Checks against the linker's own list, which includes the symbols that kallsyms omits.
#[test]
fn every_symbol_of_the_small_kernel_is_in_its_system_map() {
    let path = Kernel::small().path.with_file_name("System.map");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let listed: BTreeSet<(u64, &str)> = text
        .lines()
        .filter_map(|line| {
            let (value, rest) = line.split_once(' ')?;
            let (_, name) = rest.split_once(' ')?;
            Some((u64::from_str_radix(value, 16).ok()?, name))
        })
        .collect();
    let symbols = Kernel::small().image.symbols();
    let symbols = symbols.unwrap_or_else(|e| panic!("{e}"));
    let unlisted: Vec<_> = symbols
        .iter()
        .filter(|symbol| !listed.contains(&(symbol.address, symbol.name)))
        .collect();
    println!("{} symbols, {} in System.map", symbols.len(), listed.len());
    none_differ("System.map", &unlisted);
    assert!(symbols.len() >= 15_000);
    assert!(
        symbols.len() * 10 >= listed.len() * 8,
        "too many are missing"
    );
}

/// The offset and size of a member by both; `None` if it does not exist.
type Place = Option<(u64, u64)>;

/// Returns bit offset and size. Of a bitfield it returns the first alone, because one counts its
/// own bytes and the other those of its type.
fn compared(btf: &Btf, path: &str, theirs: Option<&Member>) -> (Place, Place) {
    let bitfield = theirs.is_some_and(|member| member.bitfield);
    let size = |size| if bitfield { 0 } else { size };
    let ours = btf.member(path).ok();
    (
        ours.map(|member| (member.bit_offset, size(member.size))),
        theirs.map(|member| (member.bit_offset, size(member.size))),
    )
}

#[test]
fn every_member_of_every_struct_stands_where_pahole_says() {
    let used = paths_in_sources();
    // The members that all kernels together have: each kernel has members that others lack.
    let mut in_any = BTreeSet::new();
    let least = [(100_000, 125), (110_000, 125), (35_000, 100)];
    for (kernel, (least, least_used)) in OtherKernel::all().iter().zip(least) {
        let name = &kernel.name;
        let btf = kernel.image.btf().unwrap_or_else(|e| panic!("{name}: {e}"));
        let structures = kernel.structures();
        let members = same_members(name, &btf, &structures);
        let there = same_paths(name, &btf, &structures, &used);
        println!(
            "{name}: {members} members of {} structs, {} with namesakes left out; of {} asked for by name {} are there",
            structures.len(),
            structures.namesakes().len(),
            used.len(),
            there.len(),
        );
        assert!(members >= least, "{name}: only {members}");
        assert!(there.len() >= least_used, "{name}: only {there:?}");
        assert!(structures.namesakes().len() < 20, "{name}");
        in_any.extend(there);
    }
    let nowhere: Vec<_> = used.difference(&in_any).collect();
    println!("in none of these kernels: {nowhere:?}");
    assert!(nowhere.len() * 4 <= used.len(), "too many: {nowhere:?}");
}

/// Compares all members of all structs, and their sizes. Returns the number of members.
fn same_members(name: &str, btf: &Btf, structures: &Structures) -> usize {
    let mut wrong = Vec::new();
    let mut count = 0;
    for (path, theirs) in structures.paths() {
        count += 1;
        let (ours, theirs) = compared(btf, &path, Some(theirs));
        if ours != theirs {
            wrong.push((path, ours, theirs));
        }
    }
    none_differ(&format!("{name}: (member, ours, theirs)"), &wrong);
    let sizes: Vec<_> = structures
        .sizes()
        .map(|(owner, size)| (owner, btf.size_of(owner), Some(size)))
        .collect();
    let wrong: Vec<_> = sizes
        .iter()
        .filter(|(_, ours, theirs)| ours != theirs)
        .collect();
    none_differ(&format!("{name}: (struct, our size, theirs)"), &wrong);
    assert!(sizes.len() * 10 > structures.len() * 9, "{}", sizes.len());
    count
}

/// Compares the members that this program requests by name: a member that one does not find, the
/// other must not find. Returns those that exist.
fn same_paths(
    name: &str,
    btf: &Btf,
    structures: &Structures,
    used: &BTreeSet<String>,
) -> Vec<String> {
    let (mut wrong, mut there) = (Vec::new(), Vec::new());
    for path in used {
        let owner = path.split('.').next().unwrap_or_default();
        assert!(
            !structures.namesakes().contains(owner),
            "{name}: {path} may be of several structs"
        );
        // Texts in the sources that only look like paths are of no struct.
        if !structures.has(owner) {
            continue;
        }
        let (ours, theirs) = compared(btf, path, structures.find(path));
        if ours != theirs {
            wrong.push((path, ours, theirs));
        }
        if ours.is_some() {
            there.push(path.clone());
        }
    }
    none_differ(&format!("{name}: (path, ours, theirs)"), &wrong);
    there
}

/// Returns every text in the sources of the readers that looks like the path of a member. Paths
/// that are assembled at run time are not found so, but are members of some struct and compared
/// with all others.
fn paths_in_sources() -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    let mut folders = vec![data::source("introspect/src")];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") && !name.contains("test") {
                let text = fs::read_to_string(&path);
                let text = text.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                let code = text.split("#[cfg(test)]\nmod tests").next();
                let words = code.unwrap_or_default().split('"').map(str::to_owned);
                paths.extend(words.filter(|word| is_member_path(word)));
            }
        }
    }
    paths
}

/// Returns whether a text is names of C with dots between them.
fn is_member_path(text: &str) -> bool {
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
            && name
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    text.contains('.') && text.split('.').all(is_name)
}

#[test]
fn every_orc_record_says_what_objtool_prints() {
    for (version, least) in DEBIAN_VERSIONS.into_iter().zip([300_000, 350_000]) {
        let kernel = OtherKernel::debian(version);
        let name = &kernel.name;
        let table = orc_of(&kernel).unwrap_or_else(|e| panic!("{name}: {e}"));
        // Until 6.3 a record has a flag beside its type for the end of the stack; since 6.4 that is
        // a type.
        let text = match version {
            "6.1" => text_with_end,
            _ => text_with_signal,
        };
        let ours = table
            .iter()
            .map(|(address, entry)| (address, entry.map_or("unknown".to_owned(), |e| text(&e))));
        same(name, ours.collect(), kernel.orc(), least);
    }
}

#[test]
fn a_kernel_without_orc_is_said_to_have_none() {
    let table = orc_of(&OtherKernel::small());
    let message = table.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(message.contains("orc"), "{message:?}");
}

fn orc_of(kernel: &OtherKernel) -> Result<OrcCopy, OrcError> {
    let (name, image) = (&kernel.name, &kernel.image);
    let btf = image.btf().unwrap_or_else(|e| panic!("{name}: {e}"));
    let symbols = image.symbols();
    let symbols = symbols.unwrap_or_else(|e| panic!("{name}: {e}"));
    let format = OrcFormat::of(Some(&btf), image.banner());
    let format = format.unwrap_or_else(|e| panic!("{name}: {e}"));
    OrcCopy::of_image(image, &symbols, format)
}

fn places(entry: &OrcEntry) -> String {
    format!(
        "sp:{} bp:{}",
        entry.sp.place(entry.sp_offset),
        entry.bp.place(entry.bp_offset)
    )
}

fn text_with_end(entry: &OrcEntry) -> String {
    let kind = match entry.kind {
        OrcType::Registers => "regs",
        OrcType::HardwareFrame => "regs (partial)",
        OrcType::Call | OrcType::EndOfStack | OrcType::Undefined => "call",
    };
    let end = u8::from(entry.kind == OrcType::EndOfStack);
    format!("{} type:{kind} end:{end}", places(entry))
}

fn text_with_signal(entry: &OrcEntry) -> String {
    let kind = match entry.kind {
        OrcType::Undefined => "(und)",
        OrcType::EndOfStack => "end",
        OrcType::Call => "call",
        OrcType::Registers => "regs",
        OrcType::HardwareFrame => "regs (partial)",
    };
    format!(
        "type:{kind} {} signal:{}",
        places(entry),
        u8::from(entry.signal)
    )
}

/// Checks kernels that lack properties which the small and the rich kernel may share: 6.12 has
/// other structures.
#[test]
fn debians_kernels_tell_of_their_tracepoints() {
    for version in DEBIAN_VERSIONS {
        let OtherKernel { name, image, .. } = &OtherKernel::debian(version);
        let btf = image.btf().unwrap_or_else(|e| panic!("{name}: {e}"));
        let symbols = image.symbols().unwrap_or_else(|e| panic!("{name}: {e}"));
        let layout = TracepointLayout::new(&btf, &symbols);
        let layout = layout.unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(layout.funcs_offset().is_some(), "{name}");
        JumpLabelLayout::new(&btf, &symbols).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (mut all, mut untold) = (0, Vec::new());
        // `__tracepoint_probe_module_cb` is a function.
        for symbol in symbols.iter().filter(|symbol| !symbol.is_text()) {
            if let Some(event) = symbol.name.strip_prefix("__tracepoint_") {
                all += 1;
                untold.extend(parameters(&btf, event).is_none().then_some(event));
            }
        }
        println!("{name}: {all} tracepoints, parameters of {untold:?} are not told");
        assert!(all > 500 && untold.is_empty(), "{name}: {untold:?}");
    }
}

#[test]
fn debians_bzimage_unpacks_to_a_kernel_with_names_and_types() {
    let cache = support::host::cache();
    let kernel = debian::cloud_kernel(&cache, None, &Terminal::new());
    let path = kernel.unwrap_or_else(|e| panic!("{e}")).image;
    let file = KernelFile::open(&path).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(file.elf().get(..4), Some(&b"\x7fELF"[..]));
    let image = KernelImage::parse(file.shared_elf()).unwrap_or_else(|e| panic!("{e}"));
    let symbols = image.symbols().unwrap_or_else(|e| panic!("{e}"));
    for name in [
        "vfs_read",
        "vfs_write",
        "panic",
        "entry_SYSCALL_64",
        "init_top_pgt",
    ] {
        let address = symbols.address_of(name);
        assert!(
            address.is_some_and(|a| a > 0xffff_ffff_8000_0000),
            "{name}: {address:x?}"
        );
    }
    let btf = image.btf().unwrap_or_else(|e| panic!("{e}"));
    let read = btf
        .func_proto_args("vfs_read")
        .unwrap_or_else(|e| panic!("{e}"));
    let names: Vec<_> = read.parameters.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["file", "buf", "count", "pos"]);
    let tasks = introspect::kernel::task::TaskLayout::new(&btf, &symbols);
    assert!(tasks.is_ok(), "where task_struct has pid: {tasks:?}");
}
