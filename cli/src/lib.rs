//! The `exotrace` command: machines, their run directory and control sockets, and what is shown of a trace.
//!
//! A library for the sake of its fuzz targets alone: the program is `main.rs`, which calls [`main`].
//!
//! One file a command under [`commands`]. Every failure becomes text and an exit status in [`report`] and nowhere
//! else. How a machine works and how a probe works is other crates' business.
#![forbid(unsafe_code)]
// its documentation is for those who change it
#![allow(rustdoc::private_intra_doc_links)]

mod args;
mod byte_progress;
mod commands;
mod confinement;
mod control;
mod disk;
mod dt;
mod end_report;
mod ending;
mod expect;
mod guest_kernel;
mod guest_ports;
mod host;
#[cfg(feature = "test-utils")]
pub mod hostile;
mod image_tables;
mod inspection;
mod listener;
mod log_lines;
mod memory_size;
mod messages;
mod mount;
mod output_file;
mod panic_witness;
mod ports;
mod registry;
mod report;
mod scripting;
mod signals;
mod streams;
mod tail;
mod tracing;
mod vm;

use std::process::ExitCode;

use clap::Parser;

/// Runs the command that the process's arguments ask for; returns its exit status.
#[must_use]
pub fn main() -> ExitCode {
    // What fuser warns of is told better where it happens.
    let log = env_logger::Env::new().filter_or("EXOTRACE_LOG", "warn,fuser=off");
    env_logger::Builder::from_env(log)
        .format(log_lines::write)
        .target(env_logger::Target::Pipe(Box::new(messages::Messages)))
        .init();
    match args::Cli::try_parse() {
        Ok(cli) => report::finish(commands::execute(cli.command)),
        Err(error) => report::finish_parse(&error),
    }
}
