//! ptrace(3): the process trace device. What becomes of processes, as records of 28 bytes.

pub mod record;
pub mod render;
