#![allow(clippy::unwrap_used)]
use super::*;
use crate::kernel::symbols::Symbols;
use crate::kernel::test_kernel::{BASE, FREE, RAM, TestKernel, Types, VMEMMAP as ARRAY, symbols};
use crate::kernel::xarray::tests::xarray_types;
use crate::test_says::assert_says;

const FILE: u64 = FREE;
const INODE: u64 = FREE + 0x400;
const MAPPING: u64 = FREE + 0x800;
const NODE: u64 = FREE + 0x1000;
const SLOTS: u64 = NODE + 40;
const UP_TO_DATE: u64 = 1 << 3;

/// Makes the types; `folio` exists since Linux 5.16.
fn types(folio: bool) -> Types {
    types_with(folio, "compound_head")
}

/// Makes the types; `link` is the name of the page's member that points to the folio's first.
fn types_with(folio: bool, link: &'static str) -> Types {
    let mut t = Types::default();
    let xarray = xarray_types(&mut t, 64);
    let word = t.integer(8);
    t.structure(
        "address_space",
        192,
        &[
            ("host", 0, word),
            ("i_pages", 8, xarray),
            ("a_ops", 144, word),
        ],
    );
    t.numbers("inode", &[("i_size", 80, 8)]);
    t.numbers("file", &[("f_mapping", 24, 8)]);
    let members = [("flags", 0, 8), ("mapping", 24, 8), ("index", 32, 8)];
    let members = members.map(|(name, offset, size)| (name, offset, t.integer(size)));
    let page_type = ("page_type", 48, t.integer(4));
    if folio {
        t.structure("folio", 64, &members);
        t.structure("page", 64, &[(link, 8, word), page_type]);
    } else {
        let mut all = members.to_vec();
        all.extend([(link, 8, word), page_type]);
        t.structure("page", 64, &all);
    }
    t.structure("mem_section", 24, &[("section_mem_map", 8, word)]);
    t.enumeration(
        "pageflags",
        &[
            ("PG_locked", 0),
            ("PG_uptodate", 3),
            ("PG_slab", 7),
            ("PG_writeback", 15),
        ],
    );
    t
}

fn layout_of(folio: bool, symbols: &Symbols) -> PageCacheLayout {
    PageCacheLayout::new(&types(folio).finish(), symbols).unwrap()
}

fn layout() -> PageCacheLayout {
    layout_of(true, &symbols(&[]))
}

/// Returns the `struct page` of the RAM's page `number`, and the address at which a test writes it.
/// The array is mapped over the RAM.
fn page(number: u64) -> (u64, u64) {
    let offset = (RAM / PAGE + number) * 64;
    (ARRAY + offset, BASE + offset)
}

fn write_page(guest: &mut TestKernel, number: u64, flags: u64, compound: u64, index: u64) -> u64 {
    let (page, at) = page(number);
    guest.words(at, &[flags, compound, 0, MAPPING, index]);
    page
}

/// Makes a file of 300 pages less 96 bytes. The cache holds page 0, page 2 (being read), pages 4 to
/// 7 as one folio in RAM pages 36 to 39, and page 10. Page 9 was dropped.
fn guest() -> TestKernel {
    let mut guest = TestKernel::default();
    guest.words(FILE + 24, &[MAPPING]);
    guest.words(INODE + 80, &[300 * PAGE - 96]);
    guest.words(MAPPING, &[INODE, 0, NODE | 2]);
    let zero = write_page(&mut guest, 32, UP_TO_DATE, 0, 0);
    let two = write_page(&mut guest, 33, 1, 0, 2);
    let large = write_page(&mut guest, 36, UP_TO_DATE, 0, 4);
    for tail in 37..40 {
        let (_, at) = page(tail);
        guest.words(at, &[0, large | 1, 0, 0xdead, 0]);
    }
    let ten = write_page(&mut guest, 34, UP_TO_DATE, 0, 10);
    for (slot, entry) in [
        (0, zero),
        (2, two),
        (4, large),
        (5, 4 << 2 | 2),
        (6, 4 << 2 | 2),
        (7, 4 << 2 | 2),
        (9, 0x77 << 1 | 1),
        (10, ten),
    ] {
        guest.words(SLOTS + slot * 8, &[entry]);
    }
    for number in 32..40u8 {
        let at = BASE + u64::from(number) * PAGE;
        guest.put(at, [number; 4096]);
    }
    guest
}

