//! Clients of a VM in another process: of its control socket and its devices' ports, with the
//! formats of their records. A client depends only on the protocol.

pub mod control;
pub mod dt;
pub mod mount;
pub mod ports;
pub mod streams;
