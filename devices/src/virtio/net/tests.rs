#![allow(clippy::unwrap_used)]
//! The device with a driver on one side and a socket on the other.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use proptest::prelude::*;

use super::*;
use crate::virtio::mock::{Descriptor, Driver, Used, status};
use crate::virtio::{FEATURE_EVENT_INDEX, FEATURE_VERSION_1};

pub(super) const OPTIONS: NetOptions = NetOptions {
    mac: [2, 0, 0, 1, 2, 3],
    mtu: 1500,
    pairs: 1,
    segmentation: false,
    moved: false,
};
pub(super) const PLAIN: u64 =
    FEATURE_VERSION_1 | FEATURE_STATUS | FEATURE_CONTROL | FEATURE_ANNOUNCE;
pub(super) const MERGED: u64 = PLAIN | FEATURE_MERGED_BUFFERS;
/// The queue of commands of a device with one pair.
const COMMANDS: u16 = 2;
const INTERRUPT_OF_CONFIG: u32 = 2;

pub(super) fn device(socket: UnixStream, options: NetOptions) -> Box<Net> {
    let backend = StreamBackend::new(socket, false).unwrap();
    Box::new(Net::new(Some(Box::new(backend)), options))
}

/// Returns a driver that has probed its device, and the other side of its backend's socket.
pub(super) fn network(features: u64) -> (Driver, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    let mut driver = Driver::new(device(near, OPTIONS));
    driver.probe(features, 3);
    driver.run();
    (driver, far)
}

pub(super) fn frame(length: usize, seed: u8) -> Vec<u8> {
    (0..length)
        .map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

pub(super) fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes(), frame].concat()
}

/// Sends a frame as a driver does.
fn send(driver: &mut Driver, frame: &[u8]) {
    driver.add(TRANSMIT, &[&[0; HEADER], frame], &[]);
    driver.kick(TRANSMIT);
    driver.run();
}

/// Reads the frames that have come at the other side.
pub(super) fn arrived(far: &mut UnixStream) -> Vec<u8> {
    let mut all = Vec::new();
    let error = far.read_to_end(&mut all).err();
    assert!(error.is_none_or(|error| error.kind() == io::ErrorKind::WouldBlock));
    all
}

/// Returns the frames received by a queue, each of as many buffers as its header says.
pub(super) fn received(driver: &mut Driver, queue: u16) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut used = driver.used(queue).into_iter();
    while let Some(Used { bytes, .. }) = used.next() {
        let count = u16::from_le_bytes([bytes[10], bytes[11]]);
        assert_eq!(bytes[..10], [0; 10]);
        let mut frame = bytes[HEADER..].to_vec();
        for _ in 1..count {
            frame.extend(used.next().unwrap().bytes);
        }
        frames.push(frame);
    }
    frames
}

fn status_word(driver: &mut Driver) -> u32 {
    driver.read(0x104) >> 16 & 3
}

#[test]
fn a_driver_finds_address_mtu_and_link() {
    let (mut driver, _far) = network(PLAIN);
    let words = [0x100, 0x104, 0x108].map(|at| driver.read(at).to_le_bytes());
    let [low, high] = OPTIONS.mtu.to_le_bytes();
    assert_eq!(words.concat(), [2, 0, 0, 1, 2, 3, 1, 0, 1, 0, low, high]);
    let segments = NetOptions {
        segmentation: true,
        ..OPTIONS
    };
    for (options, offered) in [(OPTIONS, false), (segments, true)] {
        let mut driver = Driver::new(Box::new(Net::new(None, options)));
        assert_eq!(driver.offered() & SEGMENTATION != 0, offered);
        assert_eq!(status_word(&mut driver), 0, "a link without a backend");
        for (features, good) in [
            (FEATURE_ANNOUNCE | FEATURE_CONTROL, true),
            (FEATURE_ANNOUNCE, false),
            (FEATURE_HOST_TSO4 | FEATURE_CHECKSUM, offered),
            (FEATURE_HOST_TSO4, false),
            (FEATURE_GUEST_TSO6 | FEATURE_CHECKSUM, false),
        ] {
            let agreed = driver.negotiate(FEATURE_VERSION_1 | features);
            assert_eq!(agreed, good, "{features:#x}");
        }
    }
}

