//! A guest that does not run: its memory and CPUs, from the folder of a snapshot, a core file, or
//! QEMU's memory while that has paused it.
//!
//! No KVM is used, and no file of its kernel, unless a snapshot's kernel has its types only there.
//! A core file is one that QEMU's `dump-guest-memory` and `virsh dump` write.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use introspect::core_file::{CoreFile, CoreFileError};
use introspect::x86_64::CpuState;
use introspect::{PhysicalMemory, regular_file};
use vmm::snapshot::{self, RestoreError};

use crate::guest_kernel::{GuestKernel, GuestKernelError};
use crate::qemu::Seen;

/// The size of the largest core file that is read, in bytes.
const LONGEST: u64 = 64 << 30;

/// The reason that a saved guest cannot be looked into.
#[derive(Debug, thiserror::Error)]
pub enum SavedGuestError {
    /// The file cannot be read.
    #[error("{path}: {source}; name a core file, or the folder of a snapshot")]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It is no core file.
    #[error("{path}: {source}")]
    Core {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: CoreFileError,
    },
    /// It has no CPU, by which the kernel would be found.
    #[error(
        "{path}: has no CPU in a note of QEMU's; without the registers of one, its kernel is not found"
    )]
    NoCpu {
        /// The file.
        path: PathBuf,
    },
    /// The snapshot is damaged.
    #[error(transparent)]
    Snapshot(#[from] RestoreError),
    /// The kernel's file is none.
    #[error(transparent)]
    Kernel(#[from] GuestKernelError),
}

/// A guest that does not run.
pub struct SavedGuest {
    pub(crate) memory: Box<dyn PhysicalMemory + Send + Sync>,
    pub(crate) cpus: Vec<CpuState>,
    /// The address at which SYSCALL enters the kernel; 0 if it is not known.
    pub(crate) syscall_entry: u64,
    /// The kernel's file, if it is known and at hand.
    pub(crate) kernel: Option<GuestKernel>,
}

impl fmt::Debug for SavedGuest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SavedGuest")
            .field("cpus", &self.cpus.len())
            .finish_non_exhaustive()
    }
}

impl SavedGuest {
    /// Opens the folder of a snapshot, or a core file. `kernel` is its kernel's file, for one
    /// without types in its memory.
    ///
    /// # Errors
    /// If it is neither, or damaged, or the kernel's file is none.
    pub fn open(path: &Path, kernel: Option<&Path>) -> Result<Self, SavedGuestError> {
        let named = kernel.map(GuestKernel::open).transpose()?;
        let named = named.map(|(kernel, _)| kernel);
        if path.is_dir() {
            let snapshot::Still {
                ram,
                cpus,
                syscall_entry,
                kernel,
            } = snapshot::look_into(path)?;
            let own = || GuestKernel::of_snapshot(kernel.as_ref()?, None).ok();
            let kernel = named.or_else(own);
            return Ok(Self {
                memory: Box::new(ram),
                cpus,
                syscall_entry,
                kernel,
            });
        }
        let own = || path.to_path_buf();
        let bytes = regular_file::read(path, LONGEST);
        let bytes = bytes.map_err(|source| SavedGuestError::Read {
            path: own(),
            source,
        })?;
        let core = CoreFile::parse(bytes).map_err(|source| SavedGuestError::Core {
            path: own(),
            source,
        })?;
        if core.cpus().is_empty() {
            return Err(SavedGuestError::NoCpu { path: own() });
        }
        Ok(Self {
            cpus: core.cpus().to_vec(),
            memory: Box::new(core),
            syscall_entry: 0,
            kernel: named,
        })
    }

    /// Returns a guest that QEMU has paused, with its kernel's file as for [`open`](Self::open).
    ///
    /// # Errors
    /// If the kernel's file is none.
    pub fn of_qemu(seen: Seen, kernel: Option<&Path>) -> Result<Self, SavedGuestError> {
        let named = kernel.map(GuestKernel::open).transpose()?;
        Ok(Self {
            memory: Box::new(seen.memory),
            cpus: seen.cpus,
            syscall_entry: 0,
            kernel: named.map(|(kernel, _)| kernel),
        })
    }
}
