#![allow(clippy::unwrap_used)]

use std::time::Instant;

use super::*;
use crate::virtio::device::DeviceStateError;
use crate::virtio::mock::{BUFFERS, Descriptor, Driver, MEMORY, RINGS, status};
use crate::virtio::queue::Queues;
use crate::virtio::{
    ChainError, FEATURE_EVENT_INDEX, FEATURE_INDIRECT_DESCRIPTORS, Progress, QueueError,
};
use crate::virtio::{FEATURE_VERSION_1, TRANSPORT_FEATURES};

const OWN_FEATURE: u64 = 1 << 5;
const ALL: u64 = TRANSPORT_FEATURES | OWN_FEATURE;

/// A device that echoes in both of its queues, and keeps one byte of configuration space.
#[derive(Default)]
pub(in crate::virtio) struct Echo {
    byte: u8,
    active: bool,
}

impl VirtioDevice for Echo {
    fn name(&self) -> &'static str {
        "echo"
    }

    fn device_id(&self) -> u32 {
        42
    }

    fn features(&self) -> u64 {
        OWN_FEATURE
    }

    fn accepts(&self, features: u64) -> bool {
        features & OWN_FEATURE != 0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![16, 8]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        if let (0, Some(first)) = (offset, data.first_mut()) {
            *first = self.byte;
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (0, Some(&first)) = (offset, data.first()) {
            self.byte = first;
        }
    }

    fn activate(&mut self, _features: u64) {
        self.active = true;
    }

    fn process(&mut self, queue: u16, _now: Instant, queues: &mut Queues) -> Progress {
        assert!(self.active);
        while let Some(chain) = queues.pop(queue) {
            let mut bytes = vec![0; chain.readable()];
            assert_eq!(chain.read(queues.memory(), 0, &mut bytes), bytes.len());
            let length = chain.write(queues.memory(), 0, &bytes);
            queues.give(queue, chain, length);
        }
        let _ = queues.listen(queue);
        Progress::Idle
    }

    fn poll(&mut self, _now: Instant, queues: &mut Queues) -> Progress {
        queues.config_changed();
        Progress::Idle
    }

    fn reset(&mut self) {
        self.active = false;
    }

    fn save(&self) -> Vec<u8> {
        vec![self.byte]
    }

    fn restore(&mut self, state: &[u8], features: Option<u64>) -> Result<(), DeviceStateError> {
        let &[byte] = state else {
            return Err(DeviceStateError {
                device: "echo",
                problem: format!("{} bytes", state.len()),
            });
        };
        self.byte = byte;
        self.active = features.is_some();
        Ok(())
    }
}

fn driver() -> Driver {
    Driver::new(Box::<Echo>::default())
}

fn probed(features: u64) -> Driver {
    let mut driver = driver();
    driver.probe(features, 2);
    driver.run();
    driver.interrupts();
    driver
}

/// Sends bytes through a queue, and returns the echo.
fn echo(driver: &mut Driver, queue: u16, bytes: &[u8]) -> Vec<u8> {
    driver.add(queue, &[bytes], &[64]);
    driver.kick(queue);
    driver.run();
    let used = driver.used(queue);
    assert_eq!(used.len(), 1);
    used[0].bytes.clone()
}

#[test]
fn a_driver_finds_the_device() {
    let mut driver = driver();
    for (offset, expected) in [
        (0x000, u32::from_le_bytes(*b"virt")),
        (0x004, 2),
        (0x008, 42),
        (0x00c, u32::from_le_bytes(*b"exot")),
        (0x034, 16),
        (0x044, 0),
        (0x060, 0),
        (0x070, 0),
        (0x0b0, u32::MAX),
        (0x0fc, 0),
    ] {
        assert_eq!(driver.read(offset), expected, "register {offset:#x}");
    }
    assert_eq!(driver.offered(), ALL);
    driver.write(0x030, 1);
    assert_eq!(driver.read(0x034), 8, "the second queue's size");
    driver.write(0x030, 2);
    assert_eq!(driver.read(0x034), 0, "there is no third queue");
}

#[test]
fn features_are_agreed_upon_or_refused() {
    for (features, agreed) in [
        (ALL, true),
        (FEATURE_VERSION_1 | OWN_FEATURE, true),
        (OWN_FEATURE, false),
        (FEATURE_VERSION_1, false),
        (ALL | 1, false),
        (ALL | 1 << 40, false),
    ] {
        let mut driver = driver();
        assert_eq!(driver.negotiate(features), agreed, "{features:#x}");
        driver.ready();
        assert_eq!(driver.handle.active(), agreed, "{features:#x}");
    }
}

