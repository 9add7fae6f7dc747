//! The exactness of replays: `cargo bench-replay`.
//!
//! A guest with one vCPU does something while its input is recorded, and does it again in restored
//! machines that get the same input. It prints how many of them ended with the same text on the
//! console, and how many went the same way by their own account. A plain program depends on its
//! input alone. A racy one depends on when the timer interrupts it. The option is `--runs N`.

use std::error::Error;
use std::ffi::OsString;

use support::command::{Ended, Running, World, words};
use support::rich;
use support::shell::COMMAND_LIMIT;

/// The default number of replays of a program.
const RUNS: usize = 100;
/// The text by which a program ends.
const END: &str = "end=2";

/// The programs, as lines for the guest's shell.
const PROGRAMS: [(&str, &str); 3] = [
    (
        "plain",
        "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done; echo i=$i; cat /proc/version | md5sum; echo end=$((1+1))",
    ),
    (
        "racy, of two processes",
        "f() { i=0; while [ $i -lt 30 ]; do i=$((i+1)); j=0; while [ $j -lt 400 ]; do j=$((j+1)); done; echo $1$i; done; }; f a & x=$!; f b & wait $x $!; echo end=$((1+1))",
    ),
    (
        "random",
        "dd if=/dev/hwrng bs=16 count=1 2>/dev/null | md5sum; dd if=/dev/urandom bs=16 count=1 2>/dev/null | md5sum; echo end=$((1+1))",
    ),
];

fn runs() -> Result<usize, Box<dyn Error>> {
    // Cargo passes `--bench` to every benchmark.
    let mut arguments = std::env::args().skip(1).filter(|word| word != "--bench");
    match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => Ok(RUNS),
        (Some("--runs"), Some(number)) => Ok(number.parse()?),
        (Some(other), _) => Err(format!("{other}: no option; there is --runs N").into()),
    }
}

/// Waits for the end of the program, and stops the machine.
fn end(world: &World, mut machine: Running) -> Ended {
    machine.wait_until("end of the program", COMMAND_LIMIT, |stdout, _| {
        stdout.contains(END)
    });
    world.run(words("stop --vm bench"), COMMAND_LIMIT);
    machine.finish(COMMAND_LIMIT)
}

/// Returns the text up to the end of the program.
fn shown(ended: &Ended) -> &str {
    let end = ended.stdout.find(END).map_or(0, |at| at + END.len());
    ended.stdout.get(..end).unwrap_or_default()
}

fn main() -> Result<(), Box<dyn Error>> {
    let runs = runs()?;
    let host = support::host().ok_or("/dev/kvm cannot be used")?;
    println!(
        "{:24} {:>6} {:>10} {:>10}",
        "program", "runs", "same text", "same way"
    );
    for (name, line) in PROGRAMS {
        let world = World::new();
        let mut command = words("run --name bench --history 1h,every=50ms --snapshots .");
        command.extend(rich::restore(host));
        let mut machine = world.start(command);
        machine.type_line("echo up=$((6*7))");
        machine.wait_until("shell", COMMAND_LIMIT, |stdout, _| stdout.contains("up=42"));
        machine.type_line(line);
        machine.wait_until("program", COMMAND_LIMIT, |stdout, _| stdout.contains(END));
        let kept = world.run(words("rewind --vm bench --ago 1h kept"), COMMAND_LIMIT);
        if kept.status != 0 {
            return Err(kept.stderr.into());
        }
        let recorded = end(&world, machine);
        let (mut same_text, mut same_way, mut departures) = (0, 0, Vec::new());
        for _ in 0..runs {
            let command = words("run --name bench --replay --restore");
            let command = command.into_iter().chain([OsString::from("kept")]);
            let ended = end(&world, world.start(command));
            same_text += usize::from(shown(&ended) == shown(&recorded));
            match ended.stderr.contains("departed from its recording") {
                true => departures.push(ended.stderr),
                false => same_way += 1,
            }
        }
        println!("{name:24} {runs:>6} {same_text:>10} {same_way:>10}");
        let told = departures.first().into_iter().flat_map(|told| told.lines());
        for line in told.filter(|line| line.contains("departed")) {
            println!("  the first that did not: {line}");
        }
    }
    Ok(())
}
