//! Options of `run`.

use crate::confinement::Confine;
use crate::server::guest_ports::GuestPorts;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use vmm::boot::EntryProtocol;
use vmm::machine::{DiskConfig, Transport};

use super::{Format, parse_seconds};
use crate::disk;
use crate::expect::report::Destination;
use crate::expect::{Expectation, Point};
use crate::history::Ring;
use crate::memory_size;
use crate::net::Net;
use crate::protocol::cost::Budget;
use crate::registry::VmName;
use crate::vsock::Vsock;

/// The default size of guest memory in bytes.
const MEMORY: u64 = 256 << 20;
/// The default size of guest memory in bytes for an image: distributions need more.
const IMAGE_MEMORY: u64 = 1 << 30;

/// The end of `run -h` and `run --help`.
macro_rules! run_help {
    () => {
        "\
Traces go to standard output (or -o), everything else to standard error. The guest's serial port is on standard \
output too, unless --trace is given without -o: then it is on standard error.
With a terminal, Ctrl-a x ends the run, Ctrl-a Ctrl-a sends a Ctrl-a to the guest, and Ctrl-C goes to the guest. \
Without one, SIGINT and SIGTERM remove every trap, then end the run."
    };
}

/// The rules of expectations, for the manual page and `run --help`.
macro_rules! expect_help {
    () => {
        "\
Expectations: a PROBE is one that `trace` takes (vfs_read, kprobe:vfs_*:entry, syscall:openat, tracepoint:sched:sched_switch, \
uprobe:/bin/app:main); without entry or return, the entry is meant. A PREDICATE is one of the script language, \
between slashes: 'syscall:openat:return/comm == \"sh\" && retval < 0/==0'. It begins at the first slash that belongs to no path, and a \
path follows a colon. Hits are compared by >=N (the default is >=1), >N, ==N, <=N or <N; ==0 means never. Every hit is counted, \
whatever the rate.
Probes are enabled as soon as the kernel can be traced, of a restored machine before its first instruction. Programs, \
and modules that a probe names (kprobe:MODULE:FUNCTION:entry), are waited for. The time of --for begins then. Without --until-met the run takes all of it unless the guest ends by itself (reset, \
power-off); its hits until then count. If the guest never boots that far, the run waits without limit. Limit that with timeout(1): the \
report is still written at its SIGTERM. The status is 0 if all expectations hold; 1 if one does not, if the run was cut short by a signal or another \
command, or if the guest's kernel panicked or crashed.
A JUnit report has a test case for each expectation and one called 'guest did not panic', and 'run was whole' if it was not. A JSON report \
is one object: version (1), machine, passed, began_unix_ns, seconds, asked_seconds (null without --for), end (kind: time-up, met, guest, \
script, cut-short, panic, crash or not-counted; text), expectations (of each: text, probe, predicate, comparison, number, seen, holds; seen \
is null if nothing was counted), crash (null, or message, kernel_stack, stack_ends), console (its last lines), trace (the last \
50 lines of what --trace, -e or -f have written), events (the last 50 hits that were counted, oldest first: unix_ns, expectations by their \
places from 0, probe, comm, pid, tid, cpu), events_lost (hits that may belong among them)."
    };
}

/// See [`run_help`].
const RUN_HELP: &str = run_help!();

