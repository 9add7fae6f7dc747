//! Unified kernel images (UAPI.5): programs of EFI with a kernel, an initramfs and a command line
//! as sections.

use object::LittleEndian as LE;
use object::pe::{ImageDosHeader, ImageNtHeaders64, ImageSectionHeader};
use object::read::pe::ImageNtHeaders as _;

use crate::bytes::text;
use crate::disk::ReadAt as _;
use crate::file::File;
use crate::volume::Volume;

/// The most bytes of headers.
const MOST_HEADERS: u64 = 64 << 10;
/// The most bytes of a section with text.
const MOST_SECTION: u64 = 64 << 10;

/// A section of an image that is a file by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Kernel,
    /// Microcode, which comes before the initramfs.
    Microcode,
    Initramfs,
}

/// The names in an image.
pub(super) struct Unified {
    pub title: Option<String>,
    pub sort_key: String,
    pub version: String,
    pub options: String,
}

/// Returns the place of a section in the file: its offset and length.
fn place(file: &File, name: &str) -> Option<(u64, u64)> {
    let length = file.length().min(MOST_HEADERS);
    let headers = file.part(0, usize::try_from(length).ok()?).ok()?;
    let headers = headers.as_slice();
    let mut offset = ImageDosHeader::parse(headers)
        .ok()?
        .nt_headers_offset()
        .into();
    let (nt, _) = ImageNtHeaders64::parse(headers, &mut offset).ok()?;
    let sections = nt.sections(headers, offset).ok()?;
    let found = sections.iter().find(|section| is_named(section, name))?;
    // What is in the file may be padded, or cut short.
    let stored = found.size_of_raw_data.get(LE);
    let length = match found.virtual_size.get(LE) {
        0 => stored,
        size => size.min(stored),
    };
    let offset = u64::from(found.pointer_to_raw_data.get(LE));
    let end = offset.checked_add(length.into())?;
    (end <= file.length()).then_some((offset, length.into()))
}

fn is_named(section: &ImageSectionHeader, name: &str) -> bool {
    section.raw_name() == name.as_bytes()
}

/// Returns where a part of an image is in its file: its offset and length.
pub(crate) fn section(file: &File, part: Part) -> Option<(u64, u64)> {
    let name = match part {
        Part::Kernel => ".linux",
        Part::Microcode => ".ucode",
        Part::Initramfs => ".initrd",
    };
    place(file, name)
}

fn section_text(file: &File, name: &str) -> Option<String> {
    let (offset, length) = place(file, name)?;
    let length = usize::try_from(length.min(MOST_SECTION)).ok()?;
    text(&file.part(offset, length).ok()?)
}

/// Reads what an image says of itself; `None` if it has no kernel.
pub(super) fn describe(volume: &Volume, path: &str) -> Option<Unified> {
    let file = volume.fs.as_ref()?.open(path).ok()?;
    section(&file, Part::Kernel)?;
    let release = section_text(&file, ".osrel").unwrap_or_default();
    let field = |wanted: &str| {
        let mut pairs = release.lines().filter_map(|line| line.split_once('='));
        let value = pairs.find(|(name, _)| *name == wanted)?.1;
        Some(value.trim_matches(['"', '\'']).to_owned())
    };
    let version = section_text(&file, ".uname");
    let title = match (field("PRETTY_NAME"), &version) {
        (Some(name), Some(version)) => Some(format!("{name} ({version})")),
        (name, _) => name,
    };
    let options = section_text(&file, ".cmdline").unwrap_or_default();
    Some(Unified {
        title,
        sort_key: field("IMAGE_ID").or(field("ID")).unwrap_or_default(),
        version: version
            .or(field("IMAGE_VERSION"))
            .or(field("VERSION_ID"))
            .unwrap_or_default(),
        options: options.split_whitespace().collect::<Vec<_>>().join(" "),
    })
}
