//! The files that a snapshot is written to, as descriptors that somebody else has opened.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{OFlags, fcntl_getfl};

use super::{MEMORY_FILE, STATE_FILE};

/// A descriptor is not one that a snapshot can be written to.
#[derive(Debug, thiserror::Error)]
pub enum FileRefusal {
    /// Nothing is known of it.
    #[error("the file for the snapshot's `{name}`: {source}")]
    Unknown {
        /// Which of the two.
        name: &'static str,
        /// What the host said.
        source: io::Error,
    },
    /// It is of another kind, or in use.
    #[error(
        "the file for the snapshot's `{name}`: expected an empty regular file, opened for reading and writing at any place; found {found}"
    )]
    Unfit {
        /// Which of the two.
        name: &'static str,
        /// What it is instead.
        found: String,
    },
}

/// Two empty regular files of their own.
#[derive(Debug)]
pub struct Files {
    pub(super) state: File,
    pub(super) memory: File,
}

impl Files {
    /// Takes the descriptors of the files for `state` and `memory`.
    ///
    /// # Errors
    /// If one is not a regular file, is not empty, or not opened for both reading and writing, or both are one file.
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
