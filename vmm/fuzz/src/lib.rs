//! Shared by the fuzz targets: numbers read from the input, and a bound on memory.
//!
//! Each target passes its input to one decoder. The faults are a panic, no end, unbounded memory
//! and a violated invariant; the targets' first lines have the invariants.
#![forbid(unsafe_code)]

use std::alloc::System;

use cap::Cap;
use libfuzzer_sys::arbitrary::{Arbitrary, Unstructured};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Limits the bytes that the process may have allocated at once. More ends it, unless the
/// allocation may fail.
///
/// # Panics
/// If it has more already.
pub fn limit_memory(bytes: usize) {
    ALLOCATOR.set_limit(bytes).expect("less is allocated");
}

/// The input, read from its start; zeros follow its end.
pub struct Input<'a>(Unstructured<'a>);

impl<'a> Input<'a> {
    /// Makes an input of these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(Unstructured::new(bytes))
    }

    /// Reads the next number or array of numbers, little endian.
    pub fn value<T: Arbitrary<'a> + Default>(&mut self) -> T {
        self.0.arbitrary().unwrap_or_default()
    }

    /// Reads at most `most` bytes, fewer at the end.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let count = most.min(self.0.len());
        self.0.bytes(count).unwrap_or_default()
    }

    /// Returns whether all was read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the rest.
    #[must_use]
    pub fn rest(self) -> &'a [u8] {
        self.0.take_rest()
    }
}
