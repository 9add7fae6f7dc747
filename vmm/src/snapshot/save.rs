//! Writing a machine to the files of a snapshot.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_clock_data, kvm_irqchip};
use kvm_ioctls::Kvm;

use super::folder::{FolderError, NewFolder};
use super::pieces::{self, Piece, Reader};
use super::{
    FileRefusal, Files, MEMORY_FILE, STATE_FILE, SavedMachine, SnapshotInfo, format, memory_file,
};
use crate::machine::{Machine, Paused};
use crate::vm::{KvmError, NameCall};
use crate::x86_64::cpuid::host_name;

/// A snapshot cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// Its folder.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// Its files.
    #[error(transparent)]
    Files(#[from] FileRefusal),
    /// A file cannot be written.
    #[error("the snapshot's `{name}`: {source}")]
    Write {
        /// Which of the two.
        name: &'static str,
        /// Why.
        source: io::Error,
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

/// A snapshot that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    /// How long the guest was paused for it.
    pub paused: Duration,
}

/// Writes `machine` to the new folder `folder`. Either the whole folder is there afterwards or nothing, also after a crash
/// of the host. A machine that its caller has paused stays paused.
///
/// # Errors
/// If the folder exists, cannot be written, or KVM does not give its state.
pub fn save(
    kvm: &Kvm,
    machine: &Machine,
    info: &SnapshotInfo,
    folder: &Path,
) -> Result<Saved, SaveError> {
    let folder = NewFolder::create(folder)?;
    let saved = write(kvm, machine, info, folder.files()?)?;
    folder.finish()?;
    Ok(saved)
}

/// Writes `machine` to the files of a [`NewFolder`], which another process may have made. They are on the disk when this
/// returns; the guest does not wait for that.
///
/// # Errors
/// If a file cannot be written, or KVM does not give its state. What was written is of no use then.
pub fn write(
    kvm: &Kvm,
    machine: &Machine,
    info: &SnapshotInfo,
    mut files: Files,
) -> Result<Saved, SaveError> {
    let began = Instant::now();
    let paused = machine.pause();
    let mut state = collect(kvm, machine, &paused, info)?;
    machine
        .traps()
        .with_bytes_restored(|| memory_file::write(machine.ram(), &files.memory))
        .map_err(failed(MEMORY_FILE))?;
    drop(paused);
    let paused = began.elapsed();
    state.pieces = hashes(&files.memory, state.memory).map_err(failed(MEMORY_FILE))?;
    let body = postcard::to_stdvec(&state).map_err(SaveError::Encode)?;
    let written = files.state.write_all(&format::encode(&body));
    written
        .and_then(|()| files.state.sync_all())
        .map_err(failed(STATE_FILE))?;
    files.memory.sync_all().map_err(failed(MEMORY_FILE))?;
    Ok(Saved { paused })
}

/// Hashes what was written.
fn hashes(memory: &File, size: u64) -> io::Result<Vec<Piece>> {
    let mut reader = Reader::new();
    let all = (0..pieces::count(size)).map(|index| pieces::range(index, size));
    all.map(|piece| reader.read(memory, &piece)).collect()
}

fn failed(name: &'static str) -> impl FnOnce(io::Error) -> SaveError {
    move |source| SaveError::Write { name, source }
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
        pieces: Vec::new(),
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
