//! Tests of the console from the side of Linux's driver and the host: messages about ports, and the
//! host's operations on them.
#![allow(clippy::unwrap_used)]

mod bytes;
mod eof;
mod hostile;
mod life;
mod slow;

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::virtio::mock::{LinuxConsole, Read, status};
use crate::virtio::{FEATURE_EVENT_INDEX, FEATURE_VERSION_1, TRANSPORT_FEATURES};

const OWN: u64 = FEATURE_SIZE | FEATURE_MULTIPORT | FEATURE_EMERGENCY_WRITE;
const ALL: u64 = TRANSPORT_FEATURES | OWN;

/// The backend of a port, as the test sees it.
#[derive(Debug, Default)]
struct Behind {
    /// The bytes for the guest.
    waiting: VecDeque<u8>,
    /// The bytes queued anew with every open.
    on_open: Vec<u8>,
    /// The bytes from the guest.
    got: Vec<u8>,
    /// The lengths of the calls by which they came.
    calls: Vec<usize>,
    room: usize,
    opens: usize,
    /// The number of unread bytes of each close.
    closes: Vec<u64>,
    /// True if opens and closes take a while to handle.
    slow: bool,
    /// True while one is being handled.
    busy: bool,
}

#[derive(Clone, Default)]
struct End(Arc<Mutex<Behind>>);

impl End {
    fn with<T>(&self, what: impl FnOnce(&mut Behind) -> T) -> T {
        what(&mut self.0.lock().unwrap())
    }

    fn give(&self, bytes: &[u8]) {
        self.with(|end| end.waiting.extend(bytes));
    }

    fn got(&self) -> Vec<u8> {
        self.with(|end| std::mem::take(&mut end.got))
    }
}

impl PortBackend for End {
    fn opened(&mut self) {
        self.with(|end| {
            end.opens += 1;
            end.busy = end.slow;
            let bytes = end.on_open.clone();
            end.waiting.extend(bytes);
        });
    }

    fn closed(&mut self, unread: u64) {
        self.with(|end| {
            end.closes.push(unread);
            end.busy = end.slow;
        });
    }

    fn is_settled(&mut self) -> bool {
        self.with(|end| !end.busy)
    }

    fn write(&mut self, bytes: &[u8]) -> usize {
        self.with(|end| {
            let took = bytes.len().min(end.room);
            end.room -= took;
            end.got.extend(&bytes[..took]);
            end.calls.push(took);
            took
        })
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        self.with(|end| {
            let count = buffer.len().min(end.waiting.len());
            for (byte, value) in buffer.iter_mut().zip(end.waiting.drain(..count)) {
                *byte = value;
            }
            count
        })
    }
}

const SIZE: Size = Size {
    columns: 132,
    rows: 50,
};

/// Returns a console, a stream and a file. The backends accept everything.
fn ports() -> (Vec<PortAndBackend>, Vec<End>) {
    let configs = [
        PortConfig::console(),
        PortConfig::named("dt", EndOfFile::Never),
        PortConfig::named("tracectl", EndOfFile::WhenIdle),
    ];
    let ends: Vec<End> = configs.iter().map(|_| End::default()).collect();
    for end in &ends {
        end.with(|end| end.room = usize::MAX);
    }
    let boxed = |end: &End| Box::new(end.clone()) as Box<dyn PortBackend>;
    let ports = configs.into_iter().zip(ends.iter().map(boxed)).collect();
    (ports, ends)
}

const DT: u32 = 1;
const TRACECTL: u32 = 2;

