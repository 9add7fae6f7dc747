//! The answers to the protocol's requests, by the traits of `gdbstub`.

mod calls;
mod host_io;

use gdbstub::common::{Pid, Signal, Tid};
use gdbstub::target::ext::auxv::{Auxv, AuxvOps};
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{
    MultiThreadBase, MultiThreadResume, MultiThreadResumeOps, MultiThreadSchedulerLocking,
    MultiThreadSchedulerLockingOps, MultiThreadSingleStep, MultiThreadSingleStepOps,
};
use gdbstub::target::ext::breakpoints::{
    Breakpoints as BreakpointRequests, BreakpointsOps, HwBreakpoint, HwBreakpointOps, HwWatchpoint,
    HwWatchpointOps, SwBreakpoint, SwBreakpointOps, WatchKind,
};
use gdbstub::target::ext::catch_syscalls::CatchSyscallsOps;
use gdbstub::target::ext::exec_file::{ExecFile, ExecFileOps};
use gdbstub::target::ext::host_io::HostIoOps;
use gdbstub::target::ext::thread_extra_info::{ThreadExtraInfo, ThreadExtraInfoOps};
use gdbstub::target::{Target, TargetError, TargetResult};

use crate::breakpoints::Kind;
use crate::debugger::{Debugger, id};
use crate::files::copy;
use crate::registers::{Linux64, ThreadRegisters};
use crate::subject::DebugError;

/// EFAULT: the memory is not there.
const EFAULT: u8 = 14;
/// EIO: the registers are not known.
const EIO: u8 = 5;
/// EPERM: the guest is not to be changed.
const EPERM: u8 = 1;

/// Returns the guest's number of a thread.
fn number(id: Tid) -> i32 {
    i32::try_from(id.get()).unwrap_or_default()
}

impl Target for Debugger<'_> {
    type Arch = Linux64;
    type Error = DebugError;

    fn base_ops(&mut self) -> BaseOps<'_, Linux64, DebugError> {
        BaseOps::MultiThread(self)
    }

    fn use_fork_stop_reason(&self) -> bool {
        self.event_features().forks
    }

    fn use_vfork_stop_reason(&self) -> bool {
        self.event_features().forks
    }

    fn use_vforkdone_stop_reason(&self) -> bool {
        self.event_features().forks
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
    fn read_registers(&mut self, regs: &mut ThreadRegisters, tid: Tid) -> TargetResult<(), Self> {
        let registers = self.registers(number(tid));
        *regs = registers.map_err(TargetError::Fatal)?;
        Ok(())
    }

    fn write_registers(&mut self, regs: &ThreadRegisters, tid: Tid) -> TargetResult<(), Self> {
        let wanted = regs.saved.ok_or(TargetError::Errno(EIO))?;
        let changed = match self.may_write() {
            true => self.subject.change_registers(number(tid), &wanted),
            false => return Err(TargetError::Errno(EPERM)),
        };
        match changed.map_err(TargetError::Fatal)? {
            true => Ok(()),
            false => Err(TargetError::Errno(EIO)),
        }
    }

    fn read_addrs(&mut self, start: u64, data: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        match self
            .subject
            .read(number(tid), start, data)
            .map_err(TargetError::Fatal)?
        {
            0 if !data.is_empty() => Err(TargetError::Errno(EFAULT)),
            read => Ok(read),
        }
    }

    fn write_addrs(&mut self, start: u64, data: &[u8], tid: Tid) -> TargetResult<(), Self> {
        let changed = match self.may_write() {
            true => self.subject.change_memory(number(tid), start, data),
            false => return Err(TargetError::Errno(EPERM)),
        };
        match changed.map_err(TargetError::Fatal)? {
            true => Ok(()),
            false => Err(TargetError::Errno(EFAULT)),
        }
    }

    fn list_active_threads(&mut self, each: &mut dyn FnMut(Tid)) -> Result<(), DebugError> {
        let threads = self.subject.threads()?;
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
        let threads = self.subject.threads()?;
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
        self.clear_actions();
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
        self.want_step(number(tid));
        Ok(())
    }
}

impl MultiThreadSchedulerLocking for Debugger<'_> {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), DebugError> {
        self.want_alone();
        Ok(())
    }
}

impl BreakpointRequests for Debugger<'_> {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_breakpoint(&mut self) -> Option<HwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_watchpoint(&mut self) -> Option<HwWatchpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for Debugger<'_> {
    fn add_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        let added = self
            .breakpoints
            .add(&*self.subject, address, Kind::Software);
        let added = match added {
            Ok(false) if self.may_write() => {
                self.returns
                    .add(&*self.subject, &mut self.breakpoints, address)
            }
            added => added,
        };
        added.map_err(TargetError::Fatal)
    }

    fn remove_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        if self.breakpoints.remove(address, Kind::Software) {
            return Ok(true);
        }
        let removed = self
            .returns
            .remove(&*self.subject, &mut self.breakpoints, address);
        removed.map_err(TargetError::Fatal)
    }
}

impl HwBreakpoint for Debugger<'_> {
    fn add_hw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        let added = self
            .breakpoints
            .add(&*self.subject, address, Kind::Hardware);
        added.map_err(TargetError::Fatal)
    }

    fn remove_hw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.breakpoints.remove(address, Kind::Hardware))
    }
}

impl HwWatchpoint for Debugger<'_> {
    fn add_hw_watchpoint(
        &mut self,
        address: u64,
        length: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        Ok(self
            .breakpoints
            .watch(&*self.subject, address, length, kind))
    }

    fn remove_hw_watchpoint(
        &mut self,
        address: u64,
        length: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        Ok(self.breakpoints.unwatch(address, length, kind))
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
        let path = self.subject.executable().map_err(TargetError::Fatal)?;
        Ok(part(&path.unwrap_or_default(), offset, length, buf))
    }
}

impl Auxv for Debugger<'_> {
    fn get_auxv(&self, offset: u64, length: usize, buf: &mut [u8]) -> TargetResult<usize, Self> {
        let vector = self
            .subject
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
