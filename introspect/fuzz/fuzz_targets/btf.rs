//! A kernel's types.
#![no_main]

use introspect::kernel::btf::{Btf, TypeId};
use libfuzzer_sys::fuzz_target;

/// The maximum number of types that are queried one by one.
const MOST: usize = 64;

fuzz_target!(|bytes: &[u8]| {
    let Ok(btf) = Btf::parse(bytes) else {
        return;
    };
    for id in 0..=btf.len().min(MOST) as u32 + 1 {
        let _ = btf.type_name(TypeId(id));
    }
    for path in [
        "task_struct.pid",
        "task_struct.se.vruntime",
        "task_struct.comm",
        "list_head.next",
        "a.b",
        "a.b.c",
    ] {
        let _ = btf.member(path);
        let _ = btf.enumerator(path);
    }
    for name in ["task_struct", "list_head", "vfs_read", "a", ""] {
        let _ = btf.size_of(name);
        let _ = btf.func_proto_args(name);
    }
});
