//! Breakpoints of the client and ends of steps, as probes of one session.
//!
//! A client takes its breakpoints out at each stop, and puts them back before it goes on. A
//! breakpoint that was taken out therefore stays armed until the guest goes on without it. While
//! one thread steps and the client wants the others to stay, they may reach such a
//! breakpoint. They stay there until it is in place again, or gone. System calls that the client
//! catches are taken out and put back in the same way.

use std::collections::BTreeMap;
use std::sync::Arc;

use probes::engine::{Engine, Filter, Match, RingSize, Session, Waiter};
use probes::probe::Probe;

use crate::process::{DebugError, Process};
use crate::stops::{Cause, Holder, Stops};

/// The largest number of breakpoints of a client.
const MAX_BREAKPOINTS: usize = 1 << 16;
/// The words of a record that is never written.
const RING: RingSize = RingSize { slots: 2, words: 4 };

/// A breakpoint that is armed.
#[derive(Debug, Clone, Copy)]
struct Armed {
    /// The number of its probe.
    probe: u32,
    /// Whether the client wants it now.
    wanted: bool,
}

/// The traps of a debugger. Dropping it disarms them.
pub(crate) struct Breakpoints {
    session: Session,
    stops: Arc<Stops>,
    process: u32,
    armed: BTreeMap<u64, Armed>,
    /// The probes at which the step in progress ends.
    step: Vec<u32>,
    /// The system calls that are armed.
    calls: Option<Calls>,
}

/// System calls that are armed.
struct Calls {
    /// Their numbers; `None` for all.
    numbers: Option<Vec<u64>>,
    probes: Vec<u32>,
    /// Whether the client wants them now.
    wanted: bool,
}

impl Breakpoints {
    pub(crate) fn new(engine: &Engine, pid: i32, stops: Arc<Stops>) -> Result<Self, DebugError> {
        let session = engine.session(RING);
        let mut session = session.map_err(|error| DebugError::Session(error.to_string()))?;
        session.set_label("gdb");
        // A breakpoint that waits is no breakpoint.
        session.watch_always();
        Ok(Self {
            session,
            stops,
            process: u32::try_from(pid).unwrap_or_default(),
            armed: BTreeMap::new(),
            step: Vec::new(),
            calls: None,
        })
    }

    /// Returns the waiter for the next stop.
    pub(crate) fn waiter(&self) -> Waiter {
        self.session.waiter()
    }

    /// Lets the engine do what hits have left for later. There are no records.
    pub(crate) fn follow_up(&mut self) {
        self.session.drain(|_| {});
    }

    /// Returns the filter for hits of the process, or of one thread of it.
    fn filter(&self, thread: Option<i32>) -> Filter {
        let thread = thread.and_then(|thread| u32::try_from(thread).ok());
        Filter {
            pids: Match::In(vec![self.process]),
            tids: thread.map_or(Match::Any, |thread| Match::In(vec![thread])),
            ..Filter::default()
        }
    }

    /// Enables a probe whose hits hold the machine.
    ///
    /// # Errors
    /// If a trap cannot be armed.
    pub(crate) fn hold_at(
        &mut self,
        probe: &Probe,
        thread: Option<i32>,
        cause: Cause,
    ) -> Result<u32, DebugError> {
        let stops = self.stops.clone();
        let program = Arc::new(Holder { cause, stops });
        let enabled = self
            .session
            .enable_program(probe, self.filter(thread), program);
        enabled.map_err(|error| DebugError::Session(error.to_string()))
    }

    /// Adds a breakpoint at `address`. Returns whether it can be there.
    pub(crate) fn add(&mut self, process: &Process<'_>, address: u64) -> Result<bool, DebugError> {
        if let Some(armed) = self.armed.get_mut(&address) {
            armed.wanted = true;
            return Ok(true);
        }
        if self.armed.len() >= MAX_BREAKPOINTS {
            return Ok(false);
        }
        let Some(probe) = process.probe_at(address)? else {
            return Ok(false);
        };
        let probe = match self.hold_at(&probe, None, Cause::Breakpoint) {
            Ok(probe) => probe,
            Err(error) => {
                log::info!("no breakpoint at {address:#x}: {error}");
                return Ok(false);
            }
        };
        let wanted = true;
        self.armed.insert(address, Armed { probe, wanted });
        Ok(true)
    }

    /// Takes a breakpoint out. Returns whether there was one.
    pub(crate) fn remove(&mut self, address: u64) -> bool {
        let armed = self.armed.get_mut(&address);
        armed.is_some_and(|armed| std::mem::take(&mut armed.wanted))
    }

    /// Checks whether the client wants a breakpoint at `address`.
    pub(crate) fn is_wanted(&self, address: u64) -> bool {
        self.armed.get(&address).is_some_and(|armed| armed.wanted)
    }

    /// Disarms the breakpoints and system calls that were taken out.
    pub(crate) fn settle(&mut self) {
        if self.calls.as_ref().is_some_and(|calls| !calls.wanted) {
            self.drop_calls();
        }
        let session = &mut self.session;
        self.armed.retain(|_, armed| {
            if !armed.wanted {
                session.disable(armed.probe);
            }
            armed.wanted
        });
    }

    /// Ends the step of a thread at the first of these addresses that it reaches. Returns whether
    /// it can end at any.
    pub(crate) fn step_to(
        &mut self,
        process: &Process<'_>,
        thread: i32,
        addresses: &[u64],
    ) -> Result<bool, DebugError> {
        for address in addresses {
            let Some(probe) = process.probe_at(*address)? else {
                continue;
            };
            match self.hold_at(&probe, Some(thread), Cause::Step) {
                Ok(probe) => self.step.push(probe),
                Err(error) => log::info!("no step ends at {address:#x}: {error}"),
            }
        }
        Ok(!self.step.is_empty())
    }

    /// Stops the process at these system calls, or at all. `probes` are theirs, with the causes of
    /// their stops; they are asked for if the calls are not armed yet.
    pub(crate) fn catch_calls(
        &mut self,
        numbers: Option<Vec<u64>>,
        probes: impl FnOnce(Option<&[u64]>) -> Vec<(Probe, Cause)>,
    ) {
        match &mut self.calls {
            // A call that has begun is forgotten with its probe, so its return would be missed.
            Some(calls) if calls.numbers == numbers => calls.wanted = true,
            _ => {
                self.drop_calls();
                let mut armed = Vec::new();
                for (probe, cause) in probes(numbers.as_deref()) {
                    match self.hold_at(&probe, None, cause) {
                        Ok(probe) => armed.push(probe),
                        Err(error) => log::info!("{} is not caught: {error}", probe.name),
                    }
                }
                self.calls = Some(Calls {
                    numbers,
                    probes: armed,
                    wanted: true,
                });
            }
        }
    }

    /// Stops the process at no system call.
    pub(crate) fn release_calls(&mut self) {
        if let Some(calls) = &mut self.calls {
            calls.wanted = false;
        }
    }

    /// Checks whether the client wants system calls.
    pub(crate) fn wants_calls(&self) -> bool {
        self.calls.as_ref().is_some_and(|calls| calls.wanted)
    }

    fn drop_calls(&mut self) {
        let calls = self.calls.take();
        for probe in calls.map_or_else(Vec::new, |calls| calls.probes) {
            self.session.disable(probe);
        }
    }

    /// Forgets the step in progress.
    pub(crate) fn end_step(&mut self) {
        for probe in std::mem::take(&mut self.step) {
            self.session.disable(probe);
        }
    }
}
