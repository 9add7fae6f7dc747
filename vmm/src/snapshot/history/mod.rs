//! Checkpoints of a running machine, kept in memory: a history from which any moment of the last
//! seconds can be written as a snapshot.
//!
//! The oldest checkpoint is whole ([`base`]). Each later one has the pages that were written since
//! the one before it. So a checkpoint costs the guest a pause for the copy of its dirty pages.
//! KVM's log of dirty pages tells them, and belongs to the history as long as that lasts.
//!
//! A checkpoint that is too old, or for which there is no room, leaves the ring: the pages of its
//! successor are put into the base, while the guest runs. A checkpoint that is being written is
//! [kept](Kept) meanwhile, and the base with it.
//!
//! A ring also has the [recording](crate::tape) of the guest's input. A snapshot of one of its
//! checkpoints holds what came after it.
//!
//! Without a ring ([`Extent::Newest`]) the base is brought up to date while the guest runs. The
//! pause of a later checkpoint is then as short as that of a snapshot.

mod base;
mod kept;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kvm_ioctls::Kvm;

use base::{Base, Overlays};
pub use kept::Kept;

use super::memory_file::{Pages, chunks};
use super::running::Writing;
use super::save::{SaveError, Stage, collect, failed};
use super::write_log::WriteLog;
use super::{MEMORY_FILE, SnapshotInfo};
use crate::machine::Machine;
use crate::memory::{PAGE_SIZE, PageSet};
use crate::tape::{Position, Tape};

/// The reason that there is no history, or no further one.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The dirty pages are not known.
    #[error(
        "the host's KVM does not log the pages that a guest writes, or another history has its log"
    )]
    NoLog,
    /// The guest's memory alone takes more room.
    #[error(
        "the oldest checkpoint takes {needed} bytes, more than the {most} for all; allow more memory"
    )]
    NoRoom {
        /// The size of the oldest checkpoint in bytes.
        needed: u64,
        /// The limit for all checkpoints in bytes.
        most: u64,
    },
    /// Too many checkpoints wait while another one is written.
    #[error("no room for a checkpoint while another one is written")]
    Busy,
    /// The machine cannot be read.
    #[error(transparent)]
    Save(#[from] SaveError),
}

/// The maximum number of checkpoints that wait for one that is written, without a ring.
const MOST_WAITING: usize = 4;

/// The extent of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// The newest checkpoint alone.
    Newest,
    /// A ring of checkpoints.
    Ring {
        /// The time that it reaches back, if there is room.
        window: Duration,
        /// The maximum number of bytes of all checkpoints.
        most: u64,
    },
}

/// A machine, as a history reads it.
#[derive(Debug, Clone, Copy)]
pub struct Source<'m> {
    /// The host's KVM.
    pub kvm: &'m Kvm,
    /// The machine, always the same one.
    pub machine: &'m Machine,
    /// The caller's additions.
    pub info: &'m SnapshotInfo,
}

/// A description of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointInfo {
    /// Its number, from 1 in the order of checkpoints.
    pub number: u64,
    /// The moment, by the host's monotonic clock.
    pub at: Instant,
    /// The same by the host's clock.
    pub time: SystemTime,
    /// The time that the guest was paused for it.
    pub paused: Duration,
    /// The number of bytes of its own pages. The oldest one has none.
    pub bytes: u64,
}

/// A moment of the machine.
struct Checkpoint {
    info: CheckpointInfo,
    /// The encoded state, without hashes of the memory.
    state: Vec<u8>,
    /// The pages that were written since the checkpoint before.
    pages: Pages,
    /// The place in the recording of the guest's input, if there is one.
    position: Option<Position>,
    /// The overlays of disks. Checkpoints share those that have not changed in between.
    overlays: Arc<Overlays>,
}

/// The history of one machine. Dropping it ends the log of dirty pages.
pub struct History {
    log: WriteLog,
    recording: Taping,
    extent: Extent,
    base: Arc<Base>,
    /// From the oldest on, which is in the base. There is always one.
    ring: VecDeque<Arc<Checkpoint>>,
    /// Pages that may differ from the newest checkpoint, besides those of the log.
    left: PageSet,
}

/// The recording of the guest's input, of a history with a ring. Dropping it ends the recording.
struct Taping {
    tape: Tape,
}

impl Taping {
    fn start(machine: &Machine, extent: Extent) -> Self {
        let tape = machine.shared().tape.clone();
        tape.record(extent != Extent::Newest);
        Self { tape }
    }
}

impl Drop for Taping {
    fn drop(&mut self) {
        self.tape.record(false);
    }
}

