//! virtio-net (virtio 1.2, 5.1): an Ethernet card over a [`NetBackend`], with pairs of queues for
//! both directions and one queue for commands.
//!
//! A frame comes to the guest by the pair by which it last sent one of the same flow. All pairs are
//! served in turn.
//!
//! The device holds at most one received packet, and no chain between two calls. While the guest
//! has no buffers nothing is taken from the backend. While the backend has no room the guest's
//! frames stay in its queue. A backend that ends takes the link down, and the device lives on.
//!
//! The link of a restored device is down for a moment, if it is on another network. The driver then
//! announces its addresses, and programs in the guest may ask for new ones.
//!
//! Not here: filters by address and VLAN, and other commands than the number of pairs and the
//! acknowledgement of an announcement. The guest is given every frame that the backend has.

mod backend;
mod header;
mod receive;
mod steering;
mod stream;
mod transmit;

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, VIRTIO_NET_CTRL_MQ,
    VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_ERR, VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ,
    VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_OK,
    VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP,
};

use super::device::read_space;
use super::{ChainError, DeviceStateError, Progress, Queues, VirtioDevice};

pub use backend::{Abilities, GuestOffloads, HEADER, LONGEST_FRAME, NetBackend, SHORTEST_FRAME};
use steering::Steering;
pub use stream::{LONGEST_STREAM_FRAME, StreamBackend};

/// The first queue of buffers for received frames. That of pair N is 2 × N behind it.
pub const RECEIVE: u16 = 0;
/// The first queue of frames to send. That of pair N is 2 × N behind it.
pub const TRANSMIT: u16 = 1;
/// The maximum number of pairs of queues.
pub const MAX_PAIRS: u16 = 8;

const QUEUE_SIZE: u16 = 256;
const CONTROL_SIZE: u16 = 16;
/// The maximum number of frames in each direction in one call.
const FRAMES_AT_ONCE: usize = 64;
/// The maximum number of commands in one call.
const COMMANDS_AT_ONCE: usize = 8;
/// The size of configuration space in bytes.
const CONFIG_LENGTH: usize = 12;
/// The time for which a restored device's link is down, in which Linux notices.
const LINK_PAUSE: Duration = Duration::from_millis(200);

const FEATURE_CHECKSUM: u64 = 1 << VIRTIO_NET_F_CSUM;
const FEATURE_GUEST_CHECKSUM: u64 = 1 << VIRTIO_NET_F_GUEST_CSUM;
const FEATURE_MTU: u64 = 1 << VIRTIO_NET_F_MTU;
const FEATURE_MAC: u64 = 1 << VIRTIO_NET_F_MAC;
const FEATURE_GUEST_TSO4: u64 = 1 << VIRTIO_NET_F_GUEST_TSO4;
const FEATURE_GUEST_TSO6: u64 = 1 << VIRTIO_NET_F_GUEST_TSO6;
const FEATURE_HOST_TSO4: u64 = 1 << VIRTIO_NET_F_HOST_TSO4;
const FEATURE_HOST_TSO6: u64 = 1 << VIRTIO_NET_F_HOST_TSO6;
const FEATURE_MERGED_BUFFERS: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;
const FEATURE_STATUS: u64 = 1 << VIRTIO_NET_F_STATUS;
const FEATURE_CONTROL: u64 = 1 << VIRTIO_NET_F_CTRL_VQ;
const FEATURE_ANNOUNCE: u64 = 1 << VIRTIO_NET_F_GUEST_ANNOUNCE;
const FEATURE_PAIRS: u64 = 1 << VIRTIO_NET_F_MQ;
/// The features by which frames exceed the MTU.
const SEGMENTATION: u64 =
    FEATURE_GUEST_TSO4 | FEATURE_GUEST_TSO6 | FEATURE_HOST_TSO4 | FEATURE_HOST_TSO6;

