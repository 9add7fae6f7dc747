//! A PCI bus: the host bridge, its functions, and the two ways to their configuration space.
//!
//! The ports 0xcf8 to 0xcff are configuration mechanism 1 (PCI Local Bus Specification 3.0, section
//! 3.2.2.3.2), the ECAM region is PCI Express's. There is bus 0 alone, each device has one
//! function, and the first is the bridge. What is not there reads as all ones.

mod config;
mod msix;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

pub use config::{CONFIG_LENGTH, ConfigSpace, ConfigState, Identity};
pub use msix::{MSIX_ENTRY, Msix, MsixState, MsixStateError, NO_VECTOR};

use crate::bus::{BusDevice, SharedDevice};
use crate::reset_port::RESET_PORT_BASE;

/// The first port of configuration mechanism 1.
pub const PCI_PORTS_BASE: u64 = 0xcf8;
/// The number of its ports: the address, then the data.
pub const PCI_PORTS_LENGTH: u64 = 8;
/// The size of the ECAM region of one bus in bytes: 4 KiB for each of its 256 functions.
pub const ECAM_LENGTH: u64 = 1 << 20;
/// The maximum number of functions, the bridge included.
pub const MAX_FUNCTIONS: usize = 32;

/// The size of the address port in bytes.
const ADDRESS_LENGTH: u64 = 4;
/// The bit of the address port that selects configuration space.
const ENABLE: u32 = 1 << 31;
/// The place of the reset port among the ports.
const RESET_PORT: u64 = RESET_PORT_BASE - PCI_PORTS_BASE;

/// A function on the bus: its configuration space.
pub trait PciFunction: Send {
    /// Fills `data` from configuration space.
    fn read_config(&mut self, offset: usize, data: &mut [u8]);
    /// Writes to configuration space.
    fn write_config(&mut self, offset: usize, data: &[u8]);
}

/// A function that the bus and its owner share.
pub type SharedFunction = Arc<Mutex<dyn PciFunction>>;

/// The functions of a bus, by the number of their device.
pub struct PciBus(Vec<SharedFunction>);

/// The host bridge.
struct Bridge(ConfigSpace);

impl PciFunction for Bridge {
    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.0.read(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.0.write(offset, data);
    }
}

impl PciBus {
    /// Makes a bus with a host bridge and these functions, which are devices 1, 2 and so on. Those
    /// beyond [`MAX_FUNCTIONS`] are left out.
    #[must_use]
    pub fn new(functions: impl IntoIterator<Item = SharedFunction>) -> Self {
        // Red Hat's PCI Express host bridge, for which Linux needs no driver.
        let bridge = Bridge(ConfigSpace::new(&Identity {
            ids: (0x1b36, 0x0008),
            subsystem: (0x1af4, 0x1100),
            revision: 0,
            class: [6, 0, 0],
        }));
        let bridge: SharedFunction = Arc::new(Mutex::new(bridge));
        let all = std::iter::once(bridge).chain(functions);
        Self(all.take(MAX_FUNCTIONS).collect())
    }

    /// Calls `access` with a function's number and configuration space. `number` is that of a bus,
    /// a device and a function (bits 15 to 8, 7 to 3, 2 to 0).
    fn with<T>(&self, number: u64, access: impl FnOnce(&mut dyn PciFunction) -> T) -> Option<T> {
        let device = usize::try_from(number >> 3).ok();
        let function = self.0.get(device.filter(|_| number & 7 == 0)?)?;
        let mut function = function.lock().unwrap_or_else(PoisonError::into_inner);
        Some(access(&mut *function))
    }

    fn read(&self, number: u64, offset: usize, data: &mut [u8]) {
        let found = self.with(number, |function| function.read_config(offset, data));
        if found.is_none() {
            data.fill(0xff);
        }
    }

    fn write(&self, number: u64, offset: usize, data: &[u8]) {
        let _ = self.with(number, |function| function.write_config(offset, data));
    }
}

impl fmt::Debug for PciBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PciBus").field(&self.0.len()).finish()
    }
}

/// The ports of configuration mechanism 1, with the reset port among them.
pub struct PciPorts {
    bus: Arc<PciBus>,
    reset: SharedDevice,
    address: u32,
}

impl PciPorts {
    /// Makes the ports. `reset` gets the accesses to port 0xcf9 that are a byte wide.
    #[must_use]
    pub fn new(bus: Arc<PciBus>, reset: SharedDevice) -> Self {
        Self {
            bus,
            reset,
            address: 0,
        }
    }

    /// Returns the content of the address port, to save it.
    #[must_use]
    pub fn address(&self) -> u32 {
        self.address
    }

    /// Restores the content of the address port.
    pub fn set_address(&mut self, address: u32) {
        self.address = address;
    }

