//! The program `smp`: wakes the other CPUs by INIT and SIPI, and runs the call loop on all of them
//! at once.
//!
//! The number of CPUs is the third word of the command line. A CPU that does not come up is
//! reported, not waited for.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::asm::{AssembleError, Assembler};
use super::console::print_text;
use super::layout::{
    AP_MAX, AP_STACK_SIZE, AP_STACKS, LAPIC, PAGE, PML4, TRAMPOLINE, data, lapic, selector, vector,
};
use super::start::MSR_EFER;
use super::strings::Text;
use super::tables::{GDT_SIZE, table_pointer};

/// The INIT command: all but self, assert, delivery mode INIT.
const INIT_OTHERS: i32 = 0xc_4500;
/// The SIPI command: the same with delivery mode start-up, at [`TRAMPOLINE`].
const SIPI_OTHERS: i32 = 0xc_4600 | (TRAMPOLINE / PAGE) as i32;
/// The time-stamp ticks to wait for the others: seconds on any machine.
const PATIENCE: u64 = 10_000_000_000;
/// EFER.LME and EFER.SCE.
const EFER_LONG: u32 = 0x101;
/// CR4.PAE.
const CR4_PAE: u32 = 0x20;
/// CR0: PG, WP, NE, ET, MP, PE.
const CR0_LONG: u32 = 0x8001_0033;

/// The offset of the LGDT operand's copy in the trampoline.
const GDT_POINTER: u64 = 0x70;
/// The size of the trampoline in bytes.
pub const TRAMPOLINE_SIZE: u64 = 0x80;

/// Assembles the 64-bit part.
pub fn assemble(asm: &mut Assembler) -> Result<(), IcedError> {
    first(asm)?;
    other(asm)
}

/// Assembles `micro_smp`, for the first CPU. RDI = COUNT for each CPU.
fn first(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_smp")?;
    let call_loop = asm.label("micro_call_loop");
    let print = asm.label("micro_print");
    let decimal = asm.label("micro_print_decimal");
    let a = &mut asm.code;
    let mut wait_online = a.create_label();
    let mut all_online = a.create_label();
    let mut wait_done = a.create_label();
    a.push(rdi)?;
    a.mov(esi, data::TRAMPOLINE_SOURCE as u32)?;
    a.mov(edi, TRAMPOLINE as u32)?;
    a.mov(ecx, TRAMPOLINE_SIZE as u32)?;
    a.rep().movsb()?;
    a.mov(eax, LAPIC as u32)?;
    let enabled = lapic::SOFTWARE_ENABLE | i32::from(vector::SPURIOUS);
    a.mov(dword_ptr(rax + lapic::SPURIOUS_VECTOR), enabled)?;
    a.mov(dword_ptr(rax + lapic::ICR_LOW), INIT_OTHERS)?;
    a.mov(dword_ptr(rax + lapic::ICR_LOW), SIPI_OTHERS)?;

    let rdtsc = |a: &mut CodeAssembler| {
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.or(rax, rdx)
    };
    rdtsc(a)?;
    a.mov(rbx, PATIENCE)?;
    a.add(rbx, rax)?;
    a.set_label(&mut wait_online)?;
    a.pause()?;
    a.mov(rcx, qword_ptr(data::AP_ONLINE))?;
    a.inc(rcx)?;
    a.cmp(rcx, qword_ptr(data::CPUS))?;
    a.jae(all_online)?;
    rdtsc(a)?;
    a.cmp(rax, rbx)?;
    a.jb(wait_online)?;
    print_text(a, print, Text::Missing)?;
    a.mov(rax, qword_ptr(data::AP_ONLINE))?;
    a.inc(rax)?;
    a.call(decimal)?;
    print_text(a, print, Text::Newline)?;

    a.set_label(&mut all_online)?;
    // CPUs that come late find this changed and do not take part.
    a.mov(rbp, qword_ptr(data::AP_ONLINE))?;
    a.mov(dword_ptr(data::AP_GO), 1)?;
    a.pop(rdi)?;
    a.call(call_loop)?;
    a.lock().add(qword_ptr(data::COUNT), rax)?;
    a.set_label(&mut wait_done)?;
    a.pause()?;
    a.cmp(qword_ptr(data::AP_DONE), rbp)?;
    a.jb(wait_done)?;
    a.ret()
}

/// Assembles `micro_ap_start`, for every other CPU, from long mode on.
fn other(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_ap_start")?;
    let call_loop = asm.label("micro_call_loop");
    let a = &mut asm.code;
    let mut wait = a.create_label();
    let mut go = a.create_label();
    let mut park = a.create_label();
    a.mov(eax, u32::from(selector::KERNEL_DATA))?;
    a.mov(ds, eax)?;
    a.mov(es, eax)?;
    a.mov(ss, eax)?;
    a.lidt(ptr(data::IDT_POINTER))?;
    a.cmp(dword_ptr(data::AP_GO), 0)?;
    a.jne(park)?;
    a.mov(eax, 1)?;
    a.lock().xadd(qword_ptr(data::AP_ONLINE), rax)?;
    a.cmp(rax, AP_MAX as i32)?;
    a.jae(park)?;
    a.inc(rax)?;
    a.imul_3(rax, rax, AP_STACK_SIZE as i32)?;
    a.lea(rsp, ptr(rax + AP_STACKS))?;
    a.set_label(&mut wait)?;
    a.pause()?;
    a.cmp(dword_ptr(data::AP_GO), 0)?;
    a.jne(go)?;
    a.jmp(wait)?;
    a.set_label(&mut go)?;
    a.mov(rdi, qword_ptr(data::ARGUMENT))?;
    a.call(call_loop)?;
    a.lock().add(qword_ptr(data::COUNT), rax)?;
    a.lock().inc(qword_ptr(data::AP_DONE))?;
    a.set_label(&mut park)?;
    a.cli()?;
    a.hlt()?;
    a.jmp(park)
}

/// Returns the real-mode code for [`TRAMPOLINE`]: straight into long mode, then to `target`.
pub fn trampoline(target: u64) -> Result<Vec<u8>, AssembleError> {
    let mut asm = Assembler::new(16)?;
    let a = &mut asm.code;
    a.cli()?;
    a.xor(ax, ax)?;
    a.mov(ds, ax)?;
    a.lgdt(ptr((TRAMPOLINE + GDT_POINTER) as u32))?;
    a.mov(eax, CR4_PAE)?;
    a.mov(cr4, eax)?;
    a.mov(eax, PML4 as u32)?;
    a.mov(cr3, eax)?;
    a.mov(ecx, MSR_EFER)?;
    a.mov(eax, EFER_LONG)?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    a.mov(eax, CR0_LONG)?;
    a.mov(cr0, eax)?;
    // jmp far KERNEL_CODE:target with a 32-bit offset.
    let offset = (target as u32).to_le_bytes();
    let code = selector::KERNEL_CODE.to_le_bytes();
    a.db(&[0x66, 0xea])?;
    a.db(&offset)?;
    a.db(&code)?;
    let mut bytes = asm.finish(TRAMPOLINE)?.bytes;
    let size = bytes.len() as u64;
    if size > GDT_POINTER {
        return Err(AssembleError::NoRoom {
            part: "the real-mode trampoline",
            size,
            room: GDT_POINTER,
        });
    }
    bytes.resize(GDT_POINTER as usize, 0);
    bytes.extend(table_pointer(data::GDT, GDT_SIZE));
    bytes.resize(TRAMPOLINE_SIZE as usize, 0);
    Ok(bytes)
}
