//! A console's ports as the machine's owner sees them. Their backends are attached after the
//! machine is created.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::virtio::console::{
    self, Console, ConsoleHandle, PortBackend, PortConfig, PortConfigError, PortStats,
};

use super::config::ConsoleConfig;
use crate::tape::{Stream, Tape, TapedPort};

/// The ports of a machine's virtio-console, for any thread. Copies are for the same console.
///
/// A port without a backend is shown to the guest as not connected: readers see an end of file, and
/// writers wait. Output on the guest's console is dropped meanwhile, and counted.
#[derive(Clone)]
pub struct ConsolePorts {
    handle: ConsoleHandle,
    ports: Arc<[Port]>,
}

impl fmt::Debug for ConsolePorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsolePorts")
            .field("ports", &self.ports.len())
            .finish_non_exhaustive()
    }
}

struct Port {
    name: Option<String>,
    seat: Arc<Mutex<Seat>>,
}

/// The place of a backend, which may be empty.
#[derive(Default)]
struct Seat {
    end: Option<Box<dyn PortBackend>>,
    /// Whether the guest has the port open.
    open: bool,
}

fn lock(seat: &Mutex<Seat>) -> MutexGuard<'_, Seat> {
    seat.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The backend that the device knows. It forwards to the attached one.
struct Late(Arc<Mutex<Seat>>);

impl PortBackend for Late {
    fn opened(&mut self) {
        let mut seat = lock(&self.0);
        seat.open = true;
        if let Some(end) = &mut seat.end {
            end.opened();
        }
    }

    fn closed(&mut self, unread: u64) {
        let mut seat = lock(&self.0);
        seat.open = false;
        if let Some(end) = &mut seat.end {
            end.closed(unread);
        }
    }

    fn is_settled(&mut self) -> bool {
        let mut seat = lock(&self.0);
        seat.end.as_mut().is_none_or(|end| end.is_settled())
    }

    fn write(&mut self, bytes: &[u8]) -> usize {
        let mut seat = lock(&self.0);
        seat.end.as_mut().map_or(0, |end| end.write(bytes))
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        let mut seat = lock(&self.0);
        seat.end.as_mut().map_or(0, |end| end.read(buffer))
    }
}

impl ConsolePorts {
    /// Creates the device and the owner's ports, whose bytes go over `tape`. `waker` makes the
    /// device thread check the device.
    pub(super) fn new(
        config: &ConsoleConfig,
        tape: &Tape,
        waker: impl Fn() + Send + Sync + 'static,
    ) -> Result<(Console, Self), PortConfigError> {
        let mut ports = Vec::new();
        let mut ends: Vec<(PortConfig, Box<dyn PortBackend>)> = Vec::new();
        let named = config.ports.iter().cloned();
        for (id, config) in (0..).zip(std::iter::once(PortConfig::console()).chain(named)) {
            let seat = Arc::<Mutex<Seat>>::default();
            ports.push(Port {
                name: config.name.clone(),
                seat: seat.clone(),
            });
            let (connected, stream) = (config.console, Stream::Port(id));
            let backend = TapedPort::new(Late(seat), tape.clone(), stream, config.console);
            ends.push((
                PortConfig {
                    connected,
                    ..config
                },
                Box::new(backend),
            ));
        }
        let device = Console::new(
            console::ConsoleConfig {
                max_ports: u32::try_from(ends.len()).unwrap_or(u32::MAX),
                ports: ends,
                size: config.size,
            },
            waker,
        )?;
        let handle = device.handle();
        for id in 0..ports.len() as u32 {
            let handle = handle.clone();
            tape.on_input(Stream::Port(id), move || handle.wake());
        }
        let ports = ports.into();
        Ok((device, Self { handle, ports }))
    }

    /// Returns the number of the port with a name.
    pub fn find(&self, name: &str) -> Option<u32> {
        let mut names = (0..).zip(self.ports.iter());
        names
            .find(|(_, port)| port.name.as_deref() == Some(name))
            .map(|(id, _)| id)
    }

    /// Attaches a backend to a port, in place of an earlier one, and shows the port to the guest as
    /// connected.
    ///
    /// If the guest has the port open, the backend is notified at once. Returns `false` if there is
    /// no such port.
    ///
    /// The backend is called on the device thread, which serves all devices. It must neither wait
    /// nor pause the machine.
    pub fn attach(&self, id: u32, mut end: Box<dyn PortBackend>) -> bool {
        let Some(port) = self.port(id) else {
            return false;
        };
        let mut seat = lock(&port.seat);
        if seat.open {
            end.opened();
        }
        let before = seat.end.replace(end);
        drop(seat);
        drop(before);
        self.handle.connect(id, true);
        true
    }

    /// Detaches the backend of a port. The guest sees the port disconnected.
    pub fn detach(&self, id: u32) -> Option<Box<dyn PortBackend>> {
        let port = self.port(id)?;
        // A console's driver does not check for a connection.
        self.handle.connect(id, port.name.is_none());
        lock(&port.seat).end.take()
    }

    /// Tells the device that a backend has bytes for the guest, or room for bytes again.
    pub fn wake(&self) {
        self.handle.wake();
    }

    /// Returns the counters of a port.
    pub fn stats(&self, id: u32) -> Option<PortStats> {
        self.handle.port_stats(id)
    }

    /// Returns the device's own handle, for the console's size and counters.
    pub fn handle(&self) -> &ConsoleHandle {
        &self.handle
    }

    fn port(&self, id: u32) -> Option<&Port> {
        self.ports.get(usize::try_from(id).ok()?)
    }
}