#[test]
fn frames_of_the_guest_arrive_behind_their_lengths() {
    let (mut driver, mut far) = network(PLAIN);
    for length in [14, 60, 1514, 9000, LONGEST_STREAM_FRAME] {
        send(&mut driver, &frame(length, 1));
        driver.poll();
        let mut all = Vec::new();
        // A large one takes several rounds.
        while all.len() < 4 + length {
            all.extend(arrived(&mut far));
            driver.poll();
        }
        assert!(all == framed(&frame(length, 1)), "{length}");
        assert_eq!(driver.used(TRANSMIT).len(), 1);
    }
    // What the socket's other side would not take is lost, as on a wire.
    send(&mut driver, &frame(LONGEST_STREAM_FRAME + 1, 1));
    assert_eq!(arrived(&mut far), b"");
    assert_eq!(driver.used(TRANSMIT).len(), 1);
    assert_eq!(driver.handle.queue_stats(TRANSMIT).rejected, 0);
}

#[test]
fn checksums_that_the_driver_leaves_are_completed() {
    let (mut driver, mut far) = network(PLAIN | FEATURE_CHECKSUM);
    let mut sent = vec![0; 20];
    sent[14..].copy_from_slice(&[0, 0, 0x12, 0x34, 0, 1]);
    let header = [1, 0, 0, 0, 0, 0, 14, 0, 0, 0, 0, 0];
    driver.add(TRANSMIT, &[&header, &sent], &[]);
    driver.kick(TRANSMIT);
    driver.run();
    let sum = !0x1235u16;
    sent[14..16].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(arrived(&mut far), framed(&sent));
}

#[test]
fn what_is_no_frame_comes_back_and_is_counted() {
    let good = [0u8; HEADER + 60];
    let with = |at: usize, value: u8| {
        let mut packet = good;
        packet[at] = value;
        packet.to_vec()
    };
    let (mut driver, mut far) = network(PLAIN);
    let long = vec![0; HEADER + LONGEST_FRAME + 1];
    for (readable, writable) in [
        (good.to_vec(), 1),
        (good[..HEADER + SHORTEST_FRAME - 1].to_vec(), 0),
        (good[..1].to_vec(), 0),
        (long, 0),
        // A checksum, and segments, which were not negotiated.
        (with(0, 1), 0),
        (with(1, 1), 0),
        (with(1, 0xff), 0),
    ] {
        let before = driver.handle.queue_stats(TRANSMIT).rejected;
        let writable: Vec<u32> = (writable > 0).then_some(writable).into_iter().collect();
        driver.add(TRANSMIT, &[&readable], &writable);
        driver.kick(TRANSMIT);
        driver.run();
        assert_eq!(driver.handle.queue_stats(TRANSMIT).rejected, before + 1);
        assert_eq!(driver.used(TRANSMIT)[0].length, 0);
    }
    driver.add(TRANSMIT, &[], &[100]);
    driver.kick(TRANSMIT);
    driver.run();
    assert_eq!(arrived(&mut far), b"");
    send(&mut driver, &frame(60, 0));
    assert_eq!(arrived(&mut far), framed(&frame(60, 0)));
}

#[test]
fn frames_for_the_guest_come_in_its_buffers() {
    // Features, the buffers' lengths, the frames' lengths, those that come.
    for (features, buffers, sent, come) in [
        (PLAIN, vec![1526; 3], vec![60, 1514, 14], vec![60, 1514, 14]),
        (PLAIN, vec![12 + 60; 3], vec![60, 61, 14], vec![60, 14]),
        (
            MERGED,
            vec![1526; 3],
            vec![60, 1514, 14],
            vec![60, 1514, 14],
        ),
        (MERGED, vec![1000; 7], vec![5000, 60], vec![5000, 60]),
        (MERGED, vec![12; 40], vec![60, 60], vec![60, 60]),
        (MERGED, vec![1000; 2], vec![5000, 60], vec![]),
    ] {
        let (mut driver, mut far) = network(features);
        for length in &buffers {
            driver.add(RECEIVE, &[], &[*length]);
        }
        driver.kick(RECEIVE);
        driver.run();
        for (seed, length) in (0..).zip(&sent) {
            far.write_all(&framed(&frame(*length, seed))).unwrap();
        }
        driver.interrupts();
        driver.poll();
        let frames = received(&mut driver, RECEIVE);
        let lengths: Vec<_> = frames.iter().map(Vec::len).collect();
        assert_eq!(lengths, come, "{buffers:?} {sent:?}");
        assert_eq!(driver.interrupts() > 0, !come.is_empty());
        for (seed, length) in (0..).zip(&sent) {
            let frame = frame(*length, seed);
            let expected = come.contains(length);
            assert_eq!(frames.contains(&frame), expected, "{length}");
        }
    }
}

