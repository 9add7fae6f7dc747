//! The filter of the older layout: one number, compared with that of the process or of the thread.

use probes::engine::{Filter, Match};

use crate::dt::{Errno, Mode, Refused, abi};

const OPERAND_NONE: u32 = 0;
const OPERAND_EQUAL: u32 = 1;
const OPERAND_NOT_EQUAL: u32 = 2;
const VARIABLE_NONE: u32 = 0;
const VARIABLE_PROCESS: u32 = 1;
const VARIABLE_THREAD: u32 = 2;

/// Checks a filter from a client.
///
/// # Errors
/// `EINVAL` for undefined numbers.
pub(super) fn check_filter(filter: &abi::Filter) -> Result<(), Refused> {
    let abi::Filter {
        operand, variable, ..
    } = filter;
    if *operand > OPERAND_NOT_EQUAL || *variable > VARIABLE_THREAD {
        let why = format!("a filter of operand {operand} and variable {variable}; 0 to 2 each");
        return Err(Refused::new(Errno::Einval, why));
    }
    Ok(())
}

/// Converts a client's filter to the engine's.
pub(super) fn filter(wanted: &abi::Filter, mode: Mode) -> Filter {
    fn compared(operand: u32, value: u32) -> Match<u32> {
        match operand {
            OPERAND_EQUAL => Match::In(vec![value]),
            _ => Match::NotIn(vec![value]),
        }
    }
    let mut filter = Filter::default();
    let (operand, value) = (wanted.operand, wanted.value);
    match (operand, wanted.variable) {
        (OPERAND_NONE, _) => {}
        // Without a variable, the value is compared with 0.
        (OPERAND_EQUAL, VARIABLE_NONE) if value != 0 => filter.pids = Match::In(Vec::new()),
        (OPERAND_NOT_EQUAL, VARIABLE_NONE) if value == 0 => filter.pids = Match::In(Vec::new()),
        (_, VARIABLE_NONE) => {}
        (_, VARIABLE_PROCESS) => filter.pids = compared(operand, value),
        _ => {
            filter.tids = match value.checked_sub(mode.thread_offset()) {
                Some(value) => compared(operand, value),
                // No thread has such a number.
                None if operand == OPERAND_EQUAL => Match::In(Vec::new()),
                None => Match::Any,
            }
        }
    }
    filter
}