fn file(guest: &TestKernel) -> CachedFile {
    guest.look(|view| layout().open_file(view, Gva(FILE)).unwrap())
}

fn present(number: u64) -> CachedPage {
    CachedPage::Present {
        gpa: Gpa(RAM + number * PAGE),
        page: Gva(page(number).0),
    }
}

#[test]
fn pages_are_found_by_their_index() {
    let guest = guest();
    let file = file(&guest);
    assert_eq!(
        (file.mapping, file.inode, file.size),
        (Gva(MAPPING), Gva(INODE), 300 * PAGE - 96)
    );
    for folio in [true, false] {
        let layout = layout_of(folio, &symbols(&[]));
        for (index, expected) in [
            (0, present(32)),
            (1, CachedPage::Absent),
            (
                2,
                CachedPage::Filling {
                    page: Gva(page(33).0),
                },
            ),
            (4, present(36)),
            (5, present(37)),
            (7, present(39)),
            (8, CachedPage::Absent),
            (9, CachedPage::Value(0x77)),
            (10, present(34)),
            (64, CachedPage::Absent),
            (u64::MAX, CachedPage::Absent),
        ] {
            let found = guest.look(|view| layout.page(view, &file, index));
            assert_eq!(found, Ok(expected), "{index}");
        }
    }
}

#[test]
fn kernels_that_store_each_page_of_a_folio_are_read_too() {
    let mut guest = guest();
    for (slot, number) in [(5, 37), (6, 38), (7, 39)] {
        guest.words(SLOTS + slot * 8, &[page(number).0]);
    }
    let file = file(&guest);
    for (index, number) in [(4, 36), (5, 37), (7, 39)] {
        let found = guest.look(|view| layout().page(view, &file, index));
        assert_eq!(found, Ok(present(number)), "{index}");
    }
}

#[test]
fn bytes_are_read_across_pages_and_what_is_missing_is_named() {
    let guest = guest();
    let file = file(&guest);
    let read = |offset: u64, length: usize| {
        let mut bytes = vec![0; length];
        let done = guest.look(|view| layout().read(view, &file, offset, &mut bytes));
        done.map(|()| bytes).map_err(|e| e.to_string())
    };
    let expected = [&[36; 2][..], &[37; 4096], &[38; 1]].concat();
    assert_eq!(read(5 * PAGE - 2, 4099), Ok(expected));
    assert_eq!(read(10 * PAGE + 5, 3), Ok(vec![34; 3]));
    assert_eq!(read(file.size, 0), Ok(vec![]));
    for (offset, length, part) in [
        (
            PAGE - 1,
            2,
            "the byte at 0x1000 of the file is not in memory (Absent)",
        ),
        (2 * PAGE, 1, "not in memory (Filling"),
        (
            9 * PAGE,
            1,
            "the byte at 0x9000 of the file is not in memory (Value(119))",
        ),
        (
            file.size - 1,
            2,
            "2 bytes at 0x12bf9f reach past the end of the file (0x12bfa0 bytes)",
        ),
        (u64::MAX, 2, "past the end"),
    ] {
        assert_says(read(offset, length).unwrap_err(), part);
    }
}

#[test]
fn the_array_of_pages_may_be_anywhere() {
    let mut guest = guest();
    let variable = FREE + 0xc00;
    guest.words(variable, &[ARRAY - 64]);
    let layout = layout_of(true, &symbols(&[("vmemmap_base", variable)]));
    let found = guest.look(|view| {
        let file = layout.open_file(view, Gva(FILE)).unwrap();
        layout.page(view, &file, 0).unwrap()
    });
    let gpa = Gpa(RAM + 33 * PAGE);
    let page = Gva(page(32).0);
    assert_eq!(found, CachedPage::Present { gpa, page });
}