impl std::fmt::Debug for History {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("History")
            .field("extent", &self.extent)
            .field("checkpoints", &self.ring.len())
            .finish_non_exhaustive()
    }
}

impl History {
    /// Starts the history of a machine with its first checkpoint. Its memory is copied while the
    /// guest runs, but for a moment.
    ///
    /// # Errors
    /// If the host does not log dirty pages, or the machine cannot be read, or does not fit.
    pub fn start(source: Source<'_>, extent: Extent) -> Result<Self, HistoryError> {
        let machine = source.machine;
        let base = Base::new()?;
        let watch = &mut |_: Stage| std::ops::ControlFlow::Continue(());
        let alone = machine.shared().saving.lock();
        let mut memory = Writing::start(machine, base.file(), watch)?;
        let began = Instant::now();
        let paused = machine.pause();
        let at = (Instant::now(), SystemTime::now());
        let state = collect(source.kvm, machine, &paused, source.info);
        let copied = memory.copy_the_rest();
        let overlays = Overlays::copy(machine);
        let recording = Taping::start(machine, extent);
        let position = machine.shared().tape.position();
        drop(paused);
        let paused = began.elapsed();
        let state = state?;
        copied?;
        let log = memory.finish(base.file())?.ok_or(HistoryError::NoLog)?;
        drop(alone);
        let first = Checkpoint {
            info: CheckpointInfo {
                number: 1,
                at: at.0,
                time: at.1,
                paused,
                bytes: 0,
            },
            state: postcard::to_stdvec(&state).map_err(SaveError::Encode)?,
            pages: Pages::default(),
            position,
            overlays: Arc::new(overlays?),
        };
        let history = Self {
            log,
            recording,
            extent,
            base: Arc::new(base),
            ring: VecDeque::from([Arc::new(first)]),
            left: PageSet::empty(machine.ram()),
        };
        history.check_room()?;
        Ok(history)
    }

    /// Makes a checkpoint of the machine as it is now. The guest is paused for it. A machine that
    /// its caller has paused stays paused.
    ///
    /// # Errors
    /// If the machine cannot be read, or the guest's memory has grown out of the room. The history
    /// remains usable, unless there is no room.
    pub fn checkpoint(&mut self, source: Source<'_>) -> Result<CheckpointInfo, HistoryError> {
        let machine = source.machine;
        self.make_room()?;
        if self.has_no_room() {
            return Err(HistoryError::Busy);
        }
        let began = Instant::now();
        let paused = machine.pause();
        let at = (Instant::now(), SystemTime::now());
        let state = collect(source.kvm, machine, &paused, source.info);
        let overlays = self.overlays(machine);
        let pages = self.copy_pages(machine);
        let position = machine.shared().tape.position();
        drop(paused);
        let paused = began.elapsed();
        let pages = pages?;
        let (state, overlays) = match (state, overlays) {
            (Ok(state), Ok(overlays)) => (state, overlays),
            (Err(error), _) | (_, Err(error)) => {
                // The pages are of no checkpoint, but the next one needs them.
                for run in pages.runs() {
                    run.clone()
                        .step_by(PAGE_SIZE as usize)
                        .for_each(|page| self.left.add(page));
                }
                return Err(error.into());
            }
        };
        // The ring is never empty.
        let number = self.ring.back().map_or(1, |newest| newest.info.number + 1);
        let info = CheckpointInfo {
            number,
            at: at.0,
            time: at.1,
            paused,
            bytes: pages.bytes(),
        };
        self.ring.push_back(Arc::new(Checkpoint {
            info,
            state: postcard::to_stdvec(&state).map_err(SaveError::Encode)?,
            pages: pages.trimmed(),
            position,
            overlays,
        }));
        self.make_room()?;
        Ok(info)
    }

    /// Copies the pages that were written since the newest checkpoint.
    fn copy_pages(&mut self, machine: &Machine) -> Result<Pages, SaveError> {
        let ram = machine.ram();
        let room = self.ring.back().map_or(0, |newest| newest.info.bytes) * 2;
        // Those who disarm traps are not paused. A page that was written with a trap must not be
        // missed.
        machine.traps().with_bytes_restored(|with_traps| {
            let mut written = self.log.take()?;
            written.merge(with_traps);
            written.merge(&std::mem::replace(&mut self.left, PageSet::empty(ram)));
            let mut pages = Pages::with_room(room.min(ram.size()));
            for run in chunks(&written) {
                if let Err(error) = pages.add(ram, &run) {
                    self.left.merge(&written);
                    return Err(failed(MEMORY_FILE)(error));
                }
            }
            Ok(pages)
        })
    }

