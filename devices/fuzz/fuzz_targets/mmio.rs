//! A driver of a disk, of random numbers, of a console, of a network card or of sockets. It
//! accesses registers and configuration space by any offset and width, and has invalid rings. Its
//! device is saved, damaged and restored. The card's socket has a peer that sends what it likes,
//! and reads or not. The host's side of the sockets has bytes, room, errors and ends in turns.
//!
//! The input is a list of moves: a byte for the kind, then its operands. Its first byte selects the
//! device. Failures are a panic, a device that never comes to rest and a disk access out of range.
//! So is a device that no proper driver can use afterwards.
#![no_main]

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use devices::BusDevice;
use devices::virtio::blk::{Block, BlockBackend, BlockOptions};
use devices::virtio::console::{Console, ConsoleConfig, EndOfFile, NullBackend, PortConfig, Size};
use devices::virtio::mock::{Descriptor, Driver, RING_AREA, RINGS, Ring, status};
use devices::virtio::net::{HEADER, Net, NetOptions, RECEIVE, StreamBackend, TRANSMIT};
use devices::virtio::rng::Rng;
use devices::virtio::vsock::{self, HostEvent, StreamId, Vsock, VsockBackend, VsockOptions};
use devices::virtio::{FEATURE_VERSION_1, MMIO_LENGTH, VirtioDevice};
use hostile::Input;
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress};

/// The maximum number of moves of one run.
const MOST: usize = 200;
/// The size of the disk in bytes.
const DISK: u64 = 64 << 10;
const SECTOR: u64 = 512;
/// The context id of a guest with sockets.
const CID: u32 = 3;
/// The maximum width of a register access in bytes.
const WIDEST: usize = 16;

/// A disk that fails now and then while it is set to.
struct Moody {
    bytes: Vec<u8>,
    read_only: bool,
    fails: Arc<AtomicBool>,
    turn: usize,
}

impl Moody {
    fn check(&mut self, range: &Range<u64>, write: bool) -> io::Result<()> {
        assert!(range.start <= range.end && range.end <= DISK, "{range:?}");
        assert!(
            !(write && self.read_only),
            "a write to a disk that is only read"
        );
        self.turn += 1;
        match self.fails.load(Ordering::Relaxed) && self.turn.is_multiple_of(5) {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }
}

impl BlockBackend for Moody {
    fn length(&self) -> u64 {
        DISK
    }

    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let range = offset..offset + buffer.len() as u64;
        self.check(&range, false)?;
        buffer.copy_from_slice(&self.bytes[range.start as usize..range.end as usize]);
        Ok(())
    }

    fn write_at(&mut self, data: &[u8], offset: u64) -> io::Result<()> {
        let range = offset..offset + data.len() as u64;
        self.check(&range, true)?;
        self.bytes[range.start as usize..range.end as usize].copy_from_slice(data);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.check(&(0..0), false)
    }

    fn discard(&mut self, range: Range<u64>) -> io::Result<bool> {
        self.check(&range, true)?;
        let holes = self.turn.is_multiple_of(2);
        if holes {
            self.bytes[range.start as usize..range.end as usize].fill(0);
        }
        Ok(holes)
    }
}

/// The host's side of sockets, in which the number of a call or a port decides what happens. A
/// guest cannot have more of it open than the device's bound.
#[derive(Default)]
struct Programs {
    turn: usize,
    next: u64,
    open: Vec<StreamId>,
}

impl Programs {
    fn stream(&mut self) -> StreamId {
        self.next += 1;
        self.open.push(StreamId(self.next));
        assert!(self.open.len() <= vsock::MOST_STREAMS + 1);
        StreamId(self.next)
    }

    fn check(&mut self, stream: StreamId) -> usize {
        assert!(self.open.contains(&stream), "{stream:?} is not open");
        self.turn += 1;
        self.turn
    }
}

