//! The command line: every command, option and its help. Man pages and completions are made from
//! this.

mod advice;
// The documentation shows `demo` and `guest` too.
#[cfg(all(test, feature = "guests"))]
mod documentation_tests;
mod exports;
mod ports;
mod run;
mod trace;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use vmm::machine::DiskConfig;

use crate::protocol::cost::Budget;
use crate::protocol::inspection::ProcessName;
use crate::protocol::trace::DEFAULT_SLOTS;
use crate::registry::VmName;
pub use advice::advice;
#[cfg(feature = "export")]
pub use exports::Collector;
pub use exports::Exports;
pub use ports::{Ctl, Mount, Read, ReadPort};
pub use run::{Run, Switch, User};
pub use trace::Format;
#[cfg(feature = "export")]
use trace::is_table;

/// The default number of bytes of a string that a script reads.
const DEFAULT_STRLEN: u16 = 256;

/// Watch a running Linux guest from outside.
///
/// exotrace runs an unmodified guest in a small KVM machine and traces it without any help from
/// inside: no agent, no module, no kernel option. `exotrace demo` shows an example.
/// `exotrace doctor` reports the abilities of this host.
#[derive(Debug, Parser)]
#[command(
    name = "exotrace",
    version,
    arg_required_else_help = true,
    propagate_version = true
)]
#[command(
    after_help = "Exit status: 0 done, 1 failed, 2 usage. EXOTRACE_LOG=debug prints a log of internals."
)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Report the behaviour of this host's KVM, and its consequences
    Doctor(Doctor),
    /// Boot or restore a machine, and trace it
    Run(Box<Run>),
    #[cfg(feature = "guests")]
    /// Boot a guest, trace its file system and explain the output
    Demo(Demo),
    #[cfg(feature = "guests")]
    /// Build or fetch a guest's kernel and initramfs into a folder
    Guest(Guest),
    /// Show the partitions of an image of a disk, and what it boots
    Image(Image),
    /// Save a running machine to a folder
    Snapshot(Snapshot),
    /// Save a running machine as it was some seconds before, from its history
    Rewind(Rewind),
    /// End a running machine, after removing all traps
    Stop(Stop),
    /// Show a running machine's counters
    Stat(Stat),
    /// List the machines that run
    Vms(Vms),
    /// List the processes of a running guest
    Ps(Ps),
    /// Show the memory mappings of a running guest's process, as /proc/PID/maps does
    Maps(Maps),
    /// Show the address of a symbol, or the symbol at an address
    Sym(Sym),
    /// Show the stacks of a process's threads, in the kernel and in the program
    Stack(Stack),
    /// Debug a process of a running guest with gdb(1) or lldb(1), from outside
    Gdb(Gdb),
    /// List the probes of a running guest, with their arguments; in braces the fields of a
    /// tracepoint's event
    List(List),
    /// Trace a running guest: functions of its kernel and its programs, system calls, timers
    Trace(Box<Trace>),
    /// Give a command to a running machine's device trace(3) or ptrace(3), or print its
    /// configuration
    Ctl(Ctl),
    /// Stream the records of a running machine's device trace(3), ptrace(3) or dt(4)
    Read(Box<Read>),
    /// Show a running machine's trace devices as files in a folder
    Mount(Mount),
    /// Show a running guest's busiest processes, system calls, files or connections, or a script's
    /// maps, each second
    Top(Top),
    /// List the scripts that come with exotrace, or print one; `trace NAME.bt` runs it
    Scripts(Scripts),
    /// Let a guest of QEMU go on once the process that has paused it is gone
    #[command(hide = true)]
    ResumeGuard,
    /// Print a completion script for a shell
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write the man pages into a folder
    Man {
        /// The folder; it is made if it does not exist.
        folder: PathBuf,
    },
}

/// Options of `doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Measure again instead of using the host record
    #[arg(long)]
    pub fresh: bool,
    /// Print the host record as JSON
    #[arg(long)]
    pub json: bool,
    /// List the system calls that each kind of thread of a machine's process may make, with the
    /// reasons
    #[arg(long, conflicts_with_all = ["fresh", "json"])]
    pub calls: bool,
}

#[cfg(feature = "guests")]
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

