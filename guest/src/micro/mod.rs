//! The micro guest: a 64-bit kernel of a few kilobytes, assembled on request, whose every
//! instruction is known.
//!
//! [`elf()`] returns an ELF file for the 64-bit Linux boot protocol: long mode on, memory below 1
//! GiB mapped to itself, RSI = `boot_params` with the command line. Addresses are physical =
//! virtual, from 0x100000. 2 MiB of RAM are enough (4 for `execk` and `execu`). The guest brings
//! its own descriptors, gates and page tables, uses no SSE, and prints on the serial port 0x3f8.
//!
//! The caller owns the machine: a serial port, a reset by port 0x64, and for some programs a local
//! APIC. The guest is for exact tests: it counts its own events and prints the count. It is no
//! model of Linux.
//!
//! # Command line
//! `PROGRAM [COUNT [CPUS]]`: COUNT and CPUS are decimal, 1 and 2 if missing. A COUNT of 0 means 1.
//! Further words are ignored. The guest prints `micro: PROGRAM COUNT`, runs, prints
//! `micro: count N` and `micro: done`, and resets. An unknown program prints
//! `micro: unknown program`. An unexpected trap prints
//! `micro: trap VECTOR at 0xRIP error 0xCODE address 0xCR2`. Both reset.
//!
//! | Program | Action, COUNT times | N |
//! |---|---|---|
//! | `calls` | calls `micro_leaf(n)`, n from 0 | right answers |
//! | `nested` | `micro_outer`, which enters `micro_recurse` 5 times, one inside the other | 5 × COUNT |
//! | `out` | writes a byte to the unused port 0x2f0 | COUNT |
//! | `usermmio` | user mode: writes 4 bytes to 0xd0000000, where no RAM is | COUNT |
//! | `syscalls` | user mode: SYSCALL, counted at `micro_syscall_entry` | COUNT |
//! | `usercalls` | user mode: calls `micro_user_leaf(n)` | right answers |
//! | `int3k`, `int3u` | executes its own int3, in kernel or user mode | #BP seen by the guest |
//! | `ud` | user mode: `ud2` | #UD seen |
//! | `fault` | user mode: writes to a page that is not present | #PF seen |
//! | `step` | calls `micro_step(n)`, a straight line of 24 instructions | right answers |
//! | `tick` | waits for a 100 Hz timer interrupt, halted | ticks seen |
//! | `smp` | `calls` on each of CPUS CPUs at once (at most 16); CPUs that do not come up are reported | COUNT × CPUS |
//! | `execk`, `execu` | executes the next case of the table in [`exec`], in kernel or user mode | COUNT |
//! | `tempty`, `tuempty` | nothing, in kernel or user mode, and stores how long that took (below) | COUNT |
//! | `tout` | times a byte written to the unused port 0x2f0 | COUNT |
//! | `tcall` | times a call of `micro_leaf` | COUNT |
//! | `tstep` | times a call of `micro_timed_step_leaf`, whose first instruction reads CR3 | COUNT |
//! | `tnop`, `tunop` | times a call of `micro_timed_nop_leaf`, `micro_user_timed_nop_leaf`: a NOP of one byte | COUNT |
//! | `tnested` | times a call of `micro_timed_deep_leaf` below 18 frames: 20 entries on its stack | COUNT |
//! | `tucall` | user mode: times a call of `micro_user_timed_leaf` | COUNT |
//! | `tmmio` | user mode: times 4 bytes written to 0xd0000000, where no RAM is | COUNT |
//! | `uloop` | user mode: 1000 instructions on registers; timed as a whole | COUNT |
//! | `sysloop` | as `syscalls`; timed as a whole | COUNT |
//! | `echo` | reads lines from the serial port and prints them back, until `quit` | lines, without `quit` |
//!
//! Timed programs store time-stamp ticks. Those of each round, 32 bits, are in `micro_samples`
//! (round n in slot n modulo 65,536). Those of the whole, 64 bits, are in `micro_elapsed`.
//!
//! These do not end: `spin` and `uspin` (a `jmp` to itself, in kernel and user mode), `hlt`
//! (halted, with a 100 Hz timer counting in `micro_ticks`), `dead` (halted with interrupts off).
//! `triple` ends in a triple fault.

mod asm;
mod calls;
mod console;
mod elf;
pub mod exec;
mod layout;
mod programs;
mod smp;
mod start;
mod strings;
mod tables;
mod timed;
mod traps;
mod user;

#[cfg(test)]
mod tests;

use asm::{AssembleError, Assembler, Code, Symbol};
use elf::{Kind, Segment};
use layout::{DATA, IDT, KERNEL_TEXT, MEMORY_END, PAGE, PML4, USER_TEXT, data};

/// Returns the names of all programs, as on the command line.
pub fn programs() -> impl Iterator<Item = &'static str> {
    programs::PROGRAMS.iter().map(|(name, _)| *name)
}

/// Returns the micro guest as an ELF64 executable of about 55 KiB, the same bytes every time.
///
/// Two loadable segments, and a symbol table with address and size of every function and variable;
/// all names start with `micro_`.
pub fn elf() -> Vec<u8> {
    // Only this crate's source decides whether this works, and a test runs it.
    #[expect(clippy::expect_used, reason = "the input is constant")]
    build().expect("the micro guest is constant and assembles")
}

