//! Asserts what a command does in a restored guest: `expect SNAPSHOT`.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use exotrace::{Verdict, Vm};

/// Returns a verdict for each expectation.
pub fn run(snapshot: &Path) -> Result<Vec<Verdict>, Box<dyn Error>> {
    let vm = Vm::builder().restore(snapshot).start()?;
    let expecting = vm.expect(["syscall:execve >= 1", "do_filp_open /comm == \"cat\"/ >= 1"])?;
    vm.type_line("cat /proc/version")?;
    Ok(expecting.verdicts(Duration::from_secs(60)))
}

fn main() -> Result<(), Box<dyn Error>> {
    let snapshot = std::env::args_os().nth(1).ok_or("expect SNAPSHOT")?;
    for verdict in run(Path::new(&snapshot))? {
        println!(
            "{} {} ({:?} hits)",
            verdict.word(),
            verdict.expected.text,
            verdict.seen
        );
    }
    Ok(())
}
