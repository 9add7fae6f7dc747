//! What a hit costs a guest, against a bare exit measured in the same run: `cargo bench-hits`.
//!
//! The micro guest times every round itself by its time-stamp counter. A hit's cost is what a timed call takes more with
//! the probe than without; the bare exit is an `out` to a port without a device (kernel mode) or a write to memory that is
//! not there (user mode), less two reads of the counter with nothing between. Every figure is the median over several
//! turns; in each turn everything is measured once, so that what else the host does comes to all of it alike.

use std::any::Any;
use std::error::Error;
use std::sync::Arc;

use introspect::kernel::image::KernelImage;
use introspect::kernel::page_cache::CachedFile;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::{Gpa, Gva};
use probes::engine::{Capture, Engine, EngineLimits, Filter, Only, RingSize};
use probes::kernel_view::KernelView;
use probes::name::ProbeName;
use probes::probe::{Moment, Target, UserText};
use support::MicroGuest;
use support::timing::{Timing, TimingReader};
use vmm::Machine;
use vmm::trap::{StoppedCpu, Trap, TrapSink};

/// Rounds of one run.
const ROUNDS: u64 = 1_000;
/// Turns; odd.
const TURNS: usize = 31;
/// Probes that are armed where nothing is executed, and where that is: memory that the micro guest does not use.
const ARMED: u64 = 1000;
const ELSEWHERE: u64 = 0x18_0000;
/// Frames of the stack that is recorded.
const FRAMES: usize = 20;

/// Takes a trap and does nothing.
struct Nothing;

impl TrapSink for Nothing {
    fn trap(&self, _: &Trap, _: &StoppedCpu<'_>) {}
}

/// What has to live for as long as the run.
type Kept = Box<dyn Any>;
type Prepared = Result<Kept, Box<dyn Error>>;

/// Puts a probe into a guest that stands before its program.
type Probe = Box<dyn Fn(&Machine, AddressSpace) -> Prepared>;

/// What a line's costs are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Kernel,
    User,
}

impl Mode {
    /// The program whose rounds are a bare exit, and the one whose rounds are empty.
    fn bare_and_empty(self) -> [&'static str; 2] {
        match self {
            Self::Kernel => ["tout", "tempty"],
            Self::User => ["tmmio", "tuempty"],
        }
    }
}

/// One line: the cost of `probe` in `program`, whose plain run is subtracted.
struct Line {
    name: &'static str,
    mode: Mode,
    program: &'static str,
    probe: Probe,
}

impl Line {
    fn kernel(name: &'static str, program: &'static str, probe: Probe) -> Self {
        let mode = Mode::Kernel;
        Self {
            name,
            mode,
            program,
            probe,
        }
    }

    fn user(name: &'static str, program: &'static str, probe: Probe) -> Self {
        Self {
            mode: Mode::User,
            ..Self::kernel(name, program, probe)
        }
    }
}

/// Nanoseconds that something costs in one turn, and how many bare exits that is.
#[derive(Debug, Clone, Copy)]
struct Cost {
    p50: f64,
    p99: f64,
    ratio: f64,
}

impl Cost {
    /// Of what is timed, less what the same takes without.
    fn of(timing: Timing, without: Timing, exit: Option<f64>) -> Self {
        let p50 = timing.p50 - without.p50;
        Self {
            p50,
            p99: timing.p99 - without.p50,
            ratio: exit.map_or(1.0, |exit| p50 / exit),
        }
    }

    fn median(turns: &[Self]) -> Self {
        let of = |field: fn(&Self) -> f64| {
            let mut values: Vec<f64> = turns.iter().map(field).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
        };
        Self {
            p50: of(|c| c.p50),
            p99: of(|c| c.p99),
            ratio: of(|c| c.ratio),
        }
    }
}

struct Bench {
    guest: MicroGuest,
    reader: TimingReader,
}

impl Bench {
    fn time(&self, program: &str, probe: Option<&Probe>) -> Result<Timing, Box<dyn Error>> {
        let (machine, paused) = self.guest.before_program(&format!("{program} {ROUNDS}"));
        let registers = machine.registers(&paused, 0).ok_or("no vCPU")?;
        let kept = probe.map(|probe| probe(&machine, registers.address_space()));
        let kept = kept.transpose()?;
        self.guest.finish(&machine, paused);
        // A probe that was not hit at every round, or was passed in another way than it should be, measures nothing.
        if kept.is_some() && !machine.traps().hits().iter().any(|hit| hit.1 == ROUNDS) {
            return Err(format!(
                "{program}: {:?} instead of {ROUNDS}",
                machine.traps().hits()
            )
            .into());
        }
        Ok(self.reader.rounds(&machine))
    }

