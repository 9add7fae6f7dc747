//! Virtio over memory-mapped registers, version 2: virtio 1.2 section 4.2.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET,
};
use virtio_bindings::virtio_mmio as register;

use super::device::{DeviceStateError, VirtioDevice};
use super::handle::{Core, DeviceHandle, Shared};
use super::queue::{QueueError, Queues, SavedQueue};
use super::{FEATURE_VERSION_1, TRANSPORT_FEATURES};
use crate::WatchedMemory;
use crate::bus::BusDevice;
use crate::signals::InterruptLine;

/// The size of a device's registers in bytes. Configuration space begins in the middle.
pub const MMIO_LENGTH: u64 = 0x200;
/// The offset of the register by which a driver notifies a queue: it writes the queue's number.
pub const QUEUE_NOTIFY: u64 = register::VIRTIO_MMIO_QUEUE_NOTIFY as u64;

/// "virt".
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "exot", which the driver only displays.
const VENDOR: u32 = 0x746f_7865;
const CONFIG: u64 = register::VIRTIO_MMIO_CONFIG as u64;

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
pub struct MmioState {
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
pub enum MmioStateError {
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

/// The registers of one device.
///
/// Its own fields belong to the vCPU thread that the bus admits. State that the device's thread
/// also needs is in `shared`.
pub struct MmioTransport {
    device_id: u32,
    offered: u64,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<QueueRegisters>,
    /// The number of accesses that virtio does not allow, and that had no effect.
    refused: u64,
    notifier: Arc<dyn QueueNotifier>,
    /// The shared state. Its fields document the locking.
    shared: Arc<Shared>,
}

impl fmt::Debug for MmioTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MmioTransport")
            .field("device_id", &self.device_id)
            .field("status", &self.shared.status)
            .finish_non_exhaustive()
    }
}

