//! The commands `exotrace trace` and `exotrace list`: probes of a running machine.
//!
//! The machine's own process has the traps; this module sends the request and prints the events.
//! However it ends, by Ctrl-C or killed, the machine sees the connection close and removes the
//! traps.

#[cfg(feature = "export")]
use std::io::IsTerminal;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use probes::name::ProbePattern;
use probes::provider::host_file;
use serde::de::DeserializeOwned;

use super::exporting::{Exports, Labels};
use super::guest;
use super::inspect;
use super::remote::find;
use super::run::{tell, tell_cost};
use super::script::{self, Source};
use crate::args::{self, Format, GuestSelector};
use crate::client::control::{ask, connect, unexpected};
use crate::commands::trace_output::Writer;
use crate::inspection::InspectedGuest;
use crate::output_file::{self, Output, OutputFile, kept_output};
use crate::protocol::control::{Answer, Command, ListedProbe};
use crate::protocol::end::MachineEnd;
use crate::protocol::error::ErrorKind;
use crate::protocol::event::ClockPair;
use crate::protocol::trace::Request;
use crate::protocol::trace::Traced;
use crate::protocol::trace::{LONGEST_LINE, Line};
use crate::registry::Running;
use crate::report::{Failure, ToOutput, as_printable, printable, say};
use crate::signals::StopSignals;
use crate::tracing::{count_by_provider, listing, waits};

/// The largest number of probes whose hits are reported at the end.
const MOST_COUNTS: usize = 50;

/// Runs `exotrace trace`.
///
/// # Errors
/// If the machine refuses, or the trace cannot be written.
pub fn trace(args: args::Trace) -> Result<(), Failure> {
    if args.list {
        if let [_, more, ..] = args.what.as_slice() {
            let wrong = format!("{more:?}: probes are listed of one pattern at a time");
            return Err(Failure::Usage(wrong));
        }
        return list(args::List {
            guest: args.guest,
            count: false,
            json: args.format == Some(Format::Json),
            file: None,
            pattern: args.what.into_iter().next(),
        });
    }
    let source = Source::of(args.program.as_deref(), &args.what)?;
    let wrong = args.without_meaning(source.is_some());
    if !wrong.is_empty() {
        let of = match source {
            Some(_) => "a script",
            None => "a trace of probes",
        };
        let wrong = format!("{}: not for {of}", wrong.join(", "));
        return Err(Failure::Usage(wrong));
    }
    if let Some(source) = source {
        return script::run(args, source);
    }
    let format = args.wanted_format().unwrap_or(Format::Events);
    #[cfg(feature = "export")]
    if format == Format::Parquet && args.output.is_none() && io::stdout().is_terminal() {
        let wrong = "a table in Parquet is binary: write it to a file (-o FILE) or to a pipe";
        return Err(Failure::Usage(wrong.into()));
    }
    let mut file = args.output.as_deref().map(OutputFile::open).transpose()?;
    let machine = running(args.guest.clone())?;
    let pids = inspect::pids(&args.guest, &args.processes)?;
    let exports = Exports::start(&args.exports, &machine, Labels::new())?;
    let ready = script::ready_script(&args.what);
    let request = Request {
        interval_ms: exports.interval_ms(),
        probes: args.what,
        pids,
        follow: args.follow,
        tids: args.tids,
        comms: args.comms,
        kernel_stack: args.stack.into(),
        user_stack: args.ustack.into(),
        one_in: args.one_in,
        per_second: args.per_second,
        slots: args.buffer,
        budget: args.budget,
    };
    let (lines, _signals) = start(&machine, &Command::Trace(request), args.duration)?;
    let output = kept_output(file.as_mut())?;
    let mut shown = Shown {
        output,
        writer: Writer::new(format, 1),
        failed: false,
        exports,
    };
    let followed = follow(lines, &mut shown, format, ready);
    shown.close(followed, file.as_ref())
}

/// The events on their way to the output.
struct Shown {
    output: Output,
    writer: Writer,
    /// Set when the output accepts nothing more.
    failed: bool,
    exports: Exports,
}

impl Shown {
    /// Writes the bytes that were made.
    fn write(&mut self) -> Result<(), Failure> {
        let bytes = self.writer.take();
        let written = self.output.write_all(&bytes);
        let written = written.and_then(|()| self.output.flush());
        self.failed |= written.is_err();
        written.to_output()
    }

    /// Writes the end of the output.
    fn finish(&mut self) -> Result<(), Failure> {
        self.writer.finish()?;
        self.write()
    }

