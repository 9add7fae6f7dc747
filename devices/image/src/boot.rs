//! An image as a whole: what is on it, what it boots, and its files.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::disk::{Disk, ReadAt, Window};
use crate::entries::{self, Entries, Entry, Part, section};
use crate::file::File;
use crate::fs::{FileSystem, FsError};
use crate::place::Place;
use crate::table::{self, TableKind};
use crate::volume::{Kind, Volume};

/// The bytes that may be read to find the entries of an image, or a file.
const SEARCH: u64 = 1 << 30;

/// The reason why an image was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The image cannot be read.
    #[error("the image cannot be read: {0}")]
    Io(#[from] io::Error),
}

/// The reason why an image's kernel was not found, or not read.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// No entry has a kernel that is there. The text lists what the image has.
    #[error(
        "nothing to boot was found in the image ({0}); give --kernel, and --initramfs if the kernel needs one"
    )]
    Nothing(String),
    /// A file of the entry was not read.
    #[error("{path} of the image: {error}")]
    File {
        /// The path on its volume.
        path: String,
        /// The reason.
        error: FsError,
    },
    /// A file of the entry is on another disk, or its volume is not read.
    #[error(
        "{0} of the image is on no volume that is read; give --kernel, and --initramfs if the kernel needs one"
    )]
    NotOnTheDisk(String),
}

/// The most bytes that are taken from an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of the kernel.
    pub kernel: u64,
    /// Of all parts of the initramfs together.
    pub initramfs: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            kernel: 256 << 20,
            initramfs: 3 << 30,
        }
    }
}

/// The files and the command line by which a machine boots an image.
#[derive(Debug)]
pub struct BootFiles {
    /// The kernel's file.
    pub kernel: Vec<u8>,
    /// The parts of the initramfs, one after another.
    pub initramfs: Option<Vec<u8>>,
    /// The kernel's command line.
    pub command_line: String,
    /// Where all this was found.
    pub chosen: Chosen,
}

/// The entry that is booted, for a user. Its text has several lines, without a line break at the
/// end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// The kind of the partition table.
    pub table: TableKind,
    /// The number of the partition with the kernel; `None` for a disk without a table.
    pub partition: Option<u32>,
    /// Its file system.
    pub file_system: Kind,
    /// The entry: its kind, its file and its title.
    pub entry: Entry,
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Entry {
            origin,
            title,
            source,
            kernel,
            initrds,
            options,
            ..
        } = &self.entry;
        match self.partition {
            Some(number) => write!(f, "partition {number}, {}", self.file_system)?,
            None => write!(f, "the disk, {}", self.file_system)?,
        }
        writeln!(f, " ({})", self.table)?;
        writeln!(f, "{origin} {title:?} of {}", source.path)?;
        writeln!(f, "kernel {}", kernel.path)?;
        for Place { path, .. } in initrds {
            writeln!(f, "initramfs {path}")?;
        }
        write!(f, "command line {options}")
    }
}

/// An image of a disk, open for reading.
#[derive(Debug)]
pub struct Image {
    disk: Arc<Disk>,
    table: TableKind,
    volumes: Vec<Volume>,
    entries: Entries,
}

impl Image {
    /// Reads the partition table, the file systems and the entries of an image.
    ///
    /// # Errors
    /// The image cannot be read. One that is damaged has fewer volumes, or fewer entries.
    pub fn open(source: Box<dyn ReadAt>) -> Result<Self, OpenError> {
        let disk = Disk::new(source);
        disk.allow(SEARCH);
        let (table, volumes) = volumes(&disk.window())?;
        let entries = entries::find(&volumes);
        Ok(Self {
            disk,
            table,
            volumes,
            entries,
        })
    }

    /// Returns the kind of the partition table.
    pub fn table(&self) -> TableKind {
        self.table
    }

    /// Returns the partitions with what is on them; the whole disk if it has no table.
    pub fn volumes(&self) -> &[Volume] {
        &self.volumes
    }

