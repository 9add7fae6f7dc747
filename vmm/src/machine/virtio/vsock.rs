//! The sockets between guest and host of a machine (virtio-vsock), and the host's socket for them,
//! which the caller makes.

use std::fmt;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use devices::virtio::rng::HostEntropy;
use devices::virtio::vsock::{UnixHost, VsockBackend};

pub use devices::virtio::vsock::FIRST_CID;

use serde::{Deserialize, Serialize};

/// Sockets between guest and host (virtio-vsock).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockConfig {
    /// The guest's context id, 3 or more.
    pub cid: u32,
    /// The host's socket. Without one the guest's connections are refused. It is not part of a
    /// snapshot.
    #[serde(skip)]
    pub socket: Option<VsockSocket>,
}

/// The host's socket of one machine. Copies are of the same socket.
#[derive(Clone)]
pub struct VsockSocket {
    /// The backend, until a machine has it.
    backend: Arc<Mutex<Option<UnixHost>>>,
    /// The descriptor that is readable while the backend has events.
    descriptor: Arc<OwnedFd>,
}

impl fmt::Debug for VsockSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VsockSocket")
            .field("descriptor", &self.descriptor)
            .finish_non_exhaustive()
    }
}

impl PartialEq for VsockSocket {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.descriptor, &other.descriptor)
    }
}

impl Eq for VsockSocket {}

impl VsockSocket {
    /// Makes the host's side of `listener`, which listens on `path`: programs connect there.
    /// Connections of the guest to port N go to the socket `path`_N.
    ///
    /// # Errors
    /// If the host refuses a descriptor.
    pub fn new(listener: UnixListener, path: &Path) -> io::Result<Self> {
        let backend = UnixHost::new(listener, path)?;
        let descriptor = backend.as_fd().try_clone_to_owned()?;
        Ok(Self {
            backend: Arc::new(Mutex::new(Some(backend))),
            descriptor: Arc::new(descriptor),
        })
    }

    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        self.descriptor.clone()
    }

    /// Returns a number that differs between machines.
    pub(super) fn seed(&self) -> u32 {
        let mut bytes = [0; 4];
        // Without random numbers only a restored copy's connections may be taken for older ones.
        let _ = HostEntropy.read_exact(&mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Returns the backend, once.
    pub(super) fn take(&self) -> Option<Box<dyn VsockBackend>> {
        let mut backend = self.backend.lock().unwrap_or_else(PoisonError::into_inner);
        let backend = backend.take()?;
        Some(Box::new(backend))
    }
}