    /// Ends a file that could not be written to its end, and adds to the failure the number of
    /// events that it lacks.
    fn close(
        self,
        followed: Result<(), Failure>,
        file: Option<&OutputFile>,
    ) -> Result<(), Failure> {
        let Self {
            output,
            writer,
            failed,
            exports,
        } = self;
        exports.finish();
        // What it still holds goes before the end.
        drop(output);
        match (followed, file) {
            (Err(Failure::Failed(why)), Some(file)) if failed => {
                let cut = file.writer()?;
                let lost = output_file::cut_off(cut, |intact| writer.cut_off(intact));
                Err(Failure::Failed(match lost {
                    Some(lost) => format!("{why}; {lost} events are not in it"),
                    None => why,
                }))
            }
            (followed, _) => followed,
        }
    }
}

/// Requests a trace from a machine. The trace ends at a stop signal, while those are watched, or
/// after `duration`.
pub(super) fn start(
    machine: &Running,
    command: &Command,
    duration: Option<Duration>,
) -> Result<(Lines, StopSignals), Failure> {
    let signals = StopSignals::watch()?;
    let stream = connect(machine, command)?;
    let closing = stream.try_clone()?;
    signals.on_stop(move || {
        // A connection already closed is as good.
        let _ = closing.shutdown(Shutdown::Write);
    });
    let lines = Lines {
        duration,
        ..Lines::of(stream)
    };
    Ok((lines, signals))
}

/// The lines that a machine sends of a trace.
pub(super) struct Lines {
    stream: BufReader<UnixStream>,
    text: Vec<u8>,
    /// The duration of the trace from its start.
    duration: Option<Duration>,
}

impl Lines {
    /// Reads the lines of a connection.
    pub(super) fn of(stream: UnixStream) -> Self {
        Self {
            stream: BufReader::new(stream),
            text: Vec::new(),
            duration: None,
        }
    }

    /// Waits for the next line and returns it.
    pub(super) fn next<L: DeserializeOwned>(&mut self) -> Result<L, Failure> {
        self.text.clear();
        let mut limited = Read::take(&mut self.stream, LONGEST_LINE);
        let read = match limited.read_until(b'\n', &mut self.text) {
            // A machine that is killed before it has read all of the request resets the connection.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
            read => read?,
        };
        if read == 0 {
            return Err(Failure::new(
                "the machine has ended before it reported the counts",
            ));
        }
        Ok(serde_json::from_slice(&self.text)?)
    }

    /// Starts the requested duration: all probes are armed.
    pub(super) fn begun(&mut self) -> Result<(), Failure> {
        match self.duration.take() {
            Some(duration) => end_after(duration, self.stream.get_ref().try_clone()?),
            None => Ok(()),
        }
    }

    /// Checks whether there is more to read without waiting.
    fn has_more(&self) -> bool {
        !self.stream.buffer().is_empty()
    }
}

/// Closes this side of the connection after `duration`.
fn end_after(duration: Duration, stream: UnixStream) -> Result<(), Failure> {
    std::thread::Builder::new()
        .name("deadline".into())
        .spawn(move || {
            std::thread::sleep(duration);
            let _ = stream.shutdown(Shutdown::Write);
        })?;
    Ok(())
}

