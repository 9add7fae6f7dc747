//! Tests of faulty and malicious drivers.

use std::time::Duration;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::mock::{BUFFERS, MEMORY, RING_AREA, RINGS};

#[test]
fn bad_control_messages_are_counted_and_the_next_one_is_heard() {
    let message = |id, event, value| Message { id, event, value }.encode().to_vec();
    let open = Event::PortOpen as u16;
    let cases: &[(&str, Vec<u8>)] = &[
        ("empty but for a byte", vec![0]),
        ("one byte short", message(DT, open, 1)[..7].to_vec()),
        ("no such port", message(3, open, 1)),
        ("a port that cannot be", message(1 << 31, open, 1)),
        ("the device's id", message(BAD_ID, open, 1)),
        ("no such event", message(DT, 8, 1)),
        ("no such event either", message(DT, u16::MAX, 1)),
        (
            "a device's message",
            message(DT, Event::DeviceAdd as u16, 1),
        ),
        ("another one", message(DT, Event::DeviceRemove as u16, 1)),
        ("a name", message(DT, Event::PortName as u16, 1)),
        ("a size", message(0, Event::Resize as u16, 1)),
        ("a console", message(DT, Event::ConsolePort as u16, 1)),
        ("neither open nor closed", message(DT, open, 2)),
        (
            "neither ready nor not",
            message(DT, Event::PortReady as u16, 7),
        ),
    ];
    for (name, bytes) in cases {
        let mut rig = probed(ALL);
        rig.linux.driver.add(CONTROL_TRANSMIT, &[bytes], &[]);
        rig.linux.driver.kick(CONTROL_TRANSMIT);
        rig.linux.driver.run();
        assert_eq!(rig.linux.driver.used(CONTROL_TRANSMIT).len(), 1, "{name}");
        assert_eq!(rig.host.bad_messages(), 1, "{name}");
        rig.linux.open(DT);
        assert_eq!(rig.ends[DT as usize].with(|end| end.opens), 1, "{name}");
        assert_eq!(rig.linux.driver.status() & status::NEEDS_RESET, 0, "{name}");
    }
}

#[test]
fn a_message_may_lie_in_pieces_and_be_followed_by_more() {
    let mut rig = probed(ALL);
    let bytes = Message::new(DT, Event::PortOpen, 1).encode();
    let pieces: Vec<&[u8]> = bytes.chunks(1).chain([&b"rest"[..]]).collect();
    rig.linux.driver.add(CONTROL_TRANSMIT, &pieces, &[]);
    rig.linux.driver.kick(CONTROL_TRANSMIT);
    rig.linux.driver.run();
    assert!(rig.host.port_stats(DT).unwrap().guest_open);
    assert_eq!(rig.host.bad_messages(), 0);
}

#[test]
fn buffers_of_the_wrong_direction_are_rejected_by_every_queue() {
    for (queue, readable, writable) in [
        (CONTROL_TRANSMIT, 0, 8),
        (CONTROL_TRANSMIT, 8, 8),
        (transmit_queue(DT), 0, 8),
        (transmit_queue(DT), 8, 8),
        (receive_queue(DT), 8, 0),
        (receive_queue(DT), 8, 8),
    ] {
        let mut rig = rig();
        rig.linux.buffers = 1;
        rig.linux.probe(ALL);
        rig.linux.open(DT);
        let end = rig.ends[DT as usize].clone();
        let data = vec![b'x'; readable];
        let readable: &[&[u8]] = if readable > 0 { &[&data] } else { &[] };
        let writable: &[u32] = if writable > 0 { &[writable] } else { &[] };
        rig.linux.driver.add(queue, readable, writable);
        rig.linux.driver.notify(queue);
        end.give(&vec![b'y'; 5000]);
        rig.host_did();
        let stats = rig.linux.driver.handle.queue_stats(queue);
        let direction = Some(ChainError::Direction);
        assert_eq!(
            (stats.rejected, stats.last_rejection),
            (1, direction),
            "queue {queue}"
        );
        assert_eq!(end.got(), b"");
    }
}

#[test]
fn messages_wait_for_buffers_that_hold_them() {
    let mut rig = rig();
    let queues = usize::from(rig.linux.driver.handle.queues());
    rig.linux.driver.probe(ALL, queues);
    let add = |rig: &mut Rig, length| {
        rig.linux.driver.add(CONTROL_RECEIVE, &[], &[length]);
        rig.linux.driver.kick(CONTROL_RECEIVE);
        rig.linux.driver.run();
        rig.linux.driver.used(CONTROL_RECEIVE)
    };
    rig.linux.say(BAD_ID, Event::DeviceReady, 1);
    assert_eq!(add(&mut rig, 8)[0].length, 8, "port 0");
    rig.linux.say(1, Event::PortReady, 1);
    assert_eq!(add(&mut rig, 8)[0].length, 0, "too small for port 1's name");
    assert_eq!(add(&mut rig, 5 + 4 + 1)[0].bytes[8..], *b"dt");
    let stats = rig.linux.driver.handle.queue_stats(CONTROL_RECEIVE);
    assert_eq!(stats.rejected, 1);
}

