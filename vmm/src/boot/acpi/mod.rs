//! ACPI tables, for kernels that find their hardware by them.
//!
//! The machine is hardware-reduced: it has no fixed registers, no SCI and no PM timer. Sleep, reset
//! and the power button are the registers of [`devices::acpi`].
//!
//! The tables lie in the reserved memory below 1 MiB. Linux then leaves the interrupt controllers
//! of the PC alone, so the machine masks them before the first instruction.
//!
//! Source: ACPI Specification 6.5, chapters 5 and 6; for MCFG, PCI Firmware Specification 3.2,
//! section 4.1.2.

mod config;
mod dsdt;
mod tables;
#[cfg(test)]
mod tests;

use introspect::Gpa;

pub use config::{AcpiConfig, AcpiError, Ecam, MAX_ACPI_CPUS, MmioWindow};

use super::place;
use crate::memory::{GuestRam, PhysicalWriteError};

/// The names in the headers of all tables: the OEM's, the OEM's for the machine, and a revision.
const OEM: [u8; 6] = *b"EXOTRC";
const OEM_TABLE: [u8; 8] = *b"EXOTRACE";
const OEM_REVISION: u32 = 1;

/// The distance in bytes to which the tables' addresses are rounded.
const ALIGNMENT: u64 = 16;

/// The bytes of one table and their GPA.
struct Table {
    address: u64,
    bytes: Vec<u8>,
}

/// The tables, each behind the one before.
struct Layout {
    tables: Vec<Table>,
    next: u64,
}

impl Layout {
    fn add(&mut self, bytes: Vec<u8>) -> u64 {
        let address = self.next;
        self.next = (address + bytes.len() as u64).next_multiple_of(ALIGNMENT);
        self.tables.push(Table { address, bytes });
        address
    }
}

/// Returns all tables for `config`, which must have passed its check. The last one is the RSDP.
fn build(config: &AcpiConfig) -> Vec<Table> {
    let mut layout = Layout {
        tables: Vec::new(),
        next: place::ACPI_TABLES,
    };
    let dsdt = layout.add(dsdt::dsdt(config));
    let listed = [
        layout.add(tables::fadt(config, dsdt)),
        layout.add(tables::madt(config)),
        layout.add(tables::mcfg(config)),
    ];
    let xsdt = layout.add(tables::xsdt(&listed));
    let mut tables = layout.tables;
    tables.push(Table {
        address: place::RSDP,
        bytes: tables::rsdp(xsdt),
    });
    tables
}

/// Writes the tables into `ram`. [`place::RSDP`] leads to all of them.
pub(super) fn write(ram: &GuestRam, config: &AcpiConfig) -> Result<(), PhysicalWriteError> {
    for table in build(config) {
        ram.write_physical(Gpa(table.address), &table.bytes)?;
    }
    Ok(())
}
