//! Programs of the host before they are connected.

use super::*;

#[test]
fn a_line_that_asks_for_nothing_closes_the_connection() {
    for line in [
        &b"\n"[..],
        b"CONNECT\n",
        b"CONNECT 52 53\n",
        b"CONNECT x\n",
        b"CONNECT -1\n",
        b"CONNECT 4294967295\n",
        b"CONNECT 4294967296\n",
        b"GET / HTTP/1.1\n",
        b"\xff\xfe\n",
        &[b' '; LONGEST_LINE],
        b"CONNECT 5                        2\n",
    ] {
        let mut guest = Guest::new();
        let mut client = guest.client();
        client.write_all(line).unwrap();
        assert_eq!(guest.operations(), [], "{line:?}");
        assert_eq!(rest(&mut client), (vec![], true), "{line:?}");
    }
}

#[test]
fn a_line_may_come_in_pieces() {
    let mut guest = Guest::new();
    let mut client = guest.client();
    for byte in b"CONNECT 7\r" {
        client.write_all(&[*byte]).unwrap();
        assert_eq!(guest.operations(), []);
    }
    client.write_all(b"\n").unwrap();
    assert_eq!(guest.operations(), [(Operation::Request, 7, 0)]);
}

#[test]
fn a_guest_that_refuses_or_is_silent_closes_the_connection() {
    for refuses in [true, false] {
        let mut guest = Guest::new();
        let mut client = guest.client();
        client.write_all(b"CONNECT 52\n").unwrap();
        assert_eq!(guest.operations(), [(Operation::Request, PORT, 0)]);
        let told = match refuses {
            true => {
                guest.tell(Operation::Reset, PORT, HOST_PORT);
                vec![]
            }
            false => {
                assert_eq!(guest.driver.sleep(ANSWER_TIME * 2), ANSWER_TIME);
                vec![(Operation::Reset, PORT, 0)]
            }
        };
        assert_eq!(rest(&mut client), (vec![], true));
        assert_eq!(guest.operations(), told);
        // A late answer is refused.
        guest.tell(Operation::Response, PORT, HOST_PORT);
        assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
    }
}

#[test]
fn a_program_that_leaves_takes_its_request_back() {
    let mut guest = Guest::new();
    let mut client = guest.client();
    client.write_all(b"CONNECT 52\n").unwrap();
    assert_eq!(guest.operations(), [(Operation::Request, PORT, 0)]);
    drop(client);
    assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
}

#[test]
fn lines_that_are_not_completed_are_bounded_in_number_and_time() {
    let mut guest = Guest::new();
    let mut waiting: Vec<_> = (0..MOST_LINES).map(|_| guest.client()).collect();
    guest.driver.poll();
    let mut surplus = guest.client();
    guest.driver.poll();
    assert_eq!(rest(&mut surplus), (vec![], true));
    // One that is completed makes room for another.
    waiting[0].write_all(b"CONNECT 52\n").unwrap();
    assert_eq!(guest.operations(), [(Operation::Request, PORT, 0)]);
    guest.tell(Operation::Response, PORT, HOST_PORT);
    let mut other = guest.client();
    guest.driver.poll();
    assert_eq!(arrived(&mut other), b"");
    assert_eq!(guest.driver.sleep(LINE_TIME * 2), LINE_TIME);
    for (at, client) in waiting.iter_mut().enumerate() {
        let (_, ended) = rest(client);
        assert_eq!(ended, at != 0, "{at}");
    }
    assert_eq!(rest(&mut other), (vec![], true));
}

#[test]
fn programs_wait_for_a_driver() {
    let folder = tempfile::tempdir().unwrap();
    let driver = Driver::new(device(&folder));
    let mut guest = Guest { driver, folder };
    let mut client = guest.client();
    client.write_all(b"CONNECT 52\n").unwrap();
    guest.driver.poll();
    assert_eq!(arrived(&mut client), b"");
    guest.driver.probe(FEATURES, 3);
    guest.fill();
    guest.driver.run();
    assert_eq!(guest.operations(), [(Operation::Request, PORT, 0)]);
    // A reset ends all connections.
    guest.driver.probe(FEATURES, 3);
    assert_eq!(rest(&mut client), (vec![], true));
}
