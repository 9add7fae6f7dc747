//! The debugger's state, and its answers to the protocol's requests.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Arc;

use gdbstub::common::{Pid, Signal, Tid};
use gdbstub::stub::MultiThreadStopReason;
use gdbstub::target::ext::auxv::{Auxv, AuxvOps};
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{
    MultiThreadBase, MultiThreadResume, MultiThreadResumeOps, MultiThreadSchedulerLocking,
    MultiThreadSchedulerLockingOps, MultiThreadSingleStep, MultiThreadSingleStepOps,
};
use gdbstub::target::ext::breakpoints::{
    Breakpoints as BreakpointRequests, BreakpointsOps, SwBreakpoint, SwBreakpointOps,
};
use gdbstub::target::ext::catch_syscalls::{CatchSyscallPosition, CatchSyscallsOps};
use gdbstub::target::ext::exec_file::{ExecFile, ExecFileOps};
use gdbstub::target::ext::host_io::HostIoOps;
use gdbstub::target::ext::thread_extra_info::{ThreadExtraInfo, ThreadExtraInfoOps};
use gdbstub::target::{Target, TargetError, TargetResult};
use introspect::x86_64::GeneralRegisters;
use probes::engine::Engine;
use probes::provider::Traceable;
use vmm::machine::Paused;

use crate::breakpoints::Breakpoints;
use crate::events::{self, Ending};
use crate::files::{Files, copy};
use crate::process::{DebugError, Process};
use crate::registers::{Linux64, UserRegisters};
use crate::step::successors;
use crate::stops::{Cause, Stop, Stops};

/// The length of the longest instruction in bytes.
const LONGEST_INSTRUCTION: usize = 15;
/// EFAULT: the memory is not there.
const EFAULT: u8 = 14;
/// EIO: the registers are not known.
const EIO: u8 = 5;
/// EPERM: the guest is not to be changed.
const EPERM: u8 = 1;

/// A debugger of one process.
pub(crate) struct Debugger<'g> {
    pub(crate) process: Process<'g>,
    pub(crate) breakpoints: Breakpoints,
    pub(crate) files: Files,
    stops: Arc<Stops>,
    /// Keeps the machine paused while the client looks at it.
    hold: Option<Paused>,
    /// The thread that the client wants to step.
    step: Option<i32>,
    /// Whether the other threads are to stand still meanwhile.
    alone: bool,
    /// The threads that were seen to begin their exit. The kernel marks them later: while the process
    /// dumps core, they wait.
    exiting: BTreeSet<i32>,
    /// The thread that has stopped at the return of a system call, and the result, which the kernel
    /// has not put into its registers yet.
    returned: Option<(i32, u64)>,
    /// Whether the client may change registers and memory.
    may_write: bool,
    /// The events that cannot be seen, one sentence each.
    pub(crate) unseen: Vec<String>,
}

fn id(thread: i32) -> Option<Tid> {
    usize::try_from(thread).ok().and_then(NonZeroUsize::new)
}

fn number(id: Tid) -> i32 {
    i32::try_from(id.get()).unwrap_or_default()
}

