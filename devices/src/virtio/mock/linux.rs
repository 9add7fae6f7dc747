//! The console's driver of Linux 6.1 (`drivers/char/virtio_console.c`): its messages, their timing,
//! and its readers' results.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::{Descriptor, Driver};
use crate::virtio::console::{
    BAD_ID, CONTROL_RECEIVE, CONTROL_TRANSMIT, Event, FEATURE_MULTIPORT, Message,
};
use crate::virtio::{TransportStateError, VirtioDevice};

/// The size of a receive buffer in bytes.
const PAGE: u32 = 4096;

/// The result of a read of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Read {
    /// The bytes read.
    Bytes(Vec<u8>),
    /// The end of the file.
    End,
    /// The read would block.
    Waits,
}

/// The driver's knowledge of a port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuestPort {
    /// The port's name.
    pub name: Option<String>,
    /// True if it is a console.
    pub console: bool,
    /// The columns and rows.
    pub size: Option<(u16, u16)>,
    /// True if the host side is open.
    pub host_connected: bool,
    /// True if a program in the guest has it open.
    pub guest_connected: bool,
    /// The data received and not read yet. A buffer is returned once it is read.
    inbox: VecDeque<(Vec<u8>, Vec<Descriptor>)>,
}

/// The driver with its ports.
#[derive(Debug)]
pub struct LinuxConsole {
    /// The transport's driver.
    pub driver: Driver,
    /// The ports by number.
    pub ports: BTreeMap<u32, GuestPort>,
    /// Every message received, with the bytes that followed it.
    pub log: Vec<(Message, Vec<u8>)>,
    /// The number of buffers of each receive queue. Linux adds as many as there are descriptors.
    pub buffers: usize,
}

impl LinuxConsole {
    /// Makes a driver that has not accessed its device yet.
    pub fn new(device: Box<dyn VirtioDevice>) -> Self {
        Self {
            driver: Driver::new(device),
            ports: BTreeMap::new(),
            log: Vec::new(),
            buffers: usize::MAX,
        }
    }

    /// Acts as `virtcons_probe`, and then runs until the driver is idle.
    pub fn probe(&mut self, features: u64) {
        self.ports.clear();
        self.log.clear();
        let multiport = features & FEATURE_MULTIPORT != 0;
        let queues = if multiport {
            usize::from(self.driver.handle.queues())
        } else {
            2
        };
        self.driver.probe(features, queues);
        if multiport {
            self.fill(CONTROL_RECEIVE);
            self.say(BAD_ID, Event::DeviceReady, 1);
        } else {
            let port = GuestPort {
                console: true,
                guest_connected: true,
                ..GuestPort::default()
            };
            self.ports.insert(0, port);
            self.fill(0);
        }
        self.work();
    }

    /// Acts as `fill_queue`.
    fn fill(&mut self, queue: u16) {
        let mut left = self.buffers;
        while left > 0 && self.driver.rings[usize::from(queue)].room() > 0 {
            self.driver.add(queue, &[], &[PAGE]);
            self.driver.kick(queue);
            left -= 1;
        }
        self.driver.run();
    }

    /// Acts as `__send_control_msg`, which spins until the device has taken the message.
    pub fn say(&mut self, id: u32, event: Event, value: u16) {
        let message = Message::new(id, event, value).encode();
        self.driver.add(CONTROL_TRANSMIT, &[&message], &[]);
        self.driver.kick(CONTROL_TRANSMIT);
        self.driver.run();
        // Another thread may be serving the device.
        for _ in 0..100_000 {
            let used = self.driver.used(CONTROL_TRANSMIT).len();
            assert!(used <= 1, "one message was given, {used} came back");
            if used == 1 {
                return;
            }
            std::thread::yield_now();
        }
        panic!("the guest spins for ever");
    }

    /// Acts as `control_work_handler`, until there is no message.
    pub fn work(&mut self) {
        self.driver.run();
        if self.driver.features & FEATURE_MULTIPORT == 0 {
            return;
        }
        loop {
            let used = self.driver.used(CONTROL_RECEIVE);
            if used.is_empty() {
                return;
            }
            for used in used {
                self.handle(&used.bytes);
                self.driver.add_chain(CONTROL_RECEIVE, &used.chain);
                self.driver.kick(CONTROL_RECEIVE);
                self.driver.run();
            }
        }
    }

