//! The guest's input from outside, recorded and played back.
//!
//! A machine with a history records its inputs: bytes for the serial port and for ports of the
//! virtio-console, frames of the network, random numbers. It also notes its outputs, as lengths
//! and hashes: bytes of those ports, frames, requests of disks. A checkpoint has its place in the
//! [recording](log). A machine that is restored from it can be given the same inputs again, each
//! after the outputs that came before it and not before its time ([`player`]). An output that
//! differs is the place where the run departs from its recording.
//!
//! Not recorded: time, the moments of interrupts, and `vsock`, whose connections end at a restore.
//! So a run goes the same way only as far as it does not depend on them.
//!
//! Every machine has a tape. One that neither records nor plays costs an atomic load for each
//! input or output.

mod backends;
mod log;
mod player;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub(crate) use backends::{TapedDisk, TapedNet, TapedPort, TapedRandom};
#[cfg(test)]
pub(crate) use log::Kind;
pub use log::Recording;
pub(crate) use log::{Position, Recorder, Stream};
pub(crate) use player::{Player, Pull};
pub use player::{Replay, ReplayEnd};

/// Plays a recording to a guest that puts out zeros and asks for everything, without waiting.
#[cfg(feature = "test-utils")]
pub(crate) fn rehearse(recording: Recording) {
    let now = Instant::now();
    let streams: Vec<_> = recording.events.iter().map(|event| event.stream).collect();
    let mut player = Player::new(recording, now);
    for stream in streams {
        player.output(stream, &[&[0; 3]], now);
        let _ = (player.answer(stream, 3), player.pull(stream, 3));
        let _ = (player.settle(stream), player.has_more(stream));
        let _ = player.take(stream, 3);
        let due = player.take_due(stream);
        player.put_back(stream, due.get(1..).unwrap_or_default());
    }
    let late = now.checked_add(std::time::Duration::from_secs(3600));
    player.advance(late.unwrap_or(now));
    let _ = (
        player.wait(now),
        player.awake(),
        player.so_far(now).to_string(),
    );
}

/// The tape of a machine. Cloning shares it.
#[derive(Clone, Default)]
pub(crate) struct Tape(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Whether the tape records or plays.
    runs: AtomicBool,
    state: Mutex<State>,
    /// Notified when the guest has put something out, or the player ends.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    recorder: Option<Recorder>,
    player: Option<Player>,
    /// The calls that wake devices for which an input is due.
    wakers: Vec<(Stream, Box<dyn Fn() + Send>)>,
}

impl Tape {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether the tape records or plays.
    #[inline]
    pub(crate) fn runs(&self) -> bool {
        self.0.runs.load(Ordering::Relaxed)
    }

