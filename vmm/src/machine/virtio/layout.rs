//! The places of virtio devices: one page of device memory and one input of the I/O APIC each, or
//! the memory of a PCI function.
//!
//! The pages lie in the hole below 4 GiB, far from the interrupt controllers at its end. The inputs
//! are first those of the ISA bus that no device of this machine uses and no Linux driver claims.
//! After them come those beyond the bus.

use devices::virtio::PCI_MEMORY_LENGTH;

/// The address of the first device's page.
const FIRST: u64 = 0xe000_0000;
/// The size in bytes of a device's page.
pub(crate) const PAGE: u64 = 0x1000;
/// The usable inputs. Not among them: 0 timer, 1 and 12 keyboard and mouse, 2 cascade, 3 and 4
/// serial ports, 8 clock, 13 FPU.
const INPUTS: [u8; MAX_DEVICES] = [5, 6, 7, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23];
/// The maximum number of virtio devices of a machine.
pub const MAX_DEVICES: usize = 16;

/// The address of the first PCI function's memory, in the window that ACPI tells of
/// ([`AcpiConfig::new`](crate::boot::AcpiConfig::new)).
const PCI_WINDOW: u64 = crate::memory::HOLE_START;
/// The address of the PCI bus's ECAM region.
pub(crate) const ECAM: u64 = 0xe800_0000;

/// Returns the address of the memory of a machine's PCI function number `index`, from 0. `None`
/// beyond the last.
pub(crate) fn pci_memory(index: usize) -> Option<u64> {
    (index < MAX_DEVICES).then(|| PCI_WINDOW + PCI_MEMORY_LENGTH * index as u64)
}

/// The place of one device with registers in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MmioSlot {
    /// The GPA of the registers.
    pub(crate) address: u64,
    /// The interrupt: the input of the I/O APIC, and Linux's number for it.
    pub(crate) irq: u8,
}

impl MmioSlot {
    /// Returns the place of a machine's device number `index`, from 0. `None` beyond the last.
    pub(crate) fn of(index: usize) -> Option<Self> {
        let irq = *INPUTS.get(index)?;
        let address = FIRST + PAGE * index as u64;
        Some(Self { address, irq })
    }

    /// Returns the word that tells Linux of a device here (CONFIG_VIRTIO_MMIO_CMDLINE_DEVICES).
    pub(crate) fn word(self) -> String {
        let Self { address, irq } = self;
        format!("virtio_mmio.device={}K@{address:#x}:{irq}", PAGE >> 10)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::*;
    use crate::boot::AcpiConfig;
    use crate::memory::{HOLE_END, HOLE_START};

    #[test]
    fn every_device_has_a_page_in_the_hole_and_an_interrupt_of_its_own() {
        let places: Vec<_> = (0..MAX_DEVICES).map(|i| MmioSlot::of(i).unwrap()).collect();
        assert_eq!(MmioSlot::of(MAX_DEVICES), None);
        let interrupts: BTreeSet<_> = places.iter().map(|place| place.irq).collect();
        assert_eq!(interrupts.len(), places.len());
        // The I/O APIC has 24 inputs.
        assert!(interrupts.iter().all(|irq| *irq < 24));
        for pair in places.windows(2) {
            assert!(pair[0].address + PAGE <= pair[1].address);
        }
        const IO_APIC: u64 = 0xfec0_0000;
        assert!(places[0].address >= HOLE_START && IO_APIC < HOLE_END);
        assert!(places[MAX_DEVICES - 1].address + PAGE <= ECAM);
        let last = pci_memory(MAX_DEVICES - 1).unwrap();
        let told = AcpiConfig::new(1);
        assert!(told.mmio32.range().contains(&PCI_WINDOW));
        assert!(
            told.mmio32
                .range()
                .contains(&(last + PCI_MEMORY_LENGTH - 1))
        );
        assert_eq!(told.ecam.range(), ECAM..ECAM + devices::pci::ECAM_LENGTH);
        const { assert!(MAX_DEVICES < devices::pci::MAX_FUNCTIONS) };
    }

    #[test]
    fn a_device_is_announced_as_linux_reads_it() {
        let word = MmioSlot::of(1).unwrap().word();
        assert_eq!(word, "virtio_mmio.device=4K@0xe0001000:6");
    }
}
