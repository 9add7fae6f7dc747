#![allow(clippy::unwrap_used)]
use super::name::VmaName;
use super::*;
use crate::kernel::files::FileIdentity;
use crate::kernel::maple_tree::tests::{maple_types, write_tree};
use crate::kernel::test_kernel::{BASE, FREE, TestKernel, Types, WILD, symbols};
use crate::test_says::assert_says;

const ARANGE: u64 = 3;
pub(crate) const MM: u64 = FREE;
const FILE: u64 = FREE + 0x400;
const INODE: u64 = FREE + 0x500;
const SUPER: u64 = FREE + 0x600;
const SPECIAL_OPS: u64 = FREE + 0x700;
const OTHER_OPS: u64 = FREE + 0x740;
const GATE_OPS: u64 = FREE + 0x780;
const SPECIAL: u64 = FREE + 0x800;
const TEXT: u64 = FREE + 0x840;
const GIVEN: u64 = FREE + 0x880;
const GATE: u64 = FREE + 0x900;
const MODE: u64 = FREE + 0xa00;
const UTS: u64 = FREE + 0xa40;
const AREAS: u64 = FREE + 0x2000;
const NODES: u64 = FREE + 0x1_0000;
const SPECIAL_NAME: u64 = 0xffff_ffff_8100_0010;
const GATE_NAME: u64 = 0xffff_ffff_8100_0020;

/// The value in the place of the name, for a VMA with a file, where the two share it.
const LINKS: u64 = BASE;

/// The way in which a kernel stores VMAs.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Era {
    /// Linux 5.x: list and tree, no names.
    List,
    /// Linux 6.1: maple tree, names share their place with links of mapped files.
    Maple,
    /// Linux 6.2 and later.
    NamedSharedMemory,
}

pub(crate) fn types(era: Era) -> Types {
    let mut t = Types::default();
    let maple = maple_types(&mut t, [0, 1, 2, 3]);
    let [word, four, links] = [t.integer(8), t.integer(4), t.array(8, 3)];
    t.numbers("rb_node", &[("rb_right", 8, 8), ("rb_left", 16, 8)]);
    let tree = t.numbers("rb_root", &[("rb_node", 0, 8)]);
    let context = t.numbers("mm_context_t", &[("flags", 16, 2)]);
    let mut mm = vec![
        ("start_brk", 64, word),
        ("brk", 72, word),
        ("start_stack", 80, word),
        ("context", 96, context),
    ];
    let mut area = vec![
        ("vm_start", 0, word),
        ("vm_end", 8, word),
        ("vm_mm", 16, word),
        ("vm_flags", 24, word),
        ("vm_pgoff", 32, word),
        ("vm_file", 40, word),
        ("vm_ops", 48, word),
        ("vm_private_data", 56, word),
        ("shared", 64, links),
    ];
    match era {
        Era::List => {
            mm.extend([("mmap", 0, word), ("mm_rb", 8, tree)]);
            area.extend([("vm_next", 96, word), ("vm_rb", 104, links)]);
        }
        Era::Maple => area.push(("anon_name", 64, word)),
        Era::NamedSharedMemory => area.push(("anon_name", 96, word)),
    }
    if era != Era::List {
        mm.push(("mm_mt", 0, maple));
        t.numbers("anon_vma_name", &[("kref", 0, 4), ("name", 4, 1)]);
    }
    t.structure("mm_struct", 1024, &mm);
    t.structure("vm_area_struct", 160, &area);
    t.numbers("vm_operations_struct", &[("name", 8, 8)]);
    t.numbers("vm_special_mapping", &[("name", 0, 8)]);
    t.numbers("file", &[("f_inode", 32, 8)]);
    t.numbers("inode", &[("i_sb", 8, 8), ("i_ino", 16, 8)]);
    t.structure("super_block", 64, &[("s_dev", 16, four)]);
    let release = t.array(1, 65);
    let names = t.structure("new_utsname", 390, &[("release", 8, release)]);
    t.structure("uts_namespace", 400, &[("name", 0, names)]);
    t
}

fn layout(era: Era) -> VmaLayout {
    let symbols = symbols(&[
        ("special_mapping_name", SPECIAL_NAME),
        ("gate_vma_name", GATE_NAME),
        ("gate_vma", GATE),
        ("vsyscall_mode", MODE),
        ("init_uts_ns", UTS),
    ]);
    VmaLayout::new(&types(era).finish(), &symbols).unwrap()
}

fn area(number: u64) -> u64 {
    AREAS + number * 256
}

