//! The command line: every command, option and its help. Man pages and completions are made from this.

mod ports;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use vmm::boot::EntryProtocol;

use crate::control::inspection::ProcessName;
use crate::disk::Disk;
use crate::expect::Expectation;
use crate::expect::report::Destination;
use crate::memory_size;
use crate::registry::VmName;
use crate::tracing::request::DEFAULT_SLOTS;
pub use ports::{Ctl, Mount, Read, ReadPort, StreamFormat};

/// Bytes of a string that a script reads unless told otherwise.
const DEFAULT_STRLEN: u16 = 256;

/// Watch a running Linux guest from outside.
///
/// exotrace runs an unmodified guest in a small KVM machine and traces it without any help from inside: no agent,
/// no module, no kernel option. `exotrace demo` shows what that looks like; `exotrace doctor` says what this
/// host can do.
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
    Stop(Which),
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
    /// Give a command to a running machine's device trace(3) or ptrace(3), or print its configuration
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
}

/// What `run -h` and `run --help` end with.
macro_rules! run_help {
    () => {
        "\
Traces go to standard output (or -o), everything else to standard error. The guest's serial port is on standard \
output too, unless --trace is given without -o: then it is on standard error.
With a terminal, Ctrl-a x leaves and Ctrl-a Ctrl-a is a Ctrl-a for the guest. Ctrl-C goes to the guest then; \
elsewhere SIGINT and SIGTERM remove every trap, then end the run."
    };
}

/// What the manual page and `run --help` say of expectations besides.
macro_rules! expect_help {
    () => {
        "\
Expectations: a PROBE is one that `trace` takes (vfs_read, kprobe:vfs_*:entry, syscall:openat, tracepoint:sched:sched_switch, \
uprobe:/bin/busybox:main); where neither entry nor return is said the entry is meant. A PREDICATE is one of the language of scripts, \
between slashes: 'syscall:openat:return/comm == \"sh\" && retval < 0/==0'. It begins at the first slash that belongs to no path, and a \
path stands behind a colon. Hits are compared by >=N (>=1 if nothing is said), >N, ==N, <=N or <N; ==0 says never. Every hit is counted, \
whatever the rate.
Probes are enabled as soon as the kernel can be traced, of a restored machine before its first instruction; modules and programs must be \
there by then. The time of --for begins then. Without --until-met the run takes all of it unless the guest ends by itself (reset, \
power-off), whose hits until then count. A guest that never boots so far is waited for: bound that with timeout(1), at whose SIGTERM the \
report is still written. The status is 0 if all expectations hold; 1 if one does not, if the run was cut short by a signal or another \
command, or if the guest's kernel panicked or crashed.
A JUnit report has a test case for each expectation and one called 'guest did not panic', and 'run was whole' if it was not. A JSON report \
is one object: version (1), machine, passed, began_unix_ns, seconds, asked_seconds (null without --for), end (kind: time-up, met, guest, \
script, cut-short, panic, crash or not-counted; text), expectations (of each: text, probe, predicate, comparison, number, seen, holds; seen \
is null if nothing was counted), crash (null, or message, kernel_stack, stack_ends), console (its last lines), events (the last 50 hits that \
were counted, oldest first: unix_ns, expectations by their places from 0, probe, comm, pid, tid, cpu), events_lost (hits that may belong among them)."
    };
}

/// See [`run_help`].
const RUN_HELP: &str = run_help!();

