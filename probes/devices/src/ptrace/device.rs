//! The device of one machine: its openers, the traced tasks, and the time in which its probes are
//! armed.
//!
//! While the device is open, all its probes are armed. While it is closed and tasks are selected,
//! only the probes on creation, exit and the takeover of another's number are armed. So children
//! are selected whenever they are made. One lock orders commands, opening and closing; hits never
//! take it.

use std::fmt;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use introspect::PausedMemory;
use introspect::kernel::task_list::{TaskInfo, TaskListLayout};
use probes::clock::Clock;
use probes::engine::{Engine, Filter, RingSize, Session};
use vmm::machine::Paused;

use super::control::{self, Command, TraceScope};
use super::layout::{Identity, Layout};
use super::program::{AtHit, Context, WORDS};
use super::record::{EventType, RECORD_BYTES, Record, name_argument};
use super::recording::{Drainer, Recording};
use super::selection::{MOST, Selection};
use super::sleeps::Sleeps;
use super::sources::{Source, Sources, lost};
use crate::port::{ControlPort, EventLog, EventPort, EventReader, LogReader, PortError, Refusal};

/// The log's size in records until it is set.
const DEFAULT_RECORDS: usize = 1 << 16;
/// The rings from which records go on to the log, a few milliseconds later.
const RINGS: RingSize = RingSize {
    slots: 1 << 16,
    words: WORDS,
};
/// Rings for probes that record nothing.
const NO_RINGS: RingSize = RingSize { slots: 1, words: 1 };
/// The greatest number of tasks that the configuration names.
const MOST_NAMED: usize = 1000;
/// The name of the idle tasks, of which each CPU has one.
const IDLE: &[u8] = b"swapper";

/// ptrace(3). As a [`ControlPort`] it is `ptracectl`, as an [`EventPort`] `ptrace`. Clones are the
/// same device.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").finish_non_exhaustive()
    }
}

struct Inner {
    engine: Engine,
    clock: Clock,
    selection: Arc<Selection>,
    log: EventLog,
    /// The parts of the kernel's description, or why they are insufficient; found on first use.
    parts: OnceLock<Result<Parts, String>>,
    state: Mutex<State>,
}

struct Parts {
    tasks: TaskListLayout,
    context: Arc<Context>,
    /// The places where events are seen; found when the device is first opened, while the machine
    /// is paused.
    sources: OnceLock<Sources>,
}

#[derive(Default)]
struct State {
    /// The size that was set.
    size: Option<usize>,
    open: Option<Drainer>,
    /// The probes that follow selected tasks while the device is closed.
    following: Option<Session>,
    /// The events that the kernel lacks, and the reasons.
    lost: Vec<String>,
    /// The number of records dropped before it was last closed.
    dropped: u64,
}

impl State {
    fn size(&self) -> usize {
        self.size.unwrap_or(DEFAULT_RECORDS)
    }
}

fn failed(text: impl std::fmt::Display) -> PortError {
    PortError::new(Refusal::Failed, text)
}

impl Device {
    /// Makes the device of an engine's machine; records have the time of `clock`. The engine's
    /// stacks should have their unwinder ([`Engine::set_unwinder`]). Without it, most sleeps are
    /// recorded without their reason.
    #[must_use]
    pub fn new(engine: Engine, clock: Clock) -> Self {
        Self(Arc::new(Inner {
            engine,
            clock,
            selection: Arc::default(),
            log: EventLog::new(RECORD_BYTES, DEFAULT_RECORDS),
            parts: OnceLock::new(),
            state: Mutex::default(),
        }))
    }

    /// Returns the clock of the records' times.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.0.clock
    }
}

impl ControlPort for Device {
    fn command(&self, text: &str) -> Result<(), PortError> {
        match control::parse(text)? {
            Command::Size(records) => {
                self.0.set_size(records);
                Ok(())
            }
            Command::Trace(TraceScope::All, on) => self.0.trace_all(on),
            Command::Trace(TraceScope::Thread(pid), on) => self.0.trace(pid, on),
        }
    }

    fn configuration(&self) -> String {
        self.0.configuration()
    }
}

impl EventPort for Device {
    fn record_bytes(&self) -> usize {
        RECORD_BYTES
    }

    fn open(&self) -> Result<Box<dyn EventReader>, PortError> {
        let reader = self.0.open()?;
        Ok(Box::new(Reader {
            reader,
            device: self.0.clone(),
        }))
    }
}

/// The one open of the device.
struct Reader {
    reader: LogReader,
    device: Arc<Inner>,
}

impl EventReader for Reader {
    fn read(&mut self, most: usize) -> Vec<u8> {
        self.reader.read(most)
    }