    /// Returns the overlays of the paused machine, those of the newest checkpoint if they have not
    /// changed.
    fn overlays(&self, machine: &Machine) -> Result<Arc<Overlays>, SaveError> {
        if let Some(newest) = self.ring.back()
            && newest.overlays.are_those_of(machine)?
        {
            return Ok(newest.overlays.clone());
        }
        Ok(Arc::new(Overlays::copy(machine)?))
    }

    /// Brings the base up to date while the guest runs, so that the next checkpoint has fewer pages
    /// to copy. Of a ring, it lets only those go for which there is no room any more. It does
    /// nothing while a checkpoint is kept.
    ///
    /// # Errors
    /// If the host refuses the log or the memory, or the base alone has no room.
    pub fn refresh(&mut self, machine: &Machine) -> Result<(), HistoryError> {
        self.make_room()?;
        if self.extent != Extent::Newest || self.ring.len() > 1 {
            return Ok(());
        }
        let Some(base) = Arc::get_mut(&mut self.base) else {
            return Ok(());
        };
        let mut written = self.log.take().map_err(SaveError::from)?;
        written.merge(&std::mem::replace(
            &mut self.left,
            PageSet::empty(machine.ram()),
        ));
        let copied = base.write(machine.ram(), &written);
        if let Err(error) = copied {
            self.left.merge(&written);
            return Err(error.into());
        }
        // Its pages are no longer those of the checkpoint.
        base.is_exact = false;
        Ok(())
    }

    /// Lets checkpoints that are too old go, and those for which there is no room.
    ///
    /// # Errors
    /// If the base alone has no room.
    fn make_room(&mut self) -> Result<(), HistoryError> {
        while self.ring.len() > 1 && self.is_too_much() {
            let Some(base) = Arc::get_mut(&mut self.base) else {
                // It is being written. The next checkpoint tries again.
                return Ok(());
            };
            let Some(next) = self.ring.get(1) else {
                break;
            };
            base.apply(&next.pages)?;
            base.is_exact = true;
            self.ring.pop_front();
            if let Some(oldest) = self.ring.front_mut().and_then(Arc::get_mut) {
                oldest.pages = Pages::default();
            }
        }
        let oldest = self
            .ring
            .front()
            .and_then(|oldest| oldest.position.as_ref());
        if let Some(oldest) = oldest {
            self.recording.tape.forget_before(oldest);
        }
        self.check_room()
    }

    fn is_too_much(&self) -> bool {
        match self.extent {
            Extent::Newest => true,
            Extent::Ring { window, most } => {
                let second = self.ring.get(1);
                second.is_some_and(|second| second.info.at.elapsed() >= window)
                    || self.bytes() > most
            }
        }
    }

    /// Checks whether no further checkpoint fits before one is written.
    fn has_no_room(&self) -> bool {
        match self.extent {
            Extent::Newest => self.ring.len() > MOST_WAITING,
            Extent::Ring { most, .. } => self.bytes() > most && self.ring.len() > 1,
        }
    }

    fn check_room(&self) -> Result<(), HistoryError> {
        let needed = self.base.bytes();
        match self.extent {
            Extent::Ring { most, .. } if needed > most => {
                Err(HistoryError::NoRoom { needed, most })
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of bytes of all checkpoints.
    pub fn bytes(&self) -> u64 {
        let mut overlays: Vec<_> = self.ring.iter().map(|c| &c.overlays).collect();
        overlays.dedup_by(|a, b| Arc::ptr_eq(a, b));
        let overlays: u64 = overlays.into_iter().map(|overlays| overlays.bytes()).sum();
        let later = self.ring.iter().skip(1);
        self.base.bytes() + overlays + later.map(|c| c.pages.bytes()).sum::<u64>()
    }

    /// Returns the checkpoints that there are, from the oldest on.
    pub fn checkpoints(&self) -> impl Iterator<Item = CheckpointInfo> {
        self.ring.iter().map(|checkpoint| checkpoint.info)
    }

    /// Keeps a checkpoint as it is, to be written while the guest runs. Returns `None` if it has
    /// left the ring, or the base has been brought up to date since.
    pub fn keep(&self, number: u64) -> Option<Kept> {
        let place = self.ring.iter().position(|c| c.info.number == number)?;
        if place == 0 && !self.base.is_exact {
            return None;
        }
        let newest = self.ring.get(place)?.clone();
        let between = self.ring.iter().take(place).skip(1).cloned().collect();
        let position = newest.position.as_ref();
        let recording = position.and_then(|position| self.recording.tape.since(position));
        Some(Kept::new(self.base.clone(), between, newest, recording))
    }
}
