//! The servers of a VM: its control socket, streams of traces and scripts, the devices' sockets and
//! the guest's own ports. Each server has threads of its own, and answers for one VM.

mod answers;
pub mod control;
pub mod dt;
pub mod gdb;
pub mod guest_ports;
pub mod outbox;
pub mod ports;
mod saving;
pub mod script;
pub mod trace;
