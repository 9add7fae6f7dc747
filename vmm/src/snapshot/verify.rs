//! Checks that the `memory` of a snapshot is as it was written.
//!
//! They detect damage by a disk or by mistake, not by an attacker, who can change `memory` and its
//! hashes alike. A snapshot must be trusted like a program in any case.
//!
//! All pieces can be checked before a guest runs ([`SavedMemory::verify`]), which takes as long as
//! reading the whole file. Otherwise pieces are checked as they come into use
//! ([`SavedMemory::watch`]).
//!
//! A guest's first touch of a page is a page fault of the host that no program sees. A thread
//! therefore reads the process's own page table (/proc/self/pagemap) from time to time. It checks
//! the unchecked pieces that have mapped pages. Damage is found soon after its first use, not
//! before it. It is logged and counted, and the guest is not stopped.
//!
//! A page that is mapped and unmapped again between two looks is missed. userfaultfd(2) would see
//! each touch before the guest does. But it needs privileges on common hosts, and a copy of each
//! page that machines now share.
//!
//! Many machines beside each other thus read no more of a file than their guests use. An idle
//! machine reads nothing.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use introspect::regular_file;

use super::pieces::{self, Piece, Reader};
use super::restore::{RestoreError, read_state};
use super::{MEMORY_FILE, STATE_FILE};
use crate::memory::{GuestRam, PAGE_SIZE};

/// The time between two looks for pieces in use.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of pieces that are checked at a look: 64 MiB in a second.
const CHECKED_AT_ONCE: usize = 32;
/// The maximum number of pieces that are examined at a look: the page table of 8 GiB, 16 MiB of the
/// pagemap.
const LOOKED_FOR: u64 = 4096;
/// The size in bytes of an entry of the pagemap. There is one for each page.
const ENTRY: u64 = 8;
/// The bits of an entry for a page that is present or swapped out.
const IN_USE: u64 = 1 << 63 | 1 << 62;

/// A piece of `memory` that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedPiece {
    /// The byte range in the file.
    pub bytes: Range<u64>,
    /// The error, if the piece cannot be read.
    pub unreadable: Option<String>,
}

impl std::fmt::Display for DamagedPiece {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Range { start, end } = self.bytes;
        match &self.unreadable {
            None => write!(f, "bytes {start:#x} to {end:#x} have changed"),
            Some(why) => write!(f, "bytes {start:#x} to {end:#x} cannot be read: {why}"),
        }
    }
}

/// The `memory` of a snapshot, and its hashes.
#[derive(Debug)]
pub struct SavedMemory {
    file: File,
    pieces: Vec<Piece>,
    size: u64,
}

impl SavedMemory {
    /// Opens the memory of the snapshot in `folder`. Needs no KVM.
    ///
    /// # Errors
    /// If a file is missing, or `state` is damaged.
    pub fn open(folder: &Path) -> Result<Self, RestoreError> {
        let saved = read_state(&folder.join(STATE_FILE))?;
        let path = folder.join(MEMORY_FILE);
        let opened = regular_file::open(&path);
        let file = opened.map_err(|source| RestoreError::Read { path, source })?;
        Ok(Self::new(file, saved.pieces, saved.memory))
    }

    pub(super) fn new(file: File, pieces: Vec<Piece>, size: u64) -> Self {
        Self { file, pieces, size }
    }

    /// Returns the size of memory in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the number of pieces that have a hash.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Checks all pieces, in the order of the file, and returns the damaged ones. `progress` gets
    /// the number of bytes done, and of all bytes.
    pub fn verify(&self, mut progress: impl FnMut(u64, u64)) -> Vec<DamagedPiece> {
        let mut reader = Reader::new();
        let check = |index| {
            let damaged = self.check(&mut reader, index);
            progress(pieces::range(index, self.size).end, self.size);
            damaged
        };
        (0..self.pieces.len() as u64).filter_map(check).collect()
    }

