//! The debugger's state: the traps of a process or the kernel, the hold of the machine, and which
//! hits are reported.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::Arc;

use gdbstub::common::{Signal, Tid};
use gdbstub::stub::MultiThreadStopReason;
use gdbstub::target::ext::catch_syscalls::CatchSyscallPosition;
use probes::engine::Engine;
use probes::provider::Traceable;
use vmm::machine::Paused;

use crate::breakpoints::Breakpoints;
use crate::called::Returns;
use crate::events::{self, Ending};
use crate::files::Files;
use crate::fork_exec::{EventFeatures, StopEvent, waits_for_child};
use crate::kernel::Kernel;
use crate::process::Process;
use crate::registers::ThreadRegisters;
use crate::settle::settle;
use crate::step::{callers, successors};
use crate::stops::{Cause, Stop, Stops};
use crate::subject::{DebugError, Subject};

/// The length of the longest instruction in bytes.
const LONGEST_INSTRUCTION: usize = 15;

/// Returns the protocol's number of a thread.
pub(crate) fn id(thread: i32) -> Option<Tid> {
    usize::try_from(thread).ok().and_then(NonZeroUsize::new)
}

/// A debugger of one process, or of the kernel.
pub(crate) struct Debugger<'g> {
    pub(crate) subject: Box<dyn Subject + 'g>,
    pub(crate) breakpoints: Breakpoints,
    pub(crate) files: Files,
    pub(crate) returns: Returns,
    stops: Arc<Stops>,
    /// Keeps the machine paused while the client looks at it.
    hold: Option<Paused>,
    /// The thread that the client wants to step.
    step: Option<i32>,
    /// Whether the other threads stay where they are meanwhile.
    alone: bool,
    /// The threads that were seen to begin their exit. The kernel marks them later: while the
    /// process dumps core, they wait.
    exiting: BTreeSet<i32>,
    /// Whether it is a process, which may have children and run other programs.
    is_process: bool,
    /// The forks and execs that it stops at.
    event_features: EventFeatures,
    /// The threads that wait for a child, with the probes where they go on.
    waiting: BTreeMap<i32, u32>,
    /// The event behind the last stop.
    stop_event: Option<StopEvent>,
    /// The thread that has stopped at the return of a system call, and the result, which the kernel
    /// has not put into its registers yet.
    returned: Option<(i32, u64)>,
    /// Whether the client may change registers and memory.
    may_write: bool,
    /// The events that cannot be seen, one sentence each.
    pub(crate) unseen: Vec<String>,
}

impl<'g> Debugger<'g> {
    /// Pauses the guest and attaches to a process of it, or to its kernel without one.
    ///
    /// # Errors
    /// If there is no such process, or the guest cannot be stopped at its events.
    pub(crate) fn attach(
        guest: &'g dyn Traceable,
        engine: &Engine,
        pid: Option<i32>,
        may_write: bool,
    ) -> Result<Self, DebugError> {
        let mut hold = guest.machine().pause();
        let stops = Arc::<Stops>::default();
        let mut breakpoints = Breakpoints::new(engine, stops.clone())?;
        let (subject, unseen): (Box<dyn Subject + 'g>, _) = match pid {
            Some(pid) => {
                let process = Process::new(guest, pid)?;
                hold = settle(&process, hold);
                let unseen = events::watch(&process, &mut breakpoints)?;
                (Box::new(process), unseen)
            }
            None => {
                let kernel = Kernel::new(guest);
                let unseen = events::watch_kernel(&kernel, &mut breakpoints)?;
                (Box::new(kernel), unseen)
            }
        };
        Ok(Self {
            subject,
            breakpoints,
            files: Files::default(),
            returns: Returns::default(),
            stops,
            hold: Some(hold),
            step: None,
            alone: false,
            exiting: BTreeSet::new(),
            is_process: pid.is_some(),
            event_features: EventFeatures::default(),
            waiting: BTreeMap::new(),
            stop_event: None,
            returned: None,
            may_write,
            unseen,
        })
    }

    /// Stops the process at the forks and execs that the client understands. Returns those
    /// that it stops at.
    pub(crate) fn watch_forks_and_execs(&mut self, wanted: EventFeatures) -> EventFeatures {
        if self.is_process && self.event_features == EventFeatures::default() {
            let watched =
                events::watch_forks_and_execs(&*self.subject, &mut self.breakpoints, wanted);
            self.event_features = watched.unwrap_or_else(|error| {
                log::info!("children and new programs are not seen: {error}");
                EventFeatures::default()
            });
        }
        self.event_features
    }

    /// Returns the forks and execs that it stops at.
    pub(crate) fn event_features(&self) -> EventFeatures {
        self.event_features
    }

