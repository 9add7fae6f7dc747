//! The cost of a hit, timed by the micro guest itself: the common parts of `bench-hits` and
//! `bench-own`.
//!
//! A hit's cost is the difference of a timed call with and without the probe. The bare exit is an
//! `out` to a port without a device (kernel mode) or a write to unmapped memory (user mode). Two
//! reads of the counter with nothing between are subtracted from it. Each [`turn`](Bench::turn)
//! measures everything once, so that the host's other load affects all of it alike. Every figure is
//! the median over several turns.

mod lines;

use std::any::Any;
use std::error::Error;

use introspect::x86_64::paging::AddressSpace;
use introspect::{Gpa, Gva};
use vmm::Machine;
use vmm::host::Int3;

pub use lines::lines;

use crate::MicroGuest;
use crate::timing::{Timing, TimingReader};

/// The number of rounds of one run.
pub const ROUNDS: u64 = 1_000;
/// The number of probes that are armed where nothing is executed: in memory that the micro guest
/// does not use.
pub const ARMED: u64 = 1000;
const ELSEWHERE: u64 = 0x18_0000;

/// Owners that live as long as the run.
type Kept = Box<dyn Any>;
type Prepared = Result<Kept, Box<dyn Error>>;

/// Arms a probe in a guest that is paused before its program.
pub type Probe = Box<dyn Fn(&Machine, AddressSpace) -> Prepared>;

/// The CPU mode of a line's hits, which selects the baseline of its costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The guest's kernel.
    Kernel,
    /// A program.
    User,
}

impl Mode {
    /// Both modes.
    pub const ALL: [Self; 2] = [Self::Kernel, Self::User];

    /// Returns the program whose rounds are a bare exit, and the one whose rounds are empty.
    fn bare_and_empty(self) -> [&'static str; 2] {
        match self {
            Self::Kernel => ["tout", "tempty"],
            Self::User => ["tmmio", "tuempty"],
        }
    }

    /// Returns the program that calls a function which begins with a NOP, and that function.
    fn nop(self) -> [&'static str; 2] {
        match self {
            Self::Kernel => ["tnop", "micro_timed_nop_leaf"],
            Self::User => ["tunop", "micro_user_timed_nop_leaf"],
        }
    }
}

/// One line: the cost of `probe` in `program`, whose plain run is subtracted.
pub struct Line {
    /// The printed name.
    pub name: &'static str,
    /// The mode, which selects the baseline.
    pub mode: Mode,
    /// The program of the micro guest.
    pub program: &'static str,
    /// The number of hits of one round.
    pub hits: u32,
    /// The probe that is hit.
    pub probe: Probe,
}