    fn check(&self, reader: &mut Reader, index: u64) -> Option<DamagedPiece> {
        let bytes = pieces::range(index, self.size);
        let expected = self.pieces.get(usize::try_from(index).ok()?)?;
        let unreadable = match reader.read(&self.file, &bytes) {
            Ok(found) if found == *expected => return None,
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        Some(DamagedPiece { bytes, unreadable })
    }

    /// Checks pieces as they come into use in `ram`, on a thread of its own, until the result is
    /// dropped.
    ///
    /// The thread calls `begin` first, and checks nothing if that fails.
    ///
    /// # Errors
    /// If the host refuses a thread.
    pub fn watch(
        self,
        ram: &GuestRam,
        map: PageMap,
        begin: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Checks> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                stats: CheckStats {
                    pieces: self.pieces.len(),
                    checked: 0,
                    damaged: Vec::new(),
                },
                leave: false,
            }),
            left: Condvar::new(),
        });
        let watcher = Watcher {
            unchecked: (0..self.pieces.len() as u64).collect(),
            memory: self,
            map,
            places: ram.slots(),
            next: 0,
        };
        let checks = shared.clone();
        // Nobody waits for its end, because an unresponsive file system must not delay the
        // machine's.
        std::thread::Builder::new()
            .name("verify".into())
            .spawn(move || match begin() {
                Ok(()) => watcher.run(&checks),
                Err(error) => log::warn!("the snapshot's memory is not checked: {error}"),
            })?;
        Ok(Checks(shared))
    }
}

/// The page table of this process, as the host shows it.
#[derive(Debug)]
pub struct PageMap(File);

impl PageMap {
    /// Opens the page table. A process that has made itself undumpable cannot any more, unless it
    /// is root's.
    ///
    /// # Errors
    /// If /proc is not mounted.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// Checks whether any page in a range of this process's addresses is in use.
    fn is_in_use(&self, address: u64, length: u64, entries: &mut Vec<u8>) -> io::Result<bool> {
        entries.resize((length / PAGE_SIZE * ENTRY) as usize, 0);
        self.0.read_exact_at(entries, address / PAGE_SIZE * ENTRY)?;
        let (words, _) = entries.as_chunks();
        Ok(words
            .iter()
            .any(|word| u64::from_ne_bytes(*word) & IN_USE != 0))
    }
}

/// The results of checks of pieces in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckStats {
    /// The number of pieces in the file.
    pub pieces: usize,
    /// The number of checked pieces.
    pub checked: usize,
    /// The damaged pieces among those.
    pub damaged: Vec<DamagedPiece>,
}

/// The running checks of a restored machine's memory. Dropping them ends them.
#[derive(Debug)]
pub struct Checks(Arc<Shared>);

impl Checks {
    /// Returns the results so far.
    #[must_use]
    pub fn stats(&self) -> CheckStats {
        self.0.lock().stats.clone()
    }
}

impl Drop for Checks {
    fn drop(&mut self) {
        self.0.lock().leave = true;
        self.0.left.notify_all();
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Notified when the thread is to end.
    left: Condvar,
}

#[derive(Debug)]
struct State {
    stats: CheckStats,
    leave: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next look. Returns `false` if the thread is to end.
    fn wait(&self) -> bool {
        let left = self
            .left
            .wait_timeout_while(self.lock(), LOOK_INTERVAL, |s| !s.leave);
        !left.unwrap_or_else(PoisonError::into_inner).0.leave
    }

    fn note(&self, damaged: Option<DamagedPiece>) {
        let mut state = self.lock();
        state.stats.checked += 1;
        if let Some(damaged) = damaged {
            log::error!("the snapshot's memory is damaged, and the guest uses it: {damaged}");
            state.stats.damaged.push(damaged);
        }
    }
}

/// The state of the checking thread.
struct Watcher {
    memory: SavedMemory,
    map: PageMap,
    /// (Guest-physical start, length, address in this process) of the parts of memory, in the order
    /// of the file.
    ///
    /// The host reports addresses that are unmapped by now as not in use.
    places: Vec<(u64, u64, u64)>,
    /// The pieces that are not checked yet, in the order of the file.
    unchecked: Vec<u64>,
    /// The index in `unchecked` at which the next look begins.
    next: usize,
}

impl Watcher {
    fn run(mut self, shared: &Shared) {
        while !self.unchecked.is_empty() && shared.wait() {
            if let Err(error) = self.look(shared) {
                log::warn!("the snapshot's memory is not checked any more: {error}");
                return;
            }
        }
    }

