//! The backend of a trace device's port in the guest: the device thread queues requests, and the
//! port's own thread works through them.
//!
//! A request may pause the machine, and with it the device thread, which must therefore not wait
//! for one. The guest waits instead, where it opens and closes the port. Its reads return the state
//! at its open, and its writes are done when its close returns. Both queues are bounded; while one
//! is full the guest's bytes stay with the guest.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use trace_devices::port::stream::PortStream;
use vmm::machine::PortBackend;

/// The largest number of queued requests.
const WAITING: usize = 64;
/// The largest number of bytes ready for the guest: more than its driver has room for at once.
const READY: usize = 512 << 10;
/// The number of ready bytes below which more are fetched.
const FEW: usize = READY / 2;
/// The number of bytes fetched at once.
const PIECE: usize = 64 << 10;
/// The interval of checks whether an open port has new content.
const INTERVAL: Duration = Duration::from_millis(10);

/// A request to the thread.
enum Request {
    Open,
    Close {
        unread: u64,
    },
    Write(Vec<u8>),
    /// Fetch more, because the guest has read some of the ready bytes.
    Fetch,
}

/// The state shared by both threads.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The bytes for the guest.
    ready: VecDeque<u8>,
    /// The number of opens, closes and writes that are not done.
    requests: usize,
    /// Set while more is being fetched.
    fetching: bool,
    /// Set if a write found no room: the device is to be woken when there is some.
    full: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The backend as the device sees it.
pub struct StreamEnd {
    requests: SyncSender<Request>,
    shared: Arc<Shared>,
    /// The opens and closes that found no room, which precede everything else. A close and an open
    /// at most.
    postponed: VecDeque<Request>,
}

/// Makes the backend of the port `name` for `stream`, and its thread, which ends when the backend
/// is dropped. `wake` makes the device check its ports.
///
/// # Errors
/// If the thread cannot be made.
pub fn start(
    name: &str,
    stream: Box<dyn PortStream>,
    wake: impl Fn() + Send + 'static,
) -> std::io::Result<(StreamEnd, JoinHandle<()>)> {
    let (requests, received) = sync_channel(WAITING);
    let shared = Arc::new(Shared::default());
    let thread = std::thread::Builder::new()
        .name(format!("port-{name}"))
        .spawn({
            let shared = shared.clone();
            move || work(stream, &received, &shared, &wake)
        })?;
    let end = StreamEnd {
        requests,
        shared,
        postponed: VecDeque::new(),
    };
    Ok((end, thread))
}

impl StreamEnd {
    /// Queues a request and returns `false` if there is no room.
    fn ask(&mut self, request: Request) -> bool {
        if !self.postponed.is_empty() {
            return false;
        }
        match self.requests.try_send(request) {
            Ok(()) => true,
            // Without its thread a port discards all writes and returns nothing.
            Err(TrySendError::Disconnected(_)) => true,
            Err(TrySendError::Full(_)) => false,
        }
    }

    /// Queues a request that must not be lost.
    fn insist(&mut self, request: Request) {
        self.shared.lock().requests += 1;
        self.postponed.push_back(request);
        self.catch_up();
    }

    fn catch_up(&mut self) {
        while let Some(request) = self.postponed.pop_front() {
            if let Err(TrySendError::Full(request)) = self.requests.try_send(request) {
                self.postponed.push_front(request);
                return;
            }
        }
    }
}

impl PortBackend for StreamEnd {
    fn opened(&mut self) {
        self.insist(Request::Open);
    }

    fn closed(&mut self, unread: u64) {
        // An open that the thread has not seen has moved no bytes. It is cancelled, so that a guest
        // that opens and closes without end fills no queue.
        if matches!(self.postponed.back(), Some(Request::Open)) {
            self.postponed.pop_back();
            self.shared.lock().requests -= 1;
            return;
        }
        // The ready bytes were not read by the guest, so they return to the thread.
        self.insist(Request::Close { unread });
    }

    fn is_settled(&mut self) -> bool {
        self.catch_up();
        let state = self.shared.lock();
        state.requests == 0 && !state.fetching
    }

    fn write(&mut self, bytes: &[u8]) -> usize {
        self.catch_up();
        self.shared.lock().requests += 1;
        if self.ask(Request::Write(bytes.to_vec())) {
            return bytes.len();
        }
        let mut state = self.shared.lock();
        state.requests = state.requests.saturating_sub(1);
        state.full = true;
        0
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        self.catch_up();
        let mut state = self.shared.lock();
        let count = buffer.len().min(state.ready.len());
        for (place, byte) in buffer.iter_mut().zip(state.ready.drain(..count)) {
            *place = byte;
        }
        let wants_more = count > 0 && state.ready.len() < FEW && !state.fetching;
        state.fetching |= wants_more;
        drop(state);
        if wants_more && !self.ask(Request::Fetch) {
            // The thread fetches after every request.
            self.shared.lock().fetching = false;
        }
        count
    }
}

/// Runs the thread until the backend is dropped.
fn work(
    mut stream: Box<dyn PortStream>,
    received: &Receiver<Request>,
    shared: &Shared,
    wake: &dyn Fn(),
) {
    let mut is_open = false;
    let mut piece = vec![0; PIECE];
    loop {
        // Only an open port can have something new.
        let request = match is_open {
            true => received.recv_timeout(INTERVAL),
            false => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let counts = matches!(
            request,
            Ok(Request::Open | Request::Close { .. } | Request::Write(_))
        );
        match request {
            Ok(Request::Open) => {
                stream.open();
                is_open = true;
            }
            Ok(Request::Close { unread }) => {
                let mut state = shared.lock();
                let left = state.ready.len() as u64;
                state.ready.clear();
                drop(state);
                stream.close(unread.saturating_add(left));
                is_open = false;
            }
            Ok(Request::Write(bytes)) => stream.write(&bytes),
            Ok(Request::Fetch) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                if is_open {
                    stream.close(0);
                }
                return;
            }
        }
        let fetched = is_open && fetch(stream.as_mut(), shared, &mut piece);
        let mut state = shared.lock();
        state.fetching = false;
        state.requests = state.requests.saturating_sub(usize::from(counts));
        let was_full = std::mem::take(&mut state.full);
        drop(state);
        if fetched || counts || was_full {
            wake();
        }
    }
}

