//! The part of a device's registers that is the same for every transport: features, status and the
//! set-up of queues.
//!
//! A transport maps its guest's accesses to these. The `bool` of a write tells whether virtio
//! allows it now; if not, it has no effect.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET,
};

use super::device::{DeviceStateError, VirtioDevice};
use super::handle::{Core, DeviceHandle, Interrupt, Shared};
use super::queue::{QueueError, Queues, SavedQueue};
use super::{FEATURE_VERSION_1, TRANSPORT_FEATURES};
use crate::WatchedMemory;

/// The receiver of notifications by register accesses, and of those that a restored or activated
/// device needs.
///
/// Called from a vCPU's thread with the registers locked. It wakes the device's thread, which calls
/// [`DeviceHandle::process`], and returns.
pub trait QueueNotifier: Send + Sync {
    /// Handles a queue that may have something for the device.
    fn notify(&self, queue: u16);
}

/// The registers of a queue before it is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QueueRegisters {
    /// QueueNum.
    pub size: u32,
    /// QueueDesc.
    pub descriptors: u64,
    /// QueueDriver.
    pub available: u64,
    /// QueueDevice.
    pub used: u64,
}

/// The state of a transport and its device in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// The number of the device type.
    pub device_id: u32,
    /// Status.
    pub status: u32,
    /// InterruptStatus.
    pub interrupt_status: u32,
    /// ConfigGeneration.
    pub generation: u32,
    /// DeviceFeaturesSel.
    pub device_features_select: u32,
    /// DriverFeaturesSel.
    pub driver_features_select: u32,
    /// DriverFeatures, both halves.
    pub driver_features: u64,
    /// QueueSel.
    pub queue_select: u32,
    /// The registers of each queue.
    pub registers: Vec<QueueRegisters>,
    /// The state of each queue.
    pub queues: Vec<SavedQueue>,
    /// The model's own state.
    pub device: Vec<u8>,
}

/// The reason why a transport's saved state was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportStateError {
    /// The state is of another device.
    #[error(
        "state of a virtio device {found} with {found_queues} queues, this one is a {device} ({id}) with {queues}: \
         restore with the devices that the machine was saved with"
    )]
    Device {
        /// The device type in the state.
        found: u32,
        /// The number of queues in the state.
        found_queues: usize,
        /// This device's name.
        device: &'static str,
        /// This device's type.
        id: u32,
        /// This device's number of queues.
        queues: usize,
    },
    /// A queue is invalid.
    #[error("state of queue {queue}: {error}; the snapshot is damaged")]
    Queue {
        /// The number of the queue.
        queue: u16,
        /// The reason.
        error: QueueError,
    },
    /// The device does not offer the features.
    #[error(
        "state with features {found:#x}, the device offers {offered:#x}: the snapshot is of another version"
    )]
    Features {
        /// The features in the state.
        found: u64,
        /// The features that the device offers.
        offered: u64,
    },
    /// The model rejected its state.
    #[error(transparent)]
    Model(#[from] DeviceStateError),
}

/// The registers of one device, whatever its transport.
///
/// Its own fields belong to the vCPU thread that the bus admits. State that the device's thread
/// also needs is in `shared`.
pub(super) struct Registers {
    pub(super) device_id: u32,
    pub(super) offered: u64,
    pub(super) device_features_select: u32,
    pub(super) driver_features_select: u32,
    pub(super) driver_features: u64,
    pub(super) queue_select: u32,
    pub(super) queues: Vec<QueueRegisters>,
    /// The number of accesses that virtio does not allow, and that had no effect.
    pub(super) refused: u64,
    pub(super) notifier: Arc<dyn QueueNotifier>,
    /// The shared state. Its fields document the locking.
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registers")
            .field("device_id", &self.device_id)
            .field("status", &self.shared.status)
            .finish_non_exhaustive()
    }
}

impl Registers {
    /// Makes the registers of `device`, which interrupts by `interrupt`.
    pub(super) fn new(
        device: Box<dyn VirtioDevice>,
        memory: WatchedMemory,
        interrupt: Box<dyn Interrupt>,
        notifier: Arc<dyn QueueNotifier>,
    ) -> Self {
        let device_id = device.device_id();
        let offered = device.features() | TRANSPORT_FEATURES;
        let queues = Queues::new(memory, &device.queue_sizes());
        let count = queues.len();
        let core = Core {
            device,
            queues,
            used: Vec::new(),
        };
        Self {
            device_id,
            offered,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            queues: vec![QueueRegisters::default(); count],
            refused: 0,
            notifier,
            shared: Arc::new(Shared::new(core, interrupt)),
        }
    }

