//! The memory layout of the micro guest. Virtual and physical addresses are equal.
//!
//! Only this file holds addresses; code and tables name them.

/// Kernel text, from the start of the image. [`USER_TEXT`] is its end.
pub const KERNEL_TEXT: u64 = 0x10_0000;
/// The one page of user text.
pub const USER_TEXT: u64 = 0x10_3000;
/// Initialised data: descriptors, variables, strings.
pub const DATA: u64 = 0x10_4000;
/// Interrupt descriptor table, 256 gates of 16 bytes.
pub const IDT: u64 = 0x10_5000;
/// Top page table (level 4).
pub const PML4: u64 = 0x10_6000;
/// The level 3 table of the first 512 GiB.
pub const PDPT: u64 = 0x10_7000;
/// The level 2 table of the first GiB.
pub const PD_LOW: u64 = 0x10_8000;
/// The level 1 table of the first 2 MiB: the image, with its user pages.
pub const PT_LOW: u64 = 0x10_9000;
/// The level 2 table of the fourth GiB: devices.
pub const PD_DEVICES: u64 = 0x10_a000;
/// The level 1 table of the 2 MiB around [`USER_MMIO`].
pub const PT_USER_MMIO: u64 = 0x10_b000;
/// The end of the file's content; from here on memory starts as zeros.
pub const FILE_END: u64 = 0x10_c000;
/// The user stack, one page.
pub const USER_STACK: u64 = 0x10_c000;
/// Two user pages that start as not present, for the program `fault`. They differ in bit 12 only.
pub const HOLES: [u64; 2] = [0x10_e000, 0x10_f000];
/// The top of the stack of the kernel's main path, which grows down from here.
pub const KERNEL_STACK_TOP: u64 = 0x11_1000;
/// The top of the stack of traps from user mode (RSP0 in the task-state segment).
pub const TRAP_STACK_TOP: u64 = 0x11_2000;
/// The stacks of CPUs 1 and up, [`AP_STACK_SIZE`] bytes each, ascending.
pub const AP_STACKS: u64 = 0x11_2000;
/// The size of one such stack in bytes.
pub const AP_STACK_SIZE: u64 = 0x800;
/// The most CPUs that the program `smp` starts besides the first.
pub const AP_MAX: u64 = 15;
/// The ticks of the rounds of the programs that measure, 4 bytes each, in user pages.
pub const SAMPLES: u64 = 0x12_0000;
/// The number of those ticks; a power of two.
pub const SAMPLES_CAPACITY: u64 = 0x1_0000;
/// The size of one in bytes.
pub const SAMPLE_SIZE: u64 = 4;
/// The end of all memory of the image.
pub const MEMORY_END: u64 = SAMPLES + SAMPLES_CAPACITY * SAMPLE_SIZE;

/// The size of a page in bytes.
pub const PAGE: u64 = 0x1000;
/// The address at which CPUs woken by SIPI start, in real mode. SIPI vector 8.
pub const TRAMPOLINE: u64 = 0x8000;
/// A guest-physical address without RAM, mapped for user mode.
pub const USER_MMIO: u64 = 0xd000_0000;
/// The local APIC's registers (Intel SDM volume 3, "Local APIC register address map").
pub const LAPIC: u64 = 0xfee0_0000;

/// The written registers of the local APIC, by their offset from [`LAPIC`].
pub mod lapic {
    /// The end of interrupt.
    pub const EOI: u32 = 0xb0;
    /// The spurious interrupt vector, and [`SOFTWARE_ENABLE`].
    pub const SPURIOUS_VECTOR: u32 = 0xf0;
    /// The bit of it that enables the APIC.
    pub const SOFTWARE_ENABLE: i32 = 0x100;
    /// The low half of the interrupt command (Intel SDM volume 3, "Issuing interprocessor
    /// interrupts").
    pub const ICR_LOW: u32 = 0x300;
    /// The timer's vector and mode.
    pub const TIMER_VECTOR: u32 = 0x320;
    /// The value that the timer counts down from.
    pub const TIMER_INITIAL_COUNT: u32 = 0x380;
    /// The divisor of the timer's clock.
    pub const TIMER_DIVIDE: u32 = 0x3e0;
}

/// Selectors, in Linux's order, so that STAR and the boot protocol's `__BOOT_CS` fit too.
pub mod selector {
    /// 64-bit code, ring 0.
    pub const KERNEL_CODE: u16 = 0x10;
    /// Data, ring 0.
    pub const KERNEL_DATA: u16 = 0x18;
    /// The base of the selectors that SYSRET loads: +8 is user data, +16 is 64-bit user code.
    pub const SYSRET_BASE: u16 = 0x23;
    /// Data, ring 3.
    pub const USER_DATA: u16 = 0x2b;
    /// 64-bit code, ring 3.
    pub const USER_CODE: u16 = 0x33;
    /// Task-state segment.
    pub const TSS: u16 = 0x40;
}