    /// Returns the event behind the last stop, once.
    pub(crate) fn stop_event(&mut self) -> Option<StopEvent> {
        self.stop_event.take()
    }

    /// Returns the registers of a thread as they will be when it goes on.
    ///
    /// # Errors
    /// If the process cannot be read.
    pub(crate) fn registers(&self, thread: i32) -> Result<ThreadRegisters, DebugError> {
        let mut registers = self.subject.registers(thread)?;
        if let (Some(saved), Some((returned, result))) = (&mut registers.saved, self.returned)
            && returned == thread
        {
            saved.general.rax = result;
        }
        Ok(registers)
    }

    /// Checks whether the client may change registers and memory.
    pub(crate) fn may_write(&self) -> bool {
        self.may_write
    }

    /// Forgets how the client wanted to go on.
    pub(crate) fn clear_actions(&mut self) {
        self.step = None;
        self.alone = false;
    }

    /// Makes a thread stop after its next instruction.
    pub(crate) fn want_step(&mut self, thread: i32) {
        self.step = Some(thread);
    }

    /// Keeps the other threads where they are while one steps.
    pub(crate) fn want_alone(&mut self) {
        self.alone = true;
    }

    /// Lets the machine go on as the client has asked.
    pub(crate) fn go_on(&mut self) {
        if self.hold.is_none() {
            return;
        }
        if let Some(thread) = self.step
            && let Err(error) = self.begin_step(thread)
        {
            log::info!("thread {thread} runs on instead of a step: {error}");
        }
        let alone = self.step.filter(|_| self.alone);
        if alone.is_none() {
            self.breakpoints.settle();
            self.breakpoints.end_other_steps(self.step);
        }
        self.stops.let_alone(alone);
        self.subject.goes_on();
        self.hold = None;
    }

    /// Arms the ends of a step.
    fn begin_step(&mut self, thread: i32) -> Result<(), DebugError> {
        self.breakpoints.end_step(thread);
        let registers = self.subject.registers(thread)?;
        let Some(saved) = registers.saved else {
            return Ok(());
        };
        let general = saved.general;
        let mut code = [0; LONGEST_INSTRUCTION];
        let read = self.subject.read(thread, general.rip, &mut code)?;
        let code = code.get(..read).unwrap_or_default();
        let ends = successors(code, &general, registers.fs_base, &|address| {
            self.word(thread, address)
        });
        if !self.breakpoints.step_to(&*self.subject, thread, &ends)? {
            // Code that is in no file, such as the vdso: it is left before the step ends.
            let callers = callers(code, &general, &|address| self.word(thread, address));
            self.breakpoints.step_to(&*self.subject, thread, &callers)?;
        }
        Ok(())
    }

    fn word(&self, thread: i32, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        let read = self.subject.read(thread, address, &mut word).ok()?;
        (read == word.len()).then(|| u64::from_le_bytes(word))
    }

    /// Returns the next stop to report. The machine is paused then.
    pub(crate) fn next_stop(&mut self) -> Option<MultiThreadStopReason<u64>> {
        while let Some(stop) = self.stops.next() {
            let Some(reason) = self.judge(&stop) else {
                continue;
            };
            let returned = stop.returned;
            self.breakpoints.end_step(stop.thread);
            self.pause(stop.hold);
            self.returned = returned.map(|result| (stop.thread, result));
            return Some(reason);
        }
        None
    }

    /// Pauses the machine, if a hit has not done so, and forgets how the client wanted to go on.
    fn pause(&mut self, hold: Option<Paused>) {
        let hold = hold.unwrap_or_else(|| self.subject.guest().machine().pause());
        self.hold = Some(hold);
        self.stops.let_alone(None);
        self.clear_actions();
        self.returned = None;
    }

