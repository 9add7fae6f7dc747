//! Files of the guest for the client (GDB manual, "Host I/O Packets"): programs and libraries from
//! the page cache, by which the client finds symbols, and some of `/proc/PID`. Nothing is written.

use std::collections::BTreeMap;

use gdbstub::target::ext::host_io::{
    FsKind, HostIo, HostIoClose, HostIoCloseOps, HostIoErrno, HostIoError, HostIoFstat,
    HostIoFstatOps, HostIoOpen, HostIoOpenFlags, HostIoOpenMode, HostIoOpenOps, HostIoPread,
    HostIoPreadOps, HostIoReadlink, HostIoReadlinkOps, HostIoResult, HostIoSetfs, HostIoSetfsOps,
    HostIoStat,
};

use crate::process::{DebugError, Process};
use crate::target::Debugger;

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

/// Returns the name below `/proc/PID` or `/proc/PID/task/TID`, whatever the numbers: the client sees
/// one process only.
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
fn open(process: &Process<'_>, path: &[u8]) -> Result<Option<File>, DebugError> {
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

fn failed<T>(errno: HostIoErrno) -> HostIoResult<T, Debugger<'static>> {
    Err(HostIoError::Errno(errno))
}

impl File {
    fn size(&self) -> u64 {
        match self {
            Self::Cached(_, size) => *size,
            Self::Text(text) => text.len() as u64,
        }
    }
}

impl HostIo for Debugger<'_> {
    fn support_open(&mut self) -> Option<HostIoOpenOps<'_, Self>> {
        Some(self)
    }

    fn support_close(&mut self) -> Option<HostIoCloseOps<'_, Self>> {
        Some(self)
    }

    fn support_pread(&mut self) -> Option<HostIoPreadOps<'_, Self>> {
        Some(self)
    }

    fn support_fstat(&mut self) -> Option<HostIoFstatOps<'_, Self>> {
        Some(self)
    }

    fn support_readlink(&mut self) -> Option<HostIoReadlinkOps<'_, Self>> {
        Some(self)
    }

    fn support_setfs(&mut self) -> Option<HostIoSetfsOps<'_, Self>> {
        Some(self)
    }
}

impl HostIoOpen for Debugger<'_> {
    fn open(
        &mut self,
        filename: &[u8],
        flags: HostIoOpenFlags,
        _: HostIoOpenMode,
    ) -> HostIoResult<u32, Self> {
        let writes = HostIoOpenFlags::O_WRONLY
            | HostIoOpenFlags::O_RDWR
            | HostIoOpenFlags::O_CREAT
            | HostIoOpenFlags::O_TRUNC;
        if flags.intersects(writes) {
            return failed(HostIoErrno::EROFS);
        }
        if self.files.open.len() >= MAX_FILES {
            return failed(HostIoErrno::EMFILE);
        }
        match open(&self.process, filename) {
            Ok(Some(file)) => {
                let number = self.files.last.wrapping_add(1);
                self.files.last = number;
                self.files.open.insert(number, file);
                Ok(number)
            }
            Ok(None) => failed(HostIoErrno::ENOENT),
            Err(error) => {
                log::debug!("{}: {error}", String::from_utf8_lossy(filename));
                failed(HostIoErrno::EIO)
            }
        }
    }
}

impl HostIoClose for Debugger<'_> {
    fn close(&mut self, fd: u32) -> HostIoResult<(), Self> {
        match self.files.open.remove(&fd) {
            Some(_) => Ok(()),
            None => failed(HostIoErrno::EBADF),
        }
    }
}

impl HostIoPread for Debugger<'_> {
    fn pread(
        &mut self,
        fd: u32,
        count: usize,
        offset: u64,
        buf: &mut [u8],
    ) -> HostIoResult<usize, Self> {
        let count = count.min(buf.len());
        let Some(buf) = buf.get_mut(..count) else {
            return failed(HostIoErrno::EINVAL);
        };
        match self.files.open.get(&fd) {
            None => failed(HostIoErrno::EBADF),
            Some(File::Text(text)) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX);
                let rest = text.get(from..).unwrap_or_default();
                Ok(copy(rest, buf))
            }
            Some(File::Cached(path, size)) => {
                let read = self.process.read_file(path, offset, buf);
                match read.ok().flatten() {
                    // The page is not in the guest's memory.
                    Some(0) if offset < *size && !buf.is_empty() => failed(HostIoErrno::EIO),
                    Some(read) => Ok(read),
                    None => failed(HostIoErrno::EIO),
                }
            }
        }
    }
}

/// Copies as much as fits. Returns the number of bytes.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) -> usize {
    for (place, byte) in to.iter_mut().zip(from) {
        *place = *byte;
    }
    from.len().min(to.len())
}

impl HostIoFstat for Debugger<'_> {
    fn fstat(&mut self, fd: u32) -> HostIoResult<HostIoStat, Self> {
        let Some(file) = self.files.open.get(&fd) else {
            return failed(HostIoErrno::EBADF);
        };
        Ok(HostIoStat {
            st_dev: 0,
            st_ino: 0,
            st_mode: HostIoOpenMode::S_IFREG | HostIoOpenMode::S_IRUSR,
            st_nlink: 1,
            st_uid: 0,
            st_gid: 0,
            st_rdev: 0,
            st_size: file.size(),
            st_blksize: 4096,
            st_blocks: file.size().div_ceil(512),
            st_atime: 0,
            st_mtime: 0,
            st_ctime: 0,
        })
    }
}

impl HostIoReadlink for Debugger<'_> {
    fn readlink(&mut self, filename: &[u8], buf: &mut [u8]) -> HostIoResult<usize, Self> {
        match of_proc(filename) {
            Some(b"exe") => match self.process.executable() {
                Ok(Some(path)) => Ok(copy(&path, buf)),
                _ => failed(HostIoErrno::ENOENT),
            },
            // Symbolic links are not followed.
            _ => failed(HostIoErrno::EINVAL),
        }
    }
}

impl HostIoSetfs for Debugger<'_> {
    fn setfs(&mut self, _: FsKind) -> HostIoResult<(), Self> {
        Ok(())
    }
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
