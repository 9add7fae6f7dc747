//! Tests of a port's bytes in both directions: in order, in bounded calls, and without room on one
//! side.

use super::*;

#[test]
fn bytes_go_both_ways_while_a_port_is_open() {
    let mut rig = probed(ALL);
    let end = rig.ends[DT as usize].clone();
    end.give(b"early");
    rig.host_did();
    assert_eq!(rig.linux.read_all(DT), b"", "nobody has it open");
    rig.linux.open(DT);
    assert_eq!(rig.linux.read(DT), Read::Bytes(b"early".to_vec()));
    assert_eq!(rig.linux.read(DT), Read::Waits);
    end.give(b"late");
    rig.host_did();
    assert_eq!(rig.linux.read(DT), Read::Bytes(b"late".to_vec()));
    assert!(rig.linux.write(DT, b"probe {}\n"));
    rig.linux.close(DT);
    assert_eq!(end.got(), b"probe {}\n");
    assert_eq!(
        end.with(|end| (end.opens, end.closes.clone())),
        (1, vec![0])
    );
    let stats = rig.host.port_stats(DT).unwrap();
    assert_eq!((stats.to_guest, stats.from_guest, stats.dropped), (9, 9, 0));
    assert!(!stats.guest_open && stats.connected);
}

#[test]
fn one_write_is_one_call_and_comes_before_the_close() {
    let mut rig = probed(ALL);
    let end = rig.ends[TRACECTL as usize].clone();
    let long = vec![b'x'; 32 * 1024];
    rig.linux.open(TRACECTL);
    assert!(rig.linux.write(TRACECTL, &long));
    // The notification of these bytes comes after that of the close.
    rig.linux
        .driver
        .add(transmit_queue(TRACECTL), &[b"st", b"op\n"], &[]);
    rig.linux.say(TRACECTL, Event::PortOpen, 0);
    assert_eq!(end.with(|end| end.calls.clone()), [32 * 1024, 5]);
    assert_eq!(end.got()[long.len()..], *b"stop\n");
}

#[test]
fn a_flood_of_writes_does_not_cut_one_of_them() {
    let mut rig = probed(ALL);
    rig.linux.open(DT);
    let lengths: Vec<usize> = (0..60).map(|at| [32 * 1024, 100, 7000][at % 3]).collect();
    for &length in &lengths {
        rig.linux
            .driver
            .add(transmit_queue(DT), &[&vec![b'x'; length]], &[]);
    }
    rig.linux.driver.notify(transmit_queue(DT));
    rig.linux.driver.run();
    assert!(rig.linux.driver.calls > 1);
    assert_eq!(rig.ends[DT as usize].with(|end| end.calls.clone()), lengths);
}

#[test]
fn what_the_guest_did_not_read_is_told_when_it_closes() {
    let mut rig = probed(ALL);
    let end = rig.ends[DT as usize].clone();
    end.give(&vec![b'x'; 10_000]);
    rig.linux.open(DT);
    assert_eq!(rig.linux.read(DT), Read::Bytes(vec![b'x'; 4096]));
    rig.linux.close(DT);
    rig.linux.open(DT);
    assert_eq!(rig.linux.read(DT), Read::Waits, "they are gone");
    end.give(b"yz");
    rig.host_did();
    assert_eq!(rig.linux.read_all(DT), b"yz");
    rig.linux.close(DT);
    assert_eq!(end.with(|end| end.closes.clone()), [10_000 - 4096, 0]);
}

#[test]
fn a_host_without_room_holds_its_own_port_only() {
    let mut rig = probed(ALL);
    let [console, dt, tracectl] = &rig.ends[..] else {
        panic!()
    };
    for end in [console, dt] {
        end.with(|end| end.room = 10);
    }
    rig.linux.open(DT);
    rig.linux.open(TRACECTL);
    let mut written = 0;
    while rig.linux.write(DT, b"1234567") {
        written += 1;
        assert!(written <= 65, "the guest is never stopped");
    }
    assert_eq!(
        written, 65,
        "one was taken, and the queue has 64 descriptors"
    );
    assert_eq!(dt.got(), b"1234567123");
    // The console's driver spins until its bytes are accepted, so they are dropped and counted.
    for _ in 0..100 {
        assert!(rig.linux.write(0, b"1234567"));
    }
    assert_eq!(console.got(), b"1234567123");
    assert_eq!(rig.host.port_stats(0).unwrap().dropped, 690);
    assert!(rig.linux.write(TRACECTL, b"goes on"));
    assert_eq!(tracectl.got(), b"goes on");
    // In pieces of any size, everything comes in order.
    let mut rest = Vec::new();
    for room in (1..200).cycle().take(400) {
        dt.with(|end| end.room = room);
        rig.linux.driver.poll();
        rest.extend(dt.got());
    }
    let all = b"1234567".repeat(65);
    assert!(rest == all[10..]);
    assert!(rig.linux.write(DT, b"1234567"));
}

#[test]
fn a_guest_without_room_leaves_bytes_with_the_far_end() {
    let mut rig = rig();
    rig.linux.buffers = 3;
    rig.linux.probe(ALL);
    let end = rig.ends[DT as usize].clone();
    let sent: Vec<u8> = (0..100_000u32).map(|at| at as u8).collect();
    end.give(&sent);
    rig.linux.open(DT);
    rig.host_did();
    assert_eq!(end.with(|end| end.waiting.len()), sent.len() - 3 * 4096);
    assert!(rig.linux.read_all(DT) == sent);
    assert_eq!(end.with(|end| end.waiting.len()), 0);
}

#[test]
fn a_flood_is_taken_in_bounded_calls() {
    let mut rig = probed(ALL);
    rig.linux.open(DT);
    let end = rig.ends[DT as usize].clone();
    let piece = vec![b'x'; 32 * 1024];
    for _ in 0..64 {
        rig.linux.driver.add(transmit_queue(DT), &[&piece], &[]);
    }
    let handle = rig.linux.driver.handle.clone();
    let mut calls = 1;
    while handle.process(transmit_queue(DT), rig.linux.driver.now) == Progress::More {
        let got = end.with(|end| end.got.len());
        assert_eq!(got, calls * 256 * 1024);
        calls += 1;
    }
    assert_eq!(end.with(|end| end.got.len()), 64 * 32 * 1024);
    // The other direction as well.
    end.give(&vec![b'y'; 2 << 20]);
    let handle = rig.linux.driver.handle.clone();
    let mut before = 2 << 20;
    while handle.poll(rig.linux.driver.now) == Progress::More {
        let left = end.with(|end| end.waiting.len());
        assert_eq!(
            before - left,
            256 * 1024,
            "as much as the guest has room for"
        );
        before = left;
    }
}
