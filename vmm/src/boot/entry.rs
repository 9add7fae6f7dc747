//! The registers, descriptor table and page tables with which a boot vCPU starts.
//!
//! Sources: the PVH ABI (32-bit, paging off), and Documentation/arch/x86/boot.rst ("64-bit boot
//! protocol"). In the latter, selectors are 0x10 and 0x18, flat. Paging is on, with the kernel and
//! its parameters mapped one to one.

use introspect::Gpa;
use kvm_bindings::{kvm_regs, kvm_sregs};

use super::{EntryPoint, EntryProtocol, place};
use crate::memory::{GuestRam, PhysicalWriteError};
use crate::x86_64::{rflags, segments};

const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

const PAGE_PRESENT: u64 = 1;
const PAGE_WRITABLE: u64 = 2;
const PAGE_LARGE: u64 = 1 << 7;
const LARGE_PAGE: u64 = 2 << 20;
const GIB: u64 = 1 << 30;

/// Writes the descriptor table and page tables for `entry` and returns the initial registers.
/// `sregs` must be KVM's for a new vCPU.
///
/// # Errors
/// If the tables' place is not RAM.
pub fn prepare(
    ram: &GuestRam,
    entry: EntryPoint,
    mut sregs: kvm_sregs,
) -> Result<(kvm_regs, kvm_sregs), PhysicalWriteError> {
    let mut regs = kvm_regs {
        rip: entry.address,
        rflags: rflags::FIXED,
        ..Default::default()
    };
    let code = match entry.protocol {
        EntryProtocol::Linux64 => segments::code64(CODE),
        EntryProtocol::Pvh => segments::code32(CODE),
    };
    let data = segments::data(DATA);
    let task = kvm_bindings::kvm_segment {
        selector: TASK,
        limit: 0x67,
        type_: 0xb, // busy TSS
        present: 1,
        ..Default::default()
    };
    let table = [
        0,
        0,
        segments::descriptor(&code),
        segments::descriptor(&data),
        segments::descriptor(&task),
        0,
    ];
    for (at, entry) in (place::GDT..).step_by(8).zip(table) {
        ram.write_physical(Gpa(at), &u64::to_le_bytes(entry))?;
    }
    sregs.gdt.base = place::GDT;
    sregs.gdt.limit = (size_of_val(&table) - 1) as u16;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cs = code;
    for segment in [
        &mut sregs.ds,
        &mut sregs.es,
        &mut sregs.fs,
        &mut sregs.gs,
        &mut sregs.ss,
    ] {
        *segment = data;
    }
    sregs.tr = task;
    sregs.cr0 = CR0_PE | CR0_ET;
    match entry.protocol {
        EntryProtocol::Linux64 => {
            write_page_tables(ram)?;
            sregs.cr3 = place::PAGE_TABLES;
            sregs.cr4 |= CR4_PAE;
            sregs.cr0 |= CR0_PG;
            sregs.efer |= EFER_LME | EFER_LMA;
            regs.rsi = place::ZERO_PAGE;
            regs.rsp = place::STACK_TOP;
            regs.rbp = place::STACK_TOP;
        }
        EntryProtocol::Pvh => regs.rbx = place::PVH_INFO,
    }
    Ok((regs, sregs))
}

/// Maps the first 4 GiB one to one with 2 MiB pages.
fn write_page_tables(ram: &GuestRam) -> Result<(), PhysicalWriteError> {
    let table = |index: u64| place::PAGE_TABLES + index * 0x1000;
    let flags = PAGE_PRESENT | PAGE_WRITABLE;
    let put = |at: u64, value: u64| ram.write_physical(Gpa(at), &value.to_le_bytes());
    put(table(0), table(1) | flags)?;
    for gib in 0..4 {
        put(table(1) + gib * 8, table(2 + gib) | flags)?;
        for large in 0..512 {
            let address = gib * GIB + large * LARGE_PAGE;
            put(table(2 + gib) + large * 8, address | flags | PAGE_LARGE)?;
        }
    }
    Ok(())
}
