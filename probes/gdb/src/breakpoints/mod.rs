//! Breakpoints of the client and ends of steps, as probes of one session.
//!
//! A client takes its breakpoints out at each stop, and puts them back before it goes on. A
//! breakpoint that was taken out therefore stays armed until the guest goes on without it. While
//! one thread steps and the client wants the others to stay, they may reach such a
//! breakpoint. They stay there until it is in place again, or gone. System calls that the client
//! catches are taken out and put back in the same way.
//!
//! A guest does not see the traps, so hardware breakpoints are traps, too.

mod watchpoints;

use std::collections::BTreeMap;
use std::sync::Arc;

use probes::engine::{Engine, RingSize, Session, Waiter};
use probes::probe::Probe;

use crate::stops::{Cause, Conditions, Holder, Stops};
use crate::subject::{DebugError, Subject};
use watchpoints::Watched;

/// The largest number of breakpoints of a client.
const MAX_BREAKPOINTS: usize = 1 << 16;
/// The words of a record that is never written.
const RING: RingSize = RingSize { slots: 2, words: 4 };

/// The kind of a client's breakpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Software,
    Hardware,
}

/// A breakpoint that is armed.
#[derive(Debug, Clone, Copy)]
struct Armed {
    /// The number of its probe.
    probe: u32,
    /// Whether the client wants one of each [`Kind`] now.
    wanted: [bool; 2],
}

impl Armed {
    fn is_wanted(&self) -> bool {
        self.wanted.contains(&true)
    }

    fn wanted(&mut self, kind: Kind) -> &mut bool {
        let [software, hardware] = &mut self.wanted;
        match kind {
            Kind::Software => software,
            Kind::Hardware => hardware,
        }
    }
}

