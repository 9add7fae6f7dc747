//! The cost of a script for a program in a Linux guest that does little but system calls:
//! `cargo bench-syscalls`. It is given against the script's bare exits, with strace(1) inside the
//! guest beside it.
//!
//! The program is dd(1), copying single bytes. The figure is the time that the host's CPUs spend on
//! it, its start included. Each turn has a fresh copy of the guest. In it dd runs untraced, then
//! with the script, then with the script's traps alone (the same traps, with nothing done at their
//! hits), then under strace. All figures are medians over the turns.

use std::error::Error;

use rustix::time::{ClockId, clock_gettime};
use support::host::Host;
use support::scripts::{Ran, ScriptGuest};
use support::strace;
use support::user_guest::UserGuest;

/// The number of bytes copied in one run; each byte is a read(2) and a write(2).
const BYTES: u64 = 6_000;
/// The number of bytes under strace, where each call takes far longer.
const STRACED: u64 = 300;
/// The number of turns; odd. Strace runs in the first only.
const TURNS: usize = 7;
/// The limit of a script's cost: the project's own bound, in the script's bare exits.
const BOUND: f64 = 1.3;
/// Ten probes, three aggregations.
const SCRIPT: &str = "
    syscall::read:entry, syscall::write:entry, syscall::openat:entry, syscall::close:entry, syscall::lseek:entry
    { @calls[comm, func] = count(); }
    syscall::read:return, syscall::write:return, syscall::openat:return, syscall::close:return, syscall::lseek:return
    { @sizes = hist(retval); @bytes[func] = sum(retval); }";

/// The strace commands, with the names under which they are shown.
const STRACES: [(&str, &str); 2] = [
    ("strace -c", "strace -c -o /dev/null"),
    ("strace, each call told", "strace -o /dev/null"),
];

type Fallible<T> = Result<T, Box<dyn Error>>;

/// Returns the seconds of CPU time of one call that dd makes under the command `before`.
fn time(guest: &UserGuest, before: &str, bytes: u64) -> f64 {
    let spent = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    };
    let line = format!("{before} dd if=/dev/zero of=/dev/null bs=1 count={bytes} 2> /dev/null");
    let begin = spent();
    guest.shell.output(&line);
    (spent() - begin) / (2 * bytes) as f64
}

/// Runs one turn: returns the seconds of a call untraced, with the script, with its traps alone,
/// and in the first turn under each strace.
fn turn(host: &'static Host, is_first: bool) -> Fallible<Vec<f64>> {
    let guest = UserGuest::of(strace::guest(host));
    // A restored guest gets its memory as it touches it.
    time(&guest, "", BYTES);
    let mut times = vec![time(&guest, "", BYTES)];
    let running = ScriptGuest::from(&guest).start(SCRIPT);
    // Return addresses get their traps at the first hit.
    time(&guest, "", BYTES);
    times.push(time(&guest, "", BYTES));
    guest.shell.linux.machine().handle().set_sink(None);
    times.push(time(&guest, "", BYTES));
    check(&running.finish())?;
    for (_, before) in STRACES.into_iter().filter(|_| is_first) {
        times.push(time(&guest, before, STRACED));
    }
    Ok(times)
}

/// Checks that the script has seen two runs, and not the one without it at its traps.
fn check(ran: &Ran) -> Fallible<()> {
    let read = ran.number("@calls[dd, read]");
    match (2 * BYTES..3 * BYTES).contains(&read) {
        true => Ok(()),
        false => Err(format!("{read} reads in two runs: {ran:?}").into()),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Fallible<()> {
    let Some(host) = support::host() else {
        return Ok(());
    };
    let turns: Vec<Vec<f64>> = (0..TURNS)
        .map(|n| turn(host, n == 0))
        .collect::<Result<_, _>>()?;
    let of = |place: usize| {
        let all = turns.iter().filter_map(|turn| turn.get(place).copied());
        median(all.collect())
    };
    let calls = 2 * BYTES;
    let (plain, bare) = (of(0), of(2));
    let names = [
        "untouched",
        "10 probes, 3 aggregations",
        "their exits alone",
    ];
    let straces = STRACES.map(|(name, _)| name);
    println!("{:<28} {:>11}   times as long", "", "µs a call");
    for (place, name) in names.into_iter().chain(straces).enumerate() {
        let took = of(place);
        println!("{name:<28} {:11.2}   {:.3}", took * 1e6, took / plain);
    }
    let ratio = (of(1) - plain) / (bare - plain);
    let told = match ratio > BOUND {
        true => format!("   over {BOUND}"),
        false => String::new(),
    };
    println!("script, in the bare exits that it takes: {ratio:.3}{told}");
    println!(
        "(an exit: {:.2} µs; {calls} calls; medians of {TURNS} turns)",
        (bare - plain) / 2.0 * 1e6
    );
    Ok(())
}
