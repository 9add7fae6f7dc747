//! Shared by the whole-system tests and benchmarks: the host, Linux guests at their shells, the
//! micro guest, the command.
//!
//! A missing prerequisite (KVM, a kernel, a guest that answers) ends the test. The message names
//! what was waited for and has the guest's output. Only KVM may be missing, and only if
//! `EXOTRACE_NO_KVM=1` says so.
#![forbid(unsafe_code)]
#![expect(
    missing_debug_implementations,
    reason = "guests and clients of tests are held, not printed"
)]

pub mod busy;
pub mod command;
pub mod compiled;
pub mod crashes;
pub mod crowd;
pub mod data;
pub mod disks;
pub mod hits;
pub mod host;
mod kept;
pub mod kernel;
pub mod linux;
pub mod micro;
pub mod pc;
pub mod ports;
pub mod proc_comparison;
pub mod ptrace;
pub mod rich;
pub mod running_stack;
pub mod scripts;
pub mod second_opinion;
pub mod serial;
pub mod shell;
pub mod story;
pub mod strace;
pub mod timing;
pub mod tiny_program;
pub mod traced;
pub mod tracing;
pub mod two_cpus;
pub mod user_guest;
pub mod victims;
pub mod watched;

pub use host::{Host, host};
pub use kernel::Kernel;
pub use linux::Linux;
pub use micro::MicroGuest;
pub use serial::SerialLog;
pub use shell::Shell;
pub use tracing::Tracing;

/// Returns the host, or ends the test if none is expected.
#[macro_export]
macro_rules! host {
    () => {
        match $crate::host() {
            Some(host) => host,
            None => return,
        }
    };
}
