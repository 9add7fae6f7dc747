//! Tests of the symbol table over hand-made objects.
#![allow(clippy::unwrap_used)]

use std::io::Write;

use object::elf::{
    STB_GLOBAL, STB_LOCAL, STB_WEAK, STT_FUNC, STT_GNU_IFUNC, STT_NOTYPE, STT_OBJECT,
};
use proptest::prelude::*;

use super::file_bytes::{FileBytes, Missing, MissingCause};
use super::lost::LostPart;
use super::object_file::ObjectFile;
use super::symbols::{FunctionSymbols, SymbolTable};
use super::test_object::{TEXT, TEXT_SIZE, TestObject, TestSymbol, function};
use crate::test_says::assert_says;

fn names(symbols: &FunctionSymbols) -> Vec<&str> {
    symbols.iter().map(|function| function.name).collect()
}

fn read(object: &TestObject) -> FunctionSymbols {
    let bytes = object.bytes();
    FunctionSymbols::read(&ObjectFile::parse(&bytes).unwrap())
}

fn texts(lost: &[LostPart]) -> Vec<String> {
    lost.iter().map(ToString::to_string).collect()
}

/// Returns the offset of the header of a section in a 64-bit object.
fn header_of(bytes: &[u8], section: &str) -> usize {
    let file = bytes.to_vec();
    let object = ObjectFile::parse(&file).unwrap();
    let index = object.sections().iter().position(|s| s.name == section);
    let headers = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
    headers + 64 * index.unwrap()
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let options = lzma_rust2::XzOptions::with_preset(1);
    let mut writer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

/// Bytes with a missing range.
struct Holed(Vec<u8>, std::ops::Range<u64>);

impl FileBytes for Holed {
    fn size(&self) -> u64 {
        self.0.size()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        let length = buf.len() as u64;
        if offset < self.1.end && offset + length > self.1.start {
            let cause = MissingCause::NotInMemory;
            return Err(Missing {
                offset,
                length,
                cause,
            });
        }
        self.0.read_at(offset, buf)
    }
}

/// Returns the names that resolve() finds for addresses of `object`, relative to [`TEXT`].
fn resolved(object: &TestObject, offsets: &[u64]) -> Vec<Option<(String, u64)>> {
    let symbols = read(object);
    let resolve = |offset| symbols.resolve(TEXT + offset);
    let found = offsets.iter().map(|offset| resolve(*offset));
    found
        .map(|found| found.map(|(f, offset)| (f.name.to_owned(), offset)))
        .collect()
}

#[test]
fn the_shown_name_of_several_is_the_one_people_use() {
    let at = |name, binding| function(name, 0, binding);
    for (aliases, shown) in [
        (
            vec![
                at("__read", STB_GLOBAL),
                at("read", STB_WEAK),
                at("__GI_read", STB_LOCAL),
            ],
            "read",
        ),
        (
            vec![at("_IO_puts", STB_GLOBAL), at("puts", STB_WEAK)],
            "puts",
        ),
        (
            vec![
                at("static_one", STB_LOCAL),
                at("exported_with_long_name", STB_GLOBAL),
            ],
            "exported_with_long_name",
        ),
        (
            vec![at("fputs_unlocked", STB_GLOBAL), at("fputs", STB_GLOBAL)],
            "fputs",
        ),
        (
            vec![at("b", STB_WEAK), at("a", STB_WEAK), at("c", STB_GLOBAL)],
            "c",
        ),
        (vec![at("b", STB_WEAK), at("a", STB_WEAK)], "a"),
        (
            vec![
                ("label", STT_NOTYPE, STB_GLOBAL, TEXT, 0),
                at("_function", STB_LOCAL),
            ],
            "_function",
        ),
    ] {
        let symbols = read(&TestObject::library().full(&aliases));
        let (found, _) = symbols.resolve(TEXT + 1).unwrap();
        assert_eq!(found.name, shown);
        for (name, ..) in &aliases {
            assert_eq!(
                symbols.find(name).map(|f| f.address),
                Some(TEXT),
                "{name} is found too"
            );
        }
    }
}

#[test]
fn addresses_resolve_to_the_function_they_lie_in() {
    let object = TestObject::library().full(&[
        ("unsized", STT_FUNC, STB_LOCAL, TEXT + 0x10, 0),
        ("sized", STT_FUNC, STB_GLOBAL, TEXT + 0x20, 8),
        ("outer", STT_FUNC, STB_GLOBAL, TEXT + 0x30, 0x40),
        ("inner", STT_FUNC, STB_LOCAL, TEXT + 0x38, 8),
        ("inner_label", STT_NOTYPE, STB_GLOBAL, TEXT + 0x50, 0),
        ("indirect", STT_GNU_IFUNC, STB_GLOBAL, TEXT + 0x80, 8),
        ("_start", STT_NOTYPE, STB_GLOBAL, TEXT + 0x90, 0),
        ("local_label", STT_NOTYPE, STB_LOCAL, TEXT + 0x98, 0),
        ("last", STT_FUNC, STB_GLOBAL, TEXT + 0xf0, 0),
        ("data", STT_OBJECT, STB_GLOBAL, TEXT + 0xa0, 8),
        ("_etext", STT_NOTYPE, STB_GLOBAL, TEXT + TEXT_SIZE, 0),
        ("imported@@LIB_2", STT_FUNC, STB_GLOBAL, 0, 0),
    ]);
    let expected = [
        (0x00, None),
        (0x10, Some(("unsized", 0))),
        (0x1f, Some(("unsized", 0xf))),
        (0x27, Some(("sized", 7))),
        (0x28, None),
        (0x37, Some(("outer", 7))),
        (0x38, Some(("inner", 0))),
        (0x40, Some(("outer", 0x10))),
        (0x54, Some(("outer", 0x24))),
        (0x70, None),
        (0x87, Some(("indirect", 7))),
        (0x88, None),
        (0xa0, Some(("_start", 0x10))),
        (0xff, Some(("last", 0xf))),
        (0x100, None),
        (u64::MAX - TEXT, None),
    ];
    let offsets = expected.map(|(offset, _)| offset);
    let found = resolved(&object, &offsets);
    for ((offset, expected), found) in expected.iter().zip(found) {
        let found = found
            .as_ref()
            .map(|(name, offset)| (name.as_str(), *offset));
        assert_eq!(found, *expected, "{offset:#x}");
    }
}

#[test]
fn an_address_of_absurdly_many_names_is_not_looked_through() {
    let names = (0..1000).map(|n| &*format!("f{n:03}").leak());
    let mut full: Vec<TestSymbol> = names
        .map(|name| (name, STT_FUNC, STB_GLOBAL, TEXT, 1))
        .collect();
    full.push(("the_last_one", STT_FUNC, STB_GLOBAL, TEXT, 0x10));
    let found = resolved(&TestObject::library().full(&full), &[0, 1]);
    assert_eq!(found, [Some(("f000".to_owned(), 0)), None]);
}

#[test]
fn versions_are_dropped_and_names_found() {
    let symbols = read(&TestObject::library().full(&[
        function("memcpy@@GLIBC_2.14", 0, STB_GLOBAL),
        function("memcpy@GLIBC_2.2.5", 1, STB_GLOBAL),
        function("@odd", 2, STB_GLOBAL),
        function("helper", 4, STB_LOCAL),
        function("helper", 3, STB_LOCAL),
        function("helper", 5, STB_GLOBAL),
    ]));
    assert_eq!(
        names(&symbols),
        ["memcpy", "memcpy", "@odd", "helper", "helper", "helper"]
    );
    let helpers: Vec<u64> = symbols
        .all_of("helper")
        .map(|f| (f.address - TEXT) / 0x10)
        .collect();
    assert_eq!(helpers, [3, 4, 5]);
    assert_eq!(
        symbols.find("helper").map(|f| f.address),
        Some(TEXT + 0x50),
        "the exported one"
    );
    assert_eq!(symbols.find("memcp"), None);
    assert_eq!(symbols.nearest_names("memcp", 1), ["memcpy"]);
}

#[test]
fn a_stripped_object_is_named_by_its_exports_and_debug_data() {
    let hidden = function("hidden", 1, STB_LOCAL);
    let both = [function("exported", 0, STB_GLOBAL), hidden];
    let library = || TestObject::library().exports(&["exported"]);
    let mini = packed(&TestObject::library().full(&[hidden]).bytes());
    let narrow_mini = packed(&TestObject::library().narrow().full(&[hidden]).bytes());
    let (dynamic, debug) = (SymbolTable::Dynamic, SymbolTable::DebugData);
    let exports = (&["exported"][..], &[dynamic][..]);
    let full = (&["exported", "hidden"][..], &[SymbolTable::Full][..]);
    let packed = (&["exported", "hidden"][..], &[debug, dynamic][..]);
    let bare = || library().without_sections();
    for (name, object, (expected, tables)) in [
        ("full", library().full(&both), full),
        ("exports", library(), exports),
        ("SysV hash", library().sysv_hash(), exports),
        ("no sections", bare(), exports),
        ("no sections, SysV hash", bare().sysv_hash(), exports),
        ("32 bits", library().narrow(), exports),
        ("32 bits, no sections", bare().narrow(), exports),
        ("32 bits, full", library().narrow().full(&both), full),
        ("debug data", library().debug_data(&mini), packed),
        (
            "32-bit debug data",
            library().debug_data(&narrow_mini),
            packed,
        ),
        ("static, stripped", TestObject::library(), (&[], &[])),
    ] {
        let symbols = read(&object);
        assert_eq!(names(&symbols), expected, "{name}");
        assert_eq!(symbols.tables(), tables, "{name}");
        assert_eq!(symbols.lost(), [], "{name}");
    }
}

#[test]
fn damaged_debug_data_is_reported_and_the_exports_used() {
    let library = TestObject::library().exports(&["exported"]);
    let hidden = function("hidden", 1, STB_LOCAL);
    let mini = packed(&TestObject::library().full(&[hidden]).bytes());
    let no_object = packed(&[0; 100]);
    for (packed, part) in [
        (
            &b"no xz at all"[..],
            ".gnu_debugdata: damaged: cannot be unpacked as xz",
        ),
        (
            &mini[..mini.len() / 2],
            ".gnu_debugdata: damaged: cannot be unpacked as xz",
        ),
        (
            &no_object[..],
            "section headers of .gnu_debugdata: damaged: not an ELF file",
        ),
    ] {
        let symbols = read(&library.clone().debug_data(packed));
        assert_eq!(names(&symbols), ["exported"]);
        let lost = texts(symbols.lost());
        assert!(
            matches!(&lost[..], [only] if only.contains(part)),
            "{lost:?}"
        );
    }
}

#[test]
fn tables_relocated_by_the_dynamic_linker_are_read_with_its_bias() {
    let bias = 0x7fff_f7dd_0000;
    let library = TestObject::library()
        .exports(&["exported"])
        .without_sections();
    let bytes = library.relocated_by(bias).bytes();
    let object = ObjectFile::parse(&bytes).unwrap();
    let blind = FunctionSymbols::read(&object);
    assert!(blind.is_empty());
    let lost = blind.lost().first().map(ToString::to_string).unwrap();
    assert!(
        lost.starts_with("dynamic table: damaged: 0x7ffff7dd"),
        "{lost}"
    );
    let told = FunctionSymbols::read(&object.relocated_by(bias));
    assert_eq!(names(&told), ["exported"]);
}

#[test]
fn what_is_not_in_memory_is_reported_and_the_rest_used() {
    // 600 functions of one byte. `.symtab` starts after the code at 0x1100 and has four pages.
    let names_of: Vec<&'static str> = (0..600).map(|n| &*format!("f{n:04}").leak()).collect();
    let function = |(n, name): (u64, &&'static str)| -> TestSymbol {
        (name, STT_FUNC, STB_LOCAL, TEXT + n % TEXT_SIZE, 1)
    };
    let full: Vec<_> = (0..).zip(&names_of).map(function).collect();
    let library = TestObject::library().exports(&["exported"]).full(&full);
    let bytes = library.bytes();
    let sections = bytes.len() as u64 - 4096..bytes.len() as u64;
    for (name, hole, count, lost) in [
        ("nothing missing", 0..0, 600, vec![]),
        (
            "a page of symbols",
            0x2000..0x3000,
            // 24 bytes each, the first at 0x1100.
            600 - 171 + 1,
            vec![".symtab: 4096 of its 14424 bytes are missing, the rest is used"],
        ),
        (
            "the section headers",
            sections,
            1,
            vec!["section headers: bytes ", "section headers: bytes "],
        ),
        ("the exports too", 0..0x1000, 0, vec![]),
    ] {
        let file = Holed(bytes.clone(), hole);
        let Ok(object) = ObjectFile::parse(&file) else {
            assert_eq!(count, 0, "{name}");
            continue;
        };
        let symbols = FunctionSymbols::read(&object);
        let found = texts(symbols.lost());
        assert_eq!(symbols.len(), count, "{name}: {found:?}");
        for part in lost {
            assert!(
                found.iter().any(|lost| lost.contains(part)),
                "{name}: {found:?}"
            );
        }
    }
}

#[test]
fn files_that_are_no_object_are_refused_with_what_was_found() {
    let library = TestObject::library().bytes();
    let patched = |at: usize, bytes: &[u8]| {
        let mut file = library.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    for (file, part) in [
        (Vec::new(), "lie past its end at 0x0"),
        (b"#!/bin/sh\necho hello\n".to_vec(), "[23, 21, 2f, 62]"),
        (patched(4, &[3]), "ELF class 3 with data encoding 1"),
        (patched(5, &[2]), "ELF class 2 with data encoding 2"),
        (patched(18, &[183, 0]), "ELF machine 183 is neither"),
        (patched(16, &[1, 0]), "ELF type 1 is neither"),
        (patched(54, &[55, 0]), "program headers of 55 bytes each"),
        (
            patched(56, &[0xff, 0xff]),
            "65535 program headers of 56 bytes each",
        ),
        (patched(32, &[0xff; 8]), "bytes 0xffffffffffffffff to"),
        (library[..100].to_vec(), "lie past its end at 0x64"),
    ] {
        assert_says(ObjectFile::parse(&file).unwrap_err(), part);
    }
}

#[test]
fn absurd_tables_are_reported_not_read() {
    let library = TestObject::library()
        .exports(&["exported"])
        .full(&[function("one", 1, STB_LOCAL)]);
    let bytes = library.bytes();
    let table = header_of(&bytes, ".symtab");
    for (field, value, part) in [
        (
            32,
            u64::MAX,
            ".symtab: 18446744073709551615 is too much, at most 100663296 is read",
        ),
        (24, u64::MAX, ".symtab: bytes 0xffffffffffffffff to"),
        (
            40,
            0xffff,
            ".symtab: damaged: its names are in section 65535",
        ),
        (56, 7, ".symtab: damaged: symbols of 7 bytes each"),
    ] {
        let mut file = bytes.clone();
        file[table + field..table + field + 8].copy_from_slice(&value.to_le_bytes());
        let symbols = FunctionSymbols::read(&ObjectFile::parse(&file).unwrap());
        let lost = texts(symbols.lost());
        assert!(lost.iter().any(|lost| lost.contains(part)), "{lost:?}");
        assert_eq!(names(&symbols), ["exported"]);
    }
    let mut file = bytes.clone();
    file[62..64].copy_from_slice(&99u16.to_le_bytes());
    let object = ObjectFile::parse(&file).unwrap();
    let lost = texts(object.lost());
    let count = object.sections().len();
    assert_eq!(
        lost,
        [format!(
            "section names: damaged: they are in section 99 of {count}"
        )]
    );
    let mut file = bytes;
    file[60..62].copy_from_slice(&0xfff0u16.to_le_bytes());
    let object = ObjectFile::parse(&file).unwrap();
    let lost = object.lost().first().map(ToString::to_string).unwrap();
    assert_eq!(
        lost,
        "section headers: 65520 is too much, at most 4096 is read"
    );
}

#[test]
fn names_without_an_end_are_not_looked_for_forever() {
    // 10,000 symbols with the same name of 64 KiB without NUL, in a table of 1 MiB, all of one
    // letter.
    let function = |_| -> TestSymbol { ("f", STT_FUNC, STB_LOCAL, TEXT, 1) };
    let full: Vec<_> = (0..10_000).map(function).collect();
    let mut bytes = TestObject::library().full(&full).bytes();
    let header = header_of(&bytes, ".strtab");
    let (at, size) = (bytes.len() as u64, 1u64 << 20);
    bytes.extend(vec![b'x'; size as usize]);
    bytes[header + 24..header + 32].copy_from_slice(&at.to_le_bytes());
    bytes[header + 32..header + 40].copy_from_slice(&size.to_le_bytes());
    let symbols = FunctionSymbols::read(&ObjectFile::parse(&bytes).unwrap());
    assert!(symbols.is_empty());
    let lost = texts(symbols.lost());
    assert_eq!(lost, [".strtab: damaged: its names do not end"]);
}

proptest! {
    /// With any few wrong words and a file cut anywhere, there is no panic and no endless loop.
    /// Every function that is named has one of the file's names.
    #[test]
    fn damaged_objects_are_survived(
        wide: bool,
        gnu: bool,
        sections: bool,
        cut in 0usize..0x2000,
        wrong in proptest::collection::vec((0usize..0x1a00, any::<u32>()), 0..6),
        small in proptest::collection::vec((0usize..0x200, any::<u8>()), 0..6),
    ) {
        let mut object = TestObject::library()
            .exports(&["one", "two"])
            .full(&[function("three", 3, STB_LOCAL)])
            .build_id(&[5; 20]);
        object = if wide { object } else { object.narrow() };
        object = if gnu { object } else { object.sysv_hash() };
        object = if sections { object } else { object.without_sections() };
        let mut bytes = object.bytes();
        for (at, value) in wrong {
            let at = at % (bytes.len() - 4);
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        for (at, value) in small {
            bytes[at] = value;
        }
        let end = bytes.len() - cut.saturating_sub(0x1000).min(bytes.len());
        bytes.truncate(end);
        if let Ok(object) = ObjectFile::parse(&bytes) {
            let symbols = FunctionSymbols::read(&object);
            for function in symbols.iter() {
                prop_assert!(!function.name.is_empty());
                let (found, offset) = symbols.resolve(function.address).unwrap();
                prop_assert_eq!((found.address, offset), (function.address, 0));
            }
            let _ = symbols.resolve(u64::MAX);
            let _ = object.build_id();
        }
    }
}
