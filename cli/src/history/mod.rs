//! Moments of a machine that are kept as snapshots: of a hit, and of the time before.
//!
//! A [`Keeper`] belongs to one machine. It owns the [`History`] of checkpoints, which begins with
//! the machine (`--history`) or with the first script that keeps hits. A moment is a checkpoint at
//! first, in memory, so the guest goes on at once. A thread writes it to the folder for snapshots
//! ([`writer`]). Another one makes the checkpoints of a ring, or keeps the base up to date
//! ([`follower`]).
//!
//! On a host whose KVM does not log dirty pages, there is no history. A hit is then saved while the
//! guest is paused.

mod follower;
mod options;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmm::snapshot::{
    CheckpointInfo, Extent, FileRefusal, FolderError, History, HistoryError, Kept, SaveError,
    Source, save,
};

use crate::protocol::control::HistoryCount;
use crate::report::say;
use follower::{Follow, Follower};
pub use options::{Ring, time};
use writer::Writer;
pub use writer::write;

/// The time before a guest's end, of which the machine is kept if the run fails.
pub const BEFORE_END: Duration = Duration::from_secs(2);

/// The reason that a moment is not kept.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// There is no folder for snapshots.
    #[error("this machine has no folder for snapshots; start it with `run --snapshots DIR`")]
    NoFolder,
    /// There is no history.
    #[error("this machine has no history; start it with `run --history 60s`")]
    NoHistory,
    /// The checkpoint has left the history.
    #[error("the moment is not in the history any more")]
    Gone,
    /// Too many snapshots wait for being written.
    #[error("{0} snapshots are being written already")]
    Behind(usize),
    /// The folder is full of snapshots of that name.
    #[error("{folder} has {count} snapshots of that name; move them away")]
    TooMany {
        /// The folder.
        folder: PathBuf,
        /// Their number.
        count: usize,
    },
    /// No checkpoint can be made.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// The machine cannot be saved.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// The folder of a snapshot cannot be made.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// Its files cannot be used.
    #[error(transparent)]
    Files(#[from] FileRefusal),
    /// A thread cannot be made.
    #[error("a thread cannot be made: {0}")]
    Thread(std::io::Error),
}

/// A moment that was kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// The folder of its snapshot, which is complete once it is there.
    pub folder: PathBuf,
    /// The time that the guest was paused for it.
    pub paused: Duration,
    /// The time between the moment and the wish for it.
    pub ago: Duration,
}

impl std::fmt::Display for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.folder.display())?;
        if self.ago > Duration::ZERO {
            write!(f, "the machine of {:.1} s before; ", self.ago.as_secs_f64())?;
        }
        let paused = self.paused.as_secs_f64() * 1000.0;
        write!(f, "the guest was paused for {paused:.1} ms")
    }
}

/// The keeper of a machine's moments.
#[derive(Default)]
pub struct Keeper {
    /// The folder for snapshots.
    folder: Option<PathBuf>,
    /// The ring of checkpoints, if the machine has one.
    ring: Option<Ring>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    history: Option<History>,
    /// The longest pause for a checkpoint, and the number of those that failed.
    longest: Duration,
    failed: u64,
    follower: Option<Follower>,
    writer: Option<Writer>,
}

