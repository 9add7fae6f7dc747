//! ORC tables: addresses first, then as many records.
#![no_main]

use introspect::stack::orc::OrcCopy;
use introspect::stack::orc_versions::OrcFormat;
use libfuzzer_sys::fuzz_target;

const ADDRESS: u64 = 0xffff_ffff_8200_0000;
/// The size in bytes of an address and its record.
const PAIR: usize = 4 + 6;

fuzz_target!(|bytes: &[u8]| {
    for version in ["4.14.0", "5.4.0", "6.1.0", "6.3.0", "6.12.0"] {
        let banner = format!("Linux version {version}");
        let format = OrcFormat::of(None, Some(&banner)).expect("a version with ORC");
        let (ips, entries) = bytes.split_at(bytes.len() / PAIR * 4);
        let Ok(table) = OrcCopy::from_bytes(ADDRESS, ips, entries, format) else {
            return;
        };
        assert!(table.iter().is_sorted_by_key(|(start, _)| start));
        for (start, _) in table.iter() {
            let _ = table.find(start);
            let _ = table.find(start.wrapping_sub(1));
        }
    }
});
