//! The folder of a snapshot while it is made.
//!
//! The folder has another name until its files are whole ([`partial`]). Its creator need not be the
//! machine's process, which may be confined to its own folder. A client then opens the files, and
//! the machine writes to their descriptors.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::files::{FileRefusal, Files};
use super::{MEMORY_FILE, STATE_FILE, overlay_file, partial};

/// The reason that the folder of a snapshot cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The name is in use.
    #[error("snapshot {path}: already there; remove it or name another folder")]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The host refuses the folder or a file.
    #[error("snapshot {path}: {source}")]
    Host {
        /// The file or folder.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
}

/// A folder with the empty files of a snapshot, which does not have its final name yet. Dropping it
/// removes it.
#[derive(Debug)]
#[must_use = "the folder is removed if it is not finished"]
pub struct NewFolder {
    folder: PathBuf,
    partial: PathBuf,
    /// `state`, `memory` and the overlays.
    made: Vec<File>,
    is_done: bool,
}

impl NewFolder {
    /// Creates the folder that is to become `folder` (mode 0700), its parents, and its empty files
    /// (mode 0600).
    ///
    /// # Errors
    /// If `folder` exists, or the host refuses to create one of them. Only parent folders are left
    /// then.
    pub fn create(folder: &Path) -> Result<Self, FolderError> {
        if folder.exists() {
            return Err(FolderError::Exists {
                path: folder.to_path_buf(),
            });
        }
        let partial = partial::name(folder);
        let around = partial::around(&partial);
        fs::create_dir_all(around).map_err(failed(around))?;
        let made = DirBuilder::new().mode(0o700).create(&partial);
        made.map_err(failed(&partial))?;
        let names = [STATE_FILE, MEMORY_FILE].into_iter();
        let files = names.map(|name| private_file(&partial, name));
        let files: Result<_, _> = files.collect();
        let made = files.inspect_err(|_| remove(&partial))?;
        Ok(Self {
            folder: folder.to_path_buf(),
            partial,
            made,
            is_done: false,
        })
    }

    /// Creates empty files for a machine's [`overlays`](crate::Machine::overlays), so many.
    ///
    /// # Errors
    /// If the host refuses to create one of them.
    pub fn add_overlays(&mut self, count: usize) -> Result<(), FolderError> {
        for index in 0..count {
            let file = private_file(&self.partial, &overlay_file(index))?;
            self.made.push(file);
        }
        Ok(())
    }

    /// Returns the descriptors of the files, in the order in which [`Files::new`] accepts them.
    #[must_use]
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.made.iter().map(AsFd::as_fd).collect()
    }

    /// Returns the files for a machine in this process.
    ///
    /// # Errors
    /// If there is no room for further descriptors.
    pub fn files(&self) -> Result<Files, FileRefusal> {
        let copies = self.made.iter().map(|file| {
            let copied = file.try_clone();
            copied.map_err(|source| FileRefusal::Unknown {
                name: STATE_FILE,
                source,
            })
        });
        let copies = copies.map(|copy| copy.map(Into::into));
        Files::new(copies.collect::<Result<Vec<_>, _>>()?)
    }

    /// Renames the folder to its final name once its files are whole and on the disk.
    ///
    /// The folder is on the disk too when this returns. Removes the remains of killed saves to the
    /// same folder.
    ///
    /// # Errors
    /// If the host refuses it, or the name has come into use meanwhile.
    pub fn finish(mut self) -> Result<(), FolderError> {
        sync(&self.partial)?;
        fs::rename(&self.partial, &self.folder).map_err(failed(&self.folder))?;
        self.is_done = true;
        sync(partial::around(&self.folder))?;
        partial::clear(&self.folder);
        Ok(())
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.is_done {
            remove(&self.partial);
        }
    }
}

fn remove(partial: &Path) {
    if let Err(error) = fs::remove_dir_all(partial)
        && error.kind() != io::ErrorKind::NotFound
    {
        log::warn!("{} is not removed: {error}", partial.display());
    }
}

fn sync(folder: &Path) -> Result<(), FolderError> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(failed(folder))
}

/// Creates an empty file for its owner only, because the files hold all the guest's data.
fn private_file(folder: &Path, name: &str) -> Result<File, FolderError> {
    let path = folder.join(name);
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create_new(true).mode(0o600);
    options.open(&path).map_err(failed(&path))
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> FolderError {
    let path = path.to_path_buf();
    move |source| FolderError::Host { path, source }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
        entries
            .map(|entry| name(entry).into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_folder_has_its_name_when_it_is_finished_and_is_its_owners_alone() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("deep/saved");
        let mut new = NewFolder::create(&folder).unwrap();
        new.add_overlays(2).unwrap();
        assert!(!folder.exists());
        new.finish().unwrap();
        assert_eq!(names(folder.parent().unwrap()), ["saved"]);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        for file in ["state", "memory", "overlay0", "overlay1"] {
            assert_eq!(mode(&folder.join(file)), 0o600, "{file}");
        }
        let taken = NewFolder::create(&folder).unwrap_err();
        assert!(matches!(taken, FolderError::Exists { .. }), "{taken}");
    }

    #[test]
    fn a_folder_that_is_given_up_is_gone() {
        let place = tempfile::tempdir().unwrap();
        drop(NewFolder::create(&place.path().join("saved")).unwrap());
        assert_eq!(names(place.path()), [""; 0]);
        let file = place.path().join("file");
        fs::write(&file, b"x").unwrap();
        let refused = NewFolder::create(&file.join("saved")).unwrap_err();
        assert!(refused.to_string().contains("file"), "{refused}");
        assert_eq!(names(place.path()), ["file"]);
    }
}
