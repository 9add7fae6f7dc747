//! qcow2 images, by the crate `imago`, and overlays, which are qcow2 images.
//!
//! The format's description is QEMU's `docs/interop/qcow2.txt`. All files are opened here rather
//! than by the crate, so that each is checked and locked.

mod check;
mod files;

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use imago::file::File as ImageFile;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{FormatAccess, FormatCreateBuilder, Mapping, Storage, StorageExt};

use super::super::direct::{part, total};
use super::super::{BlockBackend, DirectIo, OverlayFile};
use super::{ImageError, ImageFormat, Layer, Overlay, lock, whole};
use crate::MemorySlice;

pub use check::Damage;
use check::{ENTRY, check, cluster_bits};
use files::Files;

/// The first bytes of a qcow2 image.
pub(super) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// The maximum number of files behind each other.
pub(super) const MAX_DEPTH: usize = 16;
/// The place of the encryption method in the header.
const ENCRYPTION: u64 = 32;
/// The maximum number of second-level tables, as QEMU has it.
const MOST_TABLES: u64 = 4 << 20;
/// The number of bytes that are zeroed at a time.
const CHUNK: usize = 64 << 10;

/// A qcow2 image with its backing files.
pub(super) struct Qcow2Image {
    access: FormatAccess<ImageFile>,
    files: Files,
    /// The top file, which takes all writes.
    top: File,
    is_overlay: bool,
    direct: Option<&'static dyn DirectIo>,
    /// The number of writes.
    changes: u64,
    tables: Tables,
}

/// The second-level tables that are known to be counted in the file.
///
/// The crate writes a new table's address before its reference count. If the process were killed
/// before the next flush, a later one would use the table's cluster for something else. So the
/// first write that a table covers is followed by a flush to the host's page cache.
struct Tables {
    /// The size of a cluster in bytes.
    cluster: u64,
    /// The number of bytes of the disk that a table covers.
    covered: u64,
    counted: Vec<bool>,
}

impl Tables {
    /// Reads the size of tables from the header of an image of `length` bytes.
    fn new(file: &File, length: u64) -> Result<Self, Damage> {
        let cluster = 1 << cluster_bits(file)?;
        let covered = cluster * (cluster / ENTRY);
        let count = length.div_ceil(covered);
        if count > MOST_TABLES {
            let field = "number of second-level tables";
            return Err(Damage::Header {
                field,
                found: count,
            });
        }
        Ok(Self {
            cluster,
            covered,
            counted: vec![false; count as usize],
        })
    }

    /// Notes a write. Returns whether it may have made a table.
    fn note(&mut self, range: &Range<u64>) -> bool {
        let first = range.start / self.covered;
        let last = range.end.saturating_sub(1) / self.covered;
        let mut is_new = false;
        for index in first..=last {
            let table = usize::try_from(index).ok();
            if let Some(counted) = table.and_then(|index| self.counted.get_mut(index)) {
                is_new |= !std::mem::replace(counted, true);
            }
        }
        is_new
    }
}

impl Qcow2Image {
    fn new(
        access: FormatAccess<ImageFile>,
        files: Files,
        path: &Path,
        top: File,
        is_overlay: bool,
    ) -> Result<Self, ImageError> {
        let length = whole(path, access.size())?;
        let tables = Tables::new(&top, length).map_err(|source| ImageError::Damaged {
            path: path.to_path_buf(),
            source,
        })?;
        Ok(Self {
            access,
            files,
            top,
            is_overlay,
            direct: None,
            changes: 0,
            tables,
        })
    }

    /// Writes zeros to `range`, where it has anything else.
    fn zero(&mut self, range: Range<u64>) -> io::Result<()> {
        let mut chunk = vec![0; CHUNK];
        for offset in range.clone().step_by(CHUNK) {
            let length = (range.end - offset).min(CHUNK as u64) as usize;
            let chunk = chunk.get_mut(..length).unwrap_or_default();
            self.read_at(chunk, offset)?;
            if chunk.iter().any(|byte| *byte != 0) {
                chunk.fill(0);
                self.write_at(chunk, offset)?;
            }
        }
        Ok(())
    }

