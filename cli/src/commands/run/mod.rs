//! The command `exotrace run`: boots or restores a machine in the foreground, registers it, and
//! traces it.
//!
//! The user's input is checked before anything is made. However the run ends, everything is removed
//! in the opposite order: traps, terminal, control socket, machine, run directory.

mod counts;
mod expecting;
mod files;
mod keeping;
pub mod setup;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use probes::kernel_view::KernelView;
use vmm::RunEnd;
use vmm::machine::console::Console;
use vmm::machine::{MachineThread, Paused};
use vmm::snapshot::PageMap;

use super::script::Source;
use crate::args::{self, Format, Switch, User};
use crate::commands::script_output::Running;
use crate::commands::trace_output::{Summary, Trace};
use crate::confinement::{self, Confinement, Kind, Reach};
use crate::end_report;
use crate::ending;
use crate::expect::counting::{self, Counted, Counting};
use crate::history::Keeper;
use crate::host::{self, Host};
use crate::named_socket::SocketFile;
use crate::output_file::Output;
use crate::output_file::trace_output;
use crate::passt::Passt;
use crate::protocol::script::Counts as ScriptCounts;
use crate::protocol::script::ScriptRequest;
use crate::protocol::trace::Request;
use crate::registry::{Entry, Registry, VmName};
use crate::report::{Failure, say};
use crate::scripting::Job;
use crate::server::control::Server;
use crate::server::dt;
use crate::server::guest_ports;
use crate::server::ports;
use crate::signals::StopSignals;
use crate::tail::Tail;
use crate::tracing::{TracePanicked, Tracing, waits};
use crate::vm::{Located, Vm};
pub use counts::{tell, tell_cost, tell_given_up};
use expecting::Expecting;
use files::{Files, Serial, is_beside_messages, kept, serial_output};
use setup::{Inputs, make};

/// Runs the command.
///
/// # Errors
/// If an argument is not usable, the guest crashed, or an expectation failed.
pub fn run(args: args::Run) -> Result<(), Failure> {
    #[cfg(feature = "export")]
    if args.format == Some(Format::Parquet) {
        let wrong = "--format parquet: not for run; trace the running machine: exotrace trace -o FILE.parquet PROBE";
        return Err(Failure::Usage(wrong.into()));
    }
    if !args.trace.is_empty() && args.format == Some(Format::Collapsed) {
        return Err(Failure::Usage(
            "--format collapsed: not for a trace of probes".into(),
        ));
    }
    // A confined process, or one that has changed its user, cannot open it any more.
    let pages = PageMap::open();
    let device = host::device()?;
    if let Some(user) = args.user {
        become_user(user)?;
    }
    let confinement = Confinement::begin(args.confine)?;
    let script = script(&args)?;
    let snapshots = keeping::folder(&args, script.as_ref())?;
    let mut inputs = Inputs::read(&args)?;
    let passt = inputs.network.passt.take();
    let socket_file = inputs.sockets.file.take();
    let host = Host::of(device)?;
    let entry = claim(args.name.clone())?;
    let mut files = Files::open(&args)?;
    let console = Tail::of_console();
    let expecting = Expecting::of(&args, &console)?;
    let serial = serial_output(&args, files.serial.as_ref(), &console, &confinement)?;
    let ends = (serial, console);
    let mut vm = make(&args, inputs, host, &entry, ends, pages, &confinement)?;
    vm.keeper = Keeper::new(snapshots.clone(), args.history);
    vm.budget = args.budget;
    let on_threads = confinement.clone();
    let devices = match args.vsock {
        Some(_) => Kind::Vsock,
        None => Kind::Devices,
    };
    vm.machine.on_threads(move |thread| {
        on_threads.enter(match thread {
            MachineThread::Vcpu => Kind::Vcpu,
            MachineThread::Devices => devices,
        })
    })?;
    // Until now a signal ends this process, whatever it waits for.
    let signals = StopSignals::watch_in(&confinement)?;
    let mut plan = Plan {
        args: &args,
        confinement: &confinement,
        entry: &entry,
        signals: &signals,
        script,
        expecting,
        passt,
        socket_file,
        snapshots,
    };
    let result = plan.drive(vm, &mut files);
    if let (Err(failure), Some(expecting)) = (&result, &mut plan.expecting) {
        expecting.write_refusal(entry.name().to_string(), failure);
    }
    result
}

