//! Writing a machine to the files of a snapshot.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_clock_data, kvm_irqchip};
use kvm_ioctls::Kvm;

use super::folder::{FolderError, NewFolder};
use super::pieces::{self, Piece, Reader};
use super::running::Writing;
use super::{
    FileRefusal, Files, MEMORY_FILE, OVERLAY_FILE, STATE_FILE, SavedAcpi, SavedMachine,
    SnapshotInfo, format,
};
use crate::host::cpuid::host_name;
use crate::machine::{Machine, Paused};
use crate::vm::{KvmError, NameCall};

/// The reason that a snapshot cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The folder cannot be made.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The files are not usable.
    #[error(transparent)]
    Files(#[from] FileRefusal),
    /// A file cannot be written.
    #[error("the snapshot's `{name}`: {source}")]
    Write {
        /// The file's name in the snapshot.
        name: &'static str,
        /// The host's error.
        source: io::Error,
    },
    /// KVM does not return a part of the state.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// There are more or fewer files than overlays.
    #[error("{found} files for overlays: the machine has {expected}")]
    Overlays {
        /// The number of files.
        found: usize,
        /// The number of the machine's overlays.
        expected: usize,
    },
    /// A vCPU has ended.
    #[error("vCPU {0} has ended; a snapshot needs a whole machine")]
    VcpuGone(usize),
    /// The watcher has broken it off.
    #[error("cancelled")]
    BrokenOff,
    /// The state cannot be encoded.
    #[error("state: {0}")]
    Encode(postcard::Error),
}

/// A snapshot that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    /// The time that the guest was paused.
    pub paused: Duration,
}

/// Writes `machine` to the new folder `folder`.
///
/// Afterwards the whole folder exists or nothing, even after a crash of the host. A machine that
/// its caller has paused stays paused.
///
/// # Errors
/// If the folder exists or cannot be written, or KVM does not return its state.
pub fn save(
    kvm: &Kvm,
    machine: &Machine,
    info: &SnapshotInfo,
    folder: &Path,
) -> Result<Saved, SaveError> {
    let mut folder = NewFolder::create(folder)?;
    folder.add_overlays(machine.overlays())?;
    let mut watch = |_| ControlFlow::Continue(());
    let saved = write(kvm, machine, info, folder.files()?, &mut watch)?;
    folder.finish()?;
    Ok(saved)
}

/// The progress of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Memory is written while the guest runs. `total` grows by the guest's writes meanwhile.
    Writing {
        /// The number of bytes written.
        done: u64,
        /// The number of bytes to be written, as far as known.
        total: u64,
    },
    /// The guest is paused in the state that is saved. Comes once. The guest waits for the answer.
    Paused,
    /// The guest runs again, and the written bytes are hashed.
    Hashing {
        /// The number of bytes hashed.
        done: u64,
        /// The number of all bytes.
        total: u64,
    },
}

/// Writes `machine` to the files of a [`NewFolder`], which another process may have made.
///
/// They are on the disk when this returns. If the host's KVM logs the guest's writes
/// ([`write_log`](crate::host::HostProfile::write_log)), the guest runs meanwhile, except for a
/// moment. `watch` is called with the progress, at least for each 2 MiB, and can break it off.
///
/// # Errors
/// If a file cannot be written, KVM does not return its state, or `watch` has broken it off. The
/// written files are useless then.
pub fn write(
    kvm: &Kvm,
    machine: &Machine,
    info: &SnapshotInfo,
    files: Files,
    watch: &mut dyn FnMut(Stage) -> ControlFlow<()>,
) -> Result<Saved, SaveError> {
    check_overlays(&files, machine.overlays())?;
    // Another save would take this one's log of dirty pages.
    let _alone = machine.shared().saving.lock();
    let mut memory = Writing::start(machine, &files.memory, watch)?;
    let began = Instant::now();
    let paused = machine.pause();
    let state = collect(kvm, machine, &paused, info);
    let copied = memory.copy_the_rest();
    let copied = copied.and_then(|()| copy_overlays(machine, &files.overlays));
    let goes_on = go_on(watch(Stage::Paused));
    drop(paused);
    let paused = began.elapsed();
    let state = state?;
    copied.and(goes_on)?;
    drop(memory.finish(&files.memory)?);
    finish(state, files, watch)?;
    Ok(Saved { paused })
}

