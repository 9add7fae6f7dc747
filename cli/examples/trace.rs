//! Prints ten entries into a kernel function of a restored guest: `trace SNAPSHOT [FUNCTION]`.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use exotrace::Vm;

/// Returns the events that were seen.
pub fn run(snapshot: &Path, function: &str) -> Result<usize, Box<dyn Error>> {
    let vm = Vm::builder().restore(snapshot).start()?;
    vm.wait_booted(Duration::from_secs(60))?;
    let mut trace = vm.trace(format!("kprobe:{function}:entry").as_str())?;
    vm.type_line("cat /proc/version")?;
    let mut seen = 0;
    for hit in trace.events(Duration::from_secs(60)).take(10) {
        println!(
            "{} pid {:?} {:#x?}",
            hit.probe.name, hit.event.pid, hit.event.arguments
        );
        seen += 1;
    }
    Ok(seen)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let snapshot = words.next().ok_or("trace SNAPSHOT [FUNCTION]")?;
    run(
        Path::new(&snapshot),
        words.next().as_deref().unwrap_or("vfs_read"),
    )
    .map(drop)
}
