//! The device itself: traces, watched processes, its running state, and the log.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use probes::engine::{Engine, Filter, RingSize, Session, Waiter};
use probes::probe::Moment;
use probes::provider::kprobe;

use super::address;
use super::command::Command;
use super::configuration::ConfigText;
use super::functions::{self, Function};
use super::program::{self, Recorder, Settings, WORDS};
use crate::port::{ControlPort, EventLog, EventPort, EventReader, LogReader, PortError, Refusal};
use crate::trace_line::LINE_BYTES;

/// The default number of entries of a log.
const ENTRIES: usize = 8192;
/// The greatest number of watched processes.
const MOST_WATCHED: usize = 64;
/// The greatest number of traces.
const MOST_TRACES: usize = 256;
/// The number of slots of each vCPU's ring, from which records go on to the log.
const SLOTS: usize = 1 << 14;

/// The counters of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceCounts {
    /// The number of function entries to record.
    pub entries: u64,
    /// The number of function returns to record.
    pub exits: u64,
    /// The number of lines in the log that nobody has read.
    pub waiting: u64,
    /// The number of those entries and returns that were dropped.
    pub lost: u64,
}

/// A trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trace {
    pub(super) name: String,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) on: bool,
    pub(super) functions: Vec<Function>,
    /// The session's numbers of its probes, while it is armed.
    pub(super) numbers: Vec<u32>,
    /// The functions that could not be armed, and the reasons.
    pub(super) refused: Vec<String>,
}

#[derive(Default)]
struct State {
    traces: Vec<Trace>,
    /// The session, while the device runs.
    session: Option<Session>,
    /// The number of records that the rings had dropped when the log was last remade.
    lost_before: u64,
    /// The number of starts: the thread of an earlier start ends.
    started: u64,
}

struct Inner {
    engine: Engine,
    settings: Arc<Settings>,
    log: EventLog,
    /// Taken before the log's own lock.
    state: Mutex<State>,
}

/// The device. Clones are the same one; when the last clone is dropped, its traps are removed.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").finish_non_exhaustive()
    }
}

impl Device {
    /// Makes the device of an engine's machine: no traces, stopped, a log of 8192 entries.
    #[must_use]
    pub fn new(engine: Engine) -> Self {
        Self(Arc::new(Inner {
            engine,
            settings: Arc::default(),
            log: EventLog::new(LINE_BYTES, ENTRIES),
            state: Mutex::default(),
        }))
    }

    /// Returns the counts since the log was made. They are exact while the device is stopped.
    #[must_use]
    pub fn counts(&self) -> DeviceCounts {
        let mut state = self.0.state();
        self.0.gather(&mut state);
        self.0.counts(&state)
    }

    /// Returns the number of open readers.
    #[must_use]
    pub fn readers(&self) -> usize {
        self.0.log.readers()
    }
}

impl ControlPort for Device {
    fn command(&self, text: &str) -> Result<(), PortError> {
        let Some(command) = Command::parse(text)? else {
            return Ok(());
        };
        let mut state = self.0.state();
        match command {
            Command::New { start, end, name } => self.0.new_trace(&mut state, &start, &end, name),
            Command::On(name) => self.0.set_on(&mut state, &name, true),
            Command::Off(name) => self.0.set_on(&mut state, &name, false),
            Command::Remove(name) => self.0.remove(&mut state, &name),
            Command::Size(entries) => {
                self.0.resize(&mut state, entries);
                Ok(())
            }
            Command::Watch(pid) => self.0.watch(pid),
            Command::Start => self.start(&mut state),
            Command::All => {
                self.start(&mut state)?;
                self.0.settings.all.store(true, Ordering::Relaxed);
                Ok(())
            }
            Command::Stop => {
                self.0.stop(&mut state);
                Ok(())
            }
        }
    }

    fn configuration(&self) -> String {
        let mut state = self.0.state();
        self.0.gather(&mut state);
        ConfigText {
            entries: self.0.log.capacity(),
            traces: &state.traces,
            watched: &self.0.settings.watched.load(),
            all: self.0.settings.all.load(Ordering::Relaxed),
            active: state.session.is_some(),
            counts: self.0.counts(&state),
        }
        .text()
    }
}

impl EventPort for Device {
    fn record_bytes(&self) -> usize {
        LINE_BYTES
    }

