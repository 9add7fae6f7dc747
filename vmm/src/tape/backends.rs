//! Backends of devices whose bytes go over a tape.

use std::io::{self, Read};
use std::ops::Range;

use devices::MemorySlice;
use devices::virtio::blk::{BlockBackend, DirectIo, OverlayFile};
use devices::virtio::console::PortBackend;
use devices::virtio::net::{Abilities, GuestOffloads, NetBackend};

use super::{Pull, Stream, Tape};

/// A source of random numbers.
pub(crate) struct TapedRandom<R> {
    pub(crate) inner: R,
    pub(crate) tape: Tape,
    pub(crate) stream: Stream,
}

impl<R: Read> Read for TapedRandom<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Pull::Bytes(bytes) = self.tape.answer(self.stream, buffer.len()) {
            let length = bytes.len().min(buffer.len());
            for (place, byte) in buffer.iter_mut().zip(&bytes) {
                *place = *byte;
            }
            return Ok(length);
        }
        let length = self.inner.read(buffer)?;
        self.tape
            .input(self.stream, buffer.get(..length).unwrap_or_default());
        Ok(length)
    }
}

/// The network. Without a backend it is there only as long as a recording is played.
pub(crate) struct TapedNet {
    pub(crate) inner: Option<Box<dyn NetBackend>>,
    pub(crate) tape: Tape,
    pub(crate) stream: Stream,
    /// Whether a played network has the offloads of a TAP interface.
    pub(crate) offloads: bool,
}

