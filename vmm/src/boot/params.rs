//! Linux boot parameters: the zero page, the e820 map and the `setup_data` with the random seed.
//!
//! Source: Documentation/arch/x86/boot.rst and zero-page.rst of the kernel.

use introspect::Gpa;
use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::GuestAddress;

use super::{AcpiConfig, BootConfig, Initramfs, place};
use crate::memory::{GuestRam, PhysicalWriteError, layout};

const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;
/// Boot protocol 2.15: the newest one Linux documents.
const PROTOCOL_VERSION: u16 = 0x020f;
const LOADER_UNDEFINED: u8 = 0xff;
const LOADED_HIGH: u8 = 1;
const KERNEL_ALIGNMENT: u32 = 0x20_0000;
const SETUP_RNG_SEED: u32 = 9;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// One row of the e820 map: start, length in bytes, type.
pub(super) type E820Row = (u64, u64, u32);

/// Returns the machine's memory as BIOS calls would report it.
///
/// The ACPI tables lie in the reserved row below 1 MiB. The ECAM gets a row of its own, as the PCI
/// Firmware Specification (3.2, 4.1.2) asks for it.
pub(super) fn e820(memory: u64, acpi: Option<&AcpiConfig>) -> Vec<E820Row> {
    let mut rows = vec![
        (0, place::LEGACY_HOLE, E820_RAM),
        (
            place::LEGACY_HOLE,
            place::HIGH_MEMORY - place::LEGACY_HOLE,
            E820_RESERVED,
        ),
    ];
    for range in layout(memory) {
        let start = range.start.max(place::HIGH_MEMORY);
        rows.push((start, range.end - start, E820_RAM));
    }
    if let Some(acpi) = acpi {
        let ecam = acpi.ecam.range();
        rows.push((ecam.start, ecam.end - ecam.start, E820_RESERVED));
        rows.sort_unstable();
    }
    rows
}

/// Returns the GPA of the ACPI root pointer, or 0 if the machine has none.
pub(super) fn rsdp(config: &BootConfig<'_>) -> u64 {
    match config.acpi {
        Some(_) => place::RSDP,
        None => 0,
    }
}

pub(super) fn write(
    ram: &GuestRam,
    config: &BootConfig<'_>,
    initramfs: Option<Initramfs>,
) -> Result<(), PhysicalWriteError> {
    let mut params = boot_params::default();
    let header = &mut params.hdr;
    header.type_of_loader = LOADER_UNDEFINED;
    header.boot_flag = BOOT_FLAG;
    header.header = HEADER_MAGIC;
    header.version = PROTOCOL_VERSION;
    header.loadflags = LOADED_HIGH;
    header.kernel_alignment = KERNEL_ALIGNMENT;
    header.cmd_line_ptr = place::COMMAND_LINE as u32;
    header.cmdline_size = config.command_line.len() as u32;
    header.setup_data = place::SETUP_DATA;
    if let Some(initramfs) = initramfs {
        // Both fit: the initramfs lies below the hole under 4 GiB.
        header.ramdisk_image = initramfs.start as u32;
        header.ramdisk_size = initramfs.size as u32;
    }
    params.acpi_rsdp_addr = rsdp(config);
    let rows = e820(ram.size(), config.acpi.as_ref());
    for (slot, (addr, size, kind)) in params.e820_table.iter_mut().zip(&rows) {
        *slot = boot_e820_entry {
            addr: *addr,
            size: *size,
            r#type: *kind,
        };
    }
    params.e820_entries = rows.len() as u8;

    let mut seed = Vec::with_capacity(48);
    seed.extend_from_slice(&0u64.to_le_bytes()); // no further setup_data
    seed.extend_from_slice(&SETUP_RNG_SEED.to_le_bytes());
    seed.extend_from_slice(&(config.rng_seed.len() as u32).to_le_bytes());
    seed.extend_from_slice(&config.rng_seed);
    ram.write_physical(Gpa(place::SETUP_DATA), &seed)?;

    let zero_page = Gpa(place::ZERO_PAGE);
    let length = size_of::<boot_params>();
    LinuxBootConfigurator::write_bootparams(
        &BootParams::new(&params, GuestAddress(zero_page.0)),
        ram.map_ref(),
    )
    .map_err(|_| PhysicalWriteError {
        address: zero_page,
        length,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_ascending_and_leaves_the_holes_out() {
        for memory in [32 << 20, 3 << 30, 5 << 30u64] {
            let without = e820(memory, None);
            let acpi = AcpiConfig::new(1);
            let rows = e820(memory, Some(&acpi));
            assert_eq!(rows.len(), without.len() + 1);
            assert!(without.iter().all(|row| rows.contains(row)), "{rows:x?}");
            assert!(
                rows.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0),
                "{rows:x?}"
            );
            let ram: u64 = rows.iter().filter(|r| r.2 == E820_RAM).map(|r| r.1).sum();
            assert_eq!(ram, memory - (place::HIGH_MEMORY - place::LEGACY_HOLE));
        }
    }
}
