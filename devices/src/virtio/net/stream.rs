//! Frames over a stream socket, each behind its length: 4 bytes, big endian. That is the framing
//! of passt(1) and of QEMU's `-netdev stream`.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::backend::{Abilities, HEADER, NetBackend, SHORTEST_FRAME};
use crate::virtio::uninterrupted::uninterrupted;

/// The size in bytes of a frame's length.
const LENGTH: usize = 4;
/// The size in bytes of the longest frame in either direction. passt resets the connection for
/// longer ones.
pub const LONGEST_STREAM_FRAME: usize = 65_535;
/// The size in bytes of the buffer for received bytes: the longest frame and some more.
const INBOX: usize = 128 << 10;

/// A backend over a connected stream socket.
#[derive(Debug)]
pub struct StreamBackend {
    socket: OwnedFd,
    checked: bool,
    /// The received bytes, of which those in `held` are not returned yet.
    inbox: Box<[u8]>,
    held: std::ops::Range<usize>,
    /// The bytes of the last packet that the socket has not taken yet.
    outbox: Vec<u8>,
}

impl StreamBackend {
    /// Makes a backend of `socket`; `checked`: the peer is known to fill in right checksums. The
    /// socket no longer blocks then, as do others that share it.
    ///
    /// # Errors
    /// If the socket cannot be changed.
    pub fn new(socket: UnixStream, checked: bool) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket: socket.into(),
            checked,
            inbox: vec![0; INBOX].into(),
            held: 0..0,
            outbox: Vec::new(),
        })
    }

    /// Writes what the socket takes. A peer that has gone is an error, and no signal.
    fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        uninterrupted(|| {
            let mut none = SendAncillaryBuffer::default();
            sendmsg(&self.socket, parts, &mut none, SendFlags::NOSIGNAL)
        })
    }

    /// Returns the next frame of the received bytes, if it is there as a whole.
    fn next(&self) -> io::Result<Option<std::ops::Range<usize>>> {
        let bytes = self.inbox.get(self.held.clone()).unwrap_or_default();
        let Some(length) = bytes.first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if !(SHORTEST_FRAME..=LONGEST_STREAM_FRAME).contains(&length) {
            let message = format!(
                "a frame of {length} bytes, expected {SHORTEST_FRAME} to {LONGEST_STREAM_FRAME}: \
                 the peer does not put each frame behind its length in 4 bytes"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        let start = self.held.start + LENGTH;
        let frame = start..start + length;
        Ok((frame.end <= self.held.end).then_some(frame))
    }

    /// Reads what has come, behind what is held.
    fn fill(&mut self) -> io::Result<()> {
        if self.held.start > 0 {
            let length = self.held.len();
            self.inbox.copy_within(self.held.clone(), 0);
            self.held = 0..length;
        }
        let room = self.inbox.get_mut(self.held.end..).unwrap_or_default();
        match uninterrupted(|| rustix::io::read(&self.socket, &mut *room))? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                self.held.end += read;
                Ok(())
            }
        }
    }
}

impl NetBackend for StreamBackend {
    fn abilities(&self) -> Abilities {
        Abilities {
            offloads: false,
            checked: self.checked,
        }
    }

    fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        self.flush()?;
        let frame = packet.get(HEADER..).unwrap_or_default();
        // Longer ones cannot be sent: the network loses them.
        let Some(length) = u32::try_from(frame.len())
            .ok()
            .filter(|_| frame.len() <= LONGEST_STREAM_FRAME)
        else {
            return Ok(());
        };
        let length = length.to_be_bytes();
        let parts = [IoSlice::new(&length), IoSlice::new(frame)];
        let sent = self.write(&parts)?;
        let left = length.iter().chain(frame).skip(sent);
        self.outbox.extend(left);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.outbox.is_empty() {
            let sent = self.write(&[IoSlice::new(&self.outbox)])?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.outbox.drain(..sent.min(self.outbox.len()));
        }
        Ok(())
    }

    fn receive(&mut self, packet: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(frame) = self.next()? else {
                self.fill()?;
                continue;
            };
            self.held.start = frame.end;
            let end = HEADER + frame.len();
            let from = self.inbox.get(frame).unwrap_or_default();
            let Some(place) = packet.get_mut(HEADER..end) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            place.copy_from_slice(from);
            return Ok(end);
        }
    }
}