/// Options of `run`.
#[derive(Debug, Args)]
#[command(after_help = RUN_HELP, after_long_help = concat!(run_help!(), "\n\n", expect_help!()))]
pub struct Run {
    /// The kernel: a vmlinux (ELF) or a bzImage for x86-64
    #[arg(long, value_name = "FILE", required_unless_present_any = ["restore", "image"])]
    pub kernel: Option<PathBuf>,
    /// Boot this image of a disk, which is the guest's first: the kernel, the initramfs and the
    /// command line are those that its boot loader would take. `exotrace image` shows them. The
    /// options are those of --disk. With --kernel it is only a disk
    #[arg(long, value_name = "FILE[,OPTION]...", value_parser = disk::parse)]
    pub image: Option<DiskConfig>,
    /// The initial RAM file system
    #[arg(long, value_name = "FILE", conflicts_with = "restore")]
    pub initramfs: Option<PathBuf>,
    /// The kernel's command line, instead of the image's; words that the machine or the host need
    /// are added and shown
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true,
        conflicts_with = "restore"
    )]
    pub cmdline: String,
    /// Add these words to the command line, behind the others
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true,
        conflicts_with = "restore"
    )]
    pub append: String,
    /// Guest memory: a number with K, M or G; 256M by default, 1G with --image
    #[arg(long, value_name = "SIZE", value_parser = memory_size::parse, conflicts_with = "restore")]
    pub memory: Option<u64>,
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
    /// Give the guest this image as a disk, raw or qcow2: the first is its /dev/vda. With `ro` it
    /// is read-only. With `overlay` the guest's writes go to a temporary file and the image stays
    /// as it is, with `overlay=FILE` to that file, which is kept. `format` overrides the format
    /// found in the file. A qcow2 image's backing file is opened only if it lies in the same folder
    /// or `backing` names it. A restored machine has the disks it was saved with. Name those
    /// outside the snapshot's folder again, in order
    #[arg(long = "disk", value_name = "FILE[,ro][,overlay[=FILE]][,format=raw|qcow2][,backing=FILE]", value_parser = disk::parse)]
    pub disks: Vec<DiskConfig>,
    /// Leave the images of all disks as they are: the guest's writes go to temporary files. A
    /// snapshot holds them
    #[arg(long)]
    pub overlay: bool,
    /// Use the disks that the snapshot names, wherever their files are; only for a snapshot that is
    /// trusted like a program
    #[arg(long, requires = "restore", conflicts_with = "disks")]
    pub disks_as_saved: bool,
    /// Check all of the snapshot's memory before the guest runs, which takes as long as reading it.
    /// By default each piece is checked when the guest first uses it. Damage is then reported, and
    /// the guest continues
    #[arg(long, requires = "restore")]
    pub verify: bool,
    /// Give the guest a network card. With user it is on the host's network, by the program passt
    /// (Debian: apt install passt); host=2222:22 leads port 2222 of this host's 127.0.0.1 to the
    /// guest's port 22, udp= likewise, and loopback lets the guest reach 127.0.0.1 as its gateway.
    /// tap=NAME is a TAP interface, unix=SOCKET a socket with a length of 4 bytes before each
    /// frame. All take mac=ADDRESS
    #[arg(long, value_name = "off|user[,host=PORT:PORT]|tap=NAME|unix=SOCKET")]
    pub net: Option<Net>,
    /// Give the guest sockets to programs of this host (virtio-vsock). CID is its context id, 3 or
    /// more. A program connects to SOCKET and sends `CONNECT PORT`; connections of the guest to
    /// port N of context 2 go to the socket SOCKET_N
    #[arg(long, value_name = "CID,SOCKET")]
    pub vsock: Option<Vsock>,
    /// Give the guest the host's random numbers as /dev/hwrng. By default on for Linux, unless
    /// --no-words is given
    #[arg(long, value_name = "on|off", value_enum, conflicts_with = "restore")]
    pub rng: Option<Switch>,
    /// The way in which the guest finds its virtio devices: on a PCI bus, or by words on its
    /// command line (CONFIG_VIRTIO_MMIO_CMDLINE_DEVICES). By default the one that its kernel has
    #[arg(long, value_name = "pci|mmio", value_enum, conflicts_with = "restore")]
    pub bus: Option<VirtioBus>,
    /// Give the guest a virtio-console. It has hvc0, whose output goes where the serial port's
    /// goes, and the trace devices as /dev/virtio-ports/tracectl and so on. With ro the guest can
    /// read events, with rw also choose what is traced. A restored machine has the ports it was
    /// saved with
    #[arg(long, value_name = "off|ro|rw", value_enum, default_value = "off")]
    pub guest_ports: GuestPorts,
    /// The destination of the guest's serial port: stdio, null or a file
    #[arg(long, value_name = "stdio|null|FILE", default_value = "stdio")]
    pub serial: PathBuf,
    /// The boot protocol of the kernel
    #[arg(long, value_enum, conflicts_with = "restore")]
    pub entry: Option<Entry>,
    /// Omit the interval timer (PIT)
    #[arg(long, conflicts_with = "restore")]
    pub no_pit: bool,
    /// Add nothing to the kernel's command line
    #[arg(long, conflicts_with = "restore")]
    pub no_words: bool,
    /// Restore a machine from this folder instead of booting one
    #[arg(long, value_name = "DIR")]
    pub restore: Option<PathBuf>,
    /// Give the restored guest the input that was recorded from its moment on, at the same times,
    /// before that of this host: console, network and random numbers. Tells where the guest departs
    /// from the recording. Snapshots of a --history have one
    #[arg(long, requires = "restore")]
    pub replay: bool,
    /// Trace these probes: entries and returns of kernel functions by name alone, anything else as
    /// for `trace`
    #[arg(
        long,
        value_name = "PROBE,...",
        value_delimiter = ',',
        group = "traced"
    )]
    pub trace: Vec<String>,
    /// Run this script as soon as the kernel can be traced. The run ends when the script exits. See
    /// `trace`
    #[arg(
        short = 'e',
        long = "execute",
        value_name = "PROGRAM",
        group = "traced",
        conflicts_with = "trace"
    )]
    pub program: Option<String>,
    /// Run the script in this file likewise
    #[arg(short = 'f', long = "script", value_name = "FILE", group = "traced", conflicts_with_all = ["trace", "program"])]
    pub script: Option<String>,
    /// Let all traces of the machine together, those of other commands too, cost at most this share
    /// of each vCPU's time, such as 5%. Their costliest probes are stopped for parts of the time.
    /// Expectations are always watched
    #[arg(long, value_name = "PERCENT")]
    pub budget: Option<Budget>,
    /// Write the trace to this file instead of standard output
    #[arg(short, long, value_name = "FILE", requires = "traced")]
    pub output: Option<PathBuf>,
    /// Expect a number of hits of a probe, at least one by default; may be repeated
    #[arg(long, value_name = "PROBE[/PREDICATE/][>=N]", value_parser = Expectation::parse)]
    pub expect: Vec<Expectation>,
    /// End the run as soon as all expectations are met; ignored if one of them has an upper bound
    #[arg(long, requires = "expect")]
    pub until_met: bool,
    /// Keep the machine at the first hit of this probe, before the probed instruction, as a
    /// snapshot. The guest goes on. May be repeated
    #[arg(long, value_name = "PROBE[/PREDICATE/]", value_parser = Point::parse)]
    pub snapshot_at: Vec<Point>,
    /// Keep checkpoints of the last seconds in memory: one every second, and at most 2G of them,
    /// unless said otherwise. `exotrace rewind` and a script's `rewind()` write one as a snapshot.
    /// So does a run that ends with a panic, a crash or an expectation that does not hold, of 2
    /// seconds before
    #[arg(long, value_name = "TIME[,every=TIME][,most=SIZE]", value_parser = Ring::from_str)]
    pub history: Option<Ring>,
    /// The folder for the snapshots that scripts, --snapshot-at and --history make; by default the
    /// current one for those of this command line
    #[arg(long, value_name = "DIR")]
    pub snapshots: Option<PathBuf>,
    /// Write a report of the expectations: JUnit XML to a FILE.xml, JSON to a FILE.json; may be
    /// repeated
    #[arg(long, value_name = "FILE", requires = "expect", value_parser = Destination::from_str)]
    pub report: Vec<Destination>,
    /// End the run after this time. It begins at the start, or with a trace or expectations when
    /// their probes are armed
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// The form of trace events; by default text for functions by name alone, else events
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Confine the machine's process: restrict its files and system calls, drop capabilities,
    /// disable core dumps, and prevent other processes of the user from reading it. With `strict`,
    /// a forbidden system call ends it
    #[arg(
        long,
        value_name = "on|strict|off",
        value_enum,
        default_value = "on",
        env = "EXOTRACE_CONFINE"
    )]
    pub confine: Confine,
    /// Run as this user, with this group alone (by default the one of the same number). Only for
    /// root, who opens /dev/kvm first. The user must be able to open the other files
    #[arg(long, value_name = "UID[:GID]", value_parser = parse_user)]
    pub user: Option<User>,
    /// Let clients trace through the device dt(4), the socket `dt` in the machine's run directory
    #[arg(long, value_name = "on|off", value_enum, default_value = "on")]
    pub dt: Switch,
    /// Take the guest's files from this copy where the guest's memory and disks lack them, for
    /// addresses that the device dt(4) resolves
    #[arg(long, value_name = "DIR")]
    pub symfs: Option<PathBuf>,
}