/// The variables that have a symbol: name, address, bytes.
const OBJECTS: [(&str, u64, u64); 8] = [
    ("micro_gdt", data::GDT, tables::GDT_SIZE),
    ("micro_count", data::COUNT, 8),
    ("micro_ticks", data::TICKS, 8),
    ("micro_debug_count", data::DEBUG_COUNT, 8),
    ("micro_scratch", data::SCRATCH, 8),
    ("micro_elapsed", data::ELAPSED, 8),
    ("micro_idt", IDT, tables::IDT_SIZE),
    (
        "micro_samples",
        layout::SAMPLES,
        layout::SAMPLES_CAPACITY * layout::SAMPLE_SIZE,
    ),
];

fn build() -> Result<Vec<u8>, AssembleError> {
    let user = user::assemble()?;
    let kernel = kernel(&user)?;
    let mut text = Vec::new();
    place(
        &mut text,
        KERNEL_TEXT,
        KERNEL_TEXT,
        USER_TEXT,
        "kernel text",
        &kernel.bytes,
    )?;
    place(
        &mut text,
        KERNEL_TEXT,
        USER_TEXT,
        DATA,
        "user text",
        &user.bytes,
    )?;
    let segments = [
        Segment {
            name: ".text",
            address: KERNEL_TEXT,
            memory: DATA - KERNEL_TEXT,
            bytes: text,
            kind: Kind::Text,
        },
        Segment {
            name: ".data",
            address: DATA,
            bytes: data_bytes(&kernel)?,
            memory: MEMORY_END - DATA,
            kind: Kind::Data,
        },
    ];
    let entry = kernel.address("micro_start")?;
    let objects = OBJECTS.map(|(name, address, size)| Symbol {
        name,
        address,
        size,
    });
    let symbols = [kernel.symbols, user.symbols, objects.to_vec()].concat();
    Ok(elf::write(entry, &segments, &symbols)?)
}

/// Assembles all 64-bit kernel code.
fn kernel(user: &Code) -> Result<Code, AssembleError> {
    let mut asm = Assembler::new(64)?;
    start::assemble(&mut asm, programs::PROGRAMS.len() as u64)?;
    console::assemble(&mut asm)?;
    traps::assemble(&mut asm, user)?;
    programs::assemble(&mut asm, user)?;
    exec::assemble_kernel(&mut asm, user)?;
    smp::assemble(&mut asm)?;
    timed::assemble(&mut asm, user)?;
    asm.finish(KERNEL_TEXT)
}

/// Returns the content of the file from [`DATA`] on.
fn data_bytes(kernel: &Code) -> Result<Vec<u8>, AssembleError> {
    let entries = |entries: &[u64]| {
        entries
            .iter()
            .flat_map(|e| e.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let trampoline = smp::trampoline(kernel.address("micro_ap_start")?)?;
    let gdt_pointer = tables::table_pointer(data::GDT, tables::GDT_SIZE).to_vec();
    let idt_pointer = tables::table_pointer(IDT, tables::IDT_SIZE).to_vec();
    let parts = [
        (
            data::GDT,
            data::GDT_POINTER,
            "the descriptor table",
            entries(&tables::gdt()),
        ),
        (
            data::GDT_POINTER,
            data::IDT_POINTER,
            "the GDT pointer",
            gdt_pointer,
        ),
        (
            data::IDT_POINTER,
            data::NULL_POINTER,
            "the IDT pointer",
            idt_pointer,
        ),
        (
            data::TSS,
            data::COUNT,
            "the task-state segment",
            tables::tss().to_vec(),
        ),
        (
            data::PROGRAMS,
            data::STRINGS,
            "the program table",
            programs::table(kernel)?,
        ),
        (data::STRINGS, data::LINE, "the text", strings::bytes()),
        (
            data::TRAMPOLINE_SOURCE,
            IDT,
            "the real-mode trampoline",
            trampoline,
        ),
        (
            IDT,
            PML4,
            "the interrupt table",
            entries(&tables::idt(&traps::handlers(kernel)?)),
        ),
        (
            PML4,
            layout::FILE_END,
            "the page tables",
            entries(&tables::page_tables()),
        ),
    ];
    let mut bytes = Vec::new();
    for (address, end, part, content) in parts {
        place(&mut bytes, DATA, address, end, part, &content)?;
    }
    Ok(bytes)
}

/// Copies `content` to `address` in `bytes`, which start at `base`, and checks that it ends before
/// `end`.
fn place(
    bytes: &mut Vec<u8>,
    base: u64,
    address: u64,
    end: u64,
    part: &'static str,
    content: &[u8],
) -> Result<(), AssembleError> {
    let size = content.len() as u64;
    let room = end - address;
    if size > room {
        return Err(AssembleError::NoRoom { part, size, room });
    }
    bytes.resize((address - base) as usize, 0);
    bytes.extend(content);
    Ok(())
}

const _: () = assert!(DATA.is_multiple_of(PAGE) && KERNEL_TEXT.is_multiple_of(PAGE));