/// Prints the events until the machine ends the trace. `advice` is for names that match nothing.
fn follow(
    mut lines: Lines,
    shown: &mut Shown,
    format: Format,
    advice: Option<String>,
) -> Result<(), Failure> {
    let mut traced: Vec<Traced> = Vec::new();
    // The number of events of each probe.
    let mut recorded: Vec<u64> = Vec::new();
    let until = match lines.duration {
        Some(_) => "",
        None => "; end with Ctrl-C",
    };
    loop {
        let line = match lines.next() {
            Ok(line) => line,
            // The events until then are whole.
            Err(lost) => return shown.finish().and(Err(lost)),
        };
        match line {
            Line::Begin {
                probes,
                clock,
                hz,
                skipped,
                open,
            } => {
                lines.begun()?;
                tell_skipped(&skipped);
                open.iter().for_each(|pattern| say(waits(pattern)));
                let plural = if probes.len() == 1 { "" } else { "s" };
                say(format_args!("{} probe{plural}{until}", probes.len()));
                // The lines of this format have ticks alone.
                if format == Format::Text {
                    let ClockPair { tsc, unix_ns } = clock;
                    say(format_args!("TSC {tsc} is {unix_ns} ns since 1970"));
                }
                recorded = vec![0; probes.len()];
                traced = probes;
                shown.writer = Writer::new(format, hz);
                shown.writer.begin(clock)?;
                shown.exports.begin(clock, hz);
            }
            Line::More { probe } => {
                say(format_args!("tracing {}", probe.name));
                traced.push(probe);
                recorded.push(0);
            }
            Line::Event { probe, event } => {
                shown.writer.line(&event, traced.get(probe))?;
                if let Some(recorded) = recorded.get_mut(probe) {
                    *recorded += 1;
                }
                shown.exports.hit(probe, event, &traced);
            }
            Line::Counts { counts, hits } => shown.exports.trace_counts(&counts, &traced, &hits),
            Line::End {
                counts,
                hits,
                machine,
            } => {
                shown.exports.trace_counts(&counts, &traced, &hits);
                shown.finish()?;
                tell(&counts);
                tell_cost(&counts.cost, &counts.unwatched);
                tell_hits(&traced, &hits, &recorded);
                return MachineEnd::report(machine.as_ref());
            }
            Line::Refused(error) => {
                let advice = advice.filter(|_| error.kind == ErrorKind::NoMatch);
                let advice = advice.map_or_else(String::new, |advice| format!("; {advice}"));
                return Err(Failure::new(error.message + &advice));
            }
        }
        // Lines that arrive together are written together.
        if !lines.has_more() {
            shown.exports.flush();
            shown.write()?;
        }
    }
}

/// Reports the hits of each probe, and how many of them became events if those are not all.
fn tell_hits(traced: &[Traced], hits: &[u64], recorded: &[u64]) {
    let counts = traced.iter().zip(hits).zip(recorded);
    let counts = counts.filter(|((_, hits), _)| **hits > 0);
    for ((probe, hits), recorded) in counts.take(MOST_COUNTS) {
        let of_them = match recorded == hits {
            true => String::new(),
            false => format!(", {recorded} recorded"),
        };
        say(format_args!("{hits:>10} {}{of_them}", probe.name));
    }
}

/// Reports the probes of patterns that are not traced.
pub(super) fn tell_skipped(skipped: &[String]) {
    const SHOWN: usize = 5;
    for why in skipped.iter().take(SHOWN) {
        say(format_args!("left out: {why}"));
    }
    if skipped.len() > SHOWN {
        say(format_args!("left out: {} more", skipped.len() - SHOWN));
    }
}

/// Runs `exotrace list`.
///
/// # Errors
/// If the machine cannot be reached.
pub fn list(args: args::List) -> Result<(), Failure> {
    let pattern = args.pattern.unwrap_or_default();
    let found = match args.file {
        Some(file) => of_file(&file, &pattern)?,
        None => of_guest(args.guest, pattern)?,
    };
    let mut out = BufWriter::new(io::stdout().lock());
    if args.count {
        for line in counts(&found) {
            writeln!(out, "{line}").to_output()?;
        }
        return out.flush().to_output();
    }
    let mut line = String::new();
    for probe in found {
        if args.json {
            writeln!(out, "{}", serde_json::to_string(&probe)?).to_output()?;
            continue;
        }
        line.clear();
        add_line(&mut line, &probe);
        // Names come from the guest's files.
        writeln!(out, "{}", as_printable(&line)).to_output()?;
    }
    out.flush().to_output()
}

/// Appends a probe as a line. There may be a hundred thousand of them.
fn add_line(line: &mut String, probe: &ListedProbe) {
    line.push_str(&probe.name);
    let lists = [
        (probe.arguments.as_deref(), [" (", ")"]),
        (
            Some(&*probe.fields).filter(|all| !all.is_empty()),
            [" {", "}"],
        ),
    ];
    for (items, [open, close]) in lists {
        for (index, item) in items.unwrap_or_default().iter().enumerate() {
            line.push_str(if index == 0 { open } else { ", " });
            line.push_str(item);
        }
        line.push_str(match items {
            Some([]) => " ()",
            Some(_) => close,
            None => "",
        });
    }
    if let Some(returns) = &probe.returns {
        line.push_str(" -> ");
        line.push_str(returns);
    }
}