    /// Returns what could be booted, in the order of the menus. At most one entry is the default.
    pub fn entries(&self) -> &[Entry] {
        &self.entries.found
    }

    /// Returns what went wrong with descriptions of entries, a line each.
    pub fn troubles(&self) -> &[String] {
        &self.entries.troubles
    }

    /// Returns the entry that is booted.
    ///
    /// # Errors
    /// There is none.
    pub fn default_entry(&self) -> Result<&Entry, BootError> {
        let default = self.entries().iter().find(|entry| entry.is_default);
        default.ok_or_else(|| BootError::Nothing(self.summary()))
    }

    /// Returns where the files of an entry are.
    pub fn chosen(&self, entry: &Entry) -> Chosen {
        let volume = entry.kernel.volume.and_then(|at| self.volumes.get(at));
        Chosen {
            table: self.table,
            partition: volume.and_then(Volume::number),
            file_system: volume.map_or(Kind::Unknown, |volume| volume.kind),
            entry: entry.clone(),
        }
    }

    /// Reads the kernel and the initramfs of the entry that is booted.
    ///
    /// # Errors
    /// There is none, or a file of it is not read or too large.
    pub fn boot_files(&self) -> Result<BootFiles, BootError> {
        self.load(self.default_entry()?, Limits::default())
    }

    /// Reads the kernel and the initramfs of an entry.
    ///
    /// # Errors
    /// A file is not read, or larger than a limit.
    pub fn load(&self, entry: &Entry, limits: Limits) -> Result<BootFiles, BootError> {
        let all = limits.kernel.saturating_add(limits.initramfs);
        self.disk.allow(all.saturating_add(SEARCH));
        let kernel = self.open_place(&entry.kernel)?;
        let path = &entry.kernel.path;
        let mut initramfs = Vec::new();
        if entry.initrds.is_empty() && section(&kernel, Part::Kernel).is_some() {
            let parts = [Part::Microcode, Part::Initramfs].into_iter();
            for place in parts.filter_map(|part| section(&kernel, part)) {
                append(&mut initramfs, &kernel, place, limits.initramfs, path)?;
            }
        }
        let kernel = kernel_in(&kernel, entry, limits.kernel)?;
        for place in &entry.initrds {
            let file = self.open_place(place)?;
            let whole = (0, file.length());
            append(&mut initramfs, &file, whole, limits.initramfs, &place.path)?;
        }
        Ok(BootFiles {
            kernel,
            initramfs: (!initramfs.is_empty()).then_some(initramfs),
            command_line: entry.options.clone(),
            chosen: self.chosen(entry),
        })
    }

    /// Reads the kernel of the entry that is booted, without its initramfs. Returns it with its
    /// path.
    ///
    /// # Errors
    /// There is none, or its file is not read or too large.
    pub fn boot_kernel(&self) -> Result<(Vec<u8>, String), BootError> {
        let entry = self.default_entry()?;
        let limit = Limits::default().kernel;
        self.disk.allow(limit.saturating_add(SEARCH));
        let kernel = self.open_place(&entry.kernel)?;
        Ok((kernel_in(&kernel, entry, limit)?, entry.kernel.path.clone()))
    }

    /// Opens a file by its path in the running system: of the root file system, or of one that is
    /// mounted at `/boot`, `/boot/efi` or `/efi`.
    ///
    /// # Errors
    /// No volume that is read has a regular file of this name.
    pub fn open_file(&self, path: &str) -> Result<File, FsError> {
        self.disk.allow(SEARCH);
        let path = format!("/{}", path.trim_start_matches('/'));
        let below = ["/boot/efi/", "/efi/", "/boot/"]
            .into_iter()
            .find_map(|mount| path.strip_prefix(mount));
        let read = |volume: &Volume, path: &str| -> Result<File, FsError> {
            let fs = volume.fs.as_ref().ok_or(FsError::NotFound)?;
            fs.open(path)
        };
        // A root has what no other volume has; a boot partition may have a file of the same name.
        let is_root = |volume: &&Volume| {
            let folder = |path| volume.fs.as_ref().is_some_and(|fs| fs.has_folder(path));
            folder("/etc") && matches!(volume.fs, Some(FileSystem::Ext(_)))
        };
        let (roots, others): (Vec<_>, Vec<_>) = self.volumes.iter().partition(is_root);
        let mut error = FsError::NotFound;
        for volume in roots {
            match read(volume, &path) {
                Ok(file) => return Ok(file),
                Err(other) => error = other,
            }
        }
        let mut found = others
            .into_iter()
            .filter_map(|volume| read(volume, below?).ok());
        found.next().ok_or(error)
    }

