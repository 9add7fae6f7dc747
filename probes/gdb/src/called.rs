//! Functions of the program that the client calls (`call`, `print FUNCTION()`).
//!
//! On Linux gdb lets such a function return to an address on the stack, and sets a breakpoint
//! there. Nothing is executed on the stack, and no trap can stand there. So the function returns to
//! the program's entry instead, which no program runs twice, and the thread is reported where the
//! client expects it.

use crate::breakpoints::Breakpoints;
use crate::stops::Cause;
use crate::subject::{DebugError, Subject};

/// The type of the program's entry in the auxiliary vector (include/uapi/linux/auxvec.h).
const AT_ENTRY: u64 = 9;
/// The size of a word in bytes.
const WORD: u64 = 8;

/// The return of a function that the client calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Return {
    /// The address of the client's breakpoint.
    address: u64,
    /// The place of the return address on the stack.
    slot: u64,
    thread: i32,
    /// The probe at the program's entry.
    probe: u32,
}

/// The returns that the client waits for.
#[derive(Debug, Default)]
pub(crate) struct Returns(Vec<Return>);

impl Returns {
    /// Lets the function that a thread is about to run return to the program's entry, if it would
    /// return to `address`. Returns whether there is such a thread.
    ///
    /// # Errors
    /// If the process cannot be read.
    pub(crate) fn add(
        &mut self,
        subject: &dyn Subject,
        breakpoints: &mut Breakpoints,
        address: u64,
    ) -> Result<bool, DebugError> {
        let Some((thread, slot)) = caller(subject, address)? else {
            return Ok(false);
        };
        let Some(entry) = entry(&subject.auxiliary_vector()?) else {
            return Ok(false);
        };
        let Some(probe) = subject.probe_at(entry)? else {
            return Ok(false);
        };
        let probe = breakpoints.hold_at(subject, &probe, Some(thread), Cause::Returned)?;
        if !subject.change_memory(thread, slot, &entry.to_le_bytes())? {
            breakpoints.disable([probe]);
            return Ok(false);
        }
        self.0.push(Return {
            address,
            slot,
            thread,
            probe,
        });
        Ok(true)
    }

    /// Restores the client's return address on the stack, as the client reads memory now. Returns
    /// whether it was replaced.
    ///
    /// # Errors
    /// If the process cannot be changed.
    pub(crate) fn remove(
        &mut self,
        subject: &dyn Subject,
        breakpoints: &mut Breakpoints,
        address: u64,
    ) -> Result<bool, DebugError> {
        let Some(at) = self.0.iter().position(|known| known.address == address) else {
            return Ok(false);
        };
        let known = self.0.remove(at);
        breakpoints.disable([known.probe]);
        subject.change_memory(known.thread, known.slot, &address.to_le_bytes())?;
        Ok(true)
    }

    /// Forgets the functions of a program that its process has left.
    pub(crate) fn leave_program(&mut self, breakpoints: &mut Breakpoints) {
        let left = std::mem::take(&mut self.0);
        breakpoints.disable(left.into_iter().map(|known| known.probe));
    }

    /// Moves a thread that has returned to where the client expects it. Returns whether it is one
    /// that the client waits for.
    ///
    /// # Errors
    /// If the process cannot be read.
    pub(crate) fn arrive(&self, subject: &dyn Subject, thread: i32) -> Result<bool, DebugError> {
        let registers = subject.registers(thread)?;
        let Some(mut saved) = registers.saved else {
            return Ok(false);
        };
        let behind = |known: &&Return| known.slot.wrapping_add(WORD) == saved.general.rsp;
        let mut known = self.0.iter().filter(|known| known.thread == thread);
        let Some(known) = known.find(behind) else {
            return Ok(false);
        };
        saved.general.rip = known.address;
        subject.change_registers(thread, &saved)
    }
}

/// Returns the thread whose next return leads to `address`, and the place of that on its stack.
fn caller(subject: &dyn Subject, address: u64) -> Result<Option<(i32, u64)>, DebugError> {
    for thread in subject.threads()? {
        let registers = subject.registers(thread.number)?;
        let Some(saved) = registers.saved else {
            continue;
        };
        let mut word = [0; WORD as usize];
        let read = subject.read(thread.number, saved.general.rsp, &mut word)?;
        if read == word.len() && u64::from_le_bytes(word) == address {
            return Ok(Some((thread.number, saved.general.rsp)));
        }
    }
    Ok(None)
}

/// Returns the program's entry.
fn entry(vector: &[u8]) -> Option<u64> {
    let (words, _) = vector.as_chunks::<8>();
    let (pairs, _) = words.as_chunks::<2>();
    let entry = pairs
        .iter()
        .find(|[kind, _]| u64::from_le_bytes(*kind) == AT_ENTRY);
    entry.map(|[_, value]| u64::from_le_bytes(*value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_is_found_in_the_vector() {
        let vector = |pairs: &[(u64, u64)]| {
            let words = pairs.iter().flat_map(|(kind, value)| [*kind, *value]);
            words.flat_map(u64::to_le_bytes).collect::<Vec<u8>>()
        };
        assert_eq!(
            entry(&vector(&[(6, 4096), (9, 0x40_1000), (0, 0)])),
            Some(0x40_1000)
        );
        assert_eq!(entry(&vector(&[(6, 4096)])), None);
        assert_eq!(entry(&[9, 0, 0]), None);
    }
}