impl<'g> Debugger<'g> {
    /// Pauses the guest and attaches to a process of it.
    ///
    /// # Errors
    /// If there is no such process, or the guest cannot be stopped at its events.
    pub(crate) fn attach(
        guest: &'g dyn Traceable,
        engine: &Engine,
        pid: i32,
        may_write: bool,
    ) -> Result<Self, DebugError> {
        let hold = guest.machine().pause();
        let process = Process::new(guest, pid)?;
        let stops = Arc::<Stops>::default();
        let mut breakpoints = Breakpoints::new(engine, pid, stops.clone())?;
        let unseen = events::watch(&process, &mut breakpoints)?;
        Ok(Self {
            process,
            breakpoints,
            files: Files::default(),
            stops,
            hold: Some(hold),
            step: None,
            alone: false,
            exiting: BTreeSet::new(),
            returned: None,
            may_write,
            unseen,
        })
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
        }
        self.stops.let_alone(alone);
        self.process.goes_on();
        self.hold = None;
    }

    /// Arms the ends of a step.
    fn begin_step(&mut self, thread: i32) -> Result<(), DebugError> {
        let registers = self.process.registers(thread)?;
        let Some(saved) = registers.saved else {
            return Ok(());
        };
        let general = saved.general;
        let mut code = [0; LONGEST_INSTRUCTION];
        let read = self.process.read(general.rip, &mut code)?;
        let code = code.get(..read).unwrap_or_default();
        let ends = successors(code, &general, registers.fs_base, &|address| {
            self.word(address)
        });
        if !self.breakpoints.step_to(&self.process, thread, &ends)? {
            // Code that is in no file, such as the vdso: it is left before the step ends.
            let callers = self.callers(&general, code);
            self.breakpoints.step_to(&self.process, thread, &callers)?;
        }
        Ok(())
    }

    /// Returns the places to which a function returns that is entered next.
    fn callers(&self, general: &GeneralRegisters, code: &[u8]) -> Vec<u64> {
        let mut decoder =
            iced_x86::Decoder::with_ip(64, code, general.rip, iced_x86::DecoderOptions::NONE);
        let next = decoder.decode().next_ip();
        let returned = self.word(general.rsp);
        [Some(next), returned].into_iter().flatten().collect()
    }

    fn word(&self, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        let read = self.process.read(address, &mut word).ok()?;
        (read == word.len()).then(|| u64::from_le_bytes(word))
    }

    /// Returns the next stop to report. The machine stands still then.
    pub(crate) fn next_stop(&mut self) -> Option<MultiThreadStopReason<u64>> {
        while let Some(stop) = self.stops.next() {
            let Some(reason) = self.judge(&stop) else {
                continue;
            };
            let returned = stop.returned;
            self.stand_still(stop.hold);
            self.returned = returned.map(|result| (stop.thread, result));
            return Some(reason);
        }
        None
    }

    /// Pauses the machine, if a hit has not done so, and forgets the step in progress.
    fn stand_still(&mut self, hold: Option<Paused>) {
        let hold = hold.unwrap_or_else(|| self.process.guest().machine().pause());
        self.hold = Some(hold);
        self.stops.let_alone(None);
        self.breakpoints.end_step();
        self.step = None;
        self.alone = false;
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
            Cause::Step => {
                let signal = Signal::SIGTRAP;
                let ended = self.step == Some(stop.thread);
                ended.then_some(MultiThreadStopReason::SignalWithThread { tid, signal })
            }
            Cause::Signal | Cause::Fault => {
                let signal = events::signal(stop.argument);
                Some(MultiThreadStopReason::SignalWithThread { tid, signal })
            }
            Cause::Exit => {
                self.exiting.insert(stop.thread);
                let threads = self.process.threads().unwrap_or_default();
                let is_last = threads
                    .iter()
                    .all(|thread| thread.is_exiting || self.exiting.contains(&thread.number));
                is_last.then(|| match events::ending(stop.argument) {
                    Ending::Exited(code) => MultiThreadStopReason::Exited(code),
                    Ending::Killed(signal) => MultiThreadStopReason::Terminated(signal),
                })
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

    /// Stops the process at the client's request. Returns the report.
    pub(crate) fn interrupt(&mut self) -> MultiThreadStopReason<u64> {
        self.stand_still(None);
        let threads = self.process.threads().unwrap_or_default();
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
        self.stops.clear();
    }
}

impl Target for Debugger<'_> {
    type Arch = Linux64;
    type Error = DebugError;

    fn base_ops(&mut self) -> BaseOps<'_, Linux64, DebugError> {
        BaseOps::MultiThread(self)
    }

    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }

    fn support_catch_syscalls(&mut self) -> Option<CatchSyscallsOps<'_, Self>> {
        Some(self)
    }

    fn support_exec_file(&mut self) -> Option<ExecFileOps<'_, Self>> {
        Some(self)
    }

    fn support_auxv(&mut self) -> Option<AuxvOps<'_, Self>> {
        Some(self)
    }

    fn support_host_io(&mut self) -> Option<HostIoOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadBase for Debugger<'_> {
    fn read_registers(&mut self, regs: &mut UserRegisters, tid: Tid) -> TargetResult<(), Self> {
        let thread = number(tid);
        let registers = self.process.registers(thread);
        *regs = registers.map_err(TargetError::Fatal)?;
        if let (Some(saved), Some((returned, result))) = (&mut regs.saved, self.returned)
            && returned == thread
        {
            saved.general.rax = result;
        }
        Ok(())
    }

    fn write_registers(&mut self, regs: &UserRegisters, tid: Tid) -> TargetResult<(), Self> {
        let wanted = regs.saved.ok_or(TargetError::Errno(EIO))?;
        let changed = match self.may_write {
            true => self.process.change_registers(number(tid), &wanted),
            false => return Err(TargetError::Errno(EPERM)),
        };
        match changed.map_err(TargetError::Fatal)? {
            true => Ok(()),
            false => Err(TargetError::Errno(EIO)),
        }
    }

    fn read_addrs(&mut self, start: u64, data: &mut [u8], _: Tid) -> TargetResult<usize, Self> {
        match self.process.read(start, data).map_err(TargetError::Fatal)? {
            0 if !data.is_empty() => Err(TargetError::Errno(EFAULT)),
            read => Ok(read),
        }
    }

    fn write_addrs(&mut self, start: u64, data: &[u8], _: Tid) -> TargetResult<(), Self> {
        let changed = match self.may_write {
            true => self.process.change_memory(start, data),
            false => return Err(TargetError::Errno(EPERM)),
        };
        match changed.map_err(TargetError::Fatal)? {
            true => Ok(()),
            false => Err(TargetError::Errno(EFAULT)),
        }
    }

    fn list_active_threads(&mut self, each: &mut dyn FnMut(Tid)) -> Result<(), DebugError> {
        let threads = self.process.threads()?;
        threads
            .iter()
            .filter_map(|thread| id(thread.number))
            .for_each(each);
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }

    fn support_thread_extra_info(&mut self) -> Option<ThreadExtraInfoOps<'_, Self>> {
        Some(self)
    }
}

