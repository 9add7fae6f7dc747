//! The PVH start information that EBX points to in Xen's direct boot ABI.
//!
//! Source: xen/include/public/arch-x86/hvm/start_info.h, as documented in the kernel's
//! include/xen/interface/hvm/start_info.h.

use introspect::Gpa;
use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use vm_memory::GuestAddress;

use super::{BootConfig, Initramfs, params, place};
use crate::memory::{GuestRam, PhysicalWriteError};

const START_MAGIC: u32 = 0x336e_c578;
const VERSION_WITH_MEMORY_MAP: u32 = 1;

/// Writes the start information, memory map and module list.
pub(super) fn write(
    ram: &GuestRam,
    config: &BootConfig<'_>,
    initramfs: Option<Initramfs>,
) -> Result<(), PhysicalWriteError> {
    let map_at = place::PVH_INFO + 0x100;
    let modules_at = place::PVH_INFO + 0x800;
    let rows: Vec<hvm_memmap_table_entry> = params::e820(ram.size(), config.acpi.as_ref())
        .into_iter()
        .map(|(addr, size, type_)| hvm_memmap_table_entry {
            addr,
            size,
            type_,
            reserved: 0,
        })
        .collect();
    let mut info = hvm_start_info {
        magic: START_MAGIC,
        version: VERSION_WITH_MEMORY_MAP,
        cmdline_paddr: place::COMMAND_LINE,
        rsdp_paddr: params::rsdp(config),
        memmap_paddr: map_at,
        memmap_entries: rows.len() as u32,
        ..Default::default()
    };
    let modules: Vec<hvm_modlist_entry> = initramfs
        .map(|i| hvm_modlist_entry {
            paddr: i.start,
            size: i.size,
            ..Default::default()
        })
        .into_iter()
        .collect();
    if !modules.is_empty() {
        info.nr_modules = 1;
        info.modlist_paddr = modules_at;
    }
    let mut boot = BootParams::new(&info, GuestAddress(place::PVH_INFO));
    boot.set_sections(&rows, GuestAddress(map_at));
    if !modules.is_empty() {
        boot.set_modules(&modules, GuestAddress(modules_at));
    }
    PvhBootConfigurator::write_bootparams(&boot, ram.map_ref()).map_err(|_| PhysicalWriteError {
        address: Gpa(place::PVH_INFO),
        length: size_of::<hvm_start_info>(),
    })
}