/// A user and a group by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// The user.
    pub user: u32,
    /// The group.
    pub group: u32,
}

fn parse_user(text: &str) -> Result<User, String> {
    let number = |text: &str| {
        let parsed = text.parse().ok().filter(|&number| number != u32::MAX);
        parsed.ok_or_else(|| {
            format!("invalid user or group {text:?}: expected UID or UID:GID, as numbers")
        })
    };
    let (user, group) = text.split_once(':').unwrap_or((text, text));
    Ok(User {
        user: number(user)?,
        group: number(group)?,
    })
}

/// The way in which a guest finds its virtio devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VirtioBus {
    /// On a PCI bus.
    Pci,
    /// By words on its command line.
    Mmio,
}

impl From<VirtioBus> for Transport {
    fn from(bus: VirtioBus) -> Self {
        match bus {
            VirtioBus::Pci => Self::Pci,
            VirtioBus::Mmio => Self::Mmio,
        }
    }
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
    /// Returns the image that is booted, if the kernel is to come from one.
    pub fn booted_image(&self) -> Option<&DiskConfig> {
        let is_booted = self.kernel.is_none() && self.restore.is_none();
        self.image.as_ref().filter(|_| is_booted)
    }

    /// Returns the size of guest memory in bytes.
    pub fn memory(&self) -> u64 {
        let default = match self.booted_image() {
            Some(_) => IMAGE_MEMORY,
            None => MEMORY,
        };
        self.memory.unwrap_or(default)
    }

