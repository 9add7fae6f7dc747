//! Guest RAM as a sparse file: pages of zeros are holes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use introspect::{Gpa, PhysicalMemory};

use crate::memory::PageSet;
use crate::memory::{GuestRam, HOLE_END, HOLE_START, PAGE_SIZE};

/// The number of bytes that are examined at once. A run of non-zero pages is written in one call.
pub(super) const CHUNK: u64 = 1 << 20;
const PAGE: usize = PAGE_SIZE as usize;

/// A writer of RAM pages to a file, in the order of the file's ranges.
pub(super) struct MemoryFile<'a> {
    ram: &'a GuestRam,
    file: &'a File,
    chunk: Vec<u8>,
}

/// The handling of pages of zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Zeros {
    /// Written, because the file may have other data there.
    Written,
    /// Left out, because the file has a hole there.
    Left,
}

impl<'a> MemoryFile<'a> {
    /// Sets the length of the empty `file` to that of `ram`.
    pub(super) fn new(ram: &'a GuestRam, file: &'a File) -> io::Result<Self> {
        file.set_len(ram.size())?;
        Ok(Self {
            ram,
            file,
            chunk: vec![0; CHUNK as usize],
        })
    }

    /// Writes a guest-physical range of whole pages, at most [`CHUNK`] bytes.
    pub(super) fn write(&mut self, run: &Range<u64>, zeros: Zeros) -> io::Result<()> {
        let length = (run.end - run.start) as usize;
        let chunk = self.chunk.get_mut(..length).unwrap_or_default();
        let read = self.ram.read_physical(Gpa(run.start), chunk);
        read.map_err(io::Error::other)?;
        let offset = offset(run.start);
        match zeros {
            Zeros::Written => self.file.write_all_at(chunk, offset),
            Zeros::Left => write_used_pages(self.file, chunk, offset),
        }
    }
}

/// Pages that were copied while the guest was paused, to be written when it runs again. The guest
/// does not wait for the disk.
#[derive(Default)]
pub(super) struct Pages {
    bytes: Vec<u8>,
    /// The guest-physical addresses of the copies.
    runs: Vec<Range<u64>>,
}

impl Pages {
    /// Allocates room and touches all of it, so that the guest does not wait for the host to find
    /// pages either.
    pub(super) fn with_room(room: u64) -> Self {
        let mut bytes = vec![0xff; room as usize];
        bytes.clear();
        Self {
            bytes,
            runs: Vec::new(),
        }
    }

    /// Checks whether a range still has room.
    pub(super) fn has_room(&self, run: &Range<u64>) -> bool {
        let left = self.bytes.capacity() - self.bytes.len();
        run.end - run.start <= left as u64
    }

    /// Copies a range of RAM, which grows the room if need be.
    pub(super) fn add(&mut self, ram: &GuestRam, run: &Range<u64>) -> io::Result<()> {
        let used = self.bytes.len();
        self.bytes.resize(used + (run.end - run.start) as usize, 0);
        let place = self.bytes.get_mut(used..).unwrap_or_default();
        let read = ram.read_physical(Gpa(run.start), place);
        if let Err(error) = read {
            self.bytes.truncate(used);
            return Err(io::Error::other(error));
        }
        self.runs.push(run.clone());
        Ok(())
    }

    /// Gives the room back that is not used.
    pub(super) fn trimmed(mut self) -> Self {
        self.bytes.shrink_to_fit();
        self
    }

    /// Returns the size of the copies in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the guest-physical ranges of the copies.
    pub(super) fn runs(&self) -> &[Range<u64>] {
        &self.runs
    }

    /// Writes the copies.
    pub(super) fn write(&self, file: &File, zeros: Zeros) -> io::Result<()> {
        let mut rest = self.bytes.as_slice();
        for run in &self.runs {
            let (copy, behind) = rest
                .split_at_checked((run.end - run.start) as usize)
                .unwrap_or_default();
            let offset = offset(run.start);
            match zeros {
                Zeros::Written => file.write_all_at(copy, offset)?,
                Zeros::Left => write_used_pages(file, copy, offset)?,
            }
            rest = behind;
        }
        Ok(())
    }
}

/// Returns the offset in the file of RAM at a guest-physical address.
fn offset(address: u64) -> u64 {
    match address < HOLE_END {
        true => address,
        false => address - (HOLE_END - HOLE_START),
    }
}

/// Returns `pages` as runs that are read and written at once.
pub(super) fn chunks(pages: &PageSet) -> impl Iterator<Item = Range<u64>> {
    pages.runs(CHUNK)
}

fn write_used_pages(file: &File, chunk: &[u8], offset: u64) -> io::Result<()> {
    let mut run: Option<usize> = None;
    let is_zero = |page: &[u8]| page.iter().all(|b| *b == 0);
    for (index, page) in chunk.chunks(PAGE).enumerate() {
        let at = index * PAGE;
        match (run, is_zero(page)) {
            (None, false) => run = Some(at),
            (Some(start), true) => {
                file.write_all_at(
                    chunk.get(start..at).unwrap_or_default(),
                    offset + start as u64,
                )?;
                run = None;
            }
            _ => {}
        }
    }
    match run {
        Some(start) => file.write_all_at(
            chunk.get(start..).unwrap_or_default(),
            offset + start as u64,
        ),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::MetadataExt;

    const USED: [u64; 4] = [0, 4096, 5 << 20, (16 << 20) - 1];

    fn ones(file: &File) -> Vec<u64> {
        let mut back = vec![0; 16 << 20];
        file.read_exact_at(&mut back, 0).unwrap();
        let all = 0..back.len();
        all.filter(|i| back[*i] != 0).map(|i| i as u64).collect()
    }

    #[test]
    fn the_file_has_the_whole_memory_and_only_the_used_pages() {
        let ram = GuestRam::new(16 << 20).unwrap();
        for address in USED {
            ram.write_physical(Gpa(address), &[0xa5]).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        let mut memory = MemoryFile::new(&ram, &file).unwrap();
        for run in chunks(&PageSet::all(&ram)) {
            memory.write(&run, Zeros::Left).unwrap();
        }
        let meta = file.metadata().unwrap();
        assert_eq!(meta.len(), 16 << 20);
        assert!(meta.blocks() * 512 <= 64 << 10, "{} blocks", meta.blocks());
        assert_eq!(ones(&file), USED);

        ram.write_physical(Gpa(4096), &[0]).unwrap();
        memory.write(&(4096..8192), Zeros::Written).unwrap();
        ram.write_physical(Gpa(0), &[0]).unwrap();
        let mut copied = Pages::with_room(4096);
        assert!(copied.has_room(&(0..4096)));
        copied.add(&ram, &(0..4096)).unwrap();
        assert!(!copied.has_room(&(0..4096)));
        copied.write(&file, Zeros::Written).unwrap();
        assert_eq!(ones(&file), USED[2..]);
    }

    #[test]
    fn memory_above_the_hole_follows_that_below() {
        assert_eq!(offset(HOLE_START - 1), HOLE_START - 1);
        assert_eq!(offset(HOLE_END), HOLE_START);
    }
}
