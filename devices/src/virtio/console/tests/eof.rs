//! Tests of ends of file, as programs in the guest see them.

use std::time::Duration;

use super::*;

const FILE: &[u8] = b"start\n";

fn file() -> (Rig, End) {
    let rig = probed(ALL);
    let end = rig.ends[TRACECTL as usize].clone();
    end.with(|end| end.on_open = FILE.to_vec());
    (rig, end)
}

/// Advances time. Returns the number of times that the host side was seen closing.
fn wait(rig: &mut Rig, time: Duration) -> usize {
    let end = rig.linux.driver.now + time;
    let mut closes = 0;
    rig.said();
    while rig.linux.driver.now < end {
        let left = end - rig.linux.driver.now;
        rig.linux.driver.sleep(left);
        rig.linux.work();
        let said = rig.said();
        closes += said
            .iter()
            .filter(|line| line.ends_with("PortOpen 0"))
            .count();
    }
    closes
}

#[test]
fn cat_ends() {
    let (mut rig, end) = file();
    for round in 1..5 {
        assert_eq!(rig.linux.cat(TRACECTL).as_deref(), Some(FILE));
        assert_eq!(
            end.with(|end| (end.opens, end.closes.len())),
            (round, round)
        );
    }
    let long = vec![b'x'; 1 << 20];
    end.with(|end| end.on_open.clone_from(&long));
    let read = rig.linux.cat(TRACECTL).map(|bytes| bytes.len());
    assert_eq!(read, Some(long.len()));
    end.with(|end| end.on_open.clear());
    assert_eq!(rig.linux.cat(TRACECTL).as_deref(), Some(&b""[..]));
    assert!(!rig.host.port_stats(TRACECTL).unwrap().guest_open);
}

#[test]
fn a_stream_does_not_end() {
    let mut rig = probed(ALL);
    rig.ends[DT as usize].give(b"event\n");
    assert_eq!(rig.linux.cat(DT), None);
    assert_eq!(rig.host.port_stats(DT).unwrap().ends, 0);
}

#[test]
fn the_end_comes_again_while_a_port_is_idle_and_stops_with_it() {
    let (mut rig, end) = file();
    let second = Duration::from_secs(1);
    assert_eq!(wait(&mut rig, second), 0, "nobody has it open");
    rig.linux.open(TRACECTL);
    assert_eq!(
        wait(&mut rig, second),
        0,
        "the guest has not read everything"
    );
    assert_eq!(rig.linux.read(TRACECTL), Read::Bytes(FILE.to_vec()));
    let closes = wait(&mut rig, second);
    assert!((3..=5).contains(&closes), "{closes} in a second");
    let ends = rig.host.port_stats(TRACECTL).unwrap().ends;
    assert!((2..=5).contains(&ends), "{ends} counted");
    rig.host.connect(TRACECTL, false);
    rig.host_did();
    assert_eq!(wait(&mut rig, second), 0, "it is closed");
    rig.host.connect(TRACECTL, true);
    rig.host_did();
    assert!(wait(&mut rig, second) > 0);
    rig.linux.close(TRACECTL);
    assert_eq!(wait(&mut rig, second), 0, "nobody has it open");
    assert!(
        rig.linux.ports[&TRACECTL].host_connected,
        "a writer may write"
    );
    assert_eq!(
        rig.linux.driver.handle.deadline(),
        None,
        "nothing is to be done"
    );
    assert_eq!(end.with(|end| end.opens), 1);
}

#[test]
fn the_host_side_opens_again_after_the_driver_has_seen_it_closed() {
    let (mut rig, _) = file();
    rig.linux.open(TRACECTL);
    rig.linux.read(TRACECTL);
    let start = rig.linux.driver.now;
    // The driver's work queue has not run yet.
    let mut message = Vec::new();
    while message.is_empty() {
        rig.linux.driver.sleep(Duration::from_millis(100));
        message = rig.linux.driver.used(CONTROL_RECEIVE);
    }
    let closed = rig.linux.driver.now;
    assert_eq!(closed - start, Duration::from_millis(20));
    for _ in 0..20 {
        rig.linux.driver.sleep(Duration::from_millis(10));
        assert_eq!(rig.linux.driver.used(CONTROL_RECEIVE), []);
    }
    // The driver has handled the message: the buffer is back.
    rig.linux
        .driver
        .add_chain(CONTROL_RECEIVE, &message[0].chain);
    let handled = rig.linux.driver.now;
    while rig.linux.driver.used(CONTROL_RECEIVE).is_empty() {
        rig.linux.driver.sleep(Duration::from_millis(10));
    }
    let seen = rig.linux.driver.now - handled;
    let most = Duration::from_millis(70);
    assert!(seen >= Duration::from_millis(50) && seen < most, "{seen:?}");
}

