//! Reads whole files that a user or a snapshot names: only regular files, up to a size.
//!
//! Opening a FIFO would wait for a peer, and a device may return bytes without end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a file to read it.
///
/// # Errors
/// If it cannot be opened, or is no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    // O_NONBLOCK, because opening a FIFO would wait for a peer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(refused()),
    }
}

/// Returns the error for a file that is not a regular file.
pub(crate) fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")
}

/// Reads a file of at most `most` bytes.
///
/// # Errors
/// If it cannot be read, is no regular file, or is longer.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    let mut bytes = Vec::new();
    if length <= most {
        bytes.try_reserve_exact(usize::try_from(length).unwrap_or(usize::MAX))?;
        // The file may grow while it is read. One byte more shows that it is too long.
        file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    }
    if length > most || bytes.len() as u64 > most {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("longer than {most} bytes"),
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_regular_files_of_a_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        let error = read(&path, 3).unwrap_err().to_string();
        assert_eq!(error, "longer than 3 bytes");
        let fifo = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(made.unwrap().success());
        for path in [fifo.as_path(), Path::new("/dev/zero"), folder.path()] {
            let error = read(path, 1 << 20).unwrap_err().to_string();
            assert_eq!(error, "not a regular file", "{}", path.display());
        }
    }
}
