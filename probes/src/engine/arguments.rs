//! The arguments of a static probe, read as the notes of its site say.

use std::ops::Deref;

use introspect::Gva;
use introspect::x86_64::virtual_memory::read_virtual;

use super::hit::Hit;
use crate::event::MAX_STATIC_ARGUMENTS;
use crate::probe::StaticPlace;

/// A few words, without allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Arguments {
    words: [u64; MAX_STATIC_ARGUMENTS],
    length: usize,
}

impl Arguments {
    /// Reads the arguments of a static probe at a hit of one of its sites. An unknown one is 0 and
    /// clears `complete`.
    pub(super) fn of_site(hit: &Hit<'_>, place: &StaticPlace, complete: &mut bool) -> Self {
        let read = |address: u64, buf: &mut [u8]| {
            read_virtual(hit.memory, hit.space(), Gva(address), buf).is_ok()
        };
        let bias = hit.address.0.wrapping_sub(place.address);
        let mut arguments = Self::default();
        for (word, argument) in arguments.words.iter_mut().zip(place.arguments.iter()) {
            let value = argument.value(hit.registers, bias, &read);
            *complete &= value.is_some();
            *word = value.unwrap_or_default();
            arguments.length += 1;
        }
        arguments
    }
}

impl Deref for Arguments {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        self.words.get(..self.length).unwrap_or_default()
    }
}