/// Returns a line for each provider: its number of probes, and of those with formatted fields.
fn counts(probes: &[ListedProbe]) -> Vec<String> {
    let of_each = |has: fn(&ListedProbe) -> bool| {
        let counted = probes.iter().filter(|probe| has(probe));
        count_by_provider(counted.map(|probe| probe.name.as_str()))
    };
    let with_fields = of_each(|probe| !probe.fields.is_empty());
    let all = of_each(|_| true).into_iter();
    let line = |(provider, count): (String, usize)| {
        let with = with_fields.iter().find(|(known, _)| *known == provider);
        let fields = with.map_or_else(String::new, |(_, with)| format!(", {with} with fields"));
        format!("{provider:12} {count:>8}{fields}")
    };
    all.map(line).collect()
}

/// Returns the probes of a guest.
fn of_guest(selected: GuestSelector, pattern: String) -> Result<Vec<ListedProbe>, Failure> {
    let read = guest::read(&selected, |saved| {
        listing::list(&InspectedGuest::new(saved)?, &pattern)
    })?;
    if let Some((read, probes)) = read {
        read.tell();
        return Ok(probes);
    }
    let machine = find(selected.which)?;
    match ask(&machine, &Command::List { pattern })? {
        Answer::Probes { probes } => Ok(probes),
        other => Err(unexpected(&machine, &other).into()),
    }
}

/// Returns the selected machine, whose hits are wanted.
fn running(selected: GuestSelector) -> Result<Running, Failure> {
    let other = selected.core.or(selected.qemu);
    match other {
        Some(path) => Err(Failure::Usage(format!(
            "{}: a guest that exotrace does not run has no hits; `list` has its probes, and a script may iterate over it: \
             -e 'iter:task {{ print(comm); }}'",
            path.display()
        ))),
        None => find(selected.which),
    }
}

/// Returns the probes of a file of this host.
fn of_file(file: &Path, pattern: &str) -> Result<Vec<ListedProbe>, Failure> {
    let wanted = match pattern {
        "" => listing::ALL,
        pattern => pattern,
    };
    let parsed = ProbePattern::parse(wanted).map_err(Failure::new)?;
    let found = host_file::list(file, &parsed).map_err(Failure::new)?;
    for sentence in &found.incomplete {
        say(format_args!("{}", printable(sentence)));
    }
    if found.probes.is_empty() {
        let file = file.display();
        return Err(Failure::new(format!("no probe {wanted} in {file}")));
    }
    let listed = found.probes.into_iter();
    let listed = listed.map(|(name, signature)| ListedProbe::new(&name, signature));
    Ok(listed.collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn probes_are_counted_by_provider() {
        let probe = |name: &str, fields: &[&str]| ListedProbe {
            name: name.to_owned(),
            arguments: None,
            fields: fields.iter().map(|field| (*field).to_owned()).collect(),
            returns: None,
        };
        let probes = [
            probe("tracepoint:vmlinux:sched:sched_switch", &["int prev_pid"]),
            probe("kprobe:vmlinux:vfs_read:entry", &[]),
            probe("tracepoint:vmlinux:sched:sched_odd", &[]),
        ];
        let expected = [
            "kprobe              1",
            "tracepoint          2, 1 with fields",
        ];
        assert_eq!(counts(&probes), expected);
    }

    #[test]
    fn a_line_has_what_is_known_of_a_probe() {
        let owned = |parts: &[&str]| -> Vec<String> {
            parts.iter().map(|part| (*part).to_owned()).collect()
        };
        let probe = |arguments: Option<&[&str]>, fields, returns: Option<&str>| ListedProbe {
            name: "p:m:f:n".to_owned(),
            arguments: arguments.map(|all| owned(all).into()),
            fields: owned(fields),
            returns: returns.map(str::to_owned),
        };
        for (probe, line) in [
            (probe(None, &[], None), "p:m:f:n"),
            (probe(Some(&[]), &[], Some("int")), "p:m:f:n () -> int"),
            (probe(Some(&["int a"]), &[], None), "p:m:f:n (int a)"),
            (
                probe(Some(&["int a", "char *b"]), &["u8 c", "u8 d"], None),
                "p:m:f:n (int a, char *b) {u8 c, u8 d}",
            ),
        ] {
            let mut made = String::new();
            add_line(&mut made, &probe);
            assert_eq!(made, line);
        }
    }

    #[test]
    fn a_machine_that_is_killed_before_it_reads_has_ended() {
        for request in ["", "not read by anybody"] {
            let (mut stream, machine) = UnixStream::pair().unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            drop(machine);
            let mut lines = Lines {
                stream: BufReader::new(stream),
                text: Vec::new(),
                duration: None,
            };
            let error = lines.next::<Line>().unwrap_err();
            assert!(
                error.message().contains("the machine has ended"),
                "{error:?}"
            );
        }
    }
}
