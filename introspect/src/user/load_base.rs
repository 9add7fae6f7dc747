//! The load base of an object: the distance between its link-time addresses and a process's.
//!
//! The caller has found the mapping that holds an address. The segment of the file that it maps
//! determines the distance. The manual page dt(4) describes this for `DTIOCRDVNODE`. The file
//! offset of the address lies in one segment, whose `p_offset` and `p_vaddr` correspond.

use super::file_bytes::FileMapping;
use super::object_file::Segment;
use crate::Gva;
use crate::x86_64::PAGE;

/// The load bias of an object in one process, added to a link-time address. It is 0 for a program
/// that is not position-independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadBase(u64);

/// The reason why the load base of a mapping is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LoadBaseError {
    /// The mapping does not hold the address.
    #[error("{address} is not in the mapping {} to {}", .mapping.start, .mapping.end)]
    NotInMapping {
        /// The requested address.
        address: Gva,
        /// The mapping passed.
        mapping: FileMapping,
    },
    /// The mapping shows a part of the file that is in no segment.
    #[error(
        "{address} shows offset {offset:#x} of the file, which is in none of its {segments} load segments: \
         the file was mapped as data, or replaced"
    )]
    NoSegment {
        /// The requested address.
        address: Gva,
        /// Its offset in the file.
        offset: u64,
        /// The number of load segments of the file.
        segments: usize,
    },
    /// The file cannot be loaded.
    #[error(
        "the segment at offset {offset:#x} is linked at {address:#x}: not the same place in a page, the file is damaged"
    )]
    Misaligned {
        /// The offset of the segment.
        offset: u64,
        /// The address of the segment.
        address: u64,
    },
}

impl LoadBase {
    /// Computes the load base of the object with these `segments`, from the `mapping` of it that
    /// holds `address`.
    ///
    /// Two segments may share a page of the file, and the mappings of both show all of it. Of
    /// these, the segment with all pages of the mapping is preferred. Next comes the one with its
    /// right to execute, then the one whose own bytes hold the address. Only an address in the
    /// padding of a one-page mapping of data may still be attributed to another segment. Any
    /// executable mapping of the object determines its base without doubt.
    ///
    /// # Errors
    /// If the mapping shows no segment of the object at `address`.
    pub fn find(
        segments: &[Segment],
        mapping: &FileMapping,
        address: Gva,
    ) -> Result<Self, LoadBaseError> {
        let offset = mapping
            .file_offset_of(address)
            .ok_or(LoadBaseError::NotInMapping {
                address,
                mapping: *mapping,
            })?;
        let loaded = segments.iter().filter(|segment| segment.is_loaded());
        let shown = mapping.file_range();
        let rank = |segment: &&Segment| {
            let end = segment.offset.checked_add(segment.file_size)?;
            let inside = (segment.offset..end).contains(&offset);
            let pages =
                segment.offset - segment.offset % PAGE..end.checked_next_multiple_of(PAGE)?;
            let whole = pages.start <= shown.start && shown.end <= pages.end;
            let same_rights = segment.is_code() == mapping.executable;
            (segment.file_size > 0 && pages.contains(&offset)).then_some((
                !whole,
                !same_rights,
                !inside,
            ))
        };
        let ranked = loaded
            .clone()
            .filter_map(|segment| Some((rank(&segment)?, segment)));
        let Some((_, segment)) = ranked.min_by_key(|(rank, _)| *rank) else {
            return Err(LoadBaseError::NoSegment {
                address,
                offset,
                segments: loaded.count(),
            });
        };
        if segment.offset % PAGE != segment.address % PAGE {
            return Err(LoadBaseError::Misaligned {
                offset: segment.offset,
                address: segment.address,
            });
        }
        // May wrap, because addresses are numbers modulo 2^64 until they are used.
        let linked = segment
            .address
            .wrapping_add(offset.wrapping_sub(segment.offset));
        Ok(Self(address.0.wrapping_sub(linked)))
    }

    /// Returns the base of an object whose byte 0 is linked at address 0 and loaded at `start`,
    /// such as the vdso.
    #[must_use]
    pub fn at(start: Gva) -> Self {
        Self(start.0)
    }

    /// Returns the bias.
    #[must_use]
    pub fn bias(self) -> u64 {
        self.0
    }

    /// Returns the link-time address of an address in the process.
    #[must_use]
    pub fn address_in_file(self, gva: Gva) -> u64 {
        gva.0.wrapping_sub(self.0)
    }