/// The properties of a network device besides its backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetOptions {
    /// The guest's address.
    pub mac: [u8; 6],
    /// The MTU that the guest begins with, and its largest one.
    pub mtu: u16,
    /// The number of pairs of queues that the driver may use, from 1 to [`MAX_PAIRS`].
    pub pairs: u16,
    /// Whether the driver may send and receive TCP segments larger than that. Only a backend with
    /// offloads carries those.
    pub segmentation: bool,
    /// Whether a restored guest is on another network than before. Its link is down for a moment
    /// then, so that it asks for new addresses.
    pub moved: bool,
}

/// The link of the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Link {
    up: bool,
    /// True if the driver is to announce its addresses, and has not said that it did.
    announce: bool,
}

/// A network device.
pub struct Net {
    options: NetOptions,
    /// The backend, until it ends.
    backend: Option<Box<dyn NetBackend>>,
    abilities: Abilities,
    /// The negotiated features.
    features: u64,
    /// True if the driver's offloads are not set in the backend yet.
    offloads_due: bool,
    link: Link,
    /// The time at which the link of a restored device comes up. `None` before the first call.
    up_at: Option<Instant>,
    /// True if the link is down only until `up_at`.
    restored: bool,
    /// A packet for the guest, or of the guest's, while it is moved.
    packet: Box<[u8]>,
    /// The received packet that the guest has no buffers for yet, and its length.
    waiting: Box<[u8]>,
    waiting_length: Option<usize>,
    /// The number of pairs that the driver uses.
    pairs: u16,
    steering: Steering,
    /// True if transmission is suspended until the backend has room.
    stuck: bool,
    /// True if frames wait in queues whose notifications are off, and the backend has room.
    behind: bool,
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Net")
            .field("options", &self.options)
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

impl Net {
    /// Makes a device over `backend`. Without one its link is down.
    #[must_use]
    pub fn new(backend: Option<Box<dyn NetBackend>>, options: NetOptions) -> Self {
        let abilities = backend.as_ref().map(|backend| backend.abilities());
        let packet = || vec![0; HEADER + LONGEST_FRAME].into_boxed_slice();
        Self {
            options,
            abilities: abilities.unwrap_or_default(),
            features: 0,
            offloads_due: false,
            link: Link {
                up: backend.is_some(),
                announce: false,
            },
            backend,
            up_at: None,
            restored: false,
            packet: packet(),
            waiting: packet(),
            waiting_length: None,
            pairs: 1,
            steering: Steering::new(),
            stuck: false,
            behind: false,
        }
    }

    /// Returns the number of pairs that the device has.
    fn most_pairs(&self) -> u16 {
        self.options.pairs.clamp(1, MAX_PAIRS)
    }

    /// Returns the queue of commands: the one behind all pairs that the driver knows.
    fn control_queue(&self) -> u16 {
        match self.has(FEATURE_PAIRS) {
            true => 2 * self.most_pairs(),
            false => 2,
        }
    }

    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Returns configuration space (`struct virtio_net_config`).
    fn config(&self) -> [u8; CONFIG_LENGTH] {
        let mut status = 0;
        if self.link.up {
            status |= VIRTIO_NET_S_LINK_UP as u8;
        }
        if self.link.announce {
            status |= VIRTIO_NET_S_ANNOUNCE as u8;
        }
        let [a, b, c, d, e, f] = self.options.mac;
        let [low, high] = self.options.mtu.to_le_bytes();
        let [pairs, more_pairs] = self.most_pairs().to_le_bytes();
        [a, b, c, d, e, f, status, 0, pairs, more_pairs, low, high]
    }

    /// Ends the backend, which has failed: the link goes down for good.
    fn end(&mut self, error: &io::Error, queues: &mut Queues) {
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => {
                "its other side has closed".to_owned()
            }
            _ => error.to_string(),
        };
        log::warn!("the network: {reason}; the guest's link is down");
        self.backend = None;
        self.restored = false;
        self.waiting_length = None;
        self.stuck = false;
        self.behind = false;
        self.link = Link::default();
        queues.config_changed();
    }