#[test]
fn the_status_only_grows() {
    // Writes in order, and the status after them.
    let cases: &[(&[u32], u32)] = &[
        (&[1], 1),
        (&[1, 3], 3),
        (&[1, 3, 1], 3),
        (&[1, 3, 2], 3),
        (&[1, 3, 0], 0),
        (&[1, 3, 7], 3),
        (&[1, 0x83], 0x83),
        (&[1, 0x41], 1),
        (&[0xffff_ff01], 1),
    ];
    for (writes, expected) in cases {
        let mut driver = driver();
        for &value in *writes {
            driver.write(0x070, value);
        }
        assert_eq!(driver.status(), *expected, "after {writes:x?}");
    }
}

#[test]
fn accesses_that_virtio_does_not_know_do_nothing() {
    let mut driver = driver();
    for (offset, length) in [
        (0x070, 1),
        (0x070, 2),
        (0x071, 4),
        (0x070, 8),
        (0x0fe, 4),
        (0, 0),
    ] {
        let mut data = vec![0xaa; length];
        driver.transport.read(offset, &mut data);
        assert!(data.iter().all(|&byte| byte == 0), "read {offset:#x}");
        driver.transport.write(offset, &vec![1; length]);
    }
    driver.write(0x050, 2);
    driver.write(0x050, u32::MAX);
    driver.write(0x020, 1);
    assert_eq!(driver.status(), 0);
    assert_eq!(driver.transport.refused(), 12 + 3);
}

#[test]
fn a_queue_that_cannot_be_is_not_ready() {
    let end = MEMORY as u32;
    let cases = [
        ("size 0", 0, 0x1_0000, 0x2_0000, 0x3_0000),
        ("size 3", 3, 0x1_0000, 0x2_0000, 0x3_0000),
        ("size 32", 32, 0x1_0000, 0x2_0000, 0x3_0000),
        ("size 65552", 0x1_0010, 0x1_0000, 0x2_0000, 0x3_0000),
        ("table unaligned", 16, 0x1_0008, 0x2_0000, 0x3_0000),
        ("available unaligned", 16, 0x1_0000, 0x2_0001, 0x3_0000),
        ("used unaligned", 16, 0x1_0000, 0x2_0000, 0x3_0002),
        ("table outside", 16, end - 0x80, 0x2_0000, 0x3_0000),
        ("available outside", 16, 0x1_0000, end - 0x20, 0x3_0000),
        ("used outside", 16, 0x1_0000, 0x2_0000, end),
        ("at zero", 16, 0x1_0000, 0, 0x3_0000),
    ];
    for (name, size, descriptors, available, used) in cases {
        let mut driver = driver();
        assert!(driver.negotiate(ALL));
        for (offset, value) in [
            (0x38, size),
            (0x80, descriptors),
            (0x90, available),
            (0xa0, used),
        ] {
            driver.write(offset, value);
        }
        driver.write(0x44, 1);
        assert_eq!(driver.read(0x44), 0, "{name}");
        assert_ne!(driver.status() & status::NEEDS_RESET, 0, "{name}");
    }
}

#[test]
fn queues_are_set_up_before_the_driver_is_ready() {
    let mut driver = probed(ALL);
    driver.write(0x30, 0);
    let refused = driver.transport.refused();
    driver.write(0x38, 8);
    driver.write(0x80, 0);
    driver.write(0x44, 1);
    assert_eq!(driver.transport.refused(), refused + 3);
    assert_eq!(echo(&mut driver, 0, b"goes on"), b"goes on");
}

#[test]
fn a_reset_device_is_as_new() {
    for features in [ALL, FEATURE_VERSION_1 | OWN_FEATURE] {
        let mut driver = driver();
        for round in 0..3 {
            driver.probe(features, 2);
            for queue in [0, 1] {
                for _ in 0..40 {
                    assert_eq!(
                        echo(&mut driver, queue, b"bytes"),
                        b"bytes",
                        "round {round}"
                    );
                }
            }
            assert_eq!(driver.read(0x060), 1, "the queue's interrupt is pending");
            driver.write(0x070, 0);
            assert_eq!((driver.status(), driver.read(0x060)), (0, 0));
            driver.notify(0);
            driver.run();
            assert!(!driver.handle.active());
        }
    }
}

