//! The build id: a hash that the linker puts into a note of the object. It is the same in a file
//! and its separate debug file, and different for every build.
//!
//! The kernel and the vdso have one too. [`BuildId::in_notes`] finds it in the bytes of their
//! notes. Those of a running kernel are between `__start_notes` and `__stop_notes`.

use object::elf;

use super::lost::{LostPart, Part};
use super::object_file::ObjectFile;
pub use crate::build_id::BuildId;

/// Most bytes of notes that are looked at.
const MAX_NOTES: u64 = 1 << 20;

impl ObjectFile<'_> {
    /// Returns its build id, or `None` if it was linked without one.
    ///
    /// # Errors
    /// If none was found and notes could not be read.
    pub fn build_id(&self) -> Result<Option<BuildId>, LostPart> {
        let mut lost = None;
        let segments = self.segments().iter();
        for segment in segments.filter(|segment| segment.kind == elf::PT_NOTE) {
            match self.segment_bytes(segment, MAX_NOTES) {
                Ok(notes) => {
                    // The alignment of notes with 8-byte properties is the segment's. The id may be
                    // in either kind.
                    let found = [4, 8].map(|align| BuildId::in_notes(&notes, align));
                    if let Some(id) = found.into_iter().flatten().next() {
                        return Ok(Some(id));
                    }
                }
                Err(reason) => lost = Some(reason),
            }
        }
        // A separate debug file may have notes only in sections.
        let sections = self.sections().iter();
        for section in sections.filter(|section| section.kind == elf::SHT_NOTE) {
            match self.section_bytes(section, MAX_NOTES) {
                Ok(notes) => {
                    if let Some(id) = BuildId::in_notes(&notes, 4) {
                        return Ok(Some(id));
                    }
                }
                Err(error) => lost = lost.or(Some(error.reason)),
            }
        }
        let part = Part::Notes;
        lost.map_or(Ok(None), |reason| Err(LostPart { part, reason }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Builds a note: name with its NUL, type, contents.
    fn note(name: &[u8], kind: u32, contents: &[u8], align: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [name.len() as u32, contents.len() as u32, kind] {
            bytes.extend(word.to_le_bytes());
        }
        for part in [name, contents] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(align), 0);
        }
        bytes
    }

    #[test]
    fn the_id_is_found_among_other_notes() {
        let id = note(b"GNU\0", 3, &[0xde, 0xad, 0xbe, 0xef], 4);
        let abi = note(b"GNU\0", 1, &[0; 16], 4);
        let other = note(b"Xen\0", 3, &[1, 2, 3, 4], 4);
        let long_name = note(b"stapsdt\0", 3, &[9; 13], 4);
        for (name, notes, expected) in [
            ("alone", vec![&id], Some("deadbeef")),
            (
                "after others",
                vec![&abi, &other, &long_name, &id],
                Some("deadbeef"),
            ),
            ("others only", vec![&abi, &other], None),
            ("nothing", vec![], None),
        ] {
            let notes: Vec<u8> = notes.into_iter().flatten().copied().collect();
            let found = BuildId::in_notes(&notes, 4).map(|id| id.to_string());
            assert_eq!(found.as_deref(), expected, "{name}");
        }
        let shifted = [&[0][..], &id].concat();
        let found = BuildId::in_notes(&shifted[1..], 4).map(|id| id.to_string());
        assert_eq!(found.as_deref(), Some("deadbeef"), "at an odd address");
        let property = note(b"GNU\0", 5, &[0; 20], 8);
        let aligned = [property, note(b"GNU\0", 3, &[7; 20], 8)].concat();
        assert_eq!(BuildId::in_notes(&aligned, 8), BuildId::new(&[7; 20]));
    }

    #[test]
    fn notes_that_lie_about_their_size_have_no_id() {
        let id = note(b"GNU\0", 3, &[0xde, 0xad, 0xbe, 0xef], 4);
        for length in 0..id.len() {
            assert_eq!(BuildId::in_notes(&id[..length], 4), None, "{length} bytes");
        }
        for word in 0..2 {
            let mut wrong = id.clone();
            wrong[word * 4..word * 4 + 4].copy_from_slice(&u32::MAX.to_le_bytes());
            assert_eq!(BuildId::in_notes(&wrong, 4), None, "word {word}");
        }
        assert_eq!(BuildId::in_notes(&note(b"GNU\0", 3, &[], 4), 4), None);
        assert_eq!(BuildId::in_notes(&note(b"GNU\0", 3, &[1; 65], 4), 4), None);
    }
}
