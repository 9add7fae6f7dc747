//! The CMOS RAM and real-time clock (MC146818) at ports 0x70 and 0x71.
//!
//! The clock shows the caller's wall time in UTC, computed at each read. The guest cannot set the
//! time, and the alarm never fires because there is no interrupt line. An update is never in
//! progress, so no reader waits for one. As on the chip, a reader detects a change of second
//! between two registers by reading the seconds again.
//!
//! Memory sizes are at the offsets of PC firmware, for guests that read them from the CMOS.

mod date;

use std::fmt;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;

use date::Date;

/// The first port: the index register.
pub const CMOS_BASE: u64 = 0x70;
/// The number of ports: index and data register, one byte each.
pub const CMOS_LENGTH: u64 = 2;

const INDEX: u64 = 0;
const DATA: u64 = 1;
/// The bits that select a byte. Bit 7 of the index register masks NMIs on the PC.
const INDEX_MASK: u8 = 0x7f;

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const DAY_OF_WEEK: u8 = 0x06;
const DAY_OF_MONTH: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const STATUS_A: u8 = 0x0a;
const STATUS_B: u8 = 0x0b;
const STATUS_C: u8 = 0x0c;
const STATUS_D: u8 = 0x0d;
/// The register to which the ACPI FADT of common firmware points for the century.
const CENTURY: u8 = 0x32;

/// Status A: update in progress.
const UPDATE_IN_PROGRESS: u8 = 0x80;
/// Status A at power-on: 32.768 kHz time base, 1024 Hz periodic rate.
const STATUS_A_DEFAULT: u8 = 0x26;
/// Status B: values are binary, not BCD.
const BINARY: u8 = 0x04;
/// Status B: hours run to 24, not to 12 with bit 7 for the afternoon.
const HOURS_24: u8 = 0x02;
/// Status D: the battery is good.
const VALID: u8 = 0x80;

const RAM_LENGTH: usize = 128;
const KIB: u64 = 1 << 10;
const KIB_64: u64 = 1 << 16;
const MIB: u64 = 1 << 20;
const GIB_4: u64 = 1 << 32;

/// The wall clock that the guest sees.
pub trait WallClock: Send {
    /// Returns the current time. It may jump.
    fn now(&self) -> SystemTime;
}

impl<F: Fn() -> SystemTime + Send> WallClock for F {
    fn now(&self) -> SystemTime {
        self()
    }
}

/// The RAM sizes that the CMOS reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CmosMemory {
    /// The end of the RAM that starts at address 0, in bytes (at most 4 GiB).
    pub below_4g_end: u64,
    /// The number of bytes of RAM from 4 GiB upwards.
    pub above_4g: u64,
}

/// The reason why a saved state was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CmosError {
    /// The RAM does not have 128 bytes.
    #[error(
        "CMOS state: {found} bytes of RAM, expected {RAM_LENGTH}: the snapshot is damaged or of \
         another version"
    )]
    RamLength {
        /// The number of bytes in the state.
        found: usize,
    },
}

/// The device's state in a snapshot. It excludes the time: after a restore the guest reads the time
/// at that moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmosState {
    /// The selected byte, 0 to 127.
    pub index: u8,
    /// All 128 bytes. Those of the clock are unused.
    pub ram: Vec<u8>,
}

/// The device at ports 0x70 and 0x71.
pub struct Cmos {
    clock: Box<dyn WallClock>,
    index: u8,
    ram: [u8; RAM_LENGTH],
}

impl fmt::Debug for Cmos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cmos")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

