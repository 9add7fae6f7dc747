//! The ports of a machine's trace devices on the host: the files of trace(3) and ptrace(3), for
//! several clients at a time.
//!
//! [`Ports`] is the set of them, by name. It owns no device. A device needs the guest's kernel, so
//! each port is made when a client first uses it. Until then clients get the reason for its
//! absence. The [server](server::Server) offers the ports twice: as [raw] sockets for any program,
//! and by [messages](crate::protocol::ports) for `ctl`, `read` and `mount`. The device dt(4) has a
//! [socket of its own](crate::server::dt).

mod framed;
mod raw;
pub mod server;
#[cfg(test)]
pub mod toy;

use crate::protocol::ports::{ControlName, EventName};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use probes::clock::Clock;
pub use trace_devices::port::stream::LONGEST_COMMAND;
use trace_devices::port::{ControlPort, EventPort, EventReader, PortError, Refusal};

use crate::protocol::end::MachineEnd;
use crate::protocol::error::{ErrorKind, RequestError};
use crate::vm::Vm;

/// The time allowed for a closed reader to disappear.
const CLOSING: Duration = Duration::from_millis(200);

/// A function that returns a port, or the reason for its absence.
pub type Make<P> = Box<dyn Fn() -> Result<Arc<P>, RequestError> + Send + Sync>;

/// The makers of the ports. Each is called, by one client at a time, until it has returned a port.
pub struct Makers {
    /// The control port of trace(3).
    pub tracectl: Make<dyn ControlPort>,
    /// The event port of trace(3).
    pub trace: Make<dyn EventPort>,
    /// The control port of ptrace(3).
    pub ptracectl: Make<dyn ControlPort>,
    /// The event port of ptrace(3).
    pub ptrace: Make<dyn EventPort>,
}

/// The facts about the guest by which clients present events.
pub struct Guest {
    /// Returns the clock that converts event ticks to times, if it is known yet.
    pub clock: Box<dyn Fn() -> Option<Clock> + Send + Sync>,
    /// Returns the symbol at a kernel address: `vfs_read` or `vfs_read+0x1c`.
    pub name: Box<dyn Fn(u64) -> Option<String> + Send + Sync>,
    /// Returns the machine's end, if it has ended.
    pub end: Box<dyn Fn() -> Option<MachineEnd> + Send + Sync>,
}

/// A machine's ports.
pub struct Ports {
    guest: Guest,
    controls: [Control; 2],
    events: [Arc<Events>; 2],
}

impl Ports {
    /// Returns the ports of `guest` that `makers` make.
    pub fn new(makers: Makers, guest: Guest) -> Self {
        Self {
            guest,
            controls: [
                Control::new(ControlName::Tracectl, makers.tracectl),
                Control::new(ControlName::Ptracectl, makers.ptracectl),
            ],
            events: [
                Arc::new(Events::new(EventName::Trace, makers.trace)),
                Arc::new(Events::new(EventName::Ptrace, makers.ptrace)),
            ],
        }
    }

    /// Returns the control port `name`.
    pub fn control(&self, name: ControlName) -> &Control {
        let [tracectl, ptracectl] = &self.controls;
        match name {
            ControlName::Tracectl => tracectl,
            ControlName::Ptracectl => ptracectl,
        }
    }

    /// Returns the event port `name`.
    pub fn events(&self, name: EventName) -> &Arc<Events> {
        let [trace, ptrace] = &self.events;
        match name {
            EventName::Trace => trace,
            EventName::Ptrace => ptrace,
        }
    }

    /// Returns the backend's counts and the text of devices already in use, a line each.
    pub fn stat(&self) -> String {
        let mut text = String::new();
        for events in &self.events {
            let name = events.name.as_str();
            let counts = &events.counts;
            for (count, what) in [
                (&counts.readers, "readers"),
                (&counts.opens, "opens"),
                (&counts.refused, "refused"),
                (&counts.records, "records"),
                (&counts.dropped, "dropped"),
            ] {
                // Writing to memory cannot fail.
                let _ = writeln!(text, "{name} {what} {}", count.load(Ordering::Relaxed));
            }
        }
        for control in &self.controls {
            let name = control.name.as_str();
            for (count, what) in [(&control.done, "done"), (&control.refused, "refused")] {
                let _ = writeln!(text, "{name} {what} {}", count.load(Ordering::Relaxed));
            }
            if let Some(port) = control.port.made() {
                for line in port.configuration().lines() {
                    let _ = writeln!(text, "{name}: {line}");
                }
            }
        }
        text
    }
}

/// A port that is made at its first use.
struct Lazy<P: ?Sized> {
    make: Make<P>,
    /// Locked while the port is made, so that it is made once.
    made: Mutex<Option<Arc<P>>>,
}

impl<P: ?Sized> Lazy<P> {
    fn new(make: Make<P>) -> Self {
        Self {
            make,
            made: Mutex::default(),
        }
    }

