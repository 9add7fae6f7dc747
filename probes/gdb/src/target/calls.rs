//! System calls that the client wants to stop at (`catch syscall`), as probes of their entries and
//! returns.

use gdbstub::target::TargetResult;
use gdbstub::target::ext::catch_syscalls::{CatchSyscalls, SyscallNumbers};
use probes::name::ProbePattern;
use probes::probe::{Moment, Probe, Target};
use probes::provider::{self, Traceable};

use crate::debugger::Debugger;
use crate::stops::Cause;

/// All system calls.
const ALL: &str = "syscall:*:";

impl CatchSyscalls for Debugger<'_> {
    fn enable_catch_syscalls(
        &mut self,
        filter: Option<SyscallNumbers<'_, u64>>,
    ) -> TargetResult<(), Self> {
        let numbers = filter.map(Iterator::collect);
        let subject = &*self.subject;
        self.breakpoints
            .catch_calls(subject, numbers, |numbers| probes(subject.guest(), numbers));
        Ok(())
    }

    fn disable_catch_syscalls(&mut self) -> TargetResult<(), Self> {
        self.breakpoints.release_calls();
        Ok(())
    }
}

/// Returns the probes of these system calls, or of all, with the causes of their stops.
fn probes(guest: &dyn Traceable, numbers: Option<&[u64]>) -> Vec<(Probe, Cause)> {
    let all = ProbePattern::parse(ALL).ok();
    let all = all.and_then(|all| provider::find(guest, &all).ok());
    let wanted = |probe: Probe| {
        let Target::SystemCall { number, moment } = probe.target else {
            return None;
        };
        let is_wanted = numbers.is_none_or(|numbers| numbers.contains(&u64::from(number)));
        let returns = moment == Moment::Return;
        is_wanted.then_some((probe, Cause::SystemCall { number, returns }))
    };
    all.unwrap_or_default()
        .into_iter()
        .filter_map(wanted)
        .collect()
}
