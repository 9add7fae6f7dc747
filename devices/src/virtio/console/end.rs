//! The backend of a port, and the port's configuration.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Size;

/// The backend of a port.
///
/// All calls are made with the device locked, by the device's thread or, for resets and emergency
/// writes, a vCPU's. None may wait for anything, nor call back into the device. A backend that
/// cannot accept or return bytes now does not, and calls
/// [`ConsoleHandle::wake`](super::ConsoleHandle::wake) when it can.
pub trait PortBackend: Send {
    /// Handles an open by the guest. The bytes that `read` returns once this has
    /// [settled](Self::is_settled) are in the guest's buffers before its open returns.
    fn opened(&mut self) {}

    /// Handles that the guest has had the port open since before the machine was saved.
    fn reopened(&mut self) {
        self.opened();
    }

    /// Handles a close by the guest, or the end of its driver. The guest has discarded up to
    /// `unread` of the last bytes of `read`: those in buffers that it had not read to their end.
    ///
    /// Bytes written before the close were passed to `write` before, unless there was no room. Then
    /// they come later.
    fn closed(&mut self, unread: u64) {
        let _ = unread;
    }

    /// Checks whether the last `opened` or `closed` has been handled completely. Until a backend
    /// wakes the port and this is true, the guest's call does not return (for five seconds at
    /// most). So work that takes a while goes to another thread. Meanwhile a reader sees no end of
    /// file either.
    fn is_settled(&mut self) -> bool {
        true
    }

    /// Accepts bytes from the guest, and returns their number. The rest is offered again after a
    /// wake. The bytes of one `write` of the guest come in one call. This needs all earlier bytes
    /// to be accepted, and at most 32 KiB.
    fn write(&mut self, bytes: &[u8]) -> usize;

    /// Puts bytes for the guest into `buffer`, and returns their number, or zero if there are none
    /// now. Only called while the guest has the port open and has room for them.
    fn read(&mut self, buffer: &mut [u8]) -> usize;
}

/// A backend that accepts and returns no bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct NullBackend;

impl PortBackend for NullBackend {
    fn write(&mut self, _bytes: &[u8]) -> usize {
        0
    }

    fn read(&mut self, _buffer: &mut [u8]) -> usize {
        0
    }
}

/// The policy for an end of file in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EndOfFile {
    /// A stream: readers wait.
    Never,
    /// A file. When the backend has no more bytes and the guest has read everything, the host side
    /// is shown as closed for a moment. That ends `cat`. It is repeated every quarter of a second
    /// while this lasts.
    WhenIdle,
}

/// The policy for bytes for which the backend has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WhenFull {
    /// They stay in the guest's queue. Writers in the guest wait once it is full.
    Hold,
    /// They are dropped and counted. This is for consoles, because Linux's driver spins until the
    /// device has accepted its output.
    Drop,
}

/// The configuration of one port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortConfig {
    /// The name in `/dev/virtio-ports`, 1 to 64 bytes. Without one, the guest shows the port only
    /// by number.
    pub name: Option<String>,
    /// True if it is a console (hvc) rather than a file.
    pub console: bool,
    /// The policy for an end of file.
    pub end_of_file: EndOfFile,
    /// The policy for bytes without room.
    pub when_full: WhenFull,
    /// True if the host side is open from the beginning.
    pub connected: bool,
}

impl PortConfig {
    /// Makes a console.
    #[must_use]
    pub fn console() -> Self {
        Self {
            name: None,
            console: true,
            end_of_file: EndOfFile::Never,
            when_full: WhenFull::Drop,
            connected: true,
        }
    }

    /// Makes a named file whose host side is open.
    #[must_use]
    pub fn named(name: &str, end_of_file: EndOfFile) -> Self {
        Self {
            name: Some(name.to_owned()),
            console: false,
            end_of_file,
            when_full: WhenFull::Hold,
            connected: true,
        }
    }
}

/// A port with its backend.
pub type PortAndBackend = (PortConfig, Box<dyn PortBackend>);

/// The configuration of a console device at power-on.
pub struct ConsoleConfig {
    /// The ports from number 0 on, with their backends. Port 0 is the one that drivers without
    /// multiport use.
    pub ports: Vec<PortAndBackend>,
    /// The maximum number of ports at a time, 1 to 31. Each takes two queues.
    pub max_ports: u32,
    /// The console's size.
    pub size: Size,
}

impl fmt::Debug for ConsoleConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleConfig")
            .field(
                "ports",
                &self
                    .ports
                    .iter()
                    .map(|(config, _)| config)
                    .collect::<Vec<_>>(),
            )
            .field("max_ports", &self.max_ports)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
