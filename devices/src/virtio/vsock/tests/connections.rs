//! Connections in both directions: bytes, credit and ends.

use super::*;

#[test]
fn a_program_of_the_host_reaches_the_guest_and_bytes_behind_its_line_too() {
    let mut guest = Guest::new();
    let mut client = guest.client();
    client.write_all(b"CONNECT 52\nhel").unwrap();
    assert_eq!(guest.operations(), [(Operation::Request, PORT, 0)]);
    client.write_all(b"lo").unwrap();
    assert_eq!(guest.operations(), []);
    guest.tell(Operation::Response, PORT, HOST_PORT);
    let packets = guest.packets();
    let bytes: Vec<u8> = packets.into_iter().flat_map(|(_, bytes)| bytes).collect();
    assert_eq!(bytes, b"hello");
    guest.send(header(Operation::Data, PORT, HOST_PORT), b"world");
    let told = [format!("OK {HOST_PORT}\n").as_bytes(), b"world"].concat();
    assert_eq!(arrived(&mut client), told);
}

#[test]
fn the_guest_reaches_programs_of_the_host_that_serve_a_port() {
    let mut guest = Guest::new();
    let mut service = guest.connected_to_service();
    guest.send(header(Operation::Data, PORT, 80), b"ping");
    assert_eq!(arrived(&mut service), b"ping");
    service.write_all(b"pong").unwrap();
    let packets = guest.packets();
    let [(header, bytes)] = packets.as_slice() else {
        panic!("{packets:?}");
    };
    assert_eq!(
        (header.operation, header.source_port),
        (Operation::Data as u16, 80)
    );
    assert_eq!(
        (bytes.as_slice(), header.consumed, header.buffer),
        (&b"pong"[..], 4, BUFFER)
    );
}

#[test]
fn without_a_program_the_guest_is_refused() {
    let mut guest = Guest::new();
    // A socket that nobody listens on any more, and a file.
    drop(guest.service(81));
    std::fs::write(guest.folder.path().join("vsock_82"), "").unwrap();
    for port in [80, 81, 82] {
        guest.tell(Operation::Request, PORT, port);
        assert_eq!(
            guest.operations(),
            [(Operation::Reset, PORT, 0)],
            "port {port}"
        );
    }
    let nobody = Vsock::new(None, OPTIONS);
    guest.driver = Driver::new(Box::new(nobody));
    guest.driver.probe(FEATURES, 3);
    guest.fill();
    guest.tell(Operation::Request, PORT, 80);
    assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
}

#[test]
fn many_bytes_come_whole_in_both_directions() {
    let mut guest = Guest::new();
    let (mut client, host) = guest.connected();
    let sent = content(300_000);
    let (mut to_guest, mut to_host) = (sent.as_slice(), sent.as_slice());
    let (mut at_guest, mut at_host) = (Vec::new(), Vec::new());
    // What the device has passed on, as it tells.
    let mut consumed = 0;
    while at_guest.len() < sent.len() || at_host.len() < sent.len() {
        if let Ok(written) = client.write(to_guest) {
            to_guest = &to_guest[written..];
        }
        for (header, bytes) in guest.packets() {
            at_guest.extend(bytes);
            consumed = header.consumed;
        }
        let under_way = (sent.len() - to_host.len()) as u32 - consumed;
        let most = (BUFFER - under_way).min(20_000) as usize;
        let (now, later) = to_host.split_at(most.min(to_host.len()));
        let mut header = header(Operation::Data, PORT, host);
        header.consumed = at_guest.len() as u32;
        guest.send(header, now);
        to_host = later;
        at_host.extend(arrived(&mut client));
    }
    assert!(at_guest == sent && at_host == sent);
}

#[test]
fn the_guests_room_bounds_what_is_sent_to_it() {
    let mut guest = Guest::new();
    let listener = guest.service(80);
    let request = Header {
        buffer: 1000,
        ..header(Operation::Request, PORT, 80)
    };
    guest.send(request, &[]);
    let mut service = listener.accept().unwrap().0;
    service.write_all(&content(3000)).unwrap();
    let packets = guest.packets();
    let lengths = packets.iter().map(|(header, bytes)| {
        let operation = Operation::of(header.operation).unwrap();
        (operation, bytes.len())
    });
    assert_eq!(
        lengths.collect::<Vec<_>>(),
        [
            (Operation::Response, 0),
            (Operation::Data, 1000),
            (Operation::CreditRequest, 0)
        ]
    );
    // Numbers that make no sense are no room.
    for (consumed, came) in [(0, 0), (5000, 0), (400, 400), (1000, 600)] {
        let update = Header {
            buffer: 1000,
            consumed,
            ..header(Operation::CreditUpdate, PORT, 80)
        };
        guest.send(update, &[]);
        let bytes = guest.packets().into_iter().map(|(_, bytes)| bytes.len());
        assert_eq!(bytes.sum::<usize>(), came, "{consumed}");
    }
}

