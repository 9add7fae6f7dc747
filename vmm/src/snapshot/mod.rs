//! Saving a paused machine to a folder, and making machines from it.
//!
//! A folder holds two files: `state` (vCPUs, interrupt controllers, timer, devices; versioned and checked)
//! and `memory` (guest RAM as a sparse file). A restored machine maps `memory` copy-on-write, so any number
//! of them share one file, which must stay as it is while they run.
//!
//! Disks are not part of a snapshot: it names their files, which must be there with the size they had, and should have
//! the contents they had, or the guest finds a file system that has changed under it. [`RestoredDisks`] has the rule by which
//! those files are opened.
//!
//! Traps are not part of a snapshot: the saved memory is what the guest would have without them.

mod disks;
mod format;
mod memory_file;
mod partial;
mod restore;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use kvm_bindings::{kvm_clock_data, kvm_irqchip, kvm_pit_state2};
use kvm_ioctls::Kvm;
use serde::{Deserialize, Serialize};

pub use disks::{DiskRefusal, RestoredDisks};
pub use format::{FORMAT_VERSION, SnapshotDamage};
pub use restore::{RestoreError, RestoredMachine, restore};

use crate::machine::virtio::SavedDevice;
use crate::machine::{Machine, Paused};
use crate::vcpu::state::VcpuState;
use crate::vm::{KvmError, NameCall};
use crate::x86_64::cpuid::host_name;

const STATE_FILE: &str = "state";
const MEMORY_FILE: &str = "memory";
/// Bytes of a state file that are read at most: some thousand for each vCPU are usual.
const LONGEST_STATE: u64 = 64 << 20;

/// Which kernel a snapshot runs: what a later session needs for symbols.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelReference {
    /// The file as it was named when the machine was booted.
    pub path: PathBuf,
    /// Size of the unpacked ELF in bytes.
    pub size: u64,
    /// CRC-32 of the unpacked ELF.
    pub crc32: u32,
}

impl KernelReference {
    /// For an unpacked kernel.
    pub fn new(path: &Path, elf: &[u8]) -> Self {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        Self {
            path,
            size: elf.len() as u64,
            crc32: crc32fast::hash(elf),
        }
    }

    /// Whether both are of the same kernel, wherever its file stands.
    pub fn is_same_kernel(&self, other: &Self) -> bool {
        (self.size, self.crc32) == (other.size, other.crc32)
    }
}

/// The machine as it is written.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedMachine {
    pub(crate) cpu: String,
    pub(crate) interpreted: bool,
    pub(crate) memory: u64,
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

/// A snapshot cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The folder is taken.
    #[error("snapshot {path}: already there; remove it or name another folder")]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// A file cannot be written.
    #[error("snapshot {path}: {source}")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// KVM does not give its state.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A vCPU is gone.
    #[error("vCPU {0} has ended; a snapshot needs a whole machine")]
    VcpuGone(usize),
    /// The state cannot be encoded.
    #[error("state: {0}")]
    Encode(postcard::Error),
}

/// Writes `machine`, which `paused` holds, to the new folder `folder`. Either the whole folder is there
/// afterwards or nothing, also after a crash of the host.
///
/// # Errors
/// If the folder exists, cannot be written, or KVM does not give its state.
pub fn save(
    kvm: &Kvm,
    machine: &Machine,
    paused: &Paused,
    info: &SnapshotInfo,
    folder: &Path,
) -> Result<(), SaveError> {
    take(kvm, machine, paused, info, folder)?.finish()
}

/// Takes the first step of [`save`]: all that a paused machine is needed for. It may go on before the second,
/// [`Taken::finish`].
///
/// # Errors
/// As [`save`].
pub fn take(
    kvm: &Kvm,
    machine: &Machine,
    paused: &Paused,
    info: &SnapshotInfo,
    folder: &Path,
) -> Result<Taken, SaveError> {
    if folder.exists() {
        return Err(SaveError::Exists {
            path: folder.to_path_buf(),
        });
    }
    let taken = Taken {
        partial: partial::name(folder),
        folder: folder.to_path_buf(),
        is_done: false,
    };
    fs::create_dir_all(&taken.partial).map_err(failed(&taken.partial))?;
    write_files(kvm, machine, paused, info, &taken.partial)?;
    Ok(taken)
}

