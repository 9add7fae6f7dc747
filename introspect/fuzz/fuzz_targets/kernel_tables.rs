//! The cache of a kernel's decoded symbols and types, written by an attacker, with a correct
//! checksum.
//!
//! Its content is trusted. Queries of it must end, and must not panic.
#![no_main]

use introspect::kernel::btf::TypeId;
use introspect::kernel::cached::{CacheError, DecodedKernel, set_checksum};
use introspect::kernel::shared_bytes::SharedBytes;
use libfuzzer_sys::fuzz_target;

/// The maximum number of symbols and types that are queried one by one.
const MOST: usize = 64;

/// Loads the kernel, whatever its key.
fn taken_up(bytes: &[u8]) -> Option<DecodedKernel> {
    let take_up = |key: &[u8]| DecodedKernel::from_bytes(key, SharedBytes::new(bytes.to_vec()));
    match take_up(b"key") {
        Err(CacheError::OtherKernel { found }) => take_up(&found).ok(),
        other => other.ok(),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut block = bytes.to_vec();
    set_checksum(&mut block);
    let Some(kernel) = taken_up(&block) else {
        return;
    };
    let symbols = &kernel.symbols;
    for symbol in symbols.iter().take(MOST) {
        let _ = symbols.resolve(symbol.address);
        let _ = symbols.all_of(symbol.name).take(MOST).count();
        let _ = symbols.address_of(symbol.name);
    }
    let _ = symbols.text_functions().take(MOST).count();
    let _ = symbols.nearest_names("vfs_read", 3);
    let _ = symbols.resolve(u64::MAX);
    let Some(types) = &kernel.btf else {
        return;
    };
    for id in 0..=types.len().min(MOST) as u32 + 1 {
        let _ = types.type_name(TypeId(id));
    }
    for path in ["task_struct.pid", "task_struct.se.vruntime", "a.b.c"] {
        let _ = types.member(path);
        let _ = types.enumerator(path);
    }
    for name in ["task_struct", "vfs_read", ""] {
        let _ = types.size_of(name);
        let _ = types.func_proto_args(name);
    }
});
