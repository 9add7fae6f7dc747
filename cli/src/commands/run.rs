//! `exotrace run`: boots or restores a machine in the foreground, registers it, and traces it.
//!
//! What the user may have got wrong is looked at before anything is made. What is made goes again in the
//! opposite order, however the run ends: traps, terminal, control socket, machine, run directory.

use std::io::{self, BufWriter, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use probes::function_trace::{FunctionTracer, TraceOptions};
use probes::kernel_view::KernelView;
use vmm::RunEnd;
use vmm::machine::console::Console;
use vmm::machine::{MachineConfig, SerialOutput};
use vmm::snapshot::KernelReference;

use crate::args;
use crate::control::server::Server;
use crate::end_report;
use crate::guest_kernel::GuestKernel;
use crate::host::Host;
use crate::memory_size::Human;
use crate::output_file::OutputFile;
use crate::registry::{Entry, Registry, VmName};
use crate::report::{Failure, say};
use crate::session::{Located, Session};
use crate::signals::StopSignals;
use crate::trace::{ClockPair, Output, Summary, Trace};

/// Runs the command.
///
/// # Errors
/// If something given is not usable, or the guest crashed.
pub fn run(args: args::Run) -> Result<(), Failure> {
    let inputs = Inputs::read(&args)?;
    let host = Host::open()?;
    let signals = StopSignals::watch()
        .map_err(|error| Failure::new(format_args!("signals cannot be watched: {error}")))?;
    let entry = claim(args.name.clone())?;
    let mut files = Files::open(&args)?;
    let serial = serial_output(&args, files.serial.as_ref())?;
    let session = make(&args, inputs, host, &entry, serial)?;
    let plan = Plan {
        args: &args,
        entry: &entry,
        signals: &signals,
    };
    plan.drive(session, &mut files)
}

/// Registers under a name and says what was in the way.
///
/// # Errors
/// If the name is in use or the run directory cannot be used.
pub fn claim(name: Option<VmName>) -> Result<Entry, Failure> {
    let (entry, left_behind) = Registry::open()?.claim(name)?;
    if let Some(pid) = left_behind {
        say(format_args!(
            "removed what the dead machine {} (process {pid}) left behind",
            entry.name()
        ));
    }
    Ok(entry)
}

/// What was read before anything is made.
struct Inputs {
    kernel: Option<GuestKernel>,
    initramfs: Option<Vec<u8>>,
}

impl Inputs {
    fn read(args: &args::Run) -> Result<Self, Failure> {
        let booted = args.kernel.as_deref().filter(|_| args.restore.is_none());
        let kernel = booted.map(GuestKernel::open).transpose()?;
        if let Some(kernel) = &kernel
            && !args.trace.is_empty()
        {
            kernel.check_functions(&args.trace)?;
        }
        let initramfs = args.initramfs.as_deref().map(read_initramfs).transpose()?;
        Ok(Self { kernel, initramfs })
    }
}

fn read_initramfs(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path)
        .map_err(|error| Failure::new(format_args!("initramfs {}: {error}", path.display())))
}

/// Files that the run writes.
struct Files {
    serial: Option<OutputFile>,
    trace: Option<OutputFile>,
}

impl Files {
    fn open(args: &args::Run) -> Result<Self, Failure> {
        let serial = match Serial::of(args) {
            Serial::File(path) => Some(OutputFile::open(path)?),
            Serial::Stdio | Serial::Null => None,
        };
        let trace = args.output.as_deref().map(OutputFile::open).transpose()?;
        Ok(Self { serial, trace })
    }

    fn keep(&mut self) -> Result<(), Failure> {
        for file in [&mut self.serial, &mut self.trace].into_iter().flatten() {
            file.keep()?;
        }
        Ok(())
    }
}

/// Where the serial port goes.
enum Serial<'a> {
    Stdio,
    Null,
    File(&'a Path),
}

impl<'a> Serial<'a> {
    fn of(args: &'a args::Run) -> Self {
        match args.serial.to_str() {
            Some("stdio") => Self::Stdio,
            Some("null") => Self::Null,
            _ => Self::File(&args.serial),
        }
    }
}

