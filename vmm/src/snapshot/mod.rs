//! Saving a machine to a folder, and making machines from it.
//!
//! A folder holds two files: `state` (vCPUs, interrupt controllers, timer, devices, hashes of `memory`; versioned and
//! with a SHA-256 of its own) and `memory` (guest RAM as a sparse file). A restored machine maps `memory` copy-on-write, so any number
//! of them share one file, which must stay as it is while they run.
//!
//! Disks are not part of a snapshot: it names their files, which must be there with the size they had, and should have
//! the contents they had, or the guest finds a file system that has changed under it. [`RestoredDisks`] has the rule by which
//! those files are opened.
//!
//! The guest runs while its memory is written, but for a moment, where the host's KVM can tell what it writes.
//!
//! Whoever makes the folder ([`NewFolder`]) need not be the machine's process, which writes to descriptors ([`write()`]).
//!
//! Traps are not part of a snapshot: the saved memory is what the guest would have without them.

mod disks;
mod files;
mod folder;
mod format;
mod kernel;
mod memory_file;
mod partial;
mod pieces;
mod restore;
mod running;
mod save;
#[cfg(feature = "test-utils")]
pub mod test_utils;
mod verify;

use kvm_bindings::{kvm_irqchip, kvm_pit_state2};
use serde::{Deserialize, Serialize};

pub use disks::{DiskRefusal, RestoredDisks};
pub use files::{FileRefusal, Files};
pub use folder::{FolderError, NewFolder};
pub use format::{FORMAT_VERSION, SnapshotDamage};
pub use kernel::{KernelHash, KernelReference};
pub use restore::{RestoreError, RestoredMachine, restore};
pub use save::{SaveError, Saved, Stage, save, write};
pub use verify::{CheckStats, Checks, DamagedPiece, PageMap, SavedMemory};

use crate::machine::virtio::SavedDevice;
use crate::vcpu::state::VcpuState;

const STATE_FILE: &str = "state";
const MEMORY_FILE: &str = "memory";
/// Bytes of a state file that are read at most: some thousand for each vCPU are usual, and 33 for each 2 MiB of memory.
const LONGEST_STATE: u64 = 64 << 20;

/// The machine as it is written.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedMachine {
    pub(crate) cpu: String,
    pub(crate) interpreted: bool,
    pub(crate) memory: u64,
    /// Of the file `memory`, in its order.
    pieces: Vec<pieces::Piece>,
    pub(crate) command_line: String,
    pub(crate) kernel: Option<KernelReference>,
    /// Nanoseconds of the guest's kvmclock.
    pub(crate) clock: u64,
    pub(crate) irqchips: Vec<kvm_irqchip>,
    pub(crate) pit: Option<kvm_pit_state2>,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) serial: devices::SerialState,
    pub(crate) cmos: devices::CmosState,
    pub(crate) reset_port: devices::ResetPortState,
    pub(crate) virtio: Vec<SavedDevice>,
}

/// What the caller adds to a machine's own state.
#[derive(Debug, Clone)]
pub struct SnapshotInfo {
    /// The kernel's command line.
    pub command_line: String,
    /// The kernel, if it came from a file.
    pub kernel: Option<KernelReference>,
}
