//! The speed that a budget leaves a loop of probed calls: `cargo bench-budget`.
//!
//! The micro guest calls a small function again and again, and does nothing else: the worst case.
//! Its speed with a probe at the function's entry and return, under budgets and without one, is
//! told beside that without a probe, measured in the same turn. What the meters say of the cost
//! stands beside the time that the loop has really lost.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use introspect::kernel::image::KernelImage;
use probes::engine::{Capture, Engine, EngineLimits, Filter, RingSize};
use probes::kernel_view::KernelView;
use probes::name::ProbeName;
use probes::probe::{Moment, Probe, Target};
use support::MicroGuest;

/// The number of turns; odd.
const TURNS: usize = 5;
/// The time of the loop without a probe.
const LOOP: Duration = Duration::from_secs(2);
/// The part of that for a loop whose every call is seen.
const WATCHED_PART: u64 = 50;
const FUNCTION: &str = "micro_leaf";
const BUDGETS: [&str; 3] = ["1%", "5%", "20%"];

/// One run of the loop.
struct Run {
    seconds: f64,
    /// The part of the time that the meters say was lost.
    cost: f64,
    /// The part of the time for which the probes rested.
    rested: f64,
}

/// Calls the function `calls` times: without a probe, or with one under a budget or none.
fn run(guest: &MicroGuest, calls: u64, probe: Option<Option<&str>>) -> Result<Run, Box<dyn Error>> {
    let (machine, paused) = guest.before_program(&format!("calls {calls}"));
    let registers = machine.registers(&paused, 0).ok_or("no vCPU")?;
    let space = registers.address_space();
    let symbols = KernelImage::parse(guest.kernel().shared_elf())?.symbols()?;
    let view = Arc::new(KernelView::without_types(symbols, space).with_lasting_space());
    let engine = Engine::new(machine.handle(), view, &EngineLimits::default());
    let mut session = engine.session(RingSize::for_capture(4096, &Capture::default()))?;
    if let Some(budget) = probe {
        session.set_budget(budget.map(str::parse).transpose()?);
        for moment in [Moment::Entry, Moment::Return] {
            let probe = Probe {
                name: ProbeName::new("micro", "", FUNCTION, moment.name()),
                signature: None,
                target: Target::Kernel {
                    address: guest.address(FUNCTION),
                    moment,
                },
            };
            session.enable(&probe, Filter::default(), Capture::default())?;
        }
    }
    let began = Instant::now();
    guest.finish(&machine, paused);
    let seconds = began.elapsed().as_secs_f64();
    let unwatched = session.unwatched(0).unwrap_or_default();
    Ok(Run {
        seconds,
        cost: session.cost().busiest as f64 / engine.tsc_hz() as f64 / seconds,
        rested: unwatched.ticks as f64 / unwatched.passed.max(1) as f64,
    })
}

/// Returns the number of calls that take [`LOOP`] without a probe.
fn calls(guest: &MicroGuest) -> Result<u64, Box<dyn Error>> {
    let mut calls = 10_000;
    loop {
        let seconds = run(guest, calls, None)?.seconds;
        if seconds > 0.2 {
            return Ok((calls as f64 * LOOP.as_secs_f64() / seconds) as u64);
        }
        calls *= 4;
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Result<(), Box<dyn Error>> {
    let Some(host) = support::host() else {
        return Ok(());
    };
    let guest = MicroGuest::new(host);
    let calls = calls(&guest)?;
    println!(
        "{:<12} {:>12} {:>14} {:>10}",
        "budget", "speed kept", "metered cost", "rested"
    );
    for budget in BUDGETS.map(Some).into_iter().chain([None]) {
        let calls = match budget {
            Some(_) => calls,
            None => calls.div_ceil(WATCHED_PART),
        };
        let mut kept = Vec::new();
        let mut cost = Vec::new();
        let mut rested = Vec::new();
        for turn in 0..TURNS {
            // The order alternates because the second run finds the host's caches as the first has
            // left them.
            let [bare, traced] = match turn % 2 {
                0 => {
                    let bare = run(&guest, calls, None)?;
                    [bare, run(&guest, calls, Some(budget))?]
                }
                _ => {
                    let traced = run(&guest, calls, Some(budget))?;
                    [run(&guest, calls, None)?, traced]
                }
            };
            kept.push(bare.seconds / traced.seconds);
            cost.push(traced.cost);
            rested.push(traced.rested);
        }
        println!(
            "{:<12} {:>11.1}% {:>13.1}% {:>9.1}%",
            budget.unwrap_or("none"),
            100.0 * median(kept),
            100.0 * median(cost),
            100.0 * median(rested)
        );
    }
    println!("({calls} calls; medians of {TURNS} turns)");
    Ok(())
}
