//! What is behind a port, and how the port treats it.

use serde::{Deserialize, Serialize};

use super::Size;

/// The far end of a port.
///
/// All calls are made with the device locked, by the device's thread or, for resets and emergency writes, a vCPU's: none may
/// wait for anything, nor call back into the device. A far end that cannot take or give bytes now says so, and calls
/// [`ConsoleHandle::wake`](super::ConsoleHandle::wake) when it can.
pub trait PortBackend: Send {
    /// The guest has opened the port. What `read` gives once this has [settled](Self::is_settled) is in the guest's hands before its open
    /// returns.
    fn opened(&mut self) {}

    /// The guest has closed the port, or its driver is gone. The guest has thrown away up to `unread` of the bytes that
    /// `read` gave last: those in buffers that it had not read to their end.
    ///
    /// What it wrote before it closed was given to `write` before, unless there was no room: then it comes later.
    fn closed(&mut self, unread: u64) {
        let _ = unread;
    }

    /// Whether everything that follows from the last `opened` or `closed` has been done. Until a far end wakes the port and says so
    /// the guest's call does not return (for five seconds at most): work that takes a while goes to another thread. While it is not
    /// so, a reader sees no end of file either.
    fn is_settled(&mut self) -> bool {
        true
    }

    /// Takes bytes from the guest; gives how many it took. The rest is offered again after a wake. The bytes of one `write`
    /// of the guest come in one call, as long as it took everything before and they are no more than 32 KiB.
    fn write(&mut self, bytes: &[u8]) -> usize;

    /// Gives bytes to the guest: how many were put into `buffer`. None: nothing now. Only called while the guest has the
    /// port open and has room for them.
    fn read(&mut self, buffer: &mut [u8]) -> usize;
}

/// A far end that takes and gives nothing.
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

/// Whether readers in the guest see an end of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EndOfFile {
    /// A stream: readers wait.
    Never,
    /// A file: when the far end has nothing more and the guest has read everything, the host side is shown as closed for a
    /// moment, which ends `cat`; and again every quarter of a second while that lasts.
    WhenIdle,
}

/// What becomes of bytes for which the far end has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WhenFull {
    /// They stay in the guest's queue; writers in the guest wait once it is full.
    Hold,
    /// They are dropped and counted. For consoles: Linux's driver spins until the device has taken what it prints.
    Drop,
}

/// One port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortConfig {
    /// Its name in `/dev/virtio-ports`, 1 to 64 bytes; none: the guest shows it by number only.
    pub name: Option<String>,
    /// Whether it is a console (hvc) and no file.
    pub console: bool,
    /// Whether readers see an end.
    pub end_of_file: EndOfFile,
    /// What becomes of bytes without room.
    pub when_full: WhenFull,
    /// Whether the host side is open from the beginning.
    pub connected: bool,
}

impl PortConfig {
    /// A console.
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

    /// A file by name, whose host side is open.
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

/// A port with what is behind it.
pub type PortAndBackend = (PortConfig, Box<dyn PortBackend>);

/// A console device at power-on.
pub struct ConsoleConfig {
    /// The ports from number 0 on, with their far ends. Port 0 is the one that drivers without multiport use.
    pub ports: Vec<PortAndBackend>,
    /// How many ports there can be at one time, 1 to 31: each takes two queues.
    pub max_ports: u32,
    /// The console's size.
    pub size: Size,
}
