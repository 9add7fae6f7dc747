//! virtio-vsock (virtio 1.2, 5.10): stream sockets between programs of the guest and of the host,
//! over a [`VsockBackend`].
//!
//! A program of the host connects, sends the line `CONNECT PORT`, and gets the line `OK PORT` with
//! a port of its own when the guest has accepted. A connection of the guest to the host (context 2)
//! goes to the program that serves its port. That is the protocol of Firecracker's device.
//!
//! Everything is bounded: connections, lines that are not complete, bytes that a program has not
//! taken, answers that the guest has no buffers for. While those wait, the guest's packets stay in
//! its queue. Bytes for the guest are read only as it has room for them.
//!
//! Connections do not survive a snapshot. A restored guest gets an event for that, the transport
//! reset. Programs of the host wait until the guest has seen it.
//!
//! Not here: datagrams, and sockets with message boundaries.

mod backend;
mod connection;
mod guest;
mod header;
mod host;
mod receive;
mod transmit;
mod unix;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

use super::device::read_space;
use super::{ChainError, DeviceStateError, Progress, Queues, VirtioDevice};

pub use backend::{Direction, HostEvent, StreamId, VsockBackend};
pub use connection::BUFFER;
pub use header::{CLOSED, HEADER, Header, NO_MORE_RECEIVED, NO_MORE_SENT, Operation, STREAM};
pub use unix::{UnixHost, service_path};

use connection::{Connection, Ports};

/// The queue of buffers for packets to the guest.
pub const RECEIVE: u16 = 0;
/// The queue of the guest's packets.
pub const TRANSMIT: u16 = 1;
/// The queue of buffers for events.
pub const EVENT: u16 = 2;

/// The host's context id.
pub const HOST_CID: u64 = 2;
/// The smallest context id of a guest.
pub const FIRST_CID: u32 = 3;

/// The feature of stream sockets, VIRTIO_VSOCK_F_STREAM.
pub const FEATURE_STREAM: u64 = 1;

/// The maximum number of streams, incomplete lines included.
pub const MOST_STREAMS: usize = 1024;
/// The maximum number of programs that have not completed their line.
pub const MOST_LINES: usize = 64;
/// The maximum length of a line in bytes, with its end.
pub const LONGEST_LINE: usize = 32;
/// The time that a program has for its line.
pub const LINE_TIME: Duration = Duration::from_secs(10);
/// The time that the guest has for the answer to a request, and to an end.
pub const ANSWER_TIME: Duration = Duration::from_secs(10);

const QUEUE_SIZE: u16 = 256;
const EVENT_SIZE: u16 = 16;
/// The size in bytes of the largest content of a packet.
const LARGEST: usize = 64 << 10;
/// The maximum number of packets in each direction, and of new programs, in one call.
const AT_ONCE: usize = 64;
/// The maximum number of answers that wait for buffers before the guest's packets do.
const MOST_RESETS: usize = 256;
/// The time after which a failed accept is tried again.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);
/// The event of a guest whose connections are gone, VIRTIO_VSOCK_EVENT_TRANSPORT_RESET.
const TRANSPORT_RESET: u32 = 0;
/// The size of an event in bytes.
const EVENT_LENGTH: usize = 4;
/// The time that a restored guest has to see that event.
const RESET_TIME: Duration = Duration::from_secs(10);
/// The first port of the host's programs. As many follow.
const FIRST_PORT: u32 = 1 << 30;

/// The properties of a socket device besides its backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VsockOptions {
    /// The guest's context id, from [`FIRST_CID`] on.
    pub cid: u32,
    /// A number that differs between the devices of a guest and of its restored copies. It chooses
    /// the first port of the host's programs.
    pub seed: u32,
}

/// The use of a stream.
enum Role {
    /// Its program has not completed its line.
    Line {
        /// The bytes so far.
        bytes: Vec<u8>,
        /// The time that it has.
        until: Instant,
    },
    /// It is connected.
    Connection(Ports),
    /// The guest has closed. These bytes are left.
    Draining(Vec<u8>),
}

/// A refusal or an end for the guest.
#[derive(Debug, Clone, Copy)]
struct Reset {
    ports: Ports,
    kind: u16,
}

/// The progress of a restored guest with the event that its connections are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Restored {
    /// It has no buffer for the event yet.
    Due,
    /// It has the event. The count of buffers for events was this one then.
    Sent(u16),
}

/// A socket device.
pub struct Vsock {
    options: VsockOptions,
    /// The backend. Without one the guest's connections are refused.
    backend: Option<Box<dyn VsockBackend>>,
    streams: HashMap<StreamId, Role>,
    /// The number of streams whose line is not complete.
    lines: usize,
    connections: HashMap<Ports, Connection>,
    /// The connections that may have a packet for the guest.
    due: VecDeque<Ports>,
    resets: VecDeque<Reset>,
    /// The next port of the host's programs, above [`FIRST_PORT`].
    next_port: u32,
    /// True if programs may wait to be accepted.
    incoming: bool,
    /// The earliest time at which something may be late.
    wake: Option<Instant>,
    restored: Option<Restored>,
    /// The time at which a restored guest has seen its event in any case.
    restored_until: Option<Instant>,
    events: Vec<HostEvent>,
    /// The content of a packet while it is moved.
    content: Box<[u8]>,
}

