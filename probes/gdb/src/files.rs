//! Files of the guest for the client: programs and libraries from the page cache, by which the
//! client finds symbols, and some of `/proc/PID`. They are only read.

use std::collections::BTreeMap;

use gdbstub::target::ext::host_io::HostIoErrno;

use crate::subject::{File, Subject};

/// The largest number of open files.
const MAX_FILES: usize = 64;

/// The open files of a client.
#[derive(Debug, Default)]
pub(crate) struct Files {
    open: BTreeMap<u32, File>,
    last: u32,
}

impl Files {
    /// Opens the file at a path. Returns its number.
    ///
    /// # Errors
    /// If there is no such file in the guest's memory, or too many are open.
    pub(crate) fn open(&mut self, subject: &dyn Subject, path: &[u8]) -> Result<u32, HostIoErrno> {
        if self.open.len() >= MAX_FILES {
            return Err(HostIoErrno::EMFILE);
        }
        let file = subject.open(path).map_err(|error| {
            log::debug!("{}: {error}", String::from_utf8_lossy(path));
            HostIoErrno::EIO
        })?;
        self.last = self.last.wrapping_add(1);
        self.open
            .insert(self.last, file.ok_or(HostIoErrno::ENOENT)?);
        Ok(self.last)
    }

    /// Closes a file.
    ///
    /// # Errors
    /// If no open file has the number.
    pub(crate) fn close(&mut self, number: u32) -> Result<(), HostIoErrno> {
        let closed = self.open.remove(&number);
        closed.map(|_| ()).ok_or(HostIoErrno::EBADF)
    }

    /// Returns the size of a file in bytes.
    ///
    /// # Errors
    /// If no open file has the number.
    pub(crate) fn size(&self, number: u32) -> Result<u64, HostIoErrno> {
        match self.file(number)? {
            File::Cached(_, size) => Ok(*size),
            File::Text(text) => Ok(text.len() as u64),
        }
    }

    /// Reads a file from `offset` on. Returns the number of bytes, 0 at the end.
    ///
    /// # Errors
    /// If no open file has the number, or the page is not in the guest's memory.
    pub(crate) fn read(
        &self,
        subject: &dyn Subject,
        number: u32,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<usize, HostIoErrno> {
        match self.file(number)? {
            File::Text(text) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX);
                Ok(copy(text.get(from..).unwrap_or_default(), buf))
            }
            File::Cached(path, size) => match subject.read_file(path, offset, buf) {
                Ok(Some(0)) if offset < *size && !buf.is_empty() => Err(HostIoErrno::EIO),
                Ok(Some(read)) => Ok(read),
                _ => Err(HostIoErrno::EIO),
            },
        }
    }

    fn file(&self, number: u32) -> Result<&File, HostIoErrno> {
        self.open.get(&number).ok_or(HostIoErrno::EBADF)
    }
}

/// Copies as much as fits. Returns the number of bytes.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) -> usize {
    for (place, byte) in to.iter_mut().zip(from) {
        *place = *byte;
    }
    from.len().min(to.len())
}
