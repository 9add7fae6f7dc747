//! Files of disks read and written straight from and to guest memory: preadv(2) and pwritev(2).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use devices::MemorySlice;
use devices::virtio::blk::DirectIo;
use libc::{c_int, iovec, off_t};
use vm_memory::bitmap::Bitmap;

/// The maximum number of pieces of one call (IOV_MAX, include/uapi/linux/uio.h).
const MOST: usize = 1024;

/// The calls of the host's kernel.
#[derive(Debug)]
pub(super) struct VectoredIo;

impl DirectIo for VectoredIo {
    fn read(&self, file: &File, targets: &[MemorySlice<'_>], offset: u64) -> io::Result<()> {
        let guards: Vec<_> = targets.iter().map(MemorySlice::ptr_guard_mut).collect();
        let pieces = guards.iter().map(|guard| iovec {
            iov_base: guard.as_ptr().cast(),
            iov_len: guard.len(),
        });
        let done = transfer(pieces.collect(), offset, |pieces, count, offset| {
            // SAFETY: `pieces` points to `count` vectors, each of mapped guest memory, which
            // `guards` keep so. The kernel alone writes there, and no reference leads there.
            unsafe { libc::preadv(file.as_raw_fd(), pieces, count, offset) }
        });
        // Also of a call that has failed midway.
        for target in targets {
            target.bitmap().mark_dirty(0, target.len());
        }
        done
    }

    fn write(&self, file: &File, sources: &[MemorySlice<'_>], offset: u64) -> io::Result<()> {
        let guards: Vec<_> = sources.iter().map(MemorySlice::ptr_guard).collect();
        let pieces = guards.iter().map(|guard| iovec {
            iov_base: guard.as_ptr().cast_mut().cast(),
            iov_len: guard.len(),
        });
        transfer(pieces.collect(), offset, |pieces, count, offset| {
            // SAFETY: `pieces` points to `count` vectors, each of mapped guest memory, which
            // `guards` keep so. The kernel only reads there.
            unsafe { libc::pwritev(file.as_raw_fd(), pieces, count, offset) }
        })
    }
}

/// Calls until all bytes of the pieces are moved.
fn transfer(
    mut pieces: Vec<iovec>,
    mut offset: u64,
    call: impl Fn(*const iovec, c_int, off_t) -> isize,
) -> io::Result<()> {
    let mut rest = pieces.as_mut_slice();
    while !rest.is_empty() {
        let at = off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let count = rest.len().min(MOST) as c_int;
        match usize::try_from(call(rest.as_ptr(), count, at)) {
            // The file has become shorter.
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => {
                offset = offset.saturating_add(moved as u64);
                rest = behind(rest, moved);
            }
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Returns the pieces without their first `moved` bytes.
fn behind(pieces: &mut [iovec], mut moved: usize) -> &mut [iovec] {
    let is_whole = |piece: &&iovec| {
        let whole = piece.iov_len <= moved;
        if whole {
            moved -= piece.iov_len;
        }
        whole
    };
    let whole = pieces.iter().take_while(is_whole).count();
    let rest = pieces.get_mut(whole..).unwrap_or_default();
    if let Some(piece) = rest.first_mut() {
        piece.iov_base = piece.iov_base.wrapping_byte_add(moved);
        piece.iov_len -= moved;
    }
    rest
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::cell::Cell;
    use std::io::Write;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use devices::{HostWrites, WatchedMemory};
    use vm_memory::mmap::MmapRegionBuilder;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestRegionMmap};

    use super::*;

    const PAGE: usize = 4096;

    /// Returns memory of 64 pages, and the notes of the host's writes to it.
    fn memory() -> (WatchedMemory, HostWrites) {
        let notes = HostWrites::new(64 * PAGE, Arc::new(AtomicBool::new(true)));
        let region = MmapRegionBuilder::new_with_bitmap(64 * PAGE, notes.clone())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
            .build()
            .unwrap();
        let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
        (WatchedMemory::from_regions(vec![region]).unwrap(), notes)
    }

    /// Returns the pieces of memory with these pages, in this order.
    fn slices<'m>(memory: &'m WatchedMemory, pages: &[usize]) -> Vec<MemorySlice<'m>> {
        let piece = |page: &usize| {
            let at = GuestAddress((page * PAGE) as u64);
            memory.get_slice(at, PAGE).unwrap()
        };
        pages.iter().map(piece).collect()
    }

    #[test]
    fn a_file_is_read_to_scattered_memory_which_is_noted() {
        let (memory, notes) = memory();
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..3 * PAGE).map(|at| (at / 7) as u8).collect();
        file.write_all(&content).unwrap();
        let targets = slices(&memory, &[5, 40]);
        VectoredIo.read(&file, &targets, 100).unwrap();
        for (page, from) in [(5, 100), (40, 100 + PAGE)] {
            let mut found = [0; PAGE];
            let at = GuestAddress((page * PAGE) as u64);
            memory.read_slice(&mut found, at).unwrap();
            assert!(found[..] == content[from..from + PAGE], "page {page}");
        }
        assert_eq!(notes.take(), [1 << 5 | 1 << 40]);
        // Past the file's end.
        let error = VectoredIo.read(&file, &targets, 2 * PAGE as u64);
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(notes.take(), [1 << 5 | 1 << 40]);
    }

    #[test]
    fn scattered_memory_is_written_to_a_file() {
        let (memory, notes) = memory();
        let file = tempfile::tempfile().unwrap();
        for (page, byte) in [(9, b'a'), (2, b'b')] {
            let at = GuestAddress((page * PAGE) as u64);
            memory.write_slice(&[byte; PAGE], at).unwrap();
        }
        let _ = notes.take();
        VectoredIo
            .write(&file, &slices(&memory, &[9, 2]), 512)
            .unwrap();
        let mut written = vec![0; 2 * PAGE];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut written, 512).unwrap();
        assert!(written[..PAGE] == [b'a'; PAGE] && written[PAGE..] == [b'b'; PAGE]);
        assert_eq!(notes.take(), [0]);
    }

    #[test]
    fn a_call_that_moves_less_is_continued() {
        let mut bytes = [0u8; 10];
        let start = bytes.as_mut_ptr();
        let piece = |at: usize, length| iovec {
            iov_base: start.wrapping_add(at).cast(),
            iov_len: length,
        };
        let calls = Cell::new(0);
        let moved = [2, 1, 4, 3];
        let seen = |pieces: *const iovec, count: c_int, offset: off_t| {
            let number = calls.replace(calls.get() + 1);
            let expected = [(0, 4, 3), (2, 2, 3), (3, 1, 3), (7, 3, 1)][number];
            // SAFETY: `transfer` passes at least one piece.
            let first = unsafe { *pieces };
            let at = first.iov_base.addr() - start.addr();
            assert_eq!((at, first.iov_len, count), expected);
            assert_eq!(offset, 100 + at as off_t);
            moved[number]
        };
        let pieces = vec![piece(0, 4), piece(4, 3), piece(7, 3)];
        transfer(pieces, 100, seen).unwrap();
        assert_eq!(calls.get(), moved.len());
        let ended = transfer(vec![piece(0, 1)], 0, |_, _, _| 0);
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
