//! Detection of an end that no exit reports: all vCPUs halted with interrupts off, or a panic that
//! never ends.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::shared::Shared;
use super::{Handle, RunEnd};

/// The interval between two checks. Each pauses the vCPUs for some tens of microseconds.
const INTERVAL: Duration = Duration::from_secs(1);
/// The time that a panicked kernel may go on printing before the run is ended, unless the witness
/// of its panic has another.
pub(super) const AFTER_PANIC: Duration = Duration::from_secs(10);

/// A thread that checks the vCPUs at intervals. Dropping this ends it.
pub(super) struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(super) fn start(machine: Handle) -> Self {
        let (stop, stopped) = channel::<()>();
        let thread = std::thread::Builder::new()
            .name("watch".into())
            .spawn(move || {
                let mut panicked: Option<Instant> = None;
                while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    let shared = &machine.shared;
                    if shared.control.ended().is_some() {
                        return;
                    }
                    let panic = machine.panic(false);
                    if let Some(report) = &panic {
                        let since = *panicked.get_or_insert_with(Instant::now);
                        let witness = shared.witness.get();
                        let patience = witness.map_or(AFTER_PANIC, |witness| witness.patience());
                        if since.elapsed() > patience {
                            shared.control.end(RunEnd::Panic(report.clone()));
                            return;
                        }
                    }
                    if all_halted(shared) {
                        shared.control.end(match panic {
                            Some(report) => RunEnd::Panic(report),
                            None => RunEnd::Halted,
                        });
                        return;
                    }
                }
            });
        match thread {
            Ok(thread) => Self {
                stop: Some(stop),
                thread: Some(thread),
            },
            Err(error) => {
                log::warn!("no watch for halted guests: {error}");
                Self {
                    stop: None,
                    thread: None,
                }
            }
        }
    }
}

/// Checks whether no vCPU can ever run again by itself.
fn all_halted(shared: &Shared) -> bool {
    let paused = shared.control.pause();
    (0..shared.control.vcpus()).all(|vcpu| paused.on_vcpu(vcpu, |v| v.is_off()).unwrap_or(true))
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the watch thread panicked");
        }
    }
}
