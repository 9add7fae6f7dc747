#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;
use crate::kernel::test_kernel::{BASE, FREE, TestKernel, Types, WILD};
use crate::test_says::assert_says;

const DENSE: u64 = 0;
const LEAF: u64 = 1;
const RANGE: u64 = 2;
const ARANGE: u64 = 3;
/// The offsets of slots.
const RANGE_SLOTS: u64 = 128;
const ARANGE_SLOTS: u64 = 80;
const RANGE_END: u64 = 248;
const ARANGE_END: u64 = 240;
const TREE: u64 = FREE;
const ROOT: u64 = TREE + 8;

/// Adds the types of Linux 6.1.
pub(in crate::kernel) fn maple_types(t: &mut Types, kinds: [u32; 4]) -> u32 {
    let [pivots, slots] = [15, 16].map(|count| t.array(8, count));
    let [few_pivots, few_slots] = [9, 10].map(|count| t.array(8, count));
    let all_slots = t.array(8, 31);
    let word = t.integer(8);
    let meta = t.numbers("maple_metadata", &[("end", 0, 1), ("gap", 1, 1)]);
    t.structure(
        "maple_range_64",
        256,
        &[
            ("parent", 0, word),
            ("pivot", 8, pivots),
            ("slot", 128, slots),
            ("meta", 248, meta),
        ],
    );
    t.structure(
        "maple_arange_64",
        248,
        &[
            ("parent", 0, word),
            ("pivot", 8, few_pivots),
            ("slot", 80, few_slots),
            ("meta", 240, meta),
        ],
    );
    t.structure(
        "maple_node",
        256,
        &[("parent", 0, word), ("slot", 8, all_slots)],
    );
    let names = [
        "maple_dense",
        "maple_leaf_64",
        "maple_range_64",
        "maple_arange_64",
    ];
    let values: Vec<_> = names.into_iter().zip(kinds).collect();
    t.enumeration("maple_type", &values);
    t.numbers("maple_tree", &[("ma_root", 8, 8), ("ma_flags", 16, 4)])
}

fn layout() -> MapleLayout {
    let mut types = Types::default();
    maple_types(&mut types, [0, 1, 2, 3]);
    MapleLayout::new(&types.finish()).unwrap()
}

fn pointer(node: u64, kind: u64) -> u64 {
    node | kind << 3 | 4
}

fn node(number: u64) -> u64 {
    FREE + 0x1000 + number * 256
}

/// Writes a node from (last index, value) pairs, as the kernel leaves it.
fn write_node(guest: &mut TestKernel, at: u64, kind: u64, slots: &[(u64, u64)]) -> u64 {
    let (first_slot, end, pivots) = match kind {
        ARANGE => (ARANGE_SLOTS, ARANGE_END, 9),
        _ => (RANGE_SLOTS, RANGE_END, 15),
    };
    guest.put(at, [0; 256]);
    guest.words(at, &[TREE | 1]);
    guest.put(at + end, [u8::try_from(slots.len() - 1).unwrap()]);
    for (number, (last, value)) in (0..).zip(slots) {
        if number < pivots {
            guest.words(at + 8 + 8 * number, &[*last]);
        }
        guest.words(at + first_slot + 8 * number, &[*value]);
    }
    pointer(at, kind)
}

/// Writes a tree that has these (last index, value) pairs in its leaves; returns the root.
pub(in crate::kernel) fn write_tree(
    guest: &mut TestKernel,
    nodes: u64,
    leaf_size: usize,
    inner: u64,
    pairs: &[(u64, u64)],
) -> u64 {
    let mut next = nodes;
    let mut level = pairs.to_vec();
    let mut kind = LEAF;
    loop {
        let size = if kind == ARANGE {
            leaf_size.min(10)
        } else {
            leaf_size
        };
        let mut above = Vec::new();
        for part in level.chunks(size) {
            above.push((part.last().unwrap().0, write_node(guest, next, kind, part)));
            next += 256;
        }
        match above[..] {
            [(_, root)] => return root | 2,
            _ => (level, kind) = (above, inner),
        }
    }
}

fn entry(first: u64, last: u64, value: u64) -> MapleEntry {
    MapleEntry { first, last, value }
}

