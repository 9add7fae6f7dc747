#![allow(clippy::unwrap_used)]
//! The device with a driver on one side and Unix sockets on the other.

mod connections;
mod hostile;
mod lines;
mod restore;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use super::*;
use crate::virtio::FEATURE_VERSION_1;
use crate::virtio::mock::Driver;

const CID: u32 = 5;
const OPTIONS: VsockOptions = VsockOptions { cid: CID, seed: 7 };
/// The first port of the host's programs with those options.
const HOST_PORT: u32 = FIRST_PORT + 7;
/// A port of the guest.
const PORT: u32 = 52;
/// The size of the guest's buffer for a connection.
const ROOM: u32 = 1 << 20;
const FEATURES: u64 = FEATURE_VERSION_1 | FEATURE_STREAM | crate::virtio::FEATURE_EVENT_INDEX;

/// A guest's driver, and the host's folder of sockets.
struct Guest {
    driver: Driver,
    folder: tempfile::TempDir,
}

fn device(folder: &tempfile::TempDir) -> Box<Vsock> {
    let path = folder.path().join("vsock");
    let _ = std::fs::remove_file(&path);
    let host = UnixHost::new(UnixListener::bind(&path).unwrap(), &path).unwrap();
    Box::new(Vsock::new(Some(Box::new(host)), OPTIONS))
}

/// Returns the header of a guest's packet, with much room for the host's bytes.
fn header(operation: Operation, guest: u32, host: u32) -> Header {
    Header {
        source_cid: CID.into(),
        destination_cid: HOST_CID,
        source_port: guest,
        destination_port: host,
        kind: STREAM,
        operation: operation as u16,
        buffer: ROOM,
        ..Header::default()
    }
}

/// Returns bytes in which no two places are alike.
fn content(length: usize) -> Vec<u8> {
    let words = (0..length as u32).map(|word| word.wrapping_mul(0x9e37_79b9));
    words.flat_map(u32::to_le_bytes).take(length).collect()
}

impl Guest {
    /// Returns a guest that has probed its device and filled its queues.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut driver = Driver::new(device(&folder));
        driver.probe(FEATURES, 3);
        let mut guest = Self { driver, folder };
        guest.fill();
        guest.fill_events();
        guest.driver.run();
        guest
    }

    /// Gives the device buffers for packets, as many as fit.
    fn fill(&mut self) {
        while self.driver.rings[usize::from(RECEIVE)].room() >= 2 {
            self.driver.add(RECEIVE, &[], &[HEADER as u32, 4096]);
        }
        self.driver.kick(RECEIVE);
        self.driver.run();
    }

    fn fill_events(&mut self) {
        for _ in 0..8 {
            self.driver.add(EVENT, &[], &[4]);
        }
        self.driver.kick(EVENT);
    }

    /// Sends a packet.
    fn send(&mut self, header: Header, bytes: &[u8]) {
        let header = Header {
            length: bytes.len() as u32,
            ..header
        }
        .encode();
        match bytes {
            [] => self.driver.add(TRANSMIT, &[&header], &[]),
            _ => self.driver.add(TRANSMIT, &[&header, bytes], &[]),
        };
        self.driver.kick(TRANSMIT);
        self.driver.run();
        self.driver.used(TRANSMIT);
    }

    fn tell(&mut self, operation: Operation, guest: u32, host: u32) {
        self.send(header(operation, guest, host), &[]);
    }

    /// Returns the packets that have come.
    fn packets(&mut self) -> Vec<(Header, Vec<u8>)> {
        self.driver.poll();
        let mut packets = Vec::new();
        loop {
            let used = self.driver.used(RECEIVE);
            if used.is_empty() {
                return packets;
            }
            for used in used {
                let (first, bytes) = used.bytes.split_first_chunk::<HEADER>().unwrap();
                let header = Header::decode(first);
                assert_eq!(header.length as usize, bytes.len());
                assert_eq!(
                    (header.source_cid, header.destination_cid),
                    (HOST_CID, CID.into())
                );
                packets.push((header, bytes.to_vec()));
            }
            self.fill();
        }
    }

    /// Returns the operations that have come, with the guest's ports and the flags.
    fn operations(&mut self) -> Vec<(Operation, u32, u32)> {
        let packets = self.packets();
        let packets = packets.iter().map(|(header, _)| {
            let operation = Operation::of(header.operation).unwrap();
            (operation, header.destination_port, header.flags)
        });
        packets.collect()
    }

    /// Returns a program of the host that has connected.
    fn client(&self) -> UnixStream {
        let stream = UnixStream::connect(self.folder.path().join("vsock")).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    }

    /// Returns a program of the host that the guest has accepted, and its port.
    fn connected(&mut self) -> (UnixStream, u32) {
        let mut client = self.client();
        client
            .write_all(format!("CONNECT {PORT}\n").as_bytes())
            .unwrap();
        let packets = self.packets();
        let [(request, _)] = packets.as_slice() else {
            panic!("{packets:?}");
        };
        assert_eq!(
            (request.operation, request.destination_port),
            (Operation::Request as u16, PORT)
        );
        let host = request.source_port;
        self.tell(Operation::Response, PORT, host);
        assert_eq!(arrived(&mut client), format!("OK {host}\n").into_bytes());
        (client, host)
    }

    /// Returns a program of the host that serves a port.
    fn service(&self, port: u32) -> UnixListener {
        let path = service_path(&self.folder.path().join("vsock"), port);
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    }

    /// Connects port [`PORT`] of the guest to a program that serves port 80.
    fn connected_to_service(&mut self) -> UnixStream {
        let service = self.service(80);
        self.tell(Operation::Request, PORT, 80);
        assert_eq!(self.operations(), [(Operation::Response, PORT, 0)]);
        let stream = service.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        stream
    }
}

/// Reads what has come at a stream. Panics if it has ended.
fn arrived(stream: &mut UnixStream) -> Vec<u8> {
    let (bytes, ended) = rest(stream);
    assert!(!ended, "{bytes:?}");
    bytes
}

/// Reads what has come at a stream, and whether that is all.
fn rest(stream: &mut UnixStream) -> (Vec<u8>, bool) {
    let mut all = Vec::new();
    let ended = match stream.read_to_end(&mut all) {
        Ok(_) => true,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    };
    (all, ended)
}

#[test]
fn a_driver_finds_its_context_id_and_streams() {
    let mut guest = Guest::new();
    let words = [0x100, 0x104].map(|at| guest.driver.read(at));
    assert_eq!(words, [CID, 0]);
    assert_eq!(guest.driver.offered() & FEATURE_STREAM, FEATURE_STREAM);
}
