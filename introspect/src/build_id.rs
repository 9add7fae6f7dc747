//! The build id: a hash that the linker puts into a note of an object, different for every build.
//!
//! Programs, libraries, the kernel and the vdso have one. The kernel's is in the bytes from
//! `__start_notes` to `__stop_notes`.

use std::fmt;

use object::LittleEndian;
use object::elf::{self, FileHeader64};
use object::read::elf::NoteIterator;

/// Most bytes of an id: linkers write 8, 16 or 20, users what they like.
const MAX_ID: usize = 64;

/// A build id of 1 to 64 bytes. Shown in hexadecimal, as by file(1).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BuildId(Vec<u8>);

impl BuildId {
    /// The id of these bytes, if they are 1 to 64.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let fits = (1..=MAX_ID).contains(&bytes.len());
        fits.then(|| Self(bytes.to_vec()))
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The id among notes, each aligned to `align` bytes (4, or 8 if the segment of the notes is);
    /// damaged notes end the search.
    #[must_use]
    pub fn in_notes(notes: &[u8], align: u64) -> Option<Self> {
        // The two classes of ELF have the same notes.
        let notes = NoteIterator::<FileHeader64<LittleEndian>>::new(LittleEndian, align, notes);
        notes.ok()?.map_while(Result::ok).find_map(|note| {
            let is_id = note.name() == elf::ELF_NOTE_GNU
                && note.n_type(LittleEndian) == elf::NT_GNU_BUILD_ID;
            Self::new(note.desc()).filter(|_| is_id)
        })
    }
}

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BuildId({self})")
    }
}
