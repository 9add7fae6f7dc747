//! The command `exotrace demo`: a guest, its file-system functions, and proof that tracing changes
//! nothing.
//!
//! The guest is built (or, on hardware KVM, Debian's own kernel fetched), booted once, and kept as
//! a snapshot; later runs start from that. Trace lines go to standard output, all explanation to
//! standard error.

mod cost;
mod guest;
mod serial;

use std::io::BufWriter;
use std::sync::Arc;
use std::time::Duration;

use ::guest::Terminal;
use probes::kernel_view::KernelView;
use probes::text_hash::TextHash;
use vmm::RunEnd;

use crate::args::{self, Format};
use crate::commands::trace_output::{Summary, Trace};
use crate::end_report;
use crate::host::Host;
use crate::protocol::trace::Request;
use crate::report::{Failure, say};
use crate::server::control::Server;
use crate::server::dt;
use crate::server::ports;
use crate::signals::StopSignals;
use crate::tracing::Tracing;
use crate::vm::Vm;
use guest::Ready;

/// The traced functions, as far as the guest's kernel has them: files are opened, read, written,
/// renamed and removed.
const FUNCTIONS: [&str; 7] = [
    "do_filp_open",
    "vfs_open",
    "vfs_read",
    "vfs_write",
    "vfs_statx",
    "vfs_rename",
    "vfs_unlink",
];
/// The workload: endless rounds, ten a second.
const WORKLOAD: &str = "fsload 0 100";
/// The time for the workload to start, so that the kernel has settled when it is hashed.
const SETTLE: Duration = Duration::from_secs(1);

/// Runs the command.
///
/// # Errors
/// If the guest cannot be made or run, and if tracing left something in it.
pub fn demo(args: &args::Demo) -> Result<(), Failure> {
    let host = Host::open()?;
    let progress = Terminal::new();
    let files = guest::files(&host, &progress)?;
    let signals = StopSignals::watch()?;
    let entry = super::run::claim(None)?;
    let Ready { vm, origin } = guest::start(
        files,
        host,
        entry.name().clone(),
        args.rebuild,
        &signals,
        &progress,
    )?;
    drop(progress);
    say(format_args!("{}: {origin}", entry.name()));
    let server = Server::start(&entry.control(), vm.clone())?;
    let options = dt::Options {
        allowed: true,
        symfs: None,
    };
    let dt = dt::Server::start(&entry.dt(), options, &vm)?;
    let devices = Arc::new(ports::of_session(&vm));
    let ports = ports::server::Server::start(entry.folder(), &devices)?;
    let outcome = watch(&vm, args.duration)?;
    // The cost is measured on a quiet host, without a machine that others could ask.
    vm.machine.stop();
    drop((server, dt, ports));
    drop(entry);
    explain(&outcome, &vm)?;
    if !outcome.end.is_orderly() {
        let symbols = Some(&outcome.view.kernel.symbols);
        return end_report::report(&outcome.end, symbols, &vm, true);
    }
    outcome.verdict()
}

/// The results of the demo.
struct Outcome {
    end: RunEnd,
    view: Arc<KernelView>,
    summary: Summary,
    before: TextHash,
    after: TextHash,
    /// The traps in the guest that are not the demo's.
    others: usize,
}

impl Outcome {
    fn verdict(self) -> Result<(), Failure> {
        super::run::written(self.summary.written)?;
        if self.before != self.after && self.others == 0 {
            return Err(Failure::new(format_args!(
                "the guest's kernel text differs after tracing: {} before, {} after",
                self.before, self.after
            )));
        }
        match self.summary.counts.entries {
            0 => Err(Failure::new(
                "none of the functions was called: does the workload run in the guest?",
            )),
            _ => Ok(()),
        }
    }
}

