//! Loading a kernel file into a machine, up to its first instruction.
//!
//! Takes an ELF `vmlinux` or a bzImage, whose payload is unpacked here, on the host, so that the
//! guest never runs the decompressor (and is never moved by it: an ELF boot stays where it is
//! linked). Writes kernel, initramfs, command line, boot parameters, MP table and, if the machine
//! has them, ACPI tables into guest RAM; the registers are `entry`'s business.

mod acpi;
pub(crate) mod entry;
mod kernel_file;
mod mptable;
mod params;
pub mod payload;
mod pvh;

use std::io::Cursor;

use introspect::Gpa;
use linux_loader::loader::KernelLoader;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use vm_memory::GuestAddress;

pub use acpi::{AcpiConfig, AcpiError, Ecam, MAX_ACPI_CPUS, MmioWindow};
pub use kernel_file::{KernelFile, KernelFileError};

use crate::memory::{GuestRam, PAGE_SIZE};

/// The places in low guest memory while a kernel starts. None overlap. All are below 640 KiB but
/// for the ACPI tables, which the guest keeps.
pub mod place {
    /// The GDT for the first instructions.
    pub const GDT: u64 = 0x500;
    /// The MP table. Its pointer is at 0x10, where the kernel's scan begins.
    pub const MP_TABLE: u64 = 0x600;
    /// The PVH start information.
    pub const PVH_INFO: u64 = 0x6000;
    /// The Linux boot parameters, the "zero page".
    pub const ZERO_PAGE: u64 = 0x7000;
    /// The top of the stack for the first instructions.
    pub const STACK_TOP: u64 = 0x8ff0;
    /// The page tables that map the first 4 GiB one to one: one PML4, one PDPT, four page
    /// directories.
    pub const PAGE_TABLES: u64 = 0x9000;
    /// The `setup_data` with the random seed.
    pub const SETUP_DATA: u64 = 0xf000;
    /// The command line.
    pub const COMMAND_LINE: u64 = 0x20000;
    /// The longest command line with its NUL, in bytes: the kernel's own COMMAND_LINE_SIZE.
    pub const COMMAND_LINE_MAX: usize = 2048;
    /// The first byte of the legacy hole (VGA, option ROMs), reserved.
    pub const LEGACY_HOLE: u64 = 0x9fc00;
    /// The ACPI root pointer, where the search for it begins (ACPI 6.5, 5.2.5.1).
    pub const RSDP: u64 = 0xe0000;
    /// The other ACPI tables, up to [`HIGH_MEMORY`].
    pub const ACPI_TABLES: u64 = 0xe0040;
    /// The address at which memory continues.
    pub const HIGH_MEMORY: u64 = 0x100000;
}

/// The protocol by which the kernel is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EntryProtocol {
    /// Linux 64-bit boot protocol: long mode, RSI at the boot parameters.
    Linux64,
    /// PVH: 32-bit protected mode, EBX at the start information.
    Pvh,
}

/// The parameters of a boot.
#[derive(Debug)]
pub struct BootConfig<'a> {
    /// The unpacked kernel.
    pub kernel: &'a KernelFile,
    /// The contents of the initramfs file.
    pub initramfs: Option<&'a [u8]>,
    /// The whole command line.
    pub command_line: &'a str,
    /// The number of vCPUs, from 1.
    pub cpus: u8,
    /// The contents of the ACPI tables. The default is none, which leaves the MP table.
    pub acpi: Option<AcpiConfig>,
    /// The bound of the interrupts that have devices. The ISA bus's 16 always exist.
    pub interrupts: u8,
    /// The protocol to use. The default is the 64-bit entry, because PVH leaves more to the guest.
    pub protocol: Option<EntryProtocol>,
    /// The seed for the guest's random numbers.
    pub rng_seed: [u8; 32],
}

/// The start of the boot vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryPoint {
    /// The protocol.
    pub protocol: EntryProtocol,
    /// The GPA of the first instruction.
    pub address: u64,
}

