//! MSI-X: a function's table of messages, each of which interrupts a vCPU.
//!
//! Source: PCI Local Bus Specification 3.0, section 6.8.2. A masked message is kept and sent when
//! the driver unmasks it. A vector that the table does not have sends nothing.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::config::ConfigSpace;
use crate::signals::{Message, MessageInterrupts};

/// The size of an entry of the table in bytes: address, data, and the mask in the lowest bit of the
/// last word.
pub const MSIX_ENTRY: usize = 16;
/// The vector that a driver gives to what shall not interrupt.
pub const NO_VECTOR: u16 = 0xffff;

const CAPABILITY: u8 = 0x11;
/// The bit of message control that enables MSI-X, and the one that masks all vectors.
const ENABLE: u16 = 0x8000;
const MASK_ALL: u16 = 0x4000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    address: u64,
    data: u32,
    is_masked: bool,
    is_pending: bool,
}

/// The state of the table in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsixState {
    entries: Vec<Entry>,
    control: u16,
}

/// A saved table has another number of vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("state of {found} interrupt vectors, this device has {expected}; the snapshot is damaged")]
pub struct MsixStateError {
    found: usize,
    expected: usize,
}

/// The messages of one function. The device's thread sends them, vCPU threads change them.
pub struct Msix {
    state: Mutex<MsixState>,
    messages: Arc<dyn MessageInterrupts>,
}

impl fmt::Debug for Msix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Msix")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Msix {
    /// Makes a table of `vectors` messages, all of them masked, for a driver that has not enabled
    /// it.
    #[must_use]
    pub fn new(vectors: u16, messages: Arc<dyn MessageInterrupts>) -> Self {
        let entry = Entry {
            address: 0,
            data: 0,
            is_masked: true,
            is_pending: false,
        };
        Self {
            state: Mutex::new(MsixState {
                entries: vec![entry; usize::from(vectors)],
                control: 0,
            }),
            messages,
        }
    }

    /// Adds the capability, for a table at `table` and pending bits at `pending` in the memory of
    /// base address register 0. Returns its place.
    #[must_use]
    pub fn announce(&self, space: &mut ConfigSpace, table: u32, pending: u32) -> usize {
        let vectors = self.lock().entries.len();
        let control = u16::try_from(vectors.saturating_sub(1)).unwrap_or(0);
        let mut body = control.to_le_bytes().to_vec();
        body.extend(table.to_le_bytes());
        body.extend(pending.to_le_bytes());
        let place = space.add_capability(CAPABILITY, &body);
        space.allow(place + 2, &(ENABLE | MASK_ALL).to_le_bytes());
        place
    }

    fn lock(&self) -> MutexGuard<'_, MsixState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes on message control, which the driver has written.
    pub fn set_control(&self, control: u16) {
        let mut state = self.lock();
        state.control = control & (ENABLE | MASK_ALL);
        self.send_pending(&mut state);
    }

    /// Returns the number of vectors.
    #[must_use]
    pub fn vectors(&self) -> usize {
        self.lock().entries.len()
    }

    /// Interrupts by `vector`. Returns whether the interrupt controller has taken it; `None` if
    /// nothing was to be sent now.
    pub fn send(&self, vector: u16) -> Option<bool> {
        let mut state = self.lock();
        if state.control & ENABLE == 0 {
            return None;
        }
        let is_masked = state.control & MASK_ALL != 0;
        let entry = state.entries.get_mut(usize::from(vector))?;
        if is_masked || entry.is_masked {
            entry.is_pending = true;
            return None;
        }
        Some(self.messages.send(entry.message()).is_ok())
    }

    fn send_pending(&self, state: &mut MsixState) {
        if state.control & (ENABLE | MASK_ALL) != ENABLE {
            return;
        }
        for entry in &mut state.entries {
            if entry.is_pending && !entry.is_masked {
                entry.is_pending = false;
                // What the controller refuses is lost, as a message to nowhere is.
                let _ = self.messages.send(entry.message());
            }
        }
    }

    /// Reads the table.
    pub fn read_table(&self, offset: usize, data: &mut [u8]) {
        data.fill(0);
        let state = self.lock();
        let entries = state.entries.iter().flat_map(|entry| entry.bytes());
        for (to, from) in data.iter_mut().zip(entries.skip(offset)) {
            *to = from;
        }
    }

    /// Writes to the table. A message that becomes unmasked is sent if it is pending.
    pub fn write_table(&self, offset: usize, data: &[u8]) {
        let mut state = self.lock();
        let first = offset / MSIX_ENTRY;
        let last = offset.saturating_add(data.len()).div_ceil(MSIX_ENTRY);
        for (number, entry) in state.entries.iter_mut().enumerate() {
            if !(first..last).contains(&number) {
                continue;
            }
            let mut bytes = entry.bytes();
            for (at, new) in (offset..).zip(data) {
                if let Some(byte) = at
                    .checked_sub(number * MSIX_ENTRY)
                    .and_then(|at| bytes.get_mut(at))
                {
                    *byte = *new;
                }
            }
            entry.set(bytes);
        }
        self.send_pending(&mut state);
    }

    /// Reads the pending bits, of which the driver cannot write any.
    pub fn read_pending(&self, offset: usize, data: &mut [u8]) {
        let state = self.lock();
        for (at, byte) in (offset..).zip(data) {
            let eight = state.entries.iter().skip(at.saturating_mul(8)).take(8);
            *byte = (0..)
                .zip(eight)
                .map(|(bit, entry)| u8::from(entry.is_pending) << bit)
                .sum();
        }
    }

    /// Returns the state to save.
    #[must_use]
    pub fn state(&self) -> MsixState {
        self.lock().clone()
    }

    /// Restores a saved state. Nothing is sent.
    ///
    /// # Errors
    /// If it is of another number of vectors.
    pub fn restore(&self, saved: &MsixState) -> Result<(), MsixStateError> {
        let mut state = self.lock();
        let (found, expected) = (saved.entries.len(), state.entries.len());
        if found != expected {
            return Err(MsixStateError { found, expected });
        }
        *state = saved.clone();
        Ok(())
    }
}