    /// Nanoseconds of one instruction in guest kernel mode, from the six that a call of the leaf takes.
    fn instruction(&self) -> Result<f64, Box<dyn Error>> {
        const CALL_INSTRUCTIONS: f64 = 6.0;
        let calls: Vec<Cost> = (0..TURNS)
            .map(|_| {
                Ok(Cost::of(
                    self.time("tcall", None)?,
                    self.time("tempty", None)?,
                    None,
                ))
            })
            .collect::<Result<_, Box<dyn Error>>>()?;
        Ok(Cost::median(&calls).p50 / CALL_INSTRUCTIONS)
    }

    /// What a loop takes with [`ARMED`] probes armed elsewhere, in what it takes without: the median of paired runs.
    fn armed_elsewhere(&self, program: &str) -> Result<f64, Box<dyn Error>> {
        let run = |armed: bool| -> Result<f64, Box<dyn Error>> {
            let (machine, paused) = self.guest.before_program(program);
            let registers = machine.registers(&paused, 0).ok_or("no vCPU")?;
            let mut sites = Vec::new();
            if armed {
                const NOP: u8 = 0x90;
                machine
                    .ram()
                    .write_physical(Gpa(ELSEWHERE), &[NOP; ARMED as usize])?;
                for address in ELSEWHERE..ELSEWHERE + ARMED {
                    let space = registers.address_space();
                    sites.push(machine.traps().arm_kernel(Gva(address), space)?);
                }
            }
            self.guest.finish(&machine, paused);
            Ok(self.reader.whole(&machine))
        };
        // In turns, since what runs second finds the host's caches as the first has left them.
        let pairs = (0..TURNS).map(|turn| {
            let first = run(turn % 2 == 0)?;
            let second = run(turn % 2 == 1)?;
            Ok(if turn % 2 == 0 {
                first / second
            } else {
                second / first
            })
        });
        let mut ratios = pairs.collect::<Result<Vec<f64>, Box<dyn Error>>>()?;
        ratios.sort_by(f64::total_cmp);
        Ok(ratios.get(TURNS / 2).copied().unwrap_or(f64::NAN))
    }

