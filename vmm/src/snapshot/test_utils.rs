//! Decoding of a state file as in a restore, without KVM: for fuzzing. A recording is played to a
//! guest that puts out something else.

use std::path::Path;

use super::restore::decode_state;
use super::{RestoreError, RestoredDisks, disks, format};
use crate::machine::virtio::DiskConfig;
use crate::tape;

/// The facts that a restore gets from a state file before it creates a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decoded {
    /// The size of RAM in bytes.
    pub memory: u64,
    /// The number of hashes of pieces of RAM.
    pub pieces: usize,
    /// The disks that are named.
    pub named: Vec<DiskConfig>,
    /// The disks that would be opened.
    pub permitted: Vec<DiskConfig>,
}

/// Decodes the contents of a state file, and decides on its disks as if it lay in `folder`.
///
/// # Errors
/// As [`super::restore()`], except for errors of KVM, the memory file and this host's CPU.
pub fn decode(file: &[u8], folder: &Path, disks: &RestoredDisks) -> Result<Decoded, RestoreError> {
    let mut saved = decode_state(file, folder)?;
    // Calls made on the vCPUs' states before they are loaded.
    for vcpu in &saved.vcpus {
        let _ = vcpu.lstar();
    }
    let named = saved.virtio.iter().filter_map(|device| device.disk());
    let named = named.cloned().collect();
    let permitted = disks::permit(&mut saved.virtio, folder, disks);
    let permitted = permitted.map_err(|source| RestoreError::Disks {
        path: folder.to_path_buf(),
        source,
    })?;
    if let Some(recording) = saved.recording.take() {
        tape::rehearse(recording);
    }
    Ok(Decoded {
        memory: saved.memory,
        pieces: saved.pieces.len(),
        named,
        permitted,
    })
}

/// Returns the state file of a body, with its header and hash.
#[must_use]
pub fn file(body: &[u8]) -> Vec<u8> {
    format::encode(body)
}
