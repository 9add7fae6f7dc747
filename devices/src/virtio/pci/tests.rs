#![allow(clippy::unwrap_used)]

use std::sync::Mutex;
use std::time::Instant;

use vm_memory::GuestAddress;

use super::*;
use crate::signals::Message;
use crate::signals::testing::Messages;
use crate::virtio::mmio::tests::Echo;
use crate::virtio::mock::{MEMORY, RING_AREA, RINGS, Ring, status};
use crate::virtio::{FEATURE_VERSION_1, TRANSPORT_FEATURES};

/// Where the function's memory is.
const ADDRESS: u64 = 0xe100_8000;
const FEATURES: u64 = TRANSPORT_FEATURES | 1 << 5;

/// A recorder of notifications.
#[derive(Default)]
struct Notified(Mutex<Vec<u16>>);

impl QueueNotifier for Notified {
    fn notify(&self, queue: u16) {
        self.0.lock().unwrap().push(queue);
    }
}

/// A driver that knows of the device what configuration space says.
struct Driver {
    memory: WatchedMemory,
    function: PciTransport,
    sent: Arc<Messages>,
    notified: Arc<Notified>,
    rings: Vec<Ring>,
    /// The offsets in the function's memory of each kind of registers.
    common: u64,
    notify: (u64, u64),
    device: u64,
    isr: u64,
    table: u64,
}

fn function(
    memory: &WatchedMemory,
    sent: &Arc<Messages>,
    notified: &Arc<Notified>,
) -> PciTransport {
    PciTransport::new(
        Box::<Echo>::default(),
        memory.clone(),
        ADDRESS,
        sent.clone(),
        notified.clone(),
    )
}

fn config(function: &mut PciTransport, place: usize) -> u32 {
    let mut bytes = [0; 4];
    function.read_config(place, &mut bytes);
    u32::from_le_bytes(bytes)
}

fn vector_message(vector: u16) -> Message {
    Message {
        address: 0xfee0_0000,
        data: u32::from(vector) + 0x30,
    }
}

impl Driver {
    /// Makes a driver that has found the device's registers and enabled it.
    fn new() -> Self {
        let memory = WatchedMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        let (sent, notified) = <(Arc<Messages>, Arc<Notified>)>::default();
        let mut function = function(&memory, &sent, &notified);
        assert_eq!(config(&mut function, 0), 0x106a_1af4);
        let (mut common, mut notify, mut device, mut isr, mut table) = (1, (1, 0), 1, 1, 1);
        let mut place = config(&mut function, 0x34) as usize & 0xff;
        while place != 0 {
            let head = config(&mut function, place);
            if head & 0xff == 0x11 {
                assert_eq!(head >> 16, 2, "three vectors");
                table = u64::from(config(&mut function, place + 4));
                function.write_config(place + 3, &[0x80]);
            } else {
                assert_eq!(head & 0xff, 9);
                let offset = u64::from(config(&mut function, place + 8));
                match head >> 24 {
                    1 => common = offset,
                    2 => notify = (offset, u64::from(config(&mut function, place + 16))),
                    3 => isr = offset,
                    4 => device = offset,
                    other => assert_eq!(other, 5),
                }
            }
            place = head as usize >> 8 & 0xff;
        }
        function.write_config(4, &[6, 4]);
        let mut driver = Self {
            memory,
            function,
            sent,
            notified,
            rings: Vec::new(),
            common,
            notify,
            device,
            isr,
            table,
        };
        for vector in 0..3 {
            let Message { address, data } = vector_message(vector);
            let entry = driver.table + u64::from(vector) * 16;
            driver.function.write(entry, &address.to_le_bytes());
            driver.function.write(entry + 8, &data.to_le_bytes());
            driver.function.write(entry + 12, &[0; 4]);
        }
        driver
    }

