//! Files of the guest for the client: programs and libraries from the page cache, by which the
//! client finds symbols, and some of `/proc/PID`. They are only read.

use std::collections::BTreeMap;

use gdbstub::target::ext::host_io::HostIoErrno;

use crate::process::{DebugError, Process};

/// The largest number of open files.
const MAX_FILES: usize = 64;
/// The largest number of bytes of arguments that are shown.
const MAX_ARGUMENTS: usize = 4096;

/// An open file.
#[derive(Debug, Clone)]
enum File {
    /// A file in the page cache, by its path, with its size in bytes.
    Cached(Vec<u8>, u64),
    /// A text that was made when the file was opened.
    Text(Vec<u8>),
}

/// The open files of a client.
#[derive(Debug, Default)]
pub(crate) struct Files {
    open: BTreeMap<u32, File>,
    last: u32,
}

impl Files {
    /// Opens the file at a path of the process. Returns its number.
    ///
    /// # Errors
    /// If there is no such file in the guest's memory, or too many are open.
    pub(crate) fn open(&mut self, process: &Process<'_>, path: &[u8]) -> Result<u32, HostIoErrno> {
        if self.open.len() >= MAX_FILES {
            return Err(HostIoErrno::EMFILE);
        }
        let file = find(process, path).map_err(|error| {
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
        process: &Process<'_>,
        number: u32,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<usize, HostIoErrno> {
        match self.file(number)? {
            File::Text(text) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX);
                Ok(copy(text.get(from..).unwrap_or_default(), buf))
            }
            File::Cached(path, size) => match process.read_file(path, offset, buf) {
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

/// Reads a symbolic link: `/proc/PID/exe` alone.
///
/// # Errors
/// If the path is another one, or the process has no program.
pub(crate) fn link(process: &Process<'_>, path: &[u8]) -> Result<Vec<u8>, HostIoErrno> {
    match of_proc(path) {
        Some(b"exe") => {
            let path = process.executable().ok().flatten();
            path.ok_or(HostIoErrno::ENOENT)
        }
        _ => Err(HostIoErrno::EINVAL),
    }
}

/// Returns the name below `/proc/PID` or `/proc/PID/task/TID`, whatever the numbers: the client
/// sees one process only.
fn of_proc(path: &[u8]) -> Option<&[u8]> {
    let name = below_number(path.strip_prefix(b"/proc/")?)?;
    match name.strip_prefix(b"task/") {
        Some(thread) => below_number(thread),
        None => Some(name),
    }
}

/// Returns what stands behind a number and a slash.
fn below_number(path: &[u8]) -> Option<&[u8]> {
    let end = path.iter().position(|byte| *byte == b'/')?;
    let (number, name) = path.split_at(end);
    let is_number = number == b"self" || number.iter().all(u8::is_ascii_digit);
    name.get(1..).filter(|_| is_number)
}

/// Makes or finds the file at a path.
fn find(process: &Process<'_>, path: &[u8]) -> Result<Option<File>, DebugError> {
    let text = match of_proc(path) {
        Some(b"maps") => process.maps()?.into_bytes(),
        Some(b"cmdline") => process.arguments(MAX_ARGUMENTS)?,
        Some(b"auxv") => process.auxiliary_vector()?,
        _ => {
            let size = process.with_file(path, |file| file.file.size)?;
            return Ok(size.map(|size| File::Cached(path.to_vec(), size)));
        }
    };
    Ok(Some(File::Text(text)))
}

/// Copies as much as fits. Returns the number of bytes.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) -> usize {
    for (place, byte) in to.iter_mut().zip(from) {
        *place = *byte;
    }
    from.len().min(to.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_process_are_known_by_any_number() {
        for (path, name) in [
            (&b"/proc/1/maps"[..], Some(&b"maps"[..])),
            (b"/proc/22/exe", Some(b"exe")),
            (b"/proc/1/task/22/maps", Some(b"maps")),
            (b"/proc/self/auxv", Some(b"auxv")),
            (b"/proc/cpuinfo", None),
            (b"/proc/fs/maps", None),
            (b"/bin/proc/1/maps", None),
        ] {
            assert_eq!(of_proc(path), name);
        }
    }
}
