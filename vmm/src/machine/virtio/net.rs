//! The network of a machine: the choice of one, and the connection to it, which the caller opens.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use devices::virtio::net::{NetBackend, StreamBackend};
use serde::{Deserialize, Serialize};

use super::tap::{TapBackend, TapError};

/// The MTU of an Ethernet.
pub const ETHERNET_MTU: u16 = 1500;

/// A network card (virtio-net).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetConfig {
    /// The guest's address.
    pub mac: [u8; 6],
    /// The MTU that the guest begins with, and its largest one.
    pub mtu: u16,
    /// Whether the guest may send and receive TCP segments larger than that, which not every
    /// connection carries ([`NetConnection::segments`]).
    pub segmentation: bool,
    /// The words by which the user chose the network. A snapshot has them, for who restores it.
    pub chosen: String,
    /// Whether a restored guest is on another network than before.
    #[serde(skip)]
    pub moved: bool,
    /// The connection. Without one the guest's link is down. It is not part of a snapshot.
    #[serde(skip)]
    pub connection: Option<NetConnection>,
}

/// The host's side of a network card, for one machine. Copies are of the same connection.
#[derive(Clone)]
pub struct NetConnection {
    /// The backend, until a machine has it.
    backend: Arc<Mutex<Option<Box<dyn NetBackend>>>>,
    /// The descriptor that tells when the backend has frames, or room.
    descriptor: Arc<OwnedFd>,
    segments: bool,
}

impl fmt::Debug for NetConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetConnection")
            .field("descriptor", &self.descriptor)
            .finish_non_exhaustive()
    }
}

impl PartialEq for NetConnection {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.descriptor, &other.descriptor)
    }
}

impl Eq for NetConnection {}

impl NetConnection {
    /// Connects to the peer of a stream socket, on which each frame is behind its length in 4
    /// bytes, big endian. `checked`: the peer is known to fill in right checksums.
    ///
    /// # Errors
    /// If the host refuses a descriptor.
    pub fn stream(socket: UnixStream, checked: bool) -> io::Result<Self> {
        let descriptor = socket.as_fd().try_clone_to_owned()?;
        let backend = StreamBackend::new(socket, checked)?;
        Ok(Self::new(Box::new(backend), descriptor, false))
    }

    /// Connects to the TAP interface with a name. If there is none, it is made for this connection.
    ///
    /// # Errors
    /// If the host has no TAP interfaces, or refuses this one.
    pub fn tap(name: &str) -> Result<Self, TapError> {
        let backend = TapBackend::open(name)?;
        let descriptor = backend.as_fd().try_clone_to_owned();
        let descriptor = descriptor.map_err(TapError::Descriptor)?;
        Ok(Self::new(Box::new(backend), descriptor, true))
    }

    fn new(backend: Box<dyn NetBackend>, descriptor: OwnedFd, segments: bool) -> Self {
        Self {
            backend: Arc::new(Mutex::new(Some(backend))),
            descriptor: Arc::new(descriptor),
            segments,
        }
    }

    /// Returns whether it carries TCP segments larger than the MTU.
    pub fn segments(&self) -> bool {
        self.segments
    }

    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        self.descriptor.clone()
    }

    /// Returns the backend, once.
    pub(super) fn take(&self) -> Option<Box<dyn NetBackend>> {
        let mut backend = self.backend.lock().unwrap_or_else(PoisonError::into_inner);
        backend.take()
    }
}
