//! The meaning of the guest's packets.

use super::header::{CLOSED, NO_MORE_RECEIVED, NO_MORE_SENT};
use super::{Connection, Direction, Header, MOST_STREAMS, Operation, Ports, Reset, Role, STREAM};
use super::{StreamId, Vsock};

impl Vsock {
    /// Does what a packet asks for. Its content is the first `length` bytes of the device's room.
    /// At most one answer to it is a reset.
    pub(super) fn handle(&mut self, header: &Header, length: usize) {
        let ports = Ports {
            host: header.destination_port,
            guest: header.source_port,
        };
        let operation = Operation::of(header.operation);
        if operation == Some(Operation::Reset) {
            self.detach(ports);
            return;
        }
        if header.kind != STREAM {
            let kind = header.kind;
            self.resets.push_back(Reset { ports, kind });
            return;
        }
        let known = self.connections.get_mut(&ports);
        let kept = match (operation, known) {
            (Some(Operation::Request), None) => self.open(ports, header),
            (Some(operation), Some(connection)) => {
                connection.learn(header);
                self.follow(ports, operation, header.flags, length)
            }
            _ => false,
        };
        match kept {
            true => self.mark(ports),
            false => self.end(ports),
        }
    }

    /// Connects the guest to the program that serves a port. Returns whether that works.
    fn open(&mut self, ports: Ports, header: &Header) -> bool {
        if self.streams.len() >= MOST_STREAMS {
            return false;
        }
        let connected = self
            .backend
            .as_mut()
            .map(|backend| backend.connect(ports.host));
        let Some(Ok(stream)) = connected else {
            return false;
        };
        let mut connection = Connection::new(stream, Operation::Response);
        connection.learn(header);
        self.streams.insert(stream, Role::Connection(ports));
        self.connections.insert(ports, connection);
        true
    }

    /// Follows a packet of a connection that exists. Returns `false` if it is to end.
    fn follow(&mut self, ports: Ports, operation: Operation, flags: u32, length: usize) -> bool {
        let Some(connection) = self.connections.get_mut(&ports) else {
            return false;
        };
        match operation {
            Operation::Response => {
                let answers = !connection.established && connection.opening.is_none();
                connection.established |= answers;
                connection.deadline = None;
                return answers && self.welcome(ports);
            }
            // The guest has not agreed yet.
            _ if !connection.established => return false,
            Operation::Data => return self.take(ports, length),
            Operation::Shutdown => {
                connection.guest_ended |= flags & CLOSED;
                return self.end_direction(ports);
            }
            Operation::CreditUpdate => {}
            Operation::CreditRequest => connection.credit_due = true,
            Operation::Request | Operation::Reset => return false,
        }
        true
    }

    /// Passes the guest's bytes on, or holds them. Returns whether it had the room for them.
    fn take(&mut self, ports: Ports, length: usize) -> bool {
        let Some(connection) = self.connections.get_mut(&ports) else {
            return false;
        };
        if !connection.has_room(length) || connection.guest_ended & NO_MORE_SENT != 0 {
            return false;
        }
        if connection.host_ended & NO_MORE_RECEIVED != 0 {
            // They were under way as the program ended.
            connection.took(length);
            return true;
        }
        let bytes = self.content.get(..length).unwrap_or_default();
        // Most are taken at once, and need no room.
        connection.outbox.extend_from_slice(bytes);
        self.flush(ports);
        true
    }

    /// Writes what the stream takes, and its end behind it.
    pub(super) fn flush(&mut self, ports: Ports) {
        let (Some(connection), Some(backend)) =
            (self.connections.get_mut(&ports), &mut self.backend)
        else {
            return;
        };
        let stream = connection.stream;
        match write_all(&mut **backend, stream, &mut connection.outbox) {
            Ok(written) => connection.took(written),
            Err(()) => connection.stop_taking(),
        }
        if connection.outbox.is_empty() && connection.guest_ended & NO_MORE_SENT != 0 {
            backend.shut_down(stream, Direction::ToHost);
        }
    }

    /// Ends the directions that the guest has ended. Returns `false` if none is left.
    fn end_direction(&mut self, ports: Ports) -> bool {
        let Some(connection) = self.connections.get(&ports) else {
            return false;
        };
        let (ended, stream) = (connection.guest_ended, connection.stream);
        if ended == CLOSED {
            return false;
        }
        if ended & NO_MORE_RECEIVED != 0
            && let Some(backend) = &mut self.backend
        {
            backend.shut_down(stream, Direction::FromHost);
        }
        self.flush(ports);
        true
    }

    /// Ends a connection, or refuses one that does not exist. The guest gets a reset, unless it
    /// does not know of the connection yet.
    pub(super) fn end(&mut self, ports: Ports) {
        let unknown = self
            .connections
            .get(&ports)
            .is_some_and(|connection| connection.opening == Some(Operation::Request));
        self.detach(ports);
        if !unknown {
            let kind = STREAM;
            self.resets.push_back(Reset { ports, kind });
        }
    }

    /// Takes a connection from the guest. Its stream closes behind the bytes that are left.
    fn detach(&mut self, ports: Ports) {
        let Some(mut connection) = self.connections.remove(&ports) else {
            return;
        };
        let stream = connection.stream;
        self.streams.remove(&stream);
        let Some(backend) = &mut self.backend else {
            return;
        };
        let outbox = &mut connection.outbox;
        match write_all(&mut **backend, stream, outbox) {
            Ok(_) if !outbox.is_empty() => {
                backend.shut_down(stream, Direction::FromHost);
                let left = std::mem::take(outbox);
                self.streams.insert(stream, Role::Draining(left));
            }
            _ => backend.close(stream),
        }
    }

    /// Notes that a connection may have a packet for the guest.
    pub(super) fn mark(&mut self, ports: Ports) {
        if let Some(connection) = self.connections.get_mut(&ports)
            && connection.is_due()
            && !connection.queued
        {
            connection.queued = true;
            self.due.push_back(ports);
        }
    }
}

/// Writes bytes until there are no more or the stream has no room, and removes them. Returns their
/// number.
///
/// # Errors
/// If the stream takes no more.
pub(super) fn write_all(
    backend: &mut dyn super::VsockBackend,
    stream: StreamId,
    bytes: &mut Vec<u8>,
) -> Result<usize, ()> {
    let mut done = 0;
    while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
        match backend.write(stream, rest) {
            Ok(0) => return Err(()),
            Ok(written) => done += written,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            Err(_) => return Err(()),
        }
    }
    let done = done.min(bytes.len());
    bytes.drain(..done);
    Ok(done)
}
