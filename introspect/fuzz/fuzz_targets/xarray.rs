//! XArrays: the input is the array and, at any pointer, its nodes.
#![no_main]

use std::sync::LazyLock;

use hostile::{Endless, START, types};
use introspect::Gva;
use introspect::kernel::xarray::XArrayLayout;
use libfuzzer_sys::fuzz_target;

static LAYOUT: LazyLock<XArrayLayout> =
    LazyLock::new(|| XArrayLayout::new(types()).expect("a kernel with xarrays"));

fuzz_target!(|bytes: &[u8]| {
    let Some(guest) = Endless::new(bytes) else {
        return;
    };
    guest.look(|view| {
        for shift in 0..64 {
            for index in [1u64 << shift, (1 << shift) - 1] {
                let _ = LAYOUT.find(view, Gva(START), index);
            }
        }
    });
});