/// Options of `run`.
#[derive(Debug, Args)]
#[command(after_help = RUN_HELP, after_long_help = concat!(run_help!(), "\n\n", expect_help!()))]
pub struct Run {
    /// The kernel: a vmlinux (ELF) or a bzImage for x86-64
    #[arg(long, value_name = "FILE", required_unless_present = "restore")]
    pub kernel: Option<PathBuf>,
    /// The initial RAM file system
    #[arg(long, value_name = "FILE", conflicts_with = "restore")]
    pub initramfs: Option<PathBuf>,
    /// The kernel's command line; words that the machine or the host need are added and shown
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true,
        conflicts_with = "restore"
    )]
    pub cmdline: String,
    /// Guest memory: a number with K, M or G
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = memory_size::parse, conflicts_with = "restore")]
    pub memory: u64,
    /// Number of virtual CPUs
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        conflicts_with = "restore"
    )]
    pub cpus: u8,
    /// Name of the machine for other commands; vm1, vm2 ... by default
    #[arg(long, value_name = "NAME")]
    pub name: Option<VmName>,
    /// Give the guest this file as a disk, a raw image: the first is its /dev/vda. With `,ro` it may only be read
    #[arg(
        long = "disk",
        value_name = "[path=]FILE[,ro]",
        conflicts_with = "restore"
    )]
    pub disks: Vec<Disk>,
    /// Whether the guest has a source of random numbers: the host's, as /dev/hwrng. By default a Linux has it, unless
    /// nothing is added to its command line
    #[arg(long, value_name = "on|off", value_enum, conflicts_with = "restore")]
    pub rng: Option<Switch>,
    /// Give the guest a virtio-console: its hvc0, whose output goes where the serial port's goes, and the trace devices as
    /// /dev/virtio-ports/tracectl and so on, to read events (ro) or also to say what is traced (rw). A restored machine has
    /// the ports it was saved with
    #[arg(long, value_name = "off|ro|rw", value_enum, default_value = "off")]
    pub guest_ports: GuestPorts,
    /// Where the guest's serial port goes: stdio, null or a file
    #[arg(long, value_name = "stdio|null|FILE", default_value = "stdio")]
    pub serial: PathBuf,
    /// How the kernel is entered
    #[arg(long, value_enum, conflicts_with = "restore")]
    pub entry: Option<Entry>,
    /// Leave out the interval timer (PIT)
    #[arg(long, conflicts_with = "restore")]
    pub no_pit: bool,
    /// Add nothing to the kernel's command line
    #[arg(long, conflicts_with = "restore")]
    pub no_words: bool,
    /// Restore a machine from this folder instead of booting one
    #[arg(long, value_name = "DIR")]
    pub restore: Option<PathBuf>,
    /// Trace these probes: entries and returns of kernel functions by name alone, anything else as for `trace`
    #[arg(
        long,
        value_name = "PROBE,...",
        value_delimiter = ',',
        group = "traced"
    )]
    pub trace: Vec<String>,
    /// Run this script from when the kernel can be traced; when the script exits the run ends. See `trace`
    #[arg(
        short = 'e',
        long = "execute",
        value_name = "PROGRAM",
        group = "traced",
        conflicts_with = "trace"
    )]
    pub program: Option<String>,
    /// The same of a script in a file
    #[arg(short = 'f', long = "script", value_name = "FILE", group = "traced", conflicts_with_all = ["trace", "program"])]
    pub script: Option<String>,
    /// Write the trace to this file instead of standard output
    #[arg(short, long, value_name = "FILE", requires = "traced")]
    pub output: Option<PathBuf>,
    /// Expect this of the guest: how often a probe is hit, once at least if no number is given; may be repeated
    #[arg(long, value_name = "PROBE[/PREDICATE/][>=N]", value_parser = Expectation::parse)]
    pub expect: Vec<Expectation>,
    /// End the run as soon as all that is expected has come, unless something is expected that has an upper bound
    #[arg(long, requires = "expect")]
    pub until_met: bool,
    /// Write a report on what was expected and seen: JUnit XML to a FILE.xml, JSON to a FILE.json; may be repeated
    #[arg(long, value_name = "FILE", requires = "expect", value_parser = Destination::from_str)]
    pub report: Vec<Destination>,
    /// End the run after this time: from the start, or with a trace or expectations from when their probes are armed
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// How trace events are written: text where functions are named alone, else events
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Whether clients may trace through the device dt(4), the socket `dt` in the machine's run directory
    #[arg(long, value_name = "on|off", value_enum, default_value = "on")]
    pub dt: Switch,
    /// Take files that the device dt(4) resolves addresses to from this copy of the guest's, where the guest's memory lacks them
    #[arg(long, value_name = "DIR")]
    pub symfs: Option<PathBuf>,
}

