//! Saving a machine to a folder, and restoring machines from it.
//!
//! A folder holds `state`, `memory`, and the overlays of disks. `state` has the vCPUs, interrupt
//! controllers, timer, devices and hashes of `memory`. It is versioned, with a SHA-256 of its own.
//! `memory` is guest RAM as a sparse file. A restored machine maps `memory` copy-on-write, so any
//! number of machines share one file. It must not change while they run.
//!
//! Images are not part of a snapshot, which only names their files. They must exist with the saved
//! size. Their contents should be the saved ones, or the guest finds a file system that has changed
//! under it. The guest's writes to a disk with an overlay are in `overlay0` and so on, so that
//! image and memory stay together. [`RestoredDisks`] has the rule by which those files are opened.
//!
//! If the host's KVM can log the guest's writes, the guest runs while its memory is written, except
//! for a moment.
//!
//! The creator of the folder ([`NewFolder`]) need not be the machine's process, which writes to
//! descriptors ([`write()`]).
//!
//! Traps are not part of a snapshot: the saved memory is as it is without them.

mod disks;
mod files;
mod folder;
mod format;
mod history;
mod kernel;
mod memory_file;
mod partial;
mod pieces;
mod restore;
mod running;
mod save;
mod still;
#[cfg(feature = "test-utils")]
pub mod test_utils;
mod verify;
mod write_log;

use kvm_bindings::{kvm_irqchip, kvm_pit_state2};
use serde::{Deserialize, Serialize};

pub use disks::{DiskRefusal, RestoredDisks};
pub use files::{FileRefusal, Files};
pub use folder::{FolderError, NewFolder};
pub use format::{FORMAT_VERSION, SnapshotDamage};
pub use history::{CheckpointInfo, Extent, History, HistoryError, Kept, Source};
pub use kernel::{KernelHash, KernelReference};
pub use restore::{
    RestoreError, RestoredLinks, RestoredMachine, RestoredNet, restore, restore_connected,
    saved_net, saved_vsock,
};
pub use save::{SaveError, Saved, Stage, save, write};
pub use still::{Still, look_into};
pub use verify::{CheckStats, Checks, DamagedPiece, PageMap, SavedMemory};

use crate::boot::AcpiConfig;
use crate::machine::virtio::SavedDevice;
use crate::tape::Recording;
use crate::vcpu::state::VcpuState;

const STATE_FILE: &str = "state";
const MEMORY_FILE: &str = "memory";
/// The beginning of an overlay's name, before its number.
const OVERLAY_FILE: &str = "overlay";
/// The largest state file that is read, in bytes. Some thousand for each vCPU are usual, and 33 for
/// each 2 MiB of memory.
const LONGEST_STATE: u64 = 64 << 20;

/// Returns the name of the file with overlay number `index`, from 0, in the order of the disks.
fn overlay_file(index: usize) -> String {
    format!("{OVERLAY_FILE}{index}")
}

/// The machine as it is written.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedMachine {
    pub(crate) cpu: String,
    pub(crate) interpreted: bool,
    pub(crate) memory: u64,
    /// The pieces of the file `memory`, in its order.
    pieces: Vec<pieces::Piece>,
    pub(crate) command_line: String,
    pub(crate) kernel: Option<KernelReference>,
    /// The guest's kvmclock in nanoseconds.
    pub(crate) clock: u64,
    pub(crate) irqchips: Vec<kvm_irqchip>,
    pub(crate) pit: Option<kvm_pit_state2>,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) serial: devices::SerialState,
    pub(crate) cmos: devices::CmosState,
    pub(crate) reset_port: devices::ResetPortState,
    /// The address port of the PCI bus, if there is one.
    pub(crate) pci_address: Option<u32>,
    pub(crate) acpi: Option<SavedAcpi>,
    pub(crate) virtio: Vec<SavedDevice>,
    /// The guest's input from then on, if it was recorded.
    pub(crate) recording: Option<Recording>,
}

/// The ACPI registers as they are written. The tables are in guest memory.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct SavedAcpi {
    pub(crate) config: AcpiConfig,
    pub(crate) state: devices::acpi::AcpiState,
}

/// The caller's additions to a machine's own state.
#[derive(Debug, Clone)]
pub struct SnapshotInfo {
    /// The kernel's command line.
    pub command_line: String,
    /// The kernel, if it came from a file.
    pub kernel: Option<KernelReference>,
}