/// A VMA: start, end, flags, page offset, file, operations, private data, name or links.
pub(crate) type Area = [u64; 8];

/// A program, its heap, a hole, shared memory with a name, a vdso, a stack.
pub(crate) const PROCESS: [Area; 7] = [
    [0x40_0000, 0x40_2000, 0x75, 0, FILE, 0, 0, LINKS],
    [0x60_0000, 0x60_1000, 0x73, 1, FILE, 0, 0, LINKS],
    [0x60_2000, 0x60_8000, 0x73, 0x602, 0, 0, 0, 0],
    [0x7f00_0000, 0x7f00_1000, 0xfb, 5, FILE, OTHER_OPS, 0, GIVEN],
    [0x7f10_0000, 0x7f10_1000, 0x71, 9, 0, OTHER_OPS, 0, GIVEN],
    [
        0x7fff_0000,
        0x7fff_1000,
        0x75,
        0,
        0,
        SPECIAL_OPS,
        SPECIAL,
        0,
    ],
    [0x7fff_8000, 0x7fff_f000, 0x173, 0x7fff8, 0, 0, 0, 0],
];

pub(crate) fn guest(era: Era, areas: &[Area]) -> TestKernel {
    let mut guest = TestKernel::default();
    guest.words(MM + 64, &[0x60_2000, 0x60_7800, 0x7fff_e800]);
    guest.words(MM + 96 + 16, &[2]);
    guest.words(FILE + 32, &[INODE]);
    guest.words(INODE + 8, &[SUPER, 42]);
    guest.words(SUPER + 16, &[259 << 20 | 0x1_0002]);
    guest.words(SPECIAL_OPS + 8, &[SPECIAL_NAME]);
    guest.words(OTHER_OPS + 8, &[0]);
    guest.words(GATE_OPS + 8, &[GATE_NAME]);
    guest.words(SPECIAL, &[TEXT]);
    guest.put(TEXT, b"[vdso]\0");
    guest.put(GIVEN + 4, b"arena 7\0");
    guest.words(
        GATE,
        &[
            0xffff_ffff_ff60_0000,
            0xffff_ffff_ff60_1000,
            0,
            4,
            0,
            0,
            GATE_OPS,
            0,
        ],
    );
    guest.put(UTS + 8, b"6.1.0-56-cloud-amd64\0");
    let mut pairs = Vec::new();
    for (number, a) in (0..).zip(areas) {
        let at = area(number);
        let [start, end, flags, page, file, operations, private, name] = *a;
        let links = era == Era::NamedSharedMemory && name == LINKS;
        let name = if links { 0 } else { name };
        guest.words(
            at,
            &[start, end, MM, flags, page, file, operations, private],
        );
        guest.words(
            at + if era == Era::NamedSharedMemory {
                96
            } else {
                64
            },
            &[name],
        );
        if pairs.last().is_none_or(|(last, _)| last + 1 != start) {
            pairs.push((start - 1, 0));
        }
        pairs.push((end - 1, at));
    }
    pairs.push((u64::MAX, 0));
    if era == Era::List {
        link(&mut guest, areas.len() as u64);
    } else {
        let root = write_tree(&mut guest, NODES, 7, ARANGE, &pairs);
        guest.words(MM + 8, &[root]);
    }
    guest
}

/// Writes the list and search tree of the VMAs.
fn link(guest: &mut TestKernel, count: u64) {
    fn subtree(guest: &mut TestKernel, from: u64, to: u64) -> u64 {
        if from == to {
            return 0;
        }
        let middle = from + (to - from) / 2;
        let left = subtree(guest, from, middle);
        let right = subtree(guest, middle + 1, to);
        let node = area(middle) + 104;
        guest.words(node, &[1, right, left]);
        node
    }
    let root = subtree(guest, 0, count);
    guest.words(MM, &[area(0), root]);
    for number in 0..count {
        let next = if number + 1 == count {
            0
        } else {
            area(number + 1)
        };
        guest.words(area(number) + 96, &[next]);
    }
}

