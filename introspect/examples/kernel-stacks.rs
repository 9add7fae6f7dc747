//! Prints the kernel stacks in a core file: `kernel-stacks CORE VMLINUX`. They are those of the
//! task that each CPU runs, and of every other process, the latter as in `/proc/PID/stack`.

mod saved_guest;

use std::error::Error;

use introspect::kernel::symbols::Symbols;
use introspect::kernel::task::TaskLayout;
use introspect::kernel::task_list::TaskListLayout;
use introspect::stack::frames::Frame;
use introspect::stack::kernel::{KernelUnwinder, Method};
use introspect::stack::orc::OrcTable;
use introspect::stack::orc_versions::OrcFormat;
use introspect::{CpuRegisters, Gva, PausedMemory};
use saved_guest::SavedGuest;

fn main() -> Result<(), Box<dyn Error>> {
    let guest = SavedGuest::of_arguments()?;
    let (btf, symbols) = (&guest.types, &guest.kernel.symbols);
    let paused = PausedMemory::new(&guest.core);
    let view = paused.view(guest.kernel.space);
    let format = OrcFormat::of(Some(btf), guest.kernel.banner.as_deref())?;
    let orc = OrcTable::of_kernel(symbols, format).ok();
    let unwinder = KernelUnwinder::new(btf, symbols, Method::of(view, symbols, orc))?;
    let layout = TaskLayout::new(btf, symbols)?;
    let mut running = Vec::new();
    for (number, cpu) in guest.core.cpus().iter().enumerate() {
        let current = cpu.kernel_gs_base().0.wrapping_add(layout.current);
        let task = Gva(view.u64(Gva(current))?);
        println!("CPU {number}, task {task}:");
        let stack = unwinder.running(view, cpu, task);
        for frame in &stack.frames {
            println!("{} {:?}", name(symbols, frame), frame.found);
        }
        println!("-- {}", stack.end);
        running.push(task);
    }
    let tasks = TaskListLayout::new(btf, symbols)?.processes(view);
    for task in tasks.items {
        if running.contains(&task.address) {
            continue;
        }
        println!("{}:", task.pid);
        let stack = unwinder.sleeping(view, task.address);
        for frame in stack
            .frames
            .iter()
            .filter(|frame| !unwinder.is_scheduler(frame))
        {
            println!("[<0>] {}", name(symbols, frame));
        }
        if !stack.is_reliable() {
            println!("-- {}", stack.end);
        }
    }
    tasks.error.map_or(Ok(()), |error| Err(error.into()))
}

/// Names a frame as the kernel prints backtraces: by the byte before the address, for any frame.
fn name(symbols: &Symbols, frame: &Frame) -> String {
    match symbols.resolve(frame.address.0.wrapping_sub(1)) {
        Some((symbol, offset)) => format!("{}+{:#x}", symbol.name, offset + 1),
        None => frame.address.to_string(),
    }
}