#[test]
fn without_buffers_the_socket_is_left_alone_until_there_are_some() {
    let (mut driver, mut far) = network(MERGED);
    let mut sent = 0u8;
    // Until socket and device are full: the far side then waits.
    while far
        .write(&framed(&frame(1000, sent)))
        .is_ok_and(|length| length == 1004)
    {
        driver.poll();
        sent += 1;
        assert!(sent < 255, "all is taken, and held somewhere");
        if sent == 200 {
            break;
        }
    }
    assert!(received(&mut driver, RECEIVE).is_empty());
    let mut seen = 0;
    while seen < sent {
        while driver.rings[0].room() > 0 {
            driver.add(RECEIVE, &[], &[600]);
        }
        driver.kick(RECEIVE);
        driver.run();
        driver.poll();
        let frames = received(&mut driver, RECEIVE);
        assert!(!frames.is_empty(), "{seen} of {sent}");
        for got in frames {
            assert!(got == frame(1000, seen), "{seen}");
            seen += 1;
        }
    }
}

#[test]
fn a_frame_that_waits_for_buffers_is_woken_by_the_next_ones() {
    for features in [MERGED, MERGED | FEATURE_EVENT_INDEX] {
        let (mut driver, mut far) = network(features);
        far.write_all(&framed(&frame(5000, 1))).unwrap();
        driver.poll();
        // The driver notifies only as the device has asked it to.
        for at in 0..6 {
            assert_eq!(driver.used(RECEIVE), [], "{at}");
            driver.add(RECEIVE, &[], &[1000]);
            driver.kick(RECEIVE);
            driver.run();
        }
        assert!(
            received(&mut driver, RECEIVE) == [frame(5000, 1)],
            "{features:#x}"
        );
    }
}

#[test]
fn a_frame_larger_than_all_buffers_is_lost_and_the_next_one_comes() {
    let (mut driver, mut far) = network(MERGED);
    while driver.rings[0].room() > 0 {
        driver.add(RECEIVE, &[], &[100]);
    }
    driver.kick(RECEIVE);
    far.write_all(&framed(&frame(60_000, 1))).unwrap();
    far.write_all(&framed(&frame(200, 2))).unwrap();
    driver.run();
    driver.poll();
    assert!(received(&mut driver, RECEIVE) == [frame(200, 2)]);
}

#[test]
fn bad_buffers_among_good_ones_come_back() {
    let (mut driver, mut far) = network(MERGED);
    driver.add(RECEIVE, &[], &[100]);
    driver.add(RECEIVE, &[b"to read"], &[]);
    driver.add(RECEIVE, &[], &[11]);
    let outside = [Descriptor::writable(u64::MAX - 8, 100)];
    driver.add_chain(RECEIVE, &outside);
    driver.kick(RECEIVE);
    far.write_all(&framed(&frame(300, 1))).unwrap();
    driver.run();
    driver.poll();
    assert!(driver.used(RECEIVE).iter().all(|used| used.length == 0));
    for _ in 0..4 {
        driver.add(RECEIVE, &[], &[100]);
    }
    driver.kick(RECEIVE);
    driver.run();
    assert!(received(&mut driver, RECEIVE) == [frame(300, 1)]);
    assert!(driver.handle.queue_stats(RECEIVE).rejected >= 3);
}

