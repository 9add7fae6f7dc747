//! `cargo host svm|vmx`: a Linux host with AMD-V or VT-x in emulation, and a command run on it.
//!
//! All parts are obtained once and kept in the cache: the emulator, built from Debian's source with
//! a few patches, and the host's kernel. A change of the project costs a new root disk. The
//! emulated host has a real `/dev/kvm`. It is not a real machine: its times mean little, but on
//! VT-x instructions are counted.
#![forbid(unsafe_code)]

mod apt;
mod cargo;
mod disk;
mod emulator;
mod job;
mod kind;
mod run;
mod suite;
mod tree;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::job::{Job, JobError};
use crate::kind::{Kind, Shape};

/// Runs a command on an emulated host with AMD-V or VT-x, or opens a shell there.
///
/// The host has the release build of exotrace, the guests `micro` and `small` in /guest, a shell
/// with the usual tools, and what --put names. Files that the command leaves in /out are copied to
/// --out.
#[derive(Debug, Parser)]
#[command(name = "host", bin_name = "cargo host")]
struct Arguments {
    /// The kind of host
    kind: Kind,
    /// Seconds that the run may take, booting included
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    limit: u64,
    /// CPUs of the host
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    cpus: u8,
    /// MiB of the host's memory
    #[arg(long, value_name = "MIB", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(256..=65536))]
    memory: u32,
    /// The emulator's model of CPU, such as qemu64 or corei7_skylake_x
    #[arg(long, value_name = "MODEL")]
    cpu: Option<String>,
    /// A file or folder to take along; the command finds it in its working directory
    #[arg(long, value_name = "PATH")]
    put: Vec<PathBuf>,
    /// The folder that results come back to
    #[arg(long, value_name = "DIR", default_value = "target/host-out")]
    out: PathBuf,
    /// Takes the debug build of exotrace, which is built sooner and runs slower
    #[arg(long)]
    dev: bool,
    /// Runs the project's test programs instead of a command: all, or those named behind --
    #[arg(long)]
    tests: bool,
    /// Seconds that one test program may take
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        requires = "tests"
    )]
    each: u64,
    /// More words for every test program, such as "--for 20" for torture
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true,
        requires = "tests"
    )]
    words: String,
    /// The command and its arguments; none: a shell
    #[arg(last = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.tests {
        true => suite::run(&arguments),
        false => Job::command(&arguments).and_then(|job| job.run(&arguments)),
    };
    match result {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(1)),
        Err(error) => {
            eprintln!("host: {error}");
            ExitCode::from(error.status())
        }
    }
}

impl Arguments {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.limit)
    }

    fn shape(&self, interactive: bool) -> Shape {
        Shape {
            cpus: self.cpus,
            memory: self.memory,
            cpu: self.cpu.clone(),
            interactive,
        }
    }
}

impl JobError {
    /// Returns the exit status: 124 if a limit was exceeded, as for timeout(1), else 125.
    fn status(&self) -> u8 {
        match self {
            Self::Run(run::RunError::Limit { .. } | run::RunError::NotUp { .. }) => 124,
            _ => 125,
        }
    }
}
