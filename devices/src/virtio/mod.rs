//! Virtio 1.2 devices: the transports over memory-mapped registers and over PCI, the queues, and
//! the device models.
//!
//! A device has three parts. The [`MmioTransport`] or [`PciTransport`] holds the registers and is
//! on the MMIO [`Bus`](crate::Bus), for vCPU threads. The [`DeviceHandle`] is for the one thread
//! that serves the device. That thread calls it for queue notifications, for a ready backend and
//! for deadlines. The [`VirtioDevice`] is the model itself. It moves bytes between [`Queues`] and
//! its backend.
//!
//! The caller owns the threads, the eventfds and the guest's memory. A guest is hostile. The
//! content of a queue is checked before a device sees it, and work per call is bounded. A queue
//! with invalid rings is unusable until the driver resets the device, while the other queues and
//! the machine continue.
//!
//! Not here: packed rings, legacy (version 1) devices, and migration with requests in
//! flight. Within one call, a device finishes the chains that it takes from a queue, or puts them
//! back.

pub mod blk;
mod chain;
pub mod console;
mod device;
mod handle;
mod mmio;
#[cfg(any(test, feature = "test-utils"))]
pub mod mock;
pub mod net;
mod pci;
mod queue;
mod regions;
pub mod rng;
mod transport;
mod uninterrupted;
pub mod vsock;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

pub use chain::{Chain, ChainError};
pub use device::{DeviceStateError, Progress, VirtioDevice};
pub use handle::{DeviceHandle, InterruptStats};
pub use mmio::{MMIO_LENGTH, MmioTransport, QUEUE_NOTIFY};
pub use pci::{
    PCI_MEMORY_LENGTH, PCI_NOTIFY, PCI_NOTIFY_STEP, PciState, PciStateError, PciTransport,
};
pub use queue::{QueueError, QueueStats, Queues, SavedQueue};
pub use transport::{QueueNotifier, QueueRegisters, TransportState, TransportStateError};

/// The feature of virtio 1.0 and later, the only supported version.
pub const FEATURE_VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
/// The feature by which a descriptor may name a table of descriptors.
pub const FEATURE_INDIRECT_DESCRIPTORS: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
/// The feature by which notifications and interrupts are suppressed by ring index.
pub const FEATURE_EVENT_INDEX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

/// The features that the transport offers for every device.
pub const TRANSPORT_FEATURES: u64 =
    FEATURE_VERSION_1 | FEATURE_INDIRECT_DESCRIPTORS | FEATURE_EVENT_INDEX;
