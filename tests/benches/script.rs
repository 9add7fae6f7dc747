//! The cost of a hit with a script, against a bare exit measured in the same run:
//! `cargo bench-script`.
//!
//! As in `bench-hits`, the micro guest times every round itself. A hit's cost is the difference of
//! a timed call with and without the script. The bare exit is an `out` to a port without a device,
//! less two reads of the counter with nothing between. Every figure is the median over several
//! turns, each of which measures everything once. The micro guest has no types and no processes: a
//! script's reads of those are empty here, but are done and stored as elsewhere.

use std::any::Any;
use std::error::Error;
use std::sync::Arc;

use bt::Clock;
use bt::compile::{Guest, Options};
use bt::parse;
use bt::session::{Finder, NotFound, Prepared};
use introspect::kernel::btf::Btf;
use introspect::kernel::image::KernelImage;
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gpa, Gva};
use probes::engine::{Capture, Engine, EngineLimits, Filter, RingSize};
use probes::kernel_view::KernelView;
use probes::name::{ProbeName, ProbePattern};
use probes::probe::{Moment, Probe, Target};
use support::MicroGuest;
use support::hits::Cost;
use support::timing::{Timing, TimingReader};
use vmm::Machine;

/// The number of rounds of one run. A script's ring has room for the unread lines of that many.
const ROUNDS: u64 = 1_000;
/// The number of turns; odd.
const TURNS: usize = 31;
/// The function that is called and timed.
const LEAF: &str = "micro_leaf";
/// The address of the scripts' probes that are not at the function. Nothing is executed there.
const ELSEWHERE: Gva = Gva(0x18_0000);
/// The limit of the cost of a hit of a script: the project's own bound, in bare exits.
const BOUND: f64 = 1.3;

/// The scripts, and whether a hit must stay within [`BOUND`].
const SCRIPTS: [(&str, &str, bool); 8] = [
    ("{ }", "kprobe:micro_leaf:entry { }", true),
    ("{ @ = count(); }", "kprobe:micro_leaf:entry { @ = count(); }", true),
    (
        "/arg0 == 1 && pid == 1/ never",
        "kprobe:micro_leaf:entry /arg0 == 1 && pid == 1/ { @ = count(); }",
        true,
    ),
    ("{ @[comm, arg1] = count(); }", "kprobe:micro_leaf:entry { @[comm, arg1] = count(); }", true),
    (
        "3 aggregations, 10 probes",
        "kprobe:micro_leaf:entry,kprobe:a,kprobe:b,kprobe:c,kprobe:d,kprobe:e,kprobe:f,kprobe:g,kprobe:h,kprobe:i
         { @calls[func] = count(); @sizes = hist(arg2); @bytes = sum(arg1); }",
        true,
    ),
    (
        "time of a call, kept by thread",
        "kprobe:micro_leaf:entry { @took[comm] = hist(nsecs - @start[tid]); @start[tid] = nsecs; }",
        false,
    ),
    (
        "printf of a line",
        r#"kprobe:micro_leaf:entry { printf("%s %d %x %d\n", comm, pid, arg0, arg1); }"#,
        false,
    ),
    (
        "100 rounds of a loop",
        "kprobe:micro_leaf:entry { $i = 0; while ($i < 100) { $i++; } @ = $i; }",
        false,
    ),
];

type Fallible<T> = Result<T, Box<dyn Error>>;
/// Owners that live as long as the run.
type Kept = Box<dyn Any>;
/// Attaches a script, or its counterpart in a comparison, to a guest that is paused before its
/// program.
type Attach<'a> = &'a dyn Fn(&Machine, AddressSpace) -> Fallible<Kept>;

/// The micro guest's functions as a script resolves them: its own by name, all others elsewhere.
struct Micro<'g>(&'g MicroGuest);

impl Guest for Micro<'_> {
    fn types(&self) -> Option<&Btf> {
        None
    }

    fn symbol(&self, _: &str) -> Option<u64> {
        None
    }

    fn nearest_symbols(&self, _: &str) -> Vec<String> {
        Vec::new()
    }
}

impl Micro<'_> {
    fn probe(&self, function: &str) -> Probe {
        let address = match function {
            LEAF => self.0.address(LEAF),
            // One letter each.
            other => Gva(ELSEWHERE.0 + other.bytes().map(u64::from).sum::<u64>()),
        };
        Probe {
            name: ProbeName::new("kprobe", "micro", function, "entry"),
            signature: None,
            target: Target::Kernel {
                address,
                moment: Moment::Entry,
            },
        }
    }
}

impl Finder for Micro<'_> {
    fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound> {
        let pattern = ProbePattern::parse(pattern).map_err(|error| NotFound {
            message: error.to_string(),
            nearest: Vec::new(),
        })?;
        Ok(vec![self.probe(&pattern.function)])
    }
}

