//! The Intel MultiProcessor table: CPUs, one ISA bus, one I/O APIC and its inputs.
//!
//! All inputs belong to the ISA bus and are edge-triggered. This includes those beyond its 16
//! interrupts, which exist only in a machine with a device on them.
//!
//! Without ACPI, Linux finds CPUs and interrupt routing only here. Source: MultiProcessor
//! Specification 1.4.

use introspect::Gpa;

use super::place;
use crate::memory::{GuestRam, PhysicalWriteError};

/// The GPA of the local APICs.
pub(super) const LOCAL_APIC: u32 = 0xfee0_0000;
/// The GPA of the I/O APIC.
pub(super) const IO_APIC: u32 = 0xfec0_0000;
/// The GPA of the floating pointer, in the first KiB, which the kernel scans first.
const POINTER: u64 = 0x10;
/// The number of inputs of the I/O APIC that always exist.
const ISA_INTERRUPTS: u8 = 16;
const APIC_VERSION: u8 = 0x14;

fn seal(bytes: &mut [u8], checksum_at: usize) {
    let sum = bytes.iter().fold(0u8, |sum, b| sum.wrapping_add(*b));
    bytes[checksum_at] = 0u8.wrapping_sub(sum);
}

/// Returns the table's bytes for `cpus` processors and the interrupts below `interrupts`.
///
/// The APIC id is the index. The I/O APIC's id follows the last.
fn table(cpus: u8, interrupts: u8) -> Vec<u8> {
    let io_apic_id = cpus;
    let mut entries: Vec<u8> = Vec::new();
    let mut count = 0u16;
    let mut push = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        count += 1;
    };
    for id in 0..cpus {
        let boot = if id == 0 { 2 } else { 0 };
        // Type 0, id, version, enabled | boot CPU, signature (family 6), features (FPU, APIC),
        // reserved.
        push(&[
            0,
            id,
            APIC_VERSION,
            1 | boot,
            0,
            6,
            0,
            0,
            1,
            2,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ]);
    }
    push(&[1, 0, b'I', b'S', b'A', b' ', b' ', b' ']);
    let address = IO_APIC.to_le_bytes();
    push(&[
        2,
        io_apic_id,
        APIC_VERSION,
        1,
        address[0],
        address[1],
        address[2],
        address[3],
    ]);
    for irq in 0..interrupts.max(ISA_INTERRUPTS) {
        push(&[3, 0, 0, 0, 0, irq, io_apic_id, irq]);
    }
    push(&[4, 3, 0, 0, 0, 0, 0, 0]); // ExtINT on LINT0 of CPU 0
    push(&[4, 1, 0, 0, 0, 0, 0xff, 1]); // NMI on LINT1 of all

    let mut table = Vec::with_capacity(44 + entries.len());
    table.extend_from_slice(b"PCMP");
    table.extend_from_slice(&((44 + entries.len()) as u16).to_le_bytes());
    table.extend_from_slice(&[4, 0]); // specification 1.4; checksum below
    table.extend_from_slice(b"EXOTRACE");
    table.extend_from_slice(b"MICROVM     ");
    table.extend_from_slice(&[0; 6]); // no OEM table
    table.extend_from_slice(&count.to_le_bytes());
    table.extend_from_slice(&LOCAL_APIC.to_le_bytes());
    table.extend_from_slice(&[0; 4]); // no extended table
    table.extend_from_slice(&entries);
    seal(&mut table, 7);
    table
}

pub(super) fn write(ram: &GuestRam, cpus: u8, interrupts: u8) -> Result<(), PhysicalWriteError> {
    ram.write_physical(Gpa(place::MP_TABLE), &table(cpus, interrupts))?;
    let mut pointer = Vec::with_capacity(16);
    pointer.extend_from_slice(b"_MP_");
    pointer.extend_from_slice(&(place::MP_TABLE as u32).to_le_bytes());
    pointer.extend_from_slice(&[1, 4, 0, 0, 0, 0, 0, 0]); // 16 bytes, 1.4, checksum below
    seal(&mut pointer, 10);
    ram.write_physical(Gpa(POINTER), &pointer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_any_size_has_its_length_and_sums_to_zero() {
        for (cpus, interrupts, inputs) in [(1, 0, 16), (2, 16, 16), (3, 17, 17), (4, 24, 24)] {
            let table = table(cpus, interrupts);
            assert_eq!(
                u16::from_le_bytes([table[4], table[5]]) as usize,
                table.len()
            );
            assert_eq!(table.iter().fold(0u8, |s, b| s.wrapping_add(*b)), 0);
            let entries = u16::from_le_bytes([table[34], table[35]]);
            assert_eq!(entries, u16::from(cpus) + 2 + inputs + 2);
            assert_eq!(
                table.len(),
                44 + 20 * cpus as usize + 8 * (entries - u16::from(cpus)) as usize
            );
            assert!(place::MP_TABLE as usize + table.len() <= place::PVH_INFO as usize);
        }
    }
}
