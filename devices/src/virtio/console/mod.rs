//! A virtio console with many ports: virtio 1.2 section 5.3.
//!
//! Port 0 is the console (hvc0 in Linux). The others are named files in `/dev/virtio-ports`. The
//! caller owns the backend of a port, a [`PortBackend`]. The [`ConsoleHandle`] wakes the device for
//! it. It also opens and closes ports on the host side, adds and removes them. The console keeps no
//! bytes. Those that a backend does not accept stay in the guest's queue. Those for which the guest
//! has no room stay with the backend.
//!
//! Messages to the driver are not queued either. Each port knows which messages are due, and sends
//! them when there is a buffer. So a guest that requests much and reads nothing costs nothing. A
//! host side that closes and opens again before the driver had a buffer was not closed for the
//! guest.

mod control;
mod end;
mod eof;
mod handle;
mod port;
mod state;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use super::device::read_space;
use super::{ChainError, DeviceStateError, Progress, Queues, VirtioDevice};
use handle::{Request, Shared, check_port};
use port::{BufferCredits, Detail, Port, Stage, receive_queue, transmit_queue};

pub use control::{BAD_ID, Event, Message};
pub use end::{
    ConsoleConfig, EndOfFile, NullBackend, PortAndBackend, PortBackend, PortConfig, WhenFull,
};
pub use handle::{ConsoleHandle, MOST_NAME, MOST_PORTS, PortConfigError, PortStats};

/// The feature of the console's size in configuration space.
pub const FEATURE_SIZE: u64 = 1;
/// The feature of several ports and control queues.
pub const FEATURE_MULTIPORT: u64 = 1 << 1;
/// The feature of single characters written to configuration space.
pub const FEATURE_EMERGENCY_WRITE: u64 = 1 << 2;

/// The queue of messages to the driver.
pub const CONTROL_RECEIVE: u16 = 2;
/// The queue of messages from the driver.
pub const CONTROL_TRANSMIT: u16 = 3;

/// The number of descriptors of each queue. Linux keeps a page for each of a receive queue.
const QUEUE_SIZE: u16 = 64;
/// The maximum number of messages that one call handles.
const MOST_MESSAGES: usize = 16;
/// The maximum time that a guest's open or close waits for a backend. Linux spins meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
/// The offset of the emergency register in configuration space.
const EMERGENCY: u64 = 8;

/// A console's size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Size {
    /// The number of characters in a line.
    pub columns: u16,
    /// The number of lines.
    pub rows: u16,
}

/// The device's model.
pub struct Console {
    shared: Arc<Shared>,
    max_ports: u32,
    size: Size,
    ports: BTreeMap<u32, Port>,
    multiport: bool,
    /// True if the driver accepts messages.
    listening: bool,
    control: BufferCredits,
    /// The time until which the driver's oldest message, an open or a close, waits for its port's
    /// backend.
    waiting: Option<Instant>,
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console")
            .field("max_ports", &self.max_ports)
            .field("size", &self.size)
            .field("multiport", &self.multiport)
            .finish_non_exhaustive()
    }
}