#[test]
fn frames_wait_in_the_guests_queue_for_a_slow_peer() {
    let (mut driver, mut far) = network(PLAIN);
    const LENGTH: usize = 30_000;
    let mut sent = 0u8;
    while !driver.handle.wants_room() {
        driver.add(TRANSMIT, &[&[0; HEADER], &frame(LENGTH, sent)], &[]);
        driver.notify(TRANSMIT);
        driver.run();
        sent += 1;
        assert!(sent < 100, "the socket has no end");
    }
    let mut back = driver.used(TRANSMIT).len();
    for _ in 0..3 {
        driver.add(TRANSMIT, &[&[0; HEADER], &frame(LENGTH, sent)], &[]);
        sent += 1;
    }
    driver.notify(TRANSMIT);
    driver.run();
    back += driver.used(TRANSMIT).len();
    assert!(back + 3 <= usize::from(sent), "{back} of {sent} were taken");
    let mut all = Vec::new();
    while all.len() < usize::from(sent) * (4 + LENGTH) {
        let more = arrived(&mut far);
        assert!(!more.is_empty() || driver.handle.wants_room());
        all.extend(more);
        driver.poll();
    }
    let expected: Vec<u8> = (0..sent)
        .flat_map(|seed| framed(&frame(LENGTH, seed)))
        .collect();
    assert!(all == expected);
    assert!(!driver.handle.wants_room());
    back += driver.used(TRANSMIT).len();
    assert_eq!(back, usize::from(sent));
}

#[test]
fn all_frames_of_a_full_queue_are_sent_when_a_slow_peer_has_read() {
    let (mut driver, mut far) = network(PLAIN);
    while !driver.handle.wants_room() {
        driver.add(TRANSMIT, &[&[0; HEADER], &frame(30_000, 0)], &[]);
        driver.notify(TRANSMIT);
        driver.run();
    }
    driver.used(TRANSMIT);
    // More than are sent in one call, and less than the socket holds.
    for _ in 0..200 {
        driver.add(TRANSMIT, &[&[0; HEADER + 60]], &[]);
        driver.kick(TRANSMIT);
    }
    driver.run();
    while driver.handle.wants_room() {
        arrived(&mut far);
        driver.poll();
    }
    arrived(&mut far);
    driver.poll();
    let stats = driver.handle.queue_stats(TRANSMIT);
    assert_eq!(driver.used(TRANSMIT).len(), 201, "{stats:?}");
}

#[test]
fn a_closed_or_confused_peer_takes_the_link_down_and_the_device_lives() {
    let nonsense = [0xff; 8].to_vec();
    let short = framed(&[1; 13]);
    for bytes in [
        vec![],
        nonsense,
        short,
        framed(&frame(100, 1))[..50].to_vec(),
    ] {
        let (mut driver, mut far) = network(PLAIN);
        driver.add(RECEIVE, &[], &[2000]);
        driver.kick(RECEIVE);
        driver.run();
        assert_eq!(status_word(&mut driver), 1);
        far.write_all(&bytes).unwrap();
        drop(far);
        driver.interrupts();
        driver.poll();
        assert_eq!(driver.interrupts(), 1);
        assert_eq!(
            driver.read(0x060) & INTERRUPT_OF_CONFIG,
            INTERRUPT_OF_CONFIG
        );
        assert_eq!(status_word(&mut driver), 0);
        // Frames go nowhere now, and come back all the same.
        send(&mut driver, &frame(60, 1));
        send(&mut driver, &frame(60, 1));
        assert_eq!(driver.used(TRANSMIT).len(), 2);
        driver.poll();
        assert_eq!(driver.status() & status::NEEDS_RESET, 0);
        // For another driver as well.
        driver.probe(PLAIN, 3);
        driver.run();
        assert_eq!(status_word(&mut driver), 0);
    }
}

#[test]
fn a_peer_that_closes_is_noticed_by_a_frame_too() {
    let (mut driver, far) = network(PLAIN);
    drop(far);
    send(&mut driver, &frame(60, 1));
    assert_eq!(status_word(&mut driver), 0);
    assert_eq!(driver.used(TRANSMIT).len(), 1);
}