    fn get(&self) -> Result<Arc<P>, PortError> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(port) = &*made {
            return Ok(port.clone());
        }
        let port = (self.make)().map_err(|why| PortError::new(Refusal::Failed, why))?;
        Ok(made.insert(port).clone())
    }

    /// Returns the port if it has been made, without waiting.
    fn made(&self) -> Option<Arc<P>> {
        self.made.try_lock().ok()?.clone()
    }
}

/// A port that takes commands.
pub struct Control {
    name: ControlName,
    port: Lazy<dyn ControlPort>,
    done: AtomicU64,
    refused: AtomicU64,
}

impl Control {
    fn new(name: ControlName, make: Make<dyn ControlPort>) -> Self {
        Self {
            name,
            port: Lazy::new(make),
            done: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// Carries out a raw command without its newline.
    ///
    /// # Errors
    /// As the device reports, if there is no device now, or if the command is not text.
    pub fn command(&self, command: &[u8]) -> Result<(), PortError> {
        let done = self.carry_out(command);
        match &done {
            Ok(()) => self.done.fetch_add(1, Ordering::Relaxed),
            Err(_) => self.refused.fetch_add(1, Ordering::Relaxed),
        };
        done
    }

    fn carry_out(&self, command: &[u8]) -> Result<(), PortError> {
        let invalid = |why: String| PortError::new(Refusal::Invalid, why);
        if command.len() > LONGEST_COMMAND {
            return Err(invalid(format!(
                "a command has at most {LONGEST_COMMAND} bytes, this has {}",
                command.len()
            )));
        }
        let text = std::str::from_utf8(command)
            .map_err(|error| invalid(format!("invalid command: expected UTF-8: {error}")))?;
        self.port.get()?.command(text)
    }

    /// Returns the port's text.
    ///
    /// # Errors
    /// If there is no device now.
    pub fn configuration(&self) -> Result<String, PortError> {
        Ok(self.port.get()?.configuration())
    }
}

#[derive(Debug, Default)]
struct Counts {
    /// The number of open readers.
    readers: AtomicU64,
    opens: AtomicU64,
    /// The number of refused opens.
    refused: AtomicU64,
    /// The records returned to all readers together.
    records: AtomicU64,
    /// The records dropped for all readers together.
    dropped: AtomicU64,
}

/// A port that returns events.
pub struct Events {
    name: EventName,
    port: Lazy<dyn EventPort>,
    counts: Counts,
}

impl Events {
    fn new(name: EventName, make: Make<dyn EventPort>) -> Self {
        Self {
            name,
            port: Lazy::new(make),
            counts: Counts::default(),
        }
    }

    /// Opens a reader. If there are too many it waits a moment, because a closed reader may still
    /// be counted.
    ///
    /// # Errors
    /// As the device reports, or if there is no device now.
    pub fn open(self: &Arc<Self>) -> Result<Reader, PortError> {
        let until = Instant::now() + CLOSING;
        let opened = self.port.get().and_then(|port| {
            let record = port.record_bytes().max(1);
            loop {
                match port.open() {
                    Err(refused) if refused.kind == Refusal::Busy && Instant::now() < until => {
                        std::thread::sleep(CLOSING / 20);
                    }
                    opened => return opened.map(|reader| (reader, record)),
                }
            }
        });
        let counts = &self.counts;
        match opened {
            Ok((reader, record)) => {
                counts.opens.fetch_add(1, Ordering::Relaxed);
                counts.readers.fetch_add(1, Ordering::Relaxed);
                Ok(Reader {
                    events: self.clone(),
                    reader,
                    record,
                    dropped: AtomicU64::new(0),
                })
            }
            Err(refused) => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                Err(refused)
            }
        }
    }
}

/// One counted open of an event port. Closed when dropped.
pub struct Reader {
    events: Arc<Events>,
    reader: Box<dyn EventReader>,
    record: usize,
    /// The dropped records already added to the port's count.
    dropped: AtomicU64,
}

impl Reader {
    /// Returns the size of a record in bytes.
    pub fn record_bytes(&self) -> usize {
        self.record
    }
}

impl EventReader for Reader {
    fn read(&mut self, most: usize) -> Vec<u8> {
        let records = self.reader.read(most);
        let count = (records.len() / self.record) as u64;
        self.events
            .counts
            .records
            .fetch_add(count, Ordering::Relaxed);
        self.dropped();
        records
    }

    fn wait(&mut self, limit: Duration) -> bool {
        self.reader.wait(limit)
    }

