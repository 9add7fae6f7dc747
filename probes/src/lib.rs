//! Probes, the hit path and event rings.
//!
//! The caller owns the machine ([`vmm::Machine`]) and the threads that read events. It passes the
//! machine's handle and a [`kernel_view::KernelView`] to an engine, creates sessions and drains
//! them. It drops them before the machine. This crate decides where traps are armed and what a hit
//! records. It opens no files and no terminals.
//!
//! * [`name`], [`probe`], [`provider`]: probes and their names.
//! * [`engine`]: probes armed in the guest, the hit path, sessions.
//! * [`module_probes`]: probes of modules that come and go. [`file_probes`]: those of programs to
//!   come.
//! * [`fields`]: the formatted fields of tracepoints' events.
//! * [`event`], [`ring`], [`merge`]: records of hits, and their way off the vCPU's thread in time
//!   order. [`clock`]: their time of day.
//! * [`kernel_view`]: the engine's facts about the running kernel.
//! * [`syscall_table`]: Linux's system calls. [`json`]: strings of JSON, for the crates above.
//! * [`text_hash`]: proof that the guest's text was restored.
//!
//! Above it, `exotrace-bt` has the bt language, and `exotrace-trace-devices` the devices dt(4),
//! trace(3) and ptrace(3).
#![forbid(unsafe_code)]

pub mod clock;
mod doorbell;
pub mod engine;
pub mod event;
pub mod fields;
pub mod file_probes;
pub mod json;
pub mod kernel_view;
pub mod merge;
pub mod module_probes;
pub mod name;
pub mod probe;
pub mod provider;
pub mod ring;
mod sync;
mod syscall_entry;
pub mod syscall_table;
pub mod text_hash;
