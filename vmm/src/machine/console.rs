//! The guest's serial port on this process's standard input: raw terminal, `Ctrl-a x` to leave.
//!
//! A thread of its own runs an event loop over standard input. Bytes that the guest's receive FIFO
//! does not accept are kept and offered again when there is room. The keyboard is not read
//! meanwhile. The descriptor is read without a buffer, because the rest in a buffer would wait for
//! the next key.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use devices::Serial;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::terminal::Terminal;

use super::Machine;
use super::control::Control;
use super::end::RunEnd;

/// Ctrl-a: the next byte is a command.
const ESCAPE: u8 = 1;
/// The command after the escape that leaves.
const LEAVE: u8 = b'x';
/// The number of bytes read from the terminal at once.
const READ: usize = 256;

/// Standard input connected to the guest. Dropping this restores the terminal.
#[derive(Debug)]
pub struct Console {
    exit: EventFd,
    thread: Option<JoinHandle<()>>,
}

/// The reason that the console cannot be connected.
#[derive(Debug, thiserror::Error)]
#[error("console on standard input: {0}")]
pub struct ConsoleError(#[from] io::Error);

impl Console {
    /// Connects standard input to `machine`'s serial port.
    ///
    /// `Ctrl-a x` ends the run as [`RunEnd::Stopped`]. The end of a redirected input does not.
    ///
    /// # Errors
    /// If the event loop or its thread cannot be created.
    pub fn connect(machine: &Machine) -> Result<Self, ConsoleError> {
        // A descriptor of its own for the same open file, without std's buffer.
        let source = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        let raw = io::stdin().is_terminal();
        let serial = machine.devices().serial.clone();
        let control = machine.shared().control.clone();
        let console = Self::start(source, raw, serial, control)?;
        if raw {
            let set = io::stdin().lock().set_raw_mode();
            set.map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
            RAW.store(true, Ordering::SeqCst);
        }
        Ok(console)
    }

    /// Starts the loop that copies `source` to `serial`. The terminal is left as it is. With
    /// `escapes` the keys that leave are obeyed.
    fn start(
        source: File,
        escapes: bool,
        serial: Arc<Mutex<Serial>>,
        control: Arc<Control>,
    ) -> Result<Self, ConsoleError> {
        let other = |e: event_manager::Error| io::Error::other(e.to_string());
        let exit = EventFd::new(EFD_NONBLOCK)?;
        let room = EventFd::new(EFD_NONBLOCK)?;
        let mut manager = EventManager::<Input>::new().map_err(other)?;
        let notify = room.try_clone()?;
        let tell = move || {
            // Fails only if the counter is full. The reader is notified already then.
            let _ = notify.write(1);
        };
        let lock = serial.lock();
        lock.unwrap_or_else(PoisonError::into_inner)
            .on_input_room(tell);
        manager.add_subscriber(Input {
            source,
            serial,
            control,
            exit: exit.try_clone()?,
            room,
            escapes,
            escaped: false,
            waiting: Vec::new(),
            watched: false,
            done: false,
        });
        let stop = exit.try_clone()?;
        let thread = std::thread::Builder::new()
            .name("console".into())
            .spawn(move || {
                // The exit event ends the loop. It is read here, after the input has handled
                // everything.
                while stop.read().is_err() {
                    if let Err(error) = manager.run() {
                        log::error!("console: {error}");
                        return;
                    }
                }
            })?;
        Ok(Self {
            exit,
            thread: Some(thread),
        })
    }
}

/// Whether this process has made the terminal raw.
static RAW: AtomicBool = AtomicBool::new(false);

/// Restores the terminal, for a process that ends at once.
pub fn restore_terminal() {
    if RAW.swap(false, Ordering::SeqCst)
        && let Err(error) = io::stdin().lock().set_canon_mode()
    {
        log::error!("the terminal stays raw (type `reset`): {error}");
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if self.exit.write(1).is_ok()
            && let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the console thread panicked");
        }
        restore_terminal();
    }
}

/// The reading side of standard input.
struct Input {
    source: File,
    serial: Arc<Mutex<Serial>>,
    control: Arc<Control>,
    exit: EventFd,
    room: EventFd,
    /// Whether the source is a terminal, whose escape is obeyed.
    escapes: bool,
    escaped: bool,
    /// The bytes that the guest has not accepted yet.
    waiting: Vec<u8>,
    watched: bool,
    /// Whether the source is at its end.
    done: bool,
}

impl Input {
    fn read(&mut self, ops: &mut EventOps<'_>) {
        let mut bytes = [0; READ];
        let count = match self.source.read(&mut bytes) {
            Ok(count) => count,
            Err(error)
                if [io::ErrorKind::Interrupted, io::ErrorKind::WouldBlock]
                    .contains(&error.kind()) =>
            {
                return;
            }
            Err(_) => 0,
        };
        if count == 0 {
            self.done = true;
            self.listen(ops, false);
            return;
        }
        for byte in bytes.iter().take(count) {
            self.take(*byte);
        }
        self.offer(ops);
    }

