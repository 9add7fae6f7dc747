//! A state file as a restore takes it, without KVM: for fuzzing.

use std::path::Path;

use super::restore::decode_state;
use super::{RestoreError, RestoredDisks, disks, format};
use crate::machine::virtio::DiskConfig;

/// What a restore learns from a state file before it makes a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decoded {
    /// Bytes of RAM.
    pub memory: u64,
    /// Hashes of pieces of RAM.
    pub pieces: usize,
    /// The disks that are named.
    pub named: Vec<DiskConfig>,
    /// The disks that would be opened.
    pub permitted: Vec<DiskConfig>,
}

/// Decodes the contents of a state file, and decides on its disks as if it lay in `folder`.
///
/// # Errors
/// As [`super::restore()`], but for what needs KVM, the memory file and this host's CPU.
pub fn decode(file: &[u8], folder: &Path, disks: &RestoredDisks) -> Result<Decoded, RestoreError> {
    let mut saved = decode_state(file, folder)?;
    // What is asked of the vCPUs' states before they are loaded.
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
    Ok(Decoded {
        memory: saved.memory,
        pieces: saved.pieces.len(),
        named,
        permitted,
    })
}

/// The state file of a body: with its header and hash.
#[must_use]
pub fn file(body: &[u8]) -> Vec<u8> {
    format::encode(body)
}
