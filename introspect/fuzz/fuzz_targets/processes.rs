//! A query about processes. The input is the first task and, at any pointer, everything else. Its
//! first byte also selects the query.
#![no_main]

use std::sync::LazyLock;

use hostile::{Endless, START, ask, space, types};
use introspect::kernel::running::RunningKernel;
use introspect::kernel::symbols::{Symbols, SymbolsBuilder};
use introspect::system::System;
use introspect::{Gva, PausedMemory};
use libfuzzer_sys::fuzz_target;

/// The maximum number of tasks that are read one by one.
const MOST: usize = 4;

static SYMBOLS: LazyLock<Symbols> = LazyLock::new(|| {
    let mut symbols = SymbolsBuilder::with_capacity(8);
    for (place, name) in [
        "init_task",
        "vmemmap_base",
        "page_offset_base",
        "init_top_pgt",
    ]
    .into_iter()
    .enumerate()
    {
        let address = START + place as u64 * 8;
        symbols
            .push(name.as_bytes(), address, b'D', false)
            .expect("few symbols");
    }
    symbols.finish(None)
});

static SYSTEM: LazyLock<System> = LazyLock::new(|| {
    let nothing = Endless::new(&[0; 8]).expect("an input");
    let memory = PausedMemory::new(&nothing);
    let kernel = RunningKernel::new(SYMBOLS.clone(), Ok(types().clone()), space());
    System::new(&kernel, &memory)
});

fuzz_target!(|bytes: &[u8]| {
    let Some(guest) = Endless::new(bytes) else {
        return;
    };
    let memory = PausedMemory::new(&guest);
    let look = SYSTEM.look(&memory, &[]);
    ask(look, bytes[0], 0, MOST);
    let _ = look.path_of(Gva(START));
});
