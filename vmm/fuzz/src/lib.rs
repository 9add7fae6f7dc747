//! What the fuzz targets share: numbers read from the input, and a bound to memory.
//!
//! Each target hands its input to one decoder. A panic, no end, memory without bound and what must hold for any input are
//! what is looked for; the targets' first lines say what that is.
#![forbid(unsafe_code)]

use std::alloc::System;

use cap::Cap;
use libfuzzer_sys::arbitrary::{Arbitrary, Unstructured};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Sets how many bytes the process may have allocated at once. More ends it, unless what asks for them takes a no.
///
/// # Panics
/// If it has more already.
pub fn limit_memory(bytes: usize) {
    ALLOCATOR.set_limit(bytes).expect("less is allocated");
}

/// The input, read from its start; zeros follow its end.
pub struct Input<'a>(Unstructured<'a>);

impl<'a> Input<'a> {
    /// Of these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(Unstructured::new(bytes))
    }

    /// The next number or array of numbers, little endian.
    pub fn value<T: Arbitrary<'a> + Default>(&mut self) -> T {
        self.0.arbitrary().unwrap_or_default()
    }

    /// At most so many bytes, fewer at the end.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let count = most.min(self.0.len());
        self.0.bytes(count).unwrap_or_default()
    }

    /// Whether all was read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All that is left.
    #[must_use]
    pub fn rest(self) -> &'a [u8] {
        self.0.take_rest()
    }
}
