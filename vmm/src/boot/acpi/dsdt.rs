//! The Differentiated System Description Table: the machine's devices in AML.
//!
//! Source: ACPI Specification 6.5, 5.2.11.1 (the table), chapter 6 (the objects of devices) and
//! chapter 20 (AML).

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, Device, EISAName, Equal, Field, FieldAccessType,
    FieldEntry, FieldLockRule, FieldUpdateRule, IO, If, Interrupt, Local, Memory32Fixed, Method,
    Name, Notify, ONE, OpRegion, OpRegionSpace, Package, Path, ResourceTemplate, Scope, Store,
    ZERO,
};
use acpi_tables::sdt::Sdt;
use devices::acpi::{EVENTS, LENGTH, POWER_BUTTON, SLEEP_TYPE_S5};
use devices::{CMOS_BASE, CMOS_LENGTH, COM1_BASE, COM1_IRQ, UART_LENGTH};

use super::{AcpiConfig, MmioWindow, OEM, OEM_REVISION, OEM_TABLE};

/// The revision since which integers of the table have 64 bits.
const REVISION: u8 = 2;
/// The ports of PCI's configuration mechanism 1: address and data.
const CONFIG_PORTS: u16 = 0xcf8;
const CONFIG_PORTS_LENGTH: u8 = 8;
/// The value of a notification that a button was pressed (ACPI 6.5, 5.6.6).
const PRESSED: u8 = 0x80;

/// Returns the table.
pub(super) fn dsdt(config: &AcpiConfig) -> Vec<u8> {
    let mut devices = Vec::new();
    host_bridge(config, &mut devices);
    motherboard(config, &mut devices);
    serial_port(&mut devices);
    clock(&mut devices);
    power_button(config, &mut devices);
    for cpu in 0..config.cpus {
        processor(cpu, &mut devices);
    }
    let mut aml = Scope::raw(Path::new("\\_SB_"), devices);
    soft_off(&mut aml);
    let mut table = Sdt::new(*b"DSDT", 36, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&aml);
    super::tables::bytes(&table)
}

fn name(name: &str, value: &dyn Aml) -> Name {
    Name::new(Path::new(name), value)
}

fn memory(window: MmioWindow) -> AddressSpace<u64> {
    let range = window.range();
    let cacheable = AddressSpaceCacheable::NotCacheable;
    AddressSpace::new_memory(cacheable, true, range.start, range.end - 1, None)
}

/// Adds the root of PCI segment 0: its buses, ports and memory.
fn host_bridge(config: &AcpiConfig, sink: &mut Vec<u8>) {
    let buses = AddressSpace::new_bus_number(0u16, u16::from(config.ecam.last_bus()));
    let config_ports = IO::new(CONFIG_PORTS, CONFIG_PORTS, 1, CONFIG_PORTS_LENGTH);
    let ports_below = AddressSpace::new_io(0u16, CONFIG_PORTS - 1, None);
    let first_above = CONFIG_PORTS + u16::from(CONFIG_PORTS_LENGTH);
    let ports_above = AddressSpace::new_io(first_above, u16::MAX, None);
    let below_4g = config.mmio32.range();
    let mmio32 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        // Both fit: the check found the window below 4 GiB.
        below_4g.start as u32,
        (below_4g.end - 1) as u32,
        None,
    );
    let mmio64 = config.mmio64.map(memory);
    let mut resources: Vec<&dyn Aml> =
        vec![&buses, &config_ports, &ports_below, &ports_above, &mmio32];
    resources.extend(mmio64.iter().map(|window| window as &dyn Aml));
    Device::new(
        Path::new("PCI0"),
        vec![
            &name("_HID", &EISAName::new("PNP0A08")),
            &name("_CID", &EISAName::new("PNP0A03")),
            &name("_UID", &ZERO),
            &name("_SEG", &ZERO),
            &name("_BBN", &ZERO),
            &name("_CRS", &ResourceTemplate::new(resources)),
        ],
    )
    .to_aml_bytes(sink);
}

