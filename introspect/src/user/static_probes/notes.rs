//! The notes of static probes: those of SystemTap's macros (`.note.stapsdt`, owner `stapsdt`). This
//! project's own (`.note.exotrace`, owner `exotrace`) have what those omit.
//!
//! The caller has a section's bytes, of any content. Layouts are little-endian, and every string
//! has its NUL:
//!
//! | Owner, type | Content |
//! |---|---|
//! | `stapsdt`, 3 | address of the site, link-time address of `.stapsdt.base`, address of the semaphore or 0; provider, name, arguments |
//! | `exotrace`, 1: a probe | provider, module, function, name; native and translated type of each argument |
//! | `exotrace`, 2: a site | address of the site, link-time address of `.stapsdt.base`; provider, module, function, name |
//!
//! Addresses have 8 bytes, or 4 in 32-bit objects with `stapsdt`. The source of `stapsdt` is the
//! notes of sys/sdt.h, as readelf(1) shows them.

use object::LittleEndian;
use object::elf::FileHeader64;
use object::read::elf::NoteIterator;

use super::operand::MAX_ARGUMENTS;

const STAPSDT: &[u8] = b"stapsdt";
const NT_STAPSDT: u32 = 3;
const EXOTRACE: &[u8] = b"exotrace";
const NT_PROBE: u32 = 1;
const NT_SITE: u32 = 2;
/// The alignment of notes: words, in objects of either class.
const ALIGN: u64 = 4;
/// The maximum number of notes of an object.
pub(super) const MAX_NOTES: usize = 1 << 16;
/// The maximum length in bytes of the name of a provider, module, function or probe. A note with a
/// longer one is damaged.
const MAX_NAME: usize = 512;
/// The maximum length of the string of a site's arguments.
const MAX_ARGUMENTS_TEXT: usize = 16 << 10;

/// A site, as in its note.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SiteNote<'n> {
    pub(super) address: u64,
    pub(super) base: u64,
    pub(super) semaphore: u64,
    pub(super) provider: &'n str,
    pub(super) name: &'n str,
    pub(super) arguments: &'n str,
}

/// The four parts of a probe's name as in scripts, with dashes. Parts may be empty.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeclaredName {
    /// The provider.
    pub provider: String,
    /// The module.
    pub module: String,
    /// The function.
    pub function: String,
    /// The name.
    pub name: String,
}

/// The types of an argument, as its author declared them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgumentTypes {
    /// The type in the program.
    pub native: String,
    /// The type in scripts, or `None` if it is the same.
    pub translated: Option<String>,
}

/// A probe that this project's macros declare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProbeNote {
    pub(super) name: DeclaredName,
    pub(super) arguments: Vec<ArgumentTypes>,
}

/// The probe to which a site belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OwnerNote {
    pub(super) address: u64,
    pub(super) base: u64,
    pub(super) name: DeclaredName,
}

/// The contents of `.note.exotrace`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Declarations {
    pub(super) probes: Vec<ProbeNote>,
    pub(super) sites: Vec<OwnerNote>,
}

/// Reads `.note.stapsdt` and passes each site to `each`. `wide` objects have addresses of 64 bits.
/// Returns the number of notes that could not be read. A note with a damaged header ends the
/// reading.
pub(super) fn sites<'n>(notes: &'n [u8], wide: bool, mut each: impl FnMut(SiteNote<'n>)) -> usize {
    let mut damaged = 0;
    for note in walk(notes) {
        match note {
            Some((STAPSDT, NT_STAPSDT, content)) => match site(content, wide) {
                Some(site) => each(site),
                None => damaged += 1,
            },
            Some(_) => {}
            None => damaged += 1,
        }
    }
    damaged
}