    /// Returns whether the run needs the guest's kernel.
    pub fn needs_kernel(&self) -> bool {
        !(self.trace.is_empty() && self.expect.is_empty() && self.snapshot_at.is_empty())
    }

    /// Returns whether the run is traced, by probes or a script.
    pub fn is_traced(&self) -> bool {
        !self.trace.is_empty() || self.program.is_some() || self.script.is_some()
    }
}

/// The boot protocol of a kernel.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    #[test]
    fn run_takes_what_its_synopsis_says() {
        let words = "exotrace run --kernel k --initramfs i --cmdline a=b --memory 64M --cpus 2 --name web \
             --serial null --entry pvh --no-pit --no-words --trace a,b -o t --for 0.5 --format json";
        let cli = Cli::try_parse_from(words.split_whitespace()).unwrap();
        let Command::Run(run) = cli.command else {
            panic!("not run")
        };
        assert_eq!((run.memory(), run.cpus, run.trace.len()), (64 << 20, 2, 2));
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
            "run --kernel k --user root",
            "run --kernel k --user 1000:",
            "run --kernel k --user 4294967295",
            "run --kernel k --confine perhaps",
            "run --kernel k --net on",
            "run --kernel k --net user,host=22",
            "run --kernel k --vsock 2,s",
            "run --kernel k --vsock 3",
            "run --kernel k --history",
            "run --kernel k --history 0",
            "run --kernel k --history 60s,every=2m",
            "run --kernel k --history 60s,most=lots",
            "run --kernel k --snapshot-at",
            "run --kernel k --snapshot-at vfs_read>=3",
            "run --kernel k --snapshot-at BEGIN",
        ] {
            let words = ["exotrace"].into_iter().chain(words.split_whitespace());
            assert!(Cli::try_parse_from(words.clone()).is_err(), "{words:?}");
        }
    }
}
