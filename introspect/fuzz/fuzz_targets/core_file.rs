//! Core files: segments and CPUs.
#![no_main]

use introspect::core_file::CoreFile;
use introspect::{Gpa, PhysicalMemory};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(core) = CoreFile::parse(bytes.to_vec()) else {
        return;
    };
    let ram = core.ram();
    assert!(ram.is_sorted_by(|a, b| a.end <= b.start));
    let mut buf = [0; 64];
    for range in &ram {
        let length = usize::try_from(range.end - range.start).map_or(64, |l| l.min(64));
        assert_eq!(
            core.read_physical(Gpa(range.start), &mut buf[..length]),
            Ok(())
        );
        let _ = core.read_physical(Gpa(range.end), &mut buf);
        let _ = core.read_physical(Gpa(range.start.wrapping_sub(1)), &mut buf);
    }
    for cpu in core.cpus() {
        let _ = cpu.address_space();
    }
});