    fn open_place(&self, place: &Place) -> Result<File, BootError> {
        let volume = place.volume.and_then(|at| self.volumes.get(at));
        let fs = volume.and_then(|volume| volume.fs.as_ref());
        let fs = fs.ok_or_else(|| BootError::NotOnTheDisk(place.path.clone()))?;
        fs.open(&place.path).map_err(|error| BootError::File {
            path: place.path.clone(),
            error,
        })
    }

    /// Says what an image without a bootable entry has.
    fn summary(&self) -> String {
        let mut parts = vec![self.table.to_string()];
        parts.extend(self.volumes.iter().take(8).map(|volume| {
            let state = match (&volume.trouble, volume.is_read()) {
                (Some(trouble), _) => format!(": {trouble}"),
                (None, true) => String::new(),
                (None, false) => ", which is not read".to_owned(),
            };
            format!("{}: {}{state}", volume.name(), volume.kind)
        }));
        let entries = self.entries().iter().take(4);
        parts.extend(entries.filter_map(|entry| entry.trouble.clone()));
        parts.extend(self.troubles().iter().take(4).cloned());
        parts.join("; ")
    }
}

/// Reads the partition table of a disk, and looks at its volumes.
pub(crate) fn volumes(whole: &Window) -> io::Result<(TableKind, Vec<Volume>)> {
    let (table, partitions) = table::read(whole)?;
    let volumes = match table {
        TableKind::None => vec![Volume::of(whole, None)],
        _ => {
            let windows = partitions.into_iter().filter_map(|part| {
                let window = whole.part(part.start, part.length)?;
                Some(Volume::of(&window, Some(part)))
            });
            windows.collect()
        }
    };
    Ok((table, volumes))
}

/// Reads the kernel in the file of an entry: the whole file, or a section of a unified image.
fn kernel_in(file: &File, entry: &Entry, limit: u64) -> Result<Vec<u8>, BootError> {
    let section = section(file, Part::Kernel).filter(|_| entry.initrds.is_empty());
    let place = section.unwrap_or((0, file.length()));
    let mut bytes = Vec::new();
    append(&mut bytes, file, place, limit, &entry.kernel.path)?;
    Ok(bytes)
}

/// Adds a part of a file to bytes that may become `limit` long. Each part begins at a multiple of
/// four, as the kernel asks of archives.
fn append(
    bytes: &mut Vec<u8>,
    file: &File,
    (offset, length): (u64, u64),
    limit: u64,
    path: &str,
) -> Result<(), BootError> {
    let failed = |error| BootError::File {
        path: path.to_owned(),
        error,
    };
    let before = bytes.len().next_multiple_of(4);
    let size = length.saturating_add(before as u64);
    let end = usize::try_from(size).ok().filter(|_| size <= limit);
    let end = end.ok_or_else(|| failed(FsError::TooLarge { size, limit }))?;
    bytes
        .try_reserve_exact(end.saturating_sub(before))
        .map_err(|_| failed(FsError::Io(io::ErrorKind::OutOfMemory.into())))?;
    bytes.resize(end, 0);
    let added = bytes.get_mut(before..).unwrap_or_default();
    file.read_at(added, offset)
        .map_err(|error| failed(FsError::Io(error)))
}
