//! Prints ten calls of a kernel function in a restored guest: `trace SNAPSHOT [FUNCTION]`.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use exotrace::Vm;

/// Returns the number of calls that were seen.
pub fn run(snapshot: &Path, function: &str) -> Result<usize, Box<dyn Error>> {
    let vm = Vm::builder().restore(snapshot).start()?;
    let mut trace = vm.trace(format!("kprobe:{function}:entry").as_str())?;
    vm.type_line("cat /proc/*/stat")?;
    let hits = trace.events(Duration::from_secs(60)).take(10);
    let shown = hits.map(|hit| {
        let event = &hit.event;
        println!(
            "{} pid {:?} {:x?}",
            hit.probe.name, event.pid, event.arguments
        );
    });
    Ok(shown.count())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let snapshot = words.next().ok_or("trace SNAPSHOT [FUNCTION]")?;
    let function = words.next().unwrap_or("do_filp_open".into());
    run(Path::new(&snapshot), &function).map(drop)
}