impl MmioTransport {
    /// Makes the registers of `device`, which interrupts on `line`.
    #[must_use]
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: WatchedMemory,
        line: Arc<dyn InterruptLine>,
        notifier: Arc<dyn QueueNotifier>,
    ) -> Self {
        let device_id = device.device_id();
        let offered = device.features() | TRANSPORT_FEATURES;
        let queues = Queues::new(memory, &device.queue_sizes());
        let count = queues.len();
        let core = Core { device, queues };
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
            shared: Arc::new(Shared::new(core, line)),
        }
    }

    /// Returns the device for the thread that serves it.
    #[must_use]
    pub fn handle(&self) -> DeviceHandle {
        DeviceHandle(self.shared.clone())
    }

    /// Returns the number of register accesses that virtio does not allow at their time or in their
    /// form. They had no effect.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Returns the state to save. vCPUs must be paused, and the device's thread must make no calls.
    #[must_use]
    pub fn state(&self) -> MmioState {
        let core = self.shared.core();
        MmioState {
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
    pub fn restore(&mut self, state: &MmioState) -> Result<(), MmioStateError> {
        self.reset();
        let restored = self.take_on(state);
        if restored.is_err() {
            self.reset();
            return restored;
        }
        if state.interrupt_status != 0 {
            self.shared.raise(0);
        }
        self.notify_all();
        Ok(())
    }

    fn take_on(&mut self, state: &MmioState) -> Result<(), MmioStateError> {
        let mut core = self.shared.core();
        let count = self.queues.len();
        if state.device_id != self.device_id
            || state.queues.len() != count
            || state.registers.len() != count
        {
            return Err(MmioStateError::Device {
                found: state.device_id,
                found_queues: state.queues.len(),
                device: core.device.name(),
                id: self.device_id,
                queues: count,
            });
        }
        let active = state.status & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        if active && !self.acceptable(&core, state.driver_features) {
            return Err(MmioStateError::Features {
                found: state.driver_features,
                offered: self.offered,
            });
        }
        let features = active.then_some(state.driver_features);
        core.queues.set_features(features.unwrap_or(0));
        for (queue, saved) in (0..).zip(&state.queues) {
            core.queues
                .set_up(queue, saved)
                .map_err(|error| MmioStateError::Queue { queue, error })?;
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

    fn status(&self) -> u32 {
        self.shared.status.load(Ordering::Acquire)
    }

    fn selected(&self) -> Option<(u16, &QueueRegisters)> {
        let index = u16::try_from(self.queue_select).ok()?;
        Some((index, self.queues.get(usize::from(index))?))
    }

    fn read_register(&self, offset: u64) -> u32 {
        match u32::try_from(offset).unwrap_or(u32::MAX) {
            register::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            register::VIRTIO_MMIO_VERSION => VERSION,
            register::VIRTIO_MMIO_DEVICE_ID => self.device_id,
            register::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            register::VIRTIO_MMIO_DEVICE_FEATURES => {
                half(self.offered, self.device_features_select)
            }
            register::VIRTIO_MMIO_QUEUE_NUM_MAX => self.selected().map_or(0, |(index, _)| {
                u32::from(self.shared.core().queues.max_size(index))
            }),
            register::VIRTIO_MMIO_QUEUE_READY => self.selected().map_or(0, |(index, _)| {
                u32::from(self.shared.core().queues.is_set_up(index))
            }),
            register::VIRTIO_MMIO_INTERRUPT_STATUS => {
                self.shared.interrupt_status.load(Ordering::Acquire)
            }
            register::VIRTIO_MMIO_STATUS => self.status(),
            register::VIRTIO_MMIO_CONFIG_GENERATION => {
                self.shared.generation.load(Ordering::Acquire)
            }
            // There is no shared memory, so its length is all ones.
            register::VIRTIO_MMIO_SHM_LEN_LOW
            | register::VIRTIO_MMIO_SHM_LEN_HIGH
            | register::VIRTIO_MMIO_SHM_BASE_LOW
            | register::VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    /// Returns whether virtio allows the write now.
    fn write_register(&mut self, offset: u64, value: u32) -> bool {
        match u32::try_from(offset).unwrap_or(u32::MAX) {
            register::VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.device_features_select = value,
            register::VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_select = value,
            register::VIRTIO_MMIO_DRIVER_FEATURES => return self.write_features(value),
            register::VIRTIO_MMIO_QUEUE_SEL => self.queue_select = value,
            register::VIRTIO_MMIO_QUEUE_NOTIFY => {
                let queue = u16::try_from(value).ok();
                let Some(queue) = queue.filter(|&queue| usize::from(queue) < self.queues.len())
                else {
                    return false;
                };
                self.notifier.notify(queue);
            }
            register::VIRTIO_MMIO_INTERRUPT_ACK => {
                self.shared
                    .interrupt_status
                    .fetch_and(!value, Ordering::AcqRel);
            }
            register::VIRTIO_MMIO_STATUS => return self.write_status(value),
            register::VIRTIO_MMIO_QUEUE_READY => return self.write_ready(value),
            // There is no shared memory to select.
            register::VIRTIO_MMIO_SHM_SEL => {}
            offset => return self.write_queue(offset, value),
        }
        true
    }

    fn write_features(&mut self, value: u32) -> bool {
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

    fn write_queue(&mut self, offset: u32, value: u32) -> bool {
        let Some((index, _)) = self.selected() else {
            return false;
        };
        if self.shared.active() || self.shared.core().queues.is_set_up(index) {
            return false;
        }
        let Some(queue) = self.queues.get_mut(usize::from(index)) else {
            return false;
        };
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            register::VIRTIO_MMIO_QUEUE_NUM => queue.size = value,
            register::VIRTIO_MMIO_QUEUE_DESC_LOW => queue.descriptors = low(queue.descriptors),
            register::VIRTIO_MMIO_QUEUE_DESC_HIGH => queue.descriptors = high(queue.descriptors),
            register::VIRTIO_MMIO_QUEUE_AVAIL_LOW => queue.available = low(queue.available),
            register::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => queue.available = high(queue.available),
            register::VIRTIO_MMIO_QUEUE_USED_LOW => queue.used = low(queue.used),
            register::VIRTIO_MMIO_QUEUE_USED_HIGH => queue.used = high(queue.used),
            _ => return false,
        }
        true
    }

    fn write_ready(&mut self, value: u32) -> bool {
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

    fn write_status(&mut self, value: u32) -> bool {
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

    fn reset(&mut self) {
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

fn half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

impl BusDevice for MmioTransport {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(offset) = offset.checked_sub(CONFIG) {
            self.shared.core().device.read_config(offset, data);
        } else if let Ok(data) = <&mut [u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
        {
            *data = self.read_register(offset).to_le_bytes();
        } else {
            self.refused = self.refused.saturating_add(1);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let good = if let Some(offset) = offset.checked_sub(CONFIG) {
            let mut core = self.shared.core();
            core.device.write_config(offset, data);
            true
        } else if let Ok(&data) = <&[u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
        {
            self.write_register(offset, u32::from_le_bytes(data))
        } else {
            false
        };
        if !good {
            self.refused = self.refused.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests;