#[test]
fn chains_are_read_and_written_across_their_buffers() {
    for indirect in [false, true] {
        let mut driver = probed(ALL);
        driver.indirect = indirect;
        driver.add(0, &[b"ab", b"cde", b"f"], &[1, 4, 9]);
        driver.kick(0);
        driver.run();
        let used = driver.used(0);
        assert_eq!((used[0].length, &*used[0].bytes), (6, &b"abcdef"[..]));
    }
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor {
        address,
        length,
        flags,
        next,
    }
}

#[test]
fn malformed_chains_come_back_and_the_queue_goes_on() {
    let table = BUFFERS;
    let data = BUFFERS + 0x1000;
    let read = |flags, next| descriptor(data, 4, flags, next);
    let outside = MEMORY as u64;
    let cases: &[(&str, &[Descriptor], &[Descriptor], ChainError)] = &[
        ("itself", &[read(NEXT, 0)], &[], ChainError::Endless),
        (
            "a loop",
            &[read(NEXT, 1), read(NEXT, 0)],
            &[],
            ChainError::Endless,
        ),
        (
            "beyond the table",
            &[read(NEXT, 16)],
            &[],
            ChainError::Endless,
        ),
        (
            "empty",
            &[descriptor(data, 0, 0, 0)],
            &[],
            ChainError::Empty,
        ),
        (
            "outside",
            &[descriptor(outside, 4, 0, 0)],
            &[],
            ChainError::OutsideMemory,
        ),
        (
            "across the end",
            &[descriptor(outside - 2, 4, 0, 0)],
            &[],
            ChainError::OutsideMemory,
        ),
        (
            "wraps",
            &[descriptor(u64::MAX, 4, WRITE, 0)],
            &[],
            ChainError::OutsideMemory,
        ),
        (
            "order",
            &[read(WRITE | NEXT, 1), read(0, 0)],
            &[],
            ChainError::Order,
        ),
        (
            "table's length",
            &[descriptor(table, 17, INDIRECT, 0)],
            &[read(0, 0)],
            ChainError::Endless,
        ),
        (
            "no table",
            &[descriptor(table, 0, INDIRECT, 0)],
            &[],
            ChainError::Endless,
        ),
        (
            "table outside",
            &[descriptor(outside, 16, INDIRECT, 0)],
            &[],
            ChainError::Endless,
        ),
        (
            "table in table",
            &[descriptor(table, 16, INDIRECT, 0)],
            &[descriptor(table, 16, INDIRECT, 0)],
            ChainError::Endless,
        ),
        (
            "table of a loop",
            &[descriptor(table, 16 * 1000, INDIRECT, 0)],
            &[read(NEXT, 0)],
            ChainError::Endless,
        ),
    ];
    for (name, direct, indirect, expected) in cases {
        let mut driver = probed(ALL);
        for (number, descriptor) in (0..).zip(*direct) {
            descriptor.store(&driver.memory, RINGS, number);
        }
        for (number, descriptor) in (0..).zip(*indirect) {
            descriptor.store(&driver.memory, table, number);
        }
        let memory = driver.memory.clone();
        driver.rings[0].publish(&memory, 0);
        driver.kick(0);
        driver.run();
        let used = driver.used(0);
        assert_eq!(
            (used.len(), used[0].head, used[0].length),
            (1, 0, 0),
            "{name}"
        );
        let stats = driver.handle.queue_stats(0);
        assert_eq!(
            (stats.rejected, stats.last_rejection),
            (1, Some(*expected)),
            "{name}"
        );
        assert_eq!(driver.status() & status::NEEDS_RESET, 0, "{name}");
        assert_eq!(echo(&mut driver, 0, b"on"), b"on", "{name}");
    }
}

#[test]
fn an_indirect_table_is_refused_where_it_was_not_negotiated() {
    let mut driver = probed(ALL & !FEATURE_INDIRECT_DESCRIPTORS);
    driver.indirect = true;
    driver.add(0, &[b"a"], &[1]);
    driver.kick(0);
    driver.run();
    assert_eq!(driver.used(0)[0].length, 0);
    let stats = driver.handle.queue_stats(0);
    assert_eq!(stats.last_rejection, Some(ChainError::Indirect));
}

