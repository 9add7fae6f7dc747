//! Writing memory while the guest runs.
//!
//! All of memory is written first. Then the pages that were written meanwhile are written again, in
//! rounds, until few are left or their number no longer falls. The last ones are copied while the
//! guest is paused, together with its registers and devices. They are written when it runs again.
//!
//! The pause lasts as long as copying those pages. It depends neither on the disk nor on the size
//! of memory, unless the guest writes faster than the disk. Rounds are bounded ([`MOST_ROUNDS`]),
//! and so are the copies ([`MOST_COPIED`]). The remaining pages are written while the guest is
//! paused.
//!
//! Pages with traps are among the last ones, with their original bytes restored.

use std::fs::File;
use std::ops::ControlFlow;

use super::MEMORY_FILE;
use super::memory_file::{MemoryFile, Pages, Zeros, chunks};
use super::save::{SaveError, Stage, failed, go_on};
use super::write_log::WriteLog;
use crate::machine::Machine;
use crate::memory::PageSet;

/// The maximum number of rounds.
const MOST_ROUNDS: usize = 8;
/// The number of bytes that count as few: they are copied in well under a millisecond.
const FEW: u64 = 1 << 20;
/// The maximum number of bytes that are copied while the guest is paused: some ten milliseconds.
///
/// Only a guest that writes so much between two rounds costs its host that memory, for as long as
/// it is saved.
const MOST_COPIED: u64 = 128 << 20;

/// A callback that receives the progress and decides whether to go on.
pub(super) type Watch<'w> = &'w mut dyn FnMut(Stage) -> ControlFlow<()>;

/// Memory that is being written to its file.
pub(super) struct Writing<'a> {
    machine: &'a Machine,
    memory: MemoryFile<'a>,
    /// The log of dirty pages, if there is one. Dropping it ends the watch.
    log: Option<WriteLog>,
    /// The pages whose current content is not in the file.
    left: PageSet,
    /// The number of bytes written. `total` counts the bytes found to need writing.
    done: u64,
    total: u64,
    copied: Pages,
}

impl<'a> Writing<'a> {
    /// Writes as much as possible while the guest runs. On a host that does not log writes, that is
    /// nothing.
    pub(super) fn start(
        machine: &'a Machine,
        file: &'a File,
        watch: Watch<'_>,
    ) -> Result<Self, SaveError> {
        let ram = machine.ram();
        let memory = MemoryFile::new(ram, file).map_err(failed(MEMORY_FILE))?;
        let log = WriteLog::start(machine.shared());
        let mut writing = Self {
            machine,
            memory,
            log,
            left: PageSet::all(ram),
            done: 0,
            total: 0,
            copied: Pages::with_room(0),
        };
        writing.rounds(watch)?;
        // Until the guest is paused, as many pages as the last round has left may be added.
        let room = writing.left.bytes().saturating_mul(2) + (4 << 20);
        writing.copied = Pages::with_room(room.min(MOST_COPIED).min(ram.size()));
        Ok(writing)
    }

    fn rounds(&mut self, watch: Watch<'_>) -> Result<(), SaveError> {
        for round in 0..=MOST_ROUNDS {
            let Some(log) = &self.log else {
                return Ok(());
            };
            let before = self.left.bytes();
            if round == MOST_ROUNDS || before <= FEW {
                return Ok(());
            }
            let left = std::mem::replace(&mut self.left, PageSet::empty(self.machine.ram()));
            let zeros = match round {
                0 => Zeros::Left,
                _ => Zeros::Written,
            };
            self.total += before;
            for run in chunks(&left) {
                self.memory
                    .write(&run, zeros)
                    .map_err(failed(MEMORY_FILE))?;
                self.done += run.end - run.start;
                let (done, total) = (self.done, self.total);
                go_on(watch(Stage::Writing { done, total }))?;
            }
            self.left = log.take()?;
            // Another round is worth it only if the pages are fewer by a quarter.
            if self.left.bytes() > before / 4 * 3 {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Copies the remaining pages while the machine is paused.
    pub(super) fn copy_the_rest(&mut self) -> Result<(), SaveError> {
        let zeros = self.zeros();
        let ram = self.machine.ram();
        // Those who disarm traps are not paused. A page that was written with a trap must not be
        // missed.
        self.machine.traps().with_bytes_restored(|with_traps| {
            if let Some(log) = &self.log {
                self.left.merge(&log.take()?);
                self.left.merge(with_traps);
            }
            for run in chunks(&self.left) {
                let copied = match self.copied.has_room(&run) {
                    true => self.copied.add(ram, &run),
                    false => self.memory.write(&run, zeros),
                };
                copied.map_err(failed(MEMORY_FILE))?;
            }
            Ok(())
        })
    }

    /// Writes the copies. The machine may run again. Returns the log of what it has written since
    /// they were made.
    pub(super) fn finish(self, file: &File) -> Result<Option<WriteLog>, SaveError> {
        let zeros = self.zeros();
        let written = self.copied.write(file, zeros);
        written.map_err(failed(MEMORY_FILE))?;
        Ok(self.log)
    }

    fn zeros(&self) -> Zeros {
        match self.log {
            Some(_) => Zeros::Written,
            None => Zeros::Left,
        }
    }
}
