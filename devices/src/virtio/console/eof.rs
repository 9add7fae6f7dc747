//! Shows an end of file of a port to Linux.
//!
//! Linux's driver returns an end of file to a reader if there is no data and the host side is
//! closed. A waiting reader wakes up at the close. A writer waits while the host side is closed. So
//! it is closed for a moment, long enough for readers to see it and short enough not to disturb
//! writers. The moment begins when the driver has handled the message rather than when it was sent,
//! because a work queue handles messages.

use std::time::{Duration, Instant};

/// The time after the guest's open. A writer writes at once and should not meet a closed port; a
/// reader reads the available bytes.
const FIRST: Duration = Duration::from_millis(20);
/// The time between checks while the guest still reads.
const RECHECK: Duration = Duration::from_millis(25);
/// The time for which the host side stays closed. Readers need to be scheduled, also on a busy
/// machine.
const CLOSED: Duration = Duration::from_millis(50);
/// The time between an open and the next close.
const PERIOD: Duration = Duration::from_millis(250);
/// The time between checks for a handled message.
const LOOK: Duration = Duration::from_millis(5);
/// The time after which a message counts as handled by a driver that does not return buffers as
/// Linux does.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    /// The guest has not opened the port, or it is a stream.
    #[default]
    Off,
    /// Open, and checked again at `look`.
    Open { look: Instant },
    /// To be closed: the message waits for a buffer.
    Closing,
    /// The message is sent. It is handled when the driver has made this many control buffers
    /// available.
    Closed {
        after: u16,
        look: Instant,
        patience: Instant,
    },
    /// Handled. Opened again at `until`.
    Seen { until: Instant },
}

/// The end-of-file state machine of one port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct EofClock(Phase);

impl EofClock {
    /// Handles an open by the guest.
    pub(super) fn start(&mut self, now: Instant) {
        self.0 = Phase::Open { look: now + FIRST };
    }

    /// Handles a close by the guest.
    pub(super) fn stop(&mut self) {
        self.0 = Phase::Off;
    }

    pub(super) fn running(&self) -> bool {
        self.0 != Phase::Off
    }

    /// Checks whether the host side is to be shown as closed now.
    pub(super) fn closes(&self) -> bool {
        !matches!(self.0, Phase::Off | Phase::Open { .. })
    }

    /// Notes that the driver was notified of the close. The message is handled when the driver has
    /// made `after` buffers available.
    pub(super) fn told(&mut self, after: u16, now: Instant) {
        if self.0 == Phase::Closing {
            self.0 = Phase::Closed {
                after,
                look: now + LOOK,
                patience: now + PATIENCE,
            };
        }
    }

    /// Advances the state. `idle` is true if the backend has no bytes and the guest has read
    /// everything. `given` is the number of control buffers that the driver has returned. Returns
    /// whether a phase ended in which the guest saw the end.
    pub(super) fn tick(&mut self, now: Instant, idle: bool, given: u16) -> bool {
        match self.0 {
            Phase::Open { look } if now >= look => {
                self.0 = if idle {
                    Phase::Closing
                } else {
                    let look = now + RECHECK;
                    Phase::Open { look }
                };
            }
            Phase::Closed {
                after,
                look,
                patience,
            } => {
                // Both counts wrap. A queue is shorter than half of their range.
                let handled = given.wrapping_sub(after) < u16::MAX / 2;
                if handled || now >= patience {
                    self.0 = Phase::Seen {
                        until: now + CLOSED,
                    };
                } else if now >= look {
                    self.0 = Phase::Closed {
                        after,
                        look: now + LOOK,
                        patience,
                    };
                }
            }
            Phase::Seen { until } if now >= until => {
                self.0 = Phase::Open { look: now + PERIOD };
                return true;
            }
            _ => {}
        }
        false
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.0 {
            // A waiting message is sent when the driver makes a buffer available.
            Phase::Off | Phase::Closing => None,
            Phase::Open { look } => Some(look),
            Phase::Closed { look, patience, .. } => Some(look.min(patience)),
            Phase::Seen { until } => Some(until),
        }
    }
}
