//! One port: its bytes, its messages with the driver, its end of file.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Size;
use super::control::{Event, Message};
use super::end::{EndOfFile, PortBackend, PortConfig, WhenFull};
use super::eof::EofClock;
use super::handle::PortCounts;
use crate::virtio::{Chain, ChainError, Queues};

/// The maximum number of bytes that one call moves in each direction of a port.
const MOST_BYTES: usize = 256 * 1024;
/// The maximum number of buffers that one call takes from a queue.
const MOST_CHAINS: usize = 128;
/// The number of bytes of one call of the backend, which is that of one write of Linux's driver.
const PIECE: usize = 32 * 1024;

/// The driver's progress in a queue: the buffers that it returned beyond the initial ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct BufferCredits {
    /// The number of buffers made available before the device used one. Counts of buffers wrap.
    pub(super) initial: u16,
}

impl BufferCredits {
    /// Starts the count. All buffers that the device has used so far count as returned.
    pub(super) fn begin(queues: &Queues, queue: u16) -> Self {
        Self {
            initial: queues
                .made_available(queue)
                .wrapping_sub(queues.taken(queue)),
        }
    }

    /// Returns the number of buffers that the driver has returned, comparable to [`Queues::taken`].
    pub(super) fn given_back(self, queues: &Queues, queue: u16) -> u16 {
        queues.made_available(queue).wrapping_sub(self.initial)
    }
}

/// The driver's knowledge of the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Stage {
    /// The driver does not know it.
    #[default]
    Unknown,
    /// The driver was notified that the port exists.
    Announced,
    /// The driver uses the port.
    Ready,
}

/// The content of a message besides its fixed part.
pub(super) enum Detail {
    None,
    Text(String),
    Size(Size),
}

pub(super) struct Port {
    pub(super) id: u32,
    pub(super) config: PortConfig,
    end: Box<dyn PortBackend>,
    counts: Arc<PortCounts>,
    pub(super) connected: bool,
    pub(super) guest_open: bool,
    pub(super) stage: Stage,
    /// True if the port is to be removed as soon as the driver was notified.
    pub(super) removing: bool,
    /// True if a ready driver must still be notified that it is a console.
    pub(super) tell_console: bool,
    pub(super) tell_name: bool,
    pub(super) tell_size: bool,
    /// True if the driver was last notified that the host side is open.
    pub(super) told_open: bool,
    pub(super) eof: EofClock,
    /// True if there may be bytes for the guest.
    pub(super) wants_receive: bool,
    pub(super) wants_transmit: bool,
    /// True if the last read of the backend returned nothing.
    drained: bool,
    /// The lengths of the buffers that the guest has not returned, oldest first. There are at most
    /// as many as the queue has descriptors.
    pub(super) unread: VecDeque<u32>,
    pub(super) ledger: BufferCredits,
    /// The number of bytes of the oldest transmitted chain that the backend has accepted.
    pub(super) taken: usize,
    piece: Vec<u8>,
}

/// Returns the queue of a port to the driver.
pub(super) fn receive_queue(id: u32) -> u16 {
    let queue = if id == 0 { 0 } else { id * 2 + 2 };
    u16::try_from(queue).unwrap_or(u16::MAX)
}

/// Returns the queue of a port from the driver.
pub(super) fn transmit_queue(id: u32) -> u16 {
    receive_queue(id).saturating_add(1)
}

impl Port {
    pub(super) fn new(
        id: u32,
        config: PortConfig,
        end: Box<dyn PortBackend>,
        counts: Arc<PortCounts>,
    ) -> Self {
        let connected = config.connected;
        counts.connected.store(connected, Ordering::Relaxed);
        Self {
            id,
            config,
            end,
            counts,
            connected,
            guest_open: false,
            stage: Stage::Unknown,
            removing: false,
            tell_console: false,
            tell_name: false,
            tell_size: false,
            told_open: false,
            eof: EofClock::default(),
            wants_receive: false,
            wants_transmit: false,
            drained: false,
            unread: VecDeque::new(),
            ledger: BufferCredits::default(),
            taken: 0,
            piece: vec![0; PIECE],
        }
    }

    pub(super) fn connect(&mut self, open: bool) {
        self.connected = open;
        self.counts.connected.store(open, Ordering::Relaxed);
    }

    /// Handles the driver's start of using the port.
    pub(super) fn ready(&mut self, queues: &Queues) {
        self.stage = Stage::Ready;
        self.tell_console = self.config.console;
        self.tell_size = self.config.console;
        self.tell_name = self.config.name.is_some();
        self.told_open = false;
        self.unread.clear();
        self.ledger = BufferCredits::begin(queues, receive_queue(self.id));
    }

    /// Handles an open by the guest.
    pub(super) fn open(&mut self) {
        if !self.guest_open {
            self.set_open(true);
            self.end.opened();
        }
    }