#[test]
fn what_is_broken_is_named() {
    let (_, zero) = page(32);
    let (_, tail) = page(37);
    let large = page(36).0;
    for (address, word, index, part) in [
        (
            FILE + 24,
            0,
            0,
            "the file at 0xffff888001010000 has no address_space",
        ),
        (
            MAPPING,
            0,
            0,
            "the address_space at 0xffff888001010800 has no address_space",
        ),
        (INODE + 80, u64::MAX, 0, "has a size of 0xffffffffffffffff"),
        (MAPPING + 144, FREE + 64, 0, "is a file of hugetlbfs"),
        (
            MAPPING + 16,
            0x1002,
            0,
            "page 0 of the address_space at 0xffff888001010800 cannot be found",
        ),
        (SLOTS, FREE + 32, 0, "says that it is page 0x0 of 0x0"),
        (zero + 24, 0x77, 0, "says that it is page 0x0 of 0x77"),
        (
            zero + 32,
            1,
            0,
            "says that it is page 0x1 of 0xffff888001010800",
        ),
        (tail + 8, 0, 5, "says that it is page 0x4"),
        (tail + 8, large, 5, "says that it is page 0x4"),
        (SLOTS + 3 * 8, large, 3, "says that it is page 0x4"),
        (SLOTS, large + 1024, 0, "says that it is page 0x0 of 0x0"),
        (
            SLOTS,
            0x1000,
            0,
            "page: its pointer is 0x1000, expected a kernel address",
        ),
    ] {
        let mut guest = guest();
        guest.words(address, &[word]);
        let layout = layout_of(true, &symbols(&[("hugetlbfs_aops", FREE + 64)]));
        let found = guest.look(|view| {
            let file = layout.open_file(view, Gva(FILE))?;
            layout.page(view, &file, index)
        });
        assert_says(found.unwrap_err(), part);
    }
}

#[test]
fn pages_outside_the_array_are_refused() {
    let (inside, mapped_again) = page(32);
    // Through the other mapping of the same RAM, and between two elements.
    for (entry, at) in [(mapped_again, mapped_again), (inside + 8, mapped_again + 8)] {
        let mut guest = guest();
        guest.words(at, &[UP_TO_DATE, 0, 0, MAPPING, 0]);
        guest.words(SLOTS, &[entry]);
        let file = file(&guest);
        let error = guest.look(|view| layout().page(view, &file, 0).unwrap_err());
        let error = error.to_string();
        assert_says(&error, "is not in the array of pages");
    }
}

/// Makes section 700 of memory, the 19th of its table of 170, use the pages that a test wrote.
fn in_sections(guest: &mut TestKernel, found: u64, root: u64) -> PageCacheLayout {
    let (variable, roots, sections) = (FREE + 0xc00, FREE + 0xc40, FREE + 0xd00);
    guest.words(variable, &[roots]);
    guest.words(
        roots + 700 / 170 * 8,
        &[if root == 0 { 0 } else { sections }],
    );
    guest.words(sections + 700 % 170 * 24 + 8, &[found]);
    layout_of(true, &symbols(&[("mem_section", variable)]))
}

#[test]
fn pages_of_sections_are_found_by_the_number_in_their_flags() {
    let first = 700u64 << 15;
    let array = BASE + 0x10_0000;
    let start = array.wrapping_sub(first * 64);
    for (map, root, frame, page, expected) in [
        (start | 0x1f, 1, first, array, Ok(first)),
        (start | 2, 1, first, array + 5 * 64, Ok(first + 5)),
        (
            start | 1,
            1,
            first,
            array,
            Err("section 700 of memory has no array of pages"),
        ),
        (
            start | 2,
            0,
            first,
            array,
            Err("section 700 of memory has no array of pages"),
        ),
        (
            start | 2,
            1,
            first,
            array + 32,
            Err("is not in the array of pages"),
        ),
        (
            (array + 64).wrapping_sub(first * 64) & !0xfff | 2,
            1,
            first,
            array - 64,
            Err("is not in the array"),
        ),
        (
            start | 2,
            1,
            171 << 15,
            array,
            Err("section 171 of memory has no array of pages"),
        ),
    ] {
        let mut guest = guest();
        let layout = in_sections(&mut guest, map, root);
        let flags = UP_TO_DATE | frame >> 15 << 45;
        guest.words(page, &[flags, 0, 0, MAPPING, 0]);
        guest.words(SLOTS, &[page]);
        let found = guest.look(|view| {
            let file = layout.open_file(view, Gva(FILE)).unwrap();
            layout.page(view, &file, 0)
        });
        match expected {
            Ok(frame) => {
                let (gpa, page) = (Gpa(frame * PAGE), Gva(page));
                assert_eq!(found, Ok(CachedPage::Present { gpa, page }));
            }
            Err(part) => {
                assert_says(found.unwrap_err(), part);
            }
        }
    }
}

