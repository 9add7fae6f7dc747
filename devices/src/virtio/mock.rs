//! The driver's side of a virtio device, for tests: registers, split rings in guest memory, and the
//! device's thread.
//!
//! [`Driver`] acts as a driver, and misbehaves on request. [`LinuxConsole`] is the console's driver
//! of Linux 6.1. Time passes only when a test advances it. Wrong use panics, because nothing here
//! is for a real guest.
#![allow(clippy::unwrap_used)]

mod linux;
mod ring;

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use virtio_bindings::virtio_mmio as register;
use vm_memory::{Bytes, GuestAddress};

use super::{
    DeviceHandle, MMIO_LENGTH, MmioTransport, Progress, QueueNotifier, TransportState,
    TransportStateError, VirtioDevice,
};
use crate::WatchedMemory;
use crate::bus::BusDevice;
use crate::signals::InterruptLine;

pub use linux::{LinuxConsole, Read};
pub use ring::{Descriptor, Ring, Used};

/// The size of the guest's memory in bytes.
pub const MEMORY: usize = 16 << 20;
/// The start of the rings, with one area for each queue.
pub const RINGS: u64 = 0x1_0000;
/// The size of one queue's area in bytes.
pub const RING_AREA: u64 = 0x8000;
/// The start of the buffers.
pub const BUFFERS: u64 = 0x40_0000;

/// The maximum number of calls before a device is considered endless. Some chains of many times the
/// whole memory may be queued.
const MOST_CALLS: usize = 100_000;

/// Status bits.
pub mod status {
    /// The driver has found the device.
    pub const ACKNOWLEDGE: u32 = 1;
    /// The driver knows how to drive it.
    pub const DRIVER: u32 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u32 = 4;
    /// Features are negotiated.
    pub const FEATURES_OK: u32 = 8;
    /// The device is broken.
    pub const NEEDS_RESET: u32 = 64;
}

/// A counter of interrupts.
#[derive(Debug, Default)]
struct Line(AtomicU64);

impl InterruptLine for Line {
    fn pulse(&self) -> io::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A recorder of notifications, as eventfds are.
#[derive(Debug, Default)]
struct Notifications(Mutex<VecDeque<u16>>);

impl QueueNotifier for Notifications {
    fn notify(&self, queue: u16) {
        let mut notified = self.0.lock().unwrap();
        if !notified.contains(&queue) {
            notified.push_back(queue);
        }
    }
}

/// A driver with its device, the guest's memory, and the thread that serves the device.
#[derive(Debug)]
pub struct Driver {
    /// The guest's memory.
    pub memory: WatchedMemory,
    /// The device's registers.
    pub transport: MmioTransport,
    /// The handle for the device's thread.
    pub handle: DeviceHandle,
    /// The time of the clock.
    pub now: Instant,
    /// The negotiated features.
    pub features: u64,
    /// True if chains are made of indirect tables.
    pub indirect: bool,
    /// The ring of each queue that is set up.
    pub rings: Vec<Ring>,
    line: Arc<Line>,
    notifications: Arc<Notifications>,
    /// The number of calls of the device in the last `run`.
    pub calls: usize,
    next_buffer: u64,
}

impl Driver {
    /// Makes a driver that has not accessed the device yet.
    pub fn new(device: Box<dyn VirtioDevice>) -> Self {
        let memory = WatchedMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        Self::with_memory(device, memory)
    }

    /// Makes a driver over existing memory.
    pub fn with_memory(device: Box<dyn VirtioDevice>, memory: WatchedMemory) -> Self {
        let line = Arc::<Line>::default();
        let notifications = Arc::<Notifications>::default();
        let transport =
            MmioTransport::new(device, memory.clone(), line.clone(), notifications.clone());
        Self {
            memory,
            handle: transport.handle(),
            transport,
            now: Instant::now(),
            features: 0,
            indirect: false,
            rings: Vec::new(),
            line,
            notifications,
            calls: 0,
            next_buffer: BUFFERS,
        }
    }