    /// Returns the state, if the tape records or plays.
    #[inline]
    fn running(&self) -> Option<MutexGuard<'_, State>> {
        match self.runs() {
            true => Some(self.state()),
            false => None,
        }
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        let runs = state.recorder.is_some() || state.player.is_some();
        self.0.runs.store(runs, Ordering::Relaxed);
        drop(state);
        self.0.changed.notify_all();
    }

    /// Sets the call that wakes the device of `stream`.
    pub(crate) fn on_input(&self, stream: Stream, wake: impl Fn() + Send + 'static) {
        self.state().wakers.push((stream, Box::new(wake)));
    }

    /// Starts or ends recording.
    pub(crate) fn record(&self, on: bool) {
        self.set(|state| state.recorder = on.then(Recorder::default));
    }

    /// Returns the place in the recording, of a paused machine.
    pub(crate) fn position(&self) -> Option<Position> {
        self.state().recorder.as_mut().map(Recorder::position)
    }

    /// Returns what was recorded from a place on, if all of that is still there.
    pub(crate) fn since(&self, position: &Position) -> Option<Recording> {
        self.state().recorder.as_ref()?.since(position)
    }

    /// Forgets what is before a place.
    pub(crate) fn forget_before(&self, position: &Position) {
        if let Some(recorder) = &mut self.state().recorder {
            recorder.forget_before(position);
        }
    }

    /// Notes bytes that the guest was given.
    pub(crate) fn input(&self, stream: Stream, bytes: &[u8]) {
        if let Some(mut state) = self.running()
            && let Some(recorder) = &mut state.recorder
        {
            recorder.input(stream, bytes);
        }
    }

    /// Notes bytes that the guest has put out, in parts.
    pub(crate) fn output(&self, stream: Stream, parts: &[&[u8]]) {
        let Some(mut state) = self.running() else {
            return;
        };
        if let Some(recorder) = &mut state.recorder {
            recorder.output(stream, parts);
        }
        let Some(player) = &mut state.player else {
            return;
        };
        player.output(stream, parts, Instant::now());
        drop(state);
        self.0.changed.notify_all();
    }

    /// Returns the next input of a stream that is due. The guest gets it, so it is recorded.
    pub(crate) fn pull(&self, stream: Stream, room: usize) -> Pull {
        self.played(stream, |player| player.pull(stream, room))
    }

    /// Returns the input of a stream that answers its next request, of this length, likewise.
    pub(crate) fn answer(&self, stream: Stream, length: usize) -> Pull {
        self.played(stream, |player| player.answer(stream, length))
    }

    /// Returns the next bytes of a port, likewise.
    pub(crate) fn take(&self, stream: Stream, room: usize) -> Pull {
        self.played(stream, |player| player.take(stream, room))
    }

    /// Checks whether a port's backend had handled an open or a close by now, and records that it
    /// has. `None` if nothing is played.
    pub(crate) fn settle(&self, stream: Stream) -> Option<bool> {
        let mut state = self.running()?;
        let is_settled = state.player.as_mut()?.settle(stream);
        if let (true, Some(recorder)) = (is_settled, &mut state.recorder) {
            recorder.input(stream, &[]);
        }
        Some(is_settled)
    }

    /// Checks whether a port is played more input before the guest's next output to it.
    pub(crate) fn has_more(&self, stream: Stream) -> bool {
        let state = self.running();
        let player = state.as_ref().and_then(|state| state.player.as_ref());
        player.is_some_and(|player| player.has_more(stream))
    }

    fn played(&self, stream: Stream, ask: impl FnOnce(&mut Player) -> Pull) -> Pull {
        let Some(mut state) = self.running() else {
            return Pull::Live;
        };
        let State {
            player, recorder, ..
        } = &mut *state;
        let Some(player) = player else {
            return Pull::Live;
        };
        let pulled = ask(player);
        if let (Pull::Bytes(bytes), Some(recorder)) = (&pulled, recorder) {
            recorder.input(stream, bytes);
        }
        pulled
    }

    /// Checks whether a recording is played.
    pub(crate) fn plays(&self) -> bool {
        self.running().is_some_and(|state| state.player.is_some())
    }

    /// Puts a recording in, to be played from [`play`](Self::play) on. Until then the guest gets no
    /// input.
    pub(crate) fn load(&self, recording: Recording) {
        self.set(|state| state.player = Some(Player::new(recording, Instant::now())));
    }

    /// Ends playing. Devices that have had no backend meanwhile are woken.
    fn end_play(&self) {
        self.set(|state| state.player = None);
        for (_, wake) in &self.state().wakers {
            wake();
        }
    }

    /// Plays to the end of the recording, on this thread. `give` takes bytes for the serial port
    /// and returns the number that it accepts. Returns `None` if there is nothing to play, or
    /// `is_over`.
    pub(crate) fn play(
        &self,
        give: impl Fn(&[u8]) -> usize,
        is_over: impl Fn() -> bool,
    ) -> Option<Replay> {
        let mut state = self.state();
        state.player.as_mut()?.start(Instant::now());
        loop {
            let now = Instant::now();
            let player = state.player.as_mut()?;
            player.advance(now);
            let due = player.take_due(Stream::Serial);
            let finished = player.finished();
            let wait = player.wait(now);
            let awake = player.awake();
            for (_, wake) in state.wakers.iter().filter(|(of, _)| awake.contains(of)) {
                wake();
            }
            if !due.is_empty() {
                // The port's own lock comes before this one.
                drop(state);
                let taken = give(&due);
                state = self.state();
                let rest = due.get(taken..).unwrap_or_default();
                state.player.as_mut()?.put_back(Stream::Serial, rest);
                if taken == due.len() {
                    continue;
                }
            } else if let Some(replay) = finished {
                drop(state);
                self.end_play();
                return Some(replay);
            }
            if is_over() {
                let replay = state.player.as_ref()?.so_far(Instant::now());
                drop(state);
                self.end_play();
                return Some(replay);
            }
            let waited = self.0.changed.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
