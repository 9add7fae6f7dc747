//! The structures that the CPU reads by itself: descriptors, gates and page tables. They are made
//! here as data, so that the guest runs no code for them.
//!
//! The formats are those of the Intel SDM volume 3, "Protected-mode memory management" and
//! "Interrupt and exception handling".

use super::layout::{
    FILE_END, HOLES, IDT, LAPIC, MEMORY_END, PAGE, PD_DEVICES, PD_LOW, PDPT, PML4, PT_LOW,
    PT_USER_MMIO, SAMPLES, TRAP_STACK_TOP, USER_MMIO, USER_STACK, USER_TEXT, data, selector,
};

/// Returns the segment descriptors of the selectors in [`selector`]; the task-state segment takes
/// two slots.
pub fn gdt() -> [u64; 10] {
    // Flat segments: type and DPL in bits 40 to 47, L in bit 53, D/B in bit 54, G in bit 55, limit
    // all ones.
    const CODE64: u64 = 0x00af_9b00_0000_ffff;
    const DATA: u64 = 0x00cf_9300_0000_ffff;
    const CODE32: u64 = 0x00cf_9b00_0000_ffff;
    const RING3: u64 = 3 << 45;
    let tss_limit = TSS_SIZE as u64 - 1;
    let tss_base = data::TSS;
    // An available 64-bit TSS is type 9. The base is below 16 MiB, so its upper parts are zero.
    let tss = tss_limit | (tss_base & 0xff_ffff) << 16 | 0x89 << 40;
    [
        0,
        0,
        CODE64,
        DATA,
        CODE32 | RING3,
        DATA | RING3,
        CODE64 | RING3,
        0,
        tss,
        0,
    ]
}

/// The size of the table made by [`gdt`], in bytes.
pub const GDT_SIZE: u64 = 10 * 8;

/// The size of a 64-bit task-state segment, in bytes.
const TSS_SIZE: usize = 104;

/// Returns a task-state segment with RSP0 only, and no I/O permission map.
pub fn tss() -> [u8; TSS_SIZE] {
    let mut tss = [0; TSS_SIZE];
    tss[4..12].copy_from_slice(&TRAP_STACK_TOP.to_le_bytes());
    tss[102..104].copy_from_slice(&(TSS_SIZE as u16).to_le_bytes());
    tss
}

/// Returns the 10-byte operand of LGDT and LIDT: limit, base.
pub fn table_pointer(base: u64, bytes: u64) -> [u8; 10] {
    let mut pointer = [0; 10];
    pointer[..2].copy_from_slice(&((bytes - 1) as u16).to_le_bytes());
    pointer[2..].copy_from_slice(&base.to_le_bytes());
    pointer
}

/// Returns interrupt gates for `handlers[vector]`, as pairs of 8 bytes. #BP may be raised from ring
/// 3.
pub fn idt(handlers: &[u64; 256]) -> Vec<u64> {
    let breakpoint = 3;
    handlers
        .iter()
        .enumerate()
        .flat_map(|(number, &handler)| {
            let attributes = if number == breakpoint { 0xee00 } else { 0x8e00 };
            let low = handler & 0xffff
                | u64::from(selector::KERNEL_CODE) << 16
                | attributes << 32
                | (handler & 0xffff_0000) << 32;
            [low, handler >> 32]
        })
        .collect()
}

/// The size of the table made by [`idt`], in bytes.
pub const IDT_SIZE: u64 = 256 * 16;
const _: () = assert!(IDT + IDT_SIZE <= PML4);

const PRESENT: u64 = 1;
const WRITABLE: u64 = 2;
/// The entry bit that opens a page to ring 3.
pub const USER: u64 = 4;
const CACHE_DISABLE: u64 = 0x10;
const LARGE: u64 = 0x80;
/// The size of the memory that a level 2 entry maps, in bytes.
pub const LARGE_PAGE: u64 = 0x20_0000;
const GIB: u64 = 0x4000_0000;

/// The bits that the page-fault handler sets in, or clears from, the entry of one of [`HOLES`].
/// Accessed and dirty included.
pub const HOLE_PRESENT: u64 = PRESENT | WRITABLE | USER | 0x60;

/// Returns the address of the level 1 entry of a page of the first 2 MiB.
pub const fn low_entry(address: u64) -> u64 {
    PT_LOW + address / PAGE * 8
}

/// Returns the page tables, from [`PML4`] to [`FILE_END`], as entries.
///
/// They map the first GiB to itself for the kernel, with the user pages inside it. Beyond it they
/// map the local APIC, and one user page at [`USER_MMIO`].
pub fn page_tables() -> Vec<u64> {
    let mut tables = vec![0; ((FILE_END - PML4) / 8) as usize];
    let mut set = |table: u64, index: u64, entry: u64| {
        if let Some(slot) = tables.get_mut(((table - PML4) / 8 + index) as usize) {
            *slot = entry;
        }
    };
    let any = PRESENT | WRITABLE | USER;
    set(PML4, 0, PDPT | any);
    set(PDPT, 0, PD_LOW | any);
    set(PDPT, USER_MMIO / GIB, PD_DEVICES | any);
    set(PD_LOW, 0, PT_LOW | any);
    for index in 1..512 {
        set(
            PD_LOW,
            index,
            (index * LARGE_PAGE) | PRESENT | WRITABLE | LARGE,
        );
    }
    for index in 0..512 {
        let page = index * PAGE;
        let flags = match page {
            USER_TEXT => PRESENT | USER,
            USER_STACK | SAMPLES..MEMORY_END => any,
            _ if HOLES.contains(&page) => 0,
            _ => PRESENT | WRITABLE,
        };
        set(PT_LOW, index, page | flags);
    }
    let device = PRESENT | WRITABLE | CACHE_DISABLE;
    set(PD_DEVICES, LAPIC % GIB / LARGE_PAGE, LAPIC | device | LARGE);
    set(PD_DEVICES, USER_MMIO % GIB / LARGE_PAGE, PT_USER_MMIO | any);
    set(
        PT_USER_MMIO,
        USER_MMIO % LARGE_PAGE / PAGE,
        USER_MMIO | device | USER,
    );
    tables
}
// One level 1 table covers the image, and the two device pages share their level 2 table.
const _: () = assert!(MEMORY_END <= LARGE_PAGE && USER_MMIO / GIB == LAPIC / GIB);
