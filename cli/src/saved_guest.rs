//! A guest that exotrace does not run: its memory and CPUs, from the folder of a snapshot, a dump,
//! the memory file of a machine, or a paused QEMU.
//!
//! No KVM is used, and no file of its kernel, unless a snapshot's kernel has its types only there.
//! A core file is one that QEMU's `dump-guest-memory` and `virsh dump` write, or the guest's own
//! kernel when it has crashed (kdump). Where the CPUs are not known, the kernel is searched for.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use introspect::core_file::{CoreFileError, CoreLayout};
use introspect::kernel::live::LiveError;
use introspect::kernel::running::RunningKernel;
use introspect::x86_64::CpuState;
use introspect::{PausedMemory, PhysicalMemory, regular_file};
use object::read::ReadCache;
use vmm::snapshot::{self, RestoreError};

use crate::file_memory::FileMemory;
use crate::guest_kernel::{GuestKernel, GuestKernelError};
use crate::kdump::{self, Kdump, KdumpError};
use crate::qemu::Seen;

/// The beginning of a core file.
const ELF: [u8; 4] = *b"\x7fELF";
/// The granularity of a machine's memory in bytes.
const GRANULE: u64 = 1 << 20;
/// The starts of the gap below 4 GiB: of Firecracker, of cloud-hypervisor and QEMU's pc, of
/// exotrace, of QEMU's q35.
const GAPS: [u64; 4] = [0xd000_0000, 0xc000_0000, 0xe000_0000, 0x8000_0000];
/// The end of the gap.
const HIGH: u64 = 1 << 32;

/// The reason that a saved guest cannot be inspected.
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
    /// It is a damaged dump of kdump.
    #[error("{path}: {source}")]
    Kdump {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: KdumpError,
    },
    /// No kernel is in its memory.
    #[error("{path}: no kernel is found in this memory: {source}")]
    NoKernel {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: Box<LiveError>,
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
    /// The kernel, if it had to be searched for without the registers of a CPU.
    pub(crate) running: Option<RunningKernel>,
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
                running: None,
            });
        }
        let unread = |source| SavedGuestError::Read {
            path: path.to_path_buf(),
            source,
        };
        let file = regular_file::open(path).map_err(unread)?;
        if kdump::is_meant(&file).map_err(unread)? {
            let dump = Kdump::open(file).map_err(|source| SavedGuestError::Kdump {
                path: path.to_path_buf(),
                source,
            })?;
            let (cpus, crashed) = (dump.cpus().to_vec(), dump.crashed_cpus().to_vec());
            let memory = Box::new(FileMemory::new(dump));
            return Self::of_dump(path, memory, cpus, &crashed, named);
        }
        if let Some(file) = raw(path).map_err(unread)? {
            return Self::of_raw(path, &file, named.as_ref());
        }
        // Of the file, only the headers and notes are read now.
        let cached = ReadCache::new(file.try_clone().map_err(unread)?);
        let core = CoreLayout::read(&cached).map_err(|source| SavedGuestError::Core {
            path: path.to_path_buf(),
            source,
        })?;
        let memory = FileMemory::in_places(vec![(file, core.segments)]);
        Self::of_dump(path, Box::new(memory), core.cpus, &core.crashed, named)
    }

    /// Returns the guest in a dump, whose kernel is searched for if it has no CPUs of QEMU.
    fn of_dump(
        path: &Path,
        memory: Box<dyn PhysicalMemory + Send + Sync>,
        cpus: Vec<CpuState>,
        crashed: &[CpuState],
        kernel: Option<GuestKernel>,
    ) -> Result<Self, SavedGuestError> {
        if cpus.is_empty() {
            let searched = Self::searched(memory, crashed, kernel.as_ref());
            return searched.map_err(|source| no_kernel(path, source));
        }
        Ok(Self {
            cpus,
            memory,
            syscall_entry: 0,
            kernel,
            running: None,
        })
    }

    /// Opens the memory of a machine as it is, such as the memory file of a snapshot of Firecracker
    /// or cloud-hypervisor. The place of what is above the gap below 4 GiB is tried.
    fn of_raw(
        path: &Path,
        file: &File,
        named: Option<&GuestKernel>,
    ) -> Result<Self, SavedGuestError> {
        let unread = |source| SavedGuestError::Read {
            path: path.to_path_buf(),
            source,
        };
        let length = file.metadata().map_err(unread)?.len();
        let mut failure = None;
        for gap in GAPS {
            let low = length.min(gap);
            let places = vec![(0..low, 0), (HIGH..HIGH + (length - low), low)];
            let file = file.try_clone().map_err(unread)?;
            let memory = FileMemory::in_places(vec![(file, places)]);
            match Self::searched(Box::new(memory), &[], named) {
                Ok(found) => return Ok(found),
                Err(error) => failure = Some(error),
            }
            if length <= gap {
                break;
            }
        }
        Err(match failure {
            Some(source) => no_kernel(path, source),
            None => unread(io::ErrorKind::InvalidData.into()),
        })
    }

    /// Searches memory for its kernel. `crashed` are the CPUs, of which the general registers are
    /// known; or none.
    fn searched(
        memory: Box<dyn PhysicalMemory + Send + Sync>,
        crashed: &[CpuState],
        kernel: Option<&GuestKernel>,
    ) -> Result<Self, Box<LiveError>> {
        let view = PausedMemory::new(&*memory);
        let mut running = RunningKernel::search(&view).map_err(Box::new)?;
        if let (Err(_), Some(Ok(types))) = (&running.types, kernel.map(GuestKernel::types)) {
            running.types = Ok(types.clone());
        }
        let mut cpus = running.cpus_without_registers(&view);
        for (cpu, crashed) in cpus.iter_mut().zip(crashed) {
            (cpu.general, cpu.cs) = (crashed.general, crashed.cs);
            cpu.swapped_gs_base = cpu.gs_base;
        }
        drop(view);
        Ok(Self {
            memory,
            cpus,
            syscall_entry: 0,
            kernel: None,
            running: Some(running),
        })
    }

    /// Returns a guest that QEMU has paused. `path` is its monitor. `kernel` is as for
    /// [`open`](Self::open).
    ///
    /// # Errors
    /// If the kernel's file is none.
    pub fn of_qemu(
        path: &Path,
        seen: Seen,
        kernel: Option<&Path>,
    ) -> Result<Self, SavedGuestError> {
        let named = kernel.map(GuestKernel::open).transpose()?;
        let named = named.map(|(kernel, _)| kernel);
        Self::of_dump(path, Box::new(seen.memory), seen.cpus, &[], named)
    }
}

/// Opens the memory of a machine as it is; `None` if the file is a core file, or none of the two.
fn raw(path: &Path) -> io::Result<Option<File>> {
    let file = regular_file::open(path)?;
    let length = file.metadata()?.len();
    let mut start = [0; ELF.len()];
    let is_raw = length >= GRANULE
        && length.is_multiple_of(GRANULE)
        && file.read_at(&mut start, 0)? == start.len()
        && start != ELF;
    Ok(is_raw.then_some(file))
}

fn no_kernel(path: &Path, source: Box<LiveError>) -> SavedGuestError {
    SavedGuestError::NoKernel {
        path: path.to_path_buf(),
        source,
    }
}
