//! Lists the processes of a restored guest, and the kernel stack of the first: `inspect SNAPSHOT`.

use std::error::Error;
use std::path::Path;

use exotrace::{ProcessName, Vm};

/// Returns the number of processes.
pub fn run(snapshot: &Path) -> Result<usize, Box<dyn Error>> {
    let vm = Vm::builder().restore(snapshot).start()?;
    let listed = vm.processes()?.processes;
    for process in &listed {
        println!("{:>5} {} {}", process.pid, process.state, process.comm);
    }
    let stacks = vm.stacks(&ProcessName::Pid(1), None)?;
    for frame in stacks.threads.iter().flat_map(|thread| &thread.kernel) {
        let name = frame.name.as_deref().unwrap_or("?");
        println!("    {:#x} {name}", frame.address);
    }
    Ok(listed.len())
}

fn main() -> Result<(), Box<dyn Error>> {
    let snapshot = std::env::args_os().nth(1).ok_or("inspect SNAPSHOT")?;
    run(Path::new(&snapshot)).map(drop)
}
