//! The places of virtio devices: one page of device memory and one input of the I/O APIC each, or
//! the memory of a PCI function.
//!
//! The pages lie in the hole below 4 GiB, far from the interrupt controllers at its end. The inputs
//! are first those of the ISA bus that no device of this machine uses and no Linux driver claims.
//! After them come those beyond the bus.

use devices::virtio::PCI_MEMORY_LENGTH;

use crate::boot::MmioWindow;

/// The address of the first device's page.
const FIRST: u64 = 0xe000_0000;
/// The size in bytes of a device's page.
pub(crate) const PAGE: u64 = 0x1000;
/// The usable inputs. Not among them: 0 timer, 1 and 12 keyboard and mouse, 2 cascade, 3 and 4
/// serial ports, 8 clock, 13 FPU.
const INPUTS: [u8; MAX_DEVICES] = [5, 6, 7, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23];
/// The maximum number of virtio devices of a machine.
pub const MAX_DEVICES: usize = 16;

/// Returns the address of the memory of a machine's PCI function number `index`, from 0, in
/// `window`. `None` if it does not fit, or is beyond the last.
pub(crate) fn pci_memory(window: MmioWindow, index: usize) -> Option<u64> {
    let range = window.range();
    let number = u64::try_from(index).ok().filter(|_| index < MAX_DEVICES)?;
    // A function's memory is aligned to its size.
    let first = range.start.checked_next_multiple_of(PCI_MEMORY_LENGTH)?;
    let address = first.checked_add(PCI_MEMORY_LENGTH * number)?;
    (address.checked_add(PCI_MEMORY_LENGTH)? <= range.end).then_some(address)
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
        assert!(places[MAX_DEVICES - 1].address + PAGE <= AcpiConfig::new(1).ecam.base);
    }

    #[test]
    fn every_function_has_aligned_memory_in_the_window() {
        const { assert!(MAX_DEVICES < devices::pci::MAX_FUNCTIONS) };
        let told = AcpiConfig::new(1).mmio32;
        assert_eq!(pci_memory(told, 0), Some(told.start));
        assert!(pci_memory(told, MAX_DEVICES - 1).is_some());
        assert_eq!(pci_memory(told, MAX_DEVICES), None);
        let (start, size) = (HOLE_START + 1, 3 * PCI_MEMORY_LENGTH);
        let small = MmioWindow { start, size };
        let memory = [0, 1, 2].map(|index| pci_memory(small, index));
        let first = HOLE_START + PCI_MEMORY_LENGTH;
        assert_eq!(memory, [Some(first), Some(first + PCI_MEMORY_LENGTH), None]);
        let start = u64::MAX - 1;
        assert_eq!(pci_memory(MmioWindow { start, size }, 0), None);
    }

    #[test]
    fn a_device_is_announced_as_linux_reads_it() {
        let word = MmioSlot::of(1).unwrap().word();
        assert_eq!(word, "virtio_mmio.device=4K@0xe0001000:6");
    }
}