    fn wait(&mut self, limit: Duration) -> bool {
        self.reader.wait(limit)
    }

    fn dropped(&self) -> u64 {
        self.reader.dropped()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.device.close();
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn parts(&self) -> Result<&Parts, PortError> {
        let parts = self.parts.get_or_init(|| self.look_for_parts());
        parts.as_ref().map_err(failed)
    }

    fn look_for_parts(&self) -> Result<Parts, String> {
        let view = self.engine.view();
        let cannot = |error| format!("tasks cannot be distinguished: {error}");
        let types = view.kernel.types.as_ref();
        let btf = types.map_err(|why| format!("tasks cannot be distinguished: {why}"))?;
        Ok(Parts {
            tasks: TaskListLayout::new(btf, &view.kernel.symbols).map_err(cannot)?,
            context: Arc::new(Context {
                layout: Layout::new(btf).map_err(cannot)?,
                sleeps: Sleeps::new(&view.kernel.symbols),
                selection: self.selection.clone(),
            }),
            sources: OnceLock::new(),
        })
    }

    /// Returns the places where events are seen. The machine is paused.
    fn sources<'p>(&self, parts: &'p Parts, _paused: &Paused) -> &'p Sources {
        let machine = self.engine.machine();
        let layout = &parts.context.layout;
        let find = || Sources::find(self.engine.view(), layout, machine);
        parts.sources.get_or_init(find)
    }

    fn set_size(&self, records: usize) {
        let mut state = self.state();
        // The size only grows from what was set before.
        if state.size.is_none_or(|size| records == 0 || records > size) {
            state.size = Some(records);
        }
        self.log.restart(state.size());
    }

    fn trace_all(&self, on: Option<bool>) -> Result<(), PortError> {
        let parts = self.parts()?;
        let mut state = self.state();
        let paused = self.engine.machine().pause();
        let on = on.unwrap_or(!self.selection.all());
        let newly = on && !self.selection.all();
        self.selection.set_all(on);
        if !on {
            self.selection.clear();
        }
        if let Some(open) = &state.open
            && newly
        {
            open.add(&self.names(parts));
        }
        self.follow(&mut state, parts, &paused);
        Ok(())
    }

    fn trace(&self, pid: u32, on: Option<bool>) -> Result<(), PortError> {
        let parts = self.parts()?;
        let mut state = self.state();
        let paused = self.engine.machine().pause();
        let machine = self.engine.machine();
        let memory = PausedMemory::new(machine.ram());
        let view = memory.view(self.engine.view().kernel.space);
        let number = i32::try_from(pid).map_err(|_| control::process_exited())?;
        let found = parts.tasks.thread(view, number).map_err(failed)?;
        let Some(task) = found else {
            return Err(control::process_exited());
        };
        let threads = match task.pid == task.tgid {
            true => parts.tasks.threads(view, &task).items,
            false => vec![task],
        };
        if on.unwrap_or_else(|| !self.is_selected(&task)) {
            let new = threads.into_iter().filter(|it| !self.is_selected(it));
            let new: Vec<_> = new.collect();
            if self.selection.len() + new.len() > MOST {
                let text = format!("{MOST} tasks are traced already; trace all traces every task");
                return Err(PortError::new(Refusal::NoRoom, text));
            }
            for task in &new {
                self.selection.insert(task.address.0, identity(task));
            }
            if let Some(open) = &state.open
                && !self.selection.all()
            {
                let names: Vec<_> = new.iter().map(task_name).collect();
                open.add(&names);
            }
        } else {
            for task in &threads {
                self.selection.remove(task.address.0);
            }
        }
        self.follow(&mut state, parts, &paused);
        Ok(())
    }

    fn is_selected(&self, task: &TaskInfo) -> bool {
        self.selection.get(task.address.0) == Some(identity(task))
    }

    /// Returns the names of all traced tasks. The machine is paused.
    fn names(&self, parts: &Parts) -> Vec<Record> {
        let machine = self.engine.machine();
        let memory = PausedMemory::new(machine.ram());
        let view = memory.view(self.engine.view().kernel.space);
        let all = self.selection.all();
        let is_traced = |task: &&TaskInfo| all || self.is_selected(task);
        let cpus = if all { machine.vcpus() } else { 0 };
        let idle = (0..cpus).map(|cpu| {
            let cpu = u32::try_from(cpu).unwrap_or(u32::MAX);
            name(0, cpu, IDLE)
        });
        let threads = parts.tasks.all_threads(view).items;
        let threads = threads.iter().filter(is_traced).map(task_name);
        idle.chain(threads).collect()
    }

    /// Arms or disarms the probes that follow selected tasks while the device is closed.
    fn follow(&self, state: &mut State, parts: &Parts, paused: &Paused) {
        let wanted = state.open.is_none() && self.selection.len() > 0;
        if !wanted {
            state.following = None;
        } else if state.following.is_none() {
            let sources = self.sources(parts, paused).of_processes();
            match self.session(NO_RINGS) {
                Ok(mut session) => {
                    let missing = enable(&mut session, parts, sources, false);
                    state.following = Some(session);
                    missing.iter().for_each(|line| log::info!("ptrace: {line}"));
                }
                Err(error) => log::info!("ptrace: children are not followed: {error}"),
            }
        }
    }

    fn session(&self, size: RingSize) -> Result<Session, PortError> {
        let mut session = self.engine.session(size).map_err(|_| no_memory())?;
        session.set_label("ptrace(3)");
        // The set of traced tasks follows forks, none of which may be missed.
        session.watch_always();
        Ok(session)
    }

    fn open(&self) -> Result<LogReader, PortError> {
        let mut state = self.state();
        if state.open.is_some() {
            return Err(control::in_use());
        }
        if state.size() == 0 {
            return Err(control::no_size());
        }
        let parts = self.parts()?;
        // The rings are large, so they are made while the machine runs.
        let mut session = self.session(RINGS)?;
        // One pause covers everything, so that no child is missed between two ways to follow.
        let paused = self.engine.machine().pause();
        let sources = self.sources(parts, &paused);
        let missing = enable(&mut session, parts, sources.list.iter(), true);
        self.log.restart(state.size());
        let mut recording = Recording::new(session, self.clock, self.log.clone());
        recording.add(&self.names(parts));
        let drainer = Drainer::start(recording).map_err(failed)?;
        state.open = Some(drainer);
        state.lost = sources.lost.iter().cloned().chain(missing).collect();
        self.follow(&mut state, parts, &paused);
        drop(paused);
        Ok(self.log.reader())
    }

    fn close(&self) {
        let mut state = self.state();
        let paused = self.engine.machine().pause();
        let open = state.open.take();
        if let Ok(parts) = self.parts() {
            self.follow(&mut state, parts, &paused);
        }
        drop(open);
        drop(paused);
        state.dropped = self.log.counts().lost;
        self.log.restart(state.size());
    }

    fn configuration(&self) -> String {
        let state = self.state();
        let opens = u8::from(state.open.is_some());
        let counts = self.log.counts();
        let dropped = match state.open {
            Some(_) => counts.lost,
            None => state.dropped,
        };
        let mut text = format!(
            "opens {opens}\nsize {}\nproduced {}\nconsumed {}\ndropped {dropped}\n",
            state.size(),
            counts.produced,
            counts.consumed
        );
        if self.selection.all() {
            text.push_str("trace all 1\n");
        }
        let pids = self.selection.pids();
        for pid in pids.iter().take(MOST_NAMED) {
            // Writing to a string does not fail.
            let _ = writeln!(text, "trace {pid} 1");
        }
        let mut remark = |remark: &str| {
            let line = remark.lines().collect::<Vec<_>>().join(" ");
            let _ = writeln!(text, "#{line}");
        };
        if let Some(more) = pids.len().checked_sub(MOST_NAMED).filter(|more| *more > 0) {
            remark(&format!("{more} more are traced"));
        }
        match self.selection.refused() {
            0 => {}
            refused => remark(&format!("{refused} children not traced: {MOST} tasks were")),
        }
        state.lost.iter().for_each(|line| remark(line));
        text
    }
}

/// Enables these probes. Returns the events that are lost.
fn enable<'s>(
    session: &mut Session,
    parts: &Parts,
    sources: impl Iterator<Item = &'s Source>,
    records: bool,
) -> Vec<String> {
    let mut missing = Vec::new();
    for Source { probe, event, what } in sources {
        let program = AtHit {
            what: *what,
            context: parts.context.clone(),
            records,
        };
        let enabled = session.enable_program(probe, Filter::default(), Arc::new(program));
        if let Err(error) = enabled {
            missing.push(lost(*event, error));
        }
    }
    missing
}

fn no_memory() -> PortError {
    PortError::new(Refusal::NoRoom, "not enough memory")
}

fn identity(task: &TaskInfo) -> Identity {
    Identity {
        pid: task.pid.cast_unsigned(),
        start: task.start_time,
    }
}

/// Returns the record of a name, which has no time yet.
fn name(pid: u32, cpu: u32, name: &[u8]) -> Record {
    Record {
        pid,
        event: EventType::Name.number(),
        machine: cpu,
        time: 0,
        argument: name_argument(name),
    }
}

fn task_name(task: &TaskInfo) -> Record {
    name(task.pid.cast_unsigned(), task.cpu, task.name())
}