fn serial_output(args: &args::Run, file: Option<&OutputFile>) -> Result<SerialOutput, Failure> {
    Ok(match (Serial::of(args), file) {
        (Serial::File(_), Some(file)) => SerialOutput::by_lines(file.writer()?),
        // Standard output is the trace's.
        (Serial::Stdio, _) if !args.trace.is_empty() && args.output.is_none() => {
            SerialOutput::write_through(io::stderr())
        }
        (Serial::Stdio, _) => SerialOutput::write_through(io::stdout()),
        _ => SerialOutput::null(),
    })
}

/// The machine, held before its first instruction.
fn make(
    args: &args::Run,
    inputs: Inputs,
    host: Host,
    entry: &Entry,
    serial: SerialOutput,
) -> Result<Session, Failure> {
    let started = Instant::now();
    let name = entry.name().clone();
    if let Some(folder) = &args.restore {
        let restored = vmm::snapshot::restore(&host.kvm, &host.profile, folder, serial)?;
        let kernel = snapshot_kernel(args, restored.kernel.as_ref())?;
        say(format_args!("{name}: restored from {}", folder.display()));
        let (machine, command_line) = (restored.machine, restored.command_line);
        return Ok(Session {
            machine,
            host,
            name,
            command_line,
            kernel,
            started,
        });
    }
    let Some(kernel) = inputs.kernel else {
        return Err(Failure::Usage(
            "nothing to run: give --kernel or --restore".into(),
        ));
    };
    let booted = vmm::machine::boot(
        &host.kvm,
        &host.profile,
        MachineConfig {
            memory: args.memory,
            cpus: args.cpus,
            kernel: &kernel.file,
            initramfs: inputs.initramfs.as_deref(),
            command_line: &args.cmdline,
            add_words: !args.no_words && kernel.is_linux(),
            protocol: args.entry.map(Into::into),
            pit: !args.no_pit,
            serial,
        },
    )?;
    say(format_args!(
        "{name}: {}, {} vCPU{}, {}",
        Human(args.memory),
        args.cpus,
        if args.cpus == 1 { "" } else { "s" },
        kernel.reference.path.display()
    ));
    if !booted.added_words.is_empty() {
        say(format_args!(
            "added to the command line for this machine and host: {}",
            booted.added_words.join(" ")
        ));
    }
    let (machine, command_line) = (booted.machine, booted.command_line);
    Ok(Session {
        machine,
        host,
        name,
        command_line,
        kernel: Some(kernel),
        started,
    })
}

