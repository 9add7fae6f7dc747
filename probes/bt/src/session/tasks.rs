//! The iteration over the guest's threads: `iter:task`.

use std::cell::RefCell;
use std::sync::atomic::Ordering;

use introspect::Gva;
use introspect::kernel::task_list::TaskInfo;
use introspect::memory_view::MemoryView;
use introspect::system::PausedSystem;
use probes::event::COMM_LENGTH;
use probes::provider::Traceable;

use super::{ScriptSession, StartError, output};
use crate::context::Context;
use crate::render::Output;
use crate::run::{ProbeTexts, run};
use crate::value::Value;

/// The first address of the kernel's half (x86-64).
const KERNEL_HALF: u64 = 1 << 63;

/// The environment of a rule for one thread of a paused guest.
struct AtTask<'t> {
    unix_ns: u64,
    task: &'t TaskInfo,
    kernel: MemoryView<'t>,
    /// The memory of its program; none in a kernel thread.
    program: Option<MemoryView<'t>>,
    emitted: RefCell<Vec<(usize, Vec<Value>)>>,
}

impl AtTask<'_> {
    /// Returns the memory that has an address.
    fn memory(&self, address: u64) -> Option<MemoryView<'_>> {
        match address >= KERNEL_HALF {
            true => Some(self.kernel),
            false => self.program,
        }
    }
}

impl Context for AtTask<'_> {
    fn cpu(&self) -> usize {
        0
    }

    fn process(&self) -> u32 {
        self.task.tgid.cast_unsigned()
    }

    fn thread(&self) -> u32 {
        self.task.pid.cast_unsigned()
    }

    fn comm(&self) -> [u8; COMM_LENGTH] {
        self.task.comm
    }

    fn unix_ns(&self) -> u64 {
        self.unix_ns
    }

    fn task(&self) -> u64 {
        self.task.address.0
    }

    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let memory = self.memory(address);
        memory.is_some_and(|memory| memory.read(Gva(address), buffer).is_ok())
    }

    fn read_string(&self, address: u64, buffer: &mut [u8]) -> (usize, bool) {
        let found = self
            .memory(address)
            .and_then(|memory| memory.c_string(Gva(address), buffer.len()).ok());
        let Some(text) = found else {
            return (0, false);
        };
        for (place, byte) in buffer.iter_mut().zip(&text) {
            *place = *byte;
        }
        (text.len(), true)
    }

    fn emit(&self, emission: usize, values: &[Value]) -> bool {
        let mut emitted = self.emitted.borrow_mut();
        emitted.push((emission, values.to_vec()));
        true
    }
}

impl ScriptSession {
    /// Runs the rules of `iter:task` for each thread of the guest, which is paused meanwhile, and
    /// passes on their output. A script without other probes ends with it.
    ///
    /// # Errors
    /// If the kernel's threads cannot be read, with the reason. Nothing was run then.
    pub fn visit_tasks(
        &mut self,
        guest: &dyn Traceable,
        each: &mut dyn FnMut(Output),
    ) -> Result<(), StartError> {
        if self.tasks.is_empty() || self.has_exited() {
            return Ok(());
        }
        let mut visited = Ok(());
        let inspected = guest.inspect(&mut |system| visited = self.visit(&system, each));
        let visited = inspected.and(visited);
        visited.map_err(|reason| StartError::Tasks { reason })?;
        if self.probes.is_empty() && self.to_come.is_empty() {
            self.shared.exited.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn visit(&self, system: &PausedSystem<'_>, each: &mut dyn FnMut(Output)) -> Result<(), String> {
        let threads = system.threads().map_err(|why| why.to_string())?;
        let unix_ns = self.clock.unix_ns(vmm::host_tsc());
        let texts = ProbeTexts {
            name: (*b"iter:task").into(),
            function: [].into(),
        };
        let threads = threads.complete().map_err(|why| why.to_string())?;
        for task in threads {
            let context = AtTask {
                unix_ns,
                task: &task,
                kernel: system.kernel(),
                program: system.process_view(&task),
                emitted: RefCell::default(),
            };
            for code in &self.tasks {
                if self.has_exited() {
                    break;
                }
                run(code, &self.shared, &context, &texts);
            }
            for (emission, values) in context.emitted.into_inner() {
                output::of(&self.shared, emission, values, unix_ns)
                    .into_iter()
                    .for_each(&mut *each);
            }
        }
        Ok(())
    }
}