#[test]
fn a_driver_that_asks_and_does_not_listen_costs_nothing() {
    let mut rig = rig();
    let queues = usize::from(rig.linux.driver.handle.queues());
    rig.linux.driver.probe(ALL, queues);
    for _ in 0..1000 {
        rig.linux.say(BAD_ID, Event::DeviceReady, 1);
        for id in 0..3 {
            rig.linux.say(id, Event::PortReady, 1);
            rig.linux.say(id, Event::PortOpen, 1);
        }
    }
    // In the end the driver gets the present state, once.
    for _ in 0..20 {
        rig.linux.driver.add(CONTROL_RECEIVE, &[], &[64]);
    }
    rig.linux.driver.notify(CONTROL_RECEIVE);
    rig.linux.driver.run();
    assert_eq!(rig.linux.driver.used(CONTROL_RECEIVE).len(), 3 + 2 + 2);
}

#[test]
fn a_broken_port_leaves_the_others_working() {
    let mut rig = probed(ALL);
    rig.linux.open(DT);
    rig.linux.open(TRACECTL);
    let memory = rig.linux.driver.memory.clone();
    let queue = transmit_queue(DT);
    rig.linux.driver.rings[usize::from(queue)].set_index(&memory, 1000);
    rig.linux.driver.notify(queue);
    rig.linux.driver.run();
    assert_ne!(rig.linux.driver.status() & status::NEEDS_RESET, 0);
    assert!(rig.linux.write(TRACECTL, b"on"));
    assert_eq!(rig.ends[TRACECTL as usize].got(), b"on");
    rig.linux.probe(ALL);
    rig.linux.open(DT);
    assert!(rig.linux.write(DT, b"again"));
    assert_eq!(rig.ends[DT as usize].got(), b"again");
}

/// A move of a random driver.
#[derive(Debug, Clone)]
enum Move {
    /// Writes into a queue's area: descriptors, rings and tables.
    Scribble {
        queue: u16,
        at: u16,
        bytes: Vec<u8>,
    },
    Descriptor {
        queue: u16,
        number: u16,
        raw: (u64, u32, u16, u16),
    },
    Publish {
        queue: u16,
        head: u16,
    },
    Index {
        queue: u16,
        index: u16,
    },
    Say {
        id: u32,
        event: u16,
        value: u16,
    },
    Send {
        queue: u16,
        length: u16,
    },
    Notify {
        queue: u32,
    },
    Register {
        offset: u32,
        value: u32,
    },
    Give {
        port: usize,
        length: u16,
    },
    Room {
        port: usize,
        room: usize,
    },
    Connect {
        port: u32,
        open: bool,
    },
    Sleep {
        time: u16,
    },
    Replace,
}

fn queue() -> impl Strategy<Value = u16> {
    0u16..10
}

fn moves() -> impl Strategy<Value = Move> {
    let address = prop_oneof![
        Just(BUFFERS),
        BUFFERS..BUFFERS + 0x1_0000,
        Just(MEMORY as u64 - 8),
        RINGS..RINGS + 10 * RING_AREA,
        any::<u64>(),
    ];
    let length = prop_oneof![0u32..64, Just(4096), any::<u32>()];
    let next = prop_oneof![0u16..66, any::<u16>()];
    let raw = (address, length, prop_oneof![0u16..8, any::<u16>()], next);
    prop_oneof![
        1 => (queue(), 0u16..0x7000, prop::collection::vec(any::<u8>(), 1..32))
            .prop_map(|(queue, at, bytes)| Move::Scribble { queue, at, bytes }),
        6 => (queue(), 0u16..64, raw)
            .prop_map(|(queue, number, raw)| Move::Descriptor { queue, number, raw }),
        6 => (queue(), prop_oneof![9 => 0u16..64, 1 => any::<u16>()])
            .prop_map(|(queue, head)| Move::Publish { queue, head }),
        1 => (queue(), any::<u16>()).prop_map(|(queue, index)| Move::Index { queue, index }),
        4 => (0u32..5, 0u16..9, 0u16..3)
            .prop_map(|(id, event, value)| Move::Say { id, event, value }),
        2 => (queue(), 1u16..9000).prop_map(|(queue, length)| Move::Send { queue, length }),
        4 => (0u32..11).prop_map(|queue| Move::Notify { queue }),
        1 => ((0u32..0x44).prop_map(|at| at * 4), prop_oneof![0u32..16, any::<u32>()])
            .prop_map(|(offset, value)| Move::Register { offset, value }),
        1 => (0usize..3, any::<u16>()).prop_map(|(port, length)| Move::Give { port, length }),
        1 => (0usize..3, 0usize..9000).prop_map(|(port, room)| Move::Room { port, room }),
        1 => (0u32..3, any::<bool>()).prop_map(|(port, open)| Move::Connect { port, open }),
        2 => (0u16..2000).prop_map(|time| Move::Sleep { time }),
        1 => Just(Move::Replace),
    ]
}

