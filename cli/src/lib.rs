//! Watches a running Linux guest from outside: the library that the `exotrace` command is made of.
//!
//! A program boots a guest with [`Vm::builder`] or restores a snapshot, enables probes with
//! [`Vm::trace`], runs scripts with [`Vm::script`], asserts how often probes are hit with
//! [`Vm::expect`], and lists processes and stacks. The guest needs no agent, module or debug file;
//! the host needs a usable `/dev/kvm`.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use exotrace::Vm;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let vm = Vm::builder().kernel("vmlinux").initramfs("initramfs").start()?;
//!     vm.wait_booted(Duration::from_secs(60))?;
//!     let mut trace = vm.trace("kprobe:vfs_read:entry")?;
//!     for hit in trace.events(Duration::from_secs(1)).take(10) {
//!         println!("{} by {:?}", hit.probe.name, hit.event.pid);
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # Layers
//!
//! `control`, `ports` and `streams` hold what goes over sockets; `vm` is a machine with its
//! engine; servers answer clients for one VM; `commands` has a file for each command. Errors become
//! text and an exit status in `report` and nowhere else.
#![forbid(unsafe_code)]
// the documentation of private items is for those who change them
#![allow(rustdoc::private_intra_doc_links)]

mod args;
mod byte_progress;
mod client;
mod commands;
mod confinement;
mod disk;
mod embed;
mod end_report;
mod ending;
mod expect;
#[cfg(feature = "export")]
mod export;
mod file_memory;
mod guest_image;
mod guest_kernel;
mod history;
mod host;
#[cfg(feature = "test-utils")]
pub mod hostile;
mod image_tables;
mod inspection;
mod kdump;
mod listener;
mod log_lines;
#[cfg(feature = "test-utils")]
pub mod measured;
mod memory_size;
mod messages;
mod named_socket;
pub mod net;
mod network;
mod output_file;
mod panic_witness;
mod passt;
mod protocol;
mod qemu;
mod registry;
mod report;
mod saved_guest;
mod script_library;
mod scripting;
mod server;
mod signals;
mod tail;
#[cfg(test)]
#[path = "../../tests/support/data.rs"]
mod test_data;
mod tracing;
mod vm;
mod vsock;

use std::process::ExitCode;

use clap::Parser;
pub use embed::{Expecting, Script, StartError, Trace, TraceEvent, VmBuilder};
pub use expect::report::Verdict;
pub use expect::{Comparison, Expectation};
pub use guest_image::GuestImageError;
pub use guest_kernel::GuestKernelError;
pub use history::KeepError;
pub use host::{Host, HostError};
pub use network::NetworkError;
pub use passt::PasstError;
pub use protocol::cost::{Budget, Cost, Unwatched};
pub use protocol::error::{ErrorKind, RequestError};
pub use protocol::inspection::{
    Frame, Mapping, Maps, Process, ProcessName, Processes, Reading, Stacks, ThreadStack,
};
pub use protocol::script::Counts as ScriptCounts;
pub use protocol::script::{Form, MapEntry, MapKind, MapLine, MapValue, ScriptRequest};
pub use protocol::trace::Request;
pub use protocol::trace::{Counts, Traced};
pub use registry::{NameError, VmName};
pub use scripting::Rendered;
pub use vm::{GuestError, Vm};

/// Runs the command that the process's arguments ask for; returns its exit status.
#[must_use]
pub fn main() -> ExitCode {
    // The causes of fuser's warnings are reported where they occur.
    let log = env_logger::Env::new().filter_or("EXOTRACE_LOG", "warn,fuser=off");
    env_logger::Builder::from_env(log)
        .format(log_lines::write)
        .target(env_logger::Target::Pipe(Box::new(messages::Messages)))
        .init();
    match args::Cli::try_parse() {
        Ok(cli) => report::finish(commands::execute(cli.command)),
        Err(error) => report::finish_parse(&error, args::advice(&error)),
    }
}