/// Changes to the user of `--user`.
fn become_user(user: User) -> Result<(), Failure> {
    let User { user, group } = user;
    confinement::become_user(user, group).map_err(|error| {
        Failure::new(format_args!(
            "--user {user}:{group}: {error}; only root may run a machine as another user"
        ))
    })
}

/// Returns the script of the run. Faults of its text are reported before anything is made.
fn script(args: &args::Run) -> Result<Option<ScriptRequest>, Failure> {
    let source = match (&args.program, &args.script) {
        (Some(text), _) => Source::given(text),
        (None, Some(file)) => Source::read(file)?,
        (None, None) => return Ok(None),
    };
    let request = ScriptRequest {
        text: source.text,
        file: source.file,
        form: super::script::form(args.format),
        ..ScriptRequest::default()
    };
    request.parse().map_err(Failure::refused)?;
    Ok(Some(request))
}

/// Registers under a name and reports the remains of a dead machine.
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

/// The plan of a run.
struct Plan<'a> {
    args: &'a args::Run,
    confinement: &'a Confinement,
    entry: &'a Entry,
    signals: &'a StopSignals,
    /// The script that traces it.
    script: Option<ScriptRequest>,
    /// The expectations.
    expecting: Option<Expecting>,
    /// The program that the guest's network goes through.
    passt: Option<Passt>,
    /// The host's socket for programs that connect to the guest.
    socket_file: Option<SocketFile>,
    /// The folder for snapshots.
    snapshots: Option<PathBuf>,
}

/// The probes armed once the guest's kernel is known.
struct Armed {
    view: Arc<KernelView>,
    tracing: Option<Tracing>,
    expected: Option<counting::Armed>,
}

/// The results of the run's trace.
enum Traced {
    /// A trace of probes.
    Probes(Summary),
    /// A script.
    Script(ScriptCounts, io::Result<()>),
}

/// The run's end, the known facts about its kernel, and the results of tracing and counting.
struct Watched {
    end: RunEnd,
    /// The time at which it was seen.
    at: Instant,
    /// Set if the run's time was up.
    time_up: bool,
    /// Set if all expectations were met.
    met: bool,
    /// Set if the script has ended itself.
    script_exited: bool,
    view: Option<Arc<KernelView>>,
    traced: Option<Traced>,
    counted: Option<Counted>,
}

impl Watched {
    /// Returns the results of a run without tracing.
    fn untraced((end, time_up): (RunEnd, bool)) -> Self {
        Self {
            end,
            at: Instant::now(),
            time_up,
            met: false,
            script_exited: false,
            view: None,
            traced: None,
            counted: None,
        }
    }
}