impl fmt::Debug for Vsock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vsock")
            .field("options", &self.options)
            .field("streams", &self.streams.len())
            .finish_non_exhaustive()
    }
}

impl Vsock {
    /// Makes a device over `backend`. Without one the guest finds nobody.
    #[must_use]
    pub fn new(backend: Option<Box<dyn VsockBackend>>, options: VsockOptions) -> Self {
        Self {
            options,
            backend,
            streams: HashMap::new(),
            lines: 0,
            connections: HashMap::new(),
            due: VecDeque::new(),
            resets: VecDeque::new(),
            next_port: options.seed,
            incoming: true,
            wake: None,
            restored: None,
            restored_until: None,
            events: Vec::new(),
            content: vec![0; LARGEST].into(),
        }
    }

    /// Notes a time at which to look what is late.
    fn wake_at(&mut self, at: Option<Instant>) {
        self.wake = match (self.wake, at) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
    }

    /// Does everything that is possible, within the bounds of one call.
    fn work(&mut self, now: Instant, queues: &mut Queues) -> Progress {
        self.report_reset(now, queues);
        self.expire(now);
        let mut more = self.take_events(now);
        more |= self.transmit(queues) == Progress::More;
        let full = self.is_full();
        more |= self.receive(now, queues) == Progress::More;
        // The guest's packets waited for the room that there is now.
        more |= full && !self.is_full();
        match more {
            true => Progress::More,
            false => Progress::Idle,
        }
    }

    /// Checks whether the guest's packets wait, since each might need an answer.
    fn is_full(&self) -> bool {
        self.resets.len() >= MOST_RESETS
    }

    /// Reports to a restored guest that its connections are gone. The guest has seen it when it
    /// puts the buffer back.
    fn report_reset(&mut self, now: Instant, queues: &mut Queues) {
        if self.restored.is_some() && self.restored_until.is_none() {
            self.restored_until = now.checked_add(RESET_TIME);
            self.wake_at(self.restored_until);
        }
        if self.restored == Some(Restored::Due) && self.send_reset(queues) {
            let seen = queues.made_available(EVENT);
            self.restored = Some(Restored::Sent(seen));
        }
        if let Some(Restored::Sent(seen)) = self.restored {
            let back = queues.listen_behind(EVENT, seen) || queues.made_available(EVENT) != seen;
            if back || !self.holds(now) {
                self.restored = None;
                self.restored_until = None;
            }
        }
    }

    /// Puts the event that all connections are gone into a buffer. Returns whether there was one.
    fn send_reset(&self, queues: &mut Queues) -> bool {
        // A driver that adds more meanwhile is seen here again: its queue is small.
        for _ in 0..EVENT_SIZE {
            let Some(chain) = queues.pop(EVENT) else {
                match queues.listen(EVENT) {
                    true => continue,
                    false => return false,
                }
            };
            if chain.readable() > 0 || chain.writable() < EVENT_LENGTH {
                queues.reject(EVENT, chain, ChainError::Direction);
                continue;
            }
            let event = TRANSPORT_RESET.to_le_bytes();
            let length = chain.write(queues.memory(), 0, &event);
            queues.give(EVENT, chain, length);
            return true;
        }
        false
    }

    /// Checks whether programs of the host wait until a restored guest knows that all connections
    /// are gone. One that is made before would go too.
    fn holds(&self, now: Instant) -> bool {
        self.restored.is_some() && self.restored_until.is_some_and(|until| until > now)
    }

    /// Ends everything: no packet, line or connection is left.
    fn clear(&mut self) {
        let streams: Vec<StreamId> = self.streams.drain().map(|(stream, _)| stream).collect();
        if let Some(backend) = &mut self.backend {
            streams.into_iter().for_each(|stream| backend.close(stream));
        }
        self.lines = 0;
        self.connections.clear();
        self.due.clear();
        self.resets.clear();
        self.wake = None;
        self.incoming = true;
        self.restored = None;
        self.restored_until = None;
    }
}

impl VirtioDevice for Vsock {
    fn name(&self) -> &'static str {
        "virtio-vsock"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        FEATURE_STREAM
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE, QUEUE_SIZE, EVENT_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_space(&u64::from(self.options.cid).to_le_bytes(), offset, data);
    }

    fn activate(&mut self, _: u64) {
        // Programs may have connected before there was a driver.
        self.incoming = true;
    }

    fn process(&mut self, _: u16, now: Instant, queues: &mut Queues) -> Progress {
        self.work(now, queues)
    }

    fn poll(&mut self, now: Instant, queues: &mut Queues) -> Progress {
        self.work(now, queues)
    }

    fn deadline(&self) -> Option<Instant> {
        self.wake
    }

    fn reset(&mut self) {
        self.clear();
    }

    fn save(&self) -> Vec<u8> {
        // Connections are lost.
        Vec::new()
    }

    fn restore(&mut self, state: &[u8], features: Option<u64>) -> Result<(), DeviceStateError> {
        DeviceStateError::unless_empty(self.name(), state)?;
        self.restored = features.map(|_| Restored::Due);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
