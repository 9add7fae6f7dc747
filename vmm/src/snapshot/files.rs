//! The files that a snapshot is written to, as descriptors that the caller has opened.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{OFlags, fcntl_getfl};

use super::{MEMORY_FILE, OVERLAY_FILE, STATE_FILE};

/// The names of the files before the overlays.
const NAMES: [&str; 2] = [STATE_FILE, MEMORY_FILE];

/// The reason that a snapshot cannot be written to a descriptor.
#[derive(Debug, thiserror::Error)]
pub enum FileRefusal {
    /// The state of the descriptor cannot be read.
    #[error("the file for the snapshot's `{name}`: {source}")]
    Unknown {
        /// The file's name in the snapshot.
        name: &'static str,
        /// The host's error.
        source: io::Error,
    },
    /// A file is missing.
    #[error(
        "{found} files for a snapshot: expected `{STATE_FILE}`, `{MEMORY_FILE}` and its overlays"
    )]
    Count {
        /// The number of files.
        found: usize,
    },
    /// The file is of another kind, or in use.
    #[error(
        "the file for the snapshot's `{name}`: expected an empty regular file, opened for reading and writing at any place; found {found}"
    )]
    Unfit {
        /// The file's name in the snapshot.
        name: &'static str,
        /// The actual kind or state of the file.
        found: String,
    },
}

/// Distinct empty regular files.
#[derive(Debug)]
pub struct Files {
    pub(super) state: File,
    pub(super) memory: File,
    pub(super) overlays: Vec<File>,
}

impl Files {
    /// Accepts the descriptors of the files for `state`, `memory`, and the overlays in the order of
    /// the disks.
    ///
    /// # Errors
    /// If one is not a regular file, is not empty, or is not opened for both reading and writing.
    /// Also if two are one file, or there are fewer than two.
    pub fn new(descriptors: Vec<OwnedFd>) -> Result<Self, FileRefusal> {
        let found = descriptors.len();
        let mut seen = Vec::new();
        let mut files = Vec::new();
        for (index, descriptor) in descriptors.into_iter().enumerate() {
            let name = *NAMES.get(index).unwrap_or(&OVERLAY_FILE);
            let (file, identity) = checked(descriptor, name)?;
            if seen.contains(&identity) {
                let found = "the file for another part".to_owned();
                return Err(FileRefusal::Unfit { name, found });
            }
            seen.push(identity);
            files.push(file);
        }
        let mut files = files.into_iter();
        let (Some(state), Some(memory)) = (files.next(), files.next()) else {
            return Err(FileRefusal::Count { found });
        };
        Ok(Self {
            state,
            memory,
            overlays: files.collect(),
        })
    }
}

/// Returns the file and its (device, inode).
fn checked(descriptor: OwnedFd, name: &'static str) -> Result<(File, (u64, u64)), FileRefusal> {
    let unknown = |source| FileRefusal::Unknown { name, source };
    let unfit = |found| FileRefusal::Unfit { name, found };
    let flags = fcntl_getfl(&descriptor).map_err(|error| unknown(error.into()))?;
    let file = File::from(descriptor);
    let meta = file.metadata().map_err(unknown)?;
    if !meta.is_file() {
        return Err(unfit(format!("{:?}", meta.file_type())));
    }
    if meta.len() != 0 {
        return Err(unfit(format!("{} bytes in it", meta.len())));
    }
    if flags & OFlags::RWMODE != OFlags::RDWR || flags.contains(OFlags::APPEND) {
        return Err(unfit(format!("a descriptor with the flags {flags:?}")));
    }
    Ok((file, (meta.dev(), meta.ino())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::fs::OpenOptions;

    #[test]
    fn only_two_empty_files_that_can_be_read_and_written_are_taken() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, options: &OpenOptions| -> OwnedFd {
            options.open(folder.path().join(name)).unwrap().into()
        };
        let fit = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .clone();
        Files::new(vec![file("a", &fit), file("b", &fit)]).unwrap();
        let alone = Files::new(vec![file("a", &fit)]).unwrap_err();
        assert!(matches!(alone, FileRefusal::Count { found: 1 }));
        std::fs::write(folder.path().join("full"), b"x").unwrap();
        let (pipe, _) = io::pipe().unwrap();
        let cases: [(OwnedFd, &str); 5] = [
            (file("a", &fit), "for another part"),
            (file("full", &fit), "1 bytes"),
            (file("b", fit.clone().append(true)), "flags"),
            (file("b", OpenOptions::new().read(true)), "flags"),
            (pipe.into(), "FileType"),
        ];
        for (memory, expected) in cases {
            let refused = Files::new(vec![file("a", &fit), memory]);
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains("`memory`"), "{refused}");
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
