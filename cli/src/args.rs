//! The command line: every command, option and its help. Man pages and completions are made from
//! this.

mod ports;
mod run;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::protocol::inspection::ProcessName;
use crate::protocol::trace::DEFAULT_SLOTS;
use crate::registry::VmName;
pub use ports::{Ctl, Mount, Read, ReadPort};
pub use run::{Run, Switch, User};

/// Bytes of a string that a script reads unless told otherwise.
const DEFAULT_STRLEN: u16 = 256;

/// Watch a running Linux guest from outside.
///
/// exotrace runs an unmodified guest in a small KVM machine and traces it without any help from
/// inside: no agent, no module, no kernel option. `exotrace demo` shows what that looks like;
/// `exotrace doctor` says what this host can do.
#[derive(Debug, Parser)]
#[command(
    name = "exotrace",
    version,
    arg_required_else_help = true,
    propagate_version = true
)]
#[command(
    after_help = "Exit status: 0 done, 1 failed, 2 usage. EXOTRACE_LOG=debug shows what happens inside."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say what this host's KVM does, and what follows from it
    Doctor(Doctor),
    /// Boot or restore a machine, and trace it
    Run(Box<Run>),
    /// Show a traced guest: boot one, trace its file system, explain what is shown
    Demo(Demo),
    /// Make or fetch a guest to run: its kernel and initramfs, into a folder
    Guest(Guest),
    /// Save a running machine to a folder
    Snapshot(Snapshot),
    /// End a running machine in order: traps are removed first
    Stop(VmSelector),
    /// Show what a running machine has counted
    Stat(Stat),
    /// List the machines that run
    Vms(Vms),
    /// List the processes of a running guest
    Ps(Ps),
    /// Show what a process of a running guest has mapped, as /proc/PID/maps does
    Maps(Maps),
    /// Show the address of a symbol, or the symbol at an address
    Sym(Sym),
    /// Show where the threads of a process stand, in the kernel and in the program
    Stack(Stack),
    /// List the probes of a running guest, with their arguments
    List(List),
    /// Trace a running guest: functions of its kernel and its programs, system calls, timers
    Trace(Box<Trace>),
    /// Give a command to a running machine's device trace(3) or ptrace(3), or print its
    /// configuration
    Ctl(Ctl),
    /// Stream what a running machine's device trace(3) or ptrace(3) records
    Read(Box<Read>),
    /// Show a running machine's trace devices as files in a folder
    Mount(Mount),
    /// List the scripts that come with exotrace, or print one; `trace NAME.bt` runs it
    Scripts(Scripts),
    /// Print a completion script for a shell
    #[command(hide = true)]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write the man pages into a folder
    #[command(hide = true)]
    Man {
        /// An existing folder.
        folder: PathBuf,
    },
}

/// Options of `doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Measure again instead of using what is known of this host
    #[arg(long)]
    pub fresh: bool,
    /// Print the record as JSON
    #[arg(long)]
    pub json: bool,
    /// List the system calls that each kind of thread of a machine's process may make, with the
    /// reasons
    #[arg(long, conflicts_with_all = ["fresh", "json"])]
    pub calls: bool,
}

/// Options of `demo`.
#[derive(Debug, Args)]
pub struct Demo {
    /// Trace for this long
    #[arg(long = "for", value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    pub duration: Duration,
    /// Boot the guest anew instead of restoring it
    #[arg(long)]
    pub rebuild: bool,
}

/// Options of `guest`.
#[derive(Debug, Args)]
#[command(after_help = "\
small: a kernel for interpreted hosts, built from Debian's linux-source-6.1 (about 4 minutes, once).
rich:  the same source with tracepoints, modules, jump labels and BTF in the image.
cloud: Debian's linux-image-cloud-amd64 as it is, unpacked and not installed.
micro: a kernel of a few kilobytes that boots in milliseconds, for tests and measurements.")]
pub struct Guest {
    /// Which guest
    #[arg(value_enum)]
    pub kind: GuestKind,
    /// Where its files go
    pub folder: PathBuf,
    /// With `cloud`: the newest kernel of this suite of Debian's, such as bullseye,
    /// trixie-backports or sid
    ///
    /// Its package lists are fetched into the cache; the machine's own stay as they are. Without
    /// this, the kernel is the one that the machine's own apt has.
    #[arg(long, value_name = "NAME")]
    pub suite: Option<String>,
}

/// The guests there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GuestKind {
    /// A small kernel, and busybox.
    Small,
    /// A kernel with all that traces itself, and busybox.
    Rich,
    /// Debian's cloud kernel, and busybox.
    Cloud,
    /// The micro guest.
    Micro,
}