    /// Takes on the driver's features.
    fn begin(&mut self, features: u64) {
        self.features = features;
        self.offloads_due = self.abilities.offloads;
    }

    /// Passes the driver's offloads to the backend, on the thread that serves the device.
    fn set_offloads(&mut self, queues: &mut Queues) {
        if !std::mem::take(&mut self.offloads_due) {
            return;
        }
        let offloads = GuestOffloads {
            checksum: self.has(FEATURE_GUEST_CHECKSUM),
            tcp4: self.has(FEATURE_GUEST_TSO4),
            tcp6: self.has(FEATURE_GUEST_TSO6),
        };
        let backend = self.backend.as_mut();
        if let Some(Err(error)) = backend.map(|backend| backend.set_offloads(offloads)) {
            self.end(&error, queues);
        }
    }

    /// Does what is due before anything else in a call.
    fn prepare(&mut self, now: Instant, queues: &mut Queues) {
        self.set_offloads(queues);
        self.bounce(now, queues);
    }

    /// Brings the link of a restored device up when it is time. Shows the driver each change.
    fn bounce(&mut self, now: Instant, queues: &mut Queues) {
        if !self.restored {
            return;
        }
        match self.up_at {
            // The guest keeps its addresses and announces them.
            None if !self.options.moved => {
                self.restored = false;
                self.link.up = self.backend.is_some();
                self.link.announce = self.link.up && self.has(FEATURE_ANNOUNCE);
                queues.config_changed();
            }
            None => {
                self.up_at = now.checked_add(LINK_PAUSE);
                queues.config_changed();
            }
            Some(at) if now >= at => {
                self.restored = false;
                self.up_at = None;
                self.link = Link {
                    up: self.backend.is_some(),
                    announce: self.has(FEATURE_ANNOUNCE),
                };
                queues.config_changed();
            }
            Some(_) => {}
        }
    }

    /// Carries out the commands of a queue.
    fn control(&mut self, queue: u16, queues: &mut Queues) -> Progress {
        for _ in 0..COMMANDS_AT_ONCE {
            let Some(chain) = queues.pop(queue) else {
                return match queues.listen(queue) {
                    true => Progress::More,
                    false => Progress::Idle,
                };
            };
            if chain.readable() < 2 || chain.writable() < 1 {
                queues.reject(queue, chain, ChainError::Direction);
                continue;
            }
            let mut command = [0; 4];
            let length = chain.read(queues.memory(), 0, &mut command);
            let done = self.carry_out(command.get(..length).unwrap_or_default());
            let answer = if done { VIRTIO_NET_OK } else { VIRTIO_NET_ERR } as u8;
            let length = chain.write(queues.memory(), 0, &[answer]);
            queues.give(queue, chain, length);
        }
        Progress::More
    }

    /// Carries out a command: its class, its number, and its data. Returns whether it is known and
    /// permitted.
    fn carry_out(&mut self, command: &[u8]) -> bool {
        const ANNOUNCED: [u8; 2] = [
            VIRTIO_NET_CTRL_ANNOUNCE as u8,
            VIRTIO_NET_CTRL_ANNOUNCE_ACK as u8,
        ];
        const PAIRS: [u8; 2] = [
            VIRTIO_NET_CTRL_MQ as u8,
            VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET as u8,
        ];
        let Some((command, data)) = command.split_first_chunk::<2>() else {
            return false;
        };
        match (*command, data) {
            (ANNOUNCED, _) if self.has(FEATURE_ANNOUNCE) => {
                self.link.announce = false;
                true
            }
            (PAIRS, &[low, high]) if self.has(FEATURE_PAIRS) => {
                let pairs = u16::from_le_bytes([low, high]);
                let is_permitted = (1..=self.most_pairs()).contains(&pairs);
                if is_permitted {
                    self.pairs = pairs;
                }
                is_permitted
            }
            _ => false,
        }
    }
}

