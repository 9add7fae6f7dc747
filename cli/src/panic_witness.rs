//! The search for a panic in the guest's memory, for a machine's watch and for the end of its run.
//!
//! With the kernel's file the addresses to check are known before the first instruction. For a
//! restored machine without it they are found in memory. As long as they are not, only the end of
//! the run is worth a search of all memory.

use std::sync::{Mutex, PoisonError};

use introspect::kernel::panic::PanicFinder;
use introspect::kernel::running::RunningKernel;
use introspect::{Gva, PausedMemory};
use vmm::Machine;
use vmm::machine::{Handle, PanicReport, PanicWitness};

use crate::guest_kernel::GuestKernel;

/// A witness with the kernel's file. Without a finder the guest does not run Linux.
struct OfFile(Option<PanicFinder>);

/// A witness with only the guest's memory.
#[derive(Default)]
struct OfMemory(Mutex<Search>);

#[derive(Default)]
struct Search {
    finder: Option<PanicFinder>,
    /// The number of checks so far.
    looks: u32,
}

/// Installs the witness of panics in `machine`, which has not started; `kernel` is its kernel, if
/// available.
pub fn watch(machine: &Machine, kernel: Option<&GuestKernel>) {
    let Some(kernel) = kernel else {
        return machine.set_panic_witness(Box::<OfMemory>::default());
    };
    machine.set_panic_witness(Box::new(OfFile(kernel.panic_finder())));
}

impl PanicWitness for OfFile {
    fn look(&self, machine: &Handle, ended: bool) -> Option<PanicReport> {
        look_with(self.0.as_ref()?, machine, ended)
    }
}

impl PanicWitness for OfMemory {
    fn look(&self, machine: &Handle, ended: bool) -> Option<PanicReport> {
        let mut search = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        search.looks = search.looks.saturating_add(1);
        // A booting kernel is not found yet: the search is repeated ever less often.
        if search.finder.is_none() && (ended || search.looks.is_power_of_two()) {
            search.finder = in_memory(machine);
        }
        let anywhere = || ended.then(|| PanicFinder::of_memory(machine.ram(), None));
        look_with(&search.finder.clone().or_else(anywhere)?, machine, ended)
    }
}

fn look_with(finder: &PanicFinder, machine: &Handle, ended: bool) -> Option<PanicReport> {
    let found = match ended || finder.is_cheap() {
        true => finder.find(machine.ram())?,
        false => return None,
    };
    // The guest numbers its CPUs as the machine does.
    let vcpu = found.cpu.and_then(|cpu| usize::try_from(cpu).ok());
    Some(PanicReport {
        vcpu: vcpu.filter(|vcpu| *vcpu < machine.vcpus()),
        registers: None,
        text: found.text,
        at: None,
    })
}

/// Returns the finder for a kernel found in memory; `None` if there is none (yet).
fn in_memory(machine: &Handle) -> Option<PanicFinder> {
    let paused = machine.pause();
    let cpu = machine.cpu_state(&paused, 0)?;
    let entry = machine.syscall_entry(&paused, 0);
    // The kernel's image does not move, so the guest may run while it is read.
    drop(paused);
    let memory = PausedMemory::new(machine.ram());
    let view = memory.view(cpu.address_space());
    let live = RunningKernel::find(view, &cpu, entry.map_or(0, |entry| entry.0));
    let live = live
        .inspect_err(|error| log::info!("panics are detected only at the end: {error}"))
        .ok()?;
    let place = |address| memory.view(live.space).locate(Gva(address)).ok();
    let panic_cpu = live
        .symbols
        .address_of(PanicFinder::symbol())
        .and_then(place);
    let panic_cpu = panic_cpu.map(|(place, _)| place);
    Some(PanicFinder::of_memory(machine.ram(), panic_cpu))
}
