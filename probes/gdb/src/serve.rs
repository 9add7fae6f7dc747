//! A session with one client: bytes of the client and stops of the guest, one at a time.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gdbstub::common::Signal;
use gdbstub::conn::Connection;
use gdbstub::stub::state_machine::GdbStubStateMachine;
use gdbstub::stub::{DisconnectReason, GdbStub, MultiThreadStopReason};
use probes::engine::{Engine, Waiter, WatchedStream, Woken};
use probes::provider::Traceable;

use crate::broker::{Broker, Way};
use crate::debugger::Debugger;
use crate::packets::Framer;
use crate::subject::DebugError;

/// The time that a client has to take an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// The size in bytes of the buffer for packets in both directions, reported to the client.
const PACKET: usize = 1 << 16;
/// The number of bytes that are read at once.
const PIECE: usize = 4096;

/// The end of a session. The guest runs on, as before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The client has left, with or without saying so.
    Left,
    /// The process has ended with this status.
    Exited(u8),
    /// The process was ended by a signal, in GDB's numbers.
    Killed(u8),
    /// The machine has ended.
    MachineEnded,
}

/// A session that cannot go on. The guest runs on, as before.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The connection is broken.
    #[error("the connection to the debugger is broken: {0}")]
    Connection(#[from] io::Error),
    /// The client does not keep to the protocol.
    #[error("the debugger does not speak the GDB remote protocol: {0}")]
    Protocol(String),
}

/// The client's side, with answers collected to whole packets.
struct Client {
    stream: UnixStream,
    answer: Vec<u8>,
    broker: Rc<RefCell<Broker>>,
}

impl Connection for Client {
    type Error = io::Error;

    fn write(&mut self, byte: u8) -> io::Result<()> {
        self.answer.push(byte);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let answer = std::mem::take(&mut self.answer);
        let mut framer = Framer::default();
        let pieces = answer.into_iter().filter_map(|byte| framer.take(byte));
        let mut broker = self.broker.borrow_mut();
        let answer: Vec<u8> = pieces.flat_map(|piece| broker.answer(piece)).collect();
        Write::write_all(&mut self.stream, &answer)
    }
}

type Session<'a, 'g> = GdbStubStateMachine<'a, Debugger<'g>, Client>;

/// A debugger that is attached to a process or the kernel. The machine is paused until its client
/// resumes it. Dropping it lets the guest run on as before.
pub struct Attached<'g>(Debugger<'g>);

impl fmt::Debug for Attached<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").finish_non_exhaustive()
    }
}

impl<'g> Attached<'g> {
    /// Pauses the guest and attaches to the process with this number, or to the kernel without one.
    /// The client may change registers and memory if it `may_write`.
    ///
    /// # Errors
    /// If there is no such process, it has no program, or the guest cannot be read.
    pub fn new(
        guest: &'g dyn Traceable,
        engine: &Engine,
        pid: Option<i32>,
        may_write: bool,
    ) -> Result<Self, DebugError> {
        Debugger::attach(guest, engine, pid, may_write).map(Self)
    }

    /// Returns a sentence for each event of the process that cannot be seen.
    #[must_use]
    pub fn unseen(&self) -> &[String] {
        &self.0.unseen
    }

    /// Serves a client until it has left, or the process or the machine has ended.
    ///
    /// # Errors
    /// If the client breaks the protocol or the connection, or the guest cannot be read any more.
    pub fn serve(mut self, stream: UnixStream) -> Result<End, ServeError> {
        stream.set_write_timeout(Some(PATIENCE))?;
        let broker = Rc::<RefCell<Broker>>::default();
        let client = Client {
            stream: stream.try_clone()?,
            answer: Vec::new(),
            broker: broker.clone(),
        };
        let stub = GdbStub::builder(client).packet_buffer_size(PACKET).build();
        let stub = stub.map_err(|error| broken(&error))?;
        let session = stub.run_state_machine(&mut self.0);
        let session = session.map_err(|error| broken(&error))?;
        converse(session, &mut self.0, Input::new(&stream, broker))
    }
}

fn broken(error: &dyn std::fmt::Display) -> ServeError {
    ServeError::Protocol(error.to_string())
}