impl Cmos {
    /// Makes a chip as firmware leaves it: BCD, 24 hours, memory sizes filled in.
    #[must_use]
    pub fn new(memory: CmosMemory, clock: impl WallClock + 'static) -> Self {
        let mut cmos = Self {
            clock: Box::new(clock),
            index: 0,
            ram: [0; RAM_LENGTH],
        };
        cmos.set(STATUS_A, STATUS_A_DEFAULT);
        cmos.set(STATUS_B, HOURS_24);
        let end = memory.below_4g_end.min(GIB_4);
        cmos.set_word([0x15, 0x16], end.min(640 * KIB) / KIB);
        let extended = end.saturating_sub(MIB) / KIB;
        cmos.set_word([0x17, 0x18], extended);
        cmos.set_word([0x30, 0x31], extended);
        cmos.set_word([0x34, 0x35], end.saturating_sub(16 * MIB) / KIB_64);
        let above = (memory.above_4g / KIB_64).min(0xff_ffff).to_le_bytes();
        for (register, byte) in (0x5b..=0x5d).zip(above) {
            cmos.set(register, byte);
        }
        cmos
    }

    /// Returns the state to save.
    #[must_use]
    pub fn state(&self) -> CmosState {
        CmosState {
            index: self.index,
            ram: self.ram.to_vec(),
        }
    }

    /// Restores a saved state. The clock is kept.
    ///
    /// # Errors
    /// If the RAM has the wrong length. Nothing is then changed.
    pub fn restore(&mut self, state: &CmosState) -> Result<(), CmosError> {
        self.ram = state
            .ram
            .as_slice()
            .try_into()
            .map_err(|_| CmosError::RamLength {
                found: state.ram.len(),
            })?;
        self.index = state.index & INDEX_MASK;
        Ok(())
    }

    /// Stores a little-endian word. A size too large for it is stored as the largest.
    fn set_word(&mut self, registers: [u8; 2], value: u64) {
        let word = u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes();
        for (register, byte) in registers.into_iter().zip(word) {
            self.set(register, byte);
        }
    }

    fn set(&mut self, register: u8, value: u8) {
        if let Some(byte) = self.ram.get_mut(usize::from(register)) {
            *byte = value;
        }
    }

    fn get(&self, register: u8) -> u8 {
        self.ram
            .get(usize::from(register))
            .copied()
            .unwrap_or_default()
    }

    fn read_register(&self) -> u8 {
        let date = || Date::from(self.clock.now());
        match self.index {
            SECONDS => self.encode(date().second),
            MINUTES => self.encode(date().minute),
            HOURS => self.encode_hour(date().hour),
            DAY_OF_WEEK => self.encode(date().day_of_week),
            DAY_OF_MONTH => self.encode(date().day),
            MONTH => self.encode(date().month),
            YEAR => self.encode(date().year_of_century),
            CENTURY => self.encode(date().century),
            STATUS_A => self.get(STATUS_A) & !UPDATE_IN_PROGRESS,
            // No interrupt is ever pending.
            STATUS_C => 0,
            STATUS_D => VALID,
            register => self.get(register),
        }
    }

    fn write_register(&mut self, value: u8) {
        match self.index {
            SECONDS | MINUTES | HOURS | DAY_OF_WEEK | DAY_OF_MONTH | MONTH | YEAR | CENTURY
            | STATUS_C | STATUS_D => {}
            register => self.set(register, value),
        }
    }

    /// Encodes a number below 100 as the guest's status B selects.
    fn encode(&self, value: u8) -> u8 {
        if self.get(STATUS_B) & BINARY != 0 {
            value
        } else {
            ((value / 10 % 10) << 4) | (value % 10)
        }
    }

    fn encode_hour(&self, hour: u8) -> u8 {
        if self.get(STATUS_B) & HOURS_24 != 0 {
            return self.encode(hour);
        }
        let twelve = match hour % 12 {
            0 => 12,
            other => other,
        };
        let afternoon = if hour >= 12 { 0x80 } else { 0 };
        self.encode(twelve) | afternoon
    }
}

impl BusDevice for Cmos {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (port, byte) in (offset..).zip(data) {
            *byte = match port {
                DATA => self.read_register(),
                // The index register cannot be read on the PC.
                _ => 0xff,
            };
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (port, &byte) in (offset..).zip(data) {
            match port {
                INDEX => self.index = byte & INDEX_MASK,
                DATA => self.write_register(byte),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