#[test]
fn a_restored_device_on_its_old_network_announces_its_guest_at_once() {
    for (features, announced) in [(PLAIN, 2), (PLAIN & !FEATURE_ANNOUNCE, 0)] {
        let (mut driver, _far) = network(features);
        let (near, mut new) = UnixStream::pair().unwrap();
        new.set_nonblocking(true).unwrap();
        driver.replace(device(near, OPTIONS)).unwrap();
        driver.run();
        assert_eq!(status_word(&mut driver), 1 | announced);
        assert_eq!((driver.interrupts(), driver.handle.deadline()), (1, None));
        send(&mut driver, &frame(60, 1));
        assert_eq!(arrived(&mut new), framed(&frame(60, 1)));
    }
}

#[test]
fn a_restored_device_on_another_network_announces_its_guest_after_a_moment() {
    for (features, announced) in [(PLAIN, 2), (PLAIN & !FEATURE_ANNOUNCE, 0)] {
        let (mut driver, far) = network(features);
        let (near, mut new) = UnixStream::pair().unwrap();
        new.set_nonblocking(true).unwrap();
        let moved = NetOptions {
            moved: true,
            ..OPTIONS
        };
        driver.replace(device(near, moved)).unwrap();
        drop(far);
        driver.run();
        // Down, which is reported to the driver, and up again.
        assert_eq!(status_word(&mut driver), 0);
        assert_eq!(driver.interrupts(), 1);
        assert_eq!(driver.sleep(Duration::from_secs(10)), LINK_PAUSE);
        assert_eq!(status_word(&mut driver), 1 | announced);
        assert_eq!(driver.interrupts(), 1);
        driver.add(COMMANDS, &[&[3, 0]], &[1]);
        driver.kick(COMMANDS);
        driver.run();
        let answer = driver.used(COMMANDS)[0].bytes[0];
        assert_eq!(answer == 0, announced != 0);
        assert_eq!(status_word(&mut driver), 1);
        assert_eq!(driver.handle.deadline(), None);
        send(&mut driver, &frame(60, 1));
        assert_eq!(arrived(&mut new), framed(&frame(60, 1)));
    }
}

#[test]
fn a_restored_device_without_a_backend_stays_down() {
    let (mut driver, _far) = network(PLAIN);
    driver.replace(Box::new(Net::new(None, OPTIONS))).unwrap();
    driver.run();
    driver.sleep(Duration::from_secs(10));
    assert_eq!(status_word(&mut driver) & 1, 0);
    send(&mut driver, &frame(60, 1));
    assert_eq!(driver.used(TRANSMIT).len(), 1);
}

#[test]
fn unknown_commands_are_answered_with_an_error() {
    let (mut driver, _far) = network(PLAIN);
    // Queue 1 of 1 pair is for frames.
    for (command, answers) in [
        (&[0, 0, 1][..], 1),
        (&[4, 0, 2, 0], 1),
        (&[3, 1], 1),
        (&[3], 0),
    ] {
        driver.add(COMMANDS, &[command], &[1]);
        driver.kick(COMMANDS);
        driver.run();
        let used = driver.used(COMMANDS);
        assert_eq!(used[0].bytes, vec![1; answers], "{command:?}");
    }
    driver.add(COMMANDS, &[&[3, 0]], &[]);
    driver.kick(COMMANDS);
    driver.run();
    assert_eq!(driver.handle.queue_stats(COMMANDS).rejected, 2);
}

proptest! {
    /// Frames come whole and in order, in whatever pieces the socket has them.
    #[test]
    fn frames_come_whole_in_any_pieces(
        lengths in prop::collection::vec(14usize..3000, 1..20),
        pieces in prop::collection::vec(1usize..2000, 1..60),
    ) {
        let (mut driver, mut far) = network(MERGED);
        while driver.rings[0].room() > 0 {
            driver.add(RECEIVE, &[], &[1000]);
        }
        driver.kick(RECEIVE);
        let sent: Vec<_> = (0..).zip(&lengths).map(|(seed, length)| frame(*length, seed)).collect();
        let mut bytes: &[u8] = &sent.iter().flat_map(|frame| framed(frame)).collect::<Vec<_>>();
        let mut got = Vec::new();
        for piece in pieces.iter().cycle() {
            let (now, later) = bytes.split_at((*piece).min(bytes.len()));
            far.write_all(now).unwrap();
            driver.poll();
            got.extend(received(&mut driver, RECEIVE));
            bytes = later;
            if bytes.is_empty() {
                break;
            }
        }
        prop_assert!(got == sent);
    }
}
