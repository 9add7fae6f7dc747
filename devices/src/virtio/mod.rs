//! Virtio 1.2 devices: the transport over memory-mapped registers, the queues, and the device models.
//!
//! A device is three things. The [`MmioTransport`] holds the registers; it is put on the MMIO [`Bus`](crate::Bus) and vCPU
//! threads reach it. The [`DeviceHandle`] is for the one thread that serves the device: it is told which queues the guest
//! has notified, when the device's far end has something, and when a time has come. The [`VirtioDevice`] is the model
//! itself; it moves bytes between [`Queues`] and its far end.
//!
//! The caller owns the threads, the eventfds and the guest's memory. A guest is hostile: what it puts into a queue is
//! checked before a device sees it, work per call is bounded, and a queue whose rings make no sense is out of use until
//! the driver resets the device, while the other queues and the machine go on.
//!
//! Not here: packed rings, PCI and legacy (version 1) devices, and migration while requests are in flight: a device
//! finishes within a call what it takes from a queue, or puts it back.

pub mod blk;
mod chain;
pub mod console;
mod device;
mod handle;
mod mmio;
#[cfg(any(test, feature = "test-utils"))]
pub mod mock;
mod queue;
pub mod rng;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

pub use chain::{Chain, ChainError};
pub use device::{DeviceStateError, Progress, VirtioDevice};
pub use handle::{DeviceHandle, InterruptStats};
pub use mmio::{
    MMIO_LENGTH, MmioState, MmioStateError, MmioTransport, QUEUE_NOTIFY, QueueNotifier,
    QueueRegisters,
};
pub use queue::{QueueError, QueueStats, Queues, SavedQueue};

/// The device keeps to virtio 1.0 and later: the only way here.
pub const FEATURE_VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
/// A descriptor may name a table of descriptors.
pub const FEATURE_INDIRECT_DESCRIPTORS: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
/// Notifications and interrupts are suppressed by ring index.
pub const FEATURE_EVENT_INDEX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

/// What the transport offers for every device.
pub const TRANSPORT_FEATURES: u64 =
    FEATURE_VERSION_1 | FEATURE_INDIRECT_DESCRIPTORS | FEATURE_EVENT_INDEX;
