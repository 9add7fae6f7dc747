//! Restoring a machine from a snapshot.
//!
//! KVM dictates the order: memory slots before the interrupt controllers, those before the vCPUs,
//! and the clock last. If the host cannot set a guest's TSC, its kvmclock still continues where it
//! stopped (KVM_SET_CLOCK). An armed TSC deadline is moved by the difference.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use devices::ConsoleOutput;
use introspect::regular_file;
use kvm_bindings::kvm_clock_data;
use kvm_ioctls::Kvm;

use super::disks::{self, DiskRefusal, RestoredDisks};
use super::{
    KernelReference, LONGEST_STATE, MEMORY_FILE, STATE_FILE, SavedMachine, SavedMemory,
    SnapshotDamage, format, pieces,
};
use crate::host::HostProfile;
use crate::host::cpuid::host_name;
use crate::machine::virtio::{
    DiskConfig, NetConfig, NetConnection, SavedDevice, Transport, VsockConfig,
};
use crate::machine::{Machine, MachineError, MachineParts, assemble, create_vcpus, launch, new_vm};
use crate::memory::{GuestRam, RamError};
use crate::tape::{Recording, Tape};
use crate::vm::NameCall;

/// The reason that a snapshot cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// A file is missing or unreadable.
    #[error("snapshot {path}: {source}; name the folder that `exotrace snapshot` wrote")]
    Read {
        /// The file.
        path: PathBuf,
        /// The host's error.
        source: std::io::Error,
    },
    /// The state file is damaged or of another version.
    #[error("snapshot {path}: {source}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        source: SnapshotDamage,
    },
    /// The body does not decode.
    #[error("snapshot {path}: damaged: {source}")]
    Body {
        /// The file.
        path: PathBuf,
        /// The decoder's error.
        source: postcard::Error,
    },
    /// The number of hashes does not fit the memory.
    #[error("snapshot {path}: damaged: {found} hashes of its memory, expected {expected}")]
    Pieces {
        /// The file.
        path: PathBuf,
        /// The number of hashes.
        found: usize,
        /// The number of pieces of memory.
        expected: u64,
    },
    /// The memory file is damaged.
    #[error("snapshot {path}: {source}")]
    Memory {
        /// The file.
        path: PathBuf,
        /// The error of the memory.
        source: RamError,
    },
    /// The snapshot was saved on another CPU.
    #[error(
        "snapshot {path}: saved on CPU {saved}, this is {here}; boot the machine anew on this host"
    )]
    Cpu {
        /// The folder.
        path: PathBuf,
        /// The CPU of the saving host.
        saved: String,
        /// This CPU.
        here: String,
    },
    /// The snapshot was saved on another kind of host.
    #[error(
        "snapshot {path}: saved on a host with {saved} guest kernel mode, this one has {here}; boot the machine anew on this host"
    )]
    HostKind {
        /// The folder.
        path: PathBuf,
        /// The way the saving host ran kernel mode.
        saved: &'static str,
        /// The way this host runs it.
        here: &'static str,
    },
    /// The snapshot's disks are not opened.
    #[error("snapshot {path}: {source}")]
    Disks {
        /// The folder.
        path: PathBuf,
        /// The reason.
        source: DiskRefusal,
    },
    /// There is nothing to play back.
    #[error(
        "snapshot {path}: has no recording of the guest's input; one of a machine's history has it"
    )]
    NoRecording {
        /// The folder.
        path: PathBuf,
    },
    /// The machine cannot be created.
    #[error("snapshot {path}: {source}")]
    Machine {
        /// The folder.
        path: PathBuf,
        /// The reason.
        source: MachineError,
    },
}

/// A restored machine and the facts that were saved with it.
#[derive(Debug)]
pub struct RestoredMachine {
    /// The machine, paused where it was saved.
    pub machine: Machine,
    /// The command line that its kernel was booted with.
    pub command_line: String,
    /// The kernel that its symbols come from.
    pub kernel: Option<KernelReference>,
    /// The files of its disks.
    pub disks: Vec<DiskConfig>,
    /// The file behind its memory, for integrity checks.
    pub memory: SavedMemory,
    /// The time for which the guest's input was recorded from then on.
    pub recorded: Option<Duration>,
}

