//! Finds the arguments of a tracepoint at the branch to its call, and the record that the kernel
//! would write for its event.

use std::ops::ControlFlow;

use introspect::Gva;
use vmm::StoppedVcpu;
use vmm::speculation::{SpeculationError, SpeculationResult};

use crate::event::MAX_ARGUMENTS;
use crate::fields::{MOST_BYTES, RECORD, RecordText};
use crate::probe::TracepointText;

/// The most instructions from the branch to the call. Those in between compute arguments.
const STEPS: usize = 512;
/// The most instructions that fill a record. Long texts are copied byte by byte.
const RECORD_STEPS: usize = 1 << 14;
/// The size in bytes of what stands in for a `trace_event_file`. Zeros mean that the event is on,
/// without triggers and filters.
const FILE: u64 = 1024;
/// The first opcode bytes of JMP with 8 and 32 bits of distance.
const JUMPS: [u8; 2] = [0xeb, 0xe9];

/// A tracepoint's call, as the kernel would make it.
#[derive(Debug)]
pub(super) struct Call<'c> {
    /// The arguments behind the first one, which is the listener's own.
    pub(super) arguments: [u64; MAX_ARGUMENTS],
    path: SpeculationResult<'c>,
    /// Whether the path has ended in the called function, and not at the CALL.
    is_entered: bool,
}

/// The reason that there is no record.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordError {
    /// The code cannot be followed.
    #[error(transparent)]
    Speculation(#[from] SpeculationError),
    /// The record is too large.
    #[error("the record has {0} bytes, more than {MOST_BYTES}")]
    Size(u64),
}

impl Call<'_> {
    /// Returns the record that the event's own listener would write. The function that makes room
    /// for it is not followed.
    ///
    /// # Errors
    /// If speculation cannot follow the rest, or the record is too large.
    pub(super) fn record(mut self, text: &RecordText) -> Result<Vec<u8>, RecordError> {
        let path = &mut self.path;
        path.put_scratch(Gva(RECORD - FILE), FILE as usize + MOST_BYTES);
        path.enter(text.writer, RECORD - FILE, self.is_entered)?;
        let until = |end: Gva| {
            move |at| match at == end {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(at),
            }
        };
        path.follow(RECORD_STEPS, until(text.reserve))?;
        let size = path.registers().rdx;
        if size > MOST_BYTES as u64 {
            return Err(RecordError::Size(size));
        }
        path.return_at_once(RECORD)?;
        path.follow(RECORD_STEPS, until(text.commit))?;
        let record = path.scratch().iter().skip(FILE as usize);
        Ok(record.take(size as usize).copied().collect())
    }
}

/// Returns the call by which the kernel would tell the tracepoint's listeners, from the branch at
/// `site`, which leads to `target`. `None` if it would call none. Either the tracepoint has a
/// condition that is not met, or the call belongs to another branch. That branch has a trap of its
/// own if the guest itself listens.
///
/// # Errors
/// If speculation cannot follow the code.
pub(super) fn call<'c>(
    cpu: &'c StoppedVcpu<'_>,
    text: &TracepointText,
    site: Gva,
    target: Gva,
) -> Result<Option<Call<'c>>, SpeculationError> {
    enum Met {
        /// The CALL of one of the listeners' functions.
        CallSite,
        /// The entry of one of these functions.
        Called,
        /// The code behind the branch.
        Behind,
    }
    let mut other = None;
    // A single listener is called directly, through a function of its own.
    let direct = text.calls.iter().filter_map(|call| jump_target(cpu, *call));
    let calls: Vec<Gva> = text.calls.iter().copied().chain(direct).collect();
    // Listeners are forced: the structure is read as their list, which starts with a function and
    // its data.
    let forced = [(text.listeners, text.structure.0)];
    let behind = [Gva(site.0.wrapping_add(2)), Gva(site.0.wrapping_add(5))];
    let met = cpu.speculate(target, STEPS, &forced, |at| {
        if text.call_sites.contains(&at) {
            return ControlFlow::Break(Met::CallSite);
        }
        if calls.contains(&at) {
            return ControlFlow::Break(Met::Called);
        }
        if behind.contains(&at) {
            return ControlFlow::Break(Met::Behind);
        }
        let branch = text
            .branches
            .iter()
            .find(|(from, _)| *from == at && at != site);
        match branch {
            Some((from, to)) => {
                other = Some(*from);
                ControlFlow::Continue(*to)
            }
            None => ControlFlow::Continue(at),
        }
    });
    let (met, mut path) = match met {
        // If the compiler knows the condition, the code need not return to behind the branch.
        Err(SpeculationError::Returned { .. }) => return Ok(None),
        met => met?,
    };
    let is_trapped = |branch: Gva| text.sites.iter().any(|(site, _)| *site == branch);
    let is_told_there = other.is_some_and(|other| is_trapped(other) && is_taken(cpu, other));
    if matches!(met, Met::Behind) || is_told_there {
        return Ok(None);
    }
    // The call's first argument is the listener's own; the seventh is on the stack.
    let r = path.registers();
    let is_entered = matches!(met, Met::Called);
    let return_address = if is_entered { 8 } else { 0 };
    let last = path.word(Gva(r.rsp.wrapping_add(return_address)));
    let last = last.unwrap_or_default();
    Ok(Some(Call {
        arguments: [r.rsi, r.rdx, r.rcx, r.r8, r.r9, last],
        path,
        is_entered,
    }))
}

/// Returns the target of the jump that a trampoline consists of.
fn jump_target(cpu: &StoppedVcpu<'_>, trampoline: Gva) -> Option<Gva> {
    let code = cpu.code(trampoline);
    let distance = match code.as_slice() {
        [0xe9, distance @ ..] => i32::from_le_bytes(distance.get(..4)?.try_into().ok()?),
        _ => return None,
    };
    let next = trampoline.0.wrapping_add(5);
    Some(Gva(next.wrapping_add_signed(i64::from(distance))))
}

/// Checks whether the guest has enabled a branch.
fn is_taken(cpu: &StoppedVcpu<'_>, branch: Gva) -> bool {
    let code = cpu.code(branch);
    code.first().is_some_and(|opcode| JUMPS.contains(opcode))
}
