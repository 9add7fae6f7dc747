//! The path from the boot protocol's entry to the chosen program, and from its end to the reset.
//!
//! The caller (the machine) has entered long mode with low memory mapped to itself, and left the
//! address of `boot_params` in RSI (Documentation/x86/boot.rst, "64-bit boot protocol"). The guest
//! sets everything else itself.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::asm::Assembler;
use super::console::print_text;
use super::layout::{KERNEL_STACK_TOP, PML4, USER_STACK, data, selector};
use super::strings::Text;

/// `boot_params.hdr.cmd_line_ptr`, 32 bits.
const CMD_LINE_PTR: u32 = 0x228;
/// RFLAGS with only its always-one bit.
const FLAGS_NONE: i32 = 0x2;
/// RFLAGS in user mode: interrupts on.
const FLAGS_USER: i32 = 0x202;
/// The extended features: long mode, SYSCALL.
pub const MSR_EFER: u32 = 0xc000_0080;
const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;
const MSR_SFMASK: u32 = 0xc000_0084;
/// EFER.SCE.
const SYSCALL_ENABLE: i32 = 1;
/// The flags that SYSCALL clears: TF, IF and DF.
const SYSCALL_FLAG_MASK: i32 = 0x700;
/// The data ports of the two interrupt controllers.
const PIC_MASKS: [i32; 2] = [0x21, 0xa1];
/// COUNT if the command line has none.
const DEFAULT_COUNT: i32 = 1;
/// CPUS if the command line has none.
const DEFAULT_CPUS: i32 = 2;

/// Assembles all of this file; the image's entry comes first.
pub fn assemble(asm: &mut Assembler, programs: u64) -> Result<(), IcedError> {
    start(asm)?;
    system_calls(asm)?;
    main(asm, programs)?;
    parse_word(asm)?;
    parse_number(asm)?;
    finish(asm)?;
    enter_user(asm)
}

/// Assembles `micro_start`: descriptors, page tables, gates.
fn start(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_start")?;
    let main = asm.label("micro_main");
    let system_calls = asm.label("micro_enable_syscall");
    let a = &mut asm.code;
    let mut reloaded = a.create_label();
    a.cli()?;
    a.cld()?;
    a.mov(eax, PML4 as u32)?;
    a.mov(cr3, rax)?;
    a.lgdt(ptr(data::GDT_POINTER))?;
    a.mov(esp, KERNEL_STACK_TOP as u32)?;
    a.mov(rax, rsp)?;
    a.push(i32::from(selector::KERNEL_DATA))?;
    a.push(rax)?;
    a.push(FLAGS_NONE)?;
    a.push(i32::from(selector::KERNEL_CODE))?;
    a.lea(rax, ptr(reloaded))?;
    a.push(rax)?;
    a.iretq()?;
    a.set_label(&mut reloaded)?;
    a.mov(eax, u32::from(selector::KERNEL_DATA))?;
    a.mov(ds, eax)?;
    a.mov(es, eax)?;
    a.xor(eax, eax)?;
    a.mov(fs, eax)?;
    a.mov(gs, eax)?;
    a.lidt(ptr(data::IDT_POINTER))?;
    a.mov(eax, u32::from(selector::TSS))?;
    a.ltr(ax)?;
    a.mov(eax, 0xff)?;
    for port in PIC_MASKS {
        a.out(port, al)?;
    }
    a.call(system_calls)?;
    a.jmp(main)
}

/// Assembles `micro_enable_syscall`: the MSRs of SYSCALL. RSI is kept.
fn system_calls(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_enable_syscall")?;
    let entry = asm.label("micro_syscall_entry");
    let a = &mut asm.code;
    a.mov(ecx, MSR_EFER)?;
    a.rdmsr()?;
    a.or(eax, SYSCALL_ENABLE)?;
    a.wrmsr()?;
    a.mov(ecx, MSR_STAR)?;
    a.xor(eax, eax)?;
    a.mov(
        edx,
        u32::from(selector::SYSRET_BASE) << 16 | u32::from(selector::KERNEL_CODE),
    )?;
    a.wrmsr()?;
    a.mov(ecx, MSR_LSTAR)?;
    a.lea(rax, ptr(entry))?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    a.mov(ecx, MSR_SFMASK)?;
    a.mov(eax, SYSCALL_FLAG_MASK)?;
    a.wrmsr()?;
    a.ret()
}

