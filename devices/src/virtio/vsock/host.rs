//! The host's side: programs that connect, their lines, and streams that are ready.

use std::io;
use std::time::Instant;

use super::guest::write_all;
use super::{
    ACCEPT_AGAIN, ANSWER_TIME, AT_ONCE, Connection, FIRST_PORT, HostEvent, LINE_TIME, LONGEST_LINE,
    MOST_LINES, MOST_STREAMS, Operation, Ports, Role, StreamId, Vsock,
};

/// The state of a program's line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// More is to come.
    Open,
    /// It asks for this port of the guest.
    Connect(u32),
    /// It asks for nothing that there is.
    Wrong,
}

impl Vsock {
    /// Follows the events of the host's side. Returns whether there may be more.
    pub(super) fn take_events(&mut self, now: Instant) -> bool {
        let Some(backend) = &mut self.backend else {
            return false;
        };
        let mut events = std::mem::take(&mut self.events);
        let more = backend.events(&mut events);
        for event in events.drain(..) {
            match event {
                HostEvent::Incoming => self.incoming = true,
                HostEvent::Ready { stream, closed } => self.ready(stream, closed, now),
            }
        }
        self.events = events;
        more | self.accept(now)
    }

    /// Follows a stream that has bytes or room.
    fn ready(&mut self, stream: StreamId, closed: bool, now: Instant) {
        match self.streams.get_mut(&stream) {
            None => {}
            Some(Role::Line { .. }) => self.read_line(stream, now),
            Some(Role::Draining(left)) => {
                let Some(backend) = &mut self.backend else {
                    return;
                };
                let written = write_all(&mut **backend, stream, left);
                if closed || written.is_err() || left.is_empty() {
                    self.close(stream);
                }
            }
            Some(Role::Connection(ports)) => {
                let ports = *ports;
                let Some(connection) = self.connections.get_mut(&ports) else {
                    return;
                };
                connection.readable = true;
                if closed && !connection.established {
                    // Its program does not wait for the guest's answer.
                    self.end(ports);
                    return;
                }
                if closed {
                    connection.stop_taking();
                }
                self.flush(ports);
                self.mark(ports);
            }
        }
    }

    /// Accepts programs that have connected. Returns whether there may be more.
    fn accept(&mut self, now: Instant) -> bool {
        if self.holds(now) {
            return false;
        }
        for _ in 0..AT_ONCE {
            let Some(backend) = self.backend.as_mut().filter(|_| self.incoming) else {
                return false;
            };
            match backend.accept() {
                Ok(stream) if self.streams.len() < MOST_STREAMS && self.lines < MOST_LINES => {
                    let until = now.checked_add(LINE_TIME).unwrap_or(now);
                    let bytes = Vec::new();
                    self.streams.insert(stream, Role::Line { bytes, until });
                    self.lines += 1;
                    self.wake_at(Some(until));
                    self.read_line(stream, now);
                }
                Ok(stream) => backend.close(stream),
                Err(error) => {
                    // The host may lack descriptors for a while.
                    match error.kind() {
                        io::ErrorKind::WouldBlock => self.incoming = false,
                        _ => self.wake_at(now.checked_add(ACCEPT_AGAIN)),
                    }
                    return false;
                }
            }
        }
        true
    }

    /// Reads more of a program's line. Nothing behind the line is read: that is for the guest.
    fn read_line(&mut self, stream: StreamId, now: Instant) {
        let (Some(Role::Line { bytes, .. }), Some(backend)) =
            (self.streams.get_mut(&stream), &mut self.backend)
        else {
            return;
        };
        let line = loop {
            let mut byte = [0];
            match backend.read(stream, &mut byte) {
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Line::Open,
                _ => break Line::Wrong,
            }
            bytes.extend(byte);
            match byte {
                [b'\n'] => break parse(bytes),
                _ if bytes.len() >= LONGEST_LINE => break Line::Wrong,
                _ => {}
            }
        };
        match line {
            Line::Open => {}
            Line::Wrong => self.close(stream),
            Line::Connect(port) => self.request(stream, port, now),
        }
    }

    /// Asks the guest for a connection of a program to one of its ports.
    fn request(&mut self, stream: StreamId, guest: u32, now: Instant) {
        self.lines = self.lines.saturating_sub(1);
        let ports = loop {
            let host = FIRST_PORT | (self.next_port % FIRST_PORT);
            self.next_port = self.next_port.wrapping_add(1);
            let ports = Ports { host, guest };
            // There are far more ports than connections.
            if !self.connections.contains_key(&ports) {
                break ports;
            }
        };
        let mut connection = Connection::new(stream, Operation::Request);
        connection.deadline = now.checked_add(ANSWER_TIME);
        self.wake_at(connection.deadline);
        self.streams.insert(stream, Role::Connection(ports));
        self.connections.insert(ports, connection);
        self.mark(ports);
    }

    /// Sends a program the line that the guest has accepted. Returns `false` if the program is
    /// gone.
    pub(super) fn welcome(&mut self, ports: Ports) -> bool {
        let (Some(connection), Some(backend)) = (self.connections.get(&ports), &mut self.backend)
        else {
            return false;
        };
        let line = format!("OK {}\n", ports.host);
        // A new socket has room for a line.
        let written = backend.write(connection.stream, line.as_bytes());
        written.is_ok_and(|written| written == line.len())
    }

    /// Ends what is late: lines, and answers of the guest.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.wake.is_none_or(|wake| wake > now) {
            return;
        }
        let lines = self.streams.iter().filter_map(|(stream, role)| match role {
            Role::Line { until, .. } => Some((*stream, *until)),
            _ => None,
        });
        let (late, early): (Vec<_>, Vec<_>) = lines.partition(|(_, until)| *until <= now);
        self.wake = self.restored_until.filter(|until| *until > now);
        self.wake_at(early.into_iter().map(|(_, until)| until).min());
        late.into_iter().for_each(|(stream, _)| self.close(stream));
        let deadlines = self.connections.iter();
        let deadlines =
            deadlines.filter_map(|(ports, connection)| Some((*ports, connection.deadline?)));
        let (late, early): (Vec<_>, Vec<_>) = deadlines.partition(|(_, until)| *until <= now);
        self.wake_at(early.into_iter().map(|(_, until)| until).min());
        for (ports, _) in late {
            self.end(ports);
        }
    }

    /// Closes a stream that is not a connection.
    fn close(&mut self, stream: StreamId) {
        if let Some(Role::Line { .. }) = self.streams.remove(&stream) {
            self.lines = self.lines.saturating_sub(1);
        }
        if let Some(backend) = &mut self.backend {
            backend.close(stream);
        }
    }
}

/// Reads a whole line: `CONNECT PORT`.
fn parse(line: &[u8]) -> Line {
    let text = std::str::from_utf8(line).unwrap_or_default();
    let mut words = text.split_ascii_whitespace();
    let (word, port, rest) = (words.next(), words.next(), words.next());
    // The last number stands for any port.
    let port = port.and_then(|port| port.parse().ok());
    match (word, port.filter(|&port| port != u32::MAX), rest) {
        (Some("CONNECT"), Some(port), None) => Line::Connect(port),
        _ => Line::Wrong,
    }
}