/// The kernel of a snapshot. Without its file the machine runs all the same, and cannot be traced.
fn snapshot_kernel(
    args: &args::Run,
    saved: Option<&KernelReference>,
) -> Result<Option<GuestKernel>, Failure> {
    let Some(saved) = saved else {
        return match args.trace.is_empty() {
            true => Ok(None),
            false => Err(Failure::new(
                "the snapshot does not say which kernel it runs: it cannot be traced",
            )),
        };
    };
    match GuestKernel::of_snapshot(saved, args.kernel.as_deref()) {
        Ok(kernel) => {
            if !args.trace.is_empty() {
                kernel.check_functions(&args.trace)?;
            }
            Ok(Some(kernel))
        }
        Err(error) if args.trace.is_empty() && args.kernel.is_none() => {
            say(format_args!("no symbols: {error}"));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// What the run is about.
struct Plan<'a> {
    args: &'a args::Run,
    entry: &'a Entry,
    signals: &'a StopSignals,
}

/// What stands in the guest once its kernel is known.
struct Armed {
    view: KernelView,
    tracer: Option<FunctionTracer>,
}

impl Plan<'_> {
    fn drive(&self, mut session: Session, files: &mut Files) -> Result<(), Failure> {
        let early = session.locate()?;
        let armed = early.map(|view| self.arm(&session, view)).transpose()?;
        files.keep()?;
        let console = match Serial::of(self.args) {
            Serial::Stdio => Some(Console::connect(&session.machine)?),
            Serial::Null | Serial::File(_) => None,
        };
        if console.is_some() && io::stdin().is_terminal() {
            say("the terminal is the guest's serial port; Ctrl-a x leaves");
        }
        session.machine.start();
        let session = Arc::new(session);
        let weak = Arc::downgrade(&session);
        self.signals.on_stop(move || {
            if let Some(session) = weak.upgrade() {
                session.machine.stop();
            }
        });
        let server = Server::start(&self.entry.control(), session.clone())?;
        let result = self.watch(&session, armed, files);
        drop((console, server));
        session.machine.flush_serial();
        let (end, view, summary) = result?;
        if let Some(summary) = &summary {
            tell(summary);
        }
        end_report::report(
            &end,
            view.as_ref().map(|v| &v.symbols),
            session.machine.ram(),
        )?;
        summary.map_or(Ok(()), |summary| written(summary.written))
    }

    /// Arms what was asked for, and the kernel's panic.
    fn arm(&self, session: &Session, view: KernelView) -> Result<Armed, Failure> {
        session.watch_panic(&view);
        let names = &self.args.trace;
        if names.is_empty() {
            return Ok(Armed { view, tracer: None });
        }
        if let Some(missing) = &view.missing {
            say(format_args!("process ids are not shown: {missing}"));
        }
        let tracer = FunctionTracer::arm(&session.machine, &view, names, &TraceOptions::default())?;
        Ok(Armed {
            view,
            tracer: Some(tracer),
        })
    }

    /// Follows the running machine to its end.
    fn watch(
        &self,
        session: &Arc<Session>,
        armed: Option<Armed>,
        files: &Files,
    ) -> Result<(RunEnd, Option<KernelView>, Option<Summary>), Failure> {
        let deadline = |from: Instant| self.args.duration.and_then(|d| from.checked_add(d));
        let whole_run = deadline(Instant::now()).filter(|_| self.args.trace.is_empty());
        let armed = match armed {
            Some(armed) => armed,
            None if session.kernel.as_ref().is_none_or(|k| k.symbols().is_err()) => {
                return Ok((wait(session, whole_run), None, None));
            }
            None => {
                let progress = self.progress();
                let located = session.wait_for_kernel(whole_run);
                progress.finish_and_clear();
                match located? {
                    Located::Kernel(view) => self.arm(session, *view)?,
                    Located::Ended(end) => return Ok((end, None, None)),
                    Located::TimedOut => return Ok((wait(session, whole_run), None, None)),
                }
            }
        };
        let Some(tracer) = armed.tracer else {
            return Ok((wait(session, whole_run), Some(armed.view), None));
        };
        let output = trace_output(files)?;
        let clock = ClockPair::now();
        say(format_args!(
            "tracing {}; TSC {} is {} ns since 1970",
            self.args.trace.join(", "),
            clock.tsc,
            clock.unix_ns
        ));
        let trace =
            Trace::start(session.clone(), tracer, output, self.args.format).map_err(|error| {
                Failure::new(format_args!("the trace thread cannot be started: {error}"))
            })?;
        let end = wait(session, deadline(Instant::now()));
        Ok((end, Some(armed.view), Some(trace.finish()?)))
    }

    /// A spinner where nothing else is drawn.
    fn progress(&self) -> ProgressBar {
        if !io::stderr().is_terminal() || matches!(Serial::of(self.args), Serial::Stdio) {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new_spinner().with_message("the guest boots");
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    }
}

/// Waits for the end of the run, and brings it about at `deadline`.
fn wait(session: &Session, deadline: Option<Instant>) -> RunEnd {
    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
    session.machine.wait(left).unwrap_or_else(|| {
        session.machine.stop();
        RunEnd::Stopped
    })
}

fn trace_output(files: &Files) -> Result<Output, Failure> {
    Ok(match &files.trace {
        Some(file) => Box::new(BufWriter::new(file.writer()?)),
        None => Box::new(BufWriter::new(io::stdout())),
    })
}

/// The trace's counts, for the user.
fn tell(summary: &Summary) {
    let stats = &summary.stats;
    say(format_args!(
        "{} events: {} entries, {} exits, {} dropped",
        stats.pushed + stats.dropped,
        stats.entries,
        stats.returns,
        stats.dropped
    ));
    for (count, what) in [
        (stats.waiting_returns, "calls had not returned yet"),
        (
            stats.unpaired_returns,
            "passes of a return address by other calls were left out",
        ),
        (
            stats.lost_returns,
            "calls never returned, or too many waited",
        ),
        (
            stats.without_return,
            "calls whose return could not be trapped",
        ),
        (stats.unknown_task, "hits whose process could not be read"),
    ] {
        if count > 0 {
            say(format_args!("{count} {what}"));
        }
    }
}

/// A reader of the trace that has gone is no failure.
///
/// # Errors
/// If the trace could not be written for another reason.
pub fn written(result: io::Result<()>) -> Result<(), Failure> {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::OutputClosed,
        _ => Failure::new(format_args!("the trace cannot be written: {error}")),
    })
}
