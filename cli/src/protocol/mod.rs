//! The messages between a VM's sockets and their clients: what is asked, what is answered.
//!
//! Types and their encoding alone: nothing here knows a machine.

pub mod control;
pub mod cost;
pub mod end;
pub mod error;
pub mod event;
pub mod inspection;
pub mod ports;
pub mod script;
pub mod socket;
pub mod trace;