    /// Completes an open once the backend [has settled](Self::is_settled), or the wait has timed
    /// out. The backend's bytes go into the guest's buffers before the driver is answered.
    pub(super) fn settled(&mut self, now: Instant, queues: &mut Queues) {
        self.wants_receive = self.receive(queues);
        self.start_clock(now);
    }

    /// Checks whether the backend has handled the last open or close.
    pub(super) fn is_settled(&mut self) -> bool {
        self.end.is_settled()
    }

    /// Handles a close by the guest.
    pub(super) fn close(&mut self, queues: &mut Queues) {
        if !self.guest_open {
            return;
        }
        // Bytes written before the close were notified on another queue.
        self.wants_transmit = self.transmit(queues);
        self.forget_given_back(queues);
        self.shut();
    }

    /// Notifies the backend of the close.
    fn shut(&mut self) {
        if !self.guest_open {
            return;
        }
        self.set_open(false);
        self.eof.stop();
        let unread = self.unread.drain(..).map(u64::from).sum();
        self.end.closed(unread);
    }

    fn set_open(&mut self, open: bool) {
        self.guest_open = open;
        self.counts.guest_open.store(open, Ordering::Relaxed);
    }

    /// Reopens a restored port that the guest had open.
    pub(super) fn reopen(&mut self) {
        self.set_open(true);
        self.end.reopened();
    }

    /// Handles the end of the driver.
    pub(super) fn reset(&mut self) {
        self.shut();
        self.stage = Stage::Unknown;
        self.tell_console = false;
        self.tell_name = false;
        self.tell_size = false;
        self.told_open = false;
        self.wants_receive = false;
        self.wants_transmit = false;
        self.drained = false;
        self.unread.clear();
        self.taken = 0;
    }

    /// Removes the port. Bytes in flight are dropped and counted.
    pub(super) fn dismantle(&mut self, queues: &mut Queues) {
        self.forget_given_back(queues);
        self.shut();
        let queue = transmit_queue(self.id);
        for _ in 0..queues.size(queue) {
            let Some(chain) = queues.pop(queue) else {
                break;
            };
            self.drop_bytes(chain.readable().saturating_sub(self.taken));
            self.taken = 0;
            queues.give(queue, chain, 0);
        }
    }