impl Keeper {
    /// Returns the keeper of a machine that has not started. Its snapshots go to `folder`.
    pub fn new(folder: Option<PathBuf>, ring: Option<Ring>) -> Self {
        Self {
            folder,
            ring,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the ring of checkpoints, if the machine has one.
    pub fn ring(&self) -> Option<Ring> {
        self.ring
    }

    /// Checks whether moments can be kept: those of hits, and also those before if `past`.
    ///
    /// # Errors
    /// If there is no folder, or no ring.
    pub fn can_keep(&self, past: bool) -> Result<(), KeepError> {
        match (&self.folder, self.ring) {
            (None, _) => Err(KeepError::NoFolder),
            (Some(_), None) if past => Err(KeepError::NoHistory),
            (Some(_), _) => Ok(()),
        }
    }

    /// Begins the history, unless there is one. The machine's memory is copied for it, while the
    /// guest runs if it has started. `follow` is called at regular times, and is to call
    /// [`follow`](Self::follow).
    ///
    /// # Errors
    /// If the memory has no room. Also if the host does not log dirty pages, for a ring. Without
    /// one, hits can be kept all the same.
    pub fn begin(&self, source: Source<'_>, follow: Follow) -> Result<(), KeepError> {
        let mut state = self.state();
        if state.history.is_none() && state.follower.is_none() {
            let (extent, interval) = match self.ring {
                Some(ring) => (ring.extent(), ring.every),
                None => (Extent::Newest, follower::REFRESH),
            };
            match History::start(source, extent) {
                Ok(history) => state.history = Some(history),
                Err(HistoryError::NoLog) if self.ring.is_none() => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            let follower = Follower::start(follow, interval);
            state.follower = Some(follower.map_err(KeepError::Thread)?);
        }
        Ok(())
    }

    /// Makes the next checkpoint of a ring, or brings the base up to date. Returns whether there is
    /// a history any more.
    pub fn follow(&self, source: Source<'_>) -> bool {
        let mut state = self.state();
        let Some(history) = &mut state.history else {
            return false;
        };
        let followed = match self.ring {
            Some(_) => history.checkpoint(source).map(Some),
            None => history.refresh(source.machine).map(|()| None),
        };
        match followed {
            Ok(made) => {
                let paused = made.map_or(Duration::ZERO, |made| made.paused);
                state.longest = state.longest.max(paused);
            }
            Err(HistoryError::Busy) => state.failed += 1,
            // The machine is ending.
            Err(HistoryError::Save(SaveError::VcpuGone(_))) => return false,
            Err(error) => {
                say(format_args!("the machine's history ends: {error}"));
                state.history = None;
            }
        }
        state.history.is_some()
    }

    /// Keeps the machine as it is, which its caller has paused if it is a certain moment.
    ///
    /// # Errors
    /// If there is no folder, or the machine cannot be saved.
    pub fn keep(&self, source: Source<'_>, name: &str) -> Result<Moment, KeepError> {
        let folder = self.folder.as_deref().ok_or(KeepError::NoFolder)?;
        let mut state = self.state();
        if state.history.is_none() {
            drop(state);
            let folder = writer::free_name(folder, name, |_| false)?;
            let saved = save(source.kvm, source.machine, source.info, &folder)?;
            return Ok(Moment {
                folder,
                paused: saved.paused,
                ago: Duration::ZERO,
            });
        }
        let writer = state.writer()?;
        writer.has_room()?;
        let history = state.history.as_mut().ok_or(KeepError::NoHistory)?;
        let made = history.checkpoint(source)?;
        let kept = history.keep(made.number).ok_or(KeepError::Gone)?;
        let kept = kept.without_recording();
        state.longest = state.longest.max(made.paused);
        state.write(folder, name, kept, Duration::ZERO)
    }

    /// Keeps the machine as it was `ago` before `from`: the newest checkpoint that is so old, else
    /// the oldest one.
    ///
    /// # Errors
    /// If there is no folder, or no history.
    pub fn rewind(&self, name: &str, from: Instant, ago: Duration) -> Result<Moment, KeepError> {
        let folder = self.folder.as_deref().ok_or(KeepError::NoFolder)?;
        let mut state = self.state();
        let kept = state.before(from, ago)?;
        let ago = from.saturating_duration_since(kept.info().at);
        state.writer()?.has_room()?;
        state.write(folder, name, kept, ago)
    }

    /// Returns the machine as it was `ago` before now, to be written by the caller.
    ///
    /// # Errors
    /// If there is no history.
    pub fn past(&self, ago: Duration) -> Result<Kept, KeepError> {
        match self.ring {
            Some(_) => self.state().before(Instant::now(), ago),
            None => Err(KeepError::NoHistory),
        }
    }

    /// Returns the machine as it is, to be written by the caller. `None` if there is no history.
    ///
    /// # Errors
    /// If no checkpoint can be made.
    pub fn present(&self, source: Source<'_>) -> Result<Option<Kept>, HistoryError> {
        let mut state = self.state();
        let Some(history) = &mut state.history else {
            return Ok(None);
        };
        let made = history.checkpoint(source)?;
        Ok(history.keep(made.number).map(Kept::without_recording))
    }

    /// Ends the history, and waits until all snapshots are written.
    pub fn finish(&self) {
        let mut state = self.state();
        let (follower, writer) = (state.follower.take(), state.writer.take());
        // The follower may wait for the state.
        drop(state);
        drop(follower);
        drop(writer);
        self.state().history = None;
    }

    /// Returns the counts of the history, if there is one.
    pub fn counts(&self) -> Option<HistoryCount> {
        let state = self.state();
        let history = state.history.as_ref()?;
        let oldest = history.checkpoints().next()?;
        Some(HistoryCount {
            checkpoints: history.checkpoints().count() as u64,
            reaches_back_ms: millis(oldest.at.elapsed()),
            bytes: history.bytes(),
            longest_pause_us: u64::try_from(state.longest.as_micros()).unwrap_or(u64::MAX),
            left_out: state.failed,
        })
    }
}

impl State {
    fn writer(&mut self) -> Result<&Writer, KeepError> {
        if self.writer.is_none() {
            self.writer = Some(Writer::start().map_err(KeepError::Thread)?);
        }
        self.writer.as_ref().ok_or(KeepError::Behind(0))
    }

    fn before(&self, from: Instant, ago: Duration) -> Result<Kept, KeepError> {
        let history = self.history.as_ref().ok_or(KeepError::NoHistory)?;
        let is_old = |made: &CheckpointInfo| from.saturating_duration_since(made.at) >= ago;
        let old = history.checkpoints().filter(is_old).last();
        let chosen = old.or_else(|| history.checkpoints().next());
        let chosen = chosen.ok_or(KeepError::Gone)?;
        history.keep(chosen.number).ok_or(KeepError::Gone)
    }

    /// Has a checkpoint written.
    fn write(
        &mut self,
        folder: &Path,
        name: &str,
        kept: Kept,
        ago: Duration,
    ) -> Result<Moment, KeepError> {
        let paused = kept.info().paused;
        let folder = self.writer()?.write(folder, name, kept)?;
        Ok(Moment {
            folder,
            paused,
            ago,
        })
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