    /// Returns the address in the process of a link-time address, such as a symbol's.
    #[must_use]
    pub fn va_of(self, address: u64) -> Gva {
        Gva(address.wrapping_add(self.0))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::test_says::assert_says;
    use object::elf::{PF_R, PF_W, PF_X, PT_LOAD, PT_NOTE};

    fn segment(offset: u64, address: u64, file_size: u64, flags: u32) -> Segment {
        Segment {
            kind: PT_LOAD,
            flags,
            offset,
            address,
            file_size,
            memory_size: file_size.saturating_add(0x100),
        }
    }

    /// Returns segments as linked with `-z separate-code`: headers, code, constants, data that
    /// starts in the middle of a page.
    fn separate() -> Vec<Segment> {
        vec![
            segment(0, 0, 0x628, PF_R),
            segment(0x1000, 0x1000, 0x235, PF_R | PF_X),
            segment(0x2000, 0x2000, 0x120, PF_R),
            segment(0x2db8, 0x3db8, 0x258, PF_R | PF_W),
            Segment {
                kind: PT_NOTE,
                ..segment(0x1000, 0x77_1000, 0x235, PF_R | PF_X)
            },
        ]
    }

    /// Returns segments as lld links them: one page of the file holds the end of the headers, the
    /// code, and the start of the data.
    fn shared_pages() -> Vec<Segment> {
        vec![
            segment(0, 0x20_0000, 0x5e0, PF_R),
            segment(0x5e0, 0x20_15e0, 0x180, PF_R | PF_X),
            segment(0x760, 0x20_2760, 0x1c0, PF_R | PF_W),
        ]
    }

    /// Returns segments of a static program: constants and data share page 0x1da of the file, and
    /// data are read-only up to 0x1e1.
    fn relro() -> Vec<Segment> {
        vec![
            segment(0x18_5000, 0x58_5000, 0x5_57f4, PF_R),
            segment(0x1d_a8d8, 0x5d_b8d8, 0x8f70, PF_R | PF_W),
        ]
    }

    fn mapping(start: u64, length: u64, file_offset: u64, executable: bool) -> FileMapping {
        FileMapping {
            start: Gva(start),
            end: Gva(start + length),
            file_offset,
            executable,
        }
    }

    #[test]
    fn every_mapping_of_an_object_tells_the_same_base() {
        let pie = 0x5555_5555_4000;
        for (name, segments, base, start, offset, executable, addresses) in [
            (
                "headers",
                separate(),
                pie,
                0,
                0,
                false,
                &[0, 0x628, 0xfff][..],
            ),
            ("code", separate(), pie, 0x1000, 0x1000, true, &[0, 0x234]),
            ("padding", separate(), pie, 0x1000, 0x1000, true, &[0xfff]),
            (
                "data",
                separate(),
                pie,
                0x3000,
                0x2000,
                false,
                &[0xdb8, 0xfff],
            ),
            (
                "lld code",
                shared_pages(),
                0,
                0x20_1000,
                0,
                true,
                &[0x5e0, 0, 0xfff],
            ),
            (
                "lld data",
                shared_pages(),
                0,
                0x20_2000,
                0,
                false,
                &[0x760, 0x91f],
            ),
            ("lld headers", shared_pages(), 0, 0x20_0000, 0, false, &[0]),
        ] {
            let mapping = mapping(base + start, 0x1000, offset, executable);
            for address in addresses.iter().map(|at: &u64| base + start + at) {
                let found = LoadBase::find(&segments, &mapping, Gva(address));
                assert_eq!(found.map(LoadBase::bias), Ok(base), "{name} {address:#x}");
            }
        }
    }

    #[test]
    fn mappings_that_share_a_page_of_the_file_tell_the_same_base() {
        for (start, end, offset) in [
            (0x58_5000, 0x5d_b000, 0x18_5000),
            (0x5d_b000, 0x5e_2000, 0x1d_a000),
            (0x5e_2000, 0x5e_5000, 0x1e_1000),
        ] {
            let mapping = mapping(start, end - start, offset, false);
            for address in [start, (start + end) / 2, end - 1] {
                let found = LoadBase::find(&relro(), &mapping, Gva(address));
                assert_eq!(found.map(LoadBase::bias), Ok(0), "{address:#x}");
            }
        }
    }

    #[test]
    fn a_prelinked_library_below_its_link_address_has_a_negative_base() {
        let segments = [segment(0, 0x4000_0000, 0x3000, PF_R | PF_X)];
        let mapping = mapping(0x1000_0000, 0x3000, 0, true);
        let base = LoadBase::find(&segments, &mapping, Gva(0x1000_1234)).unwrap();
        assert_eq!(base.address_in_file(Gva(0x1000_1234)), 0x4000_1234);
        assert_eq!(base.va_of(0x4000_1234), Gva(0x1000_1234));
    }

    #[test]
    fn mappings_that_show_no_segment_are_errors() {
        let code = mapping(0x7000_0000, 0x1000, 0x1000, true);
        let damaged = [segment(0x1000, 0x1008, 0x235, PF_X)];
        let absurd = [segment(u64::MAX - 8, 0, u64::MAX, PF_X)];
        let behind = mapping(0x7000_0000, 0x1000, 0x8000, true);
        for (segments, mapping, distance, part) in [
            (
                &separate()[..],
                code,
                0x1000,
                "0x70001000 is not in the mapping",
            ),
            (&separate(), code, -1, "is not in the mapping 0x70000000"),
            (
                &separate(),
                behind,
                0x10,
                "0x8010 of the file, which is in none of its 4 load",
            ),
            (&damaged, code, 0, "linked at 0x1008"),
            (&absurd, code, 0, "none of its 1 load segments"),
            (&[], code, 0, "none of its 0 load segments"),
        ] {
            let address = Gva(0x7000_0000u64.wrapping_add_signed(distance));
            assert_says(
                LoadBase::find(segments, &mapping, address).unwrap_err(),
                part,
            );
        }
    }
}
