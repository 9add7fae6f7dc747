//! The command `exotrace read`: the records of a running machine's device as a stream.
//!
//! The machine's process has the log; this command is one reader of it. However it ends, the
//! machine sees the connection close. Tracing by `-p` and `--all` for this reader is switched off
//! in the end, unless this process is killed.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use trace_devices::dt::abi::{FLAG_EXECNAME, FLAG_FUNCARGS};

use super::exporting::Copies;
use super::remote::find;
use crate::args::{self, ReadPort};
use crate::client::dt::show;
use crate::client::dt::{ABI, DtClient, DtError};
use crate::client::ports::{CallError, Client};
use crate::client::streams::StreamFormat;
use crate::client::streams::shape::{Guest, Shape, shape};
use crate::client::streams::sink::{MakeShape, Rotation, Sink, Stop};
use crate::output_file::OutputFile;
use crate::protocol::end::MachineEnd;
use crate::protocol::ports::{ControlName, EventName};
use crate::protocol::ports::{LONGEST_READ, Target, Waited};
use crate::registry::Running;
use crate::report::{Failure, say};
use crate::server::ports::server::FRAMED;
use crate::signals::StopSignals;

/// The number of dt(4) events read at once.
const DT_EVENTS: usize = 1024;
/// The interval of checks for a requested end, and for the loss of the output's reader.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the command.
///
/// # Errors
/// If the device refuses, or the output cannot be written.
pub fn read(mut args: args::Read) -> Result<(), Failure> {
    check(&args)?;
    let file = args.output.as_deref().map(OutputFile::open).transpose()?;
    let machine = find(std::mem::replace(
        &mut args.which,
        args::VmSelector { vm: None },
    ))?;
    let stop = Stop::default();
    let signals = StopSignals::watch()?;
    signals.on_stop({
        let stop = stop.clone();
        move || stop.ask()
    });
    let mut asked = Client::open(&machine.beside(FRAMED), Target::Stat)?;
    let (mut source, forms): (Box<dyn Source>, Forms) = match args.port {
        ReadPort::Trace => of_port(&machine, EventName::Trace, &args)?,
        ReadPort::Ptrace => of_port(&machine, EventName::Ptrace, &args)?,
        ReadPort::Dt => of_dt(&machine, &args)?,
    };
    let mut copies = Copies::start(&args, &machine, || forms(StreamFormat::Json))?;
    let format = args.wanted_format();
    let make: MakeShape = Box::new(move || forms(format));
    let mut sink = match (&args.output, file) {
        (Some(path), Some(file)) => {
            let keep = args.keep;
            let rotation = args.rotate.map(|size| Rotation { size, keep });
            Sink::to_file(path, file, rotation, stop.clone(), make)?
        }
        _ => Sink::to_output(stop.clone(), make)?,
    };
    let end = End {
        stop,
        at: args.duration.and_then(|d| Instant::now().checked_add(d)),
        now: args.now,
    };
    let mut records = 0;
    let mut followed = follow(source.as_mut(), &mut sink, &mut copies, &end, &mut records);
    if matches!(followed, Err(Failure::OutputClosed)) {
        return followed.map(drop);
    }
    let ended = source.end();
    if let (Ok(until), Ok((last, _))) = (&followed, &ended) {
        let size = source.record_bytes();
        let passed = pass_on(last, size, &mut sink, &mut copies, &mut records);
        followed = passed.map(|()| *until);
    }
    // Also after a lost machine the file's last record is complete.
    let finished = sink.finish();
    if let Some(copies) = copies {
        copies.finish();
    }
    match ended {
        Ok((_, dropped)) => say(format_args!("{records} records, {dropped} dropped")),
        Err(_) => say(format_args!("{records} records")),
    }
    match followed.and_then(|until| finished.map(|()| until))? {
        Until::Asked => Ok(()),
        Until::MachineEnd => MachineEnd::report(asked.end()?.as_ref()),
    }
}

/// A maker of the shapes of a port's records.
type Forms = Box<dyn Fn(StreamFormat) -> Result<Box<Shape>, String>>;

/// The reason why reading ended.
#[derive(Debug, Clone, Copy)]
enum Until {
    /// The user requested the end.
    Asked,
    /// The machine has no more events.
    MachineEnd,
}

/// A source of events.
trait Source {
    /// Returns the size of an event in bytes.
    fn record_bytes(&self) -> usize;

