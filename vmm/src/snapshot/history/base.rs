//! The whole checkpoint that a history begins with: memory, and the overlays of disks.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{MemfdFlags, memfd_create};

use super::super::memory_file::{MemoryFile, Pages, Zeros, chunks};
use super::super::save::{SaveError, copy, failed};
use super::super::{MEMORY_FILE, OVERLAY_FILE};
use crate::machine::Machine;
use crate::memory::{GuestRam, PageSet};

/// The size in which the host counts the room of a file, in bytes (`st_blocks`, stat(2)).
const BLOCK: u64 = 512;

/// The memory of the oldest checkpoint, as a file of the host's memory.
pub(super) struct Base {
    file: File,
    /// Whether it is the memory of a moment, and not of several ones.
    pub(super) is_exact: bool,
}

impl Base {
    /// Makes an empty one.
    pub(super) fn new() -> Result<Self, SaveError> {
        Ok(Self {
            file: nameless("exotrace-checkpoint").map_err(failed(MEMORY_FILE))?,
            is_exact: true,
        })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Writes pages of a later checkpoint.
    pub(super) fn apply(&self, pages: &Pages) -> Result<(), SaveError> {
        let written = pages.write(&self.file, Zeros::Written);
        written.map_err(failed(MEMORY_FILE))
    }

    /// Writes pages as they are in RAM now.
    pub(super) fn write(&mut self, ram: &GuestRam, pages: &PageSet) -> Result<(), SaveError> {
        let memory = MemoryFile::new(ram, &self.file);
        let mut memory = memory.map_err(failed(MEMORY_FILE))?;
        for run in chunks(pages) {
            let written = memory.write(&run, Zeros::Written);
            written.map_err(failed(MEMORY_FILE))?;
        }
        Ok(())
    }

    /// Returns the room that it takes in bytes.
    pub(super) fn bytes(&self) -> u64 {
        room(&self.file)
    }
}

/// The overlays of a machine's disks at a checkpoint.
pub(super) struct Overlays(Vec<Copied>);

/// A copy of an overlay.
struct Copied {
    file: File,
    /// See [`devices::virtio::blk::OverlayFile::changes`].
    changes: u64,
}

impl Overlays {
    /// Copies those of the paused machine.
    pub(super) fn copy(machine: &Machine) -> Result<Self, SaveError> {
        let overlays = machine.devices().virtio.overlays();
        let overlays = overlays.map_err(failed(OVERLAY_FILE))?;
        let copied = overlays.into_iter().map(|overlay| {
            let file = nameless("exotrace-overlay")?;
            copy(&overlay.file, &file)?;
            Ok(Copied {
                file,
                changes: overlay.changes,
            })
        });
        let copied: io::Result<_> = copied.collect();
        Ok(Self(copied.map_err(failed(OVERLAY_FILE))?))
    }

    /// Checks whether the paused machine's overlays have not changed since.
    pub(super) fn are_those_of(&self, machine: &Machine) -> Result<bool, SaveError> {
        let overlays = machine.devices().virtio.overlays();
        let now = overlays.map_err(failed(OVERLAY_FILE))?;
        let now = now.iter().map(|overlay| overlay.changes);
        Ok(now.eq(self.0.iter().map(|copied| copied.changes)))
    }

    /// Copies them to the files of a snapshot.
    pub(super) fn write(&self, files: &[File]) -> Result<(), SaveError> {
        for (copied, file) in self.0.iter().zip(files) {
            copy(&copied.file, file).map_err(failed(OVERLAY_FILE))?;
        }
        Ok(())
    }

    /// Returns their number.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the room that they take in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|copied| room(&copied.file)).sum()
    }
}

fn nameless(name: &str) -> io::Result<File> {
    Ok(memfd_create(name, MemfdFlags::CLOEXEC)?.into())
}

/// Returns the room that a file takes in bytes.
fn room(file: &File) -> u64 {
    file.metadata().map_or(0, |file| file.blocks() * BLOCK)
}