/// Assembles `micro_main`: reads the command line, prints the first line, finds the program and
/// calls it with RDI = COUNT.
fn main(asm: &mut Assembler, programs: u64) -> Result<(), IcedError> {
    asm.function("micro_main")?;
    let print = asm.label("micro_print");
    let decimal = asm.label("micro_print_decimal");
    let word = asm.label("micro_parse_word");
    let number = asm.label("micro_parse_number");
    let finish = asm.label("micro_finish");
    let reset = asm.label("micro_reset");
    let a = &mut asm.code;
    let mut given = a.create_label();
    let mut counted = a.create_label();
    let mut next = a.create_label();
    let mut other = a.create_label();
    a.mov(edi, dword_ptr(rsi + CMD_LINE_PTR))?;
    a.test(edi, edi)?;
    a.jnz(given)?;
    // No command line: the key itself is an empty string while it is unset.
    a.mov(edi, data::KEY as u32)?;
    a.set_label(&mut given)?;
    a.call(word)?;
    a.mov(eax, DEFAULT_COUNT)?;
    a.call(number)?;
    a.test(rax, rax)?;
    a.jnz(counted)?;
    // Loops count down to zero, so they cannot run zero times.
    a.inc(rax)?;
    a.set_label(&mut counted)?;
    a.mov(qword_ptr(data::ARGUMENT), rax)?;
    a.mov(eax, DEFAULT_CPUS)?;
    a.call(number)?;
    a.mov(qword_ptr(data::CPUS), rax)?;

    print_text(a, print, Text::Prefix)?;
    a.mov(rsi, qword_ptr(data::WORD))?;
    a.mov(rcx, qword_ptr(data::WORD_LENGTH))?;
    a.call(print)?;
    print_text(a, print, Text::Space)?;
    a.mov(rax, qword_ptr(data::ARGUMENT))?;
    a.call(decimal)?;
    print_text(a, print, Text::Newline)?;

    a.mov(ebx, data::PROGRAMS as u32)?;
    a.mov(ebp, programs as u32)?;
    a.mov(rax, qword_ptr(data::KEY))?;
    a.mov(rcx, qword_ptr(data::KEY + 8))?;
    a.set_label(&mut next)?;
    a.cmp(rax, qword_ptr(rbx))?;
    a.jne(other)?;
    a.cmp(rcx, qword_ptr(rbx + 8))?;
    a.jne(other)?;
    a.mov(rdi, qword_ptr(data::ARGUMENT))?;
    a.call(qword_ptr(rbx + 16))?;
    a.jmp(finish)?;
    a.set_label(&mut other)?;
    a.add(rbx, data::PROGRAM_SIZE as i32)?;
    a.dec(ebp)?;
    a.jnz(next)?;
    print_text(a, print, Text::Unknown)?;
    a.jmp(reset)
}

/// Assembles `micro_parse_word`: copies the word at RDI, behind spaces, into the key; RDI moves
/// behind it.
fn parse_word(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_parse_word")?;
    let skip = asm.label("micro_parse_word");
    let a = &mut asm.code;
    let mut begin = a.create_label();
    let mut next = a.create_label();
    let mut end = a.create_label();
    a.cmp(byte_ptr(rdi), i32::from(b' '))?;
    a.jne(begin)?;
    a.inc(rdi)?;
    a.jmp(skip)?;
    a.set_label(&mut begin)?;
    a.mov(qword_ptr(data::WORD), rdi)?;
    a.xor(ecx, ecx)?;
    a.set_label(&mut next)?;
    a.mov(al, byte_ptr(rdi))?;
    // NUL, newline and space all end a word.
    a.cmp(al, i32::from(b' '))?;
    a.jbe(end)?;
    a.cmp(ecx, data::KEY_SIZE as i32)?;
    a.jae(end)?;
    a.mov(byte_ptr(rcx + data::KEY), al)?;
    a.inc(ecx)?;
    a.inc(rdi)?;
    a.jmp(next)?;
    a.set_label(&mut end)?;
    a.mov(qword_ptr(data::WORD_LENGTH), rcx)?;
    a.ret()
}

/// Assembles `micro_parse_number`: RAX = the decimal word behind spaces at RDI, and RDI moves
/// behind it. Both stay as they are if there is no such word, as with `8250.nr_uarts=1`.
fn parse_number(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_parse_number")?;
    let a = &mut asm.code;
    let mut skip = a.create_label();
    let mut begin = a.create_label();
    let mut next = a.create_label();
    let mut end = a.create_label();
    let mut none = a.create_label();
    a.mov(rsi, rdi)?;
    a.set_label(&mut skip)?;
    a.cmp(byte_ptr(rsi), i32::from(b' '))?;
    a.jne(begin)?;
    a.inc(rsi)?;
    a.jmp(skip)?;
    a.set_label(&mut begin)?;
    a.mov(r8, rsi)?;
    a.xor(edx, edx)?;
    a.set_label(&mut next)?;
    a.movzx(ecx, byte_ptr(rsi))?;
    a.sub(ecx, i32::from(b'0'))?;
    a.cmp(ecx, 9)?;
    a.ja(end)?;
    a.imul_3(rdx, rdx, 10)?;
    a.add(rdx, rcx)?;
    a.inc(rsi)?;
    a.jmp(next)?;
    a.set_label(&mut end)?;
    a.cmp(rsi, r8)?;
    a.je(none)?;
    a.cmp(byte_ptr(rsi), i32::from(b' '))?;
    a.ja(none)?;
    a.mov(rax, rdx)?;
    a.mov(rdi, rsi)?;
    a.set_label(&mut none)?;
    a.ret()
}

/// Assembles `micro_finish`: prints the count and the last line, and resets.
fn finish(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_finish")?;
    let print = asm.label("micro_print");
    let decimal = asm.label("micro_print_decimal");
    let reset = asm.label("micro_reset");
    let a = &mut asm.code;
    a.cli()?;
    print_text(a, print, Text::Count)?;
    a.mov(rax, qword_ptr(data::COUNT))?;
    a.call(decimal)?;
    print_text(a, print, Text::Newline)?;
    print_text(a, print, Text::Done)?;
    a.jmp(reset)
}

/// Assembles `micro_enter_user`: runs user code at RSI with RDI as it is, until `micro_user_exit`.
/// No register is kept.
fn enter_user(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_enter_user")?;
    let a = &mut asm.code;
    a.mov(qword_ptr(data::SAVED_RSP), rsp)?;
    a.push(i32::from(selector::USER_DATA))?;
    a.mov(eax, (USER_STACK + super::layout::PAGE) as u32)?;
    a.push(rax)?;
    a.push(FLAGS_USER)?;
    a.push(i32::from(selector::USER_CODE))?;
    a.push(rsi)?;
    a.iretq()
}
