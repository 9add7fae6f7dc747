//! Trace devices over an engine: dt(4), trace(3) and ptrace(3), with the formats of their streams.
//!
//! The caller owns the machine and its [`probes::engine::Engine`], and serves the devices to its
//! clients. A device creates the sessions that it needs. It drops them when it is closed or
//! dropped, before the machine. This crate decides what a device's commands and requests mean. It
//! opens no sockets, files or terminals.
//!
//! * [`dt`]: the device dt(4), for clients that know OpenBSD's.
//! * [`trace`]: the device trace(3), with its text ([`trace_line`]). [`ptrace`]: the device
//!   ptrace(3). [`port`]: their files, for clients.
//! * [`render`], [`trace_render`], [`ptrace::render`]: other formats of their output.
#![forbid(unsafe_code)]

pub mod dt;
mod perfetto;
pub mod port;
pub mod ptrace;
pub mod render;
#[cfg(test)]
#[path = "../../../tests/support/data.rs"]
mod test_data;
pub mod trace;
pub mod trace_line;
pub mod trace_render;
