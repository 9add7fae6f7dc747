//! How a port shows an end of file to Linux.
//!
//! Linux's driver gives a reader an end of file when there is no data and the host side is closed; a reader that already
//! waits wakes up when it closes. A writer waits while it is closed. So the host side is closed for a moment: long enough for
//! readers to see it, and short enough for writers not to mind. The moment begins when the driver has handled the message,
//! not when it was sent, since it handles messages in a work queue.

use std::time::{Duration, Instant};

/// After the guest's open: a writer writes at once and should not meet a closed port, a reader reads what is there.
const FIRST: Duration = Duration::from_millis(20);
/// While the guest still reads.
const RECHECK: Duration = Duration::from_millis(25);
/// How long the host side stays closed: readers need to be scheduled, also on a busy machine.
const CLOSED: Duration = Duration::from_millis(50);
/// Between an open and the next close.
const PERIOD: Duration = Duration::from_millis(250);
/// Whether the message was handled is looked up this often.
const LOOK: Duration = Duration::from_millis(5);
/// A driver that does not give buffers back as Linux does is taken to have handled the message after this time.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    /// The guest has not opened the port, or it is a stream.
    #[default]
    Off,
    /// Open; looked at again then.
    Open { look: Instant },
    /// To be closed: the message waits for a buffer.
    Closing,
    /// The message is out; it is handled when the driver has given this many control buffers.
    Closed {
        after: u16,
        look: Instant,
        patience: Instant,
    },
    /// Handled; opened again then.
    Seen { until: Instant },
}

/// The clock of one port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct EofClock(Phase);

impl EofClock {
    /// The guest has opened the port.
    pub(super) fn start(&mut self, now: Instant) {
        self.0 = Phase::Open { look: now + FIRST };
    }

    /// The guest has closed it.
    pub(super) fn stop(&mut self) {
        self.0 = Phase::Off;
    }

    pub(super) fn running(&self) -> bool {
        self.0 != Phase::Off
    }

    /// Whether the host side is to be shown as closed now.
    pub(super) fn closes(&self) -> bool {
        !matches!(self.0, Phase::Off | Phase::Open { .. })
    }

    /// The driver was told that the host side is closed; the message is handled when it has given `after` buffers.
    pub(super) fn told(&mut self, after: u16, now: Instant) {
        if self.0 == Phase::Closing {
            self.0 = Phase::Closed {
                after,
                look: now + LOOK,
                patience: now + PATIENCE,
            };
        }
    }

    /// Goes on. `idle`: the far end has nothing and the guest has read everything. `given`: control buffers that the driver
    /// has given back. Whether a phase ended in which the guest saw the end.
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
                // Both counts wrap; a queue is shorter than half of their range.
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
            // A message that waits for a buffer goes when the driver gives one.
            Phase::Off | Phase::Closing => None,
            Phase::Open { look } => Some(look),
            Phase::Closed { look, patience, .. } => Some(look.min(patience)),
            Phase::Seen { until } => Some(until),
        }
    }
}