    /// Everything once: the bare exits of both modes, then the lines.
    fn turn(&self, lines: &[Line]) -> Result<Vec<Cost>, Box<dyn Error>> {
        let mut costs = Vec::new();
        let mut exits = Vec::new();
        for mode in [Mode::Kernel, Mode::User] {
            let [bare, empty] = mode.bare_and_empty();
            let cost = Cost::of(self.time(bare, None)?, self.time(empty, None)?, None);
            costs.push(cost);
            exits.push((mode, cost.p50));
        }
        for line in lines {
            let without = self.time(line.program, None)?;
            let exit = exits.iter().find(|(mode, _)| *mode == line.mode);
            let timing = self.time(line.program, Some(&line.probe))?;
            costs.push(Cost::of(timing, without, exit.map(|(_, p50)| *p50)));
        }
        Ok(costs)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let Some(host) = support::host() else {
        return Ok(());
    };
    let guest = MicroGuest::new(host);
    let lines = lines(&guest);
    let reader = TimingReader::new(&guest);
    let bench = Bench { guest, reader };

    let turns: Vec<Vec<Cost>> = (0..TURNS)
        .map(|_| bench.turn(&lines))
        .collect::<Result<_, _>>()?;
    let bare = ["bare exit, kernel mode", "bare exit, user mode"];
    let names = bare.into_iter().chain(lines.iter().map(|line| line.name));
    println!(
        "{:<32} {:>9} {:>9}   p50 in bare exits",
        "", "p50 ns", "p99 ns"
    );
    for (place, name) in names.enumerate() {
        let all: Vec<Cost> = turns.iter().filter_map(|t| t.get(place).copied()).collect();
        let Cost { p50, p99, ratio } = Cost::median(&all);
        println!("{name:<32} {p50:9.0} {p99:9.0}   {ratio:.3}");
    }
    for (name, program) in [
        ("user-mode loop", "uloop 20000"),
        ("system call loop", "sysloop 300"),
    ] {
        let ratio = bench.armed_elsewhere(program)?;
        println!("{name}, {ARMED} probes armed elsewhere: {ratio:.4} of its time without");
    }
    println!(
        "({ROUNDS} rounds; medians of {TURNS} turns. The host executes the instruction under a trap for the guest, which saves \
         it {:.0} ns in kernel mode here)",
        bench.instruction()?
    );
    Ok(())
}

fn lines(guest: &MicroGuest) -> Vec<Line> {
    let nobody = Filter {
        pids: Only::In(vec![1]),
        ..Filter::default()
    };
    let elsewhere = Filter {
        spaces: Only::In(vec![Gpa(0xffff_f000)]),
        ..Filter::default()
    };
    let plain = Capture::default;
    let stack = Capture {
        kernel_stack: FRAMES,
        ..plain()
    };
    let all = Filter::default;
    let entry = Session {
        guest,
        function: "micro_leaf",
        moments: &[Moment::Entry],
    };
    let both = Session {
        moments: &[Moment::Entry, Moment::Return],
        ..entry
    };
    let deep = Session {
        function: "micro_timed_deep_leaf",
        ..entry
    };
    let step = Session {
        function: "micro_timed_step_leaf",
        ..entry
    };
    let user = Session {
        function: "micro_user_timed_leaf",
        ..entry
    };
    vec![
        Line::kernel(
            "kernel trap, nothing done",
            "tcall",
            trap(guest.address("micro_leaf")),
        ),
        Line::kernel("kernel entry", "tcall", entry.kernel(all(), plain())),
        Line::kernel(
            "  filtered out by pid",
            "tcall",
            entry.kernel(nobody, plain()),
        ),
        Line::kernel("  with its return", "tcall", both.kernel(all(), plain())),
        Line::kernel("  with 20 frames", "tnested", deep.kernel(all(), stack)),
        Line::kernel("  stepped", "tstep", step.kernel(all(), plain())),
        Line::user(
            "user trap, nothing done",
            "tucall",
            user_trap(guest.address("micro_user_timed_leaf")),
        ),
        Line::user("user entry", "tucall", user.user(all(), plain())),
        Line::user(
            "  of another process",
            "tucall",
            user.user(elsewhere, plain()),
        ),
    ]
}

/// A trap on kernel code that nothing is done with.
fn trap(address: introspect::Gva) -> Probe {
    Box::new(move |machine, space| {
        machine.set_sink(Some(Box::new(Nothing)));
        machine.traps().arm_kernel(address, space)?;
        Ok(Box::new(()))
    })
}

/// A trap on a program's code that nothing is done with.
fn user_trap(address: introspect::Gva) -> Probe {
    Box::new(move |machine, space| {
        machine.set_sink(Some(Box::new(Nothing)));
        machine.hold_user_traps()?;
        machine.traps().arm_user(address, space)?;
        Ok(Box::new(()))
    })
}

/// A session of the probe engine on a function of the micro guest. Its rings have room for every event.
#[derive(Clone, Copy)]
struct Session<'g> {
    guest: &'g MicroGuest,
    function: &'static str,
    moments: &'static [Moment],
}

impl Session<'_> {
    fn kernel(self, filter: Filter, capture: Capture) -> Probe {
        let address = self.guest.address(self.function);
        self.probe(filter, capture, move |_, _, moment| {
            Ok(Target::Kernel { address, moment })
        })
    }

    fn user(self, filter: Filter, capture: Capture) -> Probe {
        let address = self.guest.address(self.function);
        self.probe(filter, capture, move |machine, space, moment| {
            let physical = translate(machine.ram(), space, address)?.gpa;
            let mut code = vec![0; 15];
            machine.traps().read_unpatched(physical, &mut code)?;
            let text = UserText {
                path: String::new(),
                file: CachedFile {
                    mapping: Gva(0),
                    inode: Gva(0),
                    size: 0,
                },
                offset: physical.0,
                physical: Some(physical),
                code,
            };
            Ok(Target::User { text, moment })
        })
    }

    fn probe(
        self,
        filter: Filter,
        capture: Capture,
        target: impl Fn(&Machine, AddressSpace, Moment) -> Result<Target, Box<dyn Error>> + 'static,
    ) -> Probe {
        let elf = self.guest.kernel().shared_elf();
        let Self {
            function, moments, ..
        } = self;
        Box::new(move |machine, space| {
            let symbols = KernelImage::parse(elf.clone())?.symbols()?;
            let view = Arc::new(KernelView::without_types(symbols, space));
            let engine = Engine::new(machine.handle(), view, &EngineLimits::default());
            let mut session = engine.session(RingSize::for_capture(4096, &capture))?;
            for moment in moments {
                let probe = probes::probe::Probe {
                    name: ProbeName::new("micro", "", function, moment.name()),
                    signature: None,
                    target: target(machine, space, *moment)?,
                };
                session.enable(&probe, filter.clone(), capture.clone())?;
            }
            Ok(Box::new(session))
        })
    }
}