    /// Handles the escape, which only a terminal has.
    fn take(&mut self, byte: u8) {
        if self.escapes && std::mem::take(&mut self.escaped) {
            match byte {
                LEAVE => return self.control.end(RunEnd::Stopped),
                ESCAPE => {} // Ctrl-a twice is Ctrl-a for the guest
                _ => self.waiting.push(ESCAPE),
            }
        } else if self.escapes && byte == ESCAPE {
            self.escaped = true;
            return;
        }
        self.waiting.push(byte);
    }

    /// Offers the guest the waiting bytes. Watches the keyboard only if none are left.
    fn offer(&mut self, ops: &mut EventOps<'_>) {
        let taken = {
            let mut serial = self.serial.lock().unwrap_or_else(PoisonError::into_inner);
            serial.push_input(&self.waiting)
        };
        self.waiting.drain(..taken.min(self.waiting.len()));
        self.listen(ops, self.waiting.is_empty() && !self.done);
    }

    /// Watches the source or stops watching it.
    ///
    /// A source that has hung up reports that for any event set. It is removed while it is not to
    /// be read, or the loop would spin.
    fn listen(&mut self, ops: &mut EventOps<'_>, on: bool) {
        if on == self.watched {
            return;
        }
        let events = Events::new(&self.source, EventSet::IN);
        let changed = match on {
            true => ops.add(events),
            false => ops.remove(events),
        };
        self.watched = on;
        if let Err(error) = changed {
            log::debug!("standard input cannot be watched: {error}");
        }
    }

    /// Reads a source that cannot be watched to its end. It is a regular file, so all its bytes are
    /// there already.
    fn read_whole(&mut self, ops: &mut EventOps<'_>) {
        let mut rest = Vec::new();
        if self.source.read_to_end(&mut rest).is_ok() {
            self.waiting = rest;
        }
        self.done = true;
        self.offer(ops);
    }
}

impl MutEventSubscriber for Input {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if events.fd() == self.room.as_raw_fd() {
            // The count does not matter, only that there is room.
            let _ = self.room.read();
            self.offer(ops);
        } else if events.fd() == self.source.as_raw_fd() && self.watched {
            // A source that has hung up may still have bytes to read. Its end is read after them.
            self.read(ops);
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        for added in [
            ops.add(Events::new(&self.exit, EventSet::IN)),
            ops.add(Events::new(&self.room, EventSet::IN)),
        ] {
            if let Err(error) = added {
                log::error!("console: {error}");
            }
        }
        match ops.add(Events::new(&self.source, EventSet::IN)) {
            Ok(()) => self.watched = true,
            Err(_) => self.read_whole(ops),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Write, pipe};
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    use devices::{BusDevice, ConsoleOutput, InterruptLine};

    use super::*;

    /// Longer than any buffer on the way, and no multiple of one.
    const PASTE: usize = 5_000;
    const LIMIT: Duration = Duration::from_secs(60);
    const DATA: u64 = 0;
    const LINE_STATUS: u64 = 5;
    const DATA_READY: u8 = 1;

    struct NoLine;
    impl InterruptLine for NoLine {
        fn pulse(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn paste() -> Vec<u8> {
        (0..PASTE).map(|at| b'a' + (at % 26) as u8).collect()
    }

    fn connected(source: impl Into<OwnedFd>) -> (Console, Arc<Mutex<Serial>>) {
        let serial = Serial::new(Arc::new(NoLine), ConsoleOutput::null());
        let serial = Arc::new(Mutex::new(serial));
        let source = File::from(source.into());
        let control = Arc::new(Control::new(0));
        let console = Console::start(source, false, serial.clone(), control).unwrap();
        (console, serial)
    }

    /// Reads as a guest does, until `length` bytes have arrived.
    fn received(serial: &Mutex<Serial>, length: usize) -> Vec<u8> {
        let register = |offset| {
            let mut value = [0];
            serial.lock().unwrap().read(offset, &mut value);
            value[0]
        };
        let start = Instant::now();
        let mut bytes = Vec::new();
        while bytes.len() < length && start.elapsed() < LIMIT {
            match register(LINE_STATUS) & DATA_READY {
                0 => std::thread::yield_now(),
                _ => bytes.push(register(DATA)),
            }
        }
        bytes
    }

    #[test]
    fn a_paste_arrives_whole_without_another_key() {
        let (source, mut keys) = pipe().unwrap();
        let (_console, serial) = connected(source);
        for _ in 0..3 {
            keys.write_all(&paste()).unwrap();
            assert_eq!(received(&serial, PASTE), paste());
        }
    }

    #[test]
    fn what_was_written_before_the_end_arrives() {
        let (source, mut keys) = pipe().unwrap();
        keys.write_all(&paste()).unwrap();
        drop(keys);
        let (_console, serial) = connected(source);
        assert_eq!(received(&serial, PASTE), paste());
    }

    #[test]
    fn a_file_arrives_whole() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&paste()).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        let (_console, serial) = connected(file);
        assert_eq!(received(&serial, PASTE), paste());
    }
}
