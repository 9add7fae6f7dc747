//! The guest's serial port on this process's standard input: raw terminal, `Ctrl-a x` to leave.
//!
//! A thread of its own runs an event loop over standard input. What the guest's receive FIFO does not take is
//! kept and offered again when there is room; the keyboard is not read meanwhile.

use std::io::{self, IsTerminal, Read};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use devices::Serial;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::terminal::Terminal;

use super::Machine;
use super::control::Control;
use super::end::RunEnd;

/// Ctrl-a: the next byte is for us.
const ESCAPE: u8 = 1;
/// After the escape: leave.
const LEAVE: u8 = b'x';
/// Bytes read from the terminal at once.
const READ: usize = 256;

/// Standard input connected to the guest. The terminal is as before once this is dropped.
pub struct Console {
    exit: EventFd,
    thread: Option<JoinHandle<()>>,
    raw: bool,
}

/// The console cannot be connected.
#[derive(Debug, thiserror::Error)]
#[error("console on standard input: {0}")]
pub struct ConsoleError(#[from] io::Error);

impl Console {
    /// Connects standard input to `machine`'s serial port. Leaving by `Ctrl-a x` ends the run as
    /// [`RunEnd::Stopped`]; the end of a redirected input does not.
    ///
    /// # Errors
    /// If the event loop or its thread cannot be made.
    pub fn connect(machine: &Machine) -> Result<Self, ConsoleError> {
        let other = |e: event_manager::Error| io::Error::other(e.to_string());
        let exit = EventFd::new(EFD_NONBLOCK)?;
        let room = EventFd::new(EFD_NONBLOCK)?;
        let raw = io::stdin().is_terminal();
        let mut manager = EventManager::<Input>::new().map_err(other)?;
        let notify = room.try_clone()?;
        machine.serial().on_input_room(move || {
            // Fails only when the counter is full: then the reader is already told.
            let _ = notify.write(1);
        });
        manager.add_subscriber(Input {
            serial: machine.devices().serial.clone(),
            control: machine.shared().control.clone(),
            exit: exit.try_clone()?,
            room,
            escaped: false,
            waiting: Vec::new(),
            done: false,
            raw,
        });
        if raw {
            io::stdin()
                .lock()
                .set_raw_mode()
                .map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        }
        let stop = exit.try_clone()?;
        let thread = std::thread::Builder::new()
            .name("console".into())
            .spawn(move || {
                // The exit event ends the loop: it is read here, after the input has seen everything.
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
            raw,
        })
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
        if self.raw
            && let Err(error) = io::stdin().lock().set_canon_mode()
        {
            log::error!("the terminal stays raw (type `reset`): {error}");
        }
    }
}

/// What arrives on standard input.
struct Input {
    serial: Arc<Mutex<Serial>>,
    control: Arc<Control>,
    exit: EventFd,
    room: EventFd,
    escaped: bool,
    waiting: Vec<u8>,
    done: bool,
    raw: bool,
}

impl Input {
    fn read(&mut self, ops: &mut EventOps<'_>) {
        let mut bytes = [0; READ];
        let count = match io::stdin().lock().read(&mut bytes) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
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

    /// Sorts out the escape; only a terminal has one.
    fn take(&mut self, byte: u8) {
        if self.raw && std::mem::take(&mut self.escaped) {
            match byte {
                LEAVE => return self.control.end(RunEnd::Stopped),
                ESCAPE => {} // Ctrl-a twice is Ctrl-a for the guest
                _ => self.waiting.push(ESCAPE),
            }
        } else if self.raw && byte == ESCAPE {
            self.escaped = true;
            return;
        }
        self.waiting.push(byte);
    }

    /// Gives the guest what it takes; listens to the keyboard only when nothing waits.
    fn offer(&mut self, ops: &mut EventOps<'_>) {
        let taken = {
            let mut serial = self.serial.lock().unwrap_or_else(PoisonError::into_inner);
            serial.push_input(&self.waiting)
        };
        self.waiting.drain(..taken.min(self.waiting.len()));
        self.listen(ops, self.waiting.is_empty() && !self.done);
    }

    fn listen(&self, ops: &mut EventOps<'_>, on: bool) {
        let set = if on { EventSet::IN } else { EventSet::empty() };
        if let Err(error) = ops.modify(Events::new(&io::stdin(), set)) {
            log::debug!("standard input cannot be watched: {error}");
        }
    }
}

impl MutEventSubscriber for Input {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if events.fd() == self.room.as_raw_fd() {
            // The count does not matter, only that there is room.
            let _ = self.room.read();
            self.offer(ops);
        } else if events.fd() == io::stdin().as_raw_fd() {
            if events.event_set().contains(EventSet::IN) {
                self.read(ops);
            } else {
                self.done = true;
                if let Err(error) = ops.remove(events) {
                    log::debug!("standard input cannot be left: {error}");
                }
            }
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
        // A regular file cannot be watched: it is all there already.
        if ops.add(Events::new(&io::stdin(), EventSet::IN)).is_err() {
            let mut rest = Vec::new();
            if io::stdin().lock().read_to_end(&mut rest).is_ok() {
                self.waiting = rest;
            }
            self.done = true;
            self.offer(ops);
        }
    }
}
