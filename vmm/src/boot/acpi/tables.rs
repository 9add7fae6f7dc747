//! The tables with fixed contents: FADT, MADT, MCFG, XSDT and RSDP.

use acpi_tables::Aml;
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use devices::acpi::{RESET, RESET_VALUE, SLEEP_CONTROL, SLEEP_STATUS};

use super::{AcpiConfig, OEM, OEM_REVISION, OEM_TABLE};
use crate::boot::mptable::{IO_APIC, LOCAL_APIC};

/// IA-PC boot architecture flags (ACPI 6.5, 5.2.9.3): devices on the ISA bus, a keyboard
/// controller, no VGA. MSI works, and there is a CMOS clock.
const BOOT_ARCHITECTURE: u16 = LEGACY_DEVICES | KEYBOARD_CONTROLLER | NO_VGA;
const LEGACY_DEVICES: u16 = 1 << 0;
const KEYBOARD_CONTROLLER: u16 = 1 << 1;
const NO_VGA: u16 = 1 << 2;

/// The revision of a MADT since ACPI 6.3, and the length of its fixed part.
const MADT_REVISION: u8 = 5;
const MADT_FIXED: u32 = 44;
/// MADT flag PCAT_COMPAT: the machine has two 8259s.
const DUAL_8259: u32 = 1;
const SOURCE_OVERRIDE: u8 = 2;
const LOCAL_APIC_NMI: u8 = 4;
/// MPS INTI flags (ACPI 6.5, 5.2.12.5): active high, edge-triggered.
const HIGH_EDGE: u16 = 0b01_01;
/// The ISA interrupts that are listed. Interrupt 2 is the cascade of the 8259s.
///
/// Interrupt 0, the timer, is at input 0, which needs no entry. Linux would take an entry for it as
/// one for the SCI, whose number is 0 in a hardware-reduced machine.
const LISTED_ISA: [u8; 14] = [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Returns the bytes of a table.
pub(super) fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// Returns the Fixed ACPI Description Table with the address of the DSDT (ACPI 6.5, 5.2.9).
pub(super) fn fadt(config: &AcpiConfig, dsdt: u64) -> Vec<u8> {
    let register = |offset| {
        let port = u64::from(config.registers) + offset;
        GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port)
    };
    // Buttons and the clock's alarm are no fixed features. Their flags say so when they are set.
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::ResetRegSup)
        .flag(Flags::HwReducedAcpi);
    fadt.iapc_boot_arch = BOOT_ARCHITECTURE.into();
    fadt.reset_reg = register(RESET);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = register(SLEEP_CONTROL);
    fadt.sleep_status_reg = register(SLEEP_STATUS);
    bytes(&fadt.finalize())
}

/// Returns the Multiple APIC Description Table (ACPI 6.5, 5.2.12): what the MP table says.
///
/// The crate's own table lacks overrides and NMIs.
pub(super) fn madt(config: &AcpiConfig) -> Vec<u8> {
    let mut madt = Sdt::new(
        *b"APIC",
        MADT_FIXED,
        MADT_REVISION,
        OEM,
        OEM_TABLE,
        OEM_REVISION,
    );
    madt.write_u32(36, LOCAL_APIC);
    madt.write_u32(40, DUAL_8259);
    for id in 0..config.cpus {
        let cpu = ProcessorLocalApic::new(id, id, EnabledStatus::Enabled);
        madt.append_slice(&bytes(&cpu));
    }
    let io_apic_id = config.cpus;
    madt.append_slice(&bytes(&IoApic::new(io_apic_id, IO_APIC, 0)));
    let flags = HIGH_EDGE.to_le_bytes();
    for irq in LISTED_ISA {
        // Type, length, bus (ISA), source, GSI, flags.
        let entry = [
            SOURCE_OVERRIDE,
            10,
            0,
            irq,
            irq,
            0,
            0,
            0,
            flags[0],
            flags[1],
        ];
        madt.append_slice(&entry);
    }
    // Type, length, processor (all), flags (as the bus has it), LINT1.
    madt.append_slice(&[LOCAL_APIC_NMI, 6, 0xff, 0, 0, 1]);
    bytes(&madt)
}

/// Returns the table of memory-mapped configuration spaces (PCI Firmware Specification 3.2, 4.1.2).
pub(super) fn mcfg(config: &AcpiConfig) -> Vec<u8> {
    let mut mcfg = MCFG::new(OEM, OEM_TABLE, OEM_REVISION);
    mcfg.add_ecam(config.ecam.base, 0, 0, config.ecam.last_bus());
    bytes(&mcfg)
}

/// Returns the Extended System Description Table (ACPI 6.5, 5.2.8) with the addresses of others.
pub(super) fn xsdt(tables: &[u64]) -> Vec<u8> {
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    for table in tables {
        xsdt.add_entry(*table);
    }
    bytes(&xsdt)
}

/// Returns the Root System Description Pointer, revision 2 (ACPI 6.5, 5.2.5.3).
pub(super) fn rsdp(xsdt: u64) -> Vec<u8> {
    bytes(&Rsdp::new(OEM, xsdt))
}
