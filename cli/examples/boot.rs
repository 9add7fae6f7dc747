//! Boots a kernel and prints its console until it can be traced: `boot KERNEL INITRAMFS`.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use exotrace::Vm;

/// Boots the kernel and returns the VM, whose guest runs on.
pub fn run(kernel: &Path, initramfs: &Path) -> Result<(), Box<dyn Error>> {
    let vm = Vm::builder().kernel(kernel).initramfs(initramfs).start()?;
    vm.wait_booted(Duration::from_secs(600))?;
    for line in vm.console_lines() {
        println!("{line}");
    }
    println!("the kernel's text has SHA-256 {}", vm.text_hash()?);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut paths = std::env::args_os().skip(1);
    let (kernel, initramfs) = paths
        .next()
        .zip(paths.next())
        .ok_or("boot KERNEL INITRAMFS")?;
    run(Path::new(&kernel), Path::new(&initramfs))
}
