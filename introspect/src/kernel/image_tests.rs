//! Tests of kernel images: what is found in them, and which errors other files cause.
#![allow(clippy::unwrap_used)]

use object::elf;
use proptest::prelude::*;

use super::btf::test_types::task_types;
use super::image::{ImageBtfError, ImageError, ImageSymbolsError, KernelImage};
use super::kallsyms::test_tables::{Variant, kernel_like, write_at};
use super::kallsyms::{KallsymsError, Layout};
use super::test_elf::{TEXT, TestElf};
use crate::test_says::assert_says;

const PER_CPU: (u64, u64) = (0, 0x200_0000);
const BANNER: &str = "Linux version 6.1.0-test (a@b) (gcc) #7 SMP Sat Jan 1 00:00:00 UTC 2022";

fn text() -> Vec<u8> {
    let mut text = vec![0x90; 0x200];
    text[0x80..0x8a].copy_from_slice(b"Linux vers");
    text.extend(
        format!("\nLinux version %s\0Linux version 6.1.0-test (a@b) # SMP\n\0{BANNER}\n\0").bytes(),
    );
    text
}

/// Makes an image with code, a per-CPU template, a PVH entry, types and an ELF symbol table.
fn image() -> TestElf {
    let end = TEXT.0 + 0x10_0000;
    TestElf::default()
        .segment(TEXT, &text(), 0x1000)
        .segment(PER_CPU, &[7; 64], 0)
        .note("Linux", 18, &[0; 4])
        .note("Xen", 6, b"linux\0")
        .note("Xen", 18, &0x100_0850u64.to_le_bytes())
        .section(".text", elf::SHF_ALLOC | elf::SHF_EXECINSTR, TEXT.0, &[])
        .section(".data..percpu", elf::SHF_ALLOC | elf::SHF_WRITE, 0, &[])
        .section(".rodata", elf::SHF_ALLOC, end, &[])
        .section(".BTF", elf::SHF_ALLOC, end, &task_types().bytes())
        .symbols(&[
            ("start", elf::STT_NOTYPE, elf::STB_GLOBAL, 1, TEXT.0),
            ("file.c", elf::STT_FILE, elf::STB_LOCAL, elf::SHN_ABS, 0),
            ("helper", elf::STT_FUNC, elf::STB_LOCAL, 1, TEXT.0 + 0x40),
            ("optional", elf::STT_FUNC, elf::STB_WEAK, 1, TEXT.0 + 0x60),
            ("current_task", elf::STT_OBJECT, elf::STB_GLOBAL, 2, 0x28),
            ("table", elf::STT_OBJECT, elf::STB_LOCAL, 3, end),
            (
                "PAGES",
                elf::STT_NOTYPE,
                elf::STB_LOCAL,
                elf::SHN_ABS,
                0x111,
            ),
            (
                "elsewhere",
                elf::STT_FUNC,
                elf::STB_GLOBAL,
                elf::SHN_UNDEF,
                0,
            ),
        ])
}

#[test]
fn an_image_tells_what_a_loader_and_a_user_need() {
    let image = KernelImage::parse(image().bytes()).unwrap();
    assert_eq!(image.entry(), TEXT.1);
    assert_eq!(image.pvh_entry(), Some(0x100_0850));
    assert_eq!(image.banner(), Some(BANNER));
    let segments: Vec<_> = image
        .segments()
        .iter()
        .map(|s| {
            (
                s.virtual_address,
                s.physical_address,
                s.memory_size,
                &image.bytes()[s.file.clone()],
            )
        })
        .collect();
    let text = text();
    assert_eq!(
        segments,
        [
            (TEXT.0, TEXT.1, text.len() as u64 + 0x1000, text.as_slice()),
            (PER_CPU.0, PER_CPU.1, 64, &[7; 64][..]),
        ]
    );
    assert_eq!(image.btf().unwrap().size_of("task_struct"), Some(128));
}

#[test]
fn bytes_are_read_by_link_address() {
    let image = KernelImage::parse(image().bytes()).unwrap();
    let length = text().len() as u64;
    for (address, count, expected) in [
        (TEXT.0 + 0x80, 5, Some(&b"Linux"[..])),
        (TEXT.0 + length - 2, 2, Some(b"\n\0")),
        (TEXT.0 + length - 1, 2, None),
        (TEXT.0 + length + 8, 1, None),
        (TEXT.0 - 1, 2, None),
        (u64::MAX, 1, None),
        (TEXT.0, usize::MAX, None),
    ] {
        assert_eq!(
            image.read_at_vaddr(address, count),
            expected,
            "{address:#x}"
        );
    }
}

#[test]
fn the_elf_symbol_table_serves_where_there_is_no_kallsyms() {
    let symbols = KernelImage::parse(image().bytes())
        .unwrap()
        .symbols()
        .unwrap();
    let found: Vec<_> = symbols
        .iter()
        .map(|s| (s.name, s.kind, s.address, s.absolute))
        .collect();
    assert_eq!(
        found,
        [
            ("current_task", 'D', 0x28, true),
            ("PAGES", 'a', 0x111, true),
            ("start", 'T', TEXT.0, false),
            ("helper", 't', TEXT.0 + 0x40, false),
            ("optional", 'W', TEXT.0 + 0x60, false),
            ("table", 'r', TEXT.0 + 0x10_0000, false),
        ]
    );
}

