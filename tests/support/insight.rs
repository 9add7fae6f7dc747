//! A guest looked into from outside: each look while it stands still, or from inside a trap.

use introspect::system::{PausedSystem, System, Unavailable};
use introspect::x86_64::{AddressSpace, CpuState};
use introspect::{Gpa, PausedMemory, PhysicalMemory};
use probes::kernel_view::KernelView;
use probes::name::ProbePattern;
use probes::probe::Probe;
use probes::provider::uprobe::{self, UserMatches};
use probes::provider::{tracepoint, usdt};
use vmm::Machine;
use vmm::machine::Paused;

use crate::linux::Linux;

/// What is known of a guest's kernel, as the command keeps it between looks.
pub struct Insight {
    /// Its readers.
    pub system: System,
    /// Page tables that map the kernel.
    pub space: AddressSpace,
}

impl Insight {
    /// Of a guest that has booted.
    ///
    /// # Panics
    /// If its kernel cannot be found.
    pub fn new(linux: &Linux) -> Self {
        let view = linux.view();
        let _paused = linux.machine.pause();
        let memory = PausedMemory::new(linux.machine.ram());
        let types = view.btf.as_ref().ok_or("no types");
        let system = System::new(memory.view(view.space), view.symbols.clone(), types);
        Self {
            system,
            space: view.space,
        }
    }

    /// Looks while the machine stands still.
    pub fn look<T>(&self, machine: &Machine, ask: impl FnOnce(PausedSystem<'_>) -> T) -> T {
        let paused = machine.pause();
        self.look_at(machine.ram(), &cpus(machine, &paused), ask)
    }

    /// The functions and static probes of programs that a pattern stands for.
    ///
    /// # Errors
    /// If the kernel does not tell of its processes.
    pub fn user_probes(
        &self,
        machine: &Machine,
        pattern: &ProbePattern,
    ) -> Result<UserMatches, Unavailable> {
        let unpatched = |gpa: Gpa, buf: &mut [u8]| machine.traps().read_unpatched(gpa, buf).is_ok();
        self.look(machine, |look| match uprobe::is_meant(pattern) {
            true => uprobe::find(&look, pattern, &unpatched),
            false => usdt::find(&look, pattern, &unpatched),
        })
    }

    /// The tracepoints that a pattern stands for: all of them are known.
    ///
    /// # Errors
    /// If the kernel does not tell of its tracepoints.
    ///
    /// # Panics
    /// If it tells of some only.
    pub fn tracepoints(
        &self,
        machine: &Machine,
        view: &KernelView,
        pattern: &ProbePattern,
    ) -> Result<Vec<Probe>, String> {
        let handle = machine.handle();
        let found = self.look(machine, |look| {
            tracepoint::find(&look, &handle, view, pattern)
        })?;
        assert!(found.incomplete.is_empty(), "{:?}", found.incomplete);
        Ok(found.probes)
    }

    /// Looks at memory and CPUs that do not change meanwhile.
    pub fn look_at<T>(
        &self,
        memory: &dyn PhysicalMemory,
        cpus: &[CpuState],
        ask: impl FnOnce(PausedSystem<'_>) -> T,
    ) -> T {
        let memory = PausedMemory::new(memory);
        ask(self.system.look(&memory, self.space, cpus))
    }
}

/// The CPUs of a machine that stands still.
pub fn cpus(machine: &Machine, paused: &Paused) -> Vec<CpuState> {
    (0..machine.vcpus())
        .filter_map(|vcpu| machine.cpu_state(paused, vcpu))
        .collect()
}
