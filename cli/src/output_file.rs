//! The files that a run writes. A run that fails to start leaves them as they were.

use crate::report::OutputFileError;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use trace_devices::render::CutOff;

use crate::report::Harmless;

/// The permissions of a new file: it holds a guest's activity, and is for its owner only.
const PRIVATE: u32 = 0o600;

/// Makes a new file for its owner only. A link in its place is not followed.
///
/// # Errors
/// If it exists, or cannot be made.
pub fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(PRIVATE)
        .open(path)
}

/// A file opened for writing, with its old contents still in it. Dropped without
/// [`OutputFile::keep`] it is as before: removed if it was not there.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    file: File,
    created: bool,
    kept: bool,
}

impl OutputFile {
    /// Opens `path`, or makes it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn open(path: &Path) -> Result<Self, OutputFileError> {
        let (opened, created) = match create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                (OpenOptions::new().write(true).open(path), false)
            }
            other => (other, true),
        };
        let file = opened.map_err(|source| OutputFileError {
            path: path.to_path_buf(),
            source,
        })?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            created,
            kept: false,
        })
    }

    /// Returns a writer for the same file.
    ///
    /// # Errors
    /// If this process is out of descriptors.
    pub fn writer(&self) -> Result<File, OutputFileError> {
        self.file.try_clone().map_err(|source| self.error(source))
    }

    /// Discards the old contents and keeps the file for the run.
    ///
    /// # Errors
    /// If it cannot be emptied.
    pub fn keep(&mut self) -> Result<(), OutputFileError> {
        // A pipe or a device has nothing to empty.
        if self.file.metadata().is_ok_and(|meta| meta.is_file()) {
            self.file.set_len(0).map_err(|source| self.error(source))?;
        }
        self.kept = true;
        Ok(())
    }

    fn error(&self, source: io::Error) -> OutputFileError {
        OutputFileError {
            path: self.path.clone(),
            source,
        }
    }
}

/// A file whose errors name it.
struct Named {
    path: PathBuf,
    file: File,
}

impl Named {
    fn named(&self, error: io::Error) -> io::Error {
        let kind = error.kind();
        // A closed pipe is recognised by its kind alone.
        if matches!(kind, io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted) {
            return error;
        }
        let path = self.path.clone();
        io::Error::new(
            kind,
            OutputFileError {
                path,
                source: error,
            },
        )
    }
}

impl Write for Named {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes).map_err(|error| self.named(error))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush().map_err(|error| self.named(error))
    }
}

/// Returns the output for a trace: its file, or standard output.
///
/// # Errors
/// If this process is out of descriptors.
pub fn trace_output(file: Option<&OutputFile>) -> Result<Output, OutputFileError> {
    Ok(match file {
        Some(file) => Box::new(BufWriter::new(Named {
            path: file.path.clone(),
            file: file.writer()?,
        })),
        None if io::stdout().is_terminal() => Box::new(Harmless(BufWriter::new(io::stdout()))),
        None => Box::new(BufWriter::new(io::stdout())),
    })
}

/// Returns the output as [`trace_output`] does, and keeps the file.
///
/// # Errors
/// As [`trace_output`], or if the file cannot be emptied.
pub fn kept_output(mut file: Option<&mut OutputFile>) -> Result<Output, OutputFileError> {
    if let Some(file) = &mut file {
        file.keep()?;
    }
    trace_output(file.as_deref())
}

/// The number of tries to end a file that was cut off, each with less of it.
const MOST_TRIES: usize = 8;

/// Ends a file that could not be written further. `end` returns what follows so many intact bytes.
/// Returns the number of records that the file lacks, or `None` if it has no end.
pub fn cut_off(mut file: File, end: impl Fn(u64) -> Option<CutOff>) -> Option<u64> {
    let facts = file.metadata().ok().filter(fs::Metadata::is_file)?;
    let mut intact = facts.len();
    for _ in 0..MOST_TRIES {
        let cut = end(intact)?;
        let written = file
            .set_len(cut.length)
            .and_then(|()| file.seek(SeekFrom::Start(cut.length)))
            .and_then(|_| file.write_all(&cut.end));
        match written {
            Ok(()) => return Some(cut.lost),
            Err(error) => log::info!("the end of a file at {}: {error}", cut.length),
        }
        intact = cut.length.checked_sub(1)?;
    }
    None
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if self.created
            && !self.kept
            && let Err(error) = fs::remove_file(&self.path)
        {
            log::warn!("{} is not removed: {error}", self.path.display());
        }
    }
}

/// Where a trace goes.
pub type Output = Box<dyn Write + Send>;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_run_that_does_not_come_about_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        fs::write(&old, "old contents").unwrap();
        drop(OutputFile::open(&old).unwrap());
        drop(OutputFile::open(&new).unwrap());
        assert_eq!(fs::read_to_string(&old).unwrap(), "old contents");
        let made = OutputFile::open(&new).unwrap();
        let mode = fs::metadata(&new).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, PRIVATE);
        drop(made);
        assert!(!new.exists());
    }

    #[test]
    fn a_file_that_is_cut_off_gets_an_end_with_less_of_it_where_one_is_refused() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"abcdefgh").unwrap();
        let end = |intact: u64| {
            // A length that no file can have is refused.
            let length = if intact == 8 { u64::MAX } else { 3 };
            Some(CutOff {
                length,
                end: b"Z".to_vec(),
                lost: 7,
            })
        };
        assert_eq!(cut_off(file.try_clone().unwrap(), end), Some(7));
        file.seek(SeekFrom::Start(0)).unwrap();
        assert_eq!(io::read_to_string(&file).unwrap(), "abcZ");
        assert_eq!(cut_off(file, |_| None), None);
        let pipe = File::from(std::os::fd::OwnedFd::from(io::pipe().unwrap().1));
        assert_eq!(cut_off(pipe, end), None);
    }

    #[test]
    fn a_run_that_does_replaces_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "something longer").unwrap();
        let mut output = OutputFile::open(&path).unwrap();
        output.keep().unwrap();
        output.writer().unwrap().write_all(b"new").unwrap();
        drop(output);
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        let error = OutputFile::open(&folder.path().join("no/such"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("no/such"), "{error}");
        OutputFile::open(Path::new("/dev/null"))
            .unwrap()
            .keep()
            .unwrap();
    }
}