/// Options of `snapshot`.
#[derive(Debug, Args)]
pub struct Snapshot {
    /// Which machine
    #[command(flatten)]
    pub which: VmSelector,
    /// Check a snapshot instead: compare the memory in the folder with its hashes, and name each
    /// damaged piece. Needs no machine
    #[arg(long, conflicts_with = "vm")]
    pub verify: bool,
    /// A new folder; with --verify one that is there
    pub folder: PathBuf,
}

/// Options of `stat`.
#[derive(Debug, Args)]
pub struct Stat {
    /// Which machine
    #[command(flatten)]
    pub which: VmSelector,
    /// Print the counts as JSON
    #[arg(long)]
    pub json: bool,
    /// Hash the kernel's text as it stands in the guest's memory, traps and all
    #[arg(long)]
    pub hash: bool,
}

/// Options of `vms`.
#[derive(Debug, Args)]
pub struct Vms {
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Options of `ps`.
#[derive(Debug, Args)]
pub struct Ps {
    /// Which machine
    #[command(flatten)]
    pub which: VmSelector,
    /// List threads
    #[arg(short = 'T', long)]
    pub threads: bool,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Options of `maps`.
#[derive(Debug, Args)]
pub struct Maps {
    /// Which machine
    #[command(flatten)]
    pub which: VmSelector,
    /// The process: its pid or its name
    #[arg(short, long, value_name = "PID|NAME")]
    pub process: ProcessName,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Options of `sym`.
#[derive(Debug, Args)]
#[command(after_help = "\
What begins with a digit is an address in hexadecimal, with or without 0x, and so are 16 hexadecimal digits; anything else \
is a name. Without -p symbols are the \
kernel's and its modules'; with -p those of the process's program and libraries.")]
pub struct Sym {
    /// Which machine
    #[command(flatten)]
    pub which: VmSelector,
    /// Look in this process's program and libraries
    #[arg(short, long, value_name = "PID|NAME")]
    pub process: Option<ProcessName>,
    /// Where on this host the guest's files lie, for those whose pages are not in the guest's
    /// memory
    #[arg(long, value_name = "DIR", requires = "process")]
    pub symfs: Option<PathBuf>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
    /// Addresses and names
    #[arg(required = true, value_name = "ADDR|NAME")]
    pub what: Vec<String>,
}

/// Options of `stack`.
#[derive(Debug, Args)]
#[command(after_help = "\
A frame marked ? may be wrong; the mark says how it was found. A stack that does not reach its bottom says why.")]
pub struct Stack {
    /// Which machine
    #[command(flatten)]
    pub which: VmSelector,
    /// The process: its pid or its name
    #[arg(short, long, value_name = "PID|NAME")]
    pub process: ProcessName,
    /// Where on this host the guest's files lie, for those whose pages are not in the guest's
    /// memory
    #[arg(long, value_name = "DIR")]
    pub symfs: Option<PathBuf>,
    /// Print one JSON object a thread
    #[arg(long)]
    pub json: bool,
}

/// Options of `list`.
#[derive(Debug, Args)]
#[command(after_help = "\
A probe is PROVIDER:MODULE:FUNCTION:NAME; empty parts and *, ? and [...] match as in a shell. Without a pattern all probes of the kernel are \
listed. Programs' functions are listed where a pattern names them: 'uprobe:/bin/busybox::' or 'pid22:libc.so.6:malloc*:'.")]
pub struct List {
    /// Which machine
    #[command(flatten)]
    pub which: VmSelector,
    /// Print how many there are of each provider
    #[arg(short, long, conflicts_with = "json")]
    pub count: bool,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
    /// Which probes
    #[arg(value_name = "PATTERN")]
    pub pattern: Option<String>,
}

/// Options of `trace`.
#[derive(Debug, Args)]
#[command(after_help = "\
A script is in the language of bt(5) and bpftrace: -e 'syscall::openat:entry { printf(\"%s %s\\n\", comm, str(args.filename)); }'. It is given \
with -e, or as a file: a name that ends in .bt, an existing file with a / in its name, or - for standard input; see scripts \
for those that come along. What follows are its arguments, $1 and so on. Anything else names probes, whose hits are shown as they come.
Probes: vfs_read (entry and return of a kernel function), kprobe:vfs_*:entry, syscall:openat, uprobe:/bin/busybox:main:entry, \
pid22:libc.so.6:malloc:return, profile:hz:99, interval:s:1; see list. The trace goes to standard output (or -o), counts to standard error. \
Ctrl-C ends it; nothing of it is left in the guest then, nor when it is killed.")]
pub struct Trace {
    /// Which machine
    #[command(flatten)]
    pub which: VmSelector,
    /// Only hits of this process; may be repeated
    #[arg(short, long = "pid", value_name = "PID")]
    pub pids: Vec<u32>,
    /// And of the processes that it makes
    #[arg(short, long, requires = "pids")]
    pub follow: bool,
    /// Only hits of this thread; may be repeated
    #[arg(long = "tid", value_name = "TID")]
    pub tids: Vec<u32>,
    /// Only hits of threads with this name; may be repeated
    #[arg(long = "comm", value_name = "NAME")]
    pub comms: Vec<String>,
    /// Show this many frames of the kernel stack
    #[arg(long, value_name = "FRAMES", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=127))]
    pub stack: u8,
    /// Show this many frames of the program's stack
    #[arg(long, value_name = "FRAMES", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=127))]
    pub ustack: u8,
    /// Record one hit in this many
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub one_in: u32,
    /// Record at most this many hits of each probe a second
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub per_second: u32,
    /// Events that the buffer of each vCPU holds: a power of two
    #[arg(long, value_name = "EVENTS", default_value_t = DEFAULT_SLOTS)]
    pub buffer: usize,
    /// Write the trace to this file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// End the trace after this time, from when its probes are armed
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// How events are written: as lines for people, or a script's own text, by default
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Run this script
    #[arg(short = 'e', long = "execute", value_name = "PROGRAM")]
    pub program: Option<String>,
    /// List the probes that match a pattern instead of tracing
    #[arg(short, long, conflicts_with_all = ["program", "parse_only"])]
    pub list: bool,
    /// Say what is wrong with the script's text, and end
    #[arg(short = 'n', long)]
    pub parse_only: bool,
    /// Say at the end what was counted
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Take the script as OpenBSD's bt(5) does, oddities included
    #[arg(long)]
    pub strict: bool,
    /// Translators and structures of the files *.d in this folder may be used by the script; may be
    /// repeated
    #[arg(short = 'L', long, value_name = "DIR")]
    pub library: Vec<PathBuf>,
    /// Most bytes of a string that a script reads from the guest
    #[arg(long, value_name = "BYTES", default_value_t = DEFAULT_STRLEN, value_parser = clap::value_parser!(u16).range(8..=1024))]
    pub strlen: u16,
    /// Probes, or a script's file and its arguments
    #[arg(required_unless_present_any = ["program", "list"], value_name = "PROBE|FILE [ARG]")]
    pub what: Vec<String>,
}

impl Trace {
    /// Options that were given and mean nothing for a script, or for probes.
    pub fn without_meaning(&self, is_script: bool) -> Vec<&'static str> {
        let given = match is_script {
            true => [
                ("--stack", self.stack > 0),
                ("--ustack", self.ustack > 0),
                ("--buffer", self.buffer != DEFAULT_SLOTS),
            ]
            .to_vec(),
            false => [
                ("-n", self.parse_only),
                ("--strict", self.strict),
                ("-L", !self.library.is_empty()),
                ("--strlen", self.strlen != DEFAULT_STRLEN),
                ("--format collapsed", self.format == Some(Format::Collapsed)),
            ]
            .to_vec(),
        };
        let given = given.into_iter().filter(|(_, given)| *given);
        given.map(|(name, _)| name).collect()
    }
}

/// Options of `scripts`.
#[derive(Debug, Args)]
pub struct Scripts {
    /// Print the text of this one
    pub name: Option<String>,
}

/// Which machine is meant.
#[derive(Debug, Args)]
pub struct VmSelector {
    /// The machine; may be left out when only one runs
    #[arg(long, value_name = "NAME")]
    pub vm: Option<VmName>,
}

/// How trace events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A line for people
    Events,
    /// Of probes, lines of 121 bytes as trace(3) prints them: entries and returns; of a script, its
    /// own text
    Text,
    /// One JSON object a line
    Json,
    /// Of a script, its maps as folded stacks for flame graphs
    Collapsed,
}

/// A time in seconds, with or without a fraction.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    let number = text.parse::<f64>().ok().filter(|n| *n > 0.0);
    number
        .and_then(|n| Duration::try_from_secs_f64(n).ok())
        .ok_or_else(|| format!("{text:?} is no time; write seconds, such as 10 or 0.5"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definitions_hold_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for command in ["snapshot", "brew"] {
            assert!(Cli::try_parse_from(["exotrace", command]).is_err());
        }
    }
}
