//! A device that takes every write and answers all-ones.

use crate::bus::BusDevice;

/// Stands on ports which guests touch for the delay alone, such as 0x80 (`io_delay` in Linux),
/// so that they do not fill the table of unknown accesses.
#[derive(Debug, Clone, Copy, Default)]
pub struct NullDevice;

impl BusDevice for NullDevice {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&mut self, _offset: u64, _data: &[u8]) {}
}
