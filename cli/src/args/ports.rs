//! Options of the commands for the ports of a machine's trace devices.

use crate::client::streams::StreamFormat;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

#[cfg(feature = "export")]
use super::Collector;
use super::{VmSelector, parse_seconds};
use crate::memory_size;
use crate::protocol::ports::ControlName;

/// The default number of older files that rotation keeps.
const DEFAULT_KEEP: u32 = 5;

/// Options of `ctl`.
#[derive(Debug, Args)]
#[command(after_help = "\
Of trace(3): trace START END new NAME, trace NAME on|off|remove, start, stop, all, size EXPONENT, watch PID. An address is hexadecimal, full \
or short (116c2c6 for ffffffff8116c2c6), or a symbol's name; END is greater than START. Of ptrace(3), with --port ptracectl: trace PID 1|0, size RECORDS. \
A refused command is reported with exit status 1.")]
pub struct Ctl {
    /// The machine
    #[command(flatten)]
    pub which: VmSelector,
    /// The port that takes the command
    #[arg(long, value_enum, default_value = "tracectl")]
    pub port: ControlName,
    /// One command; if it is omitted, the configuration is printed
    #[arg(
        value_name = "COMMAND",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub command: Vec<String>,
}

/// The end of `read -h` and `read --help`.
macro_rules! read_help {
    () => {
        "\
Events go to standard output (or -o), counts to standard error. Ctrl-C ends it, and so does the end of the machine. Later readers do not \
get the events that were read before; concurrent readers all get them. trace: text (the device's lines), raw (the same), json, perfetto, \
collapsed. ptrace: text (as ptrace(1) prints), raw (records of 28 bytes), json, perfetto, svg. dt: text, raw (structures of dt(4)), json, of \
probes such as kprobe:vfs_read:entry. All have parquet, a table for DuckDB and others."
    };
}

/// The fields of JSON, for the manual page and `read --help`.
macro_rules! fields_help {
    () => {
        "\
An object of trace has: event (entry or return), pid (null where there is none), pc, symbol (of pc) and function (that is entered or returns), \
both missing where they are not known, tsc (ticks), time and clock (missing where ticks cannot be made times); of an entry also args, of a return return.
An object of ptrace has: event (admit, release, edf, run, ready, sleep, yield, slice, deadline, expel, dead, ints, inte, trap, user or name; \
unknown for a type that is none of these), pid, comm (missing before it is known), cpu, time, clock, and type and arg as in the record; sleep \
also state (or null) and pc; trap also trap (fault, syscall or exception) with address and write, syscall (or null) and number, or vector; ints \
and inte also vector; name also name.
An object of dt has: probe, cpu, pid, tid, comm, time_ns, clock, args.
Times are nanoseconds since 1970, and clock is realtime. Addresses and values are hexadecimal text, since JSON readers round large numbers, but \
args of dt are numbers."
    };
}

/// See [`read_help`].
const READ_HELP: &str = read_help!();

/// Options of `read`.
#[derive(Debug, Args)]
#[command(after_help = READ_HELP, after_long_help = concat!(read_help!(), "\n\n", fields_help!()))]
pub struct Read {
    /// The machine
    #[command(flatten)]
    pub which: VmSelector,
    /// The port to read
    #[arg(value_enum, value_name = "PORT")]
    pub port: ReadPort,
    /// For dt: the probes
    #[arg(value_name = "PROBE")]
    pub probes: Vec<String>,
    /// The form of events; by default text, and parquet for FILE.parquet
    #[arg(long, value_enum)]
    pub format: Option<StreamFormat>,
    /// Write to this file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Rotate the file at this size, a number with K, M or G: FILE becomes FILE.1, FILE.1 becomes
    /// FILE.2 and so on
    #[arg(long, value_name = "SIZE", requires = "output", value_parser = memory_size::parse)]
    pub rotate: Option<u64>,
    /// Keep this many older files
    #[arg(long, value_name = "N", requires = "rotate", default_value_t = DEFAULT_KEEP)]
    pub keep: u32,
    /// The collector that gets it besides
    #[cfg(feature = "export")]
    #[command(flatten)]
    pub collector: Collector,
    /// End after this time
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Write the present events and end
    #[arg(long, conflicts_with = "duration")]
    pub now: bool,
    /// For ptrace: trace this process while reading; may be repeated
    #[arg(short, long = "pid", value_name = "PID")]
    pub pids: Vec<u32>,
    /// For ptrace: trace all processes while reading
    #[arg(long, conflicts_with = "pids")]
    pub all: bool,
    /// For ptrace: the number of records that the log holds, a power of two
    #[arg(long, value_name = "RECORDS")]
    pub size: Option<u32>,
}

impl Read {
    /// Returns the form of events.
    pub fn wanted_format(&self) -> StreamFormat {
        #[cfg(feature = "export")]
        if self.format.is_none() && self.output.as_deref().is_some_and(super::is_table) {
            return StreamFormat::Parquet;
        }
        self.format.unwrap_or(StreamFormat::Text)
    }

