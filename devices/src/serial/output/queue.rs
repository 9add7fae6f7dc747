//! The queue of a console's output, and the thread that empties it.

use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::send;

/// The number of bytes at which a queue is full.
const FULL: usize = 64 << 10;
/// The number of bytes below which a queue that was full has room again.
const ROOM: usize = FULL / 2;
/// The maximum number of bytes accepted from a writer that does not wait for room.
const MOST: usize = 1 << 20;
/// The number of bytes of an unfinished line that are written without its end.
const LINE: usize = 4096;
/// The time without progress of the backend after which the rest is dropped at the end.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The delay before a byte is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promptness {
    /// At once, for terminals and pipes, because prompts without a newline must show.
    Bytes,
    /// With its line, or 4096 bytes, for files.
    Lines,
}

#[derive(Default)]
struct State {
    waiting: Vec<u8>,
    /// True if queued bytes are to be written even though the line is not finished.
    flush: bool,
    closed: bool,
    /// True if the thread has ended.
    done: bool,
    on_room: Option<Box<dyn Fn() + Send>>,
}

/// The state shared by the guest's side and the thread.
pub(super) struct Queue {
    promptness: Promptness,
    state: Mutex<State>,
    changed: Condvar,
    /// The number of bytes queued or being written.
    level: AtomicUsize,
    /// True if the queue was seen full since it last had room.
    was_full: AtomicBool,
    written: AtomicU64,
    lost: AtomicU64,
}

impl Queue {
    pub(super) fn start(
        writer: Box<dyn Write + Send>,
        promptness: Promptness,
    ) -> io::Result<Arc<Self>> {
        let queue = Arc::new(Self {
            promptness,
            state: Mutex::default(),
            changed: Condvar::new(),
            level: AtomicUsize::new(0),
            was_full: AtomicBool::new(false),
            written: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        });
        let shared = queue.clone();
        std::thread::Builder::new()
            .name("serial".into())
            .spawn(move || shared.empty(writer))?;
        Ok(queue)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    pub(super) fn push(&self, bytes: &[u8]) {
        let mut state = self.lock();
        if state.waiting.len() + bytes.len() > MOST {
            self.lost.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            return;
        }
        let was_ready = self.is_ready(&state);
        state.waiting.extend_from_slice(bytes);
        self.level.fetch_add(bytes.len(), Ordering::SeqCst);
        if self.promptness == Promptness::Lines && bytes.contains(&b'\n') {
            state.flush = true;
        }
        if !was_ready && self.is_ready(&state) {
            self.changed.notify_all();
        }
    }

    /// Ends the thread once all is written, as long as the backend makes progress.
    pub(super) fn finish(&self) {
        self.lock().closed = true;
        let mut seen = self.written.load(Ordering::Relaxed);
        while !self.settle(LAST_WORDS, |state| state.done) {
            let written = self.written.load(Ordering::Relaxed);
            if written == seen {
                let left = self.level.load(Ordering::SeqCst);
                log::warn!("{left} bytes of the guest's console were not read in time");
                return;
            }
            seen = written;
        }
    }

    /// Requests that everything is written, and waits for `end`. Returns whether it came within
    /// `limit`.
    fn settle(&self, limit: Duration, end: impl Fn(&State) -> bool) -> bool {
        let mut state = self.lock();
        state.flush = !state.waiting.is_empty();
        self.changed.notify_all();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, limit, |state| !end(state))
            .unwrap_or_else(PoisonError::into_inner);
        end(&state)
    }

    fn is_ready(&self, state: &State) -> bool {
        let enough = match self.promptness {
            Promptness::Bytes => 1,
            Promptness::Lines => LINE,
        };
        !state.waiting.is_empty() && (state.flush || state.closed || state.waiting.len() >= enough)
    }

    /// Runs the thread.
    fn empty(&self, mut writer: Box<dyn Write + Send>) {
        let mut bytes = Vec::new();
        loop {
            let mut state = self.lock();
            while !self.is_ready(&state) && !state.closed {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            if state.waiting.is_empty() {
                state.done = true;
                self.changed.notify_all();
                return;
            }
            std::mem::swap(&mut bytes, &mut state.waiting);
            state.flush = false;
            drop(state);
            let lost = send(&mut *writer, &bytes, |count| {
                self.written.fetch_add(count as u64, Ordering::Relaxed);
            });
            self.lost.fetch_add(lost as u64, Ordering::Relaxed);
            let state = self.lock();
            let level = self.level.fetch_sub(bytes.len(), Ordering::SeqCst) - bytes.len();
            self.changed.notify_all();
            drop(state);
            bytes.clear();
            if level < ROOM && self.was_full.swap(false, Ordering::SeqCst) {
                let state = self.lock();
                if let Some(on_room) = &state.on_room {
                    on_room();
                }
            }
        }
    }
}

/// The state of a queue, for the party that waits while it is full (64 KiB). A writer that does not
/// wait loses the bytes beyond 1 MiB.
#[derive(Clone)]
pub struct Backlog(Arc<Queue>);

impl fmt::Debug for Backlog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backlog")
            .field("level", &self.0.level)
            .finish_non_exhaustive()
    }
}

impl Backlog {
    pub(super) fn of(queue: &Arc<Queue>) -> Self {
        Self(queue.clone())
    }

    /// Checks whether to wait. If so, the callback of [`on_room`](Self::on_room) runs later.
    #[must_use]
    pub fn is_full(&self) -> bool {
        if self.0.level.load(Ordering::SeqCst) < FULL {
            return false;
        }
        self.0.was_full.store(true, Ordering::SeqCst);
        // The queue may have been emptied before that was seen.
        self.0.level.load(Ordering::SeqCst) >= ROOM
    }

    /// Requests that everything is written, even an unfinished line. Returns whether that was done
    /// within `limit`.
    pub fn settle(&self, limit: Duration) -> bool {
        let queue = &self.0;
        queue.settle(limit, |_| queue.level.load(Ordering::SeqCst) == 0)
    }

    /// Returns the number of bytes that the backend has accepted so far.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.0.written.load(Ordering::Relaxed)
    }

    /// Sets the callback for when a queue that was seen full has room again. It runs on the queue's
    /// thread and must not block.
    pub fn on_room(&self, call: impl Fn() + Send + 'static) {
        self.0.lock().on_room = Some(Box::new(call));
    }
}