/// Takes turns between the client and the guest.
fn converse<'g>(
    mut session: Session<'_, 'g>,
    debugger: &mut Debugger<'g>,
    mut input: Input<'_>,
) -> Result<End, ServeError> {
    let waiter = debugger.breakpoints.waiter();
    let machine = debugger.subject.guest().machine();
    let ended = Arc::new(AtomicBool::new(false));
    let at_end = ended.clone();
    let _watch = machine.watch_end(move || {
        at_end.store(true, Ordering::SeqCst);
    });
    loop {
        session = match session {
            GdbStubStateMachine::Idle(idle) => {
                while !ended.load(Ordering::SeqCst) && input.wait(&waiter) == Woken::Drain {}
                if ended.load(Ordering::SeqCst) {
                    return Ok(End::MachineEnded);
                }
                match input.next()? {
                    Next::Left => return Ok(End::Left),
                    Next::Nothing => GdbStubStateMachine::Idle(idle),
                    Next::Byte(byte) => {
                        input.inform(debugger);
                        let answered = idle.incoming_data(debugger, byte);
                        answered.map_err(|error| broken(&error))?
                    }
                }
            }
            GdbStubStateMachine::Running(running) => {
                if let Some(reason) = debugger.next_stop() {
                    input
                        .broker
                        .borrow_mut()
                        .replace_report(debugger.stop_event());
                    let reported = running.report_stop(debugger, reason);
                    session = reported.map_err(|error| broken(&error))?;
                    continue;
                }
                debugger.go_on();
                let woken = input.wait(&waiter);
                debugger.breakpoints.follow_up();
                if ended.load(Ordering::SeqCst) {
                    // As a process ends whose machine is switched off.
                    let reason = MultiThreadStopReason::Terminated(Signal::SIGKILL);
                    let reported = running.report_stop(debugger, reason);
                    reported.map_err(|error| broken(&error))?;
                    return Ok(End::MachineEnded);
                }
                match woken {
                    Woken::Drain => GdbStubStateMachine::Running(running),
                    Woken::Stream => match input.next()? {
                        Next::Left => return Ok(End::Left),
                        Next::Nothing => GdbStubStateMachine::Running(running),
                        Next::Byte(byte) => running
                            .incoming_data(debugger, byte)
                            .map_err(|error| broken(&error))?,
                    },
                }
            }
            GdbStubStateMachine::CtrlCInterrupt(interrupted) => {
                let reason = debugger.interrupt();
                interrupted
                    .interrupt_handled(debugger, Some(reason))
                    .map_err(|error| broken(&error))?
            }
            GdbStubStateMachine::Disconnected(left) => {
                return Ok(match left.get_reason() {
                    DisconnectReason::TargetExited(code) => End::Exited(code),
                    DisconnectReason::TargetTerminated(signal) => End::Killed(signal.0),
                    DisconnectReason::Disconnect | DisconnectReason::Kill => End::Left,
                });
            }
        };
    }
}

/// The next of the client's bytes.
enum Next {
    Byte(u8),
    /// None yet: a packet has only begun, or is answered already.
    Nothing,
    /// None any more.
    Left,
}

/// Bytes of the client, read as they come, for `gdbstub`.
struct Input<'s> {
    stream: &'s UnixStream,
    framer: Framer,
    broker: Rc<RefCell<Broker>>,
    bytes: VecDeque<u8>,
}

impl<'s> Input<'s> {
    fn new(stream: &'s UnixStream, broker: Rc<RefCell<Broker>>) -> Self {
        Self {
            stream,
            framer: Framer::default(),
            broker,
            bytes: VecDeque::new(),
        }
    }

    /// Passes what the broker has learned on. The process stops at the events that a client
    /// understands, once it has introduced itself.
    fn inform(&self, debugger: &mut Debugger<'_>) {
        let mut broker = self.broker.borrow_mut();
        for (address, conditions) in broker.conditions() {
            debugger.breakpoints.set_conditions(address, conditions);
        }
        if let Some(understood) = broker.introduced()
            && debugger.watch_forks_and_execs(understood).execs
        {
            broker.promise_execs();
        }
    }

    /// Waits until there is a byte, or the end of them, or something else to do.
    fn wait(&self, waiter: &Waiter) -> Woken {
        match self.bytes.is_empty() {
            true => waiter.wait(Some(WatchedStream::until_request(self.stream))),
            false => Woken::Stream,
        }
    }

    /// Returns the next byte, after [`wait`](Self::wait) has found one or the end of them.
    fn next(&mut self) -> io::Result<Next> {
        if self.bytes.is_empty() {
            let mut piece = [0; PIECE];
            match self.stream.read(&mut piece) {
                Ok(0) => return Ok(Next::Left),
                Ok(read) => self.take(piece.get(..read).unwrap_or_default())?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(Next::Left);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(self.bytes.pop_front().map_or(Next::Nothing, Next::Byte))
    }

    fn take(&mut self, bytes: &[u8]) -> io::Result<()> {
        for byte in bytes {
            let Some(piece) = self.framer.take(*byte) else {
                continue;
            };
            match self.broker.borrow_mut().request(&piece) {
                Way::On => self.bytes.extend(piece),
                Way::Instead(instead) => self.bytes.extend(instead),
                Way::Back(answer) => self.stream.write_all(&answer)?,
            }
        }
        Ok(())
    }
}
