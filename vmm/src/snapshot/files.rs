//! The files that a snapshot is written to, as descriptors that the caller has opened.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{OFlags, fcntl_getfl};

use super::{MEMORY_FILE, STATE_FILE};

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

/// Two distinct empty regular files.
#[derive(Debug)]
pub struct Files {
    pub(super) state: File,
    pub(super) memory: File,
}

impl Files {
    /// Accepts the descriptors of the files for `state` and `memory`.
    ///
    /// # Errors
    /// If one is not a regular file, is not empty, or is not opened for both reading and writing.
    /// Also if both are one file.
    pub fn new(state: OwnedFd, memory: OwnedFd) -> Result<Self, FileRefusal> {
        let (state, first) = checked(state, STATE_FILE)?;
        let (memory, second) = checked(memory, MEMORY_FILE)?;
        if first == second {
            return Err(FileRefusal::Unfit {
                name: MEMORY_FILE,
                found: format!("the file for `{STATE_FILE}`"),
            });
        }
        Ok(Self { state, memory })
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
        assert!(Files::new(file("a", &fit), file("b", &fit)).is_ok());
        std::fs::write(folder.path().join("full"), b"x").unwrap();
        let (pipe, _) = io::pipe().unwrap();
        let cases: [(OwnedFd, &str); 5] = [
            (file("a", &fit), "for `state`"),
            (file("full", &fit), "1 bytes"),
            (file("b", fit.clone().append(true)), "flags"),
            (file("b", OpenOptions::new().read(true)), "flags"),
            (pipe.into(), "FileType"),
        ];
        for (memory, expected) in cases {
            let refused = Files::new(file("a", &fit), memory).unwrap_err().to_string();
            assert!(refused.contains("`memory`"), "{refused}");
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