    /// Checks pieces that have come into use.
    fn look(&mut self, shared: &Shared) -> io::Result<()> {
        let mut reader = Reader::new();
        let mut entries = Vec::new();
        let mut checked = 0;
        let looked = (self.unchecked.len() as u64).min(LOOKED_FOR);
        for _ in 0..looked {
            if checked == CHECKED_AT_ONCE || shared.lock().leave {
                break;
            }
            if self.next >= self.unchecked.len() {
                self.next = 0;
            }
            let Some(&index) = self.unchecked.get(self.next) else {
                break;
            };
            if self.is_in_use(index, &mut entries)? {
                shared.note(self.memory.check(&mut reader, index));
                self.unchecked.remove(self.next);
                checked += 1;
            } else {
                self.next += 1;
            }
        }
        Ok(())
    }

    fn is_in_use(&self, index: u64, entries: &mut Vec<u8>) -> io::Result<bool> {
        let piece = pieces::range(index, self.memory.size);
        let mut begin = 0;
        for &(_, length, host) in &self.places {
            let (from, to) = (piece.start.max(begin), piece.end.min(begin + length));
            if from < to
                && self
                    .map
                    .is_in_use(host + (from - begin), to - from, entries)?
            {
                return Ok(true);
            }
            begin += length;
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use introspect::{Gpa, PhysicalMemory};
    use std::time::Instant;

    const SIZE: u64 = 4 * pieces::PIECE;
    const LIMIT: Duration = Duration::from_secs(30);

    /// Creates memory in which each piece begins with its number. All pieces except the first are
    /// damaged behind it.
    fn damaged() -> (SavedMemory, GuestRam) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE).unwrap();
        let mut reader = Reader::new();
        let mut all = Vec::new();
        for index in 0..pieces::count(SIZE) {
            let range = pieces::range(index, SIZE);
            file.write_all_at(&[index as u8 + 1], range.start).unwrap();
            all.push(reader.read(&file, &range).unwrap());
            if index > 0 {
                file.write_all_at(&[0xff], range.end - 1).unwrap();
            }
        }
        let ram = GuestRam::copy_on_write(file.try_clone().unwrap(), SIZE).unwrap();
        (SavedMemory::new(file, all, SIZE), ram)
    }

    #[test]
    fn all_damage_is_found_at_once() {
        let (memory, _) = damaged();
        let mut last = 0;
        let found = memory.verify(|done, all| {
            assert!(done > last && all == SIZE);
            last = done;
        });
        let starts: Vec<u64> = found.iter().map(|piece| piece.bytes.start).collect();
        assert_eq!(starts, [1, 2, 3].map(|index| index * pieces::PIECE));
        assert_eq!(last, SIZE);
        memory.file.set_len(SIZE - 1).unwrap();
        let cut = memory.verify(|_, _| ()).pop().unwrap();
        assert!(cut.unreadable.is_some(), "{cut}");
    }

    #[test]
    fn damage_is_found_in_what_is_used_and_nothing_else_is_read() {
        let (memory, ram) = damaged();
        let checks = memory
            .watch(&ram, PageMap::open().unwrap(), || Ok(()))
            .unwrap();
        let mut byte = [0];
        for piece in [0, 2] {
            ram.read_physical(Gpa(piece * pieces::PIECE), &mut byte)
                .unwrap();
        }
        let until = Instant::now() + LIMIT;
        while checks.stats().checked < 2 && Instant::now() < until {
            std::thread::yield_now();
        }
        let stats = checks.stats();
        assert_eq!((stats.pieces, stats.checked), (4, 2));
        let damaged: Vec<u64> = stats
            .damaged
            .iter()
            .map(|piece| piece.bytes.start)
            .collect();
        assert_eq!(damaged, [2 * pieces::PIECE]);
    }
}