/// Reads `.note.exotrace`. Returns also the number of notes that could not be read.
pub(super) fn declarations(notes: &[u8]) -> (Declarations, usize) {
    let (mut found, mut damaged) = (Declarations::default(), 0);
    for note in walk(notes) {
        let is_read = match note {
            Some((EXOTRACE, NT_PROBE, content)) => {
                probe(content).map(|probe| found.probes.push(probe))
            }
            Some((EXOTRACE, NT_SITE, content)) => owner(content).map(|site| found.sites.push(site)),
            Some(_) => Some(()),
            None => None,
        };
        damaged += usize::from(is_read.is_none());
    }
    (found, damaged)
}

/// Returns owner, type and content of each note, or `None` for a damaged one, which is the last.
fn walk(notes: &[u8]) -> impl Iterator<Item = Option<(&[u8], u32, &[u8])>> {
    // Note headers are the same in both classes of ELF.
    let walk = NoteIterator::<FileHeader64<LittleEndian>>::new(LittleEndian, ALIGN, notes);
    let walk = walk.into_iter().flatten().take(MAX_NOTES);
    walk.map(|note| {
        let note = note.ok()?;
        Some((note.name(), note.n_type(LittleEndian), note.desc()))
    })
}

fn site(content: &[u8], wide: bool) -> Option<SiteNote<'_>> {
    let mut rest = content;
    let mut address = || match wide {
        true => take_u64(&mut rest),
        false => take_u32(&mut rest).map(u64::from),
    };
    let (address, base, semaphore) = (address()?, address()?, address()?);
    Some(SiteNote {
        address,
        base,
        semaphore,
        provider: take_text(&mut rest, MAX_NAME).filter(|text| !text.is_empty())?,
        name: take_text(&mut rest, MAX_NAME).filter(|text| !text.is_empty())?,
        // Some tools omit the string for probes without arguments.
        arguments: take_text(&mut rest, MAX_ARGUMENTS_TEXT).unwrap_or_default(),
    })
}

fn probe(content: &[u8]) -> Option<ProbeNote> {
    let mut rest = content;
    let name = take_name(&mut rest)?;
    let mut arguments = Vec::new();
    while !rest.is_empty() && arguments.len() < MAX_ARGUMENTS {
        let native = take_text(&mut rest, MAX_NAME)?.to_owned();
        let translated = take_text(&mut rest, MAX_NAME)?.to_owned();
        arguments.push(ArgumentTypes {
            native,
            translated: Some(translated).filter(|text| !text.is_empty()),
        });
    }
    Some(ProbeNote { name, arguments })
}

fn owner(content: &[u8]) -> Option<OwnerNote> {
    let mut rest = content;
    Some(OwnerNote {
        address: take_u64(&mut rest)?,
        base: take_u64(&mut rest)?,
        name: take_name(&mut rest)?,
    })
}

fn take_name(rest: &mut &[u8]) -> Option<DeclaredName> {
    let mut part = || take_text(rest, MAX_NAME).map(str::to_owned);
    Some(DeclaredName {
        provider: part()?,
        module: part()?,
        function: part()?,
        name: part()?,
    })
}

fn take_u64(rest: &mut &[u8]) -> Option<u64> {
    let (number, behind) = rest.split_first_chunk()?;
    *rest = behind;
    Some(u64::from_le_bytes(*number))
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    let (number, behind) = rest.split_first_chunk()?;
    *rest = behind;
    Some(u32::from_le_bytes(*number))
}

/// Takes the leading string of at most `most` bytes, without its NUL. Returns `None` if it ends
/// with the note instead of a NUL, or is not valid text.
fn take_text<'n>(rest: &mut &'n [u8], most: usize) -> Option<&'n str> {
    let length = memchr::memchr(0, rest).filter(|length| *length <= most)?;
    let text = std::str::from_utf8(rest.get(..length)?).ok()?;
    *rest = rest.get(length + 1..)?;
    Some(text)
}

