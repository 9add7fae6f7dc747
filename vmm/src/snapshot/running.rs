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
//! Dirty pages have two sources. KVM's log has the guest's writes, if the host record says that it
//! works ([`vm::log_written_pages`]). The notes of
//! [`GuestRam::watch_writes`](crate::memory::GuestRam::watch_writes) have the host's own.
//!
//! Pages with traps are among the last ones, with their original bytes restored.

use std::fs::File;
use std::ops::ControlFlow;

use super::MEMORY_FILE;
use super::memory_file::{Copied, MemoryFile, Zeros, chunks};
use super::save::{SaveError, Stage, failed, go_on};
use crate::machine::Machine;
use crate::memory::PageSet;
use crate::vm::{self, KvmError};

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
    log: Option<WriteLog<'a>>,
    /// The pages whose current content is not in the file.
    left: PageSet,
    /// The number of bytes written. `total` counts the bytes found to need writing.
    done: u64,
    total: u64,
    copied: Copied,
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
        let log = WriteLog::start(machine);
        let mut writing = Self {
            machine,
            memory,
            log,
            left: PageSet::all(ram),
            done: 0,
            total: 0,
            copied: Copied::with_room(0),
        };
        writing.rounds(watch)?;
        // Until the guest is paused, as many pages as the last round has left may be added.
        let room = writing.left.bytes().saturating_mul(2) + (4 << 20);
        writing.copied = Copied::with_room(room.min(MOST_COPIED).min(ram.size()));
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
                let copied = self.copied.add(ram, &run);
                if !copied.map_err(failed(MEMORY_FILE))? {
                    let written = self.memory.write(&run, zeros);
                    written.map_err(failed(MEMORY_FILE))?;
                }
            }
            Ok(())
        })
    }

    /// Writes the copies. The machine may run again.
    pub(super) fn finish(mut self, file: &File) -> Result<(), SaveError> {
        let zeros = self.zeros();
        self.log = None;
        self.copied.write(file, zeros).map_err(failed(MEMORY_FILE))
    }

    fn zeros(&self) -> Zeros {
        match self.log {
            Some(_) => Zeros::Written,
            None => Zeros::Left,
        }
    }
}

/// A watch of all writes to a machine's memory, the guest's and the host's.
struct WriteLog<'a> {
    machine: &'a Machine,
}

impl<'a> WriteLog<'a> {
    /// Starts the watch. Returns `None` if the host's KVM does not log writes.
    fn start(machine: &'a Machine) -> Option<Self> {
        if !machine.profile().write_log {
            return None;
        }
        let log = Self { machine };
        if let Err(error) = log.set_kvm(true) {
            log::warn!("the guest is paused while its memory is written: {error}");
            return None;
        }
        let paused = machine.pause();
        machine.ram().watch_writes(true);
        drop(paused);
        Some(log)
    }

    fn set_kvm(&self, log: bool) -> Result<(), KvmError> {
        let shared = self.machine.shared();
        vm::log_written_pages(shared.vm()?, &shared.ram, log)
    }

    /// Returns the pages that were written since the last call.
    fn take(&self) -> Result<PageSet, KvmError> {
        let shared = self.machine.shared();
        let mut written = vm::written_pages(shared.vm()?, &shared.ram)?;
        written.merge(&shared.ram.take_written());
        Ok(written)
    }
}

impl Drop for WriteLog<'_> {
    fn drop(&mut self) {
        self.machine.ram().watch_writes(false);
        if let Err(error) = self.set_kvm(false) {
            log::warn!("the guest's writes are logged on, which costs time: {error}");
        }
    }
}