fn carry_out(rig: &mut Rig, what: &Move) {
    let driver = &mut rig.linux.driver;
    let memory = driver.memory.clone();
    match *what {
        Move::Scribble {
            queue,
            at,
            ref bytes,
        } => {
            let at = RINGS + u64::from(queue) * RING_AREA + u64::from(at);
            memory.write_slice(bytes, GuestAddress(at)).unwrap();
        }
        Move::Descriptor { queue, number, raw } => {
            let (address, length, flags, next) = raw;
            let descriptor = crate::virtio::mock::Descriptor {
                address,
                length,
                flags,
                next,
            };
            let table = RINGS + u64::from(queue) * RING_AREA;
            descriptor.store(&memory, table, number);
        }
        Move::Publish { queue, head } => {
            if let Some(ring) = driver.rings.get_mut(usize::from(queue)) {
                ring.publish(&memory, head);
            }
            driver.notify(queue);
        }
        Move::Index { queue, index } => {
            if let Some(ring) = driver.rings.get_mut(usize::from(queue)) {
                ring.set_index(&memory, index);
            }
        }
        Move::Say { id, event, value } => {
            let message = Message { id, event, value }.encode();
            driver.raw_send(CONTROL_TRANSMIT, &message);
        }
        Move::Send { queue, length } => driver.raw_send(queue, &vec![1; usize::from(length)]),
        Move::Notify { queue } => driver.write(0x050, queue),
        Move::Register { offset, value } => {
            driver.read(offset);
            driver.write(offset, value);
        }
        Move::Give { port, length } => rig.ends[port].give(&vec![7; usize::from(length)]),
        Move::Room { port, room } => rig.ends[port].with(|end| end.room = room),
        Move::Connect { port, open } => rig.host.connect(port, open),
        Move::Sleep { time } => {
            driver.sleep(Duration::from_millis(u64::from(time)));
        }
        Move::Replace => {
            let (console, ends, _) = device();
            rig.host = console.handle();
            // An invalid queue of the guest's is rejected, and the device reset.
            let _ = rig.linux.driver.replace(Box::new(console));
            rig.ends = ends;
        }
    }
    // Panics if the device does not come to rest.
    rig.linux.driver.run();
    rig.linux.driver.poll();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// For any content of queues, registers and messages, there is no panic and no endless work,
    /// and a new driver works.
    #[test]
    fn a_random_driver_does_no_harm(moves in prop::collection::vec(moves(), 1..60)) {
        let mut rig = probed(ALL);
        for what in &moves {
            carry_out(&mut rig, what);
        }
        for end in &rig.ends {
            end.with(|end| {
                *end = Behind { room: usize::MAX, ..Behind::default() };
            });
        }
        for id in 0..3 {
            rig.host.connect(id, true);
        }
        rig.linux.probe(ALL);
        rig.linux.open(DT);
        prop_assert!(rig.linux.write(DT, b"works"));
        prop_assert_eq!(rig.ends[DT as usize].got(), b"works");
    }

    /// The device writes into writable buffers and used rings, and nowhere else.
    #[test]
    fn nothing_but_writable_buffers_is_written(
        chain in prop::collection::vec((0u64..64, 1u32..300, any::<bool>()), 1..12),
        length in 0usize..6000,
        indirect in any::<bool>(),
    ) {
        let mut rig = rig();
        rig.linux.buffers = 1;
        rig.linux.probe(ALL);
        let driver = &mut rig.linux.driver;
        driver.indirect = indirect;
        let memory = driver.memory.clone();
        let area = 64 * 0x200;
        let pattern: Vec<u8> = (0..area).map(|at| (at % 251) as u8).collect();
        let base = GuestAddress(MEMORY as u64 - area as u64);
        memory.write_slice(&pattern, base).unwrap();
        let mut writable = vec![false; area];
        let buffers: Vec<_> = chain.iter().map(|&(slot, length, write)| {
            let at = slot as usize * 0x200;
            if write {
                writable[at..at + length as usize].fill(true);
                crate::virtio::mock::Descriptor::writable(base.0 + at as u64, length)
            } else {
                crate::virtio::mock::Descriptor::readable(base.0 + at as u64, length)
            }
        }).collect();
        driver.add_chain(receive_queue(DT), &buffers);
        driver.add_chain(transmit_queue(DT), &buffers);
        rig.linux.open(DT);
        rig.ends[DT as usize].give(&vec![0xff; 4096 + length]);
        rig.host_did();
        let mut after = vec![0; area];
        memory.read_slice(&mut after, base).unwrap();
        for (at, (&new, &old)) in after.iter().zip(&pattern).enumerate() {
            prop_assert!(writable[at] || new == old, "byte {} was written", at);
        }
    }
}