#[cfg(feature = "guests")]
/// Options of `guest`.
#[derive(Debug, Args)]
#[command(after_help = "\
small: a kernel for interpreted hosts, built from Debian's linux-source-6.1 (about 4 minutes, once).
rich:  the same source with tracepoints, modules, jump labels and BTF in the image.
pc:    the small one for a machine with a PCI bus and ACPI, as distributions' kernels expect.
cloud: Debian's linux-image-cloud-amd64 as it is, unpacked and not installed.
micro: a kernel of a few kilobytes that boots in milliseconds, for tests and measurements.")]
pub struct Guest {
    /// The guest
    #[arg(value_enum)]
    pub kind: GuestKind,
    /// The folder for its files
    pub folder: PathBuf,
    /// With `cloud`: the newest kernel of this suite of Debian's, such as bullseye,
    /// trixie-backports or sid
    ///
    /// Its package lists are fetched into the cache; the system's own are not changed. By default
    /// the kernel is the one of the system's own apt.
    #[arg(long, value_name = "NAME")]
    pub suite: Option<String>,
}

#[cfg(feature = "guests")]
/// The available guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GuestKind {
    /// A small kernel, and busybox.
    Small,
    /// A kernel with all that traces itself, and busybox.
    Rich,
    /// The small kernel with a PCI bus and ACPI, and busybox.
    Pc,
    /// Debian's cloud kernel, and busybox.
    Cloud,
    /// The micro guest.
    Micro,
}

/// Options of `image`.
#[derive(Debug, Args)]
#[command(after_help = "\
The image is read, not changed, and nothing of it is executed. Entries come from files of the Boot Loader Specification, unified kernel \
images, GRUB's configuration, or the names of kernels; * marks the one that is booted. ext2 to ext4 and FAT are read. The status is 1 \
if nothing can be booted.")]
pub struct Image {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// The image: a file, raw or qcow2, or a block device; options as for `run --disk`
    #[arg(value_name = "FILE[,OPTION]...", value_parser = crate::disk::parse)]
    pub file: DiskConfig,
}

/// Options of `stop`.
#[derive(Debug, Args)]
pub struct Stop {
    /// The machine
    #[command(flatten)]
    pub which: VmSelector,
    /// Press the guest's power button, and wait until the guest has shut down. It needs a kernel
    /// with ACPI and a program that reacts, such as systemd
    #[arg(long)]
    pub gracefully: bool,
    /// The longest time that --gracefully waits
    #[arg(long, value_name = "SECONDS", default_value = "90", value_parser = parse_seconds, requires = "gracefully")]
    pub within: Duration,
}

/// Options of `snapshot`.
#[derive(Debug, Args)]
pub struct Snapshot {
    /// The machine
    #[command(flatten)]
    pub which: VmSelector,
    /// Check a snapshot instead: compare the memory in the folder with its hashes, and name each
    /// damaged piece. Needs no machine
    #[arg(long, conflicts_with = "vm")]
    pub verify: bool,
    /// A new folder; with --verify one that is there
    pub folder: PathBuf,
}

/// Options of `rewind`.
#[derive(Debug, Args)]
pub struct Rewind {
    /// The machine, which runs with --history
    #[command(flatten)]
    pub which: VmSelector,
    /// How long ago: the newest checkpoint that is so old is taken, else the oldest one
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = crate::history::time)]
    pub ago: Duration,
    /// A new folder
    pub folder: PathBuf,
}

/// Options of `stat`.
#[derive(Debug, Args)]
pub struct Stat {
    /// The machine
    #[command(flatten)]
    pub which: VmSelector,
    /// Print the counts as JSON
    #[arg(long)]
    pub json: bool,
    /// Hash the kernel's text in the guest's memory, traps included
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
    /// The guest
    #[command(flatten)]
    pub guest: GuestSelector,
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
    /// The guest
    #[command(flatten)]
    pub guest: GuestSelector,
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
A word that begins with a digit is a hexadecimal address, with or without 0x; so are 16 hexadecimal digits. Any other word \
is a name. Without -p, symbols are those of the kernel and its modules. With -p, they are those of the process's program and libraries.")]
pub struct Sym {
    /// The guest
    #[command(flatten)]
    pub guest: GuestSelector,
    /// Look in this process's program and libraries
    #[arg(short, long, value_name = "PID|NAME")]
    pub process: Option<ProcessName>,
    /// A folder on this host with the guest's files, for those whose pages are neither in the
    /// guest's memory nor on a disk of the machine
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
A frame marked ? may be wrong; the mark says how it was found. A stack that does not reach its bottom ends with the reason.")]
pub struct Stack {
    /// The guest
    #[command(flatten)]
    pub guest: GuestSelector,
    /// The process: its pid or its name
    #[arg(short, long, value_name = "PID|NAME")]
    pub process: ProcessName,
    /// A folder on this host with the guest's files, for those whose pages are neither in the
    /// guest's memory nor on a disk of the machine
    #[arg(long, value_name = "DIR")]
    pub symfs: Option<PathBuf>,
    /// Print one JSON object a thread
    #[arg(long)]
    pub json: bool,
}

/// Options of `gdb`.
#[derive(Debug, Args)]
#[command(after_help = "\
In gdb: target remote | exotrace gdb -p 22
The kernel: target remote | exotrace gdb --kernel
In lldb, with --listen /run/gdb.socket: `target create PROGRAM`, then `process connect --plugin gdb-remote unix-connect:///run/gdb.socket`

The whole machine is paused while the debugger holds the process. Programs and libraries are read from the guest's memory. The guest is \
not changed without --write.")]
pub struct Gdb {
    /// The machine
    #[command(flatten)]
    pub which: VmSelector,
    /// The process: its pid or its name
    #[arg(
        short,
        long,
        value_name = "PID|NAME",
        required_unless_present = "kernel"
    )]
    pub process: Option<ProcessName>,
    /// The kernel instead of a process: its tasks are threads
    #[arg(long, conflicts_with = "process")]
    pub kernel: bool,
    /// Wait for debuggers on this Unix socket, one after the other, instead of standard input and
    /// output
    #[arg(long, value_name = "SOCKET")]
    pub listen: Option<PathBuf>,
    /// Let the debugger change registers and memory
    #[arg(long)]
    pub write: bool,
}

