//! The number of events a second that a trace writes as a table in Parquet, and as lines of JSON in
//! the same run: `cargo bench-exports`.
//!
//! Events have four arguments that do not repeat, and no stacks. `rendering` is from events in
//! memory to bytes; `whole` has in addition the reading of the lines that a machine sends.

use std::error::Error;

/// The number of events of each turn.
const EVENTS: usize = 4_000_000;
/// The number of turns; the best counts.
const TURNS: usize = 3;
/// The events a second that a table takes.
const EXPECTED: f64 = 1_000_000.0;

fn main() -> Result<(), Box<dyn Error>> {
    println!("{EVENTS} events      rendering/s        whole/s  bytes/event");
    for table in [false, true] {
        let mut best: Option<(f64, f64, u64)> = None;
        for _ in 0..TURNS {
            let told = exotrace::measured::trace(table, EVENTS)?;
            let events = EVENTS as f64;
            let rendering = events / told.rendering.as_secs_f64();
            let whole = events / (told.rendering + told.parsing).as_secs_f64();
            if best.is_none_or(|(known, ..)| rendering > known) {
                best = Some((rendering, whole, told.bytes / EVENTS as u64));
            }
        }
        let (rendering, whole, bytes) = best.ok_or("no turns")?;
        let name = if table { "parquet" } else { "json" };
        println!("{name:>14} {rendering:>16.0} {whole:>14.0} {bytes:>12}");
        if table && rendering < EXPECTED {
            return Err(format!("parquet: {rendering:.0} events a second").into());
        }
    }
    Ok(())
}