/// The restorer's network for a machine that was saved with a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoredNet {
    /// The connection.
    pub connection: NetConnection,
    /// The words by which it was chosen ([`NetConfig::chosen`]).
    pub chosen: String,
}

/// What a restorer connects the devices of a saved machine to. A device that the machine does not
/// have is left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RestoredLinks {
    /// The network.
    pub net: Option<RestoredNet>,
    /// The sockets between guest and host, with the context id that the guest has from now on.
    pub vsock: Option<VsockConfig>,
    /// Whether the guest gets the input that was recorded, before that of the host. It gets none
    /// until [`Machine::replayer`] plays it.
    pub replay: bool,
}

/// Returns the network card of the machine in `folder`, if it has one.
///
/// # Errors
/// If the snapshot is damaged or of another version.
pub fn saved_net(folder: &Path) -> Result<Option<NetConfig>, RestoreError> {
    let saved = read_state(&folder.join(STATE_FILE))?;
    Ok(saved.virtio.iter().find_map(SavedDevice::net).cloned())
}

/// Returns the sockets between guest and host of the machine in `folder`, if it has them.
///
/// # Errors
/// If the snapshot is damaged or of another version.
pub fn saved_vsock(folder: &Path) -> Result<Option<VsockConfig>, RestoreError> {
    let saved = read_state(&folder.join(STATE_FILE))?;
    Ok(saved.virtio.iter().find_map(SavedDevice::vsock).cloned())
}

/// Restores a machine from the snapshot in `folder`, paused before its next instruction. The link
/// of its network card is down, and its sockets lead nowhere.
///
/// # Errors
/// If the snapshot is damaged, or of another version, CPU or kind of host. Also if it has disks
/// that are not to be opened, or the machine cannot be created.
pub fn restore(
    kvm: &Kvm,
    profile: &HostProfile,
    folder: &Path,
    disks: &RestoredDisks,
    serial: ConsoleOutput,
) -> Result<RestoredMachine, RestoreError> {
    restore_connected(
        kvm,
        profile,
        folder,
        disks,
        &RestoredLinks::default(),
        serial,
    )
}

/// Restores a machine as [`restore`] does, with its devices connected by `links`.
///
/// # Errors
/// As those of [`restore`]. Also if the guest uses what the connection does not carry.
pub fn restore_connected(
    kvm: &Kvm,
    profile: &HostProfile,
    folder: &Path,
    disks: &RestoredDisks,
    links: &RestoredLinks,
    serial: ConsoleOutput,
) -> Result<RestoredMachine, RestoreError> {
    let mut saved = read_state(&folder.join(STATE_FILE))?;
    check_host(&saved, profile, folder)?;
    for device in &mut saved.virtio {
        if let Some(net) = &links.net {
            device.connect(&net.connection, &net.chosen);
        }
        if let Some(vsock) = &links.vsock {
            device.set_vsock(vsock);
        }
    }
    let disks = disks::permit(&mut saved.virtio, folder, disks);
    let disks = disks.map_err(|source| RestoreError::Disks {
        path: folder.to_path_buf(),
        source,
    })?;
    let memory = folder.join(MEMORY_FILE);
    let file = regular_file::open(&memory).map_err(|source| RestoreError::Read {
        path: memory.clone(),
        source,
    })?;
    let checked = file.try_clone().map_err(|source| RestoreError::Read {
        path: memory.clone(),
        source,
    })?;
    let ram =
        GuestRam::copy_on_write(file, saved.memory).map_err(|source| RestoreError::Memory {
            path: memory,
            source,
        })?;
    let recorded = saved.recording.as_ref().map(Recording::length);
    let tape = Tape::default();
    if links.replay {
        let recording = saved.recording.take();
        let recording = recording.ok_or_else(|| RestoreError::NoRecording {
            path: folder.to_path_buf(),
        })?;
        tape.load(recording);
    }
    let machine = build(kvm, profile, &saved, (&ram, tape), serial).map_err(|source| {
        RestoreError::Machine {
            path: folder.to_path_buf(),
            source,
        }
    })?;
    Ok(RestoredMachine {
        machine,
        command_line: saved.command_line,
        kernel: saved.kernel,
        disks,
        memory: SavedMemory::new(checked, saved.pieces, saved.memory),
        recorded,
    })
}

