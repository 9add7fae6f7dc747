//! What talks to a VM of another process: its control socket, its devices' ports, and what is made
//! of their records. A client knows the protocol alone.

pub mod control;
pub mod dt;
pub mod mount;
pub mod ports;
pub mod streams;
