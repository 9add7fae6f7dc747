//! A sink that records its traps.

use std::sync::{Arc, Mutex};

use vmm::trap::Trap;
use vmm::{StoppedVcpu, TrapSink};

/// One trap with the registers that tests check.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    pub trap: Trap,
    pub rdi: u64,
    pub rip: u64,
    pub rflags: u64,
    pub user_mode: bool,
}

/// A sink that keeps every trap, in order.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<Vec<Seen>>>);

impl Recorder {
    pub fn seen(&self) -> Vec<Seen> {
        self.0.lock().unwrap().clone()
    }

    pub fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Returns RDI of every trap.
    pub fn rdi(&self) -> Vec<u64> {
        self.0.lock().unwrap().iter().map(|s| s.rdi).collect()
    }

    pub fn boxed(&self) -> Option<Box<dyn TrapSink>> {
        Some(Box::new(self.clone()))
    }
}

impl TrapSink for Recorder {
    fn trap(&self, trap: &Trap, cpu: &StoppedVcpu<'_>) {
        use introspect::CpuRegisters;
        let regs = cpu.regs();
        self.0.lock().unwrap().push(Seen {
            trap: *trap,
            rdi: regs.rdi,
            rip: regs.rip,
            rflags: regs.rflags,
            user_mode: cpu.in_user_mode(),
        });
    }
}
