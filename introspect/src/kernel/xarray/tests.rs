#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;
use crate::kernel::test_kernel::{BASE, FREE, TestKernel, Types, WILD};
use crate::test_says::assert_says;

const ARRAY: u64 = FREE;
const HEAD: u64 = ARRAY + 8;
const SLOTS: u64 = 40;

/// Adds the types of Linux 6.1, with nodes of 64 slots, or of 16 as in kernels built small.
pub(crate) fn xarray_types(t: &mut Types, slots: u32) -> u32 {
    let array = t.array(8, slots);
    let byte = t.integer(1);
    t.structure(
        "xa_node",
        576,
        &[
            ("shift", 0, byte),
            ("offset", 1, byte),
            ("slots", SLOTS as u32, array),
        ],
    );
    t.numbers("xarray", &[("xa_flags", 4, 4), ("xa_head", 8, 8)])
}

fn layout(slots: u32) -> XArrayLayout {
    let mut types = Types::default();
    xarray_types(&mut types, slots);
    XArrayLayout::new(&types.finish()).unwrap()
}

fn node(number: u64) -> u64 {
    FREE + 0x1000 + number * 576
}

/// Writes a node; returns the entry that points to it.
fn write_node(guest: &mut TestKernel, at: u64, shift: u8, slots: &[(u64, u64)]) -> u64 {
    guest.put(at, [shift]);
    for (slot, value) in slots {
        guest.words(at + SLOTS + 8 * slot, &[*value]);
    }
    at | 2
}

fn sibling(of: u64) -> u64 {
    of << 2 | 2
}

fn pointer(first: u64, last: u64, to: u64) -> Option<XArrayEntry> {
    let value = XArrayValue::Pointer(Gva(to));
    Some(XArrayEntry { first, last, value })
}

fn number(first: u64, last: u64, value: u64) -> Option<XArrayEntry> {
    let value = XArrayValue::Value(value);
    Some(XArrayEntry { first, last, value })
}

fn find(guest: &TestKernel, index: u64) -> Result<Option<XArrayEntry>, XArrayError> {
    guest.look(|view| layout(64).find(view, Gva(ARRAY), index))
}

/// Writes two levels: a leaf with all kinds of entries, an entry of 64 indices, one of 128, and
/// nothing after it.
fn array() -> TestKernel {
    let mut guest = TestKernel::default();
    let leaf = write_node(
        &mut guest,
        node(1),
        0,
        &[
            (0, BASE),
            (2, BASE + 64),
            (3, 77 << 1 | 1),
            (4, BASE + 128),
            (5, sibling(4)),
            (6, sibling(4)),
            (7, sibling(4)),
            (8, ZERO),
            (62, u64::MAX),
            (63, BASE + 256),
        ],
    );
    let slots = [
        (0, leaf),
        (2, BASE + 512),
        (4, BASE + 1024),
        (5, sibling(4)),
    ];
    let head = write_node(&mut guest, node(0), 6, &slots);
    guest.words(HEAD, &[head]);
    guest
}

#[test]
fn arrays_without_nodes_hold_index_0_only() {
    for (head, expected) in [
        (0, None),
        (BASE, pointer(0, 0, BASE)),
        (9 << 1 | 1, number(0, 0, 9)),
        (ZERO, None),
    ] {
        let mut guest = TestKernel::default();
        guest.words(HEAD, &[head]);
        assert_eq!(find(&guest, 0), Ok(expected));
        for index in [1, 64, u64::MAX] {
            assert_eq!(find(&guest, index), Ok(None), "{index}");
        }
    }
}

#[test]
fn entries_are_found_with_their_ranges() {
    let guest = array();
    let large = pointer(4, 7, BASE + 128);
    for (index, expected) in [
        (0, pointer(0, 0, BASE)),
        (1, None),
        (2, pointer(2, 2, BASE + 64)),
        (3, number(3, 3, 77)),
        (4, large),
        (6, large),
        (7, large),
        (8, None),
        (62, number(62, 62, u64::MAX >> 1)),
        (63, pointer(63, 63, BASE + 256)),
        (64, None),
        (128, pointer(128, 191, BASE + 512)),
        (191, pointer(128, 191, BASE + 512)),
        (192, None),
        (256, pointer(256, 383, BASE + 1024)),
        (383, pointer(256, 383, BASE + 1024)),
        (4096, None),
        (4098, None),
        (u64::MAX, None),
    ] {
        assert_eq!(find(&guest, index), Ok(expected), "{index}");
    }
}

