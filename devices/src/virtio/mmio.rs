//! Virtio over memory-mapped registers, version 2: virtio 1.2 section 4.2.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_bindings::virtio_mmio as register;

use super::device::VirtioDevice;
use super::handle::{DeviceHandle, Pin};
use super::transport::{QueueNotifier, Registers, TransportState, TransportStateError, half};
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

/// The registers of one device.
///
/// It belongs to the vCPU thread that the bus admits.
#[derive(Debug)]
pub struct MmioTransport(Registers);

impl MmioTransport {
    /// Makes the registers of `device`, which interrupts on `line`.
    #[must_use]
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: WatchedMemory,
        line: Arc<dyn InterruptLine>,
        notifier: Arc<dyn QueueNotifier>,
    ) -> Self {
        Self(Registers::new(
            device,
            memory,
            Box::new(Pin(line)),
            notifier,
        ))
    }

    /// Returns the device for the thread that serves it.
    #[must_use]
    pub fn handle(&self) -> DeviceHandle {
        self.0.handle()
    }

    /// Returns the number of register accesses that virtio does not allow at their time or in their
    /// form. They had no effect.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.0.refused
    }

    /// Returns the state to save. vCPUs must be paused, and the device's thread must make no calls.
    #[must_use]
    pub fn state(&self) -> TransportState {
        self.0.state()
    }

    /// Restores a saved state. The device was just made, and the guest's memory is restored. The
    /// interrupt controller must be restored too, because a pending interrupt is raised again.
    /// Every queue is notified once.
    ///
    /// # Errors
    /// If the state is of another device or damaged. The device is then as after a reset.
    pub fn restore(&mut self, state: &TransportState) -> Result<(), TransportStateError> {
        self.0.restore(state)
    }
}

impl MmioTransport {
    fn read_register(&self, offset: u64) -> u32 {
        match u32::try_from(offset).unwrap_or(u32::MAX) {
            register::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            register::VIRTIO_MMIO_VERSION => VERSION,
            register::VIRTIO_MMIO_DEVICE_ID => self.0.device_id,
            register::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            register::VIRTIO_MMIO_DEVICE_FEATURES => {
                half(self.0.offered, self.0.device_features_select)
            }
            register::VIRTIO_MMIO_QUEUE_NUM_MAX => self
                .0
                .selected()
                .map_or(0, |(index, _)| u32::from(self.0.max_size(index))),
            register::VIRTIO_MMIO_QUEUE_READY => self
                .0
                .selected()
                .map_or(0, |(index, _)| u32::from(self.0.is_set_up(index))),
            register::VIRTIO_MMIO_INTERRUPT_STATUS => {
                self.0.shared.interrupt_status.load(Ordering::Acquire)
            }
            register::VIRTIO_MMIO_STATUS => self.0.status(),
            register::VIRTIO_MMIO_CONFIG_GENERATION => self.0.generation(),
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
            register::VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.0.device_features_select = value,
            register::VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.0.driver_features_select = value,
            register::VIRTIO_MMIO_DRIVER_FEATURES => return self.0.write_features(value),
            register::VIRTIO_MMIO_QUEUE_SEL => self.0.queue_select = value,
            register::VIRTIO_MMIO_QUEUE_NOTIFY => {
                return u16::try_from(value).is_ok_and(|queue| self.0.notify(queue));
            }
            register::VIRTIO_MMIO_INTERRUPT_ACK => {
                self.0
                    .shared
                    .interrupt_status
                    .fetch_and(!value, Ordering::AcqRel);
            }
            register::VIRTIO_MMIO_STATUS => return self.0.write_status(value),
            register::VIRTIO_MMIO_QUEUE_READY => return self.0.write_ready(value),
            // There is no shared memory to select.
            register::VIRTIO_MMIO_SHM_SEL => {}
            offset => return self.write_queue(offset, value),
        }
        true
    }

    fn write_queue(&mut self, offset: u32, value: u32) -> bool {
        let Some(queue) = self.0.selected_to_set_up() else {
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
}

impl BusDevice for MmioTransport {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(offset) = offset.checked_sub(CONFIG) {
            self.0.read_config(offset, data);
        } else if let Ok(data) = <&mut [u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
        {
            *data = self.read_register(offset).to_le_bytes();
        } else {
            self.0.refuse();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let good = if let Some(offset) = offset.checked_sub(CONFIG) {
            self.0.write_config(offset, data);
            true
        } else if let Ok(&data) = <&[u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
        {
            self.write_register(offset, u32::from_le_bytes(data))
        } else {
            false
        };
        if !good {
            self.0.refuse();
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
