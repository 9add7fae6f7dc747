//! Reads a guest from outside: while it is paused, or from inside a trap.

use introspect::system::{PausedSystem, System};
use introspect::x86_64::CpuState;
use introspect::{PausedMemory, PhysicalMemory};
use probes::kernel_view::KernelView;
use probes::provider::{Inspectable, Traceable};
use vmm::Machine;
use vmm::machine::{Handle, Paused};

use crate::linux::Linux;

/// The known facts of a guest's kernel, as the command keeps them between reads.
pub struct Insight {
    /// The readers of the kernel.
    pub system: System,
}

impl Insight {
    /// Makes the readers of a guest that has booted.
    ///
    /// # Panics
    /// If its kernel cannot be found.
    pub fn new(linux: &Linux) -> Self {
        let view = linux.view();
        let _paused = linux.machine.pause();
        let memory = PausedMemory::new(linux.machine.ram());
        let system = System::new(&view.kernel, &memory);
        Self { system }
    }

    /// Reads while the machine is paused.
    pub fn look<T>(&self, machine: &Machine, ask: impl FnOnce(PausedSystem<'_>) -> T) -> T {
        let paused = machine.pause();
        self.look_at(machine.ram(), &cpus(machine, &paused), ask)
    }

    /// Returns the guest as providers see it. `view` is of its running kernel.
    pub fn traceable<'g>(&'g self, machine: &'g Machine, view: &'g KernelView) -> Probed<'g> {
        Probed {
            insight: self,
            machine,
            view,
        }
    }

    /// Reads memory and CPUs that do not change meanwhile.
    pub fn look_at<T>(
        &self,
        memory: &dyn PhysicalMemory,
        cpus: &[CpuState],
        ask: impl FnOnce(PausedSystem<'_>) -> T,
    ) -> T {
        let memory = PausedMemory::new(memory);
        ask(self.system.look(&memory, cpus))
    }
}

/// A guest as providers and scripts see it.
pub struct Probed<'g> {
    insight: &'g Insight,
    machine: &'g Machine,
    view: &'g KernelView,
}

impl Traceable for Probed<'_> {
    fn machine(&self) -> Handle {
        self.machine.handle()
    }
}

impl Inspectable for Probed<'_> {
    fn view(&self) -> &KernelView {
        self.view
    }

    fn running(&self) -> Option<Handle> {
        Some(self.machine())
    }

    fn inspect(&self, ask: &mut dyn FnMut(PausedSystem<'_>)) -> Result<(), String> {
        self.insight.look(self.machine, ask);
        Ok(())
    }
}

/// Returns the CPUs of a paused machine.
pub fn cpus(machine: &Machine, paused: &Paused) -> Vec<CpuState> {
    (0..machine.vcpus())
        .filter_map(|vcpu| machine.cpu_state(paused, vcpu))
        .collect()
}