impl VsockBackend for Programs {
    fn events(&mut self, events: &mut Vec<HostEvent>) -> bool {
        self.turn += 1;
        events.push(HostEvent::Incoming);
        // Streams that are closed, too.
        let stream = StreamId(1 + self.turn as u64 % (self.next + 1));
        let closed = self.turn.is_multiple_of(7);
        events.push(HostEvent::Ready { stream, closed });
        false
    }

    fn accept(&mut self) -> io::Result<StreamId> {
        self.turn += 1;
        match self.turn % 5 {
            0 => Ok(self.stream()),
            1 => Err(io::ErrorKind::Other.into()),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn connect(&mut self, port: u32) -> io::Result<StreamId> {
        match port % 4 {
            3 => Err(io::ErrorKind::NotFound.into()),
            _ => Ok(self.stream()),
        }
    }

    fn read(&mut self, stream: StreamId, buffer: &mut [u8]) -> io::Result<usize> {
        let turn = self.check(stream);
        if let [byte] = buffer {
            // A line, a byte at a time.
            *byte = b"CONNECT 7\n"[turn % 10];
            return Ok(1);
        }
        buffer.fill(0x44);
        match turn % 6 {
            0 => Ok(0),
            1 | 2 => Ok(buffer.len()),
            3 => Err(io::ErrorKind::Other.into()),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn write(&mut self, stream: StreamId, bytes: &[u8]) -> io::Result<usize> {
        match self.check(stream) % 6 {
            0 => Err(io::ErrorKind::BrokenPipe.into()),
            1 => Ok(1),
            2 | 3 => Ok(bytes.len()),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn shut_down(&mut self, stream: StreamId, _: vsock::Direction) {
        self.check(stream);
    }

    fn close(&mut self, stream: StreamId) {
        self.check(stream);
        self.open.retain(|open| *open != stream);
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Disk { read_only: bool },
    Random,
    Console,
    Network,
    Sockets,
}

/// A maker of devices of one kind, in sequence.
struct Maker {
    kind: Kind,
    fails: Arc<AtomicBool>,
    /// The peer of the last network card's socket.
    peer: Mutex<Option<UnixStream>>,
}

impl Maker {
    fn device(&self) -> Box<dyn VirtioDevice> {
        match self.kind {
            Kind::Disk { read_only } => {
                let backend = Moody {
                    bytes: vec![0x5a; DISK as usize],
                    read_only,
                    fails: self.fails.clone(),
                    turn: 0,
                };
                let id = "disk";
                let options = BlockOptions { read_only, id };
                Box::new(Block::new(Box::new(backend), options))
            }
            Kind::Random => Box::new(Rng::new(io::repeat(7))),
            Kind::Console => {
                let port = PortConfig::named("one", EndOfFile::WhenIdle);
                let config = ConsoleConfig {
                    ports: vec![
                        (PortConfig::console(), Box::new(NullBackend)),
                        (port, Box::new(NullBackend)),
                    ],
                    max_ports: 2,
                    size: Size {
                        columns: 80,
                        rows: 24,
                    },
                };
                Box::new(Console::new(config, || {}).expect("a proper configuration"))
            }
            Kind::Network => {
                let (near, far) = UnixStream::pair().expect("sockets");
                far.set_nonblocking(true).expect("a socket");
                *self.peer.lock().expect("the peer") = Some(far);
                let backend = StreamBackend::new(near, true).expect("a backend");
                let options = NetOptions {
                    mac: [2, 0, 0, 0, 0, 1],
                    mtu: 1500,
                    pairs: if self.fails.load(Ordering::Relaxed) {
                        2
                    } else {
                        1
                    },
                    segmentation: self.fails.load(Ordering::Relaxed),
                    moved: self.fails.load(Ordering::Relaxed),
                };
                Box::new(Net::new(Some(Box::new(backend)), options))
            }
            Kind::Sockets => {
                let options = VsockOptions { cid: CID, seed: 0 };
                Box::new(Vsock::new(Some(Box::<Programs>::default()), options))
            }
        }
    }
}

/// Reads a register's offset, or any other.
fn offset(input: &mut Input) -> u64 {
    let which = input.byte();
    let any = u64::from(input.byte());
    match which % 4 {
        0 | 1 => any % 0x44 * 4,
        2 => 0x100 + any % 64,
        _ => (any << 1 | u64::from(which >> 7)) % MMIO_LENGTH,
    }
}

/// Sets up the device with the features that it offers, some of them left out.
fn set_up(driver: &mut Driver, input: &mut Input) {
    let left_out = u64::from(input.word()) | u64::from(input.byte() & 0xe) << 32;
    let features = driver.offered() & !left_out | FEATURE_VERSION_1;
    if !driver.negotiate(features) {
        return;
    }
    let queues = usize::from(input.byte() % 7);
    for _ in 0..queues.min(usize::from(driver.handle.queues())) {
        let size = match input.byte() {
            0..128 => None,
            other => Some(u32::from(other - 127)),
        };
        driver.set_up(size);
    }
    driver.ready();
}

/// Adds a disk's request that is well-formed but for its content.
fn request(driver: &mut Driver, input: &mut Input) {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&u32::from(input.byte() % 16).to_le_bytes());
    let sector = match input.byte() % 4 {
        0..3 => u64::from(input.byte()),
        _ => u64::from_le_bytes(input.bytes()),
    };
    header[8..].copy_from_slice(&sector.to_le_bytes());
    let given: [u8; 32] = input.bytes();
    let data = vec![0x11; usize::from(input.byte() % 4) * SECTOR as usize];
    let room = u32::from(input.short());
    let readable: [&[u8]; 2] = match input.byte() % 3 {
        0 => [&header, &[]],
        1 => [&header, &data],
        _ => [&header, &given[..usize::from(input.byte() % 33)]],
    };
    let readable = &readable[..1 + usize::from(!readable[1].is_empty())];
    let writable = if room == 0 { vec![1] } else { vec![room, 1] };
    driver.indirect = input.byte() & 1 != 0;
    let free = driver.rings.first().map_or(0, |ring| ring.room());
    if free >= readable.len() + writable.len() {
        driver.add(0, readable, &writable);
    }
    driver.notify(0);
}

/// Sends a packet of the guest's, or adds a buffer for one.
fn packet(driver: &mut Driver, input: &mut Input) {
    let header: [u8; HEADER] = input.bytes();
    let frame = vec![0x22; usize::from(input.short())];
    driver.indirect = input.byte() & 1 != 0;
    let receives = input.byte() & 1 != 0;
    let queue = if receives { RECEIVE } else { TRANSMIT };
    let free = driver.rings.get(usize::from(queue)).map_or(0, Ring::room);
    if free >= 2 {
        match receives {
            true => driver.add(queue, &[], &[1 + frame.len() as u32]),
            false if frame.is_empty() => driver.add(queue, &[&header], &[]),
            false => driver.add(queue, &[&header, &frame], &[]),
        };
    }
    driver.notify(queue);
}

/// Returns the header of a packet of the guest's for sockets that is valid but for its content.
fn socket_header(input: &mut Input, length: u32) -> [u8; vsock::HEADER] {
    let header = vsock::Header {
        source_cid: CID.into(),
        destination_cid: vsock::HOST_CID,
        source_port: u32::from(input.byte() % 16),
        destination_port: match input.byte() {
            // The ports of the host's programs.
            port @ 128.. => 1 << 30 | u32::from(port % 16),
            port => u32::from(port % 8),
        },
        length,
        kind: 1 + u16::from(input.byte() / 255),
        operation: u16::from(input.byte() % 9),
        flags: u32::from(input.byte() % 4),
        buffer: u32::from(input.short()),
        consumed: u32::from(input.short()),
    };
    header.encode()
}

/// Sends a packet of the guest's for sockets, or adds a buffer for one or for an event.
fn socket_packet(driver: &mut Driver, input: &mut Input) {
    driver.indirect = input.byte() & 1 != 0;
    let queue = u16::from(input.byte() % 3);
    let length = u32::from(input.short());
    let free = driver.rings.get(usize::from(queue)).map_or(0, Ring::room);
    if free >= 2 {
        let header = socket_header(input, length);
        let content = vec![0x55; length as usize];
        match (queue, length) {
            (vsock::TRANSMIT, 0) => driver.add(queue, &[&header], &[]),
            (vsock::TRANSMIT, _) => driver.add(queue, &[&header, &content], &[]),
            _ => driver.add(queue, &[], &[1 + length]),
        };
    }
    driver.notify(queue);
}

/// Makes the peer of a network card's socket send, receive or close.
fn peer(maker: &Maker, input: &mut Input) {
    let mut peer = maker.peer.lock().expect("the peer");
    let Some(socket) = &mut *peer else {
        return;
    };
    let what = input.byte();
    // A full socket takes less.
    match what % 8 {
        0 => *peer = None,
        1 => drop(socket.write(&input.bytes::<8>())),
        2..5 => drop(socket.read(&mut vec![0; 100_000])),
        _ => {
            let frame = vec![0x33; 14 + usize::from(input.short() % 4096)];
            let length = (frame.len() as u32).to_be_bytes();
            drop(socket.write(&[&length[..], &frame].concat()));
        }
    }
}

/// Saves the device, and continues with one that restores its state with some bytes damaged.
fn replace(driver: &mut Driver, maker: &Maker, input: &mut Input) {
    let state = driver.transport.state();
    let good = postcard::to_stdvec(&state).expect("a state");
    let mut bytes = good.clone();
    for _ in 0..input.byte() % 4 {
        let at = usize::from(input.short()) % bytes.len();
        bytes[at] = input.byte();
    }
    if let Ok(damaged) = postcard::from_bytes(&bytes) {
        // Whether the state is rejected or not, the guest continues.
        let _ = driver.restore(maker.device(), &damaged);
    }
}

fn make_move(driver: &mut Driver, maker: &Maker, input: &mut Input) {
    let memory = driver.memory.clone();
    let queues = driver.handle.queues();
    let queue = |input: &mut Input| u16::from(input.byte()) % queues;
    match input.byte() % 14 {
        0 => {
            let at = offset(input);
            let width = 1 + usize::from(input.byte()) % WIDEST;
            let mut data = [0xee; WIDEST];
            let width = width.min((MMIO_LENGTH - at) as usize);
            driver.transport.read(at, &mut data[..width]);
        }
        1 => {
            let at = offset(input);
            let width = 1 + usize::from(input.byte()) % WIDEST;
            let data: [u8; WIDEST] = input.bytes();
            let width = width.min((MMIO_LENGTH - at) as usize);
            driver.transport.write(at, &data[..width]);
        }
        2 | 3 => {
            let at = u32::from(input.byte()) % 0x44 * 4;
            let value = match input.byte() % 4 {
                0 => input.word(),
                _ => u32::from(input.byte()),
            };
            driver.write(at, value);
        }
        4 => {
            let (queue, number) = (queue(input), u16::from(input.byte()) % 64);
            let descriptor = Descriptor {
                address: input.address(),
                length: input.word(),
                flags: input.short(),
                next: input.short(),
            };
            descriptor.store(&memory, RINGS + u64::from(queue) * RING_AREA, number);
        }
        5 => {
            let (queue, head) = (queue(input), u16::from(input.byte()));
            if let Some(ring) = driver.rings.get_mut(usize::from(queue)) {
                ring.publish(&memory, head);
            }
            driver.notify(queue);
        }
        6 => {
            let (queue, index) = (queue(input), input.short());
            if let Some(ring) = driver.rings.get_mut(usize::from(queue)) {
                ring.set_index(&memory, index);
            }
            driver.notify(queue);
        }
        7 => {
            let area = u64::from(queue(input)) * RING_AREA;
            let at = RINGS + area + u64::from(input.short() % 0x7000);
            let bytes: [u8; 8] = input.bytes();
            let _ = memory.write_slice(&bytes, GuestAddress(at));
        }
        8 if maker.kind == Kind::Network => peer(maker, input),
        9 | 10 if maker.kind == Kind::Network => packet(driver, input),
        8..=10 if maker.kind == Kind::Sockets => socket_packet(driver, input),
        8..=10 => request(driver, input),
        11 => set_up(driver, input),
        12 => replace(driver, maker, input),
        _ => {
            driver.sleep(Duration::from_millis(u64::from(input.byte())));
        }
    }
    driver.run();
    driver.poll();
}

/// Checks that a proper driver can still use the device.
fn check(driver: &mut Driver, maker: &Maker) {
    let kind = maker.kind;
    let features = driver.offered();
    driver.indirect = false;
    driver.probe(features, usize::from(driver.handle.queues()));
    driver.run();
    assert_eq!(driver.status() & status::NEEDS_RESET, 0);
    match kind {
        Kind::Disk { .. } => {
            driver.add(0, &[&[0; 16]], &[SECTOR as u32, 1]);
        }
        Kind::Random => {
            driver.add(0, &[], &[SECTOR as u32 + 1]);
        }
        Kind::Console => return,
        Kind::Sockets => {
            // Every packet comes back once there are buffers for answers.
            for _ in 0..64 {
                driver.add(vsock::RECEIVE, &[], &[4096]);
            }
            driver.kick(vsock::RECEIVE);
            let reset = vsock::Header {
                source_cid: CID.into(),
                destination_cid: vsock::HOST_CID,
                kind: vsock::STREAM,
                operation: vsock::Operation::Reset as u16,
                ..vsock::Header::default()
            };
            driver.add(vsock::TRANSMIT, &[&reset.encode()], &[]);
            driver.kick(vsock::TRANSMIT);
            driver.run();
            assert_eq!(driver.used(vsock::TRANSMIT).len(), 1);
            return;
        }
        Kind::Network => {
            // A frame comes back, whether or not there is still somebody to take it.
            driver.add(TRANSMIT, &[&[0; HEADER], &[0; 60]], &[]);
            driver.kick(TRANSMIT);
            driver.run();
            while driver.handle.wants_room() {
                let mut peer = maker.peer.lock().expect("the peer");
                let room = peer.as_mut().map(|peer| peer.read(&mut vec![0; 100_000]));
                assert!(room.is_some_and(|read| read.is_ok()), "waits for nobody");
                drop(peer);
                driver.poll();
            }
            assert_eq!(driver.used(TRANSMIT).len(), 1);
            return;
        }
    }
    driver.kick(0);
    driver.run();
    let used = driver.used(0);
    assert_eq!(used.len(), 1);
    assert_eq!(used[0].bytes.len(), SECTOR as usize + 1);
    if kind != Kind::Random {
        assert_eq!(used[0].bytes.last(), Some(&0), "the request failed");
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let kind = match input.byte() {
        0xf0.. => Kind::Network,
        0xe0.. => Kind::Sockets,
        other => match other % 4 {
            0 => Kind::Disk { read_only: false },
            1 => Kind::Disk { read_only: true },
            2 => Kind::Random,
            _ => Kind::Console,
        },
    };
    let fails = Arc::new(AtomicBool::new(true));
    let maker = Maker {
        kind,
        fails: fails.clone(),
        peer: Mutex::new(None),
    };
    let mut driver = Driver::new(maker.device());
    for _ in 0..MOST {
        if input.0.is_empty() {
            break;
        }
        make_move(&mut driver, &maker, &mut input);
    }
    fails.store(false, Ordering::Relaxed);
    check(&mut driver, &maker);
});
