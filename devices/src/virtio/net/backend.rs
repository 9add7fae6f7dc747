//! The backend of a network device: where its frames go, and where those for the guest come from.

use std::io;

/// The size in bytes of the header before each frame (`struct virtio_net_hdr_v1`).
pub const HEADER: usize = 12;
/// The size in bytes of the shortest frame: the Ethernet header alone.
pub const SHORTEST_FRAME: usize = 14;
/// The size in bytes of the longest frame: an IP packet of the largest size behind an Ethernet
/// header.
pub const LONGEST_FRAME: usize = 65_535 + SHORTEST_FRAME;

/// The offloads of a backend. They never change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Abilities {
    /// True if it evaluates the header of a sent frame, and fills in that of a received one. It
    /// then completes checksums and cuts TCP segments. Otherwise it is given complete frames.
    pub offloads: bool,
    /// True if the checksums of all received frames are known to be right.
    pub checked: bool,
}

/// The offloads that the guest's driver accepts for received frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuestOffloads {
    /// A frame's checksum may be incomplete.
    pub checksum: bool,
    /// TCP over IPv4 may come in segments larger than the MTU.
    pub tcp4: bool,
    /// TCP over IPv6 likewise.
    pub tcp6: bool,
}

/// The backend of a network device. No call may wait.
///
/// A packet is a header of [`HEADER`] bytes with a frame behind it, of at most [`LONGEST_FRAME`]
/// bytes. Whoever serves the device calls [`DeviceHandle::poll`](crate::virtio::DeviceHandle::poll)
/// when the backend may have a frame, and when it has room again
/// ([`DeviceHandle::wants_room`](crate::virtio::DeviceHandle::wants_room)).
///
/// An error other than `WouldBlock` ends the backend: the guest's link goes down, and it is not
/// called again.
pub trait NetBackend: Send {
    /// Returns what the backend does with frames.
    fn abilities(&self) -> Abilities;

    /// Sets the offloads for frames that it returns from now on. Only called for a backend with
    /// offloads.
    ///
    /// # Errors
    /// If the backend refuses.
    fn set_offloads(&mut self, offloads: GuestOffloads) -> io::Result<()> {
        let _ = offloads;
        Ok(())
    }

    /// Takes a packet. Part of it may be sent later, by [`NetBackend::flush`].
    ///
    /// # Errors
    /// `WouldBlock` if there is no room: nothing of it was taken.
    fn send(&mut self, packet: &[u8]) -> io::Result<()>;

    /// Sends what is left of packets already taken.
    ///
    /// # Errors
    /// `WouldBlock` if something is still left.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Returns the next packet in `packet`, which has room for the longest one, and its length. A
    /// backend without offloads leaves the header as it is.
    ///
    /// # Errors
    /// `WouldBlock` if there is none, `UnexpectedEof` if there will be no more.
    fn receive(&mut self, packet: &mut [u8]) -> io::Result<usize>;
}