/// Makes (last index, value) pairs with nothing (0) in between, and the entries expected of them.
fn pairs(ranges: &[(u64, u64)]) -> (Vec<(u64, u64)>, Vec<MapleEntry>) {
    let (mut pairs, mut entries, mut next) = (Vec::new(), Vec::new(), 0);
    for (number, (first, last)) in (0..).zip(ranges) {
        if *first > next {
            pairs.push((first - 1, 0));
        }
        let value = BASE + number * 8;
        pairs.push((*last, value));
        entries.push(entry(*first, *last, value));
        next = last + 1;
    }
    pairs.push((u64::MAX, 0));
    (pairs, entries)
}

#[test]
fn small_trees_need_no_node() {
    for (root, expected) in [
        (0, vec![]),
        (BASE, vec![entry(0, 0, BASE)]),
        (0x406, vec![entry(0, 0, 0x406)]),
    ] {
        let mut guest = TestKernel::default();
        guest.words(ROOT, &[root]);
        guest.look(|view| {
            let walk = layout().entries(view, Gva(TREE));
            assert_eq!((walk.items, walk.error), (expected.clone(), None));
            let found = layout().find(view, Gva(TREE), 0);
            assert_eq!(found, Ok(expected.first().copied()));
            assert_eq!(layout().find(view, Gva(TREE), 1), Ok(None));
        });
    }
}

#[test]
fn trees_of_all_shapes_are_walked_and_searched() {
    let ranges: Vec<(u64, u64)> = (0..200)
        .map(|i| (i * 10 + 3 * (i % 2), i * 10 + 9))
        .collect();
    let (pairs, entries) = pairs(&ranges);
    let layout = layout();
    for (size, inner) in [
        (16, ARANGE),
        (15, ARANGE),
        (16, RANGE),
        (15, RANGE),
        (4, RANGE),
        (2, ARANGE),
    ] {
        let mut guest = TestKernel::default();
        let root = write_tree(&mut guest, node(0), size, inner, &pairs);
        guest.words(ROOT, &[root]);
        guest.look(|view| {
            let walk = layout.entries(view, Gva(TREE));
            assert_eq!(walk.error, None, "{size} {inner}");
            assert_eq!(walk.items, entries, "{size} {inner}");
            for index in (0..2100).chain([u64::MAX]) {
                let expected = entries.iter().find(|e| e.first <= index && index <= e.last);
                let found = layout.find(view, Gva(TREE), index);
                assert_eq!(found, Ok(expected.copied()), "{size} {inner} {index}");
            }
        });
    }
}

#[test]
fn dense_nodes_have_one_index_per_slot() {
    let mut guest = TestKernel::default();
    let dense = node(1);
    guest.words(dense, &[node(0), BASE, 0, BASE + 8]);
    let root = write_node(
        &mut guest,
        node(0),
        RANGE,
        &[
            (9, pointer(node(2), LEAF)),
            (40, pointer(dense, DENSE)),
            (u64::MAX, pointer(node(3), LEAF)),
        ],
    );
    write_node(&mut guest, node(2), LEAF, &[(9, BASE + 64)]);
    write_node(&mut guest, node(3), LEAF, &[(50, 0), (u64::MAX, BASE + 72)]);
    guest.words(ROOT, &[root | 2]);
    guest.look(|view| {
        let walk = layout().entries(view, Gva(TREE));
        let expected = vec![
            entry(0, 9, BASE + 64),
            entry(10, 10, BASE),
            entry(12, 12, BASE + 8),
            entry(51, u64::MAX, BASE + 72),
        ];
        assert_eq!((walk.items, walk.error), (expected, None));
    });
}

#[test]
fn numbers_of_node_types_are_the_kernels() {
    let mut types = Types::default();
    maple_types(&mut types, [0, 3, 2, 1]);
    let other = MapleLayout::new(&types.finish()).unwrap();
    let mut guest = TestKernel::default();
    let at = node(0);
    write_node(&mut guest, at, LEAF, &[(4, BASE), (u64::MAX, 0)]);
    guest.words(ROOT, &[pointer(at, 3) | 2]);
    guest.look(|view| {
        let found = other.find(view, Gva(TREE), 2);
        assert_eq!(found, Ok(Some(entry(0, 4, BASE))));
    });
}