/// Hashes the written memory, writes the state, and waits until all files are on the disk.
pub(super) fn finish(
    mut state: SavedMachine,
    mut files: Files,
    watch: &mut dyn FnMut(Stage) -> ControlFlow<()>,
) -> Result<(), SaveError> {
    state.pieces = hashes(&files.memory, state.memory, watch)?;
    let body = postcard::to_stdvec(&state).map_err(SaveError::Encode)?;
    let written = files.state.write_all(&format::encode(&body));
    written
        .and_then(|()| files.state.sync_all())
        .map_err(failed(STATE_FILE))?;
    files.memory.sync_all().map_err(failed(MEMORY_FILE))?;
    for overlay in &files.overlays {
        overlay.sync_all().map_err(failed(OVERLAY_FILE))?;
    }
    Ok(())
}

/// Checks that there is a file for each of `expected` overlays.
pub(super) fn check_overlays(files: &Files, expected: usize) -> Result<(), SaveError> {
    let found = files.overlays.len();
    match found == expected {
        true => Ok(()),
        false => Err(SaveError::Overlays { found, expected }),
    }
}

/// Copies a whole file to an empty one. The places of both descriptors are at the end then.
pub(super) fn copy(mut from: &File, mut to: &File) -> io::Result<()> {
    from.rewind()?;
    io::copy(&mut from, &mut to)?;
    Ok(())
}

/// Copies the overlays of the paused machine to `files`. A file system with shared extents shares
/// them.
fn copy_overlays(machine: &Machine, files: &[File]) -> Result<(), SaveError> {
    let overlays = machine.devices().virtio.overlays();
    for (overlay, file) in overlays.map_err(failed(OVERLAY_FILE))?.iter().zip(files) {
        copy(&overlay.file, file).map_err(failed(OVERLAY_FILE))?;
    }
    Ok(())
}

/// Hashes the written memory.
fn hashes(
    memory: &File,
    total: u64,
    watch: &mut dyn FnMut(Stage) -> ControlFlow<()>,
) -> Result<Vec<Piece>, SaveError> {
    let mut reader = Reader::new();
    let mut all = Vec::new();
    for index in 0..pieces::count(total) {
        let piece = pieces::range(index, total);
        let done = piece.end;
        all.push(reader.read(memory, &piece).map_err(failed(MEMORY_FILE))?);
        go_on(watch(Stage::Hashing { done, total }))?;
    }
    Ok(all)
}

pub(super) fn go_on(answer: ControlFlow<()>) -> Result<(), SaveError> {
    match answer {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(SaveError::BrokenOff),
    }
}

pub(super) fn failed(name: &'static str) -> impl FnOnce(io::Error) -> SaveError {
    move |source| SaveError::Write { name, source }
}

/// Reads the state of the paused machine, apart from its memory and the hashes of that.
pub(super) fn collect(
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
        pieces: Vec::new(),
        command_line: info.command_line.clone(),
        kernel: info.kernel.clone(),
        clock: clock.clock,
        irqchips,
        // Fails only if the machine has no timer.
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
        pci_address: devices.pci_ports.as_ref().map(|ports| {
            let ports = ports.lock().unwrap_or_else(PoisonError::into_inner);
            ports.address()
        }),
        acpi: devices.acpi.as_ref().map(|acpi| SavedAcpi {
            config: acpi.config,
            state: acpi
                .ports
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .state(),
        }),
        virtio: devices.virtio.save(),
        recording: None,
    })
}
