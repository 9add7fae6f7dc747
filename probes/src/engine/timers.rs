//! The clock of the `profile` and `interval` providers: a thread on the host that makes vCPUs leave
//! the guest when a tick is due.
//!
//! If a vCPU was held up, a tick can come before the previous one was taken. The two are joined:
//! counted, but not queued.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmm::machine::Handle;

/// The shortest period: below it the host does nothing else.
pub(crate) const SHORTEST: Duration = Duration::from_micros(100);

#[derive(Clone)]
struct Timer {
    period: Duration,
    next: Instant,
    every_vcpu: bool,
    /// Ticks without an event of their own, on all vCPUs together.
    skipped: Arc<AtomicU64>,
}

#[derive(Default)]
struct State {
    timers: Vec<Option<Timer>>,
    leave: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Ticks that were joined with the previous one.
    joined: AtomicU64,
    machine: Handle,
}

/// The clock's thread, which runs from the first timer on.
pub(crate) struct Ticker {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Ticker {
    pub(crate) fn new(machine: Handle) -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                changed: Condvar::new(),
                joined: AtomicU64::new(0),
                machine,
            }),
            thread: Mutex::default(),
        }
    }

    /// Starts a timer that ticks every `period`, with bit `bit` of a sample's mask. Ticks that come
    /// too late, and those that a vCPU has not taken before the next, are counted in `skipped`.
    pub(crate) fn start(
        &self,
        bit: usize,
        period: Duration,
        every_vcpu: bool,
        skipped: Arc<AtomicU64>,
    ) {
        let period = period.max(SHORTEST);
        let timer = Timer {
            period,
            next: Instant::now() + period,
            every_vcpu,
            skipped,
        };
        self.set(bit, Some(timer));
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = self.shared.clone();
            let started = std::thread::Builder::new()
                .name("ticker".into())
                .spawn(move || shared.run());
            match started {
                Ok(started) => *thread = Some(started),
                Err(error) => log::error!("no thread for timers: {error}"),
            }
        }
    }

    /// Stops a timer.
    pub(crate) fn stop(&self, bit: usize) {
        self.set(bit, None);
    }

    /// Returns the number of ticks that came before the previous one was taken.
    pub(crate) fn joined(&self) -> u64 {
        self.shared.joined.load(Ordering::Relaxed)
    }

    fn set(&self, bit: usize, timer: Option<Timer>) {
        let mut state = self
            .shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if state.timers.len() <= bit {
            state.timers.resize_with(bit + 1, || None);
        }
        if let Some(place) = state.timers.get_mut(bit) {
            *place = timer;
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .leave = true;
        self.shared.changed.notify_all();
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread for timers panicked");
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.leave {
            let now = Instant::now();
            let (mut first, mut each) = (0, 0);
            let mut due: Vec<(u64, Arc<AtomicU64>)> = Vec::new();
            let mut next: Option<Instant> = None;
            for (bit, timer) in state.timers.iter_mut().enumerate() {
                let Some(timer) = timer else { continue };
                if timer.next <= now {
                    let mask = 1 << bit;
                    if timer.every_vcpu {
                        each |= mask;
                    } else {
                        first |= mask;
                    }
                    // The timer stays in step with its start. Missed ticks are not made up for.
                    let late = (now - timer.next).as_nanos() / timer.period.as_nanos().max(1);
                    let vcpus = if timer.every_vcpu {
                        self.machine.vcpus() as u64
                    } else {
                        1
                    };
                    let missed = u64::try_from(late).unwrap_or(u64::MAX);
                    timer
                        .skipped
                        .fetch_add(missed.saturating_mul(vcpus), Ordering::Relaxed);
                    due.push((mask, timer.skipped.clone()));
                    let turns = u32::try_from(late).unwrap_or(u32::MAX).saturating_add(1);
                    timer.next += timer.period.saturating_mul(turns);
                }
                next = Some(next.map_or(timer.next, |at| at.min(timer.next)));
            }
            if first | each != 0 {
                drop(state);
                self.tick(first, each, &due);
                state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state = match next {
                None => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let wait = self
                        .changed
                        .wait_timeout(state, at.saturating_duration_since(now));
                    wait.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn tick(&self, first: u64, each: u64, due: &[(u64, Arc<AtomicU64>)]) {
        for vcpu in 0..self.machine.vcpus() {
            let mask = if vcpu == 0 { first | each } else { each };
            if mask != 0 {
                let joined = self.machine.sample(vcpu, mask);
                self.joined
                    .fetch_add(u64::from(joined.count_ones()), Ordering::Relaxed);
                for (_, skipped) in due.iter().filter(|(bit, _)| bit & joined != 0) {
                    skipped.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}