/// Writes two leaves below a root.
fn two_leaves() -> TestKernel {
    let mut guest = TestKernel::default();
    write_node(
        &mut guest,
        node(1),
        LEAF,
        &[(4, BASE), (5, 0), (9, BASE + 8)],
    );
    write_node(&mut guest, node(2), LEAF, &[(12, BASE + 16), (u64::MAX, 0)]);
    let slots = [
        (9, pointer(node(1), LEAF)),
        (u64::MAX, pointer(node(2), LEAF)),
    ];
    let root = write_node(&mut guest, node(0), ARANGE, &slots);
    guest.words(ROOT, &[root | 2]);
    guest
}

#[test]
fn what_is_broken_is_named_and_what_stands_before_it_is_kept() {
    let second = node(0) + ARANGE_SLOTS + 8;
    for (address, word, kept, part) in [
        (node(2), node(2) | 6, 2, "is dead"),
        (
            second,
            pointer(WILD, LEAF),
            2,
            "maple node at 0xffff888001200000 cannot be read",
        ),
        (second, pointer(node(2), 7), 2, "is of type 7"),
        (
            second,
            0x1e,
            2,
            "slot 1 of the maple node at 0xffff888001011000: expected a node, found 0x1e",
        ),
        (second, 0, 2, "expected a node, found 0x0"),
        (
            node(2) + 8,
            9,
            2,
            "pivot 0 of the maple node at 0xffff888001011200 is 0x9, outside 0xa",
        ),
        (node(1) + 16, 11, 0, "is 0xb, outside 0x5 to 0x9"),
        (node(1) + 16, 3, 0, "is 0x3, outside 0x5 to 0x9"),
        (second, pointer(node(0), ARANGE), 2, "is 0x9, outside 0xa"),
        (
            node(0) + ARANGE_SLOTS,
            pointer(node(0), ARANGE),
            0,
            "more than 31 levels",
        ),
        (ROOT, pointer(WILD, ARANGE) | 2, 0, "cannot be read"),
    ] {
        let mut guest = two_leaves();
        guest.words(address, &[word]);
        guest.look(|view| {
            let walk = layout().entries(view, Gva(TREE));
            let error = walk.error.map(|e| e.to_string()).unwrap_or_default();
            assert_says(&error, part);
            assert_eq!(walk.items.len(), kept, "{part}");
        });
    }
    let error = TestKernel::default().look(|view| layout().find(view, Gva(WILD), 0).unwrap_err());
    assert!(
        error
            .to_string()
            .starts_with("maple tree at 0xffff888001200000 cannot")
    );
}

#[test]
fn kernels_without_maple_trees_are_told() {
    assert_says(
        MapleLayout::new(&Types::default().finish()).unwrap_err(),
        "no struct, union or typedef \"maple_node\"",
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_ranges_are_found(
        lengths in prop::collection::vec((1u64..1 << 40, 0u64..3), 0..150),
        size in 2usize..17,
    ) {
        let mut next = 0;
        let ranges: Vec<_> = lengths.iter().map(|(length, gap)| {
            let first = next + gap;
            next = first + length;
            (first, next - 1)
        }).collect();
        let (pairs, entries) = pairs(&ranges);
        let mut guest = TestKernel::default();
        let root = write_tree(&mut guest, node(0), size, ARANGE, &pairs);
        guest.words(ROOT, &[root]);
        let walk = guest.look(|view| layout().entries(view, Gva(TREE)));
        prop_assert_eq!(walk, Partial { items: entries, error: None });
    }

    #[test]
    fn damage_ends_in_an_error_or_in_ordered_entries(
        damage in prop::collection::vec((0u64..3 * 256, any::<u8>()), 1..20),
    ) {
        let mut guest = two_leaves();
        for (offset, byte) in damage {
            guest.put(node(0) + offset, [byte]);
        }
        let walk = guest.look(|view| layout().entries(view, Gva(TREE)));
        for pair in walk.items.windows(2) {
            prop_assert!(pair[0].last < pair[1].first);
        }
        for entry in &walk.items {
            let found = guest.look(|view| layout().find(view, Gva(TREE), entry.first));
            prop_assert_eq!(found, Ok(Some(*entry)));
        }
    }
}