pub(super) fn read_state(path: &Path) -> Result<SavedMachine, RestoreError> {
    let own = || path.to_path_buf();
    let file = regular_file::read(path, LONGEST_STATE).map_err(|source| RestoreError::Read {
        path: own(),
        source,
    })?;
    decode_state(&file, path)
}

/// Decodes the contents of a state file. `path` is only for messages.
pub(super) fn decode_state(file: &[u8], path: &Path) -> Result<SavedMachine, RestoreError> {
    let own = || path.to_path_buf();
    let body = format::decode(file).map_err(|source| RestoreError::Damaged {
        path: own(),
        source,
    })?;
    let saved: SavedMachine = postcard::from_bytes(body).map_err(|source| RestoreError::Body {
        path: own(),
        source,
    })?;
    let (found, expected) = (saved.pieces.len(), pieces::count(saved.memory));
    match found as u64 == expected {
        true => Ok(saved),
        false => Err(RestoreError::Pieces {
            path: own(),
            found,
            expected,
        }),
    }
}

fn check_host(
    saved: &SavedMachine,
    profile: &HostProfile,
    folder: &Path,
) -> Result<(), RestoreError> {
    let here = host_name();
    if saved.cpu != here {
        let path = folder.to_path_buf();
        return Err(RestoreError::Cpu {
            path,
            saved: saved.cpu.clone(),
            here,
        });
    }
    let interpreted = profile.kernel_mode.is_interpreted();
    if saved.interpreted != interpreted {
        let word = |interpreted| if interpreted { "interpreted" } else { "native" };
        return Err(RestoreError::HostKind {
            path: folder.to_path_buf(),
            saved: word(saved.interpreted),
            here: word(interpreted),
        });
    }
    Ok(())
}

fn build(
    kvm: &Kvm,
    profile: &HostProfile,
    saved: &SavedMachine,
    (ram, tape): (&GuestRam, Tape),
    serial: ConsoleOutput,
) -> Result<Machine, MachineError> {
    let cpus = u8::try_from(saved.vcpus.len()).unwrap_or(u8::MAX);
    crate::machine::check_cpus(kvm, cpus)?;
    // A guest that has set up SYSCALL need not be watched for that. The request to KVM takes longer
    // than all the rest of a restore.
    let watch = saved.vcpus.iter().all(|vcpu| vcpu.lstar() == 0);
    let (vm, watch) = new_vm(kvm, profile, watch)?;
    let virtio: Vec<_> = saved.virtio.iter().map(SavedDevice::config).collect();
    let parts = MachineParts {
        vm,
        ram,
        cpus,
        pit: saved.pit.is_some(),
        acpi: saved.acpi.map(|acpi| acpi.config),
        virtio: &virtio,
        transport: match saved.pci_address {
            Some(_) => Transport::Pci,
            None => Transport::Mmio,
        },
        serial,
        tape,
    };
    let (shared, devices) = assemble(profile, parts)?;
    let mut vcpus = create_vcpus(kvm, &shared, cpus)?;
    for chip in &saved.irqchips {
        shared.vm()?.set_irqchip(chip).call("KVM_SET_IRQCHIP")?;
    }
    if let Some(pit) = &saved.pit {
        shared.vm()?.set_pit2(pit).call("KVM_SET_PIT2")?;
    }
    for (vcpu, state) in vcpus.iter_mut().zip(&saved.vcpus) {
        vcpu.load(state)?;
    }
    let clock = kvm_clock_data {
        clock: saved.clock,
        ..Default::default()
    };
    shared.vm()?.set_clock(&clock).call("KVM_SET_CLOCK")?;
    let damaged = |what: String| MachineError::Vcpu(what);
    devices
        .serial
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .restore(&saved.serial)
        .map_err(|e| damaged(e.to_string()))?;
    devices
        .cmos
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .restore(&saved.cmos)
        .map_err(|e| damaged(e.to_string()))?;
    devices
        .reset_port
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .restore(&saved.reset_port);
    if let (Some(ports), Some(address)) = (&devices.pci_ports, saved.pci_address) {
        let mut ports = ports.lock().unwrap_or_else(PoisonError::into_inner);
        ports.set_address(address);
    }
    if let (Some(device), Some(saved)) = (&devices.acpi, &saved.acpi) {
        device
            .ports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .restore(&saved.state);
    }
    devices.virtio.restore(&saved.virtio)?;
    launch(shared, devices, vcpus, watch)
}
