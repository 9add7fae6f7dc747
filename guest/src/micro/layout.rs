//! Where everything of the micro guest lies. Virtual and physical addresses are equal.
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
/// Level 3, the first 512 GiB.
pub const PDPT: u64 = 0x10_7000;
/// Level 2, the first GiB.
pub const PD_LOW: u64 = 0x10_8000;
/// Level 1, the first 2 MiB: the image, with its user pages.
pub const PT_LOW: u64 = 0x10_9000;
/// Level 2, the fourth GiB: devices.
pub const PD_DEVICES: u64 = 0x10_a000;
/// Level 1, 2 MiB around [`USER_MMIO`].
pub const PT_USER_MMIO: u64 = 0x10_b000;
/// End of what the file holds; from here on memory starts as zeros.
pub const FILE_END: u64 = 0x10_c000;
/// User stack, one page.
pub const USER_STACK: u64 = 0x10_c000;
/// Two user pages that start as not present, for the program `fault`. They differ in bit 12 only.
pub const HOLES: [u64; 2] = [0x10_e000, 0x10_f000];
/// Stack of the kernel's main path; grows down from here.
pub const KERNEL_STACK_TOP: u64 = 0x11_1000;
/// Stack of traps that come from user mode (RSP0 in the task-state segment).
pub const TRAP_STACK_TOP: u64 = 0x11_2000;
/// Stacks of CPUs 1 and up, [`AP_STACK_SIZE`] bytes each, ascending.
pub const AP_STACKS: u64 = 0x11_2000;
/// Bytes of one such stack.
pub const AP_STACK_SIZE: u64 = 0x800;
/// Most CPUs the program `smp` starts besides the first.
pub const AP_MAX: u64 = 15;
/// Ticks of the rounds of the programs that measure, 4 bytes each, in user pages.
pub const SAMPLES: u64 = 0x12_0000;
/// How many of them; a power of two.
pub const SAMPLES_CAPACITY: u64 = 0x1_0000;
/// Bytes of one.
pub const SAMPLE_SIZE: u64 = 4;
/// End of all memory of the image.
pub const MEMORY_END: u64 = SAMPLES + SAMPLES_CAPACITY * SAMPLE_SIZE;

/// Bytes in a page.
pub const PAGE: u64 = 0x1000;
/// Where CPUs woken by SIPI start, in real mode. SIPI vector 8.
pub const TRAMPOLINE: u64 = 0x8000;
/// Guest-physical address that no RAM stands behind, mapped for user mode.
pub const USER_MMIO: u64 = 0xd000_0000;
/// The local APIC's registers (Intel SDM volume 3, "Local APIC register address map").
pub const LAPIC: u64 = 0xfee0_0000;

/// Registers of the local APIC that are written, by their offset from [`LAPIC`].
pub mod lapic {
    /// End of interrupt.
    pub const EOI: u32 = 0xb0;
    /// Spurious interrupt vector, and [`SOFTWARE_ENABLE`].
    pub const SPURIOUS_VECTOR: u32 = 0xf0;
    /// The bit of it that switches the APIC on.
    pub const SOFTWARE_ENABLE: i32 = 0x100;
    /// Low half of the interrupt command (Intel SDM volume 3, "Issuing interprocessor interrupts").
    pub const ICR_LOW: u32 = 0x300;
    /// The timer's vector and mode.
    pub const TIMER_VECTOR: u32 = 0x320;
    /// What the timer counts down from.
    pub const TIMER_INITIAL_COUNT: u32 = 0x380;
    /// What the timer's clock is divided by.
    pub const TIMER_DIVIDE: u32 = 0x3e0;
}

/// Selectors, in Linux's order, so that STAR and the boot protocol's `__BOOT_CS` fit too.
pub mod selector {
    /// 64-bit code, ring 0.
    pub const KERNEL_CODE: u16 = 0x10;
    /// Data, ring 0.
    pub const KERNEL_DATA: u16 = 0x18;
    /// Base of what SYSRET loads: +8 is user data, +16 is 64-bit user code.
    pub const SYSRET_BASE: u16 = 0x23;
    /// Data, ring 3.
    pub const USER_DATA: u16 = 0x2b;
    /// 64-bit code, ring 3.
    pub const USER_CODE: u16 = 0x33;
    /// Task-state segment.
    pub const TSS: u16 = 0x40;
}

