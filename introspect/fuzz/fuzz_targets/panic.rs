//! The message of a panic in the kernel's log, somewhere in memory. The input is the memory.
#![no_main]

use std::ops::Range;

use introspect::kernel::panic::PanicFinder;
use introspect::{Gpa, PhysicalMemory, PhysicalReadError};
use libfuzzer_sys::fuzz_target;

struct Memory<'i>(&'i [u8]);

impl PhysicalMemory for Memory<'_> {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        let length = buf.len();
        let bytes = usize::try_from(address.0).ok().and_then(|at| {
            let end = at.checked_add(length)?;
            self.0.get(at..end)
        });
        buf.copy_from_slice(bytes.ok_or(PhysicalReadError { address, length })?);
        Ok(())
    }

    fn ram(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.0.len() as u64).collect()
    }
}

fuzz_target!(|bytes: &[u8]| {
    let memory = Memory(bytes);
    if let Some(panic) = PanicFinder::of_memory(&memory, None).find(&memory) {
        let text = panic
            .text
            .expect("without the variable it is known by the text");
        assert!(text.len() <= 3 * bytes.len() && text == text.trim());
    }
    let variable = bytes.first().map(|at| Gpa(u64::from(*at)));
    let _ = PanicFinder::of_memory(&memory, variable).find(&memory);
});
