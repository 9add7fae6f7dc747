//! The cost of a hit, split into KVM's part and ours: `cargo bench-own`.
//!
//! KVM's part is the floor: the same exit by an int3 in a loop that only moves RIP past it. The
//! rest of a line is ours, with the cost to KVM of our use of the host's caches. The options are
//! `--turns N`, and `--ns-per-instruction N` if the host's clock counts instructions, as an
//! emulated host's can. The differences are then exact, in instructions.

use std::error::Error;

use support::MicroGuest;
use support::hits::{Bench, Cost, Line, Mode, ROUNDS, lines};

/// The default number of turns; odd.
const TURNS: usize = 31;

struct Options {
    turns: usize,
    ns_per_instruction: Option<f64>,
}

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options = Self {
            turns: TURNS,
            ns_per_instruction: None,
        };
        // Cargo passes `--bench` to every benchmark.
        let mut arguments = arguments.filter(|argument| argument != "--bench");
        while let Some(name) = arguments.next() {
            let value = arguments.next();
            let value = value.ok_or_else(|| format!("{name}: give a number behind it"))?;
            let wrong = || format!("{name} {value}: give a number above 0");
            match name.as_str() {
                "--turns" => {
                    let turns = value.parse().ok().filter(|turns| *turns > 0);
                    options.turns = turns.ok_or_else(wrong)?;
                }
                "--ns-per-instruction" => {
                    let ns = value.parse().ok().filter(|ns| *ns > 0.0);
                    options.ns_per_instruction = Some(ns.ok_or_else(wrong)?);
                }
                _ => {
                    let known = "--turns N and --ns-per-instruction N";
                    return Err(format!("{name}: no option; there are {known}").into());
                }
            }
        }
        Ok(options)
    }
}

/// The medians of all turns.
struct Table {
    bare: [Cost; 2],
    /// The floors; `None` if a program's int3 is no exit.
    floors: [Option<Cost>; 2],
    /// The floor in kernel mode with system registers if a hit has none, else without.
    other: Cost,
    lines: Vec<Cost>,
}

impl Table {
    fn measure(bench: &Bench, lines: &[Line], turns: usize) -> Result<Self, Box<dyn Error>> {
        let mut all = vec![Vec::new(); Mode::ALL.len() + lines.len()];
        let mut floors = [Vec::new(), Vec::new()];
        let mut other = Vec::new();
        for _ in 0..turns {
            for (costs, cost) in all.iter_mut().zip(bench.turn(lines)?) {
                costs.push(cost);
            }
            for (costs, mode) in floors.iter_mut().zip(Mode::ALL) {
                if bench.has_floor(mode) {
                    costs.push(bench.floor(mode, bench.has_system_registers(mode))?);
                }
            }
            let system = !bench.has_system_registers(Mode::Kernel);
            other.push(bench.floor(Mode::Kernel, system)?);
        }
        let mut medians = all.iter().map(|costs| Cost::median(costs));
        let mut bare = || medians.next().ok_or("no turn");
        Ok(Self {
            bare: [bare()?, bare()?],
            floors: floors.map(|costs| (!costs.is_empty()).then(|| Cost::median(&costs))),
            other: Cost::median(&other),
            lines: medians.collect(),
        })
    }
}

fn of<T: Copy>(pair: [T; 2], mode: Mode) -> T {
    let [kernel, user] = pair;
    match mode {
        Mode::Kernel => kernel,
        Mode::User => user,
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    let Some(host) = support::host() else {
        return Ok(());
    };
    let guest = MicroGuest::new(host);
    let lines = lines(&guest);
    let bench = Bench::new(guest);
    let table = Table::measure(&bench, &lines, options.turns)?;

    let instructions = |ns: f64| match options.ns_per_instruction {
        Some(each) => format!("{:14.0}", ns / each),
        None => String::new(),
    };
    let count = match options.ns_per_instruction {
        Some(_) => "  instructions",
        None => "",
    };
    println!(
        "{:<32} {:>9} {:>9} {:>13} {:>11}{count}",
        "", "p50 ns", "p99 ns", "in bare exits", "ours ns"
    );
    for (name, mode) in [("kernel mode", Mode::Kernel), ("user mode", Mode::User)] {
        let bare = of(table.bare, mode);
        let name = format!("bare exit, {name}");
        println!("{name:<32} {:9.0} {:9.0} {:13.3}", bare.p50, bare.p99, 1.0);
    }
    for (name, mode) in [("kernel mode", Mode::Kernel), ("user mode", Mode::User)] {
        let name = format!("floor, {name}");
        let Some(floor) = of(table.floors, mode) else {
            println!("{name:<32} (a program's int3 is no exit of this host's KVM)");
            continue;
        };
        let (Cost { p50, p99, .. }, ratio) = (floor, floor.p50 / of(table.bare, mode).p50);
        println!("{name:<32} {p50:9.0} {p99:9.0} {ratio:13.3}");
    }
    let Cost { p50, p99, .. } = table.other;
    let name = match bench.has_system_registers(Mode::Kernel) {
        true => "  kernel, without system registers",
        false => "  kernel, with system registers",
    };
    let ratio = p50 / of(table.bare, Mode::Kernel).p50;
    println!("{name:<32} {p50:9.0} {p99:9.0} {ratio:13.3}");
    for (line, Cost { p50, p99, ratio }) in lines.iter().zip(&table.lines) {
        let ours = of(table.floors, line.mode).map(|f| p50 - f.p50 * f64::from(line.hits));
        let (own, own_instructions) = match ours {
            Some(ours) => (format!("{ours:.0}"), instructions(ours)),
            None => ("-".into(), String::new()),
        };
        let name = line.name;
        println!("{name:<32} {p50:9.0} {p99:9.0} {ratio:13.3} {own:>11}{own_instructions}");
    }
    println!(
        "({ROUNDS} rounds; medians of {} turns. Ours: beyond the floor, of which a return costs two)",
        options.turns
    );
    Ok(())
}