/// Interrupt vectors that have a meaning here besides the CPU's own exceptions.
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
    /// Operand of LGDT.
    pub const GDT_POINTER: u64 = DATA + 0x60;
    /// Operand of LIDT.
    pub const IDT_POINTER: u64 = DATA + 0x70;
    /// Operand of LIDT for a table without gates.
    pub const NULL_POINTER: u64 = DATA + 0x80;
    /// Task-state segment, 104 bytes.
    pub const TSS: u64 = DATA + 0x90;
    /// What the guest counted. Printed at the end.
    pub const COUNT: u64 = DATA + 0x100;
    /// Timer interrupts seen.
    pub const TICKS: u64 = DATA + 0x108;
    /// Debug exceptions (#DB) that reached the guest.
    pub const DEBUG_COUNT: u64 = DATA + 0x110;
    /// COUNT from the command line.
    pub const ARGUMENT: u64 = DATA + 0x118;
    /// CPUS from the command line.
    pub const CPUS: u64 = DATA + 0x120;
    /// First byte of PROGRAM on the command line.
    pub const WORD: u64 = DATA + 0x128;
    /// Its length, at most [`KEY_SIZE`].
    pub const WORD_LENGTH: u64 = DATA + 0x130;
    /// Kernel RSP while a user program runs.
    pub const SAVED_RSP: u64 = DATA + 0x138;
    /// CPUs that have arrived, without the first.
    pub const AP_ONLINE: u64 = DATA + 0x140;
    /// Non-zero once all may start.
    pub const AP_GO: u64 = DATA + 0x148;
    /// CPUs that have finished, without the first.
    pub const AP_DONE: u64 = DATA + 0x150;
    /// PROGRAM, padded with zeros.
    pub const KEY: u64 = DATA + 0x160;
    /// Bytes of [`KEY`].
    pub const KEY_SIZE: u64 = 16;
    /// Where instructions of the program `step` store.
    pub const SCRATCH: u64 = DATA + 0x170;
    /// Ticks of the whole loop of a program that is measured as one.
    pub const ELAPSED: u64 = DATA + 0x178;
    /// Programs: name in [`KEY_SIZE`] bytes, then the function's address.
    pub const PROGRAMS: u64 = DATA + 0x200;
    /// Bytes of one program's entry.
    pub const PROGRAM_SIZE: u64 = KEY_SIZE + 8;
    /// Text to print.
    pub const STRINGS: u64 = DATA + 0x580;
    /// A line read by the program `echo`.
    pub const LINE: u64 = DATA + 0x700;
    /// Bytes of [`LINE`]; a longer line is cut.
    pub const LINE_SIZE: u64 = 0x100;
    /// Real-mode code, copied to [`super::TRAMPOLINE`].
    pub const TRAMPOLINE_SOURCE: u64 = DATA + 0x800;
}

/// Addresses of the programs `execk` and `execu`: RAM behind the image, one large page.
pub mod exec {
    /// The page's first byte. Variables stand first, then the table.
    pub const AREA: u64 = 0x20_0000;
    /// Where landing pads jump to.
    pub const CONTINUE: u64 = AREA;
    /// The case at work.
    pub const CURRENT: u64 = AREA + 0x8;
    /// Cases left, with the one at work.
    pub const REMAINING: u64 = AREA + 0x10;
    /// How many cases there are.
    pub const TOTAL: u64 = AREA + 0x18;
    /// RSP of the loop around the cases.
    pub const SAVED_RSP: u64 = AREA + 0x20;
    /// The state that the case at work starts from.
    pub const BEFORE: u64 = AREA + 0x100;
    /// The state that it left.
    pub const AFTER: u64 = AREA + 0x200;
    /// The table, up to [`END`].
    pub const CASES: u64 = AREA + 0x1000;
    /// End of the large page.
    pub const END: u64 = AREA + 0x20_0000;
}