impl ThreadExtraInfo for Debugger<'_> {
    fn thread_extra_info(&self, tid: Tid, buf: &mut [u8]) -> Result<usize, DebugError> {
        let threads = self.process.threads()?;
        let thread = threads.iter().find(|thread| thread.number == number(tid));
        Ok(thread.map_or(0, |thread| copy(thread.description.as_bytes(), buf)))
    }
}

impl MultiThreadResume for Debugger<'_> {
    /// The machine goes on in [`Debugger::go_on`], once no earlier hit waits.
    fn resume(&mut self) -> Result<(), DebugError> {
        Ok(())
    }

    fn clear_resume_actions(&mut self) -> Result<(), DebugError> {
        self.step = None;
        self.alone = false;
        Ok(())
    }

    /// All threads go on unless they step. A signal is delivered as the guest has sent it.
    fn set_resume_action_continue(&mut self, _: Tid, _: Option<Signal>) -> Result<(), DebugError> {
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadSingleStep for Debugger<'_> {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), DebugError> {
        self.step = Some(number(tid));
        Ok(())
    }
}

impl MultiThreadSchedulerLocking for Debugger<'_> {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), DebugError> {
        self.alone = true;
        Ok(())
    }
}

impl BreakpointRequests for Debugger<'_> {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for Debugger<'_> {
    fn add_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        let added = self.breakpoints.add(&self.process, address);
        added.map_err(TargetError::Fatal)
    }

    fn remove_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.breakpoints.remove(address))
    }
}

impl ExecFile for Debugger<'_> {
    fn get_exec_file(
        &self,
        _: Option<Pid>,
        offset: u64,
        length: usize,
        buf: &mut [u8],
    ) -> TargetResult<usize, Self> {
        let path = self.process.executable().map_err(TargetError::Fatal)?;
        Ok(part(&path.unwrap_or_default(), offset, length, buf))
    }
}

impl Auxv for Debugger<'_> {
    fn get_auxv(&self, offset: u64, length: usize, buf: &mut [u8]) -> TargetResult<usize, Self> {
        let vector = self
            .process
            .auxiliary_vector()
            .map_err(TargetError::Fatal)?;
        Ok(part(&vector, offset, length, buf))
    }
}

/// Copies a part of a text that the client asks for. Returns the number of bytes.
fn part(whole: &[u8], offset: u64, length: usize, buf: &mut [u8]) -> usize {
    let from = usize::try_from(offset).unwrap_or(usize::MAX);
    let rest = whole.get(from..).unwrap_or_default();
    let rest = rest.get(..length.min(rest.len())).unwrap_or_default();
    copy(rest, buf)
}