/// The interrupt vectors used here besides the CPU's own exceptions.
pub mod vector {
    /// Local APIC timer.
    pub const TIMER: u8 = 0x20;
    /// Spurious interrupt of the local APIC.
    pub const SPURIOUS: u8 = 0xff;
}

/// Addresses inside the data page.
pub mod data {
    use super::DATA;

    /// Global descriptor table, 10 slots of 8 bytes.
    pub const GDT: u64 = DATA;
    /// The operand of LGDT.
    pub const GDT_POINTER: u64 = DATA + 0x60;
    /// The operand of LIDT.
    pub const IDT_POINTER: u64 = DATA + 0x70;
    /// The operand of LIDT for a table without gates.
    pub const NULL_POINTER: u64 = DATA + 0x80;
    /// Task-state segment, 104 bytes.
    pub const TSS: u64 = DATA + 0x90;
    /// The guest's count, printed at the end.
    pub const COUNT: u64 = DATA + 0x100;
    /// The number of timer interrupts.
    pub const TICKS: u64 = DATA + 0x108;
    /// The number of debug exceptions (#DB) that reached the guest.
    pub const DEBUG_COUNT: u64 = DATA + 0x110;
    /// COUNT from the command line.
    pub const ARGUMENT: u64 = DATA + 0x118;
    /// CPUS from the command line.
    pub const CPUS: u64 = DATA + 0x120;
    /// The first byte of PROGRAM on the command line.
    pub const WORD: u64 = DATA + 0x128;
    /// The length of PROGRAM, at most [`KEY_SIZE`].
    pub const WORD_LENGTH: u64 = DATA + 0x130;
    /// The kernel's RSP while a user program runs.
    pub const SAVED_RSP: u64 = DATA + 0x138;
    /// The number of CPUs that have arrived, without the first.
    pub const AP_ONLINE: u64 = DATA + 0x140;
    /// Non-zero once all may start.
    pub const AP_GO: u64 = DATA + 0x148;
    /// The number of CPUs that have finished, without the first.
    pub const AP_DONE: u64 = DATA + 0x150;
    /// PROGRAM, padded with zeros.
    pub const KEY: u64 = DATA + 0x160;
    /// The size of [`KEY`] in bytes.
    pub const KEY_SIZE: u64 = 16;
    /// The target of stores of the program `step`.
    pub const SCRATCH: u64 = DATA + 0x170;
    /// The ticks of the whole loop of a program that is measured as one.
    pub const ELAPSED: u64 = DATA + 0x178;
    /// The programs: name in [`KEY_SIZE`] bytes, then the function's address.
    pub const PROGRAMS: u64 = DATA + 0x200;
    /// The size of one program's entry in bytes.
    pub const PROGRAM_SIZE: u64 = KEY_SIZE + 8;
    /// Text to print.
    pub const STRINGS: u64 = DATA + 0x580;
    /// A line read by the program `echo`.
    pub const LINE: u64 = DATA + 0x700;
    /// The size of [`LINE`] in bytes; a longer line is cut.
    pub const LINE_SIZE: u64 = 0x100;
    /// Real-mode code, copied to [`super::TRAMPOLINE`].
    pub const TRAMPOLINE_SOURCE: u64 = DATA + 0x800;
}

/// The addresses of the programs `execk` and `execu`: RAM behind the image, one large page.
pub mod exec {
    /// The page's first byte. Variables come first, then the table.
    pub const AREA: u64 = 0x20_0000;
    /// The address to which landing pads jump.
    pub const CONTINUE: u64 = AREA;
    /// The current case.
    pub const CURRENT: u64 = AREA + 0x8;
    /// The number of cases left, including the current one.
    pub const REMAINING: u64 = AREA + 0x10;
    /// The number of cases.
    pub const TOTAL: u64 = AREA + 0x18;
    /// The RSP of the loop around the cases.
    pub const SAVED_RSP: u64 = AREA + 0x20;
    /// The state from which the current case starts.
    pub const BEFORE: u64 = AREA + 0x100;
    /// The state that it left.
    pub const AFTER: u64 = AREA + 0x200;
    /// The table, up to [`END`].
    pub const CASES: u64 = AREA + 0x1000;
    /// The end of the large page.
    pub const END: u64 = AREA + 0x20_0000;
}
