//! Tests of backends that need a while for an open or a close. The guest's call waits for them,
//! other queues do not.

use super::*;

/// Sends the driver's open or close of the slow file. The message waits.
fn say(rig: &mut Rig, value: u16) {
    let message = Message::new(TRACECTL, Event::PortOpen, value).encode();
    rig.linux.driver.add(CONTROL_TRANSMIT, &[&message], &[]);
    rig.linux.driver.kick(CONTROL_TRANSMIT);
    rig.linux.driver.run();
}

fn answered(rig: &mut Rig) -> bool {
    rig.linux.driver.run();
    rig.linux.driver.used(CONTROL_TRANSMIT).len() == 1
}

fn slow() -> (Rig, End) {
    let rig = probed(ALL);
    let end = rig.ends[TRACECTL as usize].clone();
    end.with(|end| end.slow = true);
    (rig, end)
}

#[test]
fn the_guests_open_returns_when_its_far_end_is_ready() {
    let (mut rig, end) = slow();
    say(&mut rig, 1);
    rig.linux.driver.poll();
    assert!(!answered(&mut rig));
    // Another port continues meanwhile.
    rig.ends[0].give(b"console");
    rig.linux.driver.poll();
    assert_eq!(rig.linux.read_all(0), b"console");
    end.give(b"the file");
    end.with(|end| end.busy = false);
    rig.linux.driver.poll();
    assert!(answered(&mut rig));
    let got = rig.linux.driver.used(4 + 2);
    assert_eq!(
        got.iter()
            .map(|used| used.bytes.as_slice())
            .collect::<Vec<_>>(),
        [b"the file"]
    );
    assert_eq!(end.with(|end| end.opens), 1);
    say(&mut rig, 0);
    assert!(!answered(&mut rig));
    end.with(|end| end.busy = false);
    rig.linux.driver.poll();
    assert!(answered(&mut rig));
    assert_eq!(end.with(|end| end.closes.len()), 1);
}

#[test]
fn a_far_end_that_is_never_ready_is_not_waited_for_long() {
    let (mut rig, end) = slow();
    say(&mut rig, 1);
    assert!(!answered(&mut rig));
    let begin = rig.linux.driver.now;
    while !answered(&mut rig) {
        rig.linux.driver.sleep(PATIENCE);
        assert!(rig.linux.driver.now - begin < 2 * PATIENCE);
    }
    assert!(rig.linux.driver.now - begin >= PATIENCE);
    assert_eq!(end.with(|end| end.opens), 1);
}

#[test]
fn a_driver_that_goes_away_meanwhile_leaves_nothing_behind() {
    let (mut rig, end) = slow();
    say(&mut rig, 1);
    assert!(!answered(&mut rig));
    end.with(|end| end.slow = false);
    rig.linux.probe(ALL);
    assert_eq!(end.with(|end| (end.opens, end.closes.len())), (1, 1));
    end.with(|end| end.on_open = b"again".to_vec());
    assert_eq!(rig.linux.cat(TRACECTL).as_deref(), Some(&b"again"[..]));
}

#[test]
fn a_port_that_goes_meanwhile_is_not_waited_for() {
    let (mut rig, _) = slow();
    say(&mut rig, 1);
    assert!(!answered(&mut rig));
    rig.host.remove_port(TRACECTL).unwrap();
    rig.host_did();
    assert!(answered(&mut rig));
    assert_eq!(rig.linux.driver.handle.deadline(), None);
    // The next open is a separate one.
    rig.linux.open(DT);
    assert_eq!(rig.ends[DT as usize].with(|end| end.opens), 1);
}

#[test]
fn a_message_that_its_driver_takes_away_is_not_waited_for() {
    let (mut rig, _) = slow();
    say(&mut rig, 1);
    assert!(!answered(&mut rig));
    // QueueSel, QueueReady
    rig.linux.driver.write(0x030, u32::from(CONTROL_TRANSMIT));
    rig.linux.driver.write(0x044, 0);
    let end = rig.linux.driver.now + 2 * PATIENCE;
    while rig.linux.driver.now < end {
        let slept = rig.linux.driver.sleep(PATIENCE);
        assert!(slept > Duration::ZERO, "a deadline that stays in the past");
    }
}