#[test]
fn areas_are_listed_and_found_in_all_eras() {
    for era in [Era::List, Era::Maple, Era::NamedSharedMemory] {
        let (guest, layout) = (guest(era, &PROCESS), layout(era));
        guest.look(|view| {
            let walk = layout.vmas(view, Gva(MM));
            assert_eq!(walk.error, None);
            let found: Vec<_> = walk
                .items
                .iter()
                .map(|v| (v.start, v.end, v.flags.0, v.file))
                .collect();
            let expected: Vec<_> = PROCESS
                .iter()
                .map(|a| (a[0], a[1], a[2], (a[4] != 0).then_some(Gva(a[4]))))
                .collect();
            assert_eq!(found, expected);
            // On both sides of each start and end, and far from all areas.
            let ends = walk.items.iter().flat_map(|v| [v.start, v.end]);
            let around = ends.flat_map(|end| [end - 1, end, end + 0x800]);
            for address in around.chain([0, 0x7fff_f800, u64::MAX]) {
                let expected = walk.items.iter().find(|v| v.contains(address)).copied();
                assert_eq!(
                    layout.find(view, Gva(MM), address),
                    Ok(expected),
                    "{address:#x}"
                );
            }
        });
    }
}

#[test]
fn lines_are_those_of_proc() {
    let pad = |line: &str, name: &str| format!("{line:<72} {name}");
    for (era, release, changed) in [
        (
            Era::List,
            "5.10.0",
            &[(2, "[heap]"), (3, "/bin/a\\012b"), (4, "")][..],
        ),
        (Era::Maple, "6.1.0", &[(1, "/bin/a\\012b")]),
        (
            Era::NamedSharedMemory,
            "6.12.1",
            &[(3, "[anon_shmem:arena 7]")],
        ),
    ] {
        let (mut guest, layout) = (guest(era, &PROCESS), layout(era));
        guest.put(UTS + 8, release.as_bytes());
        let mut names = [
            "/bin/a\\012b",
            "/bin/a\\012b",
            "[heap]",
            "/bin/a\\012b",
            "[anon:arena 7]",
            "[vdso]",
            "[stack]",
        ];
        for (number, name) in changed {
            names[*number] = name;
        }
        let heads = [
            "00400000-00402000 r-xp 00000000 103:10002 42 ",
            "00600000-00601000 rw-p 00001000 103:10002 42 ",
            "00602000-00608000 rw-p 00000000 00:00 0 ",
            "7f000000-7f001000 rw-s 00005000 103:10002 42 ",
            "7f100000-7f101000 r--p 00000000 00:00 0 ",
            "7fff0000-7fff1000 r-xp 00000000 00:00 0 ",
            "7fff8000-7ffff000 rw-p 00000000 00:00 0 ",
        ];
        let expected: Vec<String> = heads
            .iter()
            .zip(names)
            .map(|(head, name)| {
                if name.is_empty() {
                    (*head).to_owned()
                } else {
                    pad(head, name)
                }
            })
            .collect();
        let lines: Vec<String> = guest.look(|view| {
            let bounds = layout.bounds(view, Gva(MM)).unwrap();
            let line = |vma: &Vma| {
                let path = |file| {
                    assert_eq!(file, Gva(FILE));
                    b"/bin/a\nb".to_vec()
                };
                let line = layout.maps_line(view, &bounds, vma, path).unwrap();
                String::from_utf8(line).unwrap()
            };
            layout.vmas(view, Gva(MM)).items.iter().map(line).collect()
        });
        assert_eq!(lines, expected, "{release}");
    }
}

#[test]
fn which_area_is_the_heap_depends_on_the_release() {
    // One that ends where the heap starts, one that starts where it ends, one inside, one apart.
    let areas = [
        [0x60_1000, 0x60_2000, 0x73, 0, 0, 0, 0, 0],
        [0x60_2000, 0x60_3000, 0x73, 0, 0, 0, 0, 0],
        [0x60_7000, 0x60_8000, 0x73, 0, 0, 0, 0, 0],
        [0x60_8000, 0x60_9000, 0x73, 0, 0, 0, 0, 0],
    ];
    for (release, expected) in [
        ("6.1.0-56-cloud-amd64", [true, true, true, true]),
        ("5.10.200", [true, true, true, true]),
        ("6.6.10", [true, true, true, true]),
        ("6.6.11", [false, true, true, false]),
        ("6.12.117+deb12-cloud-amd64", [false, true, true, false]),
        ("7.0-rc1", [false, true, true, false]),
        ("none", [false, true, true, false]),
    ] {
        let (mut guest, layout) = (guest(Era::Maple, &areas), layout(Era::Maple));
        guest.words(MM + 64, &[0x60_2000, 0x60_8000]);
        guest.put(UTS + 8, [release.as_bytes(), b"\0"].concat());
        let heaps: Vec<bool> = guest.look(|view| {
            let bounds = layout.bounds(view, Gva(MM)).unwrap();
            let vmas = layout.vmas(view, Gva(MM)).items;
            let name = |vma| layout.name(view, &bounds, vma).unwrap();
            vmas.iter()
                .map(|vma| name(vma) == VmaName::Text(b"[heap]".to_vec()))
                .collect()
        });
        assert_eq!(heaps, expected, "{release}");
    }
}

