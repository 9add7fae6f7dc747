//! Statically defined tracing probes, SDT(9), for Rust programs that run in a guest (or anywhere
//! else). C and C++ have the same in `include/exotrace/sdt.h`, whose first comment describes the
//! notes that both write.
//!
//! ```
//! use exotrace_sdt::{sdt_probe1, sdt_probe_define1, sdt_provider};
//!
//! #[repr(C)]
//! struct Icmp {
//!     icmp_type: u8,
//!     icmp_code: u8,
//! }
//!
//! sdt_provider!(icmp);
//! // provider, module, function, name, then a C type for each argument;
//! // module and function may be empty
//! sdt_probe_define1!(icmp, , unreach, pkt__receive, "struct icmp *");
//!
//! fn unreach(packet: &Icmp) {
//!     sdt_probe1!(icmp, , unreach, pkt__receive, packet);
//! }
//!
//! fn main() {
//!     unreach(&Icmp { icmp_type: 3, icmp_code: 1 });
//! }
//! ```
//!
//! makes the probe `icmp::unreach:pkt-receive`: each `__` of a name is a `-` to scripts. `exotrace
//! trace` then finds it by all four of its names, and bpftrace, gdb and systemtap by provider and
//! name:
//!
//! ```text
//! $ readelf -n program
//!   stapsdt              0x00000032  NT_STAPSDT (SystemTap probe descriptors)
//!     Provider: icmp
//!     Name: pkt__receive
//!     Location: 0x0000000000013900, Base: 0x0000000000003a60, Semaphore: 0x0000000000000000
//!     Arguments: 8@%rdi
//! $ gdb -ex 'break -probe-stap icmp:pkt__receive' -ex run program
//! ```
//!
//! - [`sdt_provider!`] and [`sdt_probe_define0!`] to [`sdt_probe_define7!`] are items, once per
//!   program and probe, also in libraries. The `_xlate` forms give each argument, besides its own
//!   type, the one that scripts see. A probe without a definition works, but its types are unknown.
//! - [`sdt_probe0!`] to [`sdt_probe7!`] are sites, as statements. Any number of sites may share a
//!   probe, and generic or inlined functions leave one for each copy. Values implement [`Value`];
//!   they are evaluated once, whether or not a tracer watches.
//!
//! # Cost
//!
//! A site is one `nop`. Values of 4 and 8 bytes are taken from the registers they are in. Shorter
//! ones may be extended first, and values that are not in a register are loaded. Memory is up to
//! date at a site, so that a tracer can follow pointers. All else stands in ELF notes, which no
//! program loads. Without optimisation, values pass through the stack like all others.
//!
//! # Limits
//!
//! x86-64 and ELF only. The crate needs no `std` and contains no `unsafe` code of its own. The
//! sites expand to an `asm!` statement in an `unsafe` block, so a crate that forbids `unsafe_code`
//! (rather than denying it) cannot have sites. There are no semaphores: values that are costly to
//! prepare are always prepared.

#![no_std]
#![deny(unsafe_code)]

#[cfg(not(target_arch = "x86_64"))]
compile_error!("exotrace-sdt: probe sites are written for x86-64 and ELF only");

mod define;
mod notes;
mod site;
mod value;

pub use value::Value;