impl Console {
    /// Makes a console with its ports. `waker` makes the device's thread call
    /// [`DeviceHandle::poll`](super::DeviceHandle::poll). It is called from any thread, and must
    /// not call back.
    ///
    /// # Errors
    /// If there are no ports, too many of them, or one has an invalid name.
    pub fn new(
        config: ConsoleConfig,
        waker: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, PortConfigError> {
        let count = config.ports.len();
        let max_ports = config.max_ports;
        let most = max_ports.min(MOST_PORTS);
        if count == 0 || max_ports > MOST_PORTS || count > most as usize {
            return Err(PortConfigError::Count { found: count, most });
        }
        let shared = Arc::new(Shared::new(max_ports, Box::new(waker)));
        let mut ports = BTreeMap::new();
        for (id, (config, end)) in (0..).zip(config.ports) {
            check_port(id, max_ports, &config)?;
            let counts = shared.enter(id).ok_or(PortConfigError::Exists { id })?;
            ports.insert(id, Port::new(id, config, end, counts));
        }
        Ok(Self {
            shared,
            max_ports,
            size: config.size,
            ports,
            multiport: false,
            listening: false,
            control: BufferCredits::default(),
            waiting: None,
        })
    }

    /// Returns the host's handle.
    #[must_use]
    pub fn handle(&self) -> ConsoleHandle {
        ConsoleHandle(self.shared.clone())
    }

    /// Returns the port of a queue.
    fn port_of(&mut self, queue: u16) -> Option<&mut Port> {
        let id = match u32::from(queue) / 2 {
            0 => 0,
            1 => return None,
            pair => pair - 1,
        };
        self.ports.get_mut(&id)
    }

    /// Carries out the host's requests.
    fn take_requests(&mut self, queues: &mut Queues) {
        for request in self.shared.take_requests() {
            match request {
                Request::Connect { id, open } => {
                    if let Some(port) = self.ports.get_mut(&id) {
                        port.connect(open);
                    }
                }
                Request::Resize(size) => {
                    self.size = size;
                    for port in self.ports.values_mut() {
                        port.tell_size = port.stage == Stage::Ready && port.config.console;
                    }
                    queues.config_changed();
                }
                Request::Add {
                    id,
                    config,
                    end,
                    counts,
                } => {
                    self.ports.insert(id, Port::new(id, config, end, counts));
                }
                Request::Remove { id } => self.remove(id, queues),
            }
        }
    }

    fn remove(&mut self, id: u32, queues: &mut Queues) {
        if let Some(port) = self.ports.get_mut(&id) {
            port.dismantle(queues);
            port.removing = true;
        }
        self.let_go();
    }

    /// Releases ports that are to be removed and that the driver does not know.
    fn let_go(&mut self) {
        self.ports.retain(|&id, port| {
            let stays = !port.removing || port.stage != Stage::Unknown;
            if !stays {
                self.shared.leave(id);
            }
            stays
        });
    }

    /// Handles messages of the driver. Returns whether the call's bound ended it.
    fn take_messages(&mut self, now: Instant, queues: &mut Queues) -> bool {
        for _ in 0..MOST_MESSAGES {
            // Whatever the result of the message that waited, the next one does not inherit its
            // time.
            let begun = self.waiting.take();
            let Some(chain) = queues.pop(CONTROL_TRANSMIT) else {
                if queues.listen(CONTROL_TRANSMIT) {
                    continue;
                }
                return false;
            };
            let mut bytes = [0; Message::LENGTH];
            let taken = if chain.writable() != 0 {
                Err(ChainError::Direction)
            } else if chain.read(queues.memory(), 0, &mut bytes) < bytes.len() {
                Err(ChainError::Content)
            } else {
                self.take_message(Message::decode(bytes), begun, now, queues)
            };
            match taken {
                Ok(true) => queues.give(CONTROL_TRANSMIT, chain, 0),
                Ok(false) => {
                    queues.put_back(CONTROL_TRANSMIT, chain);
                    return false;
                }
                Err(error) => {
                    self.shared.bad_messages.fetch_add(1, Ordering::Relaxed);
                    queues.reject(CONTROL_TRANSMIT, chain, error);
                }
            }
        }
        true
    }

    /// Handles a message. Returns whether it is done; one that waits for a backend is not, and
    /// comes again. `begun` is the time until which it has waited before.
    ///
    /// # Errors
    /// If the message is invalid.
    fn take_message(
        &mut self,
        message: Message,
        begun: Option<Instant>,
        now: Instant,
        queues: &mut Queues,
    ) -> Result<bool, ChainError> {
        let event = Event::from_number(message.event);
        if event == Some(Event::DeviceReady) {
            // A driver that starts anew knows no port.
            for port in self.ports.values_mut() {
                port.reset();
            }
            self.let_go();
            self.listen(message.value != 0, queues);
            return Ok(true);
        }
        // A driver that resumes from hibernation knows its ports and sends only that they are
        // ready.
        if !self.listening && event == Some(Event::PortReady) {
            self.listen(true, queues);
        }
        let port = self.ports.get_mut(&message.id);
        let port = port.ok_or(ChainError::Content)?;
        match (event, message.value) {
            // The message was sent before the driver was notified of the removal.
            (Some(Event::PortReady | Event::PortOpen), _) if port.removing => {}
            (Some(Event::PortReady), 0) => port.stage = Stage::Announced,
            (Some(Event::PortReady), 1) => port.ready(queues),
            (Some(Event::PortOpen), value @ 0..=1) => {
                let until = match begun {
                    Some(until) => until,
                    None => {
                        match value {
                            0 => port.close(queues),
                            _ => port.open(),
                        }
                        now + PATIENCE
                    }
                };
                if !port.is_settled() && now < until {
                    self.waiting = Some(until);
                    return Ok(false);
                }
                port.settled(now, queues);
            }
            _ => return Err(ChainError::Content),
        }
        Ok(true)
    }

    fn listen(&mut self, listening: bool, queues: &Queues) {
        self.listening = listening;
        self.control = BufferCredits::begin(queues, CONTROL_RECEIVE);
    }

    /// Sends the due messages to the driver, as far as it has buffers for them.
    fn tell(&mut self, now: Instant, queues: &mut Queues) {
        if !self.listening {
            return;
        }
        while let Some((id, message, detail)) = self.ports.iter().find_map(|(&id, port)| {
            let (message, detail) = port.next_message(self.size)?;
            Some((id, message, detail))
        }) {
            let mut bytes = message.encode().to_vec();
            match detail {
                Detail::None => {}
                Detail::Text(name) => bytes.extend_from_slice(name.as_bytes()),
                Detail::Size(size) => {
                    bytes.extend_from_slice(&size.columns.to_le_bytes());
                    bytes.extend_from_slice(&size.rows.to_le_bytes());
                }
            }
            if !send(&bytes, queues) {
                return;
            }
            if let Some(port) = self.ports.get_mut(&id) {
                if port.removing {
                    port.stage = Stage::Unknown;
                } else {
                    port.sent(message, queues.taken(CONTROL_RECEIVE), now);
                }
            }
            self.let_go();
        }
    }

    /// Does the work after every call: bytes, timers, and due messages.
    fn finish(&mut self, bounded: bool, now: Instant, queues: &mut Queues) -> Progress {
        let ports = if self.multiport { u32::MAX } else { 1 };
        let mut more = bounded;
        for (_, port) in self.ports.range_mut(..ports) {
            more |= port.pump(queues);
        }
        if self.multiport {
            let given = self.control.given_back(queues, CONTROL_RECEIVE);
            for port in self.ports.values_mut() {
                port.tick(now, queues, given);
            }
            self.tell(now, queues);
        }
        if more { Progress::More } else { Progress::Idle }
    }
}

/// Puts a message into a buffer of the driver. Buffers that are too small for it are rejected.
fn send(bytes: &[u8], queues: &mut Queues) -> bool {
    for _ in 0..=queues.size(CONTROL_RECEIVE) {
        let Some(chain) = queues.pop(CONTROL_RECEIVE) else {
            if queues.listen(CONTROL_RECEIVE) {
                continue;
            }
            return false;
        };
        if chain.readable() != 0 {
            queues.reject(CONTROL_RECEIVE, chain, ChainError::Direction);
        } else if chain.writable() < bytes.len() {
            queues.reject(CONTROL_RECEIVE, chain, ChainError::Content);
        } else {
            chain.write(queues.memory(), 0, bytes);
            queues.give(CONTROL_RECEIVE, chain, bytes.len());
            return true;
        }
    }
    false
}

impl VirtioDevice for Console {
    fn name(&self) -> &'static str {
        "virtio console"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn features(&self) -> u64 {
        FEATURE_SIZE | FEATURE_MULTIPORT | FEATURE_EMERGENCY_WRITE
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; (self.max_ports as usize + 1) * 2]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let ([a, b], [c, d]) = (
            self.size.columns.to_le_bytes(),
            self.size.rows.to_le_bytes(),
        );
        let [e, f, g, h] = self.max_ports.to_le_bytes();
        read_space(&[a, b, c, d, e, f, g, h], offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let at = EMERGENCY.checked_sub(offset).map(usize::try_from);
        let Some(&byte) = at.and_then(|at| data.get(at.ok()?)) else {
            return;
        };
        self.shared.emergency.fetch_add(1, Ordering::Relaxed);
        if let Some(port) = self.ports.get_mut(&0) {
            port.emergency(byte);
        }
    }

