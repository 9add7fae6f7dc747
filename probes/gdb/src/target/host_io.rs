//! The requests for files (GDB manual, "Host I/O Packets"). Nothing is written.

use gdbstub::target::ext::host_io::{
    FsKind, HostIo, HostIoClose, HostIoCloseOps, HostIoErrno, HostIoError, HostIoFstat,
    HostIoFstatOps, HostIoOpen, HostIoOpenFlags, HostIoOpenMode, HostIoOpenOps, HostIoPread,
    HostIoPreadOps, HostIoReadlink, HostIoReadlinkOps, HostIoResult, HostIoSetfs, HostIoSetfsOps,
    HostIoStat,
};

use crate::debugger::Debugger;
use crate::files::copy;

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
        let opened = match flags.intersects(writes) {
            true => Err(HostIoErrno::EROFS),
            false => self.files.open(&*self.subject, filename),
        };
        opened.map_err(HostIoError::Errno)
    }
}

impl HostIoClose for Debugger<'_> {
    fn close(&mut self, fd: u32) -> HostIoResult<(), Self> {
        self.files.close(fd).map_err(HostIoError::Errno)
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
        let buf = buf.get_mut(..count).unwrap_or_default();
        let read = self.files.read(&*self.subject, fd, offset, buf);
        read.map_err(HostIoError::Errno)
    }
}

impl HostIoFstat for Debugger<'_> {
    fn fstat(&mut self, fd: u32) -> HostIoResult<HostIoStat, Self> {
        let size = self.files.size(fd).map_err(HostIoError::Errno)?;
        Ok(HostIoStat {
            st_dev: 0,
            st_ino: 0,
            st_mode: HostIoOpenMode::S_IFREG | HostIoOpenMode::S_IRUSR,
            st_nlink: 1,
            st_uid: 0,
            st_gid: 0,
            st_rdev: 0,
            st_size: size,
            st_blksize: 4096,
            st_blocks: size.div_ceil(512),
            st_atime: 0,
            st_mtime: 0,
            st_ctime: 0,
        })
    }
}

impl HostIoReadlink for Debugger<'_> {
    fn readlink(&mut self, filename: &[u8], buf: &mut [u8]) -> HostIoResult<usize, Self> {
        let target = self.subject.link(filename);
        let target = target.ok_or(HostIoError::Errno(HostIoErrno::EINVAL))?;
        Ok(copy(&target, buf))
    }
}

impl HostIoSetfs for Debugger<'_> {
    fn setfs(&mut self, _: FsKind) -> HostIoResult<(), Self> {
        Ok(())
    }
}
