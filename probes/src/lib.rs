//! Probes, the hit path, event rings and trace formats.
//!
//! The caller owns the machine ([`vmm::Machine`]) and the threads that read events; it hands the machine's handle and a
//! [`kernel_view::KernelView`] to an engine, makes sessions, drains them, and drops them before the machine goes. This crate
//! decides where traps stand and what is kept of a hit. It opens no files and knows no terminals.
//!
//! * [`name`], [`probe`], [`provider`]: what can be probed, and what it is called.
//! * [`engine`]: probes put into the guest, the hit path, sessions.
//! * [`event`], [`ring`], [`merge`]: what one hit leaves behind, and how it gets off the vCPU's thread in time order.
//!   [`clock`]: what time of day it was.
//! * [`kernel_view`]: what the engine must know of the running kernel.
//! * [`bt`]: scripts, in the language of bt(5) and bpftrace. [`dt`]: the device dt(4), for clients that know OpenBSD's.
//! * [`trace`]: the device trace(3), with its text ([`trace_line`]). [`ptrace`]: the device ptrace(3). [`port`]: their files, as others see them.
//!   [`render`], [`trace_render`], [`ptrace::render`]: other formats of what they give.
//! * [`text_hash`]: proof that nothing of us is left in the guest.
#![forbid(unsafe_code)]

pub mod bt;
pub mod clock;
pub mod dt;
pub mod engine;
pub mod event;
mod json;
pub mod kernel_view;
pub mod merge;
pub mod name;
mod perfetto;
pub mod port;
pub mod probe;
pub mod provider;
pub mod ptrace;
mod recent;
pub mod render;
pub mod ring;
mod sync;
mod syscall_entry;
pub mod syscall_table;
#[cfg(test)]
#[path = "../../tests/support/data.rs"]
mod test_data;
pub mod text_hash;
pub mod trace;
pub mod trace_line;
pub mod trace_render;