    fn handle(&mut self, bytes: &[u8]) {
        let (head, rest) = bytes.split_first_chunk().unwrap();
        let message = Message::decode(*head);
        self.log.push((message, rest.to_vec()));
        let id = message.id;
        let event = Event::from_number(message.event).unwrap();
        if event == Event::DeviceAdd {
            assert!(!self.ports.contains_key(&id));
            self.ports.insert(id, GuestPort::default());
            self.fill(receive(id));
            self.say(id, Event::PortReady, 1);
            return;
        }
        let port = self.ports.get_mut(&id).unwrap();
        match event {
            Event::DeviceRemove => {
                self.ports.remove(&id);
                self.collect(id);
            }
            Event::ConsolePort => {
                port.console = true;
                port.guest_connected = true;
                self.say(id, Event::PortOpen, 1);
            }
            Event::Resize => {
                let word = |at: usize| u16::from_le_bytes([rest[at], rest[at + 1]]);
                port.size = Some((word(0), word(2)));
            }
            Event::PortOpen => port.host_connected = message.value != 0,
            Event::PortName => port.name = Some(String::from_utf8(rest.to_vec()).unwrap()),
            Event::DeviceReady | Event::DeviceAdd | Event::PortReady => {
                panic!("a driver's message: {message:?}")
            }
        }
    }

    /// Collects the received data. Without a reader it is discarded and the buffers are returned.
    fn collect(&mut self, id: u32) {
        let queue = receive(id);
        for used in self.driver.used(queue) {
            match self.ports.get_mut(&id) {
                Some(port) if port.guest_connected => {
                    port.inbox.push_back((used.bytes, used.chain));
                }
                _ => self.give_back(queue, &used.chain),
            }
        }
    }

    fn give_back(&mut self, queue: u16, chain: &[Descriptor]) {
        self.driver.add_chain(queue, chain);
        self.driver.kick(queue);
        self.driver.run();
    }

    /// Acts as `port_fops_open`.
    pub fn open(&mut self, id: u32) {
        let port = self.ports.get_mut(&id).unwrap();
        assert!(!port.guest_connected, "busy");
        port.guest_connected = true;
        self.say(id, Event::PortOpen, 1);
    }

    /// Acts as `port_fops_release`.
    pub fn close(&mut self, id: u32) {
        self.say(id, Event::PortOpen, 0);
        let port = self.ports.get_mut(&id).unwrap();
        port.guest_connected = false;
        let inbox = std::mem::take(&mut port.inbox);
        for (_, chain) in inbox {
            self.give_back(receive(id), &chain);
        }
        self.collect(id);
        self.driver.used(receive(id) + 1);
    }

    /// Acts as `port_fops_read` with a buffer of a page.
    pub fn read(&mut self, id: u32) -> Read {
        self.collect(id);
        let port = self.ports.get_mut(&id).unwrap();
        match port.inbox.pop_front() {
            Some((bytes, chain)) => {
                self.give_back(receive(id), &chain);
                Read::Bytes(bytes)
            }
            None if port.host_connected => Read::Waits,
            None => Read::End,
        }
    }

    /// Reads all available bytes.
    pub fn read_all(&mut self, id: u32) -> Vec<u8> {
        let mut all = Vec::new();
        while let Read::Bytes(bytes) = self.read(id) {
            all.extend(bytes);
        }
        all
    }

    /// Acts as `cat`: opens, reads until the end, closes. Returns `None` if the end does not come
    /// within a second.
    pub fn cat(&mut self, id: u32) -> Option<Vec<u8>> {
        self.open(id);
        let mut all = Vec::new();
        let end = self.driver.now + Duration::from_secs(1);
        let all = loop {
            match self.read(id) {
                Read::Bytes(bytes) => all.extend(bytes),
                Read::End => break Some(all),
                Read::Waits if self.driver.now >= end => break None,
                Read::Waits => {
                    self.driver.sleep(Duration::from_millis(10));
                    self.work();
                }
            }
        };
        self.close(id);
        all
    }

    /// Acts as `port_fops_write`. Returns whether the bytes went into the queue; otherwise it would
    /// block.
    pub fn write(&mut self, id: u32, bytes: &[u8]) -> bool {
        let queue = receive(id) + 1;
        self.driver.used(queue);
        let room = self.driver.rings[usize::from(queue)].room() > 0;
        // The console's driver does not check whether the host side is open.
        let port = &self.ports[&id];
        if !room || !(port.host_connected || port.console) {
            return false;
        }
        self.driver.add(queue, &[bytes], &[]);
        self.driver.kick(queue);
        self.driver.run();
        true
    }

    /// Continues with another device, as after a snapshot.
    pub fn replace(&mut self, device: Box<dyn VirtioDevice>) -> Result<(), TransportStateError> {
        self.driver.replace(device)
    }
}

/// Returns the receive queue of a port.
pub fn receive(id: u32) -> u16 {
    if id == 0 { 0 } else { id as u16 * 2 + 2 }
}