#[test]
fn kernels_that_fill_one_array_have_sections_too() {
    let mut guest = guest();
    let _ = in_sections(&mut guest, 0, 0);
    let layout = layout_of(
        true,
        &symbols(&[("mem_section", FREE + 0xc00), ("vmemmap_populate", 1)]),
    );
    let file = file(&guest);
    assert_eq!(
        guest.look(|view| layout.page(view, &file, 0)),
        Ok(present(32))
    );
}

/// Returns the owner; `None` for anonymous pages and others without a file.
fn owner(guest: &TestKernel, layout: &PageCacheLayout, number: u64) -> Option<(u64, u64)> {
    let gpa = Gpa(RAM + number * PAGE + 0x123);
    let found = guest.look(|view| layout.owner(view, gpa));
    let owner = found.unwrap_or_else(|error| panic!("{number}: {error}"));
    owner.map(|owner| (owner.mapping.0, owner.index))
}

#[test]
fn pages_lead_back_to_file_and_index() {
    let guest = guest();
    for folio in [true, false] {
        let layout = layout_of(folio, &symbols(&[]));
        for (number, index) in [(32, 0), (33, 2), (36, 4), (37, 5), (39, 7), (34, 10)] {
            assert_eq!(
                owner(&guest, &layout, number),
                Some((MAPPING, index)),
                "{number}"
            );
        }
        for number in [0, 31, 35, 40, 300] {
            assert_eq!(owner(&guest, &layout, number), None, "{number}");
        }
    }
}

#[test]
fn a_page_on_its_way_to_the_disk_is_told_from_others() {
    const WRITEBACK: u64 = 1 << 15;
    let mut guest = guest();
    let layout = layout();
    let large = page(36).1;
    guest.words(page(32).1, &[UP_TO_DATE | WRITEBACK]);
    for number in [32, 37] {
        let is_written = guest.look(|view| layout.is_in_writeback(view, Gva(page(number).0)));
        assert_eq!(is_written, Ok(number == 32), "{number}");
    }
    // A folio's flags are its first page's.
    guest.words(large, &[UP_TO_DATE | WRITEBACK]);
    let is_written = guest.look(|view| layout.is_in_writeback(view, Gva(page(37).0)));
    assert_eq!(is_written, Ok(true));
}

#[test]
fn the_page_before_is_the_files_and_not_the_memorys() {
    let guest = guest();
    let layout = layout();
    for (number, before) in [
        (37, Some(36)),
        (39, Some(38)),
        (36, None),
        (34, None),
        (32, None),
        (300, None),
    ] {
        let found = guest.look(|view| layout.page_before(view, Gpa(RAM + number * PAGE + 5)));
        let before = before.map(|number| Gpa(RAM + number * PAGE));
        assert_eq!(found, Ok(before), "{number}");
    }
}

#[test]
fn pages_are_a_files_only_if_its_cache_has_them() {
    const SLAB: u64 = 1 << 7;
    let (zero, tail, other) = (page(32).1, page(37).1, page(50).1);
    let head = page(36).1;
    for (address, words, number, what) in [
        (zero + 24, [MAPPING | 1, 0], 32, "anonymous"),
        (zero + 24, [MAPPING | 2, 0], 32, "movable"),
        (zero + 24, [0, 0], 32, "without a mapping"),
        (zero, [UP_TO_DATE | SLAB, 0], 32, "the slab allocator's"),
        (zero + 48, [0xffff_ff7f, 0], 32, "free"),
        (
            zero + 48,
            [0xf500_0000, 0],
            32,
            "of a type of later kernels",
        ),
        (MAPPING + 144, [FREE + 64, 0], 32, "of hugetlbfs"),
        (zero + 32, [8, 0], 32, "with an index where nothing is"),
        (zero + 32, [9, 0], 32, "with an index where a number is"),
        (zero + 32, [10, 0], 32, "with the index of another page"),
        (head + 32, [u64::MAX, 0], 37, "with an index past the last"),
        (other + 24, [MAPPING, 0], 50, "that claims to be another"),
        (
            tail + 8,
            [page(38).0 | 1, 0],
            37,
            "that is before its folio's first",
        ),
        (SLOTS, [0, 0], 32, "dropped from the cache"),
    ] {
        let mut guest = guest();
        guest.words(address, &words[..1]);
        let layout = layout_of(true, &symbols(&[("hugetlbfs_aops", FREE + 64)]));
        assert_eq!(owner(&guest, &layout, number), None, "a page {what}");
    }
    // A count of mappings is not a type.
    let mut guest = guest();
    guest.words(zero + 48, &[0xffff_ffff]);
    assert_eq!(owner(&guest, &layout(), 32), Some((MAPPING, 0)));
}

