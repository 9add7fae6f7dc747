//! A checkpoint that is written to the files of a snapshot, while its machine runs.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::super::save::{SaveError, Stage, check_overlays, finish, go_on};
use super::super::{Files, MEMORY_FILE, SavedMachine, memory_file::Zeros};
use super::base::Base;
use super::{Checkpoint, CheckpointInfo};
use crate::tape::Recording;

/// The number of bytes that are copied at once.
const CHUNK: u64 = 1 << 20;

/// A checkpoint that is kept as it is, whatever becomes of its history.
pub struct Kept {
    base: Arc<Base>,
    /// The checkpoints between the base and this one.
    between: Vec<Arc<Checkpoint>>,
    newest: Arc<Checkpoint>,
    /// The guest's input since.
    recording: Option<Recording>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept")
            .field("info", &self.newest.info)
            .finish_non_exhaustive()
    }
}

impl Kept {
    /// Keeps `newest`, whose memory is that of `base` with the pages of `between` and its own.
    pub(super) fn new(
        base: Arc<Base>,
        between: Vec<Arc<Checkpoint>>,
        newest: Arc<Checkpoint>,
        recording: Option<Recording>,
    ) -> Self {
        Self {
            base,
            between,
            newest,
            recording,
        }
    }

    /// Returns the same without the guest's input since, of which there is none yet.
    #[must_use]
    pub fn without_recording(self) -> Self {
        Self {
            recording: None,
            ..self
        }
    }

    /// Returns its description.
    pub fn info(&self) -> CheckpointInfo {
        self.newest.info
    }

    /// Returns the number of its overlays, for
    /// [`NewFolder::add_overlays`](super::super::NewFolder::add_overlays).
    pub fn overlays(&self) -> usize {
        self.newest.overlays.count()
    }

    /// Writes it to the files of a snapshot, which are on the disk when this returns. `watch` is
    /// called with the progress, at least for each 2 MiB, and can break it off.
    ///
    /// # Errors
    /// If a file cannot be written, or `watch` has broken it off. The written files are useless
    /// then.
    pub fn write(
        &self,
        files: Files,
        watch: &mut dyn FnMut(Stage) -> ControlFlow<()>,
    ) -> Result<(), SaveError> {
        check_overlays(&files, self.overlays())?;
        let mut state: SavedMachine =
            postcard::from_bytes(&self.newest.state).map_err(SaveError::Encode)?;
        state.recording.clone_from(&self.recording);
        self.write_memory(&files.memory, state.memory, watch)?;
        self.newest.overlays.write(&files.overlays)?;
        finish(state, files, watch)
    }

    fn write_memory(
        &self,
        file: &File,
        total: u64,
        watch: &mut dyn FnMut(Stage) -> ControlFlow<()>,
    ) -> Result<(), SaveError> {
        let failed = |source| SaveError::Write {
            name: MEMORY_FILE,
            source,
        };
        file.set_len(total).map_err(failed)?;
        let mut chunk = vec![0; CHUNK as usize];
        let mut done = 0;
        while let Some(start) = next_data(self.base.file(), done).map_err(failed)? {
            let length = CHUNK.min(total.saturating_sub(start));
            if length == 0 {
                break;
            }
            let chunk = chunk.get_mut(..length as usize).unwrap_or_default();
            let read = self.base.file().read_exact_at(chunk, start);
            read.and_then(|()| file.write_all_at(chunk, start))
                .map_err(failed)?;
            done = start + length;
            go_on(watch(Stage::Writing { done, total }))?;
        }
        for checkpoint in self.between.iter().chain([&self.newest]) {
            let written = checkpoint.pages.write(file, Zeros::Written);
            written.map_err(failed)?;
            go_on(watch(Stage::Writing { done: total, total }))?;
        }
        Ok(())
    }
}

/// Returns the first place from `start` on where a file has data.
fn next_data(file: &File, start: u64) -> std::io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(start)) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
