//! Maple trees: the input is the tree and, at any pointer, its nodes.
#![no_main]

use std::sync::LazyLock;

use hostile::{Endless, START, types};
use introspect::Gva;
use introspect::kernel::maple_tree::MapleLayout;
use libfuzzer_sys::fuzz_target;

static LAYOUT: LazyLock<MapleLayout> =
    LazyLock::new(|| MapleLayout::new(types()).expect("a kernel with maple trees"));

fuzz_target!(|bytes: &[u8]| {
    let Some(guest) = Endless::new(bytes) else {
        return;
    };
    guest.look(|view| {
        let walk = LAYOUT.entries(view, Gva(START));
        assert!(walk.items.is_sorted_by(|a, b| a.last < b.first));
        let sound = walk.error.is_none();
        for entry in walk.items.iter().take(16) {
            assert!(entry.first <= entry.last && entry.value != 0);
            let found = LAYOUT.find(view, Gva(START), entry.last);
            assert!(!sound || found == Ok(Some(*entry)), "{found:?} {entry:?}");
        }
    });
});