#[test]
fn pages_whose_owner_cannot_be_told_say_why() {
    for (gpa, address, word, part) in [
        (
            1 << 52,
            FREE,
            0,
            "guest-physical 0x10000000000000 is past the last address",
        ),
        (
            1 << 40,
            FREE,
            0,
            "page at 0xffffea0400000000 cannot be read",
        ),
        (
            RAM + 32 * PAGE,
            page(32).1 + 24,
            0x1000,
            "address_space: its pointer is 0x1000",
        ),
        (
            RAM + 37 * PAGE,
            page(37).1 + 8,
            0x1001,
            "page: its pointer is 0x1000",
        ),
        (
            RAM + 32 * PAGE,
            MAPPING + 16,
            0x1002,
            "page 0 of the address_space at 0xffff888001010800 cannot be found",
        ),
        (
            RAM + 32 * PAGE,
            SLOTS,
            page(50).0,
            "says that it is page 0x0 of 0x0",
        ),
    ] {
        let mut guest = guest();
        guest.words(address, &[word]);
        let error = guest.look(|view| layout().owner(view, Gpa(gpa)).unwrap_err());
        let error = error.to_string();
        assert_says(&error, part);
    }
}

#[test]
fn pages_of_sections_lead_back_too() {
    let first = 700u64 << 15;
    let array = BASE + 0x10_0000;
    let mut guest = guest();
    let layout = in_sections(&mut guest, array.wrapping_sub(first * 64) | 2, 1);
    let page = array + 5 * 64;
    guest.words(page, &[UP_TO_DATE | 700 << 45, 0, 0, MAPPING, 0]);
    guest.words(SLOTS, &[page]);
    let found = |frame: u64| guest.look(|view| layout.owner(view, Gpa(frame * PAGE)));
    let (mapping, index) = (Gva(MAPPING), 0);
    assert_eq!(found(first + 5), Ok(Some(PageOwner { mapping, index })));
    assert_eq!(found(first + 6), Ok(None));
    for (frame, part) in [
        (701 << 15, "section 701 of memory has no array"),
        (1 << 35, "section 1048576 of memory has no array"),
    ] {
        assert_says(found(frame).unwrap_err(), part);
    }
}

/// In Linux 7.1 and later, the pages of a folio hold a mask of their own address that yields the
/// first one's.
#[test]
fn pages_of_a_folio_may_lead_to_its_first_by_a_mask() {
    let newer = types_with(true, "compound_info").finish();
    let newer = PageCacheLayout::new(&newer, &symbols(&[])).unwrap();
    let mut guest = guest();
    let linked = guest.look(|view| pages_of_folio(view, &layout()));
    for tail in 37..40 {
        let (_, at) = page(tail);
        guest.words(at, &[0, !(4 * 64 - 1) | TAIL, 0, 0xdead, 0]);
    }
    let masked = guest.look(|view| pages_of_folio(view, &newer));
    assert_eq!(masked, linked);
    assert_eq!(masked.len(), 4);
    // A mask that yields another page.
    let (_, at) = page(38);
    guest.words(at, &[0, !(64 * 64 - 1) | TAIL, 0, 0xdead, 0]);
    let file = file(&guest);
    let error = guest.look(|view| newer.page(view, &file, 6)).unwrap_err();
    assert!(matches!(error, PageCacheError::Foreign { .. }), "{error}");
}

/// Returns the pages with indices 4 to 7 and their owners.
fn pages_of_folio(
    view: MemoryView<'_>,
    layout: &PageCacheLayout,
) -> Vec<(CachedPage, Option<PageOwner>)> {
    let file = layout.open_file(view, Gva(FILE)).unwrap();
    (4..8)
        .map(|index| {
            let page = layout.page(view, &file, index).unwrap();
            let CachedPage::Present { gpa, .. } = page else {
                panic!("{page:?}")
            };
            (page, layout.owner(view, gpa).unwrap())
        })
        .collect()
}
