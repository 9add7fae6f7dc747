//! Tests over a real object: the test program itself, as the linker wrote it and the kernel of the
//! host loaded it.
#![allow(clippy::unwrap_used)]

use super::demangle::demangle;
use super::file_bytes::{FileBytes, FileMapping};
use super::load_base::LoadBase;
use super::object_file::ObjectFile;
use super::symbols::{Function, FunctionSymbols, SymbolTable};
use super::symfs::HostFile;
use crate::Gva;

#[inline(never)]
fn landmark(value: u64) -> u64 {
    std::hint::black_box(value).wrapping_mul(3)
}

/// Returns the symbol of the function above.
fn landmark_symbol(symbols: &FunctionSymbols) -> Function<'_> {
    let named = |f: &Function<'_>| demangle(f.name).ends_with("own_executable_tests::landmark");
    symbols.iter().find(named).unwrap()
}

/// Returns the mappings of the program's own file, from /proc/self/maps.
fn own_mappings() -> Vec<FileMapping> {
    let path = std::env::current_exe().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let own = maps
        .lines()
        .filter(|line| line.ends_with(path.to_str().unwrap()));
    own.map(|line| {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next().unwrap().split_once('-').unwrap();
        let executable = fields.next().unwrap().contains('x');
        FileMapping {
            start: Gva(number(start)),
            end: Gva(number(end)),
            file_offset: number(fields.next().unwrap()),
            executable,
        }
    })
    .collect()
}

#[test]
fn a_loaded_program_names_its_own_functions() {
    let file = HostFile::open(&std::env::current_exe().unwrap()).unwrap();
    let object = ObjectFile::parse(&file).unwrap();
    let symbols = FunctionSymbols::read(&object);
    assert_eq!(symbols.tables(), [SymbolTable::Full]);
    assert_eq!(symbols.lost(), []);
    let mappings = own_mappings();
    let base_of = |address: u64| {
        let holds = |mapping: &&FileMapping| mapping.file_offset_of(Gva(address)).is_some();
        let mapping = mappings.iter().find(holds).unwrap();
        LoadBase::find(object.segments(), mapping, Gva(address)).unwrap()
    };
    let loaded = landmark as fn(u64) -> u64 as *const () as u64;
    let base = base_of(loaded);
    let linked = landmark_symbol(&symbols);
    assert_eq!(base.va_of(linked.address), Gva(loaded));
    let inside = base.address_in_file(Gva(loaded + 1));
    assert_eq!(symbols.resolve(inside), Some((linked, 1)));
    assert_eq!(symbols.find(linked.name), Some(linked));
    // A mapping of data leads to the same base.
    static CONSTANT: [u64; 4] = [1, 2, 3, 4];
    assert_eq!(
        base_of(std::hint::black_box(CONSTANT.as_ptr()) as u64),
        base
    );
    let this = a_loaded_program_names_its_own_functions as fn() as *const () as u64;
    let (function, _) = symbols.resolve(base.address_in_file(Gva(this))).unwrap();
    let shown = demangle(function.name);
    assert!(
        shown.ends_with("::a_loaded_program_names_its_own_functions"),
        "{shown}"
    );
}

#[test]
fn the_code_at_a_symbol_is_read_from_the_file() {
    let file = HostFile::open(&std::env::current_exe().unwrap()).unwrap();
    let object = ObjectFile::parse(&file).unwrap();
    let symbols = FunctionSymbols::read(&object);
    let landmark = landmark_symbol(&symbols);
    let (offset, left) = object.file_offset_of(landmark.address).unwrap();
    assert!(left >= landmark.size && landmark.size > 0);
    let mut code = vec![0; landmark.size as usize];
    file.read_at(offset, &mut code).unwrap();
    assert!(code.contains(&0xc3), "a ret in {code:02x?}");
}
