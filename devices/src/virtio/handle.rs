//! The state shared by a device's registers and its thread: the model with its queues, the status,
//! the interrupt.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use virtio_bindings::virtio_config::{VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_NEEDS_RESET};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};

use super::device::{OverlayFile, Progress, VirtioDevice};
use super::queue::{QueueStats, Queues};
use crate::signals::InterruptLine;

/// The counts of a device's interrupt. They are exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InterruptStats {
    /// The number of interrupts that reached the controller.
    pub raised: u64,
    /// The number of interrupts that the controller rejected.
    pub lost: u64,
}

/// The model and its queues.
pub(super) struct Core {
    pub(super) device: Box<dyn VirtioDevice>,
    pub(super) queues: Queues,
    /// The queues that the driver is interrupted for, kept for its memory.
    pub(super) used: Vec<u16>,
}

/// The way in which a transport interrupts the driver.
pub(super) trait Interrupt: Send + Sync {
    /// Interrupts for used chains of `queues`, and for a change of the configuration.
    fn raise(&self, queues: &[u16], config: bool) -> InterruptStats;
}

/// The interrupt of a device that has one line.
pub(super) struct Pin(pub(super) Arc<dyn InterruptLine>);

impl Interrupt for Pin {
    fn raise(&self, _: &[u16], _: bool) -> InterruptStats {
        let raised = u64::from(self.0.pulse().is_ok());
        InterruptStats {
            raised,
            lost: 1 - raised,
        }
    }
}

pub(super) struct Shared {
    /// The model. The device thread locks it for one bounded call. vCPU threads lock it for
    /// configuration space, queue setup and status changes. They do not lock it for interrupts,
    /// notifications and reads of the status.
    core: Mutex<Core>,
    /// The status. Written with `core` locked, read without.
    pub(super) status: AtomicU32,
    /// The pending interrupts. Set with `core` locked, cleared by the driver's acknowledgement
    /// without it.
    pub(super) interrupt_status: AtomicU32,
    /// The number of changes of configuration space. Written with `core` locked, read without.
    pub(super) generation: AtomicU32,
    interrupt: Box<dyn Interrupt>,
    raised: AtomicU64,
    lost: AtomicU64,
}

impl Shared {
    pub(super) fn new(core: Core, interrupt: Box<dyn Interrupt>) -> Self {
        Self {
            core: Mutex::new(core),
            status: AtomicU32::new(0),
            interrupt_status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            interrupt,
            raised: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether the driver is active, between DRIVER_OK and reset. This cannot change while
    /// `core` is locked.
    pub(super) fn active(&self) -> bool {
        self.status.load(Ordering::Acquire) & VIRTIO_CONFIG_S_DRIVER_OK != 0
    }

    /// Notifies the driver of the model's changes to its queues and configuration space.
    pub(super) fn publish(&self, core: &mut Core) {
        let mut bits = 0;
        core.queues.take_used(&mut core.used);
        if !core.used.is_empty() {
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
            self.raise(bits, &core.used);
        }
    }

    /// Marks the device as in need of a reset.
    pub(super) fn needs_reset(&self) {
        self.status
            .fetch_or(VIRTIO_CONFIG_S_NEEDS_RESET, Ordering::Release);
    }

    /// Interrupts the driver by these bits of the interrupt status. The first is for `queues`.
    pub(super) fn raise(&self, bits: u32, queues: &[u16]) {
        self.interrupt_status.fetch_or(bits, Ordering::Release);
        let config = bits & VIRTIO_MMIO_INT_CONFIG != 0;
        let InterruptStats { raised, lost } = self.interrupt.raise(queues, config);
        self.raised.fetch_add(raised, Ordering::Relaxed);
        self.lost.fetch_add(lost, Ordering::Relaxed);
    }
}

/// A device as its thread sees it. Clones are for the same device.
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
    /// Returns the device's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.0.core().device.name()
    }

    /// Returns the number of queues, which never changes.
    #[must_use]
    pub fn queues(&self) -> u16 {
        u16::try_from(self.0.core().queues.len()).unwrap_or(u16::MAX)
    }

    /// Handles a notification of a queue. It has no effect before DRIVER_OK and after a reset.
    pub fn process(&self, queue: u16, now: Instant) -> Progress {
        self.call(|core| core.device.process(queue, now, &mut core.queues))
    }

    /// Handles a ready backend, or the deadline.
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

    /// Returns the latest time for the next call of `poll`. To be read after each call, and after a
    /// notification of any queue.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let core = self.0.core();
        core.device.deadline().filter(|_| self.0.active())
    }

    /// Checks whether [`DeviceHandle::poll`] is to be called when the backend has room again. To be
    /// read after each call.
    #[must_use]
    pub fn wants_room(&self) -> bool {
        let core = self.0.core();
        core.device.wants_room() && self.0.active()
    }

    /// Checks whether the driver is active, between DRIVER_OK and reset.
    #[must_use]
    pub fn active(&self) -> bool {
        self.0.active()
    }

    /// Returns the counts of one queue.
    #[must_use]
    pub fn queue_stats(&self, queue: u16) -> QueueStats {
        self.0.core().queues.stats(queue)
    }

    /// Returns the file with the guest's writes that belongs to a snapshot, up to date, if the
    /// device has one.
    ///
    /// # Errors
    /// If earlier writes cannot be brought into it.
    pub fn overlay(&self) -> io::Result<Option<OverlayFile>> {
        self.0.core().device.overlay()
    }

    /// Fills `buffer` with the bytes of the device's disk from `offset` on, for an observer. The
    /// guest's requests wait meanwhile.
    ///
    /// # Errors
    /// If the device is no disk, or the bytes cannot be read.
    pub fn peek_disk(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.core().device.peek_disk(buffer, offset)
    }

    /// Returns the counts of the interrupt.
    #[must_use]
    pub fn interrupt_stats(&self) -> InterruptStats {
        InterruptStats {
            raised: self.0.raised.load(Ordering::Relaxed),
            lost: self.0.lost.load(Ordering::Relaxed),
        }
    }
}
