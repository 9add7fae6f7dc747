//! The bytes of a disk, windows into them, and the budget of reads.
//!
//! Structures of a hostile image can send their reader around for hours. So each question has a
//! budget of bytes, and small reads cost as much as a sector. Reads beyond it fail.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of a disk, whatever the format of its file.
pub trait ReadAt: Send + Sync {
    /// Returns the number of bytes.
    fn length(&self) -> u64;

    /// Fills a buffer with the bytes at an offset.
    ///
    /// # Errors
    /// The disk ends before, or its file cannot be read.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn length(&self) -> u64 {
        // A block device has no length in its metadata.
        let mut file = self;
        file.seek(SeekFrom::End(0)).unwrap_or_default()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn length(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let found = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..start.checked_add(buffer.len())?));
        buffer.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// The least number of bytes that a read costs.
const LEAST: u64 = 512;

/// A disk and what may still be read of it.
pub(crate) struct Disk {
    source: Box<dyn ReadAt>,
    length: u64,
    left: AtomicU64,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk")
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl Disk {
    /// Returns a disk of which nothing may be read yet.
    pub(crate) fn new(source: Box<dyn ReadAt>) -> Arc<Self> {
        Arc::new(Self {
            length: source.length(),
            source,
            left: AtomicU64::new(0),
        })
    }

    /// Sets the number of bytes that may be read from now on.
    pub(crate) fn allow(&self, bytes: u64) {
        self.left.store(bytes, Ordering::Relaxed);
    }

    /// Returns the whole disk as a window.
    pub(crate) fn window(self: &Arc<Self>) -> Window {
        Window {
            disk: Arc::clone(self),
            start: 0,
            length: self.length,
        }
    }

    fn charge(&self, bytes: usize) -> io::Result<()> {
        let cost = (bytes as u64).max(LEAST);
        let take = |left: u64| left.checked_sub(cost);
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .map(drop)
            .map_err(|_| {
                io::Error::other(
                    "more is to be read for one question than a sound image would need; it is damaged",
                )
            })
    }
}

/// A range of a disk.
#[derive(Debug, Clone)]
pub(crate) struct Window {
    disk: Arc<Disk>,
    start: u64,
    length: u64,
}

impl Window {
    /// Returns the number of bytes.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Returns a part of the window; what is beyond its end is cut off. `None` if nothing is left.
    pub(crate) fn part(&self, start: u64, length: u64) -> Option<Self> {
        let left = self.length.checked_sub(start)?;
        let length = length.min(left);
        (length > 0).then_some(())?;
        Some(Self {
            disk: Arc::clone(&self.disk),
            start: self.start.checked_add(start)?,
            length,
        })
    }

    /// Fills a buffer with the bytes at an offset of the window, at the budget's cost.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.disk.charge(buffer.len())?;
        self.read_free(buffer, offset)
    }

    /// Reads as [`Self::read`] does, without the budget: the caller knows how much it asks for.
    pub(crate) fn read_free(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let at = self.start.checked_add(offset);
        let at = at.ok_or(io::ErrorKind::UnexpectedEof)?;
        self.disk.source.read_at(buffer, at)
    }

    /// Returns bytes of the window.
    pub(crate) fn bytes<const N: usize>(&self, offset: u64) -> io::Result<[u8; N]> {
        let mut buffer = [0; N];
        self.read(&mut buffer, offset)?;
        Ok(buffer)
    }

    /// Returns bytes of the window. The caller has bounded their number.
    pub(crate) fn vec(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; length];
        self.read(&mut buffer, offset)?;
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_ends_where_it_says() {
        let disk = Disk::new(Box::new((0..100).collect::<Vec<u8>>()));
        disk.allow(1 << 20);
        let part = disk.window().part(90, 50).unwrap();
        assert_eq!((part.length(), part.bytes::<2>(8).unwrap()), (10, [98, 99]));
        part.bytes::<2>(9).unwrap_err();
        part.bytes::<1>(u64::MAX).unwrap_err();
        assert!(disk.window().part(100, 1).is_none());
    }

    #[test]
    fn the_budget_ends_reads() {
        let disk = Disk::new(Box::new(vec![0; 100]));
        disk.allow(3 * LEAST);
        let window = disk.window();
        let reads = (0..5).map(|_| window.bytes::<1>(0).is_ok());
        assert_eq!(reads.collect::<Vec<_>>(), [true, true, true, false, false]);
    }
}
