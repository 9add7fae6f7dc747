//! The parameters of the ACPI tables, and their check.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::memory::{HOLE_END, HOLE_START, layout};

/// The maximum number of processors that the tables describe.
pub const MAX_ACPI_CPUS: u8 = 64;

/// The size in bytes of the configuration space of one bus (PCI Express Base Specification, 7.2.2).
const BUS_SIZE: u64 = 1 << 20;
/// The maximum number of buses of a segment.
const MAX_BUSES: u16 = 256;
/// The end of the hole below 4 GiB: interrupt controllers, and pages that KVM takes.
const CONTROLLERS: Range<u64> = 0xfec0_0000..HOLE_END;
/// The number of inputs of the I/O APIC.
const GSIS: u32 = 24;
/// The inputs with a device, or claimed by a driver: timer, keyboard, cascade, serial ports, clock,
/// mouse and FPU.
const TAKEN_GSIS: [u32; 8] = [0, 1, 2, 3, 4, 8, 12, 13];

/// The addresses, sizes and interrupts that the tables tell the guest.
///
/// The machine puts its devices at these addresses. Its PCI bus is number 0; there are no others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcpiConfig {
    /// The number of processors, 1 to 64. The APIC id of each is its index.
    pub cpus: u8,
    /// The memory-mapped configuration space of PCI segment 0 (MCFG).
    pub ecam: Ecam,
    /// The memory for 32-bit BARs, in the hole below 4 GiB.
    pub mmio32: MmioWindow,
    /// The memory for 64-bit BARs, above RAM. It must fit the guest's physical addresses.
    pub mmio64: Option<MmioWindow>,
    /// The input of the I/O APIC for the power button's event: free, 5 to 23.
    pub power_button_gsi: u32,
    /// The first of the [`devices::acpi::LENGTH`] ports of the sleep, reset and event registers.
    pub registers: u16,
}

/// The memory-mapped configuration space of the buses from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ecam {
    /// The GPA of bus 0. It is aligned to the size, rounded up to a power of 2.
    pub base: u64,
    /// The number of buses, 1 to 256. Each takes 1 MiB.
    pub buses: u16,
}

impl Ecam {
    /// Returns the guest-physical range.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.base..self.base.saturating_add(BUS_SIZE * u64::from(self.buses))
    }

    /// Returns the number of the last bus.
    pub(super) fn last_bus(&self) -> u8 {
        u8::try_from(self.buses.saturating_sub(1)).unwrap_or(u8::MAX)
    }
}

/// Guest-physical memory for the BARs of PCI devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmioWindow {
    /// The first GPA.
    pub start: u64,
    /// The size in bytes.
    pub size: u64,
}

impl MmioWindow {
    /// Returns the guest-physical range.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.size)
    }
}

/// The reason that no tables can be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AcpiError {
    /// The number of processors is out of range, or not the machine's.
    #[error("invalid number of CPUs: expected {machine} (at most {MAX_ACPI_CPUS}), found {found}")]
    Cpus {
        /// The number in the configuration.
        found: u8,
        /// The machine's number of vCPUs.
        machine: u8,
    },
    /// The configuration space has no valid size or alignment.
    #[error(
        "invalid ECAM: expected 1 to {MAX_BUSES} buses at an address aligned to their size, found \
         {} at {:#x}", .0.buses, .0.base
    )]
    Ecam(Ecam),
    /// A window is empty, or not on its side of 4 GiB.
    #[error("{name} is invalid: expected memory {side} 4 GiB, found {found:#x?}")]
    Window {
        /// The name of the window.
        name: &'static str,
        /// The side of 4 GiB that it must be on.
        side: &'static str,
        /// The guest-physical range.
        found: Range<u64>,
    },
    /// Two ranges of guest-physical memory overlap.
    #[error("{first} and {second} overlap in guest-physical memory: move one of them")]
    Overlap {
        /// The range that starts first.
        first: &'static str,
        /// The other range.
        second: &'static str,
    },
    /// The power button's interrupt cannot be used.
    #[error("invalid interrupt of the power button: expected a free one of 5 to 23, found {found}")]
    PowerButtonGsi {
        /// The number in the configuration.
        found: u32,
    },
    /// The registers pass the last port.
    #[error("invalid ports of the ACPI registers: expected 4 ports up to 0xffff, found {found:#x}")]
    Registers {
        /// The first port in the configuration.
        found: u16,
    },
}

impl AcpiConfig {
    /// Returns the usual configuration for `cpus` processors.
    ///
    /// - 512 MiB for 32-bit BARs from 0xc000_0000, the start of the hole. None for 64-bit ones.
    /// - One PCI bus at 0xe800_0000, behind the pages of the virtio-mmio devices.
    /// - The power button at the last input of the I/O APIC, the last that virtio devices take.
    /// - The registers at ports 0x600 to 0x603.
    #[must_use]
    pub fn new(cpus: u8) -> Self {
        Self {
            cpus,
            ecam: Ecam {
                base: 0xe800_0000,
                buses: 1,
            },
            mmio32: MmioWindow {
                start: HOLE_START,
                size: 512 << 20,
            },
            mmio64: None,
            power_button_gsi: 23,
            registers: 0x600,
        }
    }

    /// Checks that a machine with `memory` bytes of RAM and `cpus` vCPUs can have these tables.
    ///
    /// # Errors
    /// If a value is out of its range, or two ranges overlap.
    pub fn check(&self, memory: u64, cpus: u8) -> Result<(), AcpiError> {
        if self.cpus != cpus || !(1..=MAX_ACPI_CPUS).contains(&cpus) {
            return Err(AcpiError::Cpus {
                found: self.cpus,
                machine: cpus,
            });
        }
        let buses = u64::from(self.ecam.buses);
        let alignment = BUS_SIZE * buses.next_power_of_two();
        if !(1..=MAX_BUSES).contains(&self.ecam.buses) || !self.ecam.base.is_multiple_of(alignment)
        {
            return Err(AcpiError::Ecam(self.ecam));
        }
        if self.power_button_gsi >= GSIS || TAKEN_GSIS.contains(&self.power_button_gsi) {
            return Err(AcpiError::PowerButtonGsi {
                found: self.power_button_gsi,
            });
        }
        if u64::from(self.registers) + devices::acpi::LENGTH > 1 << 16 {
            return Err(AcpiError::Registers {
                found: self.registers,
            });
        }
        self.check_memory(memory)
    }

    fn check_memory(&self, memory: u64) -> Result<(), AcpiError> {
        let window = |name, side, found: Range<u64>, bounds: Range<u64>| {
            let fits = bounds.start <= found.start && found.end <= bounds.end;
            match fits && !found.is_empty() {
                true => Ok((name, found)),
                false => Err(AcpiError::Window { name, side, found }),
            }
        };
        let mut ranges = vec![
            ("the interrupt controllers", CONTROLLERS),
            ("the ECAM", self.ecam.range()),
            window(
                "the 32-bit window",
                "below",
                self.mmio32.range(),
                0..HOLE_END,
            )?,
        ];
        if let Some(above) = &self.mmio64 {
            let bounds = HOLE_END..u64::MAX;
            ranges.push(window("the 64-bit window", "above", above.range(), bounds)?);
        }
        ranges.extend(layout(memory).into_iter().map(|range| ("RAM", range)));
        ranges.sort_by_key(|(_, range)| range.start);
        for pair in ranges.windows(2) {
            if let [(first, before), (second, after)] = pair
                && before.end > after.start
            {
                return Err(AcpiError::Overlap { first, second });
            }
        }
        Ok(())
    }
}