    /// Waits at most `limit` for events and returns whole ones, or nothing. Returns `None` when
    /// none will come.
    fn next(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, Failure>;

    /// Returns the remaining events and the number of dropped ones.
    fn end(&mut self) -> Result<(Vec<u8>, u64), Failure>;
}

/// An event port, with the processes traced for it.
struct Port {
    // Dropped, and so closed, first.
    client: Client,
    _traced: Traced,
}

impl Source for Port {
    fn record_bytes(&self) -> usize {
        self.client.record_bytes().max(1)
    }

    fn next(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, Failure> {
        let most = u32::try_from(LONGEST_READ).unwrap_or(u32::MAX);
        let bytes = self.client.read(most)?;
        if !bytes.is_empty() || limit.is_zero() {
            return Ok(Some(bytes));
        }
        Ok(match self.client.wait(limit)? {
            Waited::Nothing => Some(bytes),
            Waited::Something => Some(self.client.read(most)?),
            Waited::Ended => None,
        })
    }

    fn end(&mut self) -> Result<(Vec<u8>, u64), Failure> {
        Ok((Vec::new(), self.client.dropped()?))
    }
}

fn of_port(
    machine: &Running,
    port: EventName,
    args: &args::Read,
) -> Result<(Box<dyn Source>, Forms), Failure> {
    let socket = machine.beside(FRAMED);
    let mut traced = Traced::begin(&socket, args.size)?;
    let client = Client::open(&socket, Target::Events(port))?;
    let who = args.pids.iter().map(u32::to_string);
    for who in who.chain(args.all.then(|| "all".to_owned())) {
        traced.add(&socket, who)?;
    }
    let guest = guest(&socket)?;
    let source = Port {
        client,
        _traced: traced,
    };
    let forms = move |format| shape(port, format, &guest);
    Ok((Box::new(source), Box::new(forms)))
}

impl Source for DtClient {
    fn record_bytes(&self) -> usize {
        ABI.event_size()
    }

