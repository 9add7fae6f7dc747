//! One connection between a port of the guest and one of the host: what each side has ended, what
//! is due to the guest, and the credit of both.
//!
//! The credit of a side is the room in the other side's buffer. The device has one of
//! [`BUFFER`] bytes, which are those that the host's program has not taken yet.

use std::time::Instant;

use super::backend::StreamId;
use super::header::{CLOSED, Header, NO_MORE_RECEIVED, NO_MORE_SENT, Operation};

/// The maximum number of bytes that are held for a program of the host.
pub const BUFFER: u32 = 64 << 10;
/// The number of bytes that the program takes before the device reports its new room to the guest.
const CREDIT_STEP: u32 = BUFFER / 4;

/// The two ports of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// A connection.
pub(super) struct Connection {
    pub(super) stream: StreamId,
    /// The packet that opens it, until it is sent.
    pub(super) opening: Option<Operation>,
    /// True if both sides have agreed.
    pub(super) established: bool,
    /// True if the stream may have bytes or its end.
    pub(super) readable: bool,
    /// True if it is among those with a packet for the guest.
    pub(super) queued: bool,
    /// The guest's bytes that the stream has not taken yet.
    pub(super) outbox: Vec<u8>,
    /// The directions that the guest has ended: flags of a shutdown.
    pub(super) guest_ended: u32,
    /// The directions that the host has ended, and those that were reported to the guest.
    pub(super) host_ended: u32,
    reported_ended: u32,
    /// The time at which the guest must have answered.
    pub(super) deadline: Option<Instant>,
    /// The number of the guest's bytes that have left the outbox, and the last reported one.
    taken: u32,
    reported_taken: u32,
    /// True if the guest has asked for its credit.
    pub(super) credit_due: bool,
    /// The number of bytes sent to the guest.
    sent: u32,
    /// The guest's buffer, and the number of bytes that have left it.
    guest_buffer: u32,
    guest_taken: u32,
    /// True if the guest was asked for the room in its buffer since there was none.
    asked: bool,
}

impl Connection {
    /// Makes a connection that `opening` opens: a request, or the response to one.
    pub(super) fn new(stream: StreamId, opening: Operation) -> Self {
        Self {
            stream,
            opening: Some(opening),
            established: opening == Operation::Response,
            readable: true,
            queued: false,
            outbox: Vec::new(),
            guest_ended: 0,
            host_ended: 0,
            reported_ended: 0,
            deadline: None,
            taken: 0,
            reported_taken: 0,
            credit_due: false,
            sent: 0,
            guest_buffer: 0,
            guest_taken: 0,
            asked: false,
        }
    }

    /// Takes on the guest's view of its buffer, which each of its packets has.
    pub(super) fn learn(&mut self, header: &Header) {
        self.guest_buffer = header.buffer;
        self.guest_taken = header.consumed;
        if self.credit() > 0 {
            self.asked = false;
        }
    }

    /// Returns the number of bytes that the guest has room for. It is none if the guest's numbers
    /// make no sense.
    pub(super) fn credit(&self) -> u32 {
        let under_way = self.sent.wrapping_sub(self.guest_taken);
        self.guest_buffer.saturating_sub(under_way)
    }

    /// Checks whether the guest has room for `length` more bytes of its own here.
    pub(super) fn has_room(&self, length: usize) -> bool {
        length <= (BUFFER as usize).saturating_sub(self.outbox.len())
    }

    /// Notes that `length` of the guest's bytes need no room any more.
    pub(super) fn took(&mut self, length: usize) {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        self.taken = self.taken.wrapping_add(length);
        if self.taken.wrapping_sub(self.reported_taken) >= CREDIT_STEP {
            self.credit_due = true;
        }
    }

    /// Notes that the host's program takes no more bytes. Those that wait for it are lost.
    pub(super) fn stop_taking(&mut self) {
        self.host_ended |= NO_MORE_RECEIVED;
        let lost = std::mem::take(&mut self.outbox);
        self.took(lost.len());
    }

    /// Checks whether bytes of the host may be read for the guest.
    pub(super) fn reads(&self) -> bool {
        self.established
            && self.readable
            && self.guest_ended & NO_MORE_RECEIVED == 0
            && self.host_ended & NO_MORE_SENT == 0
    }

    /// Checks whether there may be a packet for the guest.
    pub(super) fn is_due(&self) -> bool {
        self.opening.is_some()
            || self.ends()
            || self.reads() && (self.credit() > 0 || !self.asked)
            || self.credit_due && self.established
    }

    /// Checks whether the guest does not know yet which directions the host has ended.
    fn ends(&self) -> bool {
        self.established && self.host_ended != self.reported_ended
    }

    /// Checks whether the end of both directions was reported to the guest.
    pub(super) fn reported_closed(&self) -> bool {
        self.reported_ended == CLOSED
    }

    /// Takes the packet that is due without bytes of the stream, and its flags.
    pub(super) fn take_due(&mut self) -> Option<(Operation, u32)> {
        if let Some(opening) = self.opening.take() {
            return Some((opening, 0));
        }
        if self.ends() {
            self.reported_ended = self.host_ended;
            return Some((Operation::Shutdown, self.host_ended));
        }
        None
    }

    /// Takes the packet that is due about credit.
    pub(super) fn take_credit_due(&mut self) -> Option<Operation> {
        if self.reads() && self.credit() == 0 && !self.asked {
            self.asked = true;
            return Some(Operation::CreditRequest);
        }
        (self.credit_due && self.established).then_some(Operation::CreditUpdate)
    }

    /// Fills in the device's credit in the header of a packet with `length` bytes.
    pub(super) fn account(&mut self, header: &mut Header, length: usize) {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        self.sent = self.sent.wrapping_add(length);
        self.reported_taken = self.taken;
        self.credit_due = false;
        header.length = length;
        header.buffer = BUFFER;
        header.consumed = self.taken;
    }
}