#[test]
fn a_slow_program_holds_back_the_guest_and_not_the_device() {
    let mut guest = Guest::new();
    let mut service = guest.connected_to_service();
    let sent = content(16 << 10);
    let mut count = 0;
    // Until the socket and the device are full.
    let consumed = loop {
        guest.send(header(Operation::Data, PORT, 80), &sent);
        count += 1;
        guest.tell(Operation::CreditRequest, PORT, 80);
        let packets = guest.packets();
        let (header, _) = packets.last().unwrap();
        assert_eq!(header.operation, Operation::CreditUpdate as u16);
        assert!(count < 1000, "the socket has no end");
        let under_way = (count * sent.len()) as u32 - header.consumed;
        if under_way + sent.len() as u32 > BUFFER {
            break header.consumed;
        }
    };
    let mut all = arrived(&mut service);
    assert!(all.len() as u32 >= consumed);
    // The guest is told of its new room without asking.
    let (header, _) = guest.packets().pop().unwrap();
    assert_eq!(header.operation, Operation::CreditUpdate as u16);
    assert!(header.consumed > consumed);
    while all.len() < count * sent.len() {
        guest.packets();
        all.extend(arrived(&mut service));
    }
    assert!(all == sent.repeat(count));
}

#[test]
fn a_program_that_ends_is_read_to_its_end_and_the_guest_is_told() {
    for (how, flags) in [
        (Some(std::net::Shutdown::Write), vec![NO_MORE_SENT]),
        (Some(std::net::Shutdown::Both), vec![CLOSED]),
        (None, vec![CLOSED]),
    ] {
        let mut guest = Guest::new();
        let mut service = guest.connected_to_service();
        service.write_all(&content(10_000)).unwrap();
        let mut kept = None;
        if let Some(how) = how {
            service.shutdown(how).unwrap();
            kept = Some(service);
        } else {
            drop(service);
        }
        let packets = guest.packets();
        let bytes: Vec<u8> = packets
            .iter()
            .flat_map(|(_, bytes)| bytes.clone())
            .collect();
        assert!(bytes == content(10_000), "{how:?}");
        let told = packets
            .iter()
            .filter(|(header, _)| header.operation == Operation::Shutdown as u16);
        let told: Vec<u32> = told.map(|(header, _)| header.flags).collect();
        assert_eq!(told.last(), flags.last(), "{how:?} {told:?}");
        if flags == [CLOSED] {
            // The guest answers, or is not waited for.
            assert_eq!(guest.driver.sleep(ANSWER_TIME * 2), ANSWER_TIME);
            assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
        } else {
            guest.send(header(Operation::Data, PORT, 80), b"more");
            assert_eq!(arrived(&mut kept.unwrap()), b"more");
        }
    }
}

#[test]
fn what_the_guest_ends_ends_at_the_program() {
    for (flags, ended, refuses, answer) in [
        (NO_MORE_SENT, true, false, vec![]),
        (NO_MORE_RECEIVED, false, true, vec![]),
        (CLOSED, true, true, vec![(Operation::Reset, PORT, 0)]),
    ] {
        let mut guest = Guest::new();
        let mut service = guest.connected_to_service();
        guest.send(header(Operation::Data, PORT, 80), b"last");
        let shutdown = Header {
            flags,
            ..header(Operation::Shutdown, PORT, 80)
        };
        guest.send(shutdown, &[]);
        assert_eq!(guest.operations(), answer, "{flags}");
        assert_eq!(rest(&mut service), (b"last".to_vec(), ended), "{flags}");
        assert_eq!(service.write_all(b"x").is_err(), refuses, "{flags}");
        let more = guest.packets().into_iter().flat_map(|(_, bytes)| bytes);
        assert_eq!(more.count(), usize::from(!refuses), "{flags}");
    }
}

#[test]
fn bytes_of_a_guest_that_has_closed_still_arrive() {
    let mut guest = Guest::new();
    let mut service = guest.connected_to_service();
    let sent = content(60_000);
    let mut count = 0;
    let mut consumed = 0;
    while count * sent.len() == consumed as usize {
        guest.send(header(Operation::Data, PORT, 80), &sent);
        count += 1;
        guest.tell(Operation::CreditRequest, PORT, 80);
        consumed = guest.packets().last().unwrap().0.consumed;
    }
    let shutdown = Header {
        flags: CLOSED,
        ..header(Operation::Shutdown, PORT, 80)
    };
    guest.send(shutdown, &[]);
    assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
    // The ports are free at once.
    guest.tell(Operation::Request, PORT, 80);
    assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
    let (mut all, mut ended) = (Vec::new(), false);
    while !ended {
        let (bytes, end) = rest(&mut service);
        all.extend(bytes);
        ended = end;
        guest.driver.poll();
    }
    assert!(all == sent.repeat(count));
}