/// The reason that a boot cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The ELF's contents do not fit the machine or are inconsistent.
    #[error(
        "kernel: {reason}; it needs guest memory up to {needed:#x}, the machine has {memory:#x} bytes of RAM (give --memory)"
    )]
    KernelDoesNotFit {
        /// The loader's reason.
        reason: String,
        /// The end of the kernel in guest-physical memory according to its program headers.
        needed: u64,
        /// The size of RAM in bytes.
        memory: u64,
    },
    /// There is no room for the initramfs.
    #[error(
        "initramfs of {size} bytes does not fit between the kernel's end {kernel_end:#x} and the end of low memory {memory_end:#x}; give --memory at least {wanted} MiB"
    )]
    InitramfsDoesNotFit {
        /// The size of the file in bytes.
        size: u64,
        /// The end of the kernel, guest-physical.
        kernel_end: u64,
        /// The end of RAM below the hole.
        memory_end: u64,
        /// A sufficient memory size in MiB.
        wanted: u64,
    },
    /// The command line is too long.
    #[error("command line of {found} bytes: at most {} fit the kernel's buffer", place::COMMAND_LINE_MAX - 1)]
    CommandLine {
        /// The length in bytes.
        found: usize,
    },
    /// The kernel has no PVH entry.
    #[error("kernel: no PVH entry point (ELF note Xen 18) in it; use the 64-bit entry")]
    NoPvhEntry,
    /// The ACPI tables do not fit the machine.
    #[error("ACPI: {0}")]
    Acpi(#[from] AcpiError),
    /// Boot structures could not be written.
    #[error("boot structures: {0}")]
    Write(#[from] crate::memory::PhysicalWriteError),
}

/// Writes everything that the kernel needs into `ram` and returns its entry point.
///
/// # Errors
/// If the kernel, the initramfs, the command line or the ACPI tables do not fit.
pub fn load(ram: &GuestRam, config: &BootConfig<'_>) -> Result<EntryPoint, BootError> {
    if config.command_line.len() >= place::COMMAND_LINE_MAX {
        return Err(BootError::CommandLine {
            found: config.command_line.len(),
        });
    }
    if let Some(acpi) = &config.acpi {
        acpi.check(ram.size(), config.cpus)?;
    }
    let low_end = ram.size().min(crate::memory::HOLE_START);
    let needed = config.kernel.physical_end();
    let does_not_fit = |reason: String| BootError::KernelDoesNotFit {
        reason,
        needed,
        memory: ram.size(),
    };
    // Includes segments without data in the file, which the loader skips.
    if needed > low_end {
        return Err(does_not_fit("its end lies beyond RAM".into()));
    }
    // Touching the kernel's pages one by one would cost a host page fault each.
    ram.prefault(place::HIGH_MEMORY..needed);
    let mut image = Cursor::new(config.kernel.elf());
    let loaded = Elf::load(
        ram.map_ref(),
        None,
        &mut image,
        Some(GuestAddress(place::HIGH_MEMORY)),
    )
    .map_err(|e| does_not_fit(e.to_string()))?;

    let initramfs = match config.initramfs {
        Some(data) => Some(load_initramfs(ram, data, needed, low_end)?),
        None => None,
    };
    ram.write_physical(Gpa(place::COMMAND_LINE), config.command_line.as_bytes())?;
    ram.write_physical(
        Gpa(place::COMMAND_LINE + config.command_line.len() as u64),
        &[0],
    )?;
    mptable::write(ram, config.cpus, config.interrupts)?;
    if let Some(acpi) = &config.acpi {
        acpi::write(ram, acpi)?;
    }

    let pvh = match loaded.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(address) => Some(address.0),
        _ => None,
    };
    match config.protocol.unwrap_or(EntryProtocol::Linux64) {
        EntryProtocol::Linux64 => {
            params::write(ram, config, initramfs)?;
            Ok(EntryPoint {
                protocol: EntryProtocol::Linux64,
                address: loaded.kernel_load.0,
            })
        }
        EntryProtocol::Pvh => {
            let address = pvh.ok_or(BootError::NoPvhEntry)?;
            pvh::write(ram, config, initramfs)?;
            Ok(EntryPoint {
                protocol: EntryProtocol::Pvh,
                address,
            })
        }
    }
}

/// The place of a loaded initramfs: guest-physical start and length in bytes.
#[derive(Debug, Clone, Copy)]
struct Initramfs {
    start: u64,
    size: u64,
}

/// Puts the initramfs at the top of low memory, on a page boundary.
fn load_initramfs(
    ram: &GuestRam,
    data: &[u8],
    kernel_end: u64,
    low_end: u64,
) -> Result<Initramfs, BootError> {
    let size = data.len() as u64;
    let start = low_end.checked_sub(size).map(|s| s & !(PAGE_SIZE - 1));
    // The kernel places its first page tables and bitmaps after itself. Leave it at least 4 MiB.
    const KERNEL_ROOM: u64 = 4 << 20;
    match start {
        Some(start) if start >= kernel_end + KERNEL_ROOM || (size == 0 && start >= kernel_end) => {
            ram.write_physical(Gpa(start), data)?;
            Ok(Initramfs { start, size })
        }
        _ => Err(BootError::InitramfsDoesNotFit {
            size,
            kernel_end,
            memory_end: low_end,
            wanted: (kernel_end + KERNEL_ROOM + size).div_ceil(1 << 20) + 1,
        }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;

    use guest::elf::{Load, program};

    use super::*;

    /// Returns an ELF with a segment of code and one without data in the file.
    fn kernel(bss: u64, bss_size: u64) -> KernelFile {
        const HEADERS: u64 = 64 + 2 * 56;
        let load = |address, size, memory| Load {
            offset: HEADERS,
            address,
            size,
            memory,
        };
        let loads = [load(place::HIGH_MEMORY, 1, 0x1000), load(bss, 0, bss_size)];
        let elf = program(place::HIGH_MEMORY, &loads, &[0xf4]).unwrap();
        KernelFile::from_bytes(elf, Path::new("kernel")).unwrap()
    }

    #[test]
    fn memory_that_a_kernel_has_without_bytes_in_its_file_is_its_own() {
        const RAM: u64 = 16 << 20;
        let ram = GuestRam::new(RAM).unwrap();
        let load = |kernel: &KernelFile| {
            let config = BootConfig {
                kernel,
                initramfs: Some(b"initramfs"),
                command_line: "",
                cpus: 1,
                acpi: None,
                interrupts: 16,
                protocol: None,
                rng_seed: [0; 32],
            };
            super::load(&ram, &config).map(|entry| entry.address)
        };
        let fits = load(&kernel(2 << 20, 1 << 20));
        assert_eq!(fits.unwrap(), place::HIGH_MEMORY);
        let beyond = load(&kernel(2 << 20, RAM));
        assert!(matches!(beyond, Err(BootError::KernelDoesNotFit { .. })));
        // The initramfs would overlap it.
        let whole = load(&kernel(2 << 20, RAM - (2 << 20)));
        assert!(matches!(whole, Err(BootError::InitramfsDoesNotFit { .. })));
    }
}
