//! What a device model is to its transport.

use std::time::Instant;

use super::queue::Queues;

/// Whether a call left work that could go on at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Nothing to do until the guest notifies a queue, the far end has something, or the deadline has come.
    Idle,
    /// The call's bound was reached: call again, after the other queues had their turn.
    More,
}

/// A device's saved state was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("state of the {device}: {problem}; the snapshot is damaged or of another configuration")]
pub struct DeviceStateError {
    /// The device's name.
    pub device: &'static str,
    /// What is wrong with it.
    pub problem: String,
}

impl DeviceStateError {
    /// Takes the state of a device that remembers nothing.
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

/// Reads a configuration space that consists of the bytes `space`. What lies beyond them is left as it is in `data`.
pub(super) fn read_space(space: &[u8], offset: u64, data: &mut [u8]) {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    for (place, byte) in data.iter_mut().zip(space.iter().skip(offset)) {
        *place = *byte;
    }
}

/// The model of a virtio device.
///
/// Its life, in this order and as often as the driver likes: `activate` (the driver has set DRIVER_OK), any number of
/// `process` and `poll`, `reset`. Configuration space may be read and written at any time, also before `activate`.
/// All calls are made with one lock held that vCPU threads take for configuration space and resets: no call may wait for
/// anything that the guest, a user or another thread decides, and each does a bounded amount of work and says [`Progress::More`]
/// when there is more.
pub trait VirtioDevice: Send {
    /// The name for messages.
    fn name(&self) -> &'static str;

    /// The number of the device's kind, as virtio 1.2 section 5 has it.
    fn device_id(&self) -> u32;

    /// The features that the device offers beside [`TRANSPORT_FEATURES`](super::TRANSPORT_FEATURES).
    fn features(&self) -> u64;

    /// Whether the device works with these features, a subset of those offered.
    fn accepts(&self, features: u64) -> bool {
        let _ = features;
        true
    }

    /// The largest size of each queue: powers of two up to 32768. One entry a queue; the same for the device's life.
    fn queue_sizes(&self) -> Vec<u16>;

    /// Reads configuration space. What lies beyond it reads as zero, which `data` is filled with.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// The driver writes to configuration space.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// The driver is there, with these features. Each queue that it has set up is processed next.
    fn activate(&mut self, features: u64);

    /// The guest has notified a queue (or may have: spurious calls are harmless).
    fn process(&mut self, queue: u16, now: Instant, queues: &mut Queues) -> Progress;

    /// The far end has something, or the deadline has come.
    fn poll(&mut self, now: Instant, queues: &mut Queues) -> Progress {
        let _ = (now, queues);
        Progress::Idle
    }

    /// When `poll` wants to be called at the latest.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// The driver is gone: everything is as it was before `activate`.
    fn reset(&mut self);

    /// What the device itself remembers, for a snapshot. Queues and features are the transport's.
    fn save(&self) -> Vec<u8>;

    /// Takes on what `save` gave. The device was just made, in the same configuration; `activate` is not called, the
    /// features are given here: `Some` if the driver was there.
    ///
    /// # Errors
    /// If the bytes are no such state; the device is unchanged then.
    fn restore(&mut self, state: &[u8], features: Option<u64>) -> Result<(), DeviceStateError>;
}
