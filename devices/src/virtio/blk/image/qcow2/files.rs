//! The files of an image, as the crate takes them and as they are read and written past it.

use std::fs::File;
use std::path::{Path, PathBuf};

use imago::file::File as ImageFile;
use imago::{Storage, StorageOpenOptions};

use super::super::ImageError;

/// The files of an image and of those behind it, by their paths.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<(PathBuf, File)>);

impl Files {
    /// Returns a file as the crate takes it, and keeps a handle of it.
    pub(super) fn open(
        &mut self,
        file: File,
        path: &Path,
        is_writable: bool,
    ) -> Result<ImageFile, ImageError> {
        let failed = |source| ImageError::Open {
            path: path.to_path_buf(),
            source,
        };
        let handle = file.try_clone().map_err(failed)?;
        self.0.push((path.to_path_buf(), handle));
        let options = StorageOpenOptions::new().filename(path).write(is_writable);
        ImageFile::from_open_file(file, options).map_err(failed)
    }

    /// Returns the file of `storage`, if no other one has its path: files may be renamed while a
    /// chain of them is opened.
    pub(super) fn of(&self, storage: &ImageFile) -> Option<&File> {
        let path = storage.get_filename()?;
        let mut found = self.0.iter().filter(|(known, _)| *known == path);
        let (_, file) = found.next()?;
        found.next().is_none().then_some(file)
    }
}