/// Options of `list`.
#[derive(Debug, Args)]
#[command(after_help = "\
A probe is PROVIDER:MODULE:FUNCTION:NAME. *, ? and [...] match as in a shell; an empty part matches anything. Without a pattern all \
probes of the kernel are listed. Programs' functions are listed if a pattern names their program: 'uprobe:/bin/app::' or 'pid22:libc.so.6:malloc*:'.")]
pub struct List {
    /// The guest
    #[command(flatten)]
    pub guest: GuestSelector,
    /// Print the number of probes of each provider, and of tracepoints with formatted fields
    #[arg(short, long, conflicts_with = "json")]
    pub count: bool,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
    /// List the functions and static probes of a program or library on this host, without a machine
    #[arg(long, value_name = "FILE", conflicts_with_all = ["vm", "other"])]
    pub file: Option<PathBuf>,
    /// The probes to list
    #[arg(value_name = "PATTERN")]
    pub pattern: Option<String>,
}

/// Options of `trace`.
#[derive(Debug, Args)]
#[command(after_help = "\
A script is in the language of bt(5) and bpftrace: -e 'syscall::openat:entry { printf(\"%s %s\\n\", comm, str(args.filename)); }'. It is given \
with -e, or as a file: a name that ends in .bt, an existing file with a / in its name, or - for standard input. `exotrace scripts` lists \
the included ones. Further words are the script's arguments, $1 and so on. Any other first word names probes, whose hits are shown as they come.
Probes: vfs_read (entry and return of a kernel function), kprobe:vfs_*:entry, syscall:openat, uprobe:/bin/app:main:entry, \
pid22:libc.so.6:malloc:return, profile:hz:99, interval:s:1; see list. The trace goes to standard output (or -o), counts to standard error. \
Ctrl-C ends it. Nothing of it is left in the guest then, nor when it is killed.")]
pub struct Trace {
    /// The guest
    #[command(flatten)]
    pub guest: GuestSelector,
    /// Record only hits of this process, by its pid or its name; may be repeated
    #[arg(short, long = "pid", value_name = "PID|NAME")]
    pub processes: Vec<ProcessName>,
    /// Record also hits of the descendants of these processes
    #[arg(short, long, requires = "processes")]
    pub follow: bool,
    /// Record only hits of this thread; may be repeated
    #[arg(long = "tid", value_name = "TID")]
    pub tids: Vec<u32>,
    /// Record only hits of threads with this name; may be repeated
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
    /// Let the trace cost at most this share of each vCPU's time, such as 5%. Its costliest probes
    /// are stopped for parts of the time. The end says for how long
    #[arg(long, value_name = "PERCENT")]
    pub budget: Option<Budget>,
    /// The number of events that each vCPU's ring holds: a power of two
    #[arg(long, value_name = "EVENTS", default_value_t = DEFAULT_SLOTS)]
    pub buffer: usize,
    /// Write the trace to this file instead of standard output; FILE.parquet becomes a table
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The systems that get it besides
    #[command(flatten)]
    pub exports: Exports,
    /// End the trace this long after its probes are armed
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// The form of events; by default lines for people, or a script's own text
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Run this script
    #[arg(short = 'e', long = "execute", value_name = "PROGRAM")]
    pub program: Option<String>,
    /// List the probes that match a pattern instead of tracing
    #[arg(short, long, conflicts_with_all = ["program", "parse_only"])]
    pub list: bool,
    /// Report errors in the script's text, and end
    #[arg(short = 'n', long)]
    pub parse_only: bool,
    /// Print counters at the end
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Interpret the script exactly as OpenBSD's bt(5) does
    #[arg(long)]
    pub strict: bool,
    /// Let the script use the translators and structures of the files *.d in this folder; may be
    /// repeated
    #[arg(short = 'L', long, value_name = "DIR")]
    pub library: Vec<PathBuf>,
    /// The maximum number of bytes of a string that a script reads from the guest
    #[arg(long, value_name = "BYTES", default_value_t = DEFAULT_STRLEN, value_parser = clap::value_parser!(u16).range(8..=1024))]
    pub strlen: u16,
    /// The probes, or a script's file and its arguments
    #[arg(
        required_unless_present_any = ["program", "list"],
        allow_negative_numbers = true,
        value_name = "PROBE|FILE [ARG]"
    )]
    pub what: Vec<String>,
}

