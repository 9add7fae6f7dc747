//! Packets to the guest: answers, changes of its connections, and bytes of the host.

use std::io;
use std::time::Instant;

use super::header::{CLOSED, NO_MORE_SENT};
use super::{
    ANSWER_TIME, AT_ONCE, ChainError, HEADER, HOST_CID, Header, Operation, Ports, RECEIVE, Reset,
    STREAM, Vsock,
};
use crate::virtio::{Progress, Queues};

impl Vsock {
    /// Gives the guest what is due, until there is no more or its buffers are full.
    pub(super) fn receive(&mut self, now: Instant, queues: &mut Queues) -> Progress {
        queues.ignore(RECEIVE);
        for _ in 0..AT_ONCE {
            if self.resets.is_empty() && self.due.is_empty() {
                return Progress::Idle;
            }
            let Some(chain) = queues.pop(RECEIVE) else {
                return match queues.listen(RECEIVE) {
                    true => Progress::More,
                    false => Progress::Idle,
                };
            };
            // One without room for content would do for some packets, and no driver has such.
            if chain.readable() > 0 || chain.writable() <= HEADER {
                queues.reject(RECEIVE, chain, ChainError::Direction);
                continue;
            }
            let Some((header, length)) = self.next(chain.writable() - HEADER, now) else {
                queues.put_back(RECEIVE, chain);
                continue;
            };
            let content = self.content.get(..length).unwrap_or_default();
            let mut written = chain.write(queues.memory(), 0, &header.encode());
            written += chain.write(queues.memory(), HEADER, content);
            queues.give(RECEIVE, chain, written);
        }
        Progress::More
    }

    /// Returns the header of the next packet, with at most `room` bytes of content behind it. Those
    /// are in the device's own room.
    fn next(&mut self, room: usize, now: Instant) -> Option<(Header, usize)> {
        if let Some(Reset { ports, kind }) = self.resets.pop_front() {
            let mut header = self.header(ports, Operation::Reset, 0);
            header.kind = kind;
            return Some((header, 0));
        }
        while let Some(ports) = self.due.pop_front() {
            if let Some(packet) = self.packet(ports, room, now) {
                self.mark(ports);
                return Some(packet);
            }
        }
        None
    }

    fn header(&self, ports: Ports, operation: Operation, flags: u32) -> Header {
        Header {
            source_cid: HOST_CID,
            destination_cid: self.options.cid.into(),
            source_port: ports.host,
            destination_port: ports.guest,
            kind: STREAM,
            operation: operation as u16,
            flags,
            ..Header::default()
        }
    }

    /// Returns the next packet of a connection, if one is due.
    fn packet(&mut self, ports: Ports, room: usize, now: Instant) -> Option<(Header, usize)> {
        let connection = self.connections.get_mut(&ports)?;
        connection.queued = false;
        let mut length = 0;
        let mut due = connection.take_due();
        if due.is_none() && connection.reads() && connection.credit() > 0 {
            let credit = usize::try_from(connection.credit()).unwrap_or(usize::MAX);
            let most = room.min(credit).min(self.content.len());
            let content = self.content.get_mut(..most).unwrap_or_default();
            match self.backend.as_mut()?.read(connection.stream, content) {
                Ok(0) => connection.host_ended |= NO_MORE_SENT,
                Ok(read) => {
                    length = read.min(most);
                    due = Some((Operation::Data, 0));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    connection.readable = false;
                }
                Err(_) => {
                    connection.stop_taking();
                    connection.host_ended = CLOSED;
                }
            }
            due = due.or_else(|| connection.take_due());
        }
        let credit = || connection.take_credit_due().map(|operation| (operation, 0));
        let (operation, flags) = due.or_else(credit)?;
        if connection.reported_closed() && connection.deadline.is_none() {
            connection.deadline = now.checked_add(ANSWER_TIME);
        }
        let deadline = connection.deadline;
        self.wake_at(deadline);
        let mut header = self.header(ports, operation, flags);
        if let Some(connection) = self.connections.get_mut(&ports) {
            connection.account(&mut header, length);
        }
        Some((header, length))
    }
}