    /// Returns the device for the thread that serves it.
    pub(super) fn handle(&self) -> DeviceHandle {
        DeviceHandle(self.shared.clone())
    }

    /// Counts an access that virtio does not allow.
    pub(super) fn refuse(&mut self) {
        self.refused = self.refused.saturating_add(1);
    }

    /// Returns ConfigGeneration.
    pub(super) fn generation(&self) -> u32 {
        self.shared.generation.load(Ordering::Acquire)
    }

    /// Returns the maximum size of a queue.
    pub(super) fn max_size(&self, queue: u16) -> u16 {
        self.shared.core().queues.max_size(queue)
    }

    /// Checks whether a queue is set up.
    pub(super) fn is_set_up(&self, queue: u16) -> bool {
        self.shared.core().queues.is_set_up(queue)
    }

    /// Returns the interrupt status, and clears it.
    pub(super) fn take_interrupts(&self) -> u8 {
        self.shared.interrupt_status.swap(0, Ordering::AcqRel) as u8
    }

    /// Reads configuration space.
    pub(super) fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.shared.core().device.read_config(offset, data);
    }

    /// Writes to configuration space.
    pub(super) fn write_config(&self, offset: u64, data: &[u8]) {
        self.shared.core().device.write_config(offset, data);
    }

    /// Passes on that the driver has notified a queue. Returns whether there is such a queue.
    pub(super) fn notify(&self, queue: u16) -> bool {
        let exists = usize::from(queue) < self.queues.len();
        if exists {
            self.notifier.notify(queue);
        }
        exists
    }

    /// Returns the selected queue's registers, if the driver may set it up now.
    pub(super) fn selected_to_set_up(&mut self) -> Option<&mut QueueRegisters> {
        let (index, _) = self.selected()?;
        if self.shared.active() || self.is_set_up(index) {
            return None;
        }
        self.queues.get_mut(usize::from(index))
    }

    /// Returns the state to save. vCPUs must be paused, and the device's thread must make no calls.
    pub(super) fn state(&self) -> TransportState {
        let core = self.shared.core();
        TransportState {
            device_id: self.device_id,
            status: self.shared.status.load(Ordering::Acquire),
            interrupt_status: self.shared.interrupt_status.load(Ordering::Acquire),
            generation: self.shared.generation.load(Ordering::Acquire),
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            driver_features: self.driver_features,
            queue_select: self.queue_select,
            registers: self.queues.clone(),
            queues: core.queues.save(),
            device: core.device.save(),
        }
    }

    /// Restores a saved state. The device was just made, and the guest's memory is restored. The
    /// interrupt controller must be restored too, because a pending interrupt is raised again.
    /// Every queue is notified once.
    ///
    /// # Errors
    /// If the state is of another device or damaged. The device is then as after a reset.
    pub(super) fn restore(&mut self, state: &TransportState) -> Result<(), TransportStateError> {
        self.reset();
        let restored = self.take_on(state);
        if restored.is_err() {
            self.reset();
            return restored;
        }
        if state.interrupt_status != 0 {
            let queues: Vec<u16> = (0..).take(self.queues.len()).collect();
            self.shared.raise(state.interrupt_status, &queues);
        }
        self.notify_all();
        Ok(())
    }

    fn take_on(&mut self, state: &TransportState) -> Result<(), TransportStateError> {
        let mut core = self.shared.core();
        let count = self.queues.len();
        if state.device_id != self.device_id
            || state.queues.len() != count
            || state.registers.len() != count
        {
            return Err(TransportStateError::Device {
                found: state.device_id,
                found_queues: state.queues.len(),
                device: core.device.name(),
                id: self.device_id,
                queues: count,
            });
        }
        let active = state.status & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        if active && !self.acceptable(&core, state.driver_features) {
            return Err(TransportStateError::Features {
                found: state.driver_features,
                offered: self.offered,
            });
        }
        let features = active.then_some(state.driver_features);
        core.queues.set_features(features.unwrap_or(0));
        for (queue, saved) in (0..).zip(&state.queues) {
            core.queues
                .set_up(queue, saved)
                .map_err(|error| TransportStateError::Queue { queue, error })?;
        }
        core.device.restore(&state.device, features)?;
        self.device_features_select = state.device_features_select;
        self.driver_features_select = state.driver_features_select;
        self.driver_features = state.driver_features;
        self.queue_select = state.queue_select;
        self.queues.clone_from(&state.registers);
        self.shared.status.store(state.status, Ordering::Release);
        let pending = state.interrupt_status;
        self.shared
            .interrupt_status
            .store(pending, Ordering::Release);
        self.shared
            .generation
            .store(state.generation, Ordering::Release);
        Ok(())
    }

    fn acceptable(&self, core: &Core, features: u64) -> bool {
        features & !self.offered == 0
            && features & FEATURE_VERSION_1 != 0
            && core.device.accepts(features)
    }

    pub(super) fn status(&self) -> u32 {
        self.shared.status.load(Ordering::Acquire)
    }

    pub(super) fn selected(&self) -> Option<(u16, &QueueRegisters)> {
        let index = u16::try_from(self.queue_select).ok()?;
        Some((index, self.queues.get(usize::from(index))?))
    }

    pub(super) fn write_features(&mut self, value: u32) -> bool {
        let status = self.status();
        let open =
            status & VIRTIO_CONFIG_S_DRIVER != 0 && status & VIRTIO_CONFIG_S_FEATURES_OK == 0;
        let (old, value) = (self.driver_features, u64::from(value));
        match self.driver_features_select {
            0 if open => self.driver_features = old & !0xffff_ffff | value,
            1 if open => self.driver_features = old & 0xffff_ffff | value << 32,
            // Features beyond 63 are not offered.
            _ => return open && value == 0,
        }
        true
    }

    pub(super) fn write_ready(&mut self, value: u32) -> bool {
        let Some((index, &registers)) = self.selected() else {
            return false;
        };
        let mut core = self.shared.core();
        if value == 0 {
            core.queues.take_down(index);
            return true;
        }
        if self.shared.active() || core.queues.is_set_up(index) {
            return false;
        }
        let saved = SavedQueue {
            // A size that does not fit a u16 is not offered.
            size: u16::try_from(registers.size).unwrap_or(0),
            ready: true,
            broken: None,
            descriptors: registers.descriptors,
            available: registers.available,
            used: registers.used,
            next_available: 0,
            next_used: 0,
        };
        let set_up = core.queues.set_up(index, &saved);
        if set_up.is_err() {
            self.shared.needs_reset();
        }
        set_up.is_ok()
    }

    pub(super) fn write_status(&mut self, value: u32) -> bool {
        if value == 0 {
            self.reset();
            return true;
        }
        let mut core = self.shared.core();
        let old = self.status();
        // Bits may only be added. Only the device sets the one for a needed reset.
        if old & !value & !VIRTIO_CONFIG_S_NEEDS_RESET != 0 {
            return false;
        }
        let mut added = value & !old & 0xff & !VIRTIO_CONFIG_S_NEEDS_RESET;
        let mut good = true;
        if added & VIRTIO_CONFIG_S_FEATURES_OK != 0 && !self.acceptable(&core, self.driver_features)
        {
            added &= !VIRTIO_CONFIG_S_FEATURES_OK;
            good = false;
        }
        if added & VIRTIO_CONFIG_S_DRIVER_OK != 0
            && (old | added) & VIRTIO_CONFIG_S_FEATURES_OK == 0
        {
            added &= !VIRTIO_CONFIG_S_DRIVER_OK;
            good = false;
        }
        self.shared.status.fetch_or(added, Ordering::Release);
        if added & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            core.queues.set_features(self.driver_features);
            core.device.activate(self.driver_features);
            drop(core);
            self.notify_all();
        }
        good
    }

    /// Notifies all queues: buffers already in a queue were notified before there was a listener,
    /// or not at all.
    fn notify_all(&self) {
        for queue in 0..u16::try_from(self.queues.len()).unwrap_or(u16::MAX) {
            if self.shared.core().queues.ready(queue) {
                self.notifier.notify(queue);
            }
        }
    }

    pub(super) fn reset(&mut self) {
        let mut core = self.shared.core();
        core.device.reset();
        core.queues.reset();
        self.shared.status.store(0, Ordering::Release);
        self.shared.interrupt_status.store(0, Ordering::Release);
        drop(core);
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        self.queues.fill(QueueRegisters::default());
    }
}

/// Returns the half of `features` that `select` names; 0 beyond both.
pub(super) fn half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}