    fn get<const N: usize>(&mut self, register: u64) -> u64 {
        let mut data = [0; N];
        self.function.read(self.common + register, &mut data);
        data.iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    fn set<const N: usize>(&mut self, register: u64, value: u64) {
        let bytes = value.to_le_bytes();
        self.function.write(self.common + register, &bytes[..N]);
    }

    fn negotiate(&mut self, features: u64) -> bool {
        self.set::<1>(0x14, 0);
        let known = u64::from(status::ACKNOWLEDGE | status::DRIVER);
        self.set::<1>(0x14, known);
        for half in 0..2 {
            self.set::<4>(0x08, half);
            self.set::<4>(0x0c, features >> (32 * half) & 0xffff_ffff);
        }
        self.set::<1>(0x14, known | u64::from(status::FEATURES_OK));
        self.get::<1>(0x14) & u64::from(status::FEATURES_OK) != 0
    }

    /// Sets up both queues, with vectors 1 and 2, and the configuration's with 0.
    fn probe(&mut self) {
        assert!(self.negotiate(FEATURES));
        self.set::<2>(0x10, 0);
        assert_eq!(self.get::<2>(0x10), 0);
        for queue in 0..2 {
            self.set::<2>(0x16, queue);
            let size = self.get::<2>(0x18);
            self.set::<2>(0x1a, queue + 1);
            assert_eq!(self.get::<2>(0x1a), queue + 1);
            let base = RINGS + queue * RING_AREA;
            let ring = Ring::new(&self.memory, base, size as u16, FEATURES);
            self.set::<8>(0x20, ring.descriptors);
            self.set::<4>(0x28, ring.available & 0xffff_ffff);
            self.set::<4>(0x2c, ring.available >> 32);
            self.set::<8>(0x30, ring.used);
            self.set::<2>(0x1c, 1);
            assert_eq!(self.get::<2>(0x1c), 1);
            assert_eq!(self.get::<8>(0x20), ring.descriptors);
            assert_eq!(self.get::<4>(0x34), 0);
            self.rings.push(ring);
        }
        let status = self.get::<1>(0x14);
        self.set::<1>(0x14, status | u64::from(status::DRIVER_OK));
    }

    /// Serves what was notified.
    fn run(&self) {
        let notified = std::mem::take(&mut *self.notified.0.lock().unwrap());
        for queue in notified {
            let _ = self.function.handle().process(queue, Instant::now());
        }
    }

    /// Makes a buffer available in a queue, and notifies the device.
    fn send(&mut self, queue: u16) {
        let ring = &mut self.rings[usize::from(queue)];
        let chain = [crate::virtio::mock::Descriptor::readable(0x40_0000, 4)];
        ring.add(&self.memory, &chain, false);
        self.set::<2>(0x16, u64::from(queue));
        let place = self.get::<2>(0x1e);
        let register = self.notify.0 + place * self.notify.1;
        self.function.write(register, &queue.to_le_bytes());
    }
}

#[test]
fn each_queue_interrupts_by_its_own_message() {
    let mut driver = Driver::new();
    driver.probe();
    driver.run();
    assert_eq!(driver.sent.take(), []);
    for queue in [1, 0] {
        driver.send(queue);
        driver.run();
        assert_eq!(driver.sent.take(), [vector_message(queue + 1)]);
    }
    let _ = driver.function.handle().poll(Instant::now());
    assert_eq!(driver.sent.take(), [vector_message(0)]);
    assert_eq!(driver.get::<1>(0x15), 1, "the configuration's generation");
    let mut pending = [0];
    driver.function.read(driver.isr, &mut pending);
    driver.function.read(driver.isr, &mut pending);
    assert_eq!(pending, [0], "a read clears it");
    assert_eq!(driver.function.handle().interrupt_stats().raised, 3);
    assert_eq!(driver.function.refused(), 0);
}

#[test]
fn features_that_the_device_needs_are_insisted_on() {
    let mut driver = Driver::new();
    assert!(!driver.negotiate(FEATURE_VERSION_1));
    assert!(driver.negotiate(FEATURES));
    driver.set::<4>(0x00, 1);
    assert_eq!(driver.get::<4>(0x04), FEATURES >> 32);
}

#[test]
fn vectors_that_are_not_there_are_refused_and_a_reset_forgets_all() {
    let mut driver = Driver::new();
    driver.probe();
    driver.set::<2>(0x10, 3);
    assert_eq!(driver.get::<2>(0x10), u64::from(NO_VECTOR));
    driver.set::<1>(0x14, 0);
    driver.set::<2>(0x16, 1);
    assert_eq!(driver.get::<2>(0x1a), u64::from(NO_VECTOR));
    assert_eq!(driver.get::<2>(0x1c), 0);
    driver.set::<2>(0x16, 2);
    assert_eq!(driver.get::<2>(0x18), 0, "there is no third queue");
    driver.set::<2>(0x1c, 1);
    assert_eq!(driver.function.refused(), 1);
}

#[test]
fn configuration_space_leads_to_the_registers() {
    let mut driver = Driver::new();
    let access = driver.function.access;
    driver
        .function
        .write_config(access + 8, &(driver.device as u32).to_le_bytes());
    driver
        .function
        .write_config(access + 12, &1_u32.to_le_bytes());
    driver.function.write_config(access + 16, &[7]);
    let mut byte = [0];
    driver.function.read(driver.device, &mut byte);
    assert_eq!(byte, [7]);
    driver.function.read_config(access + 16, &mut byte);
    assert_eq!(byte, [7]);
    driver
        .function
        .write_config(access + 8, &u32::MAX.to_le_bytes());
    driver.function.read_config(access + 16, &mut byte);
    assert_eq!(byte, [0], "outside the memory it is only a byte");
}

#[test]
fn nothing_is_there_before_memory_is_decoded() {
    let mut driver = Driver::new();
    driver.function.write_config(4, &[0, 0]);
    assert_eq!(driver.get::<1>(0x14), 0xff);
    driver.set::<1>(0x14, 1);
    driver.function.write_config(4, &[2, 0]);
    assert_eq!(driver.get::<1>(0x14), 0);
}

#[test]
fn a_restored_function_goes_on_where_the_saved_one_was() {
    let mut driver = Driver::new();
    driver.probe();
    driver.send(1);
    let state = driver.function.state();
    let (sent, notified) = <(Arc<Messages>, Arc<Notified>)>::default();
    let mut restored = function(&driver.memory, &sent, &notified);
    restored.restore(&state).unwrap();
    (driver.function, driver.sent, driver.notified) = (restored, sent, notified);
    assert_eq!(driver.function.state(), state);
    driver.run();
    assert_eq!(driver.sent.take(), [vector_message(2)]);

    let mut other = state.clone();
    other.transport.device_id = 1;
    assert!(driver.function.restore(&other).is_err());
    assert_eq!(driver.get::<1>(0x14), 0, "as after a reset");
}
