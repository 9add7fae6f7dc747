//! The host's control of a console: connections, sizes, ports that are added and removed, counts.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Size;
use super::end::{PortBackend, PortConfig};

/// The maximum number of ports of one device. Its queues and Linux's limit of 512 would allow more,
/// which nobody needs.
pub const MOST_PORTS: u32 = 31;
/// The maximum length of a port's name in bytes.
pub const MOST_NAME: usize = 64;

/// The reason why a port's configuration is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PortConfigError {
    /// The number of ports is invalid.
    #[error("{found} ports: a console has 1 to {most}")]
    Count {
        /// The number requested.
        found: usize,
        /// The maximum number.
        most: u32,
    },
    /// The number of a port is too large.
    #[error("port {id}: the device was made for ports 0 to {last}", last = max_ports - 1)]
    Number {
        /// The number requested.
        id: u32,
        /// The maximum number of ports.
        max_ports: u32,
    },
    /// The port exists already.
    #[error("port {id} is there already: remove it first")]
    Exists {
        /// The number of the port.
        id: u32,
    },
    /// The port does not exist.
    #[error("there is no port {id}")]
    Missing {
        /// The number of the port.
        id: u32,
    },
    /// The name is invalid.
    #[error(
        "port {id}: a name of {found} bytes; 1 to {MOST_NAME} without control characters and slashes"
    )]
    Name {
        /// The number of the port.
        id: u32,
        /// The length of its name in bytes.
        found: usize,
    },
}

pub(super) fn check_port(
    id: u32,
    max_ports: u32,
    config: &PortConfig,
) -> Result<(), PortConfigError> {
    if id >= max_ports {
        return Err(PortConfigError::Number { id, max_ports });
    }
    let bad = |name: &&String| {
        let bad_byte = |byte: u8| byte.is_ascii_control() || byte == b'/';
        name.is_empty() || name.len() > MOST_NAME || name.bytes().any(bad_byte)
    };
    match config.name.as_ref().filter(bad) {
        Some(name) => Err(PortConfigError::Name {
            id,
            found: name.len(),
        }),
        None => Ok(()),
    }
}

/// The counts of one port since it was made. They are exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortStats {
    /// The number of bytes put into the guest's buffers.
    pub to_guest: u64,
    /// The number of bytes that the backend accepted.
    pub from_guest: u64,
    /// The number of the guest's bytes that were dropped, because the backend had no room or the
    /// port was removed.
    pub dropped: u64,
    /// The number of ends of file shown.
    pub ends: u64,
    /// True if the guest has the port open.
    pub guest_open: bool,
    /// True if the host side is open.
    pub connected: bool,
}

/// [`PortStats`], written only by the device's thread.
#[derive(Debug, Default)]
pub(super) struct PortCounts {
    pub(super) to_guest: AtomicU64,
    pub(super) from_guest: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) ends: AtomicU64,
    pub(super) guest_open: AtomicBool,
    pub(super) connected: AtomicBool,
}

impl PortCounts {
    fn read(&self) -> PortStats {
        PortStats {
            to_guest: self.to_guest.load(Ordering::Relaxed),
            from_guest: self.from_guest.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
            ends: self.ends.load(Ordering::Relaxed),
            guest_open: self.guest_open.load(Ordering::Relaxed),
            connected: self.connected.load(Ordering::Relaxed),
        }
    }
}

/// A request of the host to the device.
pub(super) enum Request {
    Connect {
        id: u32,
        open: bool,
    },
    Resize(Size),
    Add {
        id: u32,
        config: PortConfig,
        end: Box<dyn PortBackend>,
        counts: Arc<PortCounts>,
    },
    Remove {
        id: u32,
    },
}

impl Request {
    fn port(&self) -> Option<u32> {
        match *self {
            Self::Connect { id, .. } | Self::Add { id, .. } | Self::Remove { id } => Some(id),
            Self::Resize(_) => None,
        }
    }

    /// Checks whether both are of the same port, or both of the size.
    fn same_matter(&self, other: &Self) -> bool {
        self.port() == other.port()
    }
}