/// The traps of a debugger. Dropping it disarms them.
pub(crate) struct Breakpoints {
    session: Session,
    stops: Arc<Stops>,
    armed: BTreeMap<u64, Armed>,
    /// The conditions that the client has sent, by address.
    conditions: BTreeMap<u64, Conditions>,
    /// The probes at which the steps of threads end. A step that a stop of another thread has
    /// interrupted is kept, so that its thread goes no further while that one steps alone.
    steps: BTreeMap<i32, Vec<u32>>,
    /// The system calls that are armed.
    calls: Option<Calls>,
    /// The watchpoints that are set.
    watched: Vec<Watched>,
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
    pub(crate) fn new(engine: &Engine, stops: Arc<Stops>) -> Result<Self, DebugError> {
        let session = engine.session(RING);
        let mut session = session.map_err(|error| DebugError::Session(error.to_string()))?;
        session.set_label("gdb");
        // A breakpoint that waits is no breakpoint.
        session.watch_always();
        Ok(Self {
            session,
            stops,
            armed: BTreeMap::new(),
            conditions: BTreeMap::new(),
            steps: BTreeMap::new(),
            calls: None,
            watched: Vec::new(),
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

    /// Enables a probe whose hits hold the machine.
    ///
    /// # Errors
    /// If a trap cannot be armed.
    pub(crate) fn hold_at(
        &mut self,
        subject: &dyn Subject,
        probe: &Probe,
        thread: Option<i32>,
        cause: Cause,
    ) -> Result<u32, DebugError> {
        self.hold_if(subject, probe, thread, (cause, Conditions::default()))
    }

    /// Enables a probe whose hits hold the machine unless these conditions are false.
    fn hold_if(
        &mut self,
        subject: &dyn Subject,
        probe: &Probe,
        thread: Option<i32>,
        (cause, conditions): (Cause, Conditions),
    ) -> Result<u32, DebugError> {
        let program = Arc::new(Holder {
            cause,
            conditions,
            number: subject.number_of_hit(),
            stops: self.stops.clone(),
        });
        let enabled = self
            .session
            .enable_program(probe, subject.filter(thread), program);
        enabled.map_err(|error| DebugError::Session(error.to_string()))
    }

    /// Sets the conditions of the breakpoint that is, or will be, at `address`.
    pub(crate) fn set_conditions(&mut self, address: u64, conditions: Vec<Vec<u8>>) {
        if self.conditions.len() < MAX_BREAKPOINTS || self.conditions.contains_key(&address) {
            self.conditions.entry(address).or_default().set(conditions);
        }
    }

    /// Adds a breakpoint at `address`. Returns whether it can be there.
    pub(crate) fn add(
        &mut self,
        subject: &dyn Subject,
        address: u64,
        kind: Kind,
    ) -> Result<bool, DebugError> {
        if let Some(armed) = self.armed.get_mut(&address) {
            *armed.wanted(kind) = true;
            return Ok(true);
        }
        if self.armed.len() >= MAX_BREAKPOINTS {
            return Ok(false);
        }
        let Some(probe) = subject.probe_at(address)? else {
            return Ok(false);
        };
        let conditions = self.conditions.entry(address).or_default().clone();
        let cause = (Cause::Breakpoint, conditions);
        let probe = match self.hold_if(subject, &probe, None, cause) {
            Ok(probe) => probe,
            Err(error) => {
                log::info!("no breakpoint at {address:#x}: {error}");
                return Ok(false);
            }
        };
        let wanted = [false; 2];
        let armed = self.armed.entry(address);
        *armed.or_insert(Armed { probe, wanted }).wanted(kind) = true;
        Ok(true)
    }

    /// Takes a breakpoint out. Returns whether there was one.
    pub(crate) fn remove(&mut self, address: u64, kind: Kind) -> bool {
        let armed = self.armed.get_mut(&address);
        armed.is_some_and(|armed| std::mem::take(armed.wanted(kind)))
    }

    /// Checks whether the client wants a breakpoint at `address`.
    pub(crate) fn is_wanted(&self, address: u64) -> bool {
        self.armed.get(&address).is_some_and(Armed::is_wanted)
    }

    /// Disarms the breakpoints, watchpoints and system calls that were taken out.
    pub(crate) fn settle(&mut self) {
        self.settle_watched();
        if self.calls.as_ref().is_some_and(|calls| !calls.wanted) {
            self.drop_calls();
        }
        let session = &mut self.session;
        self.armed.retain(|_, armed| {
            let is_wanted = armed.is_wanted();
            if !is_wanted {
                session.disable(armed.probe);
            }
            is_wanted
        });
        let armed = &self.armed;
        self.conditions
            .retain(|address, _| armed.contains_key(address));
    }

    /// Disarms the breakpoints, watchpoints and steps of a program that its process has left. The
    /// client does not take them out.
    pub(crate) fn leave_program(&mut self) {
        self.conditions.clear();
        let armed = std::mem::take(&mut self.armed);
        self.disable(armed.into_values().map(|armed| armed.probe));
        self.leave_watched();
        self.end_other_steps(None);
    }

    /// Ends the step of a thread at the first of these addresses that it reaches. Returns whether
    /// it can end at any.
    pub(crate) fn step_to(
        &mut self,
        subject: &dyn Subject,
        thread: i32,
        addresses: &[u64],
    ) -> Result<bool, DebugError> {
        let mut armed = Vec::new();
        for address in addresses {
            let Some(probe) = subject.probe_at(*address)? else {
                continue;
            };
            match self.hold_at(subject, &probe, Some(thread), Cause::Step) {
                Ok(probe) => armed.push(probe),
                Err(error) => log::info!("no step ends at {address:#x}: {error}"),
            }
        }
        let can_end = !armed.is_empty();
        self.steps.entry(thread).or_default().extend(armed);
        Ok(can_end)
    }

    /// Stops the process at these system calls, or at all. `probes` are theirs, with the causes of
    /// their stops; they are asked for if the calls are not armed yet.
    pub(crate) fn catch_calls(
        &mut self,
        subject: &dyn Subject,
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
                    match self.hold_at(subject, &probe, None, cause) {
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
        self.disable(calls.into_iter().flat_map(|calls| calls.probes));
    }

    /// Forgets the step of a thread.
    pub(crate) fn end_step(&mut self, thread: i32) {
        let step = self.steps.remove(&thread);
        self.disable(step.unwrap_or_default());
    }

    /// Forgets all steps but that of `kept`.
    pub(crate) fn end_other_steps(&mut self, kept: Option<i32>) {
        let steps = std::mem::take(&mut self.steps);
        let (kept, ended) = steps
            .into_iter()
            .partition(|(thread, _)| Some(*thread) == kept);
        self.steps = kept;
        self.disable(ended.into_values().flatten());
    }

    /// Disarms probes.
    pub(crate) fn disable(&mut self, probes: impl IntoIterator<Item = u32>) {
        for probe in probes {
            self.session.disable(probe);
        }
    }
}