    fn dropped(&self) -> u64 {
        let dropped = self.reader.dropped();
        let before = self.dropped.swap(dropped, Ordering::Relaxed);
        let more = dropped.saturating_sub(before);
        self.events
            .counts
            .dropped
            .fetch_add(more, Ordering::Relaxed);
        dropped
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.dropped();
        self.events.counts.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns a maker that calls `make` on the VM for as long as it exists.
fn maker<P: ?Sized + 'static>(
    vm: &Weak<Vm>,
    make: fn(&Vm) -> Result<Arc<P>, RequestError>,
) -> Make<P> {
    let vm = vm.clone();
    Box::new(move || match vm.upgrade() {
        Some(vm) => make(&vm),
        None => Err(RequestError::new(ErrorKind::Ended, "the machine has ended")),
    })
}

/// Returns the ports of a running VM.
pub fn of_session(vm: &Arc<Vm>) -> Ports {
    // Weak, because the ports must not keep the VM alive.
    let vm = Arc::downgrade(vm);
    let makers = Makers {
        tracectl: maker(&vm, |vm| Ok(Arc::new(vm.trace_device()?))),
        trace: maker(&vm, |vm| Ok(Arc::new(vm.trace_device()?))),
        ptracectl: maker(&vm, |vm| Ok(Arc::new(vm.ptrace_device()?))),
        ptrace: maker(&vm, |vm| Ok(Arc::new(vm.ptrace_device()?))),
    };
    let (named, ended) = (vm.clone(), vm.clone());
    let guest = Guest {
        clock: Box::new(move || {
            let vm = vm.upgrade()?;
            let engine = vm.engine.get()?;
            Some(Clock::now(engine.tsc_hz()))
        }),
        name: Box::new(move |address| {
            let vm = named.upgrade()?;
            let symbols = &vm.engine.get()?.view().kernel.symbols;
            let (symbol, offset) = symbols.resolve(address)?;
            Some(match offset {
                0 => symbol.name.to_owned(),
                offset => format!("{}+{offset:#x}", symbol.name),
            })
        }),
        end: Box::new(move || {
            let vm = ended.upgrade()?;
            let symbols = vm.engine.get().map(|engine| &engine.view().kernel.symbols);
            MachineEnd::of(&vm, symbols)
        }),
    };
    Ports::new(makers, guest)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::ValueEnum;

    use super::*;
    use crate::registry::SOCKETS;

    #[test]
    fn every_port_has_its_place_in_the_run_directory() {
        let controls = ControlName::value_variants()
            .iter()
            .map(|name| name.as_str());
        let events = EventName::value_variants().iter().map(|name| name.as_str());
        for name in controls.chain(events).chain([server::FRAMED]) {
            assert!(SOCKETS.contains(&name), "{name}");
        }
    }

    #[test]
    fn a_port_is_asked_for_until_it_is_there_and_then_kept() {
        let toy = toy::Toy::new();
        let asked = Arc::new(AtomicU64::new(0));
        let (given, count) = (toy.clone(), asked.clone());
        let mut makers = toy.makers();
        makers.tracectl = Box::new(move || match count.fetch_add(1, Ordering::SeqCst) {
            0 => Err(RequestError::new(ErrorKind::NoKernel, "no kernel yet")),
            _ => Ok(given.tracectl.clone()),
        });
        let ports = Ports::new(makers, toy::guest());
        let control = ports.control(ControlName::Tracectl);
        let refused = control.command(b"start").unwrap_err();
        assert_eq!(refused, PortError::new(Refusal::Failed, "no kernel yet"));
        for command in [&b"start"[..], b"stop"] {
            control.command(command).unwrap();
        }
        assert_eq!(asked.load(Ordering::SeqCst), 2);
        assert_eq!(toy.tracectl.commands(), ["start", "stop"]);
    }

    #[test]
    fn what_is_no_command_does_not_reach_the_device() {
        let toy = toy::Toy::new();
        let ports = Ports::new(toy.makers(), toy::guest());
        let control = ports.control(ControlName::Tracectl);
        for (command, expected) in [
            (
                vec![b'a'; LONGEST_COMMAND + 1],
                "at most 4096 bytes, this has 4097",
            ),
            (b"a\xff".to_vec(), "expected UTF-8"),
        ] {
            let refused = control.command(&command).unwrap_err();
            assert_eq!(refused.kind, Refusal::Invalid);
            assert!(refused.text.contains(expected), "{refused}");
        }
        assert_eq!(toy.tracectl.commands(), [""; 0]);
    }

    #[test]
    fn readers_records_and_losses_are_counted() {
        let toy = toy::Toy::new();
        let ports = Ports::new(toy.makers(), toy::guest());
        let (mut quick, mut slow) = (
            ports.events(EventName::Trace).open().unwrap(),
            ports.events(EventName::Trace).open().unwrap(),
        );
        toy.push_lines(0..toy::LINES as u64);
        assert_eq!(
            quick.read(usize::MAX).len(),
            toy::LINES * quick.record_bytes()
        );
        toy.push_lines(0..3);
        slow.read(usize::MAX);
        drop(slow);
        let single = ports.events(EventName::Ptrace).open().unwrap();
        assert!(ports.events(EventName::Ptrace).open().is_err());
        ports
            .control(ControlName::Tracectl)
            .command(b"bad")
            .unwrap_err();
        let stat = ports.stat();
        for line in [
            "trace readers 1",
            "trace opens 2",
            &format!("trace records {}", 2 * toy::LINES),
            "trace dropped 3",
            "ptrace readers 1",
            "ptrace refused 1",
            "tracectl refused 1",
            "tracectl: #commands 0",
        ] {
            assert!(
                stat.lines().any(|l| l == line),
                "{line:?} is not in:\n{stat}"
            );
        }
        drop((quick, single));
        assert!(ports.stat().contains("trace readers 0\n"));
    }
}
