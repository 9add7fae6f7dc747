//! The virtio-console that `--guest-ports` gives a guest: its console, and the trace devices as ports by name.
//!
//! The far ends are called on the machine's device thread and never wait: what the guest prints goes through a bounded
//! queue to a thread of its own, and is dropped, and counted, while a reader of this process's output stands still. Each of the trace
//! devices' ports has a [thread](stream_end), too. A hostile guest reaches the devices' commands and events, and dt(4)'s
//! requests, all of them about itself, and nothing else.

mod devices;
mod stream_end;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use probes::port::stream::Access;
use vmm::Machine;
use vmm::machine::{
    ConsoleConfig, ConsolePorts, EndOfFile, NoEnd, PortConfig, PortEnd, SerialOutput,
};

use crate::args::GuestPorts;
use crate::ports::Ports;
use crate::report::Failure;

/// Pieces of output, each of at most what the device gives at once, that wait for a slow reader.
const WAITING: usize = 64;
/// How long the rest of the output is waited for when the run has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// The console's number.
const CONSOLE: u32 = 0;

/// The ports by name, and whether their readers see an end where there is nothing more for now.
const PORTS: [(&str, EndOfFile); 5] = [
    ("tracectl", EndOfFile::WhenIdle),
    ("trace", EndOfFile::WhenIdle),
    ("ptrace", EndOfFile::Never),
    ("ptracectl", EndOfFile::WhenIdle),
    ("dt", EndOfFile::Never),
];

/// The console to be made; none if the ports are off.
pub fn config(access: GuestPorts) -> Option<ConsoleConfig> {
    (access != GuestPorts::Off).then(|| ConsoleConfig {
        ports: PORTS
            .iter()
            .map(|(name, end_of_file)| PortConfig::named(name, *end_of_file))
            .collect(),
        ..ConsoleConfig::default()
    })
}

/// The far ends of a machine's console, while it runs.
pub struct Connected {
    ports: ConsolePorts,
    screen: Option<JoinHandle<()>>,
    devices: Vec<JoinHandle<()>>,
}

/// Connects the console of a machine that has one; what the guest prints on it goes to `output`.
///
/// # Errors
/// If a thread cannot be started.
pub fn connect(machine: &Machine, output: SerialOutput) -> Result<Option<Connected>, Failure> {
    let Some(ports) = machine.console_ports() else {
        return Ok(None);
    };
    let (screen, printed) = sync_channel(WAITING);
    let thread = std::thread::Builder::new()
        .name("hvc0".into())
        .spawn(move || show(&printed, output));
    let thread =
        thread.map_err(|error| Failure::new(format_args!("the guest's console: {error}")))?;
    ports.attach(CONSOLE, Box::new(Screen(screen)));
    Ok(Some(Connected {
        ports: ports.clone(),
        screen: Some(thread),
        devices: Vec::new(),
    }))
}

impl Connected {
    /// Puts the trace devices behind their ports; `dt` is the socket of dt(4).
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

fn show(printed: &Receiver<Vec<u8>>, mut output: SerialOutput) {
    for bytes in printed {
        // It cannot fail: it counts what it loses.
        let _ = output.write_all(&bytes);
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        // The thread ends when it has shown everything.
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
        let until = Instant::now() + LAST_WORDS;
        if let Some(thread) = self.screen.take() {
            while !thread.is_finished() {
                if Instant::now() > until {
                    // Whoever reads our output has stopped: it is left behind.
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.join().is_err() {
                log::error!("the thread of the guest's console panicked");
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

/// The far end of the console.
struct Screen(SyncSender<Vec<u8>>);

impl PortEnd for Screen {
    fn write(&mut self, bytes: &[u8]) -> usize {
        match self.0.try_send(bytes.to_vec()) {
            Ok(()) => bytes.len(),
            Err(_) => 0,
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        // What is typed goes to the serial port.
        NoEnd.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io;
    use std::sync::Mutex;

    use super::*;

    /// A reader that takes nothing until it is let.
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
        let (screen, printed) = sync_channel(WAITING);
        let mut screen = Screen(screen);
        let output = SerialOutput::write_through(shown.clone());
        let thread = std::thread::spawn(move || show(&printed, output));
        let taken: usize = (0..1000).map(|_| screen.write(b"line\n")).sum();
        let room = 5 * WAITING..=5 * (WAITING + 1);
        assert!(room.contains(&taken), "{taken}");
        drop(standing);
        drop(screen);
        thread.join().unwrap();
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
