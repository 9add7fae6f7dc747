//! Counts system calls of a restored guest by process and name: `script SNAPSHOT`.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use exotrace::Vm;

const SCRIPT: &str = "
    syscall:::entry { @[comm, func] = count(); }
    syscall:open*:entry { exit(); }
";

/// Returns the script's output.
pub fn run(snapshot: &Path) -> Result<String, Box<dyn Error>> {
    let vm = Vm::builder().restore(snapshot).start()?;
    let script = vm.script(SCRIPT)?;
    vm.type_line("cat /proc/version")?;
    let (output, counts) = script.run(Duration::from_secs(60));
    eprintln!("{} hits, {} lost", counts.hits, counts.lost_output);
    Ok(output.text())
}

fn main() -> Result<(), Box<dyn Error>> {
    let snapshot = std::env::args_os().nth(1).ok_or("script SNAPSHOT")?;
    run(Path::new(&snapshot)).map(|text| print!("{text}"))
}