/// The state shared by the device and its handles.
pub(super) struct Shared {
    max_ports: u32,
    /// The requests. Locked for single operations only, by any thread.
    requests: Mutex<Vec<Request>>,
    /// The ports. Locked like `requests`, never both at once. A port is listed from its addition
    /// until the device has released it.
    ports: Mutex<BTreeMap<u32, Arc<PortCounts>>>,
    pub(super) bad_messages: AtomicU64,
    pub(super) emergency: AtomicU64,
    waker: Box<dyn Fn() + Send + Sync>,
}

impl Shared {
    pub(super) fn new(max_ports: u32, waker: Box<dyn Fn() + Send + Sync>) -> Self {
        Self {
            max_ports,
            requests: Mutex::default(),
            ports: Mutex::default(),
            bad_messages: AtomicU64::new(0),
            emergency: AtomicU64::new(0),
            waker,
        }
    }

    fn requests(&self) -> MutexGuard<'_, Vec<Request>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ports(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<PortCounts>>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut *self.requests())
    }

    pub(super) fn enter(&self, id: u32) -> Option<Arc<PortCounts>> {
        let mut ports = self.ports();
        if ports.contains_key(&id) {
            return None;
        }
        let counts = Arc::<PortCounts>::default();
        ports.insert(id, counts.clone());
        Some(counts)
    }

    pub(super) fn leave(&self, id: u32) {
        self.ports().remove(&id);
    }
}

/// The host's side of a console, for any thread. Clones are for the same device.
#[derive(Clone)]
pub struct ConsoleHandle(pub(super) Arc<Shared>);

impl fmt::Debug for ConsoleHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConsoleHandle").finish()
    }
}

impl ConsoleHandle {
    /// Wakes the device, because a backend has bytes, or room for bytes.
    pub fn wake(&self) {
        (self.0.waker)();
    }

    fn request(&self, request: Request) {
        let mut requests = self.0.requests();
        // If a request is changed before the device reads it, the last one counts. So the list
        // stays short.
        let older = requests
            .iter_mut()
            .rev()
            .find(|older| older.same_matter(&request));
        match (older, &request) {
            (Some(Request::Connect { open, .. }), Request::Connect { open: new, .. }) => {
                *open = *new;
            }
            (Some(Request::Resize(old)), Request::Resize(new)) => *old = *new,
            _ => requests.push(request),
        }
        drop(requests);
        self.wake();
    }

    /// Opens or closes the host side of a port. While it is closed, writers in the guest wait and
    /// readers see an end of file.
    pub fn connect(&self, id: u32, open: bool) {
        self.request(Request::Connect { id, open });
    }

    /// Sets the console's size.
    pub fn resize(&self, size: Size) {
        self.request(Request::Resize(size));
    }

    /// Adds a port.
    ///
    /// # Errors
    /// If the device was not made for that number, the port exists, or its name is invalid.
    pub fn add_port(
        &self,
        id: u32,
        config: PortConfig,
        end: Box<dyn PortBackend>,
    ) -> Result<(), PortConfigError> {
        check_port(id, self.0.max_ports, &config)?;
        let counts = self.0.enter(id).ok_or(PortConfigError::Exists { id })?;
        self.request(Request::Add {
            id,
            config,
            end,
            counts,
        });
        Ok(())
    }

    /// Removes a port. Its number is free again once the driver, if there is one, was notified.
    ///
    /// # Errors
    /// If there is no such port.
    pub fn remove_port(&self, id: u32) -> Result<(), PortConfigError> {
        if !self.0.ports().contains_key(&id) {
            return Err(PortConfigError::Missing { id });
        }
        self.request(Request::Remove { id });
        Ok(())
    }

    /// Returns the counts of a port.
    #[must_use]
    pub fn port_stats(&self, id: u32) -> Option<PortStats> {
        self.0.ports().get(&id).map(|counts| counts.read())
    }

    /// Returns the number of the guest's control messages that were too short, for no port, or not
    /// a driver's to send.
    #[must_use]
    pub fn bad_messages(&self) -> u64 {
        self.0.bad_messages.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that came by emergency writes.
    #[must_use]
    pub fn emergency_bytes(&self) -> u64 {
        self.0.emergency.load(Ordering::Relaxed)
    }
}
