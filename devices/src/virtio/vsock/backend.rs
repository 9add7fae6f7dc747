//! The host's side of a socket device: the streams of the host's programs.

use std::io;

/// The number of a stream. It is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// A change at the host's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostEvent {
    /// A program has connected: [`VsockBackend::accept`] returns its stream.
    Incoming,
    /// A stream has bytes, their end, or room.
    Ready {
        /// The stream.
        stream: StreamId,
        /// Set if its other side is closed in both directions. Bytes may be left to read.
        closed: bool,
    },
}

/// The direction of a stream that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The program sends nothing more that is read.
    FromHost,
    /// The program finds the end behind what was written.
    ToHost,
}

/// The backend of a socket device. No call may wait.
///
/// The server of the device calls [`DeviceHandle::poll`](crate::virtio::DeviceHandle::poll) when
/// the backend may have an event. Each event is reported once. A stream that has not been read up
/// to `WouldBlock` has no further event.
pub trait VsockBackend: Send {
    /// Adds the next events, a bounded number. Returns whether there may be more.
    fn events(&mut self, events: &mut Vec<HostEvent>) -> bool;

    /// Returns the stream of the next program that has connected.
    ///
    /// # Errors
    /// `WouldBlock` if there is none. After another error, a later call may succeed.
    fn accept(&mut self) -> io::Result<StreamId>;

    /// Connects to the program that serves the guest's connections to `port`.
    ///
    /// # Errors
    /// If there is none, or it does not take one at once.
    fn connect(&mut self, port: u32) -> io::Result<StreamId>;

    /// Reads from a stream. Returns 0 at its end.
    ///
    /// # Errors
    /// `WouldBlock` if there is nothing to read. Others end the stream.
    fn read(&mut self, stream: StreamId, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes to a stream, at least one byte of at least one.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room: an event reports it when there is some. Others end the
    /// stream.
    fn write(&mut self, stream: StreamId, bytes: &[u8]) -> io::Result<usize>;

    /// Ends one direction of a stream.
    fn shut_down(&mut self, stream: StreamId, direction: Direction);

    /// Closes a stream. It has no more events.
    fn close(&mut self, stream: StreamId);
}