/// Makes bytes ready for the guest, `piece` by `piece`, and returns whether there are more now.
fn fetch(stream: &mut dyn PortStream, shared: &Shared, piece: &mut [u8]) -> bool {
    let mut fetched = false;
    while shared.lock().ready.len() < READY {
        let count = match stream.has_data() {
            true => stream.read(piece),
            false => 0,
        };
        if count == 0 {
            break;
        }
        fetched = true;
        shared.lock().ready.extend(piece.iter().take(count));
    }
    fetched
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};
    use std::time::Instant;

    use super::*;
    use crate::server::ports::toy::Gate;

    /// A stream that returns the bytes written before, and blocks while its gate is closed.
    struct Echo {
        content: Vec<u8>,
        at: usize,
        gate: Arc<Gate>,
        closes: Sender<u64>,
    }

    impl PortStream for Echo {
        fn open(&mut self) {
            self.gate.pass();
            self.at = 0;
        }

        fn close(&mut self, unread: u64) {
            // The receiver may be gone.
            let _ = self.closes.send(unread);
        }

        fn write(&mut self, bytes: &[u8]) {
            self.gate.pass();
            self.content.extend_from_slice(bytes);
        }

        fn read(&mut self, buffer: &mut [u8]) -> usize {
            let left = self.content.get(self.at..).unwrap_or_default();
            let count = left.len().min(buffer.len());
            for (place, byte) in buffer.iter_mut().zip(left) {
                *place = *byte;
            }
            self.at += count;
            count
        }

        fn has_data(&mut self) -> bool {
            self.at < self.content.len()
        }
    }

    struct Rig {
        end: StreamEnd,
        gate: Arc<Gate>,
        wakes: Receiver<()>,
        closes: Receiver<u64>,
        thread: JoinHandle<()>,
    }

    fn rig(content: &[u8]) -> Rig {
        let (woken, wakes) = channel();
        let (closed, closes) = channel();
        let gate = Arc::new(Gate::default());
        let echo = Echo {
            content: content.to_vec(),
            at: 0,
            gate: gate.clone(),
            closes: closed,
        };
        // The rig may be gone before its thread.
        let wake = move || {
            let _ = woken.send(());
        };
        let started = start("echo", Box::new(echo), wake);
        let (end, thread) = started.unwrap_or_else(|e| panic!("{e}"));
        Rig {
            end,
            gate,
            wakes,
            closes,
            thread,
        }
    }

    impl Rig {
        fn settle(&mut self) {
            let deadline = Instant::now() + Duration::from_secs(20);
            while !self.end.is_settled() {
                assert!(Instant::now() < deadline);
                // A wake may have come before.
                let _ = self.wakes.recv_timeout(Duration::from_millis(100));
            }
        }

        fn read_all(&mut self) -> Vec<u8> {
            let (mut all, mut buffer) = (Vec::new(), vec![0; 4096]);
            loop {
                let count = self.end.read(&mut buffer);
                all.extend(buffer.iter().take(count));
                if count == 0 {
                    if self.end.is_settled() {
                        return all;
                    }
                    self.settle();
                }
            }
        }
    }

    #[test]
    fn a_guest_reads_what_it_wrote_once_open_and_close_are_settled() {
        let mut rig = rig(b"");
        for round in 1..4 {
            rig.end.opened();
            if round == 1 {
                assert!(!rig.end.is_settled());
                rig.gate.open();
            }
            rig.settle();
            assert_eq!(rig.end.write(b"line\n"), 5);
            rig.end.closed(0);
            rig.settle();
            rig.end.opened();
            rig.settle();
            assert_eq!(rig.read_all(), b"line\n".repeat(round));
            rig.end.closed(0);
            rig.settle();
        }
        let Rig { end, thread, .. } = rig;
        drop(end);
        thread.join().unwrap();
    }

    #[test]
    fn much_is_read_whole_and_what_lies_ready_counts_as_unread() {
        let content: Vec<u8> = (0..3_000_000u32).map(|n| n as u8).collect();
        let mut rig = rig(&content);
        rig.gate.open();
        rig.end.opened();
        rig.settle();
        assert!(rig.read_all() == content);
        rig.end.closed(0);
        rig.settle();
        rig.end.opened();
        rig.settle();
        let mut buffer = [0; 100];
        assert_eq!(rig.end.read(&mut buffer), 100);
        rig.end.closed(30);
        rig.settle();
        let unread: Vec<u64> = rig.closes.try_iter().collect();
        assert!(
            matches!(unread[..], [0, ready] if ready >= READY as u64 - 100 + 30),
            "{unread:?}"
        );
    }

    #[test]
    fn a_flood_finds_no_room_and_an_open_is_not_lost_in_it() {
        let mut rig = rig(b"");
        let taken = (0..1000).filter(|_| rig.end.write(b"x") == 1).count();
        // One may have been taken out already.
        assert!((WAITING..=WAITING + 1).contains(&taken), "{taken}");
        rig.end.opened();
        rig.gate.open();
        rig.settle();
        assert_eq!(rig.read_all(), b"x".repeat(taken));
        assert_eq!(rig.end.write(b"y"), 1);
    }
}
