//! `exotrace trace` and `exotrace list`: probes of a running machine.
//!
//! The machine's own process has the traps; this asks, and prints what comes. However this ends, by Ctrl-C or killed, the machine sees its side
//! of the connection close and takes the traps away.

use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::remote::find;
use super::run::tell;
use super::script::{self, Source};
use crate::args::{self, Format};
use crate::control::client::{ask, connect, unexpected};
use crate::control::{Answer, Command};
use crate::output_file::OutputFile;
use crate::report::{Failure, ToOutput, say};
use crate::signals::StopSignals;
use crate::tracing::output::{Output, Writer};
use crate::tracing::request::Request;
use crate::tracing::stream::Line;
use crate::tracing::{Traced, count_by_provider};

/// Probes whose hits are told at the end.
const MOST_COUNTS: usize = 50;
/// Longest line that is taken from a machine.
const LONGEST_LINE: usize = 64 << 20;

/// Runs `exotrace trace`.
///
/// # Errors
/// If the machine refuses, or the trace cannot be written.
pub fn trace(args: args::Trace) -> Result<(), Failure> {
    if args.list {
        return list(args::List {
            which: args.which,
            count: false,
            json: args.format == Some(Format::Json),
            pattern: args.what.into_iter().next(),
        });
    }
    if let Some(source) = Source::of(args.program.as_deref(), &args.what)? {
        return script::run(args, source);
    }
    let machine = find(args.which)?;
    let format = args.format.unwrap_or(Format::Events);
    let request = Request {
        probes: args.what,
        pids: args.pids,
        follow: args.follow,
        tids: args.tids,
        comms: args.comms,
        kernel_stack: args.stack.into(),
        user_stack: args.ustack.into(),
        one_in: args.one_in,
        per_second: args.per_second,
        slots: args.buffer,
    };
    let mut file = args.output.as_deref().map(OutputFile::open).transpose()?;
    let signals = StopSignals::watch()?;
    let stream = connect(&machine, &Command::Trace(request))?;
    let closing = stream.try_clone()?;
    let end = move || {
        // Gone already is as good.
        let _ = closing.shutdown(Shutdown::Write);
    };
    if let Some(duration) = args.duration {
        end_after(duration, stream.try_clone()?)?;
    }
    signals.on_stop(end);
    let output: Output = match &mut file {
        Some(file) => {
            file.keep()?;
            Box::new(BufWriter::new(file.writer()?))
        }
        None => Box::new(BufWriter::new(io::stdout())),
    };
    follow(stream, output, format)
}

/// Closes our side when the time is up.
pub(super) fn end_after(duration: Duration, stream: UnixStream) -> Result<(), Failure> {
    std::thread::Builder::new()
        .name("deadline".into())
        .spawn(move || {
            std::thread::sleep(duration);
            let _ = stream.shutdown(Shutdown::Write);
        })?;
    Ok(())
}

/// Prints what comes until the machine ends the trace.
fn follow(stream: UnixStream, mut output: Output, format: Format) -> Result<(), Failure> {
    let mut lines = BufReader::new(stream);
    let mut writer = Writer::new(format, 1);
    let mut traced: Vec<Traced> = Vec::new();
    let mut text = Vec::new();
    loop {
        text.clear();
        let read = io::Read::take(&mut lines, LONGEST_LINE as u64).read_until(b'\n', &mut text)?;
        if read == 0 {
            return Err(Failure::new(
                "the machine has ended before it could tell the counts",
            ));
        }
        match serde_json::from_slice(&text)? {
            Line::Begin {
                probes,
                clock,
                hz,
                skipped,
                open,
            } => {
                tell_skipped(&skipped);
                for pattern in open {
                    say(format_args!(
                        "{pattern}: no process has it mapped; waiting for one"
                    ));
                }
                say(format_args!(
                    "{} probes; TSC {} is {} ns since 1970; end with Ctrl-C",
                    probes.len(),
                    clock.tsc,
                    clock.unix_ns
                ));
                traced = probes;
                writer = Writer::new(format, hz);
                writer.begin(clock);
            }
            Line::More { probe } => {
                say(format_args!("tracing {}", probe.name));
                traced.push(probe);
            }
            Line::Event { probe, event } => writer.line(&event, traced.get(probe)),
            Line::End { counts, hits } => {
                write(&mut output, &mut writer)?;
                tell(&counts);
                let counts = traced.iter().zip(hits).filter(|(_, hits)| *hits > 0);
                for (probe, hits) in counts.take(MOST_COUNTS) {
                    say(format_args!("{hits:>10} {}", probe.name));
                }
                return Ok(());
            }
            Line::Refused { message } => return Err(Failure::new(message)),
        }
        // What comes in one go is written in one go.
        if lines.buffer().is_empty() {
            write(&mut output, &mut writer)?;
        }
    }
}

fn write(output: &mut Output, writer: &mut Writer) -> Result<(), Failure> {
    let bytes = writer.take();
    output
        .write_all(&bytes)
        .and_then(|()| output.flush())
        .to_output()
}

/// Probes of patterns that are not traced.
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
/// If the machine cannot be asked.
pub fn list(args: args::List) -> Result<(), Failure> {
    let machine = find(args.which)?;
    let pattern = args.pattern.unwrap_or_default();
    let found = match ask(&machine, &Command::List { pattern })? {
        Answer::Probes { probes } => probes,
        other => return Err(unexpected(&machine, &other).into()),
    };
    let mut out = BufWriter::new(io::stdout().lock());
    if args.count {
        let names = found.iter().map(|probe| probe.name.as_str());
        for (provider, count) in count_by_provider(names) {
            writeln!(out, "{provider:12} {count:>8}").to_output()?;
        }
        return out.flush().to_output();
    }
    for probe in &found {
        match args.json {
            true => writeln!(out, "{}", serde_json::to_string(probe)?).to_output()?,
            false => {
                let arguments = probe.arguments.as_ref();
                let shown = arguments.map_or_else(String::new, |a| format!(" ({})", a.join(", ")));
                let returns = probe.returns.as_ref();
                let returns = returns.map_or_else(String::new, |r| format!(" -> {r}"));
                writeln!(out, "{}{shown}{returns}", probe.name).to_output()?;
            }
        }
    }
    out.flush().to_output()
}