#[test]
fn the_highest_index_needs_eleven_levels() {
    let mut guest = TestKernel::default();
    let mut entry = BASE + 64;
    for level in 0..11 {
        let slot = if level == 10 { 15 } else { 63 };
        entry = write_node(
            &mut guest,
            node(level),
            6 * u8::try_from(level).unwrap(),
            &[(slot, entry)],
        );
    }
    guest.words(HEAD, &[entry]);
    assert_eq!(
        find(&guest, u64::MAX),
        Ok(pointer(u64::MAX, u64::MAX, BASE + 64))
    );
    assert_eq!(find(&guest, u64::MAX - 1), Ok(None));
    assert_eq!(find(&guest, 0), Ok(None));
}

#[test]
fn nodes_of_small_kernels_have_16_slots() {
    let mut guest = TestKernel::default();
    let leaf = write_node(&mut guest, node(1), 0, &[(15, BASE)]);
    let head = write_node(&mut guest, node(0), 4, &[(1, leaf), (16, BASE + 8)]);
    guest.words(HEAD, &[head]);
    guest.look(|view| {
        let small = layout(16);
        assert_eq!(small.find(view, Gva(ARRAY), 31), Ok(pointer(31, 31, BASE)));
        assert_eq!(small.find(view, Gva(ARRAY), 256), Ok(None));
    });
}

#[test]
fn what_is_broken_is_named() {
    for (address, word, index, part) in [
        (
            HEAD,
            WILD | 2,
            5,
            "node at 0xffff888001200000 cannot be read",
        ),
        (
            HEAD,
            RETRY,
            5,
            "slot 0 of the xarray node at 0xffff888001010000 holds 0x402",
        ),
        (HEAD, sibling(3), 0, "holds 0xe"),
        (node(0), 5, 5, "has shift 5"),
        (node(0), 66, 5, "has shift 66"),
        (node(1), 6, 5, "has shift 6,"),
        (node(0), 0, 0, "holds 0xffff888001011242"),
        (node(0), 12, 0, "has shift 0,"),
        (node(1) + SLOTS, RETRY, 0, "is being replaced"),
        (
            node(1) + SLOTS,
            u64::MAX - 1,
            0,
            "slot 0 of the xarray node",
        ),
        (node(1) + SLOTS, node(0) | 2, 0, "which means nothing there"),
        (
            node(1) + SLOTS + 5 * 8,
            sibling(6),
            5,
            "slot 6 of the xarray node",
        ),
        (
            node(0) + SLOTS + 3 * 8,
            sibling(0),
            192,
            "slot 0 of the xarray node",
        ),
        (node(0) + SLOTS, node(0) | 2, 5, "has shift 6,"),
        // After a gap, and before the entry.
        (
            node(0) + SLOTS + 6 * 8,
            sibling(2),
            6 * 64,
            "slot 6 of the xarray node at 0xffff888001011000 holds 0xa",
        ),
        (node(0) + SLOTS + 8, sibling(2), 64, "holds 0xa, which"),
    ] {
        let mut guest = array();
        guest.words(address, &[word]);
        assert_says(find(&guest, index).unwrap_err(), part);
    }
    let error = TestKernel::default().look(|view| layout(64).find(view, Gva(WILD), 0).unwrap_err());
    assert!(
        error
            .to_string()
            .starts_with("xarray at 0xffff888001200000 cannot")
    );
}

#[test]
fn nodes_of_odd_size_are_refused() {
    for slots in [1, 48, 128] {
        let mut types = Types::default();
        xarray_types(&mut types, slots);
        let error = XArrayLayout::new(&types.finish()).unwrap_err();
        assert!(error.to_string().starts_with("xa_node.slots is"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn damage_ends_in_an_error_or_in_a_range_around_the_index(
        damage in prop::collection::vec((0u64..2 * 576, any::<u8>()), 1..20),
        index in 0u64..5000,
    ) {
        let mut guest = array();
        for (offset, byte) in damage {
            guest.put(node(0) + offset, [byte]);
        }
        if let Ok(Some(entry)) = find(&guest, index) {
            prop_assert!(entry.first <= index && index <= entry.last);
        }
    }
}