impl Entry {
    fn message(&self) -> Message {
        Message {
            address: self.address,
            data: self.data,
        }
    }

    fn bytes(&self) -> [u8; MSIX_ENTRY] {
        let mut bytes = [0; MSIX_ENTRY];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.data.to_le_bytes());
        bytes[12] = u8::from(self.is_masked);
        bytes
    }

    fn set(&mut self, bytes: [u8; MSIX_ENTRY]) {
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(word)
        };
        self.address = u64::from(word(4)) << 32 | u64::from(word(0));
        self.data = word(8);
        self.is_masked = bytes[12] & 1 != 0;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::signals::testing::Messages;

    const FIRST: Message = Message {
        address: 0xfee0_1000,
        data: 0x4041,
    };

    /// Returns a table whose first vector sends [`FIRST`], and the messages that were sent.
    fn table() -> (Msix, Arc<Messages>) {
        let sent = Arc::new(Messages::default());
        let table = Msix::new(3, sent.clone());
        table.write_table(0, &FIRST.address.to_le_bytes());
        table.write_table(8, &FIRST.data.to_le_bytes());
        (table, sent)
    }

    #[test]
    fn nothing_is_sent_before_the_driver_enables_it() {
        let (table, sent) = table();
        table.write_table(12, &[0; 4]);
        assert_eq!(table.send(0), None);
        table.set_control(ENABLE);
        assert_eq!(table.send(0), Some(true));
        assert_eq!(table.send(NO_VECTOR), None);
        assert_eq!(sent.take(), [FIRST]);
        sent.break_down();
        assert_eq!(table.send(0), Some(false));
    }

    #[test]
    fn a_masked_message_is_pending_until_it_is_unmasked() {
        let (table, sent) = table();
        let pending = |table: &Msix| {
            let mut bytes = [0xff; 8];
            table.read_pending(0, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        table.set_control(ENABLE);
        assert_eq!((table.send(0), pending(&table)), (None, 1));
        table.write_table(12, &[0; 4]);
        assert_eq!((sent.take(), pending(&table)), (vec![FIRST], 0));
        table.set_control(ENABLE | MASK_ALL);
        assert_eq!((table.send(0), pending(&table)), (None, 1));
        table.set_control(ENABLE);
        assert_eq!((sent.take(), pending(&table)), (vec![FIRST], 0));
    }

    #[test]
    fn the_table_reads_as_it_was_written_and_nothing_lies_beyond() {
        let (table, _) = table();
        table.write_table(MSIX_ENTRY * 2 + 8, &[7; 64]);
        let mut bytes = [0xff; MSIX_ENTRY * 4];
        table.read_table(0, &mut bytes);
        assert_eq!(
            bytes[..12],
            [0, 0x10, 0xe0, 0xfe, 0, 0, 0, 0, 0x41, 0x40, 0, 0]
        );
        assert_eq!(
            bytes[MSIX_ENTRY * 2 + 8..MSIX_ENTRY * 3],
            [7, 7, 7, 7, 1, 0, 0, 0]
        );
        assert_eq!(bytes[MSIX_ENTRY * 3..], [0; MSIX_ENTRY]);
    }

    #[test]
    fn a_restored_table_is_the_saved_one() {
        let (table, _) = table();
        table.set_control(ENABLE);
        table.send(0);
        let (other, sent) = self::table();
        other.restore(&table.state()).unwrap();
        assert_eq!(other.state(), table.state());
        assert_eq!(sent.take(), []);
        let small = Msix::new(1, sent);
        assert_eq!(
            small.restore(&table.state()),
            Err(MsixStateError {
                found: 3,
                expected: 1
            })
        );
    }
}
