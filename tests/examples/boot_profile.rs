//! Profiles a guest's boot: samples the instruction pointer and prints the hottest kernel
//! functions.
//!
//! ```text
//! cargo run --release -p exotrace-tests --example boot_profile -- KERNEL INITRAMFS SECONDS [WORDS]
//! ```
//!
//! The guest has 128 MiB of memory, or as many as the environment's `MEMORY_MIB` says.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use exotrace::Vm;
use introspect::kernel::image::KernelImage;
use vmm::boot::KernelFile;
use vmm::machine::VirtioConfig;

const SAMPLES_PER_SECOND: u32 = 40;
const SHOWN: usize = 40;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kernel, initramfs, seconds, rest @ ..] = arguments.as_slice() else {
        return Err("usage: boot_profile KERNEL INITRAMFS SECONDS [COMMAND LINE WORDS]".into());
    };
    if support::host().is_none() {
        return Ok(());
    }
    let symbols =
        KernelImage::parse(KernelFile::open(Path::new(kernel))?.shared_elf())?.symbols()?;
    let command_line = format!("console=ttyS0 {}", rest.join(" "));
    let memory = std::env::var("MEMORY_MIB")
        .ok()
        .and_then(|m| m.parse().ok())
        .unwrap_or(128);
    let builder = Vm::builder().kernel(kernel).initramfs(initramfs);
    let builder = builder.command_line(command_line).memory(memory << 20);
    // No device takes a part of the boot.
    let builder = builder.virtio(VirtioConfig::default());
    let limit = Duration::from_secs(seconds.parse()?);
    let start = Instant::now();
    let mut counts: HashMap<&str, u64> = HashMap::new();
    let mut total = 0u64;
    let mut user = 0u64;
    let mut first_user = None;
    let vm = builder.console(std::io::stdout()).start()?;
    let machine = vm.machine();
    eprintln!("command line: {}", vm.command_line());
    let end = loop {
        if let Some(end) = machine.wait(Some(Duration::from_secs(1) / SAMPLES_PER_SECOND)) {
            break Some(end);
        }
        if start.elapsed() > limit {
            break None;
        }
        let paused = machine.pause();
        let Some(registers) = machine.registers(&paused, 0) else {
            continue;
        };
        drop(paused);
        total += 1;
        if machine.stats().syscalls_repaired > 0 && first_user.is_none() {
            first_user = Some(start.elapsed());
        }
        if registers.in_user_mode() {
            user += 1;
        } else if let Some((symbol, _)) = symbols.resolve(registers.regs.rip) {
            *counts.entry(symbol.name).or_default() += 1;
        }
    };
    println!(
        "\nafter {:?}: {}",
        start.elapsed(),
        end.map_or("still running".into(), |e| e.to_string())
    );
    println!(
        "first user-mode system call after {first_user:?}; {total} samples, {user} in user mode"
    );
    let mut list: Vec<_> = counts.into_iter().collect();
    list.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    for (name, count) in list.into_iter().take(SHOWN) {
        println!(
            "{:5.1} % {count:6} {name}",
            100.0 * count as f64 / total as f64
        );
    }
    println!("{:#?}", machine.stats());
    Ok(())
}
