//! Snapshots: connections do not survive, and the guest gets an event for that.

use super::*;

#[test]
fn a_restored_guest_is_told_before_programs_reach_it() {
    let mut guest = Guest::new();
    let (mut client, host) = guest.connected();
    let device = device(&guest.folder);
    guest.driver.replace(device).unwrap();
    assert_eq!(rest(&mut client), (vec![], true));
    guest.driver.run();
    let events = guest.driver.used(EVENT);
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].bytes, [0; 4]);
    // What the guest still believes in is refused.
    guest.send(header(Operation::Data, PORT, host), b"x");
    assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
    let mut client = guest.client();
    client.write_all(b"CONNECT 52\n").unwrap();
    assert_eq!(guest.operations(), []);
    // The guest has seen the event when its buffer is back.
    guest.driver.add(EVENT, &[], &[4]);
    guest.driver.kick(EVENT);
    guest.driver.run();
    assert_eq!(guest.operations(), [(Operation::Request, PORT, 0)]);
    assert_eq!(guest.driver.used(EVENT), []);
}

#[test]
fn a_guest_without_buffers_for_events_is_not_waited_for_without_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(device(&folder));
    driver.probe(FEATURES, 3);
    let mut guest = Guest { driver, folder };
    guest.fill();
    let device = device(&guest.folder);
    guest.driver.replace(device).unwrap();
    guest.driver.run();
    let mut client = guest.client();
    client.write_all(b"CONNECT 52\n").unwrap();
    assert_eq!(guest.operations(), []);
    assert_eq!(guest.driver.sleep(RESET_TIME * 2), RESET_TIME);
    assert_eq!(guest.operations(), [(Operation::Request, PORT, 0)]);
    // It still gets the event.
    guest.fill_events();
    guest.driver.run();
    assert_eq!(guest.driver.used(EVENT).len(), 1);
}

#[test]
fn a_device_that_was_not_in_use_has_nothing_to_tell() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(device(&folder));
    driver.replace(device(&folder)).unwrap();
    driver.probe(FEATURES, 3);
    let mut guest = Guest { driver, folder };
    guest.fill_events();
    guest.driver.run();
    assert_eq!(guest.driver.used(EVENT), []);
}
