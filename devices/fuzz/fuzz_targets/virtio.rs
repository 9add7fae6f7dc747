//! A driver of the virtio console with arbitrary registers, rings, descriptors and control
//! messages.
//!
//! The input is a list of moves: a byte for the kind, then its operands. Failures are a panic, a
//! device that never comes to rest, and one that no proper driver can use afterwards.
#![no_main]

use std::time::Duration;

use devices::virtio::TRANSPORT_FEATURES;
use devices::virtio::console::{
    CONTROL_TRANSMIT, Console, ConsoleConfig, ConsoleHandle, EndOfFile, FEATURE_MULTIPORT,
    FEATURE_SIZE, Message, NullBackend, PortBackend, PortConfig, Size,
};
use devices::virtio::mock::{Descriptor, LinuxConsole, RING_AREA, RINGS, status};
use hostile::Input;
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress};

const FEATURES: u64 = TRANSPORT_FEATURES | FEATURE_SIZE | FEATURE_MULTIPORT;
/// The number of queues: three ports, one that may be added, and the control queues.
const QUEUES: u16 = 10;
/// The maximum number of moves of one run.
const MOST: usize = 400;

/// A backend that accepts and returns alternately more and fewer bytes than requested.
#[derive(Default)]
struct Moody {
    turn: usize,
    left: usize,
}

impl PortBackend for Moody {
    fn opened(&mut self) {
        self.left = 10_000;
    }

    fn write(&mut self, bytes: &[u8]) -> usize {
        self.turn += 1;
        [bytes.len(), 0, 1, bytes.len() / 2, usize::MAX][self.turn % 5]
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        self.turn += 1;
        buffer.fill(0xee);
        let count = [buffer.len(), 0, 1, buffer.len() / 2][self.turn % 4].min(self.left);
        self.left -= count;
        count
    }
}

fn device() -> (Console, ConsoleHandle) {
    let configs = [
        PortConfig::console(),
        PortConfig::named("dt", EndOfFile::Never),
        PortConfig::named("tracectl", EndOfFile::WhenIdle),
    ];
    let ports = configs.map(|config| (config, Box::new(Moody::default()) as Box<dyn PortBackend>));
    let config = ConsoleConfig {
        ports: ports.into(),
        max_ports: 4,
        size: Size {
            columns: 80,
            rows: 24,
        },
    };
    let console = Console::new(config, || {}).expect("a proper configuration");
    let handle = console.handle();
    (console, handle)
}

fn queue(input: &mut Input) -> u16 {
    u16::from(input.byte()) % QUEUES
}

fn make_move(linux: &mut LinuxConsole, host: &mut ConsoleHandle, input: &mut Input) {
    let driver = &mut linux.driver;
    let memory = driver.memory.clone();
    match input.byte() % 14 {
        0 => {
            let queue = queue(input);
            let number = u16::from(input.byte()) % 64;
            let descriptor = Descriptor {
                address: input.address(),
                length: input.word(),
                flags: input.short(),
                next: input.short(),
            };
            let table = RINGS + u64::from(queue) * RING_AREA;
            descriptor.store(&memory, table, number);
        }
        1 | 2 => {
            let (queue, head) = (queue(input), u16::from(input.byte()));
            if let Some(ring) = driver.rings.get_mut(usize::from(queue)) {
                ring.publish(&memory, head);
            }
            driver.notify(queue);
        }
        3 => {
            let (queue, index) = (queue(input), input.short());
            if let Some(ring) = driver.rings.get_mut(usize::from(queue)) {
                ring.set_index(&memory, index);
            }
        }
        4 | 5 => {
            let message = Message {
                id: u32::from(input.byte()),
                event: u16::from(input.byte()),
                value: u16::from(input.byte()),
            };
            driver.raw_send(CONTROL_TRANSMIT, &message.encode());
        }
        6 => {
            let (queue, length) = (queue(input), usize::from(input.short()));
            driver.raw_send(queue, &vec![1; length + 1]);
        }
        7 => {
            let queue = u32::from(input.byte());
            driver.write(0x050, queue);
        }
        8 => {
            let (offset, value) = (u32::from(input.byte()) % 0x44 * 4, input.word());
            driver.read(offset);
            driver.write(offset, value);
        }
        9 => {
            let at =
                RINGS + u64::from(queue(input)) * RING_AREA + u64::from(input.short() % 0x7000);
            let bytes: [u8; 8] = input.bytes();
            let _ = memory.write_slice(&bytes, GuestAddress(at));
        }
        10 => {
            let (id, what) = (u32::from(input.byte()) % 5, input.byte());
            match what % 4 {
                0 => host.connect(id, what & 4 != 0),
                1 => drop(host.remove_port(id)),
                _ => {
                    let config = PortConfig::named("more", EndOfFile::WhenIdle);
                    drop(host.add_port(id, config, Box::new(NullBackend)));
                }
            }
        }
        11 => {
            let time = Duration::from_millis(u64::from(input.byte()) * 8);
            driver.sleep(time);
        }
        12 => {
            let (console, handle) = device();
            // A guest can make its queues such that no device accepts them.
            drop(linux.replace(Box::new(console)));
            *host = handle;
        }
        _ => {
            let (queue, event) = (queue(input), input.short());
            if let Some(ring) = driver.rings.get(usize::from(queue)) {
                ring.set_used_event(&memory, event);
            }
        }
    }
    linux.driver.run();
    linux.driver.poll();
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let (console, mut host) = device();
    let mut linux = LinuxConsole::new(Box::new(console));
    linux.buffers = 8;
    linux.probe(FEATURES);
    for _ in 0..MOST {
        if input.0.is_empty() {
            break;
        }
        make_move(&mut linux, &mut host, &mut input);
    }
    // Whatever was done, a proper driver finds the ports that exist, and can open them.
    linux.probe(FEATURES);
    assert_eq!(linux.driver.status() & status::NEEDS_RESET, 0);
    let ports: Vec<u32> = linux.ports.keys().copied().collect();
    for id in ports {
        if !linux.ports[&id].guest_connected {
            linux.open(id);
        }
        assert!(
            host.port_stats(id).is_some_and(|stats| stats.guest_open),
            "port {id}"
        );
    }
});
