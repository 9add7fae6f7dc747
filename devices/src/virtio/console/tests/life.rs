//! Tests of resets, new drivers and snapshots.

use super::*;

#[test]
fn a_reset_closes_ports_and_a_new_driver_finds_them() {
    let mut rig = probed(ALL);
    for round in 1..4 {
        rig.linux.open(DT);
        rig.ends[DT as usize].give(b"unread");
        rig.host_did();
        rig.linux.driver.write(0x070, 0);
        let closes = rig.ends[DT as usize].with(|end| end.closes.clone());
        assert_eq!(closes, vec![6; round]);
        assert!(!rig.host.port_stats(DT).unwrap().guest_open);
        rig.linux.probe(ALL);
        assert_eq!(rig.linux.ports.len(), 3);
        rig.linux.open(DT);
        assert!(rig.linux.write(DT, b"again"));
        assert_eq!(rig.ends[DT as usize].got(), b"again");
        assert!(rig.linux.ports[&DT].host_connected);
        rig.linux.close(DT);
        rig.ends[DT as usize].with(|end| {
            assert_eq!(end.closes.pop(), Some(0));
        });
    }
}

/// `virtcons_restore` resets the device, and sends of its ports only that they are ready and open.
#[test]
fn a_driver_that_wakes_up_keeps_its_ports() {
    let mut rig = probed(ALL);
    rig.linux.open(DT);
    let ports = rig.linux.ports.clone();
    let queues = usize::from(rig.linux.driver.handle.queues());
    rig.linux.driver.probe(ALL, queues);
    for _ in 0..8 {
        rig.linux.driver.add(CONTROL_RECEIVE, &[], &[4096]);
    }
    rig.said();
    for &id in ports.keys() {
        rig.linux.driver.add(receive_queue(id), &[], &[4096]);
        rig.linux.say(id, Event::PortReady, 1);
        if ports[&id].guest_connected {
            rig.linux.say(id, Event::PortOpen, 1);
        }
    }
    let said = rig.linux.driver.used(CONTROL_RECEIVE);
    let added = |message: &Message| message.event == Event::DeviceAdd as u16;
    let decode = |bytes: &[u8]| Message::decode(*bytes.first_chunk().unwrap());
    let added = said.iter().map(|used| decode(&used.bytes)).filter(added);
    assert_eq!(added.map(|message| message.id).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(rig.ends[DT as usize].with(|end| end.opens), 2);
}

#[test]
fn a_snapshot_in_the_middle_of_traffic_loses_nothing() {
    let mut rig = probed(ALL);
    let mut expected = Vec::new();
    let mut got = Vec::new();
    rig.linux.open(DT);
    rig.linux.open(TRACECTL);
    let mut to_guest = Vec::new();
    for round in 0..25u8 {
        // The backend accepts a part of a buffer before the machine is saved.
        let end = rig.ends[DT as usize].clone();
        end.with(|end| end.room = 5);
        for number in 0..10 {
            let bytes = [round, number, 1, 2, 3, 4, 5, 6, 7, 8];
            assert!(rig.linux.write(DT, &bytes));
            expected.extend(bytes);
        }
        end.give(&[round; 5000]);
        to_guest.extend([round; 5000]);
        rig.linux.driver.poll();
        got.extend(end.got());
        let (console, ends, _) = device();
        rig.host = console.handle();
        rig.linux.replace(Box::new(console)).unwrap();
        rig.ends = ends;
        let end = rig.ends[DT as usize].clone();
        assert_eq!(end.with(|end| end.opens), 1, "it learns that it is open");
        rig.host_did();
        got.extend(end.got());
    }
    assert!(got == expected);
    assert!(rig.linux.read_all(DT) == to_guest);
    assert_eq!(rig.linux.ports.len(), 3);
    assert!(rig.host.port_stats(TRACECTL).unwrap().guest_open);
}

#[test]
fn ports_that_are_other_ones_after_a_restore_are_told() {
    let mut rig = probed(ALL);
    rig.said();
    let restored = |names: &[&str]| {
        let mut ports: Vec<PortAndBackend> = vec![(PortConfig::console(), Box::new(NullBackend))];
        for name in names {
            ports.push((
                PortConfig::named(name, EndOfFile::Never),
                Box::new(NullBackend),
            ));
        }
        let config = ConsoleConfig {
            ports,
            max_ports: 4,
            size: SIZE,
        };
        Box::new(Console::new(config, || {}).unwrap())
    };
    let state = rig.linux.driver.transport.state();
    let error = rig.linux.replace(restored(&["trace", "tracectl"]));
    assert_eq!(
        error.unwrap_err().to_string(),
        "state of the virtio console: port 1 was `dt`, it is `trace` now; the snapshot is damaged or of another configuration"
    );
    let driver = &mut rig.linux.driver;
    driver.restore(restored(&["dt"]), &state).unwrap();
    rig.host_did();
    assert_eq!(rig.said(), ["2 DeviceRemove 0"]);
    rig.linux
        .replace(restored(&["dt", "trace", "ptrace"]))
        .unwrap();
    rig.host_did();
    assert_eq!(rig.linux.ports[&2].name.as_deref(), Some("trace"));
    assert_eq!(rig.linux.ports[&3].name.as_deref(), Some("ptrace"));
}

#[test]
fn a_damaged_state_is_refused() {
    let (console, ..) = device();
    let good = console.save();
    for length in 0..good.len() {
        let (mut console, ..) = device();
        assert!(console.restore(&good[..length], None).is_err(), "{length}");
    }
    let (mut console, ..) = device();
    assert_eq!(console.restore(&good, None), Ok(()));
}

/// A vCPU resets and probes while the device's thread and the host use the device. Nobody waits for
/// ever, and the last driver works.
#[test]
fn registers_and_the_devices_thread_go_on_beside_each_other() {
    let mut rig = rig();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let handle = rig.linux.driver.handle.clone();
    let host = rig.host.clone();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut turn = 0u16;
            while !stop.load(Ordering::Relaxed) {
                turn = turn.wrapping_add(1);
                handle.process(turn % handle.queues(), Instant::now());
                handle.poll(Instant::now());
                host.connect(DT, turn.is_multiple_of(2));
                std::hint::black_box(handle.deadline());
            }
        });
        let queues = usize::from(rig.linux.driver.handle.queues());
        for _ in 0..200 {
            rig.linux.driver.probe(ALL, queues);
            for _ in 0..8 {
                rig.linux.driver.add(CONTROL_RECEIVE, &[], &[64]);
            }
            rig.linux.say(BAD_ID, Event::DeviceReady, 1);
            rig.linux.say(DT, Event::PortReady, 1);
            rig.linux.say(DT, Event::PortOpen, 1);
            rig.linux.driver.add(transmit_queue(DT), &[b"x"], &[]);
            rig.linux.driver.notify(transmit_queue(DT));
            rig.linux.driver.run();
        }
        stop.store(true, Ordering::Relaxed);
    });
    rig.host.connect(DT, true);
    rig.linux.probe(ALL);
    rig.linux.open(DT);
    rig.ends[DT as usize].got();
    assert!(rig.linux.write(DT, b"last"));
    assert_eq!(rig.ends[DT as usize].got(), b"last");
}
