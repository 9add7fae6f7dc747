//! Guests that break the rules, and bounds that they meet.

use super::*;
use crate::virtio::mock::{Descriptor, status};

/// A host with a program behind each port, which neither reads nor writes.
#[derive(Default)]
struct Crowd {
    next: u64,
    open: usize,
}

impl VsockBackend for Crowd {
    fn events(&mut self, _: &mut Vec<HostEvent>) -> bool {
        false
    }

    fn accept(&mut self) -> std::io::Result<StreamId> {
        Err(std::io::ErrorKind::WouldBlock.into())
    }

    fn connect(&mut self, _: u32) -> std::io::Result<StreamId> {
        self.next += 1;
        self.open += 1;
        assert!(self.open <= MOST_STREAMS);
        Ok(StreamId(self.next))
    }

    fn read(&mut self, _: StreamId, _: &mut [u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::WouldBlock.into())
    }

    fn write(&mut self, _: StreamId, _: &[u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::WouldBlock.into())
    }

    fn shut_down(&mut self, _: StreamId, _: Direction) {}

    fn close(&mut self, _: StreamId) {
        self.open -= 1;
    }
}

fn crowd() -> Guest {
    let folder = tempfile::tempdir().unwrap();
    let device = Vsock::new(Some(Box::<Crowd>::default()), OPTIONS);
    let mut driver = Driver::new(Box::new(device));
    driver.probe(FEATURES, 3);
    let mut guest = Guest { driver, folder };
    guest.fill();
    guest
}

#[test]
fn packets_of_no_connection_are_answered_by_a_reset() {
    let mut guest = Guest::new();
    for operation in [
        Operation::Response,
        Operation::Shutdown,
        Operation::Data,
        Operation::CreditUpdate,
        Operation::CreditRequest,
    ] {
        guest.tell(operation, PORT, 80);
        let told = guest.operations();
        assert_eq!(told, [(Operation::Reset, PORT, 0)], "{operation:?}");
    }
    guest.tell(Operation::Reset, PORT, 80);
    assert_eq!(guest.operations(), []);
    // Those of another type as well, with that type.
    let other = Header {
        kind: 2,
        ..header(Operation::Request, PORT, 80)
    };
    guest.send(other, &[]);
    let packets = guest.packets();
    assert_eq!(packets.len(), 1);
    assert_eq!(
        (packets[0].0.operation, packets[0].0.kind),
        (Operation::Reset as u16, 2)
    );
}

#[test]
fn a_connection_ends_with_a_broken_rule() {
    let too_much = content(BUFFER as usize);
    for (name, operation, bytes) in [
        ("a second request", 1, &b""[..]),
        ("an answer to no question", 2, b""),
        ("an unknown operation", 8, b""),
        ("no operation", 0, b""),
    ] {
        let mut guest = Guest::new();
        let mut service = guest.connected_to_service();
        let packet = Header {
            operation,
            ..header(Operation::Data, PORT, 80)
        };
        guest.send(packet, bytes);
        assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)], "{name}");
        assert_eq!(rest(&mut service), (vec![], true), "{name}");
    }
    // More bytes than there is room for.
    let mut guest = crowd();
    guest.tell(Operation::Request, PORT, 80);
    assert_eq!(guest.operations(), [(Operation::Response, PORT, 0)]);
    guest.send(header(Operation::Data, PORT, 80), &too_much);
    assert_eq!(guest.operations(), []);
    guest.send(header(Operation::Data, PORT, 80), b"x");
    assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
    // Bytes behind the end.
    let mut guest = Guest::new();
    let _service = guest.connected_to_service();
    let end = Header {
        flags: NO_MORE_SENT,
        ..header(Operation::Shutdown, PORT, 80)
    };
    guest.send(end, &[]);
    guest.send(header(Operation::Data, PORT, 80), b"x");
    assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
    // Bytes before the guest has agreed.
    let mut guest = Guest::new();
    let mut client = guest.client();
    client.write_all(b"CONNECT 52\n").unwrap();
    assert_eq!(guest.operations(), [(Operation::Request, PORT, 0)]);
    guest.send(header(Operation::Data, PORT, HOST_PORT), b"x");
    assert_eq!(guest.operations(), [(Operation::Reset, PORT, 0)]);
    assert_eq!(rest(&mut client), (vec![], true));
}