    /// Returns the given options that have no effect for the port.
    pub fn without_meaning(&self) -> Vec<String> {
        use StreamFormat::{Collapsed, Perfetto, Svg};
        let (of_trace, of_ptrace, of_dt) = match self.port {
            ReadPort::Trace => (true, false, false),
            ReadPort::Ptrace => (false, true, false),
            ReadPort::Dt => (false, false, true),
        };
        let wanted = self.wanted_format();
        let format = wanted.to_possible_value();
        let format = format.map_or_else(String::new, |v| format!("--format {}", v.get_name()));
        let is_odd = match wanted {
            Collapsed => !of_trace,
            Svg => !of_ptrace,
            Perfetto => of_dt,
            _ => false,
        };
        let given = [
            ("a probe", !of_dt && !self.probes.is_empty()),
            ("-p", !of_ptrace && !self.pids.is_empty()),
            ("--all", !of_ptrace && self.all),
            ("--size", !of_ptrace && self.size.is_some()),
            ("--now", of_dt && self.now),
            (&format, is_odd),
        ];
        let given = given.into_iter().filter(|(_, given)| *given);
        given.map(|(name, _)| name.to_owned()).collect()
    }
}

/// A port that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReadPort {
    /// Lines of trace(3)
    Trace,
    /// Records of ptrace(3)
    Ptrace,
    /// Events of dt(4)
    Dt,
}

/// Options of `mount`.
#[derive(Debug, Args)]
#[command(after_help = "\
Files: tracectl and ptracectl take commands and report the configuration. trace and ptrace give events. dt is the device dt(4) by its \
messages. stat has counts and the text of the last error. As on Plan 9 a read does not wait: 0 bytes mean that there is nothing now.
  echo trace vfs_read vfs_write new a > DIR/tracectl; echo trace a on > DIR/tracectl
  echo start > DIR/tracectl; sleep 1; echo stop > DIR/tracectl; cat DIR/trace
Ends with Ctrl-C, with the machine, or by umount DIR. Users other than root need fusermount3 (package fuse3).")]
pub struct Mount {
    /// The machine
    #[command(flatten)]
    pub which: VmSelector,
    /// An existing empty folder
    pub folder: PathBuf,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::{CommandFactory, Parser};

    use super::super::{Cli, Command};
    use super::*;

    fn parse(words: &str) -> Result<Command, clap::Error> {
        let words = ["exotrace"].into_iter().chain(words.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.command)
    }

    #[test]
    fn a_command_for_a_device_may_have_any_words() {
        for (words, port, command) in [
            ("ctl", ControlName::Tracectl, ""),
            (
                "ctl trace a b new c",
                ControlName::Tracectl,
                "trace a b new c",
            ),
            ("ctl watch -1", ControlName::Tracectl, "watch -1"),
            (
                "ctl --port ptracectl trace 5 --vm",
                ControlName::Ptracectl,
                "trace 5 --vm",
            ),
        ] {
            let Command::Ctl(ctl) = parse(words).unwrap() else {
                panic!("{words}: not ctl")
            };
            assert_eq!((ctl.port, ctl.command.join(" ")), (port, command.into()));
        }
    }

    #[test]
    fn the_manual_page_of_read_tells_the_fields_of_json() {
        let mut cli = Cli::command();
        let read = cli.find_subcommand_mut("read").unwrap();
        let help = read.render_long_help().to_string();
        let words: Vec<&str> = help
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .collect();
        for field in [
            "event", "pid", "pc", "symbol", "function", "tsc", "time", "clock", "args", "return",
            "comm", "cpu", "type", "arg", "state", "trap", "address", "write", "syscall", "number",
            "vector", "name", "probe", "tid", "time_ns",
        ] {
            assert!(words.contains(&field), "{field} is not in:\n{help}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for words in [
            "read",
            "read tracectl",
            "read trace --rotate 1M",
            "read trace -o f --keep 3",
            "read trace --now --for 1",
            "read ptrace --all -p 1",
            "read trace --format gif",
            "ctl --port trace",
            "mount",
        ] {
            assert!(parse(words).is_err(), "{words}");
        }
        for (words, expected) in [
            ("read trace -p 1 --size 8", vec!["-p", "--size"]),
            (
                "read trace --all --format svg",
                vec!["--all", "--format svg"],
            ),
            ("read ptrace --format collapsed", vec!["--format collapsed"]),
            ("read ptrace --format svg --all", vec![]),
            ("read trace kprobe:vfs_read:entry", vec!["a probe"]),
            (
                "read dt a:b:c --now --format svg",
                vec!["--now", "--format svg"],
            ),
            ("read dt a:b:c d:e:f --format json", vec![]),
            ("read trace --format collapsed", vec![]),
        ] {
            let Command::Read(read) = parse(words).unwrap() else {
                panic!("{words}: not read")
            };
            assert_eq!(read.without_meaning(), expected, "{words}");
        }
    }
}