    fn next(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, Failure> {
        match self.read(DT_EVENTS, limit) {
            Ok(events) => Ok(Some(events)),
            // The machine closes the device when it ends.
            Err(DtError::Ended | DtError::Gone(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn end(&mut self) -> Result<(Vec<u8>, u64), Failure> {
        Ok(self.counts()?)
    }
}

fn of_dt(machine: &Running, args: &args::Read) -> Result<(Box<dyn Source>, Forms), Failure> {
    let mut device = DtClient::open(&machine.dt())?;
    let list = device.list()?;
    let mut names = BTreeMap::new();
    for probe in &args.probes {
        let number = device.find(&list, probe)?;
        device.enable(number, FLAG_EXECNAME | FLAG_FUNCARGS)?;
        names.insert(number, probe.clone());
    }
    device.record(true)?;
    let names = Arc::new(names);
    let forms = move |format| show::shape(format, &names);
    Ok((Box::new(device), Box::new(forms)))
}

/// Rejects senseless arguments before anything is done.
fn check(args: &args::Read) -> Result<(), Failure> {
    let wrong = args.without_meaning();
    if !wrong.is_empty() {
        let port = args.port.to_possible_value();
        let port = port.map_or_else(String::new, |v| v.get_name().to_owned());
        let wrong = format!("{}: not for {port}", wrong.join(", "));
        return Err(Failure::Usage(wrong));
    }
    if args.port == ReadPort::Dt && args.probes.is_empty() {
        let wrong =
            "dt: no probes given; name some, such as: exotrace read dt kprobe:vfs_read:entry";
        return Err(Failure::Usage(wrong.into()));
    }
    let is_binary = match args.wanted_format() {
        #[cfg(feature = "export")]
        StreamFormat::Parquet => true,
        StreamFormat::Perfetto => true,
        StreamFormat::Raw => args.port != ReadPort::Trace,
        _ => false,
    };
    if is_binary && args.output.is_none() && io::stdout().is_terminal() {
        let wrong =
            "this format is binary: write it to a file (-o FILE) or to a pipe, not to a terminal";
        return Err(Failure::Usage(wrong.into()));
    }
    Ok(())
}

/// The conditions under which reading ends.
struct End {
    /// A signal.
    stop: Stop,
    /// A point in time.
    at: Option<Instant>,
    /// Set to end when there is nothing more to read now.
    now: bool,
}

impl End {
    /// Returns the longest time to wait; `None` at the end.
    fn left(&self) -> Option<Duration> {
        let left = match self.at {
            Some(at) => at.saturating_duration_since(Instant::now()),
            None => LOOK_INTERVAL,
        };
        (!left.is_zero() && !self.stop.is_asked()).then(|| left.min(LOOK_INTERVAL))
    }
}

fn follow(
    source: &mut dyn Source,
    sink: &mut Sink,
    copies: &mut Option<Copies>,
    end: &End,
    records: &mut u64,
) -> Result<Until, Failure> {
    while let Some(left) = end.left() {
        let limit = if end.now { Duration::ZERO } else { left };
        let Some(bytes) = source.next(limit)? else {
            return Ok(Until::MachineEnd);
        };
        if bytes.is_empty() && end.now {
            return Ok(Until::Asked);
        }
        pass_on(&bytes, source.record_bytes(), sink, copies, records)?;
        sink.check()?;
    }
    Ok(Until::Asked)
}

fn pass_on(
    bytes: &[u8],
    size: usize,
    sink: &mut Sink,
    copies: &mut Option<Copies>,
    records: &mut u64,
) -> Result<(), Failure> {
    for record in bytes.chunks_exact(size) {
        if let Some(copies) = copies {
            copies.record(record)?;
        }
        sink.record(record)?;
        *records += 1;
    }
    if let Some(copies) = copies {
        copies.flush();
    }
    sink.flush()
}

/// Returns the machine's facts about itself.
fn guest(socket: &Path) -> Result<Guest, CallError> {
    let mut client = Client::open(socket, Target::Stat)?;
    let clock = client.clock()?;
    Ok(Guest::new(clock, move |address| {
        client.name(address).ok().flatten()
    }))
}

/// The processes traced for this reader, until it is dropped.
struct Traced {
    control: Option<Client>,
    who: Vec<String>,
}

impl Traced {
    /// Starts without processes; the log has room for `size` records.
    fn begin(socket: &Path, size: Option<u32>) -> Result<Self, Failure> {
        let mut traced = Self {
            control: None,
            who: Vec::new(),
        };
        if let Some(size) = size {
            traced.command(socket, &format!("size {size}"))?;
        }
        Ok(traced)
    }

    fn add(&mut self, socket: &Path, who: String) -> Result<(), Failure> {
        let traced = self.command(socket, &format!("trace {who} 1"));
        traced.map_err(|error| Failure::new(format_args!("process {who}: {error}")))?;
        self.who.push(who);
        Ok(())
    }

    fn command(&mut self, socket: &Path, command: &str) -> Result<(), CallError> {
        let control = match &mut self.control {
            Some(control) => control,
            none => {
                let target = Target::Control(ControlName::Ptracectl);
                none.insert(Client::open(socket, target)?)
            }
        };
        control.command(command.as_bytes())
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        for who in std::mem::take(&mut self.who) {
            let Some(control) = &mut self.control else {
                return;
            };
            match control.command(format!("trace {who} 0").as_bytes()) {
                Ok(()) => {}
                // Processes end, and so do machines.
                Err(error) => log::info!("process {who} is no longer traced: {error}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;
    use std::path::PathBuf;

    use clap::Parser;
    use trace_devices::trace_line::{LineKind, TraceLine};

    use super::*;
    use crate::server::ports::toy::{LINES, World, lines, record, until};

    /// Parses the arguments of `exotrace read`.
    fn parsed(words: &str) -> args::Read {
        let words = format!("exotrace read {words}");
        let cli = args::Cli::try_parse_from(words.split_whitespace()).unwrap();
        match cli.command {
            args::Command::Read(args) => *args,
            _ => panic!("{words}: not read"),
        }
    }

    impl World {
        fn machine(&self) -> Running {
            Running {
                name: "toy".parse().unwrap(),
                pid: "1".into(),
                socket: self.folder.path().join("control"),
            }
        }

        fn output(&self) -> PathBuf {
            self.folder.path().join("output")
        }

        /// Reads by a command line until it ends, and returns the number of records and the bytes
        /// written.
        fn read(&self, words: &str, stop: &Stop) -> (u64, Vec<u8>) {
            let args = parsed(words);
            let port = match args.port {
                ReadPort::Ptrace => EventName::Ptrace,
                _ => EventName::Trace,
            };
            let (mut source, forms) = of_port(&self.machine(), port, &args).unwrap();
            let make: MakeShape = Box::new({
                let format = args.wanted_format();
                move || forms(format)
            });
            let path = self.output();
            let file = OutputFile::open(&path).unwrap();
            let mut sink = Sink::to_file(&path, file, None, stop.clone(), make).unwrap();
            let end = End {
                stop: stop.clone(),
                at: args.duration.map(|d| Instant::now() + d),
                now: args.now,
            };
            let mut records = 0;
            follow(source.as_mut(), &mut sink, &mut None, &end, &mut records).unwrap();
            assert_eq!(source.end().unwrap(), (Vec::new(), 0));
            sink.finish().unwrap();
            (records, fs::read(&path).unwrap())
        }
    }

    #[test]
    fn what_is_there_is_read_at_once_and_what_comes_until_the_time_is_up() {
        let world = World::new();
        let stop = Stop::default();
        world.toy.push_lines(0..LINES as u64);
        let read = world.read("trace --now", &stop);
        assert_eq!(read, (LINES as u64, lines(0..LINES as u64)));
        assert_eq!(world.read("trace --now", &stop), (0, Vec::new()));
        let toy = world.toy.clone();
        let later = std::thread::spawn(move || {
            until("the reader", || toy.trace.readers() > 0);
            toy.push_lines(0..2);
        });
        let read = world.read("trace --for 2", &stop);
        assert_eq!(read, (2, lines(0..2)));
        later.join().unwrap();
    }

    #[test]
    fn processes_are_traced_while_they_are_read() {
        let world = World::new();
        world.toy.push_records(0..1);
        let read = world.read(
            "ptrace --now --format raw --size 1024 -p 5 -p 6",
            &Stop::default(),
        );
        assert_eq!(read, (1, record(0).to_vec()));
        let commands = world.toy.ptracectl.commands();
        let expected = [
            "size 1024",
            "trace 5 1",
            "trace 6 1",
            "trace 5 0",
            "trace 6 0",
        ];
        assert_eq!(commands, expected);
        world.read("ptrace --now --all", &Stop::default());
        let commands = world.toy.ptracectl.commands();
        assert_eq!(commands[5..], ["trace all 1", "trace all 0"]);
    }

    #[test]
    fn reading_ends_when_it_shall_and_with_the_machine() {
        let mut world = World::new();
        let stop = Stop::default();
        stop.ask();
        assert_eq!(world.read("trace", &stop).0, 0);
        let args = parsed("trace");
        let (mut source, _) = of_port(&world.machine(), EventName::Trace, &args).unwrap();
        world.toy.push_lines(0..1);
        let server = world.server.take();
        let ending = std::thread::spawn(move || drop(server));
        let mut seen = Vec::new();
        while let Some(bytes) = source.next(LOOK_INTERVAL).unwrap() {
            seen.extend(bytes);
        }
        assert_eq!(seen, lines(0..1));
        assert_eq!(source.end().unwrap().1, 0);
        ending.join().unwrap();
    }

    #[test]
    fn every_format_of_a_port_shows_something() {
        let world = World::new();
        for (words, part) in [
            ("trace", "E 0000000000000003"),
            ("trace --format json", "\"f3\""),
            ("trace --format collapsed", "f3"),
            ("trace --format perfetto", "f3"),
            ("ptrace", " Run "),
            ("ptrace --format json", "\"pid\":3"),
            ("ptrace --format svg", "</svg>"),
            #[cfg(feature = "export")]
            ("trace --format parquet", "PAR1"),
            #[cfg(feature = "export")]
            ("ptrace --format parquet", "PAR1"),
        ] {
            for (kind, ticks) in [(LineKind::Entry, 2), (LineKind::Exit, 12)] {
                let line = TraceLine {
                    kind,
                    pc: 3,
                    ticks,
                    pid: 5,
                    arguments: [0; 4],
                };
                world.toy.trace.push([line.to_bytes().as_slice()]);
            }
            world.toy.push_records(3..4);
            let (_, shown) = world.read(&format!("{words} --now"), &Stop::default());
            let shown = String::from_utf8_lossy(&shown).into_owned();
            assert!(shown.contains(part), "{words}: {shown}");
        }
    }
}