    /// Fills guest memory from the files that the range is mapped to. Returns `None` if a part of
    /// it is none of theirs, such as compressed data, or cannot be read so.
    fn read_mapped(
        &self,
        direct: &dyn DirectIo,
        targets: &[MemorySlice<'_>],
        offset: u64,
    ) -> Option<()> {
        let length = total(targets) as u64;
        let mut done = 0;
        while done < length {
            let mapping = self.access.get_mapping(offset + done, length - done);
            let (
                Mapping::Raw {
                    storage, offset, ..
                },
                mapped @ 1..,
            ) = mapping.ok()?
            else {
                return None;
            };
            let file = self.files.of(storage)?;
            let targets = part(targets, done as usize, mapped as usize);
            direct.read(file, &targets, offset).ok()?;
            done += mapped;
        }
        Some(())
    }

    /// Writes guest memory to clusters of the top file, which become the disk's once they have it.
    fn write_mapped(
        &self,
        direct: &dyn DirectIo,
        sources: &[MemorySlice<'_>],
        offset: u64,
    ) -> io::Result<u64> {
        let length = total(sources) as u64;
        let mut done = 0;
        while done < length {
            let mapping = self
                .access
                .prepare_data_mapping(offset + done, length - done, true)?;
            let (place, mapped) = (mapping.offset(), mapping.length());
            // The crate keeps the file's length itself, and sets the file to it when it writes
            // zeros at the end: what is behind would be cut off.
            let end = place.saturating_add(mapped);
            if end > mapping.storage().size()? {
                mapping.storage().write(&[0][..], end - 1)?;
            }
            let sources = part(sources, done as usize, mapped as usize);
            direct.write(&self.top, &sources, place)?;
            self.access.commit_data_mapping(mapping)?;
            done += mapped;
        }
        Ok(length)
    }

    /// Flushes what a write to `range` has changed, if it may have made a table.
    fn written(&mut self, range: &Range<u64>) -> io::Result<()> {
        match self.tables.note(range) {
            true => self.access.flush(),
            false => Ok(()),
        }
    }
}

impl BlockBackend for Qcow2Image {
    fn length(&self) -> u64 {
        self.access.size()
    }

    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.access.read(buffer, offset)
    }

    fn write_at(&mut self, data: &[u8], offset: u64) -> io::Result<()> {
        self.changes += 1;
        self.access.write(data, offset)?;
        self.written(&(offset..offset.saturating_add(data.len() as u64)))
    }

    fn use_direct_io(&mut self, io: &'static dyn DirectIo) {
        self.direct = Some(io);
    }

    fn read_direct(&mut self, targets: &[MemorySlice<'_>], offset: u64) -> Option<io::Result<()>> {
        self.read_mapped(self.direct?, targets, offset).map(Ok)
    }

    fn write_direct(&mut self, sources: &[MemorySlice<'_>], offset: u64) -> Option<io::Result<()>> {
        let direct = self.direct?;
        self.changes += 1;
        let written = self.write_mapped(direct, sources, offset);
        Some(written.and_then(|length| self.written(&(offset..offset.saturating_add(length)))))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.access.flush()?;
        self.access.sync()
    }

    fn discard(&mut self, range: Range<u64>) -> io::Result<bool> {
        // Whole clusters alone: the crate computes with wrong bounds in the last one of a disk.
        let cluster = self.tables.cluster;
        let start = range.start.next_multiple_of(cluster).min(range.end);
        let end = (range.end - range.end % cluster).max(start);
        self.zero(range.start..start)?;
        if start < end {
            self.changes += 1;
            self.access.discard_to_zero(start, end - start)?;
            self.written(&(start..end))?;
        }
        self.zero(end..range.end)?;
        Ok(true)
    }

    fn overlay(&mut self) -> io::Result<Option<OverlayFile>> {
        self.access.flush()?;
        if !self.is_overlay {
            return Ok(None);
        }
        let (file, changes) = (self.top.try_clone()?, self.changes);
        Ok(Some(OverlayFile { file, changes }))
    }
}

/// Opens the qcow2 image in `layer`. `backing` is used instead of the backing file that it names.
pub(super) fn image(layer: Layer, backing: Option<&Path>) -> Result<Qcow2Image, ImageError> {
    let path = layer.path.clone();
    let file = layer.file.try_clone().map_err(|source| ImageError::Open {
        path: path.clone(),
        source,
    })?;
    let mut files = Files::default();
    let access = access(layer, backing, 0, &mut files)?;
    Qcow2Image::new(access, files, &path, file, false)
}

/// Opens the image in `layer` below an overlay, which begins with the content of `saved`, or empty.
pub(super) fn overlay(
    layer: Layer,
    backing: Option<&Path>,
    overlay: &Overlay,
    saved: Option<&Path>,
) -> Result<Qcow2Image, ImageError> {
    let image = Base {
        path: canonical(&layer.path),
        format: layer.format,
    };
    let mut files = Files::default();
    let base = access(layer, backing, 1, &mut files)?;
    let length = whole(&image.path, base.size())?;
    let (path, file) = match overlay {
        Overlay::Temporary => temporary(&image, length, saved)?,
        Overlay::Kept(path) => (path.clone(), kept(path, &image, length, saved)?),
    };
    let copy = file.try_clone();
    let failed = |source| ImageError::Qcow2 {
        path: path.clone(),
        source,
    };
    let copy = copy.map_err(failed)?;
    check_image(&copy, &path)?;
    let mut top = Qcow2::open_image(files.open(file, &path, true)?, true).map_err(failed)?;
    if let Overlay::Kept(_) = overlay {
        check_base(&top, &path, &image)?;
    }
    refuse_data_file(&top, &path)?;
    top.set_data_file(None);
    top.set_backing(Some(base));
    Qcow2Image::new(FormatAccess::new(top), files, &path, copy, true)
}

/// The image below an overlay.
struct Base {
    path: PathBuf,
    format: ImageFormat,
}

/// Opens a file of a chain and all files behind it. `depth` files are before it.
fn access(
    layer: Layer,
    backing: Option<&Path>,
    depth: usize,
    files: &mut Files,
) -> Result<FormatAccess<ImageFile>, ImageError> {
    let path = layer.path.clone();
    let failed = |source| ImageError::Qcow2 {
        path: path.clone(),
        source,
    };
    if layer.format == ImageFormat::Raw {
        layer.whole_length()?;
        let storage = files.open(layer.file, &path, layer.is_writable)?;
        let raw = Raw::open_image(storage, layer.is_writable).map_err(failed)?;
        return Ok(FormatAccess::new(raw));
    }
    let mut encryption = [0; 4];
    let read = layer.file.read_exact_at(&mut encryption, ENCRYPTION);
    read.map_err(failed)?;
    if encryption != [0; 4] {
        let feature = "encryption";
        return Err(ImageError::Unsupported { path, feature });
    }
    if layer.is_writable {
        check_image(&layer.file, &path)?;
    }
    let storage = files.open(layer.file, &path, layer.is_writable)?;
    let mut image = Qcow2::open_image(storage, layer.is_writable).map_err(failed)?;
    refuse_data_file(&image, &path)?;
    image.set_data_file(None);
    let format = match image.implicit_backing_format().map(String::as_str) {
        Some("qcow2") => Some(ImageFormat::Qcow2),
        Some("raw" | "file") => Some(ImageFormat::Raw),
        Some(_) => {
            let feature = "a backing file of another format";
            return Err(ImageError::Unsupported { path, feature });
        }
        None => None,
    };
    let behind = match (backing, image.implicit_backing_file()) {
        (_, None) => None,
        (Some(named), Some(_)) => Some(named.to_path_buf()),
        (None, Some(backing)) => Some(beside(&path, Path::new(backing))?),
    };
    let behind = match behind {
        Some(_) if depth >= MAX_DEPTH => return Err(ImageError::Depth { path }),
        Some(behind) => Some(access(
            Layer::open(&behind, format, false)?,
            None,
            depth + 1,
            files,
        )?),
        None => None,
    };
    image.set_backing(behind);
    Ok(FormatAccess::new(image))
}

fn refuse_data_file(image: &Qcow2<ImageFile>, path: &Path) -> Result<(), ImageError> {
    match image.requires_external_data_file() {
        false => Ok(()),
        true => Err(ImageError::Unsupported {
            path: path.to_path_buf(),
            feature: "an external data file",
        }),
    }
}

/// Returns the path of the backing file that the image in `path` names, if it lies in the image's
/// folder, with all links followed.
fn beside(path: &Path, backing: &Path) -> Result<PathBuf, ImageError> {
    let around = path.parent().unwrap_or(Path::new(""));
    let named = around.join(backing);
    let found = named.canonicalize().map_err(|source| ImageError::Open {
        path: named.clone(),
        source,
    })?;
    match found.parent() == canonical(path).parent() {
        true => Ok(found),
        false => Err(ImageError::Backing {
            path: path.to_path_buf(),
            backing: found,
        }),
    }
}

fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_path_buf())
}

/// Makes a nameless overlay. It is in the folder for temporary files that survive a restart, since
/// the other is often in memory.
fn temporary(
    image: &Base,
    length: u64,
    saved: Option<&Path>,
) -> Result<(PathBuf, File), ImageError> {
    let folder = std::env::var_os("TMPDIR").unwrap_or_else(|| "/var/tmp".into());
    let folder = PathBuf::from(folder);
    let made = tempfile::tempfile_in(&folder);
    let file = made.map_err(|source| ImageError::Overlay {
        path: folder.clone(),
        source,
    })?;
    fill(&file, &folder, image, length, saved)?;
    Ok((folder, file))
}

/// Opens or makes the overlay in `path`.
fn kept(path: &Path, image: &Base, length: u64, saved: Option<&Path>) -> Result<File, ImageError> {
    if saved.is_none() && path.exists() {
        return Ok(Layer::open(path, Some(ImageFormat::Qcow2), true)?.file);
    }
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create_new(true).mode(0o600);
    let file = options.open(path).map_err(|source| ImageError::Overlay {
        path: path.to_path_buf(),
        source,
    })?;
    let made = lock(&file, path, true).and_then(|()| fill(&file, path, image, length, saved));
    if let Err(error) = made {
        if let Err(error) = std::fs::remove_file(path) {
            log::warn!("{} is not removed: {error}", path.display());
        }
        return Err(error);
    }
    Ok(file)
}

/// Fills the empty `file` with the overlay in `saved`, or an empty one for `image`.
fn fill(
    file: &File,
    path: &Path,
    image: &Base,
    length: u64,
    saved: Option<&Path>,
) -> Result<(), ImageError> {
    if let Some(saved) = saved {
        let mut saved = Layer::open(saved, Some(ImageFormat::Qcow2), false)?.file;
        let mut copy = file;
        let copied = saved.rewind();
        let copied = copied.and_then(|()| io::copy(&mut saved, &mut copy));
        return copied.map(drop).map_err(|source| ImageError::Overlay {
            path: path.to_path_buf(),
            source,
        });
    }
    let made = || {
        let format = match image.format {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
        };
        let name = image.path.to_str().ok_or_else(|| {
            let message = "its image's path is not UTF-8, as qcow2 needs it";
            io::Error::new(io::ErrorKind::InvalidInput, message)
        })?;
        let storage = ImageFile::try_from(file.try_clone()?)?;
        let new = Qcow2::<ImageFile>::create_builder(storage);
        let new = new.backing(name.to_owned(), format.to_owned());
        new.size(length).create()
    };
    made().map_err(|source| ImageError::Overlay {
        path: path.to_path_buf(),
        source,
    })
}

/// Checks that an image can be written.
fn check_image(file: &File, path: &Path) -> Result<(), ImageError> {
    let damaged = |source| ImageError::Damaged {
        path: path.to_path_buf(),
        source,
    };
    // The metadata of a block device has length 0.
    let mut end = file;
    let length = end.seek(SeekFrom::End(0)).map_err(Damage::from);
    length
        .and_then(|length| check(file, length))
        .map_err(damaged)
}

/// Checks that an overlay was made for `image`.
fn check_base(overlay: &Qcow2<ImageFile>, path: &Path, image: &Base) -> Result<(), ImageError> {
    let around = path.parent().unwrap_or(Path::new(""));
    let found = overlay.implicit_backing_file();
    let found = found.map(|found| canonical(&around.join(found)));
    match found {
        Some(found) if found == image.path => Ok(()),
        found => Err(ImageError::OtherImage {
            overlay: path.to_path_buf(),
            found: found.unwrap_or_else(|| PathBuf::from("no image")),
            image: image.path.clone(),
        }),
    }
}
