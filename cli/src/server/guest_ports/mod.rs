//! The virtio-console that `--guest-ports` gives a guest: its console, and the trace devices as
//! ports by name.
//!
//! The backends are called on the machine's device thread and never wait. The guest's output goes
//! through a bounded queue to a thread, and stays with the guest while the queue is full. Each
//! trace device's port has a [thread](stream_end), too.
//!
//! A hostile guest reaches the devices' commands and events, and dt(4)'s requests, all of them
//! about itself, and nothing else.

mod devices;
mod stream_end;

use clap::ValueEnum;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use trace_devices::port::stream::Access;
use vmm::Machine;
use vmm::machine::{
    Backlog, ConsoleConfig, ConsolePorts, EndOfFile, NullBackend, PortBackend, PortConfig,
    SerialOutput,
};

use crate::report::Failure;
use crate::server::ports::Ports;

/// The number of the console's port.
const CONSOLE: u32 = 0;

/// The ports by name, and whether their readers see an end of file when there is no more for now.
const PORTS: [(&str, EndOfFile); 5] = [
    ("tracectl", EndOfFile::WhenIdle),
    ("trace", EndOfFile::WhenIdle),
    ("ptrace", EndOfFile::Never),
    ("ptracectl", EndOfFile::WhenIdle),
    ("dt", EndOfFile::Never),
];

/// Returns the configuration of the console; none if the ports are off.
pub fn config(access: GuestPorts) -> Option<ConsoleConfig> {
    (access != GuestPorts::Off).then(|| ConsoleConfig {
        ports: PORTS
            .iter()
            .map(|(name, end_of_file)| PortConfig::named(name, *end_of_file))
            .collect(),
        ..ConsoleConfig::default()
    })
}

/// The backends of a machine's console, while it runs.
pub struct Connected {
    ports: ConsolePorts,
    devices: Vec<JoinHandle<()>>,
}

/// Connects the console of a machine; the guest's output on it goes to `output`.
///
/// Returns `None` if the machine has no console.
pub fn connect(machine: &Machine, output: SerialOutput) -> Option<Connected> {
    let ports = machine.console_ports()?;
    if let Some(backlog) = output.backlog() {
        let ports = ports.clone();
        backlog.on_room(move || ports.wake());
    }
    ports.attach(CONSOLE, Box::new(Screen::of(output)));
    Some(Connected {
        ports: ports.clone(),
        devices: Vec::new(),
    })
}

impl Connected {
    /// Attaches the trace devices to their ports; `dt` is the socket of dt(4).
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn attach_devices(
        &mut self,
        devices: &Arc<Ports>,
        dt: &Path,
        access: GuestPorts,
    ) -> Result<(), Failure> {
        let access = match access {
            GuestPorts::Off => return Ok(()),
            GuestPorts::Ro => Access::ReadOnly,
            GuestPorts::Rw => Access::ReadWrite,
        };
        for (name, _) in PORTS {
            let Some(id) = self.ports.find(name) else {
                continue;
            };
            let Some(stream) = devices::stream(name, devices, dt.to_owned(), access) else {
                continue;
            };
            let ports = self.ports.clone();
            let started = stream_end::start(name, stream, move || ports.wake());
            let (end, thread) = started
                .map_err(|error| Failure::new(format_args!("the guest's port {name}: {error}")))?;
            self.ports.attach(id, Box::new(end));
            self.devices.push(thread);
        }
        Ok(())
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        // Waits until everything is shown, as long as it has a reader.
        drop(self.ports.detach(CONSOLE));
        for (name, _) in PORTS {
            if let Some(id) = self.ports.find(name) {
                drop(self.ports.detach(id));
            }
        }
        for thread in self.devices.drain(..) {
            if thread.join().is_err() {
                log::error!("the thread of a port of the guest's panicked");
            }
        }
        for id in 0..=PORTS.len() as u32 {
            if let Some(dropped) = self.ports.stats(id).map(|stats| stats.dropped)
                && dropped > 0
            {
                log::warn!("port {id} of the guest's console: {dropped} bytes were dropped");
            }
        }
    }
}

/// The backend of the console. Output without room stays with the guest.
struct Screen {
    output: SerialOutput,
    backlog: Option<Backlog>,
}

impl Screen {
    fn of(output: SerialOutput) -> Self {
        Self {
            backlog: output.backlog(),
            output,
        }
    }
}

impl PortBackend for Screen {
    fn write(&mut self, bytes: &[u8]) -> usize {
        match &self.backlog {
            Some(backlog) if backlog.is_full() => 0,
            // It cannot fail: it counts what it drops.
            _ => self.output.write(bytes).unwrap_or(0),
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        // Typed input goes to the serial port.
        NullBackend.read(buffer)
    }
}

/// The access of a guest to the trace devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GuestPorts {
    /// The guest does not see them.
    Off,
    /// The guest can read events.
    Ro,
    /// The guest can also choose what is traced.
    Rw,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io;
    use std::sync::Mutex;

    use vmm::machine::Promptness;

    use super::*;

    /// A reader that accepts nothing until it is allowed to.
    #[derive(Clone, Default)]
    struct Slow(Arc<Mutex<Vec<u8>>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_stands_still_holds_nobody_up_and_misses_only_what_does_not_wait() {
        let shown = Slow::default();
        let standing = shown.0.lock().unwrap();
        let output = SerialOutput::queued(shown.clone(), Promptness::Bytes).unwrap();
        let mut screen = Screen::of(output);
        let line = [b'x'; 1000];
        let taken: usize = (0..1000).map(|_| screen.write(&line)).sum();
        assert!((64 << 10..128 << 10).contains(&taken), "{taken}");
        drop(standing);
        drop(screen);
        assert_eq!(shown.0.lock().unwrap().len(), taken);
    }

    #[test]
    fn there_are_ports_only_where_they_are_asked_for() {
        assert_eq!(config(GuestPorts::Off), None);
        for access in [GuestPorts::Ro, GuestPorts::Rw] {
            let names: Vec<_> = config(access)
                .unwrap()
                .ports
                .into_iter()
                .filter_map(|port| port.name)
                .collect();
            assert_eq!(names, ["tracectl", "trace", "ptrace", "ptracectl", "dt"]);
        }
    }
}
