//! One port: its bytes, its place in the conversation with the driver, its end of file.

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

/// Bytes that one call moves in each direction of a port.
const MOST_BYTES: usize = 256 * 1024;
/// Buffers that one call takes from a queue.
const MOST_CHAINS: usize = 128;
/// Bytes of one call of the far end; what Linux's driver writes at once.
const PIECE: usize = 32 * 1024;

/// How far a queue's driver is: buffers given back by it beyond those that it gave at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct BufferCredits {
    /// Buffers that the driver had given before the device used one. Counts of buffers wrap.
    pub(super) initial: u16,
}

impl BufferCredits {
    /// Begins: whatever the device has used so far counts as given back.
    pub(super) fn begin(queues: &Queues, queue: u16) -> Self {
        Self {
            initial: queues
                .made_available(queue)
                .wrapping_sub(queues.taken(queue)),
        }
    }

    /// Buffers that the driver has given back: comparable to [`Queues::taken`].
    pub(super) fn given_back(self, queues: &Queues, queue: u16) -> u16 {
        queues.made_available(queue).wrapping_sub(self.initial)
    }
}

/// What the driver knows of the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Stage {
    /// Nothing.
    #[default]
    Unknown,
    /// It was told that the port is there.
    Announced,
    /// It uses the port.
    Ready,
}

/// What a message says beside its fixed part.
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
    /// To go, as soon as the driver was told.
    pub(super) removing: bool,
    /// What a ready driver has yet to hear.
    pub(super) tell_console: bool,
    pub(super) tell_name: bool,
    pub(super) tell_size: bool,
    /// Whether the driver takes the host side for open.
    pub(super) told_open: bool,
    pub(super) eof: EofClock,
    /// There may be bytes for the guest, or from it.
    pub(super) wants_receive: bool,
    pub(super) wants_transmit: bool,
    /// The last read of the far end gave nothing.
    drained: bool,
    /// Lengths of the buffers that the guest has not given back, oldest first: no more than the queue has descriptors.
    pub(super) unread: VecDeque<u32>,
    pub(super) ledger: BufferCredits,
    /// Bytes of the oldest transmitted chain that the far end has taken.
    pub(super) taken: usize,
    piece: Vec<u8>,
}

/// The queue to the driver, of a port.
pub(super) fn receive_queue(id: u32) -> u16 {
    let queue = if id == 0 { 0 } else { id * 2 + 2 };
    u16::try_from(queue).unwrap_or(u16::MAX)
}

/// The queue from the driver.
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

    /// The driver uses the port.
    pub(super) fn ready(&mut self, queues: &Queues) {
        self.stage = Stage::Ready;
        self.tell_console = self.config.console;
        self.tell_size = self.config.console;
        self.tell_name = self.config.name.is_some();
        self.told_open = false;
        self.unread.clear();
        self.ledger = BufferCredits::begin(queues, receive_queue(self.id));
    }

    /// The guest opens the port.
    pub(super) fn open(&mut self) {
        if !self.guest_open {
            self.set_open(true);
            self.end.opened();
        }
    }

    /// The far end [has settled](Self::is_settled), or was waited for long enough. What it has goes into the guest's buffers before the
    /// driver is answered.
    pub(super) fn settled(&mut self, now: Instant, queues: &mut Queues) {
        self.wants_receive = self.receive(queues);
        self.start_clock(now);
    }

    /// Whether the far end has done what follows from an open or a close.
    pub(super) fn is_settled(&mut self) -> bool {
        self.end.is_settled()
    }

    /// The guest closes the port.
    pub(super) fn close(&mut self, queues: &mut Queues) {
        if !self.guest_open {
            return;
        }
        // What was written before the close was notified on another queue.
        self.wants_transmit = self.transmit(queues);
        self.forget_given_back(queues);
        self.shut();
    }

    /// The far end hears of the close.
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

    /// A restored port that the guest had open.
    pub(super) fn reopen(&mut self) {
        self.set_open(true);
        self.end.opened();
    }

    /// The driver is gone.
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

    /// The port goes: what is under way is lost, and counted.
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

    /// Forgets the buffers that the guest has given back.
    fn forget_given_back(&mut self, queues: &Queues) {
        let queue = receive_queue(self.id);
        let out = queues
            .taken(queue)
            .wrapping_sub(self.ledger.given_back(queues, queue));
        // A driver that gives more than it got is not Linux's; it has read everything.
        let out = if out > queues.size(queue) { 0 } else { out };
        while self.unread.len() > usize::from(out) {
            self.unread.pop_front();
        }
    }

    /// Moves bytes in the directions in which there may be some. Whether a bound ended it.
    pub(super) fn pump(&mut self, queues: &mut Queues) -> bool {
        self.wants_transmit = self.wants_transmit && self.transmit(queues);
        self.wants_receive = self.wants_receive && self.receive(queues);
        self.wants_transmit || self.wants_receive
    }

    /// Moves bytes from the far end to the guest. Whether the call's bound ended it.
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

    /// Fills one chain as far as the far end has bytes, and no more than a call may move.
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

    /// Moves bytes from the guest to the far end. Whether the call's bound ended it.
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
                // Either the call's bound or the far end stopped it.
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

    /// Gives the rest of one chain to the far end. Whether all of it went.
    fn deliver(&mut self, queues: &Queues, chain: &Chain, budget: &mut usize) -> bool {
        let drops = self.config.when_full == WhenFull::Drop;
        while self.taken < chain.readable() {
            if *budget == 0 {
                return false;
            }
            // A piece may go beyond the bound: one write of the guest stays one call of the far end.
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

    /// One byte by the emergency register.
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

    /// Lets the end of file go on; `given` are the control buffers that the driver has given back.
    pub(super) fn tick(&mut self, now: Instant, queues: &Queues, given: u16) {
        self.start_clock(now);
        if !self.eof.running() {
            return;
        }
        self.forget_given_back(queues);
        let read = self.drained && self.unread.is_empty();
        // A driver that has not heard yet that the host side is open cannot hear that it closes.
        let idle = read && self.told_open && self.end.is_settled();
        if self.eof.tick(now, idle, given) {
            self.counts.ends.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What the driver is to hear next.
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

    /// The message of `next_message` is in the driver's buffers, of which the device has used `used` so far.
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