    /// Returns the report of a hit; `None` if the client does not want it.
    fn judge(&mut self, stop: &Stop) -> Option<MultiThreadStopReason<u64>> {
        let tid = id(stop.thread)?;
        match stop.cause {
            Cause::Breakpoint => {
                let is_wanted = self.breakpoints.is_wanted(stop.address);
                is_wanted.then_some(MultiThreadStopReason::SwBreak(tid))
            }
            Cause::Returned => {
                let arrived = self.returns.arrive(&*self.subject, stop.thread);
                let arrived = arrived.unwrap_or_default();
                arrived.then_some(MultiThreadStopReason::SwBreak(tid))
            }
            Cause::Watch { address, kind } => {
                let is_wanted = self.breakpoints.wants_access(address, kind);
                let addr = address;
                is_wanted.then_some(MultiThreadStopReason::Watch { tid, kind, addr })
            }
            Cause::Step => {
                let signal = Signal::SIGTRAP;
                let ended = self.step == Some(stop.thread);
                ended.then_some(MultiThreadStopReason::SignalWithThread { tid, signal })
            }
            Cause::Signal | Cause::Fault => {
                let signal = events::signal(stop.argument);
                Some(MultiThreadStopReason::SignalWithThread { tid, signal })
            }
            Cause::Panic => {
                let signal = Signal::SIGABRT;
                Some(MultiThreadStopReason::SignalWithThread { tid, signal })
            }
            Cause::Exit => {
                self.exiting.insert(stop.thread);
                if self.step == Some(stop.thread) {
                    // It has no next instruction for which the others would wait.
                    self.stops.let_alone(None);
                }
                let threads = self.subject.threads().unwrap_or_default();
                let is_last = threads
                    .iter()
                    .all(|thread| thread.is_exiting || self.exiting.contains(&thread.number));
                is_last.then(|| match events::ending(stop.argument) {
                    Ending::Exited(code) => MultiThreadStopReason::Exited(code),
                    Ending::Killed(signal) => MultiThreadStopReason::Terminated(signal),
                })
            }
            Cause::Child => {
                let child = self.subject.child_at(stop.argument).ok().flatten()?;
                let waits = self.wait_for_child(stop.thread);
                let new_tid = id(child)?;
                self.stop_event = Some(StopEvent::Child {
                    thread: stop.thread,
                    child,
                    waits,
                });
                Some(match waits {
                    true => MultiThreadStopReason::VFork {
                        cur_tid: tid,
                        new_tid,
                    },
                    false => MultiThreadStopReason::Fork {
                        cur_tid: tid,
                        new_tid,
                    },
                })
            }
            Cause::ChildLeft => {
                let probe = self.waiting.remove(&stop.thread)?;
                self.breakpoints.disable([probe]);
                Some(MultiThreadStopReason::VForkDone(tid))
            }
            Cause::Program if stop.returned != Some(0) => None,
            Cause::Program => {
                self.leave_program();
                self.stop_event = Some(StopEvent::Program {
                    thread: stop.thread,
                    path: self.subject.executable().ok().flatten().unwrap_or_default(),
                });
                // `gdbstub` has none of its own for this.
                Some(MultiThreadStopReason::Library(tid))
            }
            Cause::SystemCall { .. } if !self.breakpoints.wants_calls() => None,
            Cause::SystemCall { number, returns } => {
                let position = match returns {
                    true => CatchSyscallPosition::Return,
                    false => CatchSyscallPosition::Entry,
                };
                Some(MultiThreadStopReason::CatchSyscall {
                    tid: Some(tid),
                    number: u64::from(number),
                    position,
                })
            }
        }
    }

    /// Prepares the report of the moment at which a thread goes on that waits for a child's program
    /// or end. Returns whether there will be one.
    fn wait_for_child(&mut self, thread: i32) -> bool {
        let saved = self.subject.registers(thread).ok();
        let Some(saved) = saved.and_then(|registers| registers.saved) else {
            return false;
        };
        if !waits_for_child(&saved, |address| self.word(thread, address)) {
            return false;
        }
        let subject = &*self.subject;
        let probe = subject.probe_at(saved.general.rip).ok().flatten();
        let held = probe.map(|probe| {
            self.breakpoints
                .hold_at(subject, &probe, Some(thread), Cause::ChildLeft)
        });
        match held {
            Some(Ok(probe)) => {
                let earlier = self.waiting.insert(thread, probe);
                self.breakpoints.disable(earlier);
                true
            }
            // A client that waits for that report in vain keeps its breakpoints out.
            _ => false,
        }
    }

    /// Forgets all that belongs to a program that the process has left.
    fn leave_program(&mut self) {
        self.breakpoints.leave_program();
        self.returns.leave_program(&mut self.breakpoints);
        self.breakpoints
            .disable(std::mem::take(&mut self.waiting).into_values());
        // One thread is left, with the number of the first.
        self.exiting.clear();
    }

    /// Stops the process at the client's request. Returns the report.
    pub(crate) fn interrupt(&mut self) -> MultiThreadStopReason<u64> {
        let mut hold = self.subject.guest().machine().pause();
        if self.is_process {
            hold = settle(&*self.subject, hold);
        }
        self.pause(Some(hold));
        self.breakpoints.end_other_steps(None);
        let threads = self.subject.threads().unwrap_or_default();
        let running = threads.iter().find(|thread| thread.is_running);
        let thread = running.or(threads.first());
        let signal = Signal::SIGINT;
        match thread.and_then(|thread| id(thread.number)) {
            Some(tid) => MultiThreadStopReason::SignalWithThread { tid, signal },
            None => MultiThreadStopReason::Signal(signal),
        }
    }
}

impl Drop for Debugger<'_> {
    fn drop(&mut self) {
        // Before the traps go, so that no vCPU waits for a hit that nobody reports.
        self.stops.let_alone(None);
        self.stops.close();
    }
}
