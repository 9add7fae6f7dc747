//! A device that ignores every write and returns all-ones.

use crate::bus::BusDevice;

/// A device for ports that guests access only for the delay, such as 0x80 (`io_delay` in Linux). It
/// keeps them out of the table of unknown accesses.
#[derive(Debug, Clone, Copy, Default)]
pub struct NullDevice;

impl BusDevice for NullDevice {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&mut self, _offset: u64, _data: &[u8]) {}
}