fn watch(vm: &Arc<Vm>, duration: Duration) -> Result<Outcome, Failure> {
    let Some(view) = vm.locate()? else {
        return Err(Failure::new(
            "the guest's kernel is not at its expected address; try exotrace demo --rebuild",
        ));
    };
    vm.type_line(WORKLOAD)?;
    if let Some(end) = vm.machine.wait(Some(SETTLE)) {
        return Err(Failure::new(format_args!(
            "the guest ended before it was traced: {end}"
        )));
    }
    let names: Vec<String> = FUNCTIONS
        .iter()
        .filter(|name| view.kernel.symbols.all_of(name).any(|s| s.is_text()))
        .map(|name| (*name).to_owned())
        .collect();
    legend(&view, &names, duration);
    let paused = vm.machine.pause();
    let before = view.text_hash(&vm.machine, &paused)?;
    drop(paused);
    let view = Arc::new(view);
    let engine = vm.engine(&view);
    let tracing = Tracing::start(&vm.traceable(&view), &engine, &Request::of(&names));
    let tracing = tracing.map_err(Failure::new)?;
    let output = Box::new(BufWriter::new(std::io::stdout()));
    let symbols = view.kernel.symbols.clone();
    let trace = Trace::start(vm.clone(), tracing, symbols, output, Format::Events)?;
    let end = vm.machine.wait(Some(duration)).unwrap_or(RunEnd::Stopped);
    let summary = trace.finish()?;
    let paused = vm.machine.pause();
    let after = view.text_hash(&vm.machine, &paused)?;
    let others = vm.machine.traps().stats().len();
    drop(paused);
    Ok(Outcome {
        end,
        view,
        summary,
        before,
        after,
        others,
    })
}

/// Explains the trace lines before they come.
fn legend(view: &KernelView, names: &[String], duration: Duration) {
    say(format_args!(
        "tracing for {} s from outside; nothing runs in the guest but its own work ({}):",
        duration.as_secs_f64(),
        WORKLOAD
    ));
    for name in names {
        let prototype = view
            .kernel
            .btf()
            .and_then(|btf| btf.func_proto_args(name).ok());
        let arguments = prototype.map_or_else(String::new, |prototype| {
            let list = prototype.parameters.iter().take(4);
            let list = list
                .map(|p| format!("{} {}", p.type_name, p.name))
                .collect::<Vec<_>>();
            format!("({})", list.join(", "))
        });
        say(format_args!("  {name}{arguments}"));
    }
    say("each line is a call (->) or a return (<-), with its value:");
    say("     seconds cpu  thread program            function and its arguments");
}

/// Reports the events, their cost, and the remains. The cost is measured only here, because that
/// takes longer than reaching a restored guest's first event.
///
/// # Errors
/// If the cost cannot be measured.
fn explain(outcome: &Outcome, vm: &Vm) -> Result<(), Failure> {
    let counts = &outcome.summary.counts;
    // The entry and the return of a function are adjacent.
    for pair in outcome.summary.probes.chunks(2) {
        if let [(function, entry), (_, exit)] = pair {
            say(format_args!(
                "  {:16} entered {:>6}, returned {:>6}",
                function.function, entry.hits, exit.hits
            ));
        }
    }
    let calls = match counts.waiting_returns {
        1 => "call",
        _ => "calls",
    };
    say(format_args!(
        "{} hits, {} events read, {} dropped, {} {calls} had not returned yet",
        counts.entries + counts.exits + counts.unpaired_returns,
        counts.read,
        counts.dropped,
        counts.waiting_returns
    ));
    let cost = cost::measure(&vm.host)?;
    say(format_args!(
        "cost, measured now on {}: {cost}",
        vm.host.profile.host
    ));
    say(format_args!(
        "guest's kernel text before arming:   {}",
        outcome.before
    ));
    say(format_args!(
        "guest's kernel text after disarming: {}",
        outcome.after
    ));
    match (outcome.before == outcome.after, outcome.others) {
        (true, _) => say("equal: nothing was left behind"),
        (false, 0) => {}
        (false, others) => say(format_args!(
            "not compared: other commands have {others} traps in the guest"
        )),
    }
    Ok(())
}
