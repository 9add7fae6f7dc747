//! The interface of a device model to its transport.

use std::fs::File;
use std::io;
use std::time::Instant;

use super::queue::Queues;

/// The result of a call: whether work is left that could continue at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// No work is left until the guest notifies a queue, the backend has something, or the deadline
    /// comes.
    Idle,
    /// The call's bound was reached. Call again, after the other queues had their turn.
    More,
}

/// The file with a guest's writes to a disk.
#[derive(Debug)]
pub struct OverlayFile {
    /// The file.
    pub file: File,
    /// The number of the guest's changes to it. Files of the same number are the same.
    pub changes: u64,
}

/// The error of a rejected saved state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("state of the {device}: {problem}; the snapshot is damaged or of another configuration")]
pub struct DeviceStateError {
    /// The device's name.
    pub device: &'static str,
    /// The problem.
    pub problem: String,
}

impl DeviceStateError {
    /// Accepts the state of a device that has none.
    pub(super) fn unless_empty(device: &'static str, state: &[u8]) -> Result<(), Self> {
        match state {
            [] => Ok(()),
            _ => Err(Self {
                device,
                problem: format!("{} bytes, expected none", state.len()),
            }),
        }
    }
}

/// Reads a configuration space that consists of the bytes `space`. The bytes of `data` beyond it
/// are unchanged.
pub(super) fn read_space(space: &[u8], offset: u64, data: &mut [u8]) {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    for (place, byte) in data.iter_mut().zip(space.iter().skip(offset)) {
        *place = *byte;
    }
}

/// The model of a virtio device.
///
/// Its life is, in this order and as often as the driver likes: `activate` (the driver has set
/// DRIVER_OK), any number of `process` and `poll`, `reset`. Configuration space may be read and
/// written at any time, also before `activate`.
///
/// All calls are made with one lock held, which vCPU threads take for configuration space and
/// resets. So no call may wait for anything that the guest, a user or another thread decides. Each
/// does a bounded amount of work, and returns [`Progress::More`] if there is more.
pub trait VirtioDevice: Send {
    /// Returns the name for messages.
    fn name(&self) -> &'static str;

    /// Returns the number of the device type (virtio 1.2 section 5).
    fn device_id(&self) -> u32;

    /// Returns the features that the device offers besides
    /// [`TRANSPORT_FEATURES`](super::TRANSPORT_FEATURES).
    fn features(&self) -> u64;

    /// Checks whether the device works with these features, a subset of those offered.
    fn accepts(&self, features: u64) -> bool {
        let _ = features;
        true
    }

    /// Returns the maximum size of each queue: a power of two up to 32768. It never changes.
    fn queue_sizes(&self) -> Vec<u16>;

    /// Reads configuration space. The bytes beyond it read as zero, with which `data` is filled.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Handles the driver's write to configuration space.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// Handles the start of the driver, with these features. Each queue that it has set up is
    /// processed next.
    fn activate(&mut self, features: u64);

    /// Handles a notification of a queue by the guest. Spurious calls are harmless.
    fn process(&mut self, queue: u16, now: Instant, queues: &mut Queues) -> Progress;

    /// Handles a ready backend, or the deadline.
    fn poll(&mut self, now: Instant, queues: &mut Queues) -> Progress {
        let _ = (now, queues);
        Progress::Idle
    }

    /// Returns the latest time for the next call of `poll`.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Checks whether the device waits until its backend has room. `poll` is called then.
    fn wants_room(&self) -> bool {
        false
    }

    /// Handles the end of the driver: resets everything to the state before `activate`.
    fn reset(&mut self);

    /// Returns the file with the guest's writes that belongs to a snapshot, up to date, if the
    /// device has one.
    ///
    /// # Errors
    /// If earlier writes cannot be brought into it.
    fn overlay(&mut self) -> io::Result<Option<OverlayFile>> {
        Ok(None)
    }

    /// Fills `buffer` with the bytes of the device's disk from `offset` on, for an observer.
    ///
    /// # Errors
    /// If the device is no disk, or the bytes cannot be read.
    fn peek_disk(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let _ = (buffer, offset);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the device's own state for a snapshot. Queues and features are the transport's.
    fn save(&self) -> Vec<u8>;

    /// Restores a state that `save` returned. The device was just made, in the same configuration.
    /// `activate` is not called; `features` is `Some` if the driver was active.
    ///
    /// # Errors
    /// If the bytes are not such a state. The device is then unchanged.
    fn restore(&mut self, state: &[u8], features: Option<u64>) -> Result<(), DeviceStateError>;
}
