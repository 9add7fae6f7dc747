//! Fuzzes dumps in the compressed format of kdump: a damaged one is refused, or has pages that are
//! not there.
#![no_main]

use std::alloc::System;

use cap::Cap;
use exotrace::hostile::dump;
use libfuzzer_sys::fuzz_target;

/// More at once ends the process: the bitmap of 4 TiB takes 128 MiB, and the ranges are few.
#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, 1 << 30);

fuzz_target!(|bytes: &[u8]| {
    let _ = dump(bytes);
});