    fn activate(&mut self, features: u64) {
        self.multiport = features & FEATURE_MULTIPORT != 0;
        self.listening = false;
        if !self.multiport
            && let Some(port) = self.ports.get_mut(&0)
        {
            port.reopen();
        }
    }

    fn process(&mut self, queue: u16, now: Instant, queues: &mut Queues) -> Progress {
        if queue > 1 && !self.multiport {
            return Progress::Idle;
        }
        self.take_requests(queues);
        let bounded = queue == CONTROL_TRANSMIT && self.take_messages(now, queues);
        if let Some(port) = self.port_of(queue) {
            port.wants_receive |= receive_queue(port.id) == queue;
            port.wants_transmit |= transmit_queue(port.id) == queue;
        }
        self.finish(bounded, now, queues)
    }

    fn poll(&mut self, now: Instant, queues: &mut Queues) -> Progress {
        self.take_requests(queues);
        for port in self.ports.values_mut() {
            port.wants_receive = true;
            port.wants_transmit = true;
        }
        let bounded = self.waiting.is_some() && self.take_messages(now, queues);
        self.finish(bounded, now, queues)
    }

    fn deadline(&self) -> Option<Instant> {
        let ports = self.ports.values();
        let ends = ports.filter_map(|port| port.eof.deadline());
        ends.chain(self.waiting).min()
    }

    fn reset(&mut self) {
        self.waiting = None;
        for port in self.ports.values_mut() {
            port.reset();
        }
        self.let_go();
        self.multiport = false;
        self.listening = false;
        self.control = BufferCredits::default();
    }

    fn save(&self) -> Vec<u8> {
        self.save_state()
    }

    fn restore(&mut self, state: &[u8], features: Option<u64>) -> Result<(), DeviceStateError> {
        self.restore_state(state, features)
    }
}

#[cfg(test)]
mod tests;
