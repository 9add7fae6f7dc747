//! The guest in a snapshot, without a machine that runs it.

use std::path::Path;

use introspect::regular_file;
use introspect::x86_64::CpuState;

use super::restore::{RestoreError, read_state};
use super::{KernelReference, MEMORY_FILE, STATE_FILE};
use crate::memory::GuestRam;

/// The memory and the CPUs of a snapshot.
#[derive(Debug)]
pub struct Still {
    /// The memory: a view of the file, which does not change.
    pub ram: GuestRam,
    /// The vCPUs, at least one.
    pub cpus: Vec<CpuState>,
    /// The address at which SYSCALL enters the kernel (IA32_LSTAR); 0 before it is set up.
    pub syscall_entry: u64,
    /// The kernel, if it came from a file.
    pub kernel: Option<KernelReference>,
}

/// Looks into the snapshot in `folder`. Needs no KVM, and any host will do.
///
/// # Errors
/// If it is damaged, or of another version.
pub fn look_into(folder: &Path) -> Result<Still, RestoreError> {
    let saved = read_state(&folder.join(STATE_FILE))?;
    let path = folder.join(MEMORY_FILE);
    let file = regular_file::open(&path).map_err(|source| RestoreError::Read {
        path: path.clone(),
        source,
    })?;
    let ram = GuestRam::copy_on_write(file, saved.memory)
        .map_err(|source| RestoreError::Memory { path, source })?;
    Ok(Still {
        ram,
        cpus: saved.vcpus.iter().map(|vcpu| vcpu.cpu_state()).collect(),
        syscall_entry: saved.vcpus.first().map_or(0, |vcpu| vcpu.lstar()),
        kernel: saved.kernel,
    })
}