/// The views of a whole guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TopKind {
    /// Processes: time on CPUs, system calls, page faults
    Processes,
    /// System calls: number, time, failures
    Calls,
    /// Files: bytes that programs read and write
    Files,
    /// TCP connections: bytes sent and received
    Connections,
}

/// Options of `top`.
#[derive(Debug, Args)]
pub struct Top {
    /// The machine
    #[command(flatten)]
    pub which: VmSelector,
    /// The kind of rows
    #[arg(long, value_enum, value_name = "WHAT", default_value = "processes")]
    pub by: TopKind,
    /// Show the maps of numbers of this script
    #[arg(short = 'e', long = "execute", value_name = "PROGRAM")]
    pub program: Option<String>,
    /// Print lines on a terminal, too
    #[arg(long)]
    pub plain: bool,
    /// The number of rows printed each second where there is no terminal
    #[arg(long, value_name = "ROWS", default_value_t = 10)]
    pub lines: usize,
    /// Print lines for this long, and end
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Show the maps of numbers of the script in this file
    #[arg(value_name = "FILE", conflicts_with = "program")]
    pub file: Option<String>,
}

/// Options of `scripts`.
#[derive(Debug, Args)]
pub struct Scripts {
    /// Print the text of this script
    pub name: Option<String>,
}

/// The choice of a machine.
#[derive(Debug, Clone, Args)]
pub struct VmSelector {
    /// The machine; may be left out when only one runs
    #[arg(long, value_name = "NAME")]
    pub vm: Option<VmName>,
}

/// The choice of a guest: that of a machine, one that does not run, or one of QEMU.
#[derive(Debug, Clone, Args)]
pub struct GuestSelector {
    /// The machine
    #[command(flatten)]
    pub which: VmSelector,
    /// Look into a guest that does not run: the folder of a snapshot, a core file as QEMU's
    /// dump-guest-memory or kdump writes it, or the bare memory of a machine. Needs no KVM
    #[arg(long, value_name = "DIR|FILE", conflicts_with = "vm", group = "other")]
    pub core: Option<PathBuf>,
    /// Look into a guest of QEMU by its monitor (QMP) at this socket. It is paused meanwhile, and
    /// only read. Needs no KVM
    #[arg(long, value_name = "SOCKET", conflicts_with = "vm", group = "other")]
    pub qemu: Option<PathBuf>,
    /// The file of that guest's kernel, for one without types (BTF) in its memory; a snapshot names
    /// its own
    #[arg(long, value_name = "FILE", requires = "other")]
    pub kernel: Option<PathBuf>,
}

/// A time in seconds, with or without a fraction, or with another unit.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    crate::history::time(text).map_err(|_| {
        format!("invalid time {text:?}: expected seconds, such as 10 or 0.5, or a unit, as in 500ms and 2m")
    })
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
    fn a_scripts_argument_may_be_negative() {
        let words = ["exotrace", "trace", "-n", "x.bt", "-5", "b"];
        let cli = Cli::try_parse_from(words).unwrap();
        let Command::Trace(trace) = cli.command else {
            panic!("{:?}", cli.command);
        };
        assert_eq!(trace.what, ["x.bt", "-5", "b"]);
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for command in ["snapshot", "brew"] {
            Cli::try_parse_from(["exotrace", command]).unwrap_err();
        }
    }
}