impl Line {
    fn kernel(name: &'static str, program: &'static str, probe: Probe) -> Self {
        let mode = Mode::Kernel;
        Self {
            name,
            mode,
            program,
            hits: 1,
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

/// The cost of one thing in one turn, in nanoseconds and in bare exits.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// The median of the rounds, in nanoseconds.
    pub p50: f64,
    /// The 99th percentile of the rounds, in nanoseconds.
    pub p99: f64,
    /// The cost in bare exits of the same mode.
    pub ratio: f64,
}

impl Cost {
    /// Returns the cost of `timing` less that of `without`. Ratios are to `exit`, the time of a
    /// bare exit.
    #[must_use]
    pub fn of(timing: Timing, without: Timing, exit: Option<f64>) -> Self {
        let p50 = timing.p50 - without.p50;
        Self {
            p50,
            p99: timing.p99 - without.p50,
            ratio: exit.map_or(1.0, |exit| p50 / exit),
        }
    }

    /// Returns the median of each figure.
    #[must_use]
    pub fn median(turns: &[Self]) -> Self {
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

/// The micro guest and the reader of its timings.
pub struct Bench {
    guest: MicroGuest,
    reader: TimingReader,
}

impl Bench {
    /// Measures the time-stamp counter.
    #[must_use]
    pub fn new(guest: MicroGuest) -> Self {
        let reader = TimingReader::new(&guest);
        Self { guest, reader }
    }

    fn time(&self, program: &str, probe: Option<&Probe>) -> Result<Timing, Box<dyn Error>> {
        let (machine, paused) = self.guest.before_program(&format!("{program} {ROUNDS}"));
        let registers = machine.registers(&paused, 0).ok_or("no vCPU")?;
        let kept = probe.map(|probe| probe(&machine, registers.address_space()));
        let kept = kept.transpose()?;
        self.guest.finish(&machine, paused);
        // A run is void if its probe was not hit in every round, or was passed in another way than
        // it should be.
        if kept.is_some() && !machine.traps().hits().iter().any(|hit| hit.1 == ROUNDS) {
            return Err(format!(
                "{program}: {:?} instead of {ROUNDS}",
                machine.traps().hits()
            )
            .into());
        }
        Ok(self.reader.rounds(&machine))
    }

    /// Returns the nanoseconds of one instruction in guest kernel mode, from the six of a call of
    /// the leaf: the median of `turns` turns.
    ///
    /// # Errors
    /// If a program is not there.
    pub fn instruction(&self, turns: usize) -> Result<f64, Box<dyn Error>> {
        const CALL_INSTRUCTIONS: f64 = 6.0;
        let calls: Vec<Cost> = (0..turns)
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

    /// Returns the time of a loop with [`ARMED`] probes armed elsewhere, divided by its time
    /// without: the median of `turns` paired runs.
    ///
    /// # Errors
    /// If the probes cannot be armed.
    pub fn armed_elsewhere(&self, program: &str, turns: usize) -> Result<f64, Box<dyn Error>> {
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
        // The order alternates because the second run finds the host's caches as the first has left
        // them.
        let pairs = (0..turns).map(|turn| {
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
        Ok(ratios.get(turns / 2).copied().unwrap_or(f64::NAN))
    }

    /// Returns whether a program's int3 exits to KVM here, so that a mode has a
    /// [`floor`](Self::floor).
    #[must_use]
    pub fn has_floor(&self, mode: Mode) -> bool {
        mode == Mode::Kernel || self.guest.profile().int3_user == Int3::DebugExit
    }

    /// Returns whether an exit of this mode also returns the system registers here, as the machine
    /// requests them from KVM.
    #[must_use]
    pub fn has_system_registers(&self, mode: Mode) -> bool {
        mode == Mode::User || self.guest.profile().kernel_mode.is_interpreted()
    }

    /// Returns the cost of an exit by an int3 at which only RIP is moved past it: KVM's own part of
    /// a hit. If `system` is set, the system registers are returned beside the general ones.
    ///
    /// # Errors
    /// If the int3 cannot be armed, or does not cause exactly one exit.
    pub fn floor(&self, mode: Mode, system: bool) -> Result<Cost, Box<dyn Error>> {
        let [program, function] = mode.nop();
        let without = self.time(program, None)?;
        let (machine, paused) = self.guest.before_program(&format!("{program} {ROUNDS}"));
        let space = machine.registers(&paused, 0).ok_or("no vCPU")?;
        let (space, address) = (space.address_space(), self.guest.address(function));
        match mode {
            Mode::Kernel => machine.traps().arm_kernel(address, space)?,
            Mode::User => machine.traps().arm_user(address, space)?,
        };
        let ran = machine.run_bare(&paused, 0, address, ROUNDS, system);
        ran.ok_or("no vCPU")?.map_err(|end| end.to_string())?;
        self.guest.finish(&machine, paused);
        Ok(Cost::of(self.reader.rounds(&machine), without, None))
    }

    /// Measures everything once: the bare exits of both modes, then the lines.
    ///
    /// # Errors
    /// If a probe cannot be enabled, or is not hit once a round.
    pub fn turn(&self, lines: &[Line]) -> Result<Vec<Cost>, Box<dyn Error>> {
        let mut costs = Vec::new();
        let mut exits = Vec::new();
        for mode in Mode::ALL {
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
