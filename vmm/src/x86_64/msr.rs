//! Model-specific registers that exotrace names. Source: AMD64 APM volume 2, Intel SDM volume 4.

/// Segment selectors of SYSCALL (bits 47:32) and SYSRET (63:48).
pub const STAR: u32 = 0xc000_0081;
/// Where SYSCALL goes in 64-bit mode.
pub const LSTAR: u32 = 0xc000_0082;
/// RFLAGS bits that SYSCALL clears.
pub const SYSCALL_MASK: u32 = 0xc000_0084;
/// Deadline of the local APIC's timer in TSC ticks.
pub const TSC_DEADLINE: u32 = 0x6e0;
/// Time stamp counter.
pub const TSC: u32 = 0x10;