    fn open(&self) -> Result<Box<dyn EventReader>, PortError> {
        Ok(Box::new(Reader {
            log: self.0.log.reader(),
            device: Arc::downgrade(&self.0),
        }))
    }
}

impl Device {
    /// Arms the traces that are on, in one pause.
    fn start(&self, state: &mut State) -> Result<(), PortError> {
        if state.session.is_some() {
            return Ok(());
        }
        let size = RingSize {
            slots: SLOTS,
            words: WORDS,
        };
        let session = self.0.engine.session(size);
        let failed = |error: &dyn std::fmt::Display| {
            PortError::new(Refusal::Failed, format_args!("devtrace: {error}"))
        };
        let mut session = session.map_err(|error| failed(&error))?;
        session.set_label("trace(3)");
        let paused = self.0.engine.machine().pause();
        let mut armed = Ok(());
        for trace in state.traces.iter_mut().filter(|trace| trace.on) {
            armed = armed.and(self.0.arm(trace, &mut session));
        }
        if armed.is_ok() {
            state.started += 1;
            let (inner, started) = (Arc::downgrade(&self.0), state.started);
            let waiter = session.waiter();
            armed = std::thread::Builder::new()
                .name("trace-log".into())
                .spawn(move || keep_gathering(&inner, started, &waiter))
                .map(drop)
                .map_err(|error| failed(&error));
        }
        if armed.is_err() {
            state.traces.iter_mut().for_each(|t| t.numbers.clear());
            session.disable_all();
        } else {
            state.session = Some(session);
        }
        drop(paused);
        armed
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_trace(
        &self,
        state: &mut State,
        start: &str,
        end: &str,
        name: String,
    ) -> Result<(), PortError> {
        let exists = |text| PortError::new(Refusal::Exists, text);
        if state.traces.iter().any(|trace| trace.name == start) {
            return Err(exists("devtrace: trace already exists"));
        }
        let view = self.engine.view();
        let [start, end] = [start, end].map(|word| address::parse(&view.kernel.symbols, word));
        let (start, end) = (start?, end?);
        if start >= end {
            let text = "devtrace: invalid address range";
            return Err(PortError::new(Refusal::Invalid, text));
        }
        if state.traces.iter().any(|trace| trace.name == name) {
            return Err(exists("devtrace: trace with that name already exists"));
        }
        let overlaps = |trace: &Trace| start <= trace.end && trace.start <= end;
        if state.traces.iter().any(overlaps) {
            return Err(exists("devtrace: given range overlaps with existing trace"));
        }
        if state.traces.len() >= MOST_TRACES {
            let text = format!("devtrace: {MOST_TRACES} traces exist; remove one first");
            return Err(PortError::new(Refusal::NoRoom, text));
        }
        let functions = functions::in_range(view, start, end)?;
        state.traces.push(Trace {
            name,
            start,
            end,
            on: false,
            functions,
            numbers: Vec::new(),
            refused: Vec::new(),
        });
        Ok(())
    }

    fn set_on(&self, state: &mut State, name: &str, on: bool) -> Result<(), PortError> {
        let trace = state.traces.iter_mut().find(|trace| trace.name == name);
        let trace = trace.ok_or_else(not_found)?;
        if trace.on == on {
            return Ok(());
        }
        if let Some(session) = &mut state.session {
            let _paused = self.engine.machine().pause();
            match on {
                true => self.arm(trace, session)?,
                false => disarm(trace, session),
            }
        }
        trace.on = on;
        Ok(())
    }

    fn remove(&self, state: &mut State, name: &str) -> Result<(), PortError> {
        self.set_on(state, name, false)?;
        state.traces.retain(|trace| trace.name != name);
        Ok(())
    }

    /// Makes a new log: unread lines are dropped, and counts begin anew.
    fn resize(&self, state: &mut State, entries: usize) {
        let _paused = self.engine.machine().pause();
        self.gather(state);
        self.log.restart(entries);
        self.settings.entries.store(0, Ordering::Relaxed);
        self.settings.exits.store(0, Ordering::Relaxed);
        if let Some(session) = &state.session {
            state.lost_before = session.dropped_records();
        }
    }

    fn watch(&self, pid: u32) -> Result<(), PortError> {
        let mut watched = Vec::clone(&self.settings.watched.load());
        match (pid, watched.binary_search(&pid)) {
            (0, _) => watched.clear(),
            (_, Ok(_)) => {}
            (_, Err(_)) if watched.len() >= MOST_WATCHED => {
                return Err(PortError::new(Refusal::NoRoom, "pidwatch array full!"));
            }
            (_, Err(place)) => watched.insert(place, pid),
        }
        self.settings.watched.store(Arc::new(watched));
        Ok(())
    }

    /// Arms as many functions of a trace as possible; the guest is paused.
    fn arm(&self, trace: &mut Trace, session: &mut Session) -> Result<(), PortError> {
        trace.refused.clear();
        let mut armed = 0;
        for function in &trace.functions {
            let Function { name, address, .. } = function;
            let program = Arc::new(Recorder {
                settings: self.settings.clone(),
                arguments: function.arguments,
            });
            for moment in [Moment::Entry, Moment::Return] {
                let probe = kprobe::of_function(kprobe::PROVIDER, name, *address, moment);
                match session.enable_program(&probe, Filter::default(), program.clone()) {
                    Ok(number) => {
                        trace.numbers.push(number);
                        armed += 1;
                    }
                    Err(error) => trace.refused.push(error.to_string()),
                }
            }
        }
        match (armed, trace.refused.first()) {
            (0, Some(why)) => Err(PortError::new(
                Refusal::Failed,
                format_args!("devtrace: nothing of {} can be traced: {why}", trace.name),
            )),
            _ => Ok(()),
        }
    }

    /// Disarms the traces, and drains the records into the log.
    fn stop(&self, state: &mut State) {
        self.settings.all.store(false, Ordering::Relaxed);
        let Some(mut session) = state.session.take() else {
            return;
        };
        // No hit is half recorded while the guest is paused.
        let _paused = self.engine.machine().pause();
        session.disable_all();
        self.take(&mut session);
        let lost = session.dropped_records() - state.lost_before;
        self.log.add_lost(lost);
        state.lost_before = 0;
        for trace in &mut state.traces {
            trace.numbers.clear();
        }
    }

    /// Drains the records into the log.
    fn gather(&self, state: &mut State) {
        if let Some(session) = &mut state.session {
            self.take(session);
        }
    }

    fn take(&self, session: &mut Session) {
        let mut lines = Vec::new();
        session.drain_records(|_, tsc, words| {
            lines.extend(program::line(tsc, words).map(|line| line.to_bytes()));
        });
        if !lines.is_empty() {
            self.log.push(lines.iter().map(|line| line.as_slice()));
        }
    }

    fn counts(&self, state: &State) -> DeviceCounts {
        let log = self.log.counts();
        let session = state.session.as_ref();
        let in_rings = session.map_or(0, |s| s.dropped_records() - state.lost_before);
        DeviceCounts {
            entries: self.settings.entries.load(Ordering::Relaxed),
            exits: self.settings.exits.load(Ordering::Relaxed),
            waiting: log.waiting,
            lost: log.lost + in_rings,
        }
    }
}

fn not_found() -> PortError {
    PortError::new(Refusal::NotFound, "devtrace: trace not found")
}

fn disarm(trace: &mut Trace, session: &mut Session) {
    for number in trace.numbers.drain(..) {
        session.disable(number);
    }
}

/// Drains until the device stops, is started again or is dropped.
fn keep_gathering(device: &Weak<Inner>, started: u64, waiter: &Waiter) {
    loop {
        let _ = waiter.wait(None);
        let Some(device) = device.upgrade() else {
            return;
        };
        let mut state = device.state();
        if state.session.is_none() || state.started != started {
            return;
        }
        device.gather(&mut state);
    }
}

/// A reader of the device's log. It drains the rings first, so that nothing is late.
struct Reader {
    log: LogReader,
    device: Weak<Inner>,
}

impl EventReader for Reader {
    fn read(&mut self, most: usize) -> Vec<u8> {
        if let Some(device) = self.device.upgrade() {
            device.gather(&mut device.state());
        }
        self.log.read(most)
    }

    fn wait(&mut self, limit: Duration) -> bool {
        self.log.wait(limit)
    }

    fn dropped(&self) -> u64 {
        self.log.dropped()
    }
}
