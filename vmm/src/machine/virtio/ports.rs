//! A console's ports as the machine's owner has them: their far ends come when the machine is there already.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::virtio::console::{
    self, Console, ConsoleHandle, PortBackend, PortConfig, PortConfigError, PortStats,
};

use super::config::ConsoleConfig;

/// The ports of a machine's virtio-console, for any thread. Copies are for the same console.
///
/// A port without a far end is shown to the guest as not connected: readers see an end of file, and writers wait. What the
/// guest prints on its console meanwhile is dropped, and counted.
#[derive(Clone)]
pub struct ConsolePorts {
    handle: ConsoleHandle,
    ports: Arc<[Port]>,
}

struct Port {
    name: Option<String>,
    seat: Arc<Mutex<Seat>>,
}

/// Where a far end sits, or none.
#[derive(Default)]
struct Seat {
    end: Option<Box<dyn PortBackend>>,
    /// The guest has the port open.
    open: bool,
}

fn lock(seat: &Mutex<Seat>) -> MutexGuard<'_, Seat> {
    seat.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The far end that the device knows.
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
    /// The device, and the owner's hand on it. `waker` makes the device thread look after it.
    pub(super) fn new(
        config: &ConsoleConfig,
        waker: impl Fn() + Send + Sync + 'static,
    ) -> Result<(Console, Self), PortConfigError> {
        let mut ports = Vec::new();
        let mut ends: Vec<(PortConfig, Box<dyn PortBackend>)> = Vec::new();
        let named = config.ports.iter().cloned();
        for config in std::iter::once(PortConfig::console()).chain(named) {
            let seat = Arc::<Mutex<Seat>>::default();
            ports.push(Port {
                name: config.name.clone(),
                seat: seat.clone(),
            });
            let connected = config.console;
            ends.push((
                PortConfig {
                    connected,
                    ..config
                },
                Box::new(Late(seat)),
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
        let ports = ports.into();
        Ok((device, Self { handle, ports }))
    }

    /// The port of a name.
    pub fn find(&self, name: &str) -> Option<u32> {
        let mut names = (0..).zip(self.ports.iter());
        names
            .find(|(_, port)| port.name.as_deref() == Some(name))
            .map(|(id, _)| id)
    }

    /// Puts somebody at the far end of a port, in place of who was there, and shows it to the guest as connected. If the guest has
    /// it open, the end is told so at once. `false`: there is no such port.
    ///
    /// The end is called on the device thread, which serves all devices: it must neither wait nor pause the machine.
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

    /// Takes the far end of a port away: the guest sees the port disconnected.
    pub fn detach(&self, id: u32) -> Option<Box<dyn PortBackend>> {
        let port = self.port(id)?;
        // A console's driver does not look whether anybody is there.
        self.handle.connect(id, port.name.is_none());
        lock(&port.seat).end.take()
    }

    /// A far end has bytes for the guest, or room for bytes again.
    pub fn wake(&self) {
        self.handle.wake();
    }

    /// What a port has counted.
    pub fn stats(&self, id: u32) -> Option<PortStats> {
        self.handle.port_stats(id)
    }

    /// The device's own handle: the console's size, and counts.
    pub fn handle(&self) -> &ConsoleHandle {
        &self.handle
    }

    fn port(&self, id: u32) -> Option<&Port> {
        self.ports.get(usize::try_from(id).ok()?)
    }
}