#[test]
fn malformed_packets_come_back_without_an_answer() {
    let mut guest = Guest::new();
    let good = header(Operation::Request, PORT, 80);
    let of = |header: Header| header.encode().to_vec();
    let cases: [(&str, Vec<u8>); 7] = [
        ("short", good.encode()[..HEADER - 1].to_vec()),
        (
            "another guest's",
            of(Header {
                source_cid: 6,
                ..good
            }),
        ),
        (
            "of nobody",
            of(Header {
                source_cid: (1 << 32) | u64::from(CID),
                ..good
            }),
        ),
        (
            "for another guest",
            of(Header {
                destination_cid: 3,
                ..good
            }),
        ),
        ("longer than its chain", of(Header { length: 1, ..good })),
        (
            "longer than all chains",
            of(Header {
                length: u32::MAX,
                ..good
            }),
        ),
        (
            "longer than a packet",
            [
                of(Header {
                    length: BUFFER + 1,
                    ..good
                }),
                vec![0; BUFFER as usize + 1],
            ]
            .concat(),
        ),
    ];
    for (count, (name, bytes)) in (1..).zip(cases) {
        guest.driver.add(TRANSMIT, &[&bytes], &[]);
        guest.driver.kick(TRANSMIT);
        guest.driver.run();
        assert_eq!(guest.operations(), [], "{name}");
        let stats = guest.driver.handle.queue_stats(TRANSMIT);
        assert_eq!(stats.rejected, count, "{name}");
        assert_eq!(guest.driver.used(TRANSMIT).len(), 1, "{name}");
    }
    guest.driver.add(TRANSMIT, &[&of(good)], &[100]);
    guest.driver.kick(TRANSMIT);
    guest.driver.run();
    assert_eq!(guest.operations(), []);
    assert_eq!(guest.driver.status() & status::NEEDS_RESET, 0);
}

#[test]
fn headers_and_contents_may_be_cut_anywhere() {
    let sent = content(5000);
    for cut in [1, HEADER - 1, HEADER, HEADER + 1, 3000] {
        let mut guest = Guest::new();
        let mut service = guest.connected_to_service();
        let header = Header {
            length: 5000,
            ..header(Operation::Data, PORT, 80)
        };
        let bytes = [&header.encode()[..], &sent].concat();
        let (first, second) = bytes.split_at(cut);
        guest.driver.add(TRANSMIT, &[first, second], &[]);
        guest.driver.kick(TRANSMIT);
        guest.driver.run();
        assert!(arrived(&mut service) == sent, "{cut}");
    }
}

#[test]
fn connections_are_bounded() {
    let mut guest = crowd();
    for port in 0..MOST_STREAMS as u32 {
        guest.tell(Operation::Request, port, 80);
        assert_eq!(guest.operations(), [(Operation::Response, port, 0)]);
    }
    guest.tell(Operation::Request, 9999, 80);
    assert_eq!(guest.operations(), [(Operation::Reset, 9999, 0)]);
    guest.tell(Operation::Reset, 0, 80);
    guest.tell(Operation::Request, 9999, 80);
    assert_eq!(guest.operations(), [(Operation::Response, 9999, 0)]);
    // Those whose bytes nobody takes stay when the guest has closed them, and count.
    guest.send(header(Operation::Data, 9999, 80), b"bytes");
    let end = Header {
        flags: CLOSED,
        ..header(Operation::Shutdown, 9999, 80)
    };
    guest.send(end, &[]);
    guest.tell(Operation::Request, 9998, 80);
    let refused = [(Operation::Reset, 9999, 0), (Operation::Reset, 9998, 0)];
    assert_eq!(guest.operations(), refused);
}

#[test]
fn without_buffers_for_answers_the_guests_packets_wait() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(device(&folder));
    driver.probe(FEATURES, 3);
    let mut guest = Guest { driver, folder };
    let packet = header(Operation::CreditUpdate, PORT, 80).encode();
    let (mut sent, mut back) = (0, 0);
    while sent < MOST_RESETS + 100 {
        guest.driver.add(TRANSMIT, &[&packet], &[]);
        guest.driver.kick(TRANSMIT);
        guest.driver.run();
        back += guest.driver.used(TRANSMIT).len();
        sent += 1;
    }
    assert_eq!(back, MOST_RESETS);
    guest.fill();
    let told = guest.operations();
    assert_eq!(told, vec![(Operation::Reset, PORT, 0); sent]);
    assert_eq!(back + guest.driver.used(TRANSMIT).len(), sent);
}

#[test]
fn bad_buffers_among_good_ones_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(device(&folder));
    driver.probe(FEATURES, 3);
    driver.add(RECEIVE, &[b"to read"], &[]);
    driver.add(RECEIVE, &[], &[HEADER as u32]);
    driver.add_chain(RECEIVE, &[Descriptor::writable(u64::MAX - 8, 100)]);
    driver.add(RECEIVE, &[], &[HEADER as u32, 8]);
    driver.kick(RECEIVE);
    let mut guest = Guest { driver, folder };
    guest.tell(Operation::Request, PORT, 80);
    let used = guest.driver.used(RECEIVE);
    let lengths: Vec<u32> = used.iter().map(|used| used.length).collect();
    assert_eq!(lengths, [0, 0, 0, HEADER as u32]);
    assert_eq!(guest.driver.handle.queue_stats(RECEIVE).rejected, 3);
}
