//! The seccomp(2) filters for the listed calls.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use super::calls::{ArgumentRule, Call, EVERY_THREAD, Kind, OWN_PROCESS};

/// The filters of a thread, in the order in which they are applied: a call must pass all of them.
pub(super) type Filters = Vec<BpfProgram>;

/// Returns the filters for threads of a kind. A call that is not listed ends the process if
/// `strict`. Else it fails with ENOSYS, so that a C library of another version does without it.
pub(super) fn of(kind: Kind, strict: bool) -> Result<Filters, BackendError> {
    let absent = SeccompAction::Errno(libc::ENOSYS as u32);
    let mut listed: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for call in EVERY_THREAD.iter().chain(kind.own()) {
        let rules = listed.entry(call.number).or_default();
        rules.extend(conditions(call)?);
    }
    if !strict {
        return Ok(vec![program(listed, absent, SeccompAction::Allow)?]);
    }
    // The C library tries this call at each start of a thread, and expects old kernels to lack it.
    let tried = || BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    listed.extend(tried());
    Ok(vec![
        program(tried(), SeccompAction::Allow, absent)?,
        program(listed, SeccompAction::KillProcess, SeccompAction::Allow)?,
    ])
}

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64)?.try_into()
}

fn conditions(call: &Call) -> Result<Vec<SeccompRule>, BackendError> {
    let rule = |only: &ArgumentRule| {
        let value = match only.value {
            OWN_PROCESS => u64::from(std::process::id()),
            value => value,
        };
        let operator = SeccompCmpOp::MaskedEq(only.mask);
        let condition =
            SeccompCondition::new(only.argument, SeccompCmpArgLen::Dword, operator, value)?;
        SeccompRule::new(vec![condition])
    };
    call.only.iter().map(rule).collect()
}

/// Applies filters to this thread and those that it makes from now on.
///
/// # Errors
/// If the host's kernel has no such filters.
pub(super) fn apply(filters: &Filters) -> io::Result<()> {
    let told = |error| match error {
        seccompiler::Error::Seccomp(source) | seccompiler::Error::Prctl(source) => source,
        other => io::Error::other(other.to_string()),
    };
    let mut each = filters.iter();
    each.try_for_each(|filter| seccompiler::apply_filter(filter).map_err(told))
}