#[test]
fn kallsyms_is_taken_where_it_is() {
    for (layout, absolute_per_cpu) in [
        (Layout::AddressesLast, true),
        (Layout::AddressesFromEntries, false),
    ] {
        let written = kernel_like(700, absolute_per_cpu);
        let variant = Variant {
            layout,
            sequences: true,
            absolute_per_cpu,
        };
        // The tables' offset in the file differs from that of their link address.
        let tables = write_at(TEXT.0 + 0x20_0000, &written, variant);
        let elf = TestElf::default().segment(TEXT, &[0x90; 0x1000], 0);
        let linked = (TEXT.0 + 0x20_0000, TEXT.1 + 0x20_0000);
        let bytes = elf.segment(linked, &tables, 0).bytes();
        let symbols = KernelImage::parse(bytes).unwrap().symbols().unwrap();
        assert_eq!(symbols.len(), written.len());
        for symbol in &written {
            assert_eq!(symbols.address_of(&symbol.name), Some(symbol.address));
        }
    }
}

#[test]
fn what_an_image_lacks_is_named_with_its_consequence() {
    let image =
        KernelImage::parse(TestElf::default().segment(TEXT, &[0x90; 64], 0).bytes()).unwrap();
    assert_eq!(
        (image.banner(), image.pvh_entry(), image.btf_bytes()),
        (None, None, None)
    );
    let types = image.btf().unwrap_err();
    assert!(matches!(types, ImageBtfError::NoSection));
    assert_says(&types, "tasks (pid, comm)");
    let symbols = image.symbols().unwrap_err();
    assert!(matches!(
        symbols,
        ImageSymbolsError::Neither {
            kallsyms: KallsymsError::NoTokens { .. }
        }
    ));
    assert_says(&symbols, "CONFIG_KALLSYMS=y");
}

#[test]
fn files_that_are_no_kernel_image_are_refused_by_what_they_are() {
    let good = image().bytes();
    let with = |offset: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[offset..offset + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let mut bzimage = vec![0; 0x400];
    bzimage[0x202..0x206].copy_from_slice(b"HdrS");
    // Offsets: e_type 16, e_machine 18, e_phoff 32, first program header 64 (p_offset +8, p_vaddr
    // +16, p_memsz +40).
    for (bytes, expected) in [
        (bzimage, "this is a bzImage"),
        (Vec::new(), "not an ELF file: it starts with the bytes []"),
        (
            b"MZ\x90\0 more".to_vec(),
            "not an ELF file: it starts with the bytes [4d, 5a, 90, 00",
        ),
        (good[..40].to_vec(), "not a 64-bit ELF file"),
        (with(4, &[1]), "not a 64-bit ELF file"),
        (with(5, &[2]), "the ELF file is big-endian"),
        (
            with(18, &183u16.to_le_bytes()),
            "ELF machine 183 is not x86-64 (62)",
        ),
        (
            with(16, &1u16.to_le_bytes()),
            "ELF type 1 is neither an executable",
        ),
        (
            with(32, &u64::MAX.to_le_bytes()),
            "the ELF headers cannot be read",
        ),
        (
            good[..good.len() - 1].to_vec(),
            "the ELF headers cannot be read",
        ),
        (
            with(64 + 8, &0xffff_0000u64.to_le_bytes()),
            "load segment 0 wants bytes 0xffff0000 to",
        ),
        (
            with(64 + 8, &u64::MAX.to_le_bytes()),
            "load segment 0 wants bytes 0xffffffffffffffff to",
        ),
        (
            with(64 + 40, &1u64.to_le_bytes()),
            "in the file and 0x1 in memory",
        ),
        (
            with(64 + 16, &(u64::MAX - 8).to_le_bytes()),
            "load segment 0 at 0xfffffffffffffff7",
        ),
        (TestElf::default().bytes(), "no load segment"),
    ] {
        assert_says(KernelImage::parse(bytes).unwrap_err(), expected);
    }
    assert!(matches!(
        KernelImage::parse(good[..0].to_vec()),
        Err(ImageError::NotElf { .. })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    /// A damaged file yields an error or an image whose segments lie in the file.
    #[test]
    fn damage_never_panics(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..16),
        in_headers in any::<bool>(),
    ) {
        let mut bytes = image().bytes();
        let places = if in_headers { 64 + 3 * 56 } else { bytes.len() };
        for (place, value) in damage {
            bytes[place.index(places)] = value;
        }
        let length = bytes.len();
        if let Ok(image) = KernelImage::parse(bytes) {
            for segment in image.segments() {
                prop_assert!(segment.file.end <= length && segment.file.len() as u64 <= segment.memory_size);
            }
            prop_assert!(image.read_at_vaddr(TEXT.0, length + 1).is_none());
            if let Ok(symbols) = image.symbols() {
                prop_assert!(symbols.len() <= length / 24);
            }
            if let Ok(btf) = image.btf() {
                prop_assert!(btf.len() <= length / 12);
            }
        }
    }
}