    fn drop_bytes(&self, count: usize) {
        self.counts
            .dropped
            .fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Forgets the buffers that the guest has returned.
    fn forget_given_back(&mut self, queues: &Queues) {
        let queue = receive_queue(self.id);
        let out = queues
            .taken(queue)
            .wrapping_sub(self.ledger.given_back(queues, queue));
        // A driver that returns more than it got is not Linux's. It has read everything.
        let out = if out > queues.size(queue) { 0 } else { out };
        while self.unread.len() > usize::from(out) {
            self.unread.pop_front();
        }
    }

    /// Moves bytes in the directions in which there may be some. Returns whether a bound ended it.
    pub(super) fn pump(&mut self, queues: &mut Queues) -> bool {
        self.wants_transmit = self.wants_transmit && self.transmit(queues);
        self.wants_receive = self.wants_receive && self.receive(queues);
        self.wants_transmit || self.wants_receive
    }

    /// Moves bytes from the backend to the guest. Returns whether the call's bound ended it.
    fn receive(&mut self, queues: &mut Queues) -> bool {
        let queue = receive_queue(self.id);
        if !self.guest_open || self.removing {
            return false;
        }
        let mut bytes = 0;
        for _ in 0..MOST_CHAINS {
            let Some(chain) = queues.pop(queue) else {
                self.drained = false;
                if queues.listen(queue) {
                    continue;
                }
                return false;
            };
            if chain.writable() == 0 || chain.readable() != 0 {
                queues.reject(queue, chain, ChainError::Direction);
                continue;
            }
            let length = self.fill(queues, &chain);
            self.drained = length == 0;
            if length == 0 {
                queues.put_back(queue, chain);
                return false;
            }
            queues.give(queue, chain, length);
            self.forget_given_back(queues);
            self.unread
                .push_back(u32::try_from(length).unwrap_or(u32::MAX));
            bytes += length;
            if bytes >= MOST_BYTES {
                break;
            }
        }
        true
    }

    /// Fills one chain as far as the backend has bytes, within the call's bound.
    fn fill(&mut self, queues: &Queues, chain: &Chain) -> usize {
        let room = chain.writable().min(MOST_BYTES);
        let mut done = 0;
        while done < room {
            let most = (room - done).min(PIECE);
            let Some(piece) = self.piece.get_mut(..most) else {
                break;
            };
            let got = self.end.read(piece).min(most);
            if got == 0 {
                break;
            }
            chain.write(queues.memory(), done, piece.get(..got).unwrap_or_default());
            done += got;
        }
        self.counts
            .to_guest
            .fetch_add(done as u64, Ordering::Relaxed);
        done
    }

    /// Moves bytes from the guest to the backend. Returns whether the call's bound ended it.
    fn transmit(&mut self, queues: &mut Queues) -> bool {
        let queue = transmit_queue(self.id);
        let holds = self.config.when_full == WhenFull::Hold;
        if self.removing || (holds && !self.connected) {
            return false;
        }
        let mut budget = MOST_BYTES;
        for _ in 0..MOST_CHAINS {
            let Some(chain) = queues.pop(queue) else {
                if queues.listen(queue) {
                    continue;
                }
                return false;
            };
            if chain.readable() == 0 || chain.writable() != 0 {
                self.taken = 0;
                queues.reject(queue, chain, ChainError::Direction);
                continue;
            }
            if !self.deliver(queues, &chain, &mut budget) {
                queues.put_back(queue, chain);
                // Either the call's bound or the backend stopped it.
                return budget == 0;
            }
            self.taken = 0;
            queues.give(queue, chain, 0);
            if budget == 0 {
                break;
            }
        }
        true
    }

    /// Passes the rest of one chain to the backend. Returns whether it accepted all of it.
    fn deliver(&mut self, queues: &Queues, chain: &Chain, budget: &mut usize) -> bool {
        let drops = self.config.when_full == WhenFull::Drop;
        while self.taken < chain.readable() {
            if *budget == 0 {
                return false;
            }
            // A piece may exceed the bound, so that one write of the guest stays one call of the
            // backend.
            let got = chain.read(queues.memory(), self.taken, &mut self.piece);
            if got == 0 {
                return false;
            }
            let piece = self.piece.get(..got).unwrap_or_default();
            let took = if self.connected {
                self.end.write(piece).min(got)
            } else {
                0
            };
            self.counts
                .from_guest
                .fetch_add(took as u64, Ordering::Relaxed);
            let done = if drops {
                self.drop_bytes(got - took);
                got
            } else {
                took
            };
            self.taken += done;
            *budget = budget.saturating_sub(done);
            if done < got {
                return false;
            }
        }
        true
    }

    /// Passes one byte of the emergency register to the backend.
    pub(super) fn emergency(&mut self, byte: u8) {
        let took = self.end.write(&[byte]).min(1);
        self.counts
            .from_guest
            .fetch_add(took as u64, Ordering::Relaxed);
        self.drop_bytes(1 - took);
    }

    fn start_clock(&mut self, now: Instant) {
        let wanted = self.config.end_of_file == EndOfFile::WhenIdle
            && self.guest_open
            && self.connected
            && !self.removing;
        if wanted && !self.eof.running() {
            self.eof.start(now);
        } else if !wanted {
            self.eof.stop();
        }
    }

    /// Advances the end of file. `given` is the number of control buffers that the driver has
    /// returned.
    pub(super) fn tick(&mut self, now: Instant, queues: &Queues, given: u16) {
        self.start_clock(now);
        if !self.eof.running() {
            return;
        }
        self.forget_given_back(queues);
        let read = self.drained && self.unread.is_empty();
        // A driver that was not yet notified that the host side is open cannot be notified of its
        // close.
        let idle = read && self.told_open && self.end.is_settled();
        if self.eof.tick(now, idle, given) {
            self.counts.ends.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the next message for the driver.
    pub(super) fn next_message(&self, size: Size) -> Option<(Message, Detail)> {
        let message = |event, value| Message::new(self.id, event, value);
        if self.removing {
            return Some((message(Event::DeviceRemove, 0), Detail::None));
        }
        match self.stage {
            Stage::Unknown => return Some((message(Event::DeviceAdd, 0), Detail::None)),
            Stage::Announced => return None,
            Stage::Ready => {}
        }
        if self.tell_console {
            return Some((message(Event::ConsolePort, 1), Detail::None));
        }
        if let Some(name) = self.config.name.as_ref().filter(|_| self.tell_name) {
            let detail = Detail::Text(name.clone());
            return Some((message(Event::PortName, 1), detail));
        }
        if self.tell_size {
            return Some((message(Event::Resize, 0), Detail::Size(size)));
        }
        let open = self.shown_open();
        (open != self.told_open).then(|| {
            let value = u16::from(open);
            (message(Event::PortOpen, value), Detail::None)
        })
    }

    fn shown_open(&self) -> bool {
        self.connected && !self.eof.closes()
    }

    /// Notes that the message of `next_message` is in the driver's buffers, of which the device has
    /// used `used` so far.
    pub(super) fn sent(&mut self, message: Message, used: u16, now: Instant) {
        match Event::from_number(message.event) {
            Some(Event::DeviceAdd) => self.stage = Stage::Announced,
            Some(Event::ConsolePort) => self.tell_console = false,
            Some(Event::PortName) => self.tell_name = false,
            Some(Event::Resize) => self.tell_size = false,
            Some(Event::PortOpen) => {
                self.told_open = message.value != 0;
                if !self.told_open {
                    self.eof.told(used, now);
                }
            }
            _ => {}
        }
    }
}