#[test]
fn a_broken_queue_leaves_the_other_one_working() {
    for (index, head, expected) in [(17, 0, QueueError::Index), (1, 16, QueueError::Head)] {
        let mut driver = probed(ALL);
        let memory = driver.memory.clone();
        driver.rings[0].publish(&memory, head);
        driver.rings[0].set_index(&memory, index);
        driver.notify(0);
        driver.run();
        assert_ne!(driver.status() & status::NEEDS_RESET, 0);
        assert_eq!(driver.read(0x060), 2, "a change of configuration is told");
        assert_eq!(driver.handle.queue_stats(0).last_break, Some(expected));
        driver.notify(0);
        driver.run();
        assert_eq!(driver.handle.queue_stats(0).broken, 1, "it is out of use");
        assert_eq!(echo(&mut driver, 1, b"on"), b"on");
        driver.probe(ALL, 2);
        assert_eq!(echo(&mut driver, 0, b"again"), b"again");
        assert_eq!(driver.status() & status::NEEDS_RESET, 0);
    }
}

#[test]
fn interrupts_come_when_the_driver_wants_them() {
    let mut driver = probed(ALL);
    let memory = driver.memory.clone();
    echo(&mut driver, 0, b"first");
    assert_eq!(driver.interrupts(), 1);
    // Not before the fourth chain.
    driver.rings[0].set_used_event(&memory, 3);
    for expected in [0, 0, 1, 0] {
        driver.add(0, &[b"x"], &[1]);
        driver.kick(0);
        driver.run();
        assert_eq!(driver.interrupts(), expected);
    }
    let mut driver = probed(ALL & !FEATURE_EVENT_INDEX);
    for (none, expected) in [(false, 1), (true, 0), (false, 1)] {
        let memory = driver.memory.clone();
        driver.rings[0].set_no_interrupt(&memory, none);
        echo(&mut driver, 0, b"x");
        assert_eq!(driver.interrupts(), expected);
    }
}

#[test]
fn notifications_are_for_chains_after_the_last_one_taken() {
    let mut driver = probed(ALL);
    for _ in 0..3 {
        driver.add(0, &[b"x"], &[1]);
        driver.kick(0);
        driver.add(0, &[b"y"], &[1]);
        // The device has not checked since the first one, so the second needs no notification.
        driver.kick(0);
        driver.run();
        assert_eq!(driver.calls, 1);
        assert_eq!(driver.used(0).len(), 2);
    }
}

#[test]
fn configuration_space_is_the_devices() {
    let mut driver = probed(ALL);
    driver.write(0x100, 7);
    assert_eq!(driver.read(0x100), 7);
    assert_eq!((driver.read(0x104), driver.read(0x0fc)), (0, 0));
    driver.poll();
    assert_eq!((driver.read(0x0fc), driver.read(0x060)), (1, 2));
    driver.write(0x064, 2);
    assert_eq!(driver.read(0x060), 0);
}

#[test]
fn a_restored_device_goes_on_where_it_was() {
    let mut driver = probed(ALL);
    for count in 0..50 {
        driver.write(0x100, count);
        driver.add(0, &[b"before"], &[64]);
        driver.replace(Box::<Echo>::default()).unwrap();
        assert_eq!(driver.read(0x100), count);
        driver.run();
        assert_eq!(driver.used(0)[0].bytes, b"before");
        assert!(driver.interrupts() > 0);
        assert_eq!(echo(&mut driver, 1, b"other"), b"other");
    }
}

#[test]
fn a_state_that_cannot_be_is_refused() {
    let mut driver = probed(ALL);
    let good = driver.transport.state();
    type Damage = fn(&mut TransportState);
    let cases: &[(Damage, &str)] = &[
        (|state| state.device_id = 3, "restore with the devices"),
        (|state| state.queues.truncate(1), "restore with the devices"),
        (
            |state| state.registers.truncate(1),
            "restore with the devices",
        ),
        (|state| state.driver_features |= 1 << 7, "features"),
        (|state| state.queues[1].size = 16, "queue 1: its size"),
        (
            |state| state.queues[0].used = u64::MAX - 3,
            "queue 0: a ring lies outside",
        ),
        (|state| state.device.clear(), "state of the echo: 0 bytes"),
    ];
    for (damage, expected) in cases {
        let mut state = good.clone();
        damage(&mut state);
        let error = driver
            .restore(Box::<Echo>::default(), &state)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(driver.status(), 0);
    }
    driver.restore(Box::<Echo>::default(), &good).unwrap();
    assert_eq!(echo(&mut driver, 0, b"good"), b"good");
}