struct Bench {
    guest: MicroGuest,
    reader: TimingReader,
}

impl Bench {
    /// Times the rounds of a program with the result of `attach` in the guest.
    fn time(&self, program: &str, attach: Option<Attach<'_>>) -> Fallible<Timing> {
        let (machine, paused) = self.guest.before_program(&format!("{program} {ROUNDS}"));
        let registers = machine.registers(&paused, 0).ok_or("no vCPU")?;
        let kept = attach.map(|attach| attach(&machine, registers.address_space()));
        let kept = kept.transpose()?;
        self.guest.finish(&machine, paused);
        let hits = machine.traps().hits();
        if kept.is_some() && !hits.iter().any(|hit| hit.1 == ROUNDS) {
            return Err(format!("{program}: {hits:?} instead of {ROUNDS}").into());
        }
        Ok(self.reader.rounds(&machine))
    }

    fn engine(&self, machine: &Machine, space: AddressSpace) -> Fallible<Engine> {
        let symbols = KernelImage::parse(self.guest.kernel().shared_elf())?.symbols()?;
        let view = Arc::new(KernelView::without_types(symbols, space).with_lasting_space());
        Ok(Engine::new(
            machine.handle(),
            view,
            &EngineLimits::default(),
        ))
    }

    /// Enables a probe that records an event at each hit, as without a script.
    fn recorded(&self, machine: &Machine, space: AddressSpace) -> Fallible<Kept> {
        let capture = Capture::default();
        let engine = self.engine(machine, space)?;
        let mut session = engine.session(RingSize::for_capture(4096, &capture))?;
        session.enable(&Micro(&self.guest).probe(LEAF), Filter::default(), capture)?;
        Ok(Box::new(session))
    }

    fn script(&self, text: &str, machine: &Machine, space: AddressSpace) -> Fallible<Kept> {
        const NOP: u8 = 0x90;
        let elsewhere = Gpa(ELSEWHERE.0);
        machine.ram().write_physical(elsewhere, &[NOP; 256])?;
        let options = Options::default();
        let script = parse::parse(text.as_bytes(), options.dialect);
        let script = script.map_err(|wrong| format!("{text}: {wrong:?}"))?;
        let engine = self.engine(machine, space)?;
        let clock = Clock::now(engine.tsc_hz());
        let micro = Micro(&self.guest);
        let prepared = Prepared::new(&script, &options, &micro, &micro, machine.vcpus(), clock);
        let prepared = prepared.map_err(|wrong| format!("{text}: {wrong:?}"))?;
        let all = |_: &Probe| Filter::default();
        let running = prepared.start(&engine, &all, &mut |_| ())?;
        Ok(Box::new(running))
    }

    /// Measures everything once: the bare exit, a recorded event, then the scripts.
    fn turn(&self) -> Fallible<Vec<Cost>> {
        let exit = self.time("tout", None)?;
        let exit = Cost::of(exit, self.time("tempty", None)?, None);
        let mut costs = vec![exit];
        let mut measure = |attach: Attach<'_>| {
            let without = self.time("tcall", None)?;
            let with = self.time("tcall", Some(attach))?;
            costs.push(Cost::of(with, without, Some(exit.p50)));
            Fallible::Ok(())
        };
        measure(&|machine, space| self.recorded(machine, space))?;
        for (_, text, _) in SCRIPTS {
            measure(&|machine, space| self.script(text, machine, space))?;
        }
        Ok(costs)
    }
}

fn main() -> Fallible<()> {
    let Some(host) = support::host() else {
        return Ok(());
    };
    let guest = MicroGuest::new(host);
    let reader = TimingReader::new(&guest);
    let bench = Bench { guest, reader };
    let turns: Vec<Vec<Cost>> = (0..TURNS).map(|_| bench.turn()).collect::<Result<_, _>>()?;
    let fixed = [("bare exit", false), ("no script: event recorded", false)];
    let names = SCRIPTS.map(|(name, _, is_bound)| (name, is_bound));
    println!(
        "{:<32} {:>9} {:>9}   p50 in bare exits",
        "", "p50 ns", "p99 ns"
    );
    for (place, (name, is_bound)) in fixed.into_iter().chain(names).enumerate() {
        let all: Vec<Cost> = turns.iter().filter_map(|t| t.get(place).copied()).collect();
        let Cost { p50, p99, ratio } = Cost::median(&all);
        let told = match is_bound {
            true if ratio > BOUND => format!("   over {BOUND}"),
            _ => String::new(),
        };
        println!("{name:<32} {p50:9.0} {p99:9.0}   {ratio:.3}{told}");
    }
    println!("({ROUNDS} rounds; medians of {TURNS} turns)");
    Ok(())
}
