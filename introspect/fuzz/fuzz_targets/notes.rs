//! Build ids among notes.
#![no_main]

use introspect::user::build_id::BuildId;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for align in [4, 8] {
        if let Some(id) = BuildId::in_notes(bytes, align) {
            let id = id.as_bytes();
            assert!(bytes.windows(id.len()).any(|part| part == id));
        }
    }
});