impl VirtioDevice for Net {
    fn name(&self) -> &'static str {
        "virtio-net"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        let always = FEATURE_CHECKSUM
            | FEATURE_GUEST_CHECKSUM
            | FEATURE_MTU
            | FEATURE_MAC
            | FEATURE_MERGED_BUFFERS
            | FEATURE_STATUS
            | FEATURE_CONTROL
            | FEATURE_ANNOUNCE;
        let segmentation = if self.options.segmentation {
            SEGMENTATION
        } else {
            0
        };
        let pairs = if self.most_pairs() > 1 {
            FEATURE_PAIRS
        } else {
            0
        };
        always | segmentation | pairs
    }

    /// Checks the rules of virtio 1.2, 5.1.3.1: segmentation needs checksums, and commands their
    /// queue.
    fn accepts(&self, features: u64) -> bool {
        let needs = |feature: u64, needed: u64| features & feature == 0 || features & needed != 0;
        needs(
            FEATURE_GUEST_TSO4 | FEATURE_GUEST_TSO6,
            FEATURE_GUEST_CHECKSUM,
        ) && needs(FEATURE_HOST_TSO4 | FEATURE_HOST_TSO6, FEATURE_CHECKSUM)
            && needs(FEATURE_ANNOUNCE | FEATURE_PAIRS, FEATURE_CONTROL)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        let mut sizes = vec![QUEUE_SIZE; 2 * usize::from(self.most_pairs())];
        sizes.push(CONTROL_SIZE);
        sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_space(&self.config(), offset, data);
    }

    fn activate(&mut self, features: u64) {
        self.begin(features);
    }

    fn process(&mut self, queue: u16, now: Instant, queues: &mut Queues) -> Progress {
        self.prepare(now, queues);
        if queue == self.control_queue() {
            return self.control(queue, queues);
        }
        match queue % 2 {
            RECEIVE => {
                queues.ignore(queue);
                self.receive(queues)
            }
            // The pairs take turns when there is room.
            _ if self.stuck || self.behind => self.transmit_all(queues),
            _ => self.transmit(queue / 2, queues),
        }
    }

    fn poll(&mut self, now: Instant, queues: &mut Queues) -> Progress {
        self.prepare(now, queues);
        let sent = match self.stuck || self.behind {
            true => self.transmit_all(queues),
            false => Progress::Idle,
        };
        match (self.receive(queues), sent) {
            (Progress::Idle, Progress::Idle) => Progress::Idle,
            _ => Progress::More,
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.up_at
    }

    fn wants_room(&self) -> bool {
        self.stuck
    }

    fn reset(&mut self) {
        self.features = 0;
        self.offloads_due = false;
        self.waiting_length = None;
        self.pairs = 1;
        self.steering.forget();
        self.stuck = false;
        self.behind = false;
        self.restored = false;
        self.up_at = None;
        self.link = Link {
            up: self.backend.is_some(),
            announce: false,
        };
    }

    fn save(&self) -> Vec<u8> {
        // Packets in flight are lost, and the link starts again.
        match self.pairs {
            1 => Vec::new(),
            pairs => pairs.to_le_bytes().to_vec(),
        }
    }

    fn restore(&mut self, state: &[u8], features: Option<u64>) -> Result<(), DeviceStateError> {
        let pairs = match *state {
            [low, high] => u16::from_le_bytes([low, high]),
            _ => {
                DeviceStateError::unless_empty(self.name(), state)?;
                1
            }
        };
        let most = self.most_pairs();
        if !(1..=most).contains(&pairs) {
            return Err(DeviceStateError {
                device: self.name(),
                problem: format!("{pairs} pairs of queues in use, this one has {most}"),
            });
        }
        if let Some(features) = features {
            self.begin(features);
            self.pairs = pairs;
            if self.options.moved {
                self.link = Link::default();
            }
            self.restored = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod pair_tests;
#[cfg(test)]
mod tests;