/// Writes notes as the macros leave them, for tests.
#[cfg(test)]
pub(super) mod writing {
    /// Builds one padded note.
    pub(crate) fn note(owner: &str, kind: u32, content: &[u8]) -> Vec<u8> {
        let name = [owner.as_bytes(), b"\0"].concat();
        let mut bytes = Vec::new();
        for word in [name.len() as u32, content.len() as u32, kind] {
            bytes.extend(word.to_le_bytes());
        }
        for part in [name.as_slice(), content] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    /// Concatenates numbers, then strings.
    pub(crate) fn content(numbers: &[u64], strings: &[&str]) -> Vec<u8> {
        let mut bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        for text in strings {
            bytes.extend(text.as_bytes());
            bytes.push(0);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::writing::{content, note};
    use super::*;

    fn found(notes: &[u8], wide: bool) -> (Vec<(u64, String)>, usize) {
        let mut found = Vec::new();
        let damaged = sites(notes, wide, |site| {
            let text = [site.provider, site.name, site.arguments].join("|");
            found.push((site.address, text));
        });
        (found, damaged)
    }

    #[test]
    fn sites_are_read_and_other_notes_passed_by() {
        let site = content(
            &[0x1000, 0x2000, 0x3000],
            &["libc", "set__jmp", "8@%rdi -4@%esi"],
        );
        let bare = content(&[0x1010, 0x2000, 0], &["libc", "bare"]);
        let nameless = content(&[0x1020, 0x2000, 0], &["libc", "", ""]);
        let endless = content(&[0x1030, 0x2000, 0], &[]);
        let notes = [
            note("GNU", 3, &site),
            note("stapsdt", 3, &site),
            note("stapsdt", 4, &site),
            note("stapsdt", 3, &nameless),
            note("stapsdt", 3, &endless),
            note("stapsdt", 3, &bare),
        ]
        .concat();
        let expected = vec![
            (0x1000, "libc|set__jmp|8@%rdi -4@%esi".to_owned()),
            (0x1010, "libc|bare|".to_owned()),
        ];
        assert_eq!(found(&notes, true), (expected.clone(), 2));
        // Cut in the middle of the last note.
        assert_eq!(
            found(&notes[..notes.len() - 8], true),
            (expected[..1].to_vec(), 3)
        );

        let words: Vec<u8> = [0x1000u32, 0x2000, 0]
            .iter()
            .flat_map(|n| n.to_le_bytes())
            .collect();
        let narrow = [words, content(&[], &["p", "n", "4@%eax"])].concat();
        let expected = vec![(0x1000, "p|n|4@%eax".to_owned())];
        assert_eq!(found(&note("stapsdt", 3, &narrow), false), (expected, 0));
    }

    #[test]
    fn declarations_are_read() {
        let name = ["tcp", "net", "send", "state-change"];
        let notes = [
            note(
                "exotrace",
                1,
                &content(
                    &[],
                    &[&name[..], &["int", "", "struct s *", "info_t *"]].concat(),
                ),
            ),
            note("exotrace", 1, &content(&[], &name)),
            note(
                "exotrace",
                1,
                &content(&[], &[&name[..], &["odd"]].concat()),
            ),
            note("exotrace", 2, &content(&[0x1000, 0x2000], &name)),
            note("exotrace", 2, &content(&[0x1000], &name[..1])),
            note("exotrace", 9, b"later"),
        ]
        .concat();
        let (found, damaged) = declarations(&notes);
        assert_eq!(damaged, 2);
        let types: Vec<_> = found
            .probes
            .iter()
            .map(|p| p.arguments.as_slice())
            .collect();
        let of = |native: &str, translated: Option<&str>| ArgumentTypes {
            native: native.into(),
            translated: translated.map(str::to_owned),
        };
        let expected = [of("int", None), of("struct s *", Some("info_t *"))];
        assert_eq!(types, [&expected[..], &[]]);
        let [site] = found.sites.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!((site.address, site.base), (0x1000, 0x2000));
        assert_eq!(
            (&*site.name.module, &*site.name.name),
            ("net", "state-change")
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(
            start in proptest::collection::vec(any::<u8>(), 0..200),
            owner in "stapsdt|exotrace",
            kind in 0u32..4,
            wide: bool,
        ) {
            for notes in [start.clone(), note(&owner, kind, &start)] {
                let _ = found(&notes, wide);
                let _ = declarations(&notes);
            }
        }
    }
}