impl TapedNet {
    /// Returns the backend. Without one the link is down.
    fn inner(&mut self) -> io::Result<&mut dyn NetBackend> {
        match &mut self.inner {
            Some(inner) => Ok(&mut **inner),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl NetBackend for TapedNet {
    fn abilities(&self) -> Abilities {
        match &self.inner {
            Some(inner) => inner.abilities(),
            None => Abilities {
                offloads: self.offloads,
                checked: false,
            },
        }
    }

    fn set_offloads(&mut self, offloads: GuestOffloads) -> io::Result<()> {
        match &mut self.inner {
            Some(inner) => inner.set_offloads(offloads),
            None => Ok(()),
        }
    }

    fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        // The frames of a replay are of connections that are not there any more.
        if !self.tape.plays() {
            self.inner()?.send(packet)?;
        }
        self.tape.output(self.stream, &[packet]);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.tape.plays() {
            true => Ok(()),
            false => self.inner()?.flush(),
        }
    }

    fn receive(&mut self, packet: &mut [u8]) -> io::Result<usize> {
        match self.tape.pull(self.stream, packet.len()) {
            Pull::Bytes(bytes) => {
                for (place, byte) in packet.iter_mut().zip(&bytes) {
                    *place = *byte;
                }
                Ok(bytes.len())
            }
            Pull::Nothing => Err(io::ErrorKind::WouldBlock.into()),
            Pull::Live => {
                let length = self.inner()?.receive(packet)?;
                self.tape
                    .input(self.stream, packet.get(..length).unwrap_or_default());
                Ok(length)
            }
        }
    }
}

/// A port of a virtio-console. While a recording is played its backend is not there, and everything
/// that the guest writes is accepted. Afterwards a port that the guest has open is opened anew.
pub(crate) struct TapedPort<P> {
    inner: P,
    tape: Tape,
    stream: Stream,
    /// Whether the backend only shows what the guest writes, and so is there in any case.
    shows: bool,
    /// Whether the guest has the port open.
    open: bool,
    /// Whether the backend knows that.
    told: bool,
    /// Whether the last open or close has been handled.
    settled: bool,
}

impl<P: PortBackend> TapedPort<P> {
    pub(crate) fn new(inner: P, tape: Tape, stream: Stream, shows: bool) -> Self {
        Self {
            inner,
            tape,
            stream,
            shows,
            open: false,
            told: false,
            settled: true,
        }
    }

    /// Checks whether the port's bytes come from a recording. Otherwise notifies the backend of an
    /// open during the replay.
    fn is_played(&mut self) -> bool {
        if !self.shows && self.tape.plays() {
            return true;
        }
        if self.open && !self.told {
            self.told = true;
            self.inner.opened();
        }
        false
    }
}

impl<P: PortBackend> PortBackend for TapedPort<P> {
    fn opened(&mut self) {
        (self.open, self.settled) = (true, false);
        self.tape.output(self.stream, &[b"open"]);
        self.is_played();
    }

    fn reopened(&mut self) {
        (self.open, self.settled) = (true, true);
        self.is_played();
    }

    fn closed(&mut self, unread: u64) {
        (self.open, self.settled) = (false, false);
        self.tape.output(self.stream, &[b"close"]);
        if std::mem::take(&mut self.told) {
            self.inner.closed(unread);
        }
    }

    fn is_settled(&mut self) -> bool {
        if !self.is_played() {
            let is_settled = self.inner.is_settled();
            if is_settled && !self.settled {
                self.settled = true;
                self.tape.input(self.stream, &[]);
            }
            return is_settled;
        }
        if self.settled {
            // The end of a file is where the recording has no more of it.
            return !self.tape.has_more(self.stream);
        }
        self.settled = self.tape.settle(self.stream).unwrap_or(true);
        self.settled
    }

    fn write(&mut self, bytes: &[u8]) -> usize {
        let length = match self.is_played() {
            true => bytes.len(),
            false => self.inner.write(bytes).min(bytes.len()),
        };
        let accepted = bytes.get(..length).unwrap_or_default();
        self.tape.output(self.stream, &[accepted]);
        length
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        if !self.is_played() {
            let length = self.inner.read(buffer).min(buffer.len());
            if let (1.., Some(bytes)) = (length, buffer.get(..length)) {
                self.tape.input(self.stream, bytes);
            }
            return length;
        }
        let Pull::Bytes(bytes) = self.tape.take(self.stream, buffer.len()) else {
            return 0;
        };
        for (place, byte) in buffer.iter_mut().zip(&bytes) {
            *place = *byte;
        }
        bytes.len()
    }
}

/// A disk, whose requests are outputs of the guest. While the tape runs, all bytes go through a
/// buffer.
pub(crate) struct TapedDisk {
    pub(crate) inner: Box<dyn BlockBackend>,
    pub(crate) tape: Tape,
    pub(crate) stream: Stream,
}

impl TapedDisk {
    fn note(&self, request: u8, offset: u64, length: u64, data: &[u8]) {
        let parts: [&[u8]; 4] = [
            &[request],
            &offset.to_le_bytes(),
            &length.to_le_bytes(),
            data,
        ];
        self.tape.output(self.stream, &parts);
    }
}

impl BlockBackend for TapedDisk {
    fn length(&self) -> u64 {
        self.inner.length()
    }

    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.note(b'r', offset, buffer.len() as u64, &[]);
        self.inner.read_at(buffer, offset)
    }

    fn peek(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.inner.peek(buffer, offset)
    }

    fn use_direct_io(&mut self, io: &'static dyn DirectIo) {
        self.inner.use_direct_io(io);
    }

    fn read_direct(&mut self, targets: &[MemorySlice<'_>], offset: u64) -> Option<io::Result<()>> {
        match self.tape.runs() {
            true => None,
            false => self.inner.read_direct(targets, offset),
        }
    }

    fn write_direct(&mut self, sources: &[MemorySlice<'_>], offset: u64) -> Option<io::Result<()>> {
        match self.tape.runs() {
            true => None,
            false => self.inner.write_direct(sources, offset),
        }
    }

    fn write_at(&mut self, data: &[u8], offset: u64) -> io::Result<()> {
        self.note(b'w', offset, data.len() as u64, data);
        self.inner.write_at(data, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.note(b'f', 0, 0, &[]);
        self.inner.flush()
    }

    fn discard(&mut self, range: Range<u64>) -> io::Result<bool> {
        self.note(b'd', range.start, range.end - range.start, &[]);
        self.inner.discard(range)
    }

    fn overlay(&mut self) -> io::Result<Option<OverlayFile>> {
        self.inner.overlay()
    }
}
