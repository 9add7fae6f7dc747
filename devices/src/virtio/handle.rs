//! What a device's registers and its thread share: the model with its queues, the status, the interrupt.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use virtio_bindings::virtio_config::{VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_NEEDS_RESET};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};

use super::device::{Progress, VirtioDevice};
use super::queue::{QueueStats, Queues};
use crate::signals::InterruptLine;

/// What a device's interrupt counted. Counts are exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InterruptStats {
    /// Interrupts that reached the controller.
    pub raised: u64,
    /// Those that the controller refused.
    pub lost: u64,
}

/// The model and its queues.
pub(super) struct Core {
    pub(super) device: Box<dyn VirtioDevice>,
    pub(super) queues: Queues,
}

pub(super) struct Shared {
    /// The device thread holds it for one bounded call of the model; vCPU threads for configuration space, for setting up
    /// queues and for changes of the status, but not for interrupts, notifications and reading the status.
    core: Mutex<Core>,
    /// Written with `core` locked, read without.
    pub(super) status: AtomicU32,
    /// Pending interrupts: set by whoever holds `core`, cleared by the driver's acknowledgement without it.
    pub(super) interrupt_status: AtomicU32,
    /// Changes of configuration space: written with `core` locked, read without.
    pub(super) generation: AtomicU32,
    line: Arc<dyn InterruptLine>,
    raised: AtomicU64,
    lost: AtomicU64,
}

impl Shared {
    pub(super) fn new(core: Core, line: Arc<dyn InterruptLine>) -> Self {
        Self {
            core: Mutex::new(core),
            status: AtomicU32::new(0),
            interrupt_status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            line,
            raised: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the driver is there: between DRIVER_OK and reset. It stays so while `core` is locked.
    pub(super) fn active(&self) -> bool {
        self.status.load(Ordering::Acquire) & VIRTIO_CONFIG_S_DRIVER_OK != 0
    }

    /// Tells the driver what the model did to its queues and its configuration space.
    pub(super) fn publish(&self, core: &mut Core) {
        let mut bits = 0;
        if core.queues.take_used() {
            bits |= VIRTIO_MMIO_INT_VRING;
        }
        if core.queues.take_config_changed() {
            self.generation.fetch_add(1, Ordering::Release);
            bits |= VIRTIO_MMIO_INT_CONFIG;
        }
        if core.queues.take_broken() {
            self.needs_reset();
            bits |= VIRTIO_MMIO_INT_CONFIG;
        }
        if bits != 0 && self.active() {
            self.raise(bits);
        }
    }

    /// The device has reached a state that only a reset mends.
    pub(super) fn needs_reset(&self) {
        self.status
            .fetch_or(VIRTIO_CONFIG_S_NEEDS_RESET, Ordering::Release);
    }

    /// Interrupts the driver; with no bits, for those that are pending.
    pub(super) fn raise(&self, bits: u32) {
        self.interrupt_status.fetch_or(bits, Ordering::Release);
        let count = match self.line.pulse() {
            Ok(()) => &self.raised,
            Err(_) => &self.lost,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// A device for the thread that serves it. Copies are for the same device.
#[derive(Clone)]
pub struct DeviceHandle(pub(super) Arc<Shared>);

impl fmt::Debug for DeviceHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.0.status.load(Ordering::Acquire);
        f.debug_struct("DeviceHandle")
            .field("status", &status)
            .finish()
    }
}

impl DeviceHandle {
    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.0.core().device.name()
    }

    /// How many queues the device has: the same for its life.
    #[must_use]
    pub fn queues(&self) -> u16 {
        u16::try_from(self.0.core().queues.len()).unwrap_or(u16::MAX)
    }

    /// The guest has notified a queue. Before DRIVER_OK and after a reset nothing happens.
    pub fn process(&self, queue: u16, now: Instant) -> Progress {
        self.call(|core| core.device.process(queue, now, &mut core.queues))
    }

    /// The far end has something, or the deadline has come.
    pub fn poll(&self, now: Instant) -> Progress {
        self.call(|core| core.device.poll(now, &mut core.queues))
    }

    fn call(&self, model: impl FnOnce(&mut Core) -> Progress) -> Progress {
        let mut core = self.0.core();
        if !self.0.active() {
            return Progress::Idle;
        }
        let progress = model(&mut core);
        self.0.publish(&mut core);
        progress
    }

    /// When to call `poll` at the latest; to be asked after each call, and after a notification of any queue.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let core = self.0.core();
        core.device.deadline().filter(|_| self.0.active())
    }

    /// Whether the driver is there: between DRIVER_OK and reset.
    #[must_use]
    pub fn active(&self) -> bool {
        self.0.active()
    }

    /// What one queue counted.
    #[must_use]
    pub fn queue_stats(&self, queue: u16) -> QueueStats {
        self.0.core().queues.stats(queue)
    }

    /// What the interrupt counted.
    #[must_use]
    pub fn interrupt_stats(&self) -> InterruptStats {
        InterruptStats {
            raised: self.0.raised.load(Ordering::Relaxed),
            lost: self.0.lost.load(Ordering::Relaxed),
        }
    }
}
