//! The cost of a hit against a bare exit measured in the same run: `cargo bench-hits`.
//! [`support::hits`] describes the method.

use std::error::Error;

use support::MicroGuest;
use support::hits::{ARMED, Bench, Cost, ROUNDS, lines};

/// The number of turns; odd.
const TURNS: usize = 31;

fn main() -> Result<(), Box<dyn Error>> {
    let Some(host) = support::host() else {
        return Ok(());
    };
    let guest = MicroGuest::new(host);
    let lines = lines(&guest);
    let bench = Bench::new(guest);

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
        let ratio = bench.armed_elsewhere(program, TURNS)?;
        println!("{name}, {ARMED} probes armed elsewhere: {ratio:.4} of its time without");
    }
    println!(
        "({ROUNDS} rounds; medians of {TURNS} turns. The host executes the instruction under a trap for the guest, which saves \
         it {:.0} ns in kernel mode here)",
        bench.instruction(TURNS)?
    );
    Ok(())
}
