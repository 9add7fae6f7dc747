//! SIGINT, SIGTERM and SIGHUP end a run in order: the machine's owner is notified, disarms, and
//! exits. The second signal ends the process at once.
//!
//! From [`StopSignals::watch`] on the first of these signals no longer kills the process.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use signal_hook::iterator::{Handle, Signals};

use crate::confinement::{Confinement, Kind, STOP_SIGNALS};
use crate::ending;

/// The handlers or their thread cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("signals cannot be watched: {0}")]
pub struct WatchError(#[from] io::Error);

type Action = Box<dyn Fn() + Send>;

#[derive(Default)]
struct State {
    arrived: bool,
    action: Option<Action>,
}

/// A watch for stop signals. It ends when dropped.
pub struct StopSignals {
    state: Arc<Mutex<State>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for StopSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StopSignals").finish_non_exhaustive()
    }
}

impl StopSignals {
    /// Starts watching.
    ///
    /// # Errors
    /// If the handlers or their thread cannot be made.
    pub fn watch() -> Result<Self, WatchError> {
        Self::watch_in(&Confinement::none())
    }

    /// Starts watching, on a thread in `confinement`.
    ///
    /// # Errors
    /// As [`Self::watch`].
    pub fn watch_in(confinement: &Confinement) -> Result<Self, WatchError> {
        let mut signals = Signals::new(STOP_SIGNALS)?;
        let handle = signals.handle();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        let confinement = confinement.clone();
        let thread = std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                if let Err(error) = confinement.enter(Kind::Signals) {
                    log::warn!("the thread that waits for signals: {error}");
                }
                for signal in signals.forever() {
                    let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
                    if std::mem::replace(&mut state.arrived, true) {
                        leave(signal);
                    }
                    ending::hurry();
                    if let Some(action) = &state.action {
                        action();
                    }
                }
            })?;
        Ok(Self {
            state,
            handle,
            thread: Some(thread),
        })
    }

    /// Checks whether a signal has arrived.
    pub fn arrived(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.arrived
    }

    /// Calls `action` for every stop signal from now on, and at once if one has already arrived.
    pub fn on_stop(&self, action: impl Fn() + Send + 'static) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.arrived {
            action();
        }
        state.action = Some(Box::new(action));
    }
}

/// Ends the process as the signal does by default. Traps and snapshots need no care: the guest's
/// memory is freed with the process, and the next save removes the remains of an interrupted one.
fn leave(signal: i32) {
    vmm::machine::console::restore_terminal();
    // Does not return for these signals.
    if let Err(error) = signal_hook::low_level::emulate_default_handler(signal) {
        log::error!("cannot leave: {error}");
    }
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the signal thread panicked");
        }
    }
}