    /// Reads a register.
    pub fn read(&mut self, offset: u32) -> u32 {
        let mut data = [0; 4];
        self.transport.read(u64::from(offset), &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a register.
    pub fn write(&mut self, offset: u32, value: u32) {
        assert!(u64::from(offset) < MMIO_LENGTH);
        self.transport
            .write(u64::from(offset), &value.to_le_bytes());
    }

    /// Reads the status.
    pub fn status(&mut self) -> u32 {
        self.read(register::VIRTIO_MMIO_STATUS)
    }

    /// Returns the number of interrupts since the last call.
    pub fn interrupts(&self) -> u64 {
        self.line.0.swap(0, Ordering::Relaxed)
    }

    /// Reads the features that the device offers.
    pub fn offered(&mut self) -> u64 {
        self.write(register::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
        let high = u64::from(self.read(register::VIRTIO_MMIO_DEVICE_FEATURES));
        self.write(register::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
        high << 32 | u64::from(self.read(register::VIRTIO_MMIO_DEVICE_FEATURES))
    }

    /// Resets the device, and negotiates `features`. Returns whether the device accepts them.
    pub fn negotiate(&mut self, features: u64) -> bool {
        self.rings.clear();
        self.write(register::VIRTIO_MMIO_STATUS, 0);
        self.write(register::VIRTIO_MMIO_STATUS, status::ACKNOWLEDGE);
        let known = status::ACKNOWLEDGE | status::DRIVER;
        self.write(register::VIRTIO_MMIO_STATUS, known);
        self.write(register::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
        self.write(
            register::VIRTIO_MMIO_DRIVER_FEATURES,
            (features >> 32) as u32,
        );
        self.write(register::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
        self.write(register::VIRTIO_MMIO_DRIVER_FEATURES, features as u32);
        self.write(register::VIRTIO_MMIO_STATUS, known | status::FEATURES_OK);
        self.features = features;
        self.status() & status::FEATURES_OK != 0
    }

    /// Sets up the next queue with `size` descriptors, or with the maximum. Returns whether the
    /// device accepts it.
    pub fn set_up(&mut self, size: Option<u32>) -> bool {
        let index = u16::try_from(self.rings.len()).unwrap();
        self.write(register::VIRTIO_MMIO_QUEUE_SEL, u32::from(index));
        assert_eq!(self.read(register::VIRTIO_MMIO_QUEUE_READY), 0);
        let size = size.unwrap_or(self.read(register::VIRTIO_MMIO_QUEUE_NUM_MAX));
        let base = RINGS + u64::from(index) * RING_AREA;
        let ring = Ring::new(&self.memory, base, size as u16, self.features);
        self.write(register::VIRTIO_MMIO_QUEUE_NUM, size);
        for (low, address) in [
            (register::VIRTIO_MMIO_QUEUE_DESC_LOW, ring.descriptors),
            (register::VIRTIO_MMIO_QUEUE_AVAIL_LOW, ring.available),
            (register::VIRTIO_MMIO_QUEUE_USED_LOW, ring.used),
        ] {
            self.write(low, address as u32);
            self.write(low + 4, (address >> 32) as u32);
        }
        self.write(register::VIRTIO_MMIO_QUEUE_READY, 1);
        self.rings.push(ring);
        self.read(register::VIRTIO_MMIO_QUEUE_READY) == 1
    }

    /// Initializes the device: negotiates, sets up `queues` queues, and sets DRIVER_OK.
    pub fn probe(&mut self, features: u64, queues: usize) {
        assert!(self.negotiate(features), "features {features:#x}");
        for _ in 0..queues {
            assert!(self.set_up(None));
        }
        self.ready();
    }

    /// Sets DRIVER_OK.
    pub fn ready(&mut self) {
        let status = self.status();
        self.write(register::VIRTIO_MMIO_STATUS, status | status::DRIVER_OK);
    }

    /// Allocates memory for a buffer. It is reused after a while.
    pub fn buffer(&mut self, length: usize) -> u64 {
        let length = (length as u64).next_multiple_of(64);
        if self.next_buffer + length > MEMORY as u64 {
            self.next_buffer = BUFFERS;
        }
        let at = self.next_buffer;
        self.next_buffer += length;
        at
    }

    /// Makes a chain of readable buffers with these contents, and writable ones of these lengths.
    /// Returns its head.
    pub fn add(&mut self, queue: u16, readable: &[&[u8]], writable: &[u32]) -> u16 {
        let mut chain = Vec::new();
        for bytes in readable {
            let address = self.buffer(bytes.len());
            self.memory
                .write_slice(bytes, GuestAddress(address))
                .unwrap();
            chain.push(Descriptor::readable(address, bytes.len() as u32));
        }
        for &length in writable {
            let address = self.buffer(length as usize);
            chain.push(Descriptor::writable(address, length));
        }
        self.add_chain(queue, &chain)
    }

    /// Makes a chain of these buffers.
    pub fn add_chain(&mut self, queue: u16, chain: &[Descriptor]) -> u16 {
        let indirect = self.indirect;
        let ring = &mut self.rings[usize::from(queue)];
        ring.add(&self.memory, chain, indirect)
    }

    /// Sends bytes without tracking descriptors, always by the first one of the queue, if it is set
    /// up.
    pub fn raw_send(&mut self, queue: u16, bytes: &[u8]) {
        let address = self.buffer(bytes.len());
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .unwrap();
        if let Some(ring) = self.rings.get_mut(usize::from(queue)) {
            let descriptor = Descriptor::readable(address, bytes.len() as u32);
            descriptor.store(&self.memory, ring.descriptors, 0);
            ring.publish(&self.memory, 0);
        }
        self.notify(queue);
    }

    /// Notifies the device, if it wants notifications.
    pub fn kick(&mut self, queue: u16) {
        if self.rings[usize::from(queue)].wants_kick(&self.memory) {
            self.write(register::VIRTIO_MMIO_QUEUE_NOTIFY, u32::from(queue));
        }
    }

    /// Notifies the device.
    pub fn notify(&mut self, queue: u16) {
        self.write(register::VIRTIO_MMIO_QUEUE_NOTIFY, u32::from(queue));
    }

    /// Runs the device's thread until no notification is left. Panics if the device does not come
    /// to rest.
    pub fn run(&mut self) {
        self.calls = 0;
        loop {
            let queue = self.notifications.0.lock().unwrap().pop_front();
            let Some(queue) = queue else {
                break;
            };
            self.calls += 1;
            assert!(self.calls < MOST_CALLS, "the device never becomes idle");
            if self.handle.process(queue, self.now) == Progress::More {
                self.notifications.notify(queue);
            }
        }
    }

    /// Wakes the device's thread, as a backend or its deadline does.
    pub fn poll(&mut self) {
        while self.handle.poll(self.now) == Progress::More {
            self.run();
        }
        self.run();
    }

    /// Advances time to the device's next deadline, if it is within `most`. Returns the time
    /// advanced.
    pub fn sleep(&mut self, most: Duration) -> Duration {
        let end = self.now + most;
        let until = self.handle.deadline().map_or(end, |at| at.min(end));
        let slept = until.saturating_duration_since(self.now);
        self.now += slept;
        self.poll();
        slept
    }

    /// Returns the chains that the device has used since the last call.
    pub fn used(&mut self, queue: u16) -> Vec<Used> {
        let memory = self.memory.clone();
        let ring = &mut self.rings[usize::from(queue)];
        std::iter::from_fn(|| ring.next_used(&memory)).collect()
    }

    /// Saves the device and continues with another one over the same memory, as after a snapshot.
    pub fn replace(&mut self, device: Box<dyn VirtioDevice>) -> Result<(), TransportStateError> {
        let state = self.transport.state();
        self.restore(device, &state)
    }

    /// Continues with another device that restores this state.
    pub fn restore(
        &mut self,
        device: Box<dyn VirtioDevice>,
        state: &TransportState,
    ) -> Result<(), TransportStateError> {
        let fresh = Self::with_memory(device, self.memory.clone());
        self.transport = fresh.transport;
        self.handle = fresh.handle;
        self.line = fresh.line;
        self.notifications = fresh.notifications;
        self.transport.restore(state)
    }
}
