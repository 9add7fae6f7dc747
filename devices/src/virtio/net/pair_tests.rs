#![allow(clippy::unwrap_used)]
//! Several pairs of queues: the choice of the driver, the way of each flow, and a restored device.

use std::io::Write;
use std::os::unix::net::UnixStream;

use super::tests::{MERGED, OPTIONS, PLAIN, arrived, device, frame, framed, received};
use super::*;
use crate::virtio::mock::Driver;

const PAIRS: NetOptions = NetOptions {
    pairs: 3,
    ..OPTIONS
};
/// The queue of commands of a driver that knows pairs.
const COMMANDS: u16 = 6;
const SET_PAIRS: [u8; 2] = [4, 0];

fn pairs(features: u64) -> (Driver, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    let mut driver = Driver::new(device(near, PAIRS));
    driver.probe(features, 7);
    driver.run();
    (driver, far)
}

/// Sends a command and returns the answer.
fn command(driver: &mut Driver, queue: u16, words: &[&[u8]]) -> u8 {
    driver.add(queue, words, &[1]);
    driver.kick(queue);
    driver.run();
    driver.used(queue)[0].bytes[0]
}

/// Returns a frame of UDP from a port to another one, between the same addresses.
fn datagram(from: u16, to: u16) -> Vec<u8> {
    let mut frame = frame(60, 0);
    frame[12..16].copy_from_slice(&[0x08, 0, 0x45, 0]);
    frame[20..24].copy_from_slice(&[0, 0, 64, 17]);
    frame[26..34].fill(9);
    frame[34..36].copy_from_slice(&from.to_be_bytes());
    frame[36..38].copy_from_slice(&to.to_be_bytes());
    frame
}

/// Sends a frame by a pair, and checks that it arrives.
fn send(driver: &mut Driver, far: &mut UnixStream, pair: u16, frame: &[u8]) {
    let queue = TRANSMIT + 2 * pair;
    driver.add(queue, &[&[0; HEADER], frame], &[]);
    driver.kick(queue);
    driver.run();
    assert_eq!(arrived(far), framed(frame));
    assert_eq!(driver.used(queue).len(), 1);
}

#[test]
fn a_driver_chooses_how_many_pairs_it_uses() {
    let (mut driver, _far) = pairs(PLAIN | FEATURE_PAIRS);
    assert_eq!(driver.read(0x108) & 0xffff, 3);
    for (count, answer) in [
        ([0, 0], 1),
        ([3, 0], 0),
        ([4, 0], 1),
        ([2, 1], 1),
        ([1, 0], 0),
    ] {
        let answered = command(&mut driver, COMMANDS, &[&SET_PAIRS, &count]);
        assert_eq!(answered, answer, "{count:?}");
    }
    assert_eq!(command(&mut driver, COMMANDS, &[&SET_PAIRS, &[3]]), 1);
    // One that does not know pairs has its commands where they are without.
    let (mut driver, _far) = pairs(PLAIN);
    assert_eq!(command(&mut driver, 2, &[&[3, 0]]), 0);
    assert_eq!(command(&mut driver, 2, &[&SET_PAIRS, &[3, 0]]), 1);
    assert!(!driver.negotiate(crate::virtio::FEATURE_VERSION_1 | FEATURE_PAIRS));
}

#[test]
fn answers_come_by_the_pair_of_their_requests_also_after_a_restore() {
    let (mut driver, mut far) = pairs(MERGED | FEATURE_PAIRS);
    assert_eq!(command(&mut driver, COMMANDS, &[&SET_PAIRS, &[3, 0]]), 0);
    for pair in 0..3 {
        for _ in 0..8 {
            driver.add(RECEIVE + 2 * pair, &[], &[2000]);
        }
        driver.kick(RECEIVE + 2 * pair);
    }
    driver.run();
    for restored in [false, true] {
        if restored {
            let (near, new) = UnixStream::pair().unwrap();
            new.set_nonblocking(true).unwrap();
            driver.replace(device(near, PAIRS)).unwrap();
            driver.run();
            far = new;
        }
        for pair in 0..3 {
            send(&mut driver, &mut far, pair, &datagram(1000 + pair, 53));
        }
        for pair in 0..3 {
            let answer = datagram(53, 1000 + pair);
            far.write_all(&framed(&answer)).unwrap();
            driver.poll();
            assert!(
                received(&mut driver, RECEIVE + 2 * pair) == [answer],
                "{pair}"
            );
        }
        // No request was sent for it.
        far.write_all(&framed(&frame(60, 7))).unwrap();
        driver.poll();
        assert_eq!(received(&mut driver, RECEIVE).len(), 1);
    }
    // A device with fewer pairs cannot go on.
    let two = NetOptions { pairs: 2, ..PAIRS };
    let error = driver.replace(Box::new(Net::new(None, two))).unwrap_err();
    assert!(error.to_string().contains("with 7 queues"), "{error}");
}

#[test]
fn a_pair_without_buffers_does_not_stop_those_that_send() {
    let (mut driver, mut far) = pairs(MERGED | FEATURE_PAIRS);
    assert_eq!(command(&mut driver, COMMANDS, &[&SET_PAIRS, &[2, 0]]), 0);
    send(&mut driver, &mut far, 1, &datagram(1, 53));
    far.write_all(&framed(&datagram(53, 1))).unwrap();
    driver.poll();
    send(&mut driver, &mut far, 0, &datagram(2, 53));
    driver.add(RECEIVE + 2, &[], &[2000]);
    driver.kick(RECEIVE + 2);
    driver.run();
    assert!(received(&mut driver, RECEIVE + 2) == [datagram(53, 1)]);
}