    /// Returns the function and the place that an access to the data ports is for.
    fn selected(&self, port: u64) -> Option<(u64, usize)> {
        let offset =
            (self.address & 0xfc) as usize + usize::try_from(port - ADDRESS_LENGTH).ok()?;
        let number = u64::from(self.address >> 8 & 0xffff);
        (self.address & ENABLE != 0).then_some((number, offset))
    }

    fn reset<T>(&self, access: impl FnOnce(&mut dyn BusDevice) -> T) -> T {
        access(&mut *self.reset.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl BusDevice for PciPorts {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (offset, data.len()) {
            (0, 4) => data.copy_from_slice(&self.address.to_le_bytes()),
            (RESET_PORT, 1) => self.reset(|port| port.read(0, data)),
            (ADDRESS_LENGTH.., _) => match self.selected(offset) {
                Some((number, place)) => self.bus.read(number, place, data),
                None => data.fill(0xff),
            },
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (0, &[a, b, c, d]) => self.address = u32::from_le_bytes([a, b, c, d]),
            (RESET_PORT, [_]) => self.reset(|port| port.write(0, data)),
            (ADDRESS_LENGTH.., _) => {
                if let Some((number, place)) = self.selected(offset) {
                    self.bus.write(number, place, data);
                }
            }
            _ => {}
        }
    }
}

impl fmt::Debug for PciPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PciPorts")
            .field("bus", &self.bus)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// The ECAM region of a bus.
#[derive(Debug)]
pub struct Ecam(Arc<PciBus>);

impl Ecam {
    /// Makes the region.
    #[must_use]
    pub fn new(bus: Arc<PciBus>) -> Self {
        Self(bus)
    }
}

impl BusDevice for Ecam {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.0.read(offset >> 12, (offset & 0xfff) as usize, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.0.write(offset >> 12, (offset & 0xfff) as usize, data);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::reset_port::ResetPort;
    use crate::signals::ResetCause;
    use crate::signals::testing::Signals;

    struct Pc {
        ports: PciPorts,
        ecam: Ecam,
        signals: Arc<Signals>,
    }

    fn pc() -> Pc {
        let bus = Arc::new(PciBus::new([]));
        let signals = Arc::new(Signals::default());
        let reset = Arc::new(Mutex::new(ResetPort::new(signals.clone())));
        Pc {
            ports: PciPorts::new(bus.clone(), reset),
            ecam: Ecam::new(bus),
            signals,
        }
    }

    fn select(ports: &mut PciPorts, address: u32) {
        ports.write(0, &address.to_le_bytes());
        let mut back = [0; 4];
        ports.read(0, &mut back);
        assert_eq!(u32::from_le_bytes(back), address);
    }

    #[test]
    fn both_ways_lead_to_the_same_function() {
        let Pc {
            mut ports,
            mut ecam,
            ..
        } = pc();
        let (mut by_port, mut by_memory) = ([0; 4], [0; 4]);
        select(&mut ports, ENABLE);
        ports.read(4, &mut by_port);
        ecam.read(0, &mut by_memory);
        assert_eq!(
            (by_port, by_memory),
            ([0x36, 0x1b, 8, 0], [0x36, 0x1b, 8, 0])
        );
        // The class, by a byte of the third data port.
        select(&mut ports, ENABLE | 8);
        let mut class = [0];
        ports.read(7, &mut class);
        assert_eq!(class, [6]);
        ports.write(4, &[1]);
        ecam.write(4, &[2, 0]);
        ecam.read(4, &mut by_memory);
        assert_eq!(by_memory[..2], [2, 0]);
    }

    #[test]
    fn what_is_not_there_reads_as_ones() {
        let Pc {
            mut ports,
            mut ecam,
            ..
        } = pc();
        for address in [0, ENABLE | 1 << 8, ENABLE | 1 << 11, ENABLE | 1 << 16] {
            select(&mut ports, address);
            let mut data = [0; 4];
            ports.read(4, &mut data);
            assert_eq!(data, [0xff; 4], "{address:#x}");
            ports.write(4, &[0; 4]);
        }
        let mut data = [0; 8];
        ecam.read(ECAM_LENGTH - 8, &mut data);
        assert_eq!(data, [0xff; 8]);
        // Express's part of a function that is there.
        ecam.read(0x100, &mut data);
        assert_eq!(data, [0; 8]);
    }

    #[test]
    fn the_reset_port_is_where_it_was() {
        let Pc {
            mut ports, signals, ..
        } = pc();
        select(&mut ports, ENABLE | 0x0600);
        assert_eq!(signals.causes(), []);
        ports.write(1, &[2]);
        ports.write(1, &[6]);
        assert_eq!(signals.causes(), [ResetCause::ResetPort]);
        let mut data = [0];
        ports.read(1, &mut data);
        assert_eq!(data, [6]);
    }
}