fn device() -> (Console, Vec<End>, Arc<AtomicUsize>) {
    let (ports, ends) = ports();
    let config = ConsoleConfig {
        ports,
        max_ports: 4,
        size: SIZE,
    };
    let wakes = Arc::<AtomicUsize>::default();
    let counter = wakes.clone();
    let console = Console::new(config, move || {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    (console.unwrap(), ends, wakes)
}

struct Rig {
    linux: LinuxConsole,
    ends: Vec<End>,
    host: ConsoleHandle,
}

fn rig() -> Rig {
    let (console, ends, _) = device();
    Rig {
        host: console.handle(),
        linux: LinuxConsole::new(Box::new(console)),
        ends,
    }
}

fn probed(features: u64) -> Rig {
    let mut rig = rig();
    rig.linux.probe(features);
    rig
}

impl Rig {
    /// Runs the device's thread after an operation of the host, and then the driver.
    fn host_did(&mut self) {
        self.linux.driver.poll();
        self.linux.work();
    }

    /// Returns the messages since the last call as text.
    fn said(&mut self) -> Vec<String> {
        let log = std::mem::take(&mut self.linux.log);
        let words = |(message, rest): (Message, Vec<u8>)| {
            let event = Event::from_number(message.event).unwrap();
            let rest = String::from_utf8_lossy(&rest).into_owned();
            format!("{} {event:?} {} {rest}", message.id, message.value)
                .trim_end()
                .to_owned()
        };
        log.into_iter().map(words).collect()
    }
}

#[test]
fn the_driver_learns_of_every_port() {
    for features in [ALL, ALL & !FEATURE_EVENT_INDEX, FEATURE_VERSION_1 | OWN] {
        for indirect in [false, true] {
            let mut rig = rig();
            rig.linux.driver.indirect = indirect && features != FEATURE_VERSION_1 | OWN;
            rig.linux.probe(features);
            let ports = &rig.linux.ports;
            let console = &ports[&0];
            assert_eq!(
                (
                    console.console,
                    console.size,
                    console.guest_connected,
                    &console.name
                ),
                (true, Some((132, 50)), true, &None)
            );
            for (id, name) in [(DT, "dt"), (TRACECTL, "tracectl")] {
                let port = &ports[&id];
                assert_eq!(port.name.as_deref(), Some(name));
                assert!(!port.console && port.host_connected && !port.guest_connected);
            }
            assert_eq!(ports.len(), 3);
            assert_eq!(
                rig.ends[0].with(|end| end.opens),
                1,
                "the driver opens the console"
            );
        }
    }
}

#[test]
fn messages_come_in_the_order_that_linux_needs() {
    let mut rig = probed(ALL);
    let mut said = rig.said();
    // Ports are independent of each other. Within each, the order matters.
    said.sort_by_key(|line| line.split(' ').next().map(str::to_owned));
    assert_eq!(
        said,
        [
            "0 DeviceAdd 0",
            "0 ConsolePort 1",
            "0 Resize 0 \u{fffd}\u{0}2\u{0}",
            "0 PortOpen 1",
            "1 DeviceAdd 0",
            "1 PortName 1 dt",
            "1 PortOpen 1",
            "2 DeviceAdd 0",
            "2 PortName 1 tracectl",
            "2 PortOpen 1",
        ]
    );
}

#[test]
fn a_driver_that_fails_hears_no_more() {
    let mut rig = probed(ALL);
    rig.said();
    rig.linux.say(DT, Event::PortReady, 0);
    rig.host.connect(DT, false);
    rig.host.connect(TRACECTL, false);
    rig.host_did();
    assert_eq!(rig.said(), ["2 PortOpen 0"], "it does not use port 1");
    rig.linux.say(BAD_ID, Event::DeviceReady, 0);
    rig.host.connect(TRACECTL, true);
    rig.host_did();
    assert_eq!(rig.said(), Vec::<String>::new());
    assert_eq!(rig.ends[0].with(|end| end.closes.len()), 1);
}

#[test]
fn there_can_be_many_ports() {
    let (mut ports, _) = ports();
    for id in ports.len()..MOST_PORTS as usize {
        let config = PortConfig::named(&format!("port{id}"), EndOfFile::Never);
        let end = End::default();
        end.give(format!("from {id}").as_bytes());
        ports.push((config, Box::new(end)));
    }
    let config = ConsoleConfig {
        ports,
        max_ports: MOST_PORTS,
        size: SIZE,
    };
    let mut linux = LinuxConsole::new(Box::new(Console::new(config, || {}).unwrap()));
    linux.buffers = 4;
    linux.probe(ALL);
    for id in 3..MOST_PORTS {
        assert_eq!(linux.ports[&id].name, Some(format!("port{id}")));
        linux.open(id);
        assert_eq!(linux.read_all(id), format!("from {id}").as_bytes());
    }
}

#[test]
fn a_driver_without_multiport_has_the_console_alone() {
    let mut rig = probed(ALL & !FEATURE_MULTIPORT);
    assert_eq!(rig.ends[0].with(|end| end.opens), 1);
    assert!(rig.linux.write(0, b"hello\n"));
    assert_eq!(rig.ends[0].got(), b"hello\n");
    rig.ends[0].give(b"ls\n");
    rig.ends[DT as usize].give(b"never read");
    rig.host_did();
    assert_eq!(rig.linux.read(0), Read::Bytes(b"ls\n".to_vec()));
    rig.linux.driver.write(0x070, 0);
    assert_eq!(rig.ends[0].with(|end| end.closes.len()), 1);
}

#[test]
fn configuration_space_tells_sizes_and_takes_emergency_characters() {
    let mut rig = rig();
    assert_eq!(rig.linux.driver.offered(), ALL);
    let read = |rig: &mut Rig, offset| rig.linux.driver.read(offset);
    assert_eq!(read(&mut rig, 0x100), 50 << 16 | 132);
    assert_eq!(
        (
            read(&mut rig, 0x104),
            read(&mut rig, 0x108),
            read(&mut rig, 0x1fc)
        ),
        (4, 0, 0)
    );
    // Before the driver is active, and after.
    for byte in *b"oops" {
        rig.linux.driver.write(0x108, u32::from(byte) | 0xaa00);
    }
    rig.linux.driver.write(0x10c, 1);
    rig.linux.driver.write(0x104, 1);
    rig.linux.probe(ALL);
    rig.linux.driver.write(0x108, u32::from(b'!'));
    assert_eq!(rig.ends[0].got(), b"oops!");
    assert_eq!(rig.host.emergency_bytes(), 5);
    rig.ends[0].with(|end| end.room = 0);
    rig.linux.driver.write(0x108, u32::from(b'?'));
    assert_eq!(rig.host.port_stats(0).unwrap().dropped, 1);
}

#[test]
fn the_console_is_resized() {
    for features in [ALL, ALL & !FEATURE_MULTIPORT] {
        let mut rig = probed(features);
        rig.linux.driver.write(0x064, 3);
        let generation = rig.linux.driver.read(0x0fc);
        for columns in [10, 80] {
            rig.host.resize(Size { columns, rows: 24 });
        }
        rig.host_did();
        assert_eq!(rig.linux.driver.read(0x100), 24 << 16 | 80);
        assert_eq!(rig.linux.driver.read(0x0fc), generation + 1);
        assert_ne!(rig.linux.driver.read(0x060) & 2, 0);
        if features & FEATURE_MULTIPORT != 0 {
            assert_eq!(rig.linux.ports[&0].size, Some((80, 24)));
        }
    }
}

#[test]
fn the_host_closes_and_opens_a_port() {
    let mut rig = probed(ALL);
    rig.linux.open(DT);
    rig.said();
    for open in [false, true] {
        rig.host.connect(DT, open);
        rig.host_did();
        assert_eq!(rig.linux.ports[&DT].host_connected, open);
        let expected = if open { Read::Waits } else { Read::End };
        assert_eq!(rig.linux.read(DT), expected);
        assert_eq!(rig.linux.write(DT, b"x"), open);
    }
    assert_eq!(rig.said(), ["1 PortOpen 0", "1 PortOpen 1"]);
    // Bytes that are queued when the host side closes wait for its open.
    rig.host.connect(DT, false);
    rig.linux.driver.poll();
    assert!(rig.linux.write(DT, b"y"), "the driver has not heard of it");
    assert_eq!(rig.ends[DT as usize].got(), b"x");
    rig.host.connect(DT, true);
    rig.host_did();
    assert_eq!(rig.ends[DT as usize].got(), b"y");
}

#[test]
fn ports_come_and_go() {
    let mut rig = probed(ALL);
    rig.said();
    let end = End::default();
    for round in 1..4 {
        let config = PortConfig::named("more", EndOfFile::Never);
        rig.host
            .add_port(3, config.clone(), Box::new(end.clone()))
            .unwrap();
        assert_eq!(
            rig.host.add_port(3, config, Box::new(NullBackend)),
            Err(PortConfigError::Exists { id: 3 })
        );
        rig.host_did();
        assert_eq!(rig.linux.ports[&3].name.as_deref(), Some("more"));
        rig.linux.open(3);
        end.give(b"hello");
        rig.host_did();
        assert_eq!(
            rig.linux.read(3),
            Read::Bytes(b"hello".to_vec()),
            "round {round}"
        );
        // The backend has no room, so the written bytes are dropped with the port.
        assert!(rig.linux.write(3, b"lost"));
        let stats = rig.host.port_stats(3).unwrap();
        assert_eq!((stats.from_guest, stats.to_guest), (0, 5));
        rig.host.remove_port(3).unwrap();
        rig.host_did();
        assert!(!rig.linux.ports.contains_key(&3));
        assert_eq!(
            end.with(|end| (end.opens, end.closes.len())),
            (round, round)
        );
        assert_eq!(rig.host.port_stats(3), None);
        assert_eq!(
            rig.host.remove_port(3),
            Err(PortConfigError::Missing { id: 3 })
        );
        assert_eq!(
            rig.said(),
            [
                "3 DeviceAdd 0",
                "3 PortName 1 more",
                "3 PortOpen 1",
                "3 DeviceRemove 0"
            ]
        );
    }
}

#[test]
fn ports_that_cannot_be_are_refused() {
    let (console, ..) = device();
    let name = |name: &str| PortConfig::named(name, EndOfFile::Never);
    let long = "n".repeat(MOST_NAME + 1);
    for (id, config, expected) in [
        (4, name("a"), "port 4: the device was made for ports 0 to 3"),
        (1, name("a"), "port 1 is there already: remove it first"),
        (3, name(""), "port 3: a name of 0 bytes"),
        (3, name("a/b"), "port 3: a name of 3 bytes"),
        (3, name("a\n"), "port 3: a name of 2 bytes"),
        (3, name(&long), "port 3: a name of 65 bytes"),
    ] {
        let error = console.handle().add_port(id, config, Box::new(NullBackend));
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    for (count, max_ports) in [(0, 4), (3, 2), (3, MOST_PORTS + 1), (0, 0)] {
        let config = ConsoleConfig {
            ports: ports().0.into_iter().take(count).collect(),
            max_ports,
            size: SIZE,
        };
        let made = Console::new(config, || {});
        assert!(made.is_err(), "{count} of {max_ports}");
    }
}

#[test]
fn requests_wake_the_device() {
    let (console, _, wakes) = device();
    let host = console.handle();
    let mut expected = 0;
    let mut woken = |what: &str| {
        expected += 1;
        assert_eq!(wakes.load(Ordering::Relaxed), expected, "{what}");
    };
    host.wake();
    woken("wake");
    host.connect(DT, false);
    woken("connect");
    host.resize(SIZE);
    woken("resize");
    host.add_port(
        3,
        PortConfig::named("x", EndOfFile::Never),
        Box::new(NullBackend),
    )
    .unwrap();
    woken("add");
    host.remove_port(3).unwrap();
    woken("remove");
}