/// A snapshot whose files are written, and not yet in their place. Dropped, it is gone.
#[derive(Debug)]
#[must_use = "the snapshot is thrown away if it is not finished"]
pub struct Taken {
    partial: PathBuf,
    folder: PathBuf,
    is_done: bool,
}

impl Taken {
    /// Has everything on the disk before the folder has its name, and then that; clears what saves to the same folder have
    /// left behind that were killed.
    ///
    /// # Errors
    /// If a file cannot be written, or the folder has come to be there.
    pub fn finish(mut self) -> Result<(), SaveError> {
        for name in [STATE_FILE, MEMORY_FILE, "."] {
            let path = self.partial.join(name);
            let synced = File::open(&path).and_then(|file| file.sync_all());
            synced.map_err(failed(&path))?;
        }
        fs::rename(&self.partial, &self.folder).map_err(failed(&self.folder))?;
        self.is_done = true;
        let around = partial::around(&self.folder);
        let synced = File::open(around).and_then(|folder| folder.sync_all());
        synced.map_err(failed(around))?;
        partial::clear(&self.folder);
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if !self.is_done
            && let Err(error) = fs::remove_dir_all(&self.partial)
            && error.kind() != io::ErrorKind::NotFound
        {
            log::warn!("{} stays behind: {error}", self.partial.display());
        }
    }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> SaveError {
    let path = path.to_path_buf();
    move |source| SaveError::Write { path, source }
}

fn write_files(
    kvm: &Kvm,
    machine: &Machine,
    paused: &Paused,
    info: &SnapshotInfo,
    folder: &Path,
) -> Result<(), SaveError> {
    let state = collect(kvm, machine, paused, info)?;
    let state_path = folder.join(STATE_FILE);
    let body = postcard::to_stdvec(&state).map_err(SaveError::Encode)?;
    create_private(&state_path)
        .and_then(|mut file| file.write_all(&format::encode(&body)))
        .map_err(|source| SaveError::Write {
            path: state_path,
            source,
        })?;
    let memory_path = folder.join(MEMORY_FILE);
    machine
        .traps()
        .with_bytes_restored(|| memory_file::write(machine.ram(), &memory_path))
        .map_err(|source| SaveError::Write {
            path: memory_path,
            source,
        })
}

/// A new file, readable by its owner only: memory, registers and FPU state hold everything the guest knows.
fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

fn collect(
    kvm: &Kvm,
    machine: &Machine,
    paused: &Paused,
    info: &SnapshotInfo,
) -> Result<SavedMachine, SaveError> {
    let shared = machine.shared();
    let indices = kvm
        .get_msr_index_list()
        .call("KVM_GET_MSR_INDEX_LIST")?
        .as_slice()
        .to_vec();
    let mut vcpus = Vec::new();
    for vcpu in 0..machine.vcpus() {
        let indices = indices.clone();
        let saved = paused.on_vcpu(vcpu, move |v| v.save(&indices));
        vcpus.push(saved.ok_or(SaveError::VcpuGone(vcpu))??);
    }
    let vm = shared.vm()?;
    let mut irqchips = Vec::new();
    for chip_id in [
        kvm_bindings::KVM_IRQCHIP_PIC_MASTER,
        kvm_bindings::KVM_IRQCHIP_PIC_SLAVE,
        kvm_bindings::KVM_IRQCHIP_IOAPIC,
    ] {
        let mut chip = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip).call("KVM_GET_IRQCHIP")?;
        irqchips.push(chip);
    }
    let clock: kvm_clock_data = vm.get_clock().call("KVM_GET_CLOCK")?;
    let devices = machine.devices();
    Ok(SavedMachine {
        cpu: host_name(),
        interpreted: shared.profile.kernel_mode.is_interpreted(),
        memory: shared.ram.size(),
        command_line: info.command_line.clone(),
        kernel: info.kernel.clone(),
        clock: clock.clock,
        irqchips,
        // Fails only where the machine has no timer.
        pit: vm.get_pit2().ok(),
        vcpus,
        serial: machine.serial().state(),
        cmos: devices
            .cmos
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .state(),
        reset_port: devices
            .reset_port
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .state(),
        virtio: devices.virtio.save(),
    })
}
