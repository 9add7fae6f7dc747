//! `cargo torture`: a guest under every hard load at once, while clients arm, disarm, are killed,
//! stop reading and send garbage.
//!
//! A phase for each number of vCPUs runs the guest of [`support::victims`] as a user would, with
//! strict confinement. It ends when its time is up and its share of rounds and kills is reached.
//! Then the guest must be alive, its kernel's text unchanged, and every count that can be exact
//! must be. The machine's threads, descriptors and memory must be back within their bounds. A last
//! phase kills machines.
//!
//! It takes part in `cargo test` in a short form. It prints a line for each phase as test programs
//! do, and figures on standard error.

mod clients;
mod control;
mod counts;
mod guest;
mod kills;
mod options;
mod phase;
mod rounds;
mod saves;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Parser;

use options::Options;

fn main() -> ExitCode {
    let options = Options::parse();
    if options.build && !build() {
        return ExitCode::FAILURE;
    }
    // As in every other test: there may be no KVM.
    let Some(host) = support::host() else {
        println!("\ntest result: ok. 0 passed; 0 failed; 0 ignored");
        return ExitCode::SUCCESS;
    };
    eprintln!(
        "torture: seed {} (--seed repeats it), some {} minutes",
        options.seed(),
        options.expected_minutes()
    );
    let (mut passed, mut failed) = (0, 0);
    for phase in options.phases() {
        let name = phase.name();
        if !options.wants(&name) {
            continue;
        }
        let began = Instant::now();
        let ended = catch_unwind(AssertUnwindSafe(|| phase.run(host, &options)));
        let seconds = began.elapsed().as_secs();
        // The panic has printed its message.
        if ended.is_ok() {
            passed += 1;
            println!("test {name} ... ok ({seconds} s)");
        } else {
            failed += 1;
            println!("test {name} ... FAILED ({seconds} s)");
        }
    }
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {result}. {passed} passed; {failed} failed; 0 ignored");
    ExitCode::from(u8::from(failed > 0))
}

/// Builds the command beside the tests, and returns whether that succeeded. Cargo, which runs this,
/// builds tests alone.
fn build() -> bool {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--package", "exotrace"])
        .status();
    built.is_ok_and(|status| status.success())
}