impl Plan<'_> {
    fn drive(&mut self, mut vm: Vm, files: &mut Files) -> Result<(), Failure> {
        let early = vm.locate()?;
        let armed = early.map(|view| self.arm(&vm, view)).transpose()?;
        files.keep()?;
        let printed = serial_output(
            self.args,
            files.serial.as_ref(),
            &vm.console,
            self.confinement,
        )?;
        let mut guest_ports = guest_ports::connect(&vm.machine, printed);
        let socket_file = self.socket_file.take();
        let socket_file = socket_file.map(|file| file.keep(self.confinement));
        let socket_file = socket_file.transpose()?;
        // All files are open. Threads made from here on inherit this thread's confinement.
        let (symfs, snapshots) = (self.args.symfs.as_deref(), self.snapshots.as_deref());
        let reach = Reach::of_run(self.entry.folder(), symfs, snapshots);
        self.confinement.enter_within(Kind::Service, &reach)?;
        let console = match Serial::of(self.args) {
            Serial::Stdio => Some(Console::connect(&vm.machine)?),
            Serial::Null | Serial::File(_) => None,
        };
        if console.is_some() && io::stdin().is_terminal() {
            say("the terminal is the guest's serial port; Ctrl-a x leaves");
        }
        let passt = self.passt.take().map(Passt::watch).transpose()?;
        // A history begins with the first instruction, and so do the probes of a known kernel.
        let held = vm.machine.pause();
        vm.machine.start();
        let vm = Arc::new(vm);
        if self.args.history.is_some() {
            let begun = vm.begin_history();
            begun.map_err(|error| Failure::new(format_args!("--history: {error}")))?;
        }
        vm.stop_on(self.signals);
        let server = Server::start(&self.entry.control(), vm.clone())?;
        let device = dt::Server::start(
            &self.entry.dt(),
            dt::Options {
                allowed: self.args.dt == Switch::On,
                symfs: self.args.symfs.clone(),
            },
            &vm,
        )?;
        let ports = Arc::new(ports::of_session(&vm));
        if let Some(guest) = &mut guest_ports {
            guest.attach_devices(&ports, &self.entry.dt(), self.args.guest_ports)?;
        }
        let ports = ports::server::Server::start(self.entry.folder(), &ports)?;
        let replay = keeping::play(&vm)?;
        let result = self.watch(&vm, held, armed, files);
        if let Some(replay) = replay {
            // A run that has failed ends here, and its replay with it.
            vm.machine.stop();
            replay.join().map_err(|_| TracePanicked)?;
        }
        // The ports after the device: its readers ask there for the reason.
        drop((
            console,
            guest_ports,
            device,
            ports,
            server,
            passt,
            socket_file,
        ));
        if let Some(backlog) = vm.machine.backlog() {
            // The output itself warns of unread bytes.
            ending::wait(|limit| backlog.settle(limit), || backlog.taken());
        }
        let watched = result?;
        match &watched.traced {
            Some(Traced::Probes(summary)) => {
                tell(&summary.counts);
                tell_cost(&summary.counts.cost, &summary.counts.unwatched);
            }
            Some(Traced::Script(counts, _)) => {
                super::script::tell(counts, false);
                tell_cost(&counts.cost, &counts.unwatched);
            }
            None => {}
        }
        let judged = match &mut self.expecting {
            Some(expecting) => expecting.judge(&vm, &watched, self.signals.arrived()),
            None => Ok(()),
        };
        keeping::keep_the_past(&vm, &watched, judged.is_err());
        vm.keeper.finish();
        end_report::report(
            &watched.end,
            watched.view.as_ref().map(|v| &v.kernel.symbols),
            &vm,
            // The report of expectations has it.
            self.expecting.is_none() && !is_beside_messages(self.args),
        )?;
        judged?;
        match watched.traced {
            Some(Traced::Probes(summary)) => written(summary.written),
            Some(Traced::Script(_, result)) => written(result),
            None => Ok(()),
        }
    }

    /// Arms the requested probes, and the watch for the kernel's panic. Reports it while a guest
    /// that is not started yet prints nothing.
    fn arm(&self, vm: &Vm, view: KernelView) -> Result<Armed, Failure> {
        vm.watch_panic(&view);
        let view = Arc::new(view);
        let expected = self.expect(vm, &view)?;
        let names = &self.args.trace;
        if names.is_empty() {
            return Ok(Armed {
                view,
                tracing: None,
                expected,
            });
        }
        if let Err(missing) = &view.tasks {
            say(format_args!("process ids are not shown: {missing}"));
        }
        let engine = vm.engine(&view);
        let tracing = Tracing::start(&vm.traceable(&view), &engine, &Request::of(names));
        let tracing = tracing.map_err(Failure::new)?;
        super::trace::tell_skipped(tracing.skipped());
        tracing.open().for_each(|pattern| say(waits(pattern)));
        let clock = tracing.began();
        say(format_args!(
            "tracing {}; TSC {} is {} ns since 1970",
            names.join(", "),
            clock.tsc,
            clock.unix_ns
        ));
        Ok(Armed {
            view,
            tracing: Some(tracing),
            expected,
        })
    }

    /// Arms the expectations.
    fn expect(&self, vm: &Vm, view: &Arc<KernelView>) -> Result<Option<counting::Armed>, Failure> {
        let Some(expecting) = &self.expecting else {
            return Ok(None);
        };
        let engine = vm.engine(view);
        let expectations = expecting.expectations.clone();
        let armed = counting::Armed::start(&vm.traceable(view), &engine, expectations);
        let armed = armed.map_err(Failure::refused)?;
        super::trace::tell_skipped(armed.skipped());
        armed.waiting().for_each(|pattern| say(waits(pattern)));
        Ok(Some(armed))
    }

    /// Returns the format of the trace.
    fn format(&self) -> Format {
        let functions = self.args.trace.iter().all(|name| !name.contains(':'));
        self.args.format.unwrap_or(match functions {
            true => Format::Text,
            false => Format::Events,
        })
    }

    /// Returns the trace's output. Its end is kept for a report.
    fn trace_output(&self, files: &Files) -> Result<Output, Failure> {
        let tail = self.expecting.as_ref().map(|expecting| &expecting.trace);
        Ok(kept(trace_output(files.trace.as_ref())?, tail))
    }

    /// Follows the running machine to its end. `held` is dropped when all probes stand, or when the
    /// guest must run before it can be traced.
    fn watch(
        &self,
        vm: &Arc<Vm>,
        held: Paused,
        armed: Option<Armed>,
        files: &Files,
    ) -> Result<Watched, Failure> {
        let mut held = armed.is_some().then_some(held);
        let deadline = |from: Instant| self.args.duration.and_then(|d| from.checked_add(d));
        let from_start =
            !self.args.is_traced() && self.expecting.is_none() && self.args.snapshot_at.is_empty();
        let whole_run = deadline(Instant::now()).filter(|_| from_start);
        let symbols = vm.kernel.as_ref().map(|kernel| kernel.symbols());
        let armed = match (armed, symbols) {
            (Some(armed), _) => armed,
            (None, Some(Ok(_))) => {
                let progress = self.progress();
                let located = vm.wait_for_kernel(whole_run);
                progress.finish_and_clear();
                match located? {
                    Located::Kernel(view) => self.arm(vm, *view)?,
                    Located::Ended(end) => return Ok(Watched::untraced((end, false))),
                    Located::TimedOut => return Ok(Watched::untraced(wait(vm, whole_run))),
                }
            }
            (None, Some(Err(error))) if !from_start => return Err(error.into()),
            (None, None) if !from_start => {
                return Err(Failure::new(
                    "--expect and --snapshot-at: the guest's kernel is not at hand; name it with --kernel",
                ));
            }
            (None, _) => return Ok(Watched::untraced(wait(vm, whole_run))),
        };
        let counting = armed.expected.map(|expected| {
            let until_met = self.args.until_met;
            Counting::start(vm.clone(), expected, until_met)
        });
        let counting = counting.transpose()?;
        let keeping = keeping::Keeping::start(vm, &armed.view, &self.args.snapshot_at)?;
        let mut watched = match (&self.script, armed.tracing) {
            (Some(request), _) => {
                let engine = vm.engine(&armed.view);
                let started = Job::start(vm, &engine, &armed.view, request);
                let (job, first) = started.map_err(Failure::refused)?;
                super::trace::tell_skipped(job.skipped());
                job.waiting().for_each(|pattern| say(waits(pattern)));
                super::script::tell_attached(job.probes().len());
                let output = self.trace_output(files)?;
                let script = Running::start(vm.clone(), job, first, output)?;
                held.take();
                let ended = wait(vm, deadline(Instant::now()));
                let script_exited = script.has_exited();
                let (counts, result) = script.finish()?;
                Watched {
                    script_exited,
                    traced: Some(Traced::Script(counts, result)),
                    ..Watched::untraced(ended)
                }
            }
            (None, Some(tracing)) => {
                let output = self.trace_output(files)?;
                let symbols = armed.view.kernel.symbols.clone();
                let trace = Trace::start(vm.clone(), tracing, symbols, output, self.format())?;
                held.take();
                let ended = wait(vm, deadline(Instant::now()));
                let summary = trace.finish()?;
                Watched {
                    traced: Some(Traced::Probes(summary)),
                    ..Watched::untraced(ended)
                }
            }
            (None, None) => {
                held.take();
                let until = match from_start {
                    true => whole_run,
                    false => deadline(Instant::now()),
                };
                Watched::untraced(wait(vm, until))
            }
        };
        if let Some(keeping) = keeping {
            keeping.finish()?;
        }
        watched.view = Some(armed.view);
        if let Some(counting) = counting {
            watched.met = counting.is_met();
            watched.counted = Some(counting.finish()?);
        }
        Ok(watched)
    }

    /// Returns a spinner if nothing else is drawn.
    fn progress(&self) -> ProgressBar {
        if !io::stderr().is_terminal() || matches!(Serial::of(self.args), Serial::Stdio) {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new_spinner().with_message("the guest boots");
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    }
}

/// Waits for the end of the run, and ends it at `deadline`; returns whether it did.
fn wait(vm: &Vm, deadline: Option<Instant>) -> (RunEnd, bool) {
    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
    let ended = match vm.machine.wait(left) {
        Some(end) => (end, false),
        None => {
            vm.machine.stop();
            (RunEnd::Stopped, true)
        }
    };
    if matches!(ended.0, RunEnd::Stopped) {
        ending::hurry();
    }
    ended
}

/// Accepts the result of writing a trace, whose reader may have gone.
///
/// # Errors
/// If the trace could not be written for another reason.
pub fn written(result: io::Result<()>) -> Result<(), Failure> {
    result.map_err(|error| Failure::of_output("the trace cannot be written", &error))
}