#[test]
fn the_vsyscall_page_is_shown_to_those_who_may_use_it() {
    for (flags, mode, expected) in [
        (2u64, 0u64, true),
        (3, 1, true),
        (2, 2, false),
        (1, 0, false),
    ] {
        let (mut guest, layout) = (guest(Era::Maple, &PROCESS), layout(Era::Maple));
        guest.words(MM + 96 + 16, &[flags]);
        guest.words(MODE, &[mode]);
        let line = guest.look(|view| {
            let bounds = layout.bounds(view, Gva(MM)).unwrap();
            let gate = layout.gate(view, &bounds).unwrap()?;
            Some(
                layout
                    .maps_line(view, &bounds, &gate, |_| Vec::new())
                    .unwrap(),
            )
        });
        let text =
            b"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]";
        assert_eq!(line, expected.then(|| text.to_vec()), "{flags} {mode}");
    }
}

#[test]
fn files_are_identified() {
    let (guest, layout) = (guest(Era::Maple, &PROCESS), layout(Era::Maple));
    let expected = FileIdentity {
        major: 259,
        minor: 0x1_0002,
        inode: 42,
    };
    assert_eq!(
        guest.look(|view| layout.identity(view, Gva(FILE))),
        Ok(expected)
    );
    let error = guest
        .look(|view| layout.identity(view, Gva(WILD)))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("file at 0xffff888001200000 cannot be read")
    );
}

#[test]
fn what_is_broken_is_named_and_what_stands_before_it_is_kept() {
    for (era, address, word, kept, part) in [
        (
            Era::Maple,
            area(2) + 8,
            0,
            2,
            "the vm_area_struct at 0xffff888001012200 reaches from 0x602000 to 0x0",
        ),
        (
            Era::Maple,
            area(3) + 16,
            BASE,
            3,
            "belongs to the mm_struct 0xffff888001000000, not",
        ),
        (
            Era::Maple,
            area(0) + 16,
            0,
            0,
            "belongs to the mm_struct 0x0, not",
        ),
        (
            Era::Maple,
            MM + 8,
            WILD | 0x1e,
            0,
            "the mm_struct at 0xffff888001010000 cannot be listed: maple node",
        ),
        (
            Era::List,
            area(4) + 96,
            area(1),
            5,
            "starts at 0x600000, below the end 0x7f101000",
        ),
        (
            Era::List,
            area(4) + 96,
            area(4),
            5,
            "starts at 0x7f100000, below the end 0x7f101000",
        ),
        (
            Era::List,
            area(1) + 96,
            WILD,
            2,
            "vm_area_struct at 0xffff888001200000 cannot be read",
        ),
        (
            Era::List,
            area(2) + 8,
            0x60_2000,
            2,
            "starts at 0x602000, below",
        ),
    ] {
        let (mut guest, layout) = (guest(era, &PROCESS), layout(era));
        guest.words(address, &[word]);
        let walk = guest.look(|view| layout.vmas(view, Gva(MM)));
        let error = walk.error.map(|e| e.to_string()).unwrap_or_default();
        assert_says(&error, part);
        assert_eq!(walk.items.len(), kept, "{part}");
    }
}

#[test]
fn search_trees_that_never_end_are_given_up() {
    let (mut guest, layout) = (guest(Era::List, &PROCESS), layout(Era::List));
    let node = area(3) + 104;
    guest.words(node, &[1, node, node]);
    let found = guest.look(|view| layout.find(view, Gva(MM), 0x10));
    assert_says(found.unwrap_err(), "more than 64 levels");
}

#[test]
fn names_that_cannot_be_read_are_errors() {
    for (number, offset, part) in [
        (5, 48, "vm_operations_struct at 0xffff888001200000"),
        (5, 56, "vm_special_mapping at 0xffff888001200000"),
        (4, 64, "anon_vma_name at 0xffff888001200000"),
    ] {
        let (mut guest, layout) = (guest(Era::Maple, &PROCESS), layout(Era::Maple));
        guest.words(area(number) + offset, &[WILD]);
        let error = guest.look(|view| {
            let bounds = layout.bounds(view, Gva(MM)).unwrap();
            let vma = layout.vmas(view, Gva(MM)).items[usize::try_from(number).unwrap()];
            layout.name(view, &bounds, &vma).unwrap_err().to_string()
        });
        assert!(error.starts_with(part), "{error}");
    }
}
