//! Probes, the hit path, event rings and trace formats.
//!
//! The caller owns the machine ([`vmm::Machine`]) and the threads that read events. It passes the
//! machine's handle and a [`kernel_view::KernelView`] to an engine, creates sessions and drains
//! them. It drops them before the machine. This crate decides where traps are armed and what a hit
//! records. It opens no files and no terminals.
//!
//! * [`name`], [`probe`], [`provider`]: probes and their names.
//! * [`engine`]: probes armed in the guest, the hit path, sessions.
//! * [`event`], [`ring`], [`merge`]: records of hits, and their way off the vCPU's thread in time
//!   order. [`clock`]: their time of day.
//! * [`kernel_view`]: the engine's facts about the running kernel.
//! * [`bt`]: scripts, in the language of bt(5) and bpftrace. [`dt`]: the device dt(4), for clients
//!   that know OpenBSD's.
//! * [`trace`]: the device trace(3), with its text ([`trace_line`]). [`ptrace`]: the device
//!   ptrace(3). [`port`]: their files, for clients. [`render`], [`trace_render`],
//!   [`ptrace::render`]: other formats of their output.
//! * [`text_hash`]: proof that the guest's text was restored.
#![forbid(unsafe_code)]

pub mod bt;
pub mod clock;
mod doorbell;
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