/// Adds the resources that belong to the board: the ECAM and the ACPI registers.
///
/// Linux ignores an MCFG whose memory no such device reserves.
fn motherboard(config: &AcpiConfig, sink: &mut Vec<u8>) {
    let ecam = config.ecam.range();
    let (start, size) = (ecam.start, ecam.end - ecam.start);
    let fixed: Box<dyn Aml> = match (u32::try_from(start), u32::try_from(ecam.end - 1)) {
        (Ok(start), Ok(_)) => Box::new(Memory32Fixed::new(true, start, size as u32)),
        _ => Box::new(memory(MmioWindow { start, size })),
    };
    let registers = IO::new(config.registers, config.registers, 1, LENGTH as u8);
    Device::new(
        Path::new("MBRD"),
        vec![
            &name("_HID", &EISAName::new("PNP0C02")),
            &name("_UID", &ZERO),
            &name("_CRS", &ResourceTemplate::new(vec![&*fixed, &registers])),
        ],
    )
    .to_aml_bytes(sink);
}

fn serial_port(sink: &mut Vec<u8>) {
    let base = COM1_BASE as u16;
    let ports = IO::new(base, base, 1, UART_LENGTH as u8);
    let interrupt = Interrupt::new(true, true, false, false, COM1_IRQ);
    Device::new(
        Path::new("COM1"),
        vec![
            &name("_HID", &EISAName::new("PNP0501")),
            &name("_UID", &ONE),
            &name("_DDN", &"COM1"),
            &name("_CRS", &ResourceTemplate::new(vec![&ports, &interrupt])),
        ],
    )
    .to_aml_bytes(sink);
}

/// Adds the CMOS clock. It has no interrupt.
fn clock(sink: &mut Vec<u8>) {
    let base = CMOS_BASE as u16;
    let ports = IO::new(base, base, 1, CMOS_LENGTH as u8);
    Device::new(
        Path::new("RTC_"),
        vec![
            &name("_HID", &EISAName::new("PNP0B00")),
            &name("_CRS", &ResourceTemplate::new(vec![&ports])),
        ],
    )
    .to_aml_bytes(sink);
}

/// Adds the power button and the generic event device, whose method notifies it.
///
/// The method acknowledges what it read before it notifies. A later press interrupts again.
fn power_button(config: &AcpiConfig, sink: &mut Vec<u8>) {
    Device::new(
        Path::new("PWRB"),
        vec![
            &name("_HID", &EISAName::new("PNP0C0C")),
            &name("_UID", &ZERO),
        ],
    )
    .to_aml_bytes(sink);
    let gsi = config.power_button_gsi;
    let interrupt = Interrupt::new(true, true, false, false, gsi);
    let (register, length) = (config.registers + EVENTS as u16, 1u8);
    let region = Path::new("EVTR");
    let events = Path::new("EVTS");
    let button = Path::new("PWRB");
    Device::new(
        Path::new("GED_"),
        vec![
            &name("_HID", &"ACPI0013"),
            &name("_UID", &ZERO),
            &name("_CRS", &ResourceTemplate::new(vec![&interrupt])),
            &OpRegion::new(region, OpRegionSpace::SystemIO, &register, &length),
            &Field::new(
                Path::new("EVTR"),
                FieldAccessType::Byte,
                FieldLockRule::NoLock,
                FieldUpdateRule::WriteAsZeroes,
                vec![FieldEntry::Named(*b"EVTS", 8)],
            ),
            &Method::new(
                Path::new("_EVT"),
                1,
                true,
                vec![&If::new(
                    &Equal::new(&Arg(0), &gsi),
                    vec![
                        &Store::new(&Local(0), &events),
                        &Store::new(&events, &Local(0)),
                        &If::new(
                            &And::new(&ZERO, &Local(0), &POWER_BUTTON),
                            vec![&Notify::new(&button, &PRESSED)],
                        ),
                    ],
                )],
            ),
        ],
    )
    .to_aml_bytes(sink);
}

/// Adds a processor. Its `_UID` is the one that the MADT has.
fn processor(index: u8, sink: &mut Vec<u8>) {
    Device::new(
        Path::new(&format!("C{index:03X}")),
        vec![&name("_HID", &"ACPI0007"), &name("_UID", &index)],
    )
    .to_aml_bytes(sink);
}

/// Adds `\_S5_`, whose first element is the sleep type (ACPI 6.5, 7.4.2.6).
fn soft_off(sink: &mut Vec<u8>) {
    let state = Package::new(vec![&SLEEP_TYPE_S5, &ZERO, &ZERO, &ZERO]);
    name("\\_S5_", &state).to_aml_bytes(sink);
}