#[test]
fn a_driver_that_gives_no_buffer_back_does_not_keep_the_port_closed() {
    let (mut rig, _) = file();
    rig.linux.open(TRACECTL);
    rig.linux.read(TRACECTL);
    let mut events = Vec::new();
    let end = rig.linux.driver.now + Duration::from_secs(2);
    while rig.linux.driver.now < end {
        rig.linux.driver.sleep(Duration::from_millis(10));
        for used in rig.linux.driver.used(CONTROL_RECEIVE) {
            events.push(Message::decode(*used.bytes.first_chunk().unwrap()).value);
        }
    }
    assert_eq!(events[..2], [0, 1]);
}

#[test]
fn a_writer_is_not_kept_waiting() {
    let (mut rig, end) = file();
    rig.linux.open(TRACECTL);
    assert!(
        rig.linux.write(TRACECTL, b"first"),
        "at once after its open"
    );
    rig.linux.read(TRACECTL);
    let mut waits = 0;
    for _ in 0..200 {
        rig.linux.driver.sleep(Duration::from_millis(10));
        rig.linux.work();
        if !rig.linux.write(TRACECTL, b".") {
            waits += 1;
            assert!(waits < 12, "it waited for longer than a tenth of a second");
        } else {
            waits = 0;
        }
    }
    assert!(end.got().starts_with(b"first..."));
}

#[test]
fn bytes_that_come_while_the_end_is_shown_are_read_after_it() {
    let (mut rig, end) = file();
    rig.linux.open(TRACECTL);
    rig.linux.read(TRACECTL);
    while rig.linux.ports[&TRACECTL].host_connected {
        rig.linux.driver.sleep(Duration::from_millis(10));
        rig.linux.work();
    }
    assert_eq!(rig.linux.read(TRACECTL), Read::End);
    end.give(b"more");
    rig.host_did();
    assert_eq!(rig.linux.read(TRACECTL), Read::Bytes(b"more".to_vec()));
}

#[test]
fn a_restored_port_that_was_shown_as_closed_opens() {
    let (mut rig, _) = file();
    rig.linux.open(TRACECTL);
    rig.linux.read(TRACECTL);
    while rig.linux.ports[&TRACECTL].host_connected {
        rig.linux.driver.sleep(Duration::from_millis(10));
        rig.linux.work();
    }
    let (console, ends, _) = device();
    rig.linux.replace(Box::new(console)).unwrap();
    rig.ends = ends;
    rig.host_did();
    assert!(rig.linux.ports[&TRACECTL].host_connected);
    assert!(wait(&mut rig, Duration::from_secs(1)) > 0, "and ends again");
}

#[test]
fn a_driver_without_buffers_hears_of_the_end_when_it_has_some() {
    let (mut rig, _) = file();
    rig.linux.open(TRACECTL);
    rig.linux.read(TRACECTL);
    rig.host.connect(TRACECTL, false);
    rig.host_did();
    // Unhandled messages use up all buffers.
    for columns in 0..64 {
        rig.host.resize(Size { columns, rows: 24 });
        rig.linux.driver.poll();
    }
    rig.host.connect(TRACECTL, true);
    for _ in 0..20 {
        rig.linux.driver.sleep(Duration::from_millis(50));
    }
    rig.linux.work();
    assert!(rig.linux.ports[&TRACECTL].host_connected);
    assert!(wait(&mut rig, Duration::from_secs(1)) > 0);
}

#[test]
fn a_port_that_is_closed_while_the_end_is_shown_opens_again() {
    let (mut rig, _) = file();
    for _ in 0..3 {
        rig.linux.open(TRACECTL);
        rig.linux.read(TRACECTL);
        while rig.linux.ports[&TRACECTL].host_connected {
            rig.linux.driver.sleep(Duration::from_millis(10));
            rig.linux.work();
        }
        rig.linux.close(TRACECTL);
        rig.linux.work();
        rig.linux.open(TRACECTL);
        assert!(rig.linux.write(TRACECTL, b"at once"));
        rig.linux.close(TRACECTL);
    }
}
