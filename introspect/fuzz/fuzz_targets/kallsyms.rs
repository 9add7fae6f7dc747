//! The symbol tables among the bytes of a kernel.
#![no_main]

use introspect::kernel::kallsyms;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let tables = kallsyms::find(bytes, kallsyms::standing_at(0xffff_ffff_8100_0000));
    let Ok(symbols) = tables.and_then(|found| found.symbols(None)) else {
        return;
    };
    let mut named = 0;
    for symbol in symbols.iter() {
        let found = symbols.resolve(symbol.address);
        assert!(found.is_none_or(|(found, offset)| found.address + offset == symbol.address));
        named += usize::from(symbols.all_of(symbol.name).any(|found| found == symbol));
    }
    assert_eq!(named, symbols.len(), "each is found by its name");
    assert!(symbols.text_functions().count() <= symbols.len());
    let _ = symbols.nearest_names("vfs_read", 3);
});
