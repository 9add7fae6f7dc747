//! A file of a file system in an image, as the places of its bytes.
//!
//! A file system lists the runs of a file once. Reads then go to the disk without its structures.

use std::io;

use crate::disk::{ReadAt, Window};

/// The most runs that a file may have: 1 GiB in the worst places of a file system with small
/// blocks.
pub(crate) const MOST_RUNS: usize = 1 << 20;

/// Bytes that stand together on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// The first byte's offset in the file.
    pub at: u64,
    /// The first byte's offset in the file system.
    pub from: u64,
    /// The number of bytes.
    pub length: u64,
}

/// A file of an image, open for reading.
#[derive(Debug, Clone)]
pub struct File {
    window: Window,
    runs: Vec<Run>,
    length: u64,
}

impl File {
    /// Returns a file of these runs, in order of their offsets. Bytes between runs are zero.
    pub(crate) fn new(window: Window, runs: Vec<Run>, length: u64) -> Self {
        Self {
            window,
            runs,
            length,
        }
    }

    /// Returns the bytes of the whole file, at the budget's cost; `None` if they are more than
    /// `limit`.
    pub(crate) fn read_all(&self, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let Some(length) = usize::try_from(self.length)
            .ok()
            .filter(|_| self.length <= limit)
        else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(length)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        bytes.resize(length, 0);
        self.fill(&mut bytes, 0, Window::read)?;
        Ok(Some(bytes))
    }

    /// Returns a part of the file, at the budget's cost. The caller has bounded its length.
    pub(crate) fn part(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.fill(&mut bytes, offset, Window::read)?;
        Ok(bytes)
    }

    fn fill(
        &self,
        buffer: &mut [u8],
        offset: u64,
        read: fn(&Window, &mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        let Some(end) = end.filter(|end| *end <= self.length) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        buffer.fill(0);
        let first = self
            .runs
            .partition_point(|run| run.at.saturating_add(run.length) <= offset);
        for run in self.runs.get(first..).unwrap_or_default() {
            if run.at >= end {
                break;
            }
            let from = run.at.max(offset);
            let to = run.at.saturating_add(run.length).min(end);
            let (skipped, start) = (from - run.at, from - offset);
            let Some(part) = usize::try_from(start)
                .ok()
                .zip(usize::try_from(to.saturating_sub(offset)).ok())
                .and_then(|(start, to)| buffer.get_mut(start..to))
            else {
                continue;
            };
            read(&self.window, part, run.from.saturating_add(skipped))?;
        }
        Ok(())
    }
}

impl ReadAt for File {
    fn length(&self) -> u64 {
        self.length
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.fill(buffer, offset, Window::read_free)
    }
}

/// Runs as they are found, of blocks that follow one another in the file.
#[derive(Debug)]
pub(crate) struct Runs {
    found: Vec<Run>,
}

impl Runs {
    pub(crate) fn new() -> Self {
        Self { found: Vec::new() }
    }

    /// Adds a run behind the last one, or joins both. Returns `None` if there are too many, or if
    /// it begins before the last one ends.
    pub(crate) fn add(&mut self, run: Run) -> Option<()> {
        run.at.checked_add(run.length)?;
        run.from.checked_add(run.length)?;
        if let Some(last) = self.found.last_mut() {
            let end = last.at.checked_add(last.length)?;
            (run.at >= end).then_some(())?;
            if run.at == end && last.from.checked_add(last.length) == Some(run.from) {
                last.length = last.length.checked_add(run.length)?;
                return Some(());
            }
        }
        (self.found.len() < MOST_RUNS).then_some(())?;
        self.found.push(run);
        Some(())
    }

    pub(crate) fn finish(self) -> Vec<Run> {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Disk;

    fn file() -> File {
        let disk = Disk::new(Box::new((0..=255).collect::<Vec<u8>>()));
        disk.allow(1 << 20);
        let mut runs = Runs::new();
        for (at, from, length) in [(0, 100, 2), (2, 102, 2), (8, 20, 4)] {
            runs.add(Run { at, from, length }).unwrap();
        }
        let runs = runs.finish();
        assert_eq!(runs.len(), 2);
        File::new(disk.window(), runs, 14)
    }

    #[test]
    fn holes_read_as_zeros() {
        let file = file();
        let all = [100, 101, 102, 103, 0, 0, 0, 0, 20, 21, 22, 23, 0, 0];
        assert_eq!(file.read_all(14).unwrap().unwrap(), all);
        for offset in 0..14_usize {
            for length in 0..=14 - offset {
                let mut part = vec![0xff; length];
                file.read_at(&mut part, offset as u64).unwrap();
                assert_eq!(part, all[offset..offset + length], "{offset} {length}");
            }
        }
        assert!(file.read_all(13).unwrap().is_none());
        assert!(file.read_at(&mut [0; 2], 13).is_err());
    }

    #[test]
    fn runs_that_overlap_are_refused() {
        let mut runs = Runs::new();
        let run = |at| Run {
            at,
            from: 0,
            length: 4,
        };
        assert!(runs.add(run(4)).is_some());
        assert!(runs.add(run(6)).is_none());
        assert!(runs.add(run(u64::MAX)).is_none());
    }
}