/// What a guest may do with the trace devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GuestPorts {
    /// It does not see them.
    Off,
    /// Read events.
    Ro,
    /// Also change what is traced.
    Rw,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// It is there.
    On,
    /// It is not.
    Off,
}

impl Run {
    /// Whether the run cannot do without knowing the guest's kernel.
    pub fn needs_kernel(&self) -> bool {
        !(self.trace.is_empty() && self.expect.is_empty())
    }

    /// Whether the run is traced, by probes or a script.
    pub fn is_traced(&self) -> bool {
        !self.trace.is_empty() || self.program.is_some() || self.script.is_some()
    }
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
    pub which: Which,
    /// A new folder
    pub folder: PathBuf,
}

/// Options of `stat`.
#[derive(Debug, Args)]
pub struct Stat {
    /// Which machine
    #[command(flatten)]
    pub which: Which,
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
    pub which: Which,
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
    pub which: Which,
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
    pub which: Which,
    /// Look in this process's program and libraries
    #[arg(short, long, value_name = "PID|NAME")]
    pub process: Option<ProcessName>,
    /// Where on this host the guest's files lie, for those whose pages are not in the guest's memory
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
    pub which: Which,
    /// The process: its pid or its name
    #[arg(short, long, value_name = "PID|NAME")]
    pub process: ProcessName,
    /// Where on this host the guest's files lie, for those whose pages are not in the guest's memory
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
    pub which: Which,
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
    pub which: Which,
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
    /// End the trace after this time
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
    /// Translators and structures of the files *.d in this folder may be used by the script; may be repeated
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
pub struct Which {
    /// The machine; may be left out when only one runs
    #[arg(long, value_name = "NAME")]
    pub vm: Option<VmName>,
}

/// How trace events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A line for people
    Events,
    /// Of probes, lines of 121 bytes as trace(3) prints them: entries and returns; of a script, its own text
    Text,
    /// One JSON object a line
    Json,
    /// Of a script, its maps as folded stacks for flame graphs
    Collapsed,
}

/// How a kernel is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Entry {
    /// The 64-bit boot protocol
    Linux64,
    /// PVH: 32-bit protected mode, at the kernel's PVH note
    Pvh,
}

impl From<Entry> for EntryProtocol {
    fn from(entry: Entry) -> Self {
        match entry {
            Entry::Linux64 => Self::Linux64,
            Entry::Pvh => Self::Pvh,
        }
    }
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
    fn run_takes_what_its_synopsis_says() {
        let words = "exotrace run --kernel k --initramfs i --cmdline a=b --memory 64M --cpus 2 --name web \
             --serial null --entry pvh --no-pit --no-words --trace a,b -o t --for 0.5 --format json";
        let cli = Cli::try_parse_from(words.split_whitespace()).unwrap();
        let Command::Run(run) = cli.command else {
            panic!("not run")
        };
        assert_eq!((run.memory, run.cpus, run.trace.len()), (64 << 20, 2, 2));
        assert_eq!(run.duration, Some(Duration::from_millis(500)));
        assert_eq!(
            (run.format, run.entry),
            (Some(Format::Json), Some(Entry::Pvh))
        );
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for words in [
            "run",
            "run --restore d --memory 64M",
            "run --restore d --initramfs i",
            "run --kernel k --memory lots",
            "run --kernel k --cpus many",
            "run --kernel k --name a/b",
            "run --kernel k -o t",
            "run --kernel k --for 0",
            "run --kernel k --expect f=>1",
            "run --kernel k --expect f>=many",
            "run --kernel k --expect BEGIN",
            "run --kernel k --report r.xml",
            "run --kernel k --until-met",
            "run --kernel k --expect f --report r.txt",
            "run --kernel k --for -1",
            "run --kernel k --for soon",
            "run --kernel k --for inf",
            "snapshot",
            "brew",
        ] {
            let words = ["exotrace"].into_iter().chain(words.split_whitespace());
            assert!(Cli::try_parse_from(words.clone()).is_err(), "{words:?}");
        }
    }
}
