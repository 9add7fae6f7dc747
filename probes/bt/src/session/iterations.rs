//! The iterations over the paused guest: `iter:task` and others.

use std::cell::{Cell, OnceCell, RefCell};
use std::sync::atomic::Ordering;

use introspect::Gva;
use introspect::kernel::task_list::TaskInfo;
use introspect::memory_view::MemoryView;
use introspect::stack::frames::Stack;
use introspect::stack::kernel::KernelUnwinder;
use introspect::system::{PausedSystem, ThreadStack, Unavailable, UserObjects};
use probes::event::COMM_LENGTH;
use probes::provider::{Inspectable, Traceable};

use super::{ScriptSession, StartError, output};
use crate::ast::Iteration;
use crate::context::{Clock, Context};
use crate::program::Code;
use crate::render::Output;
use crate::run::{ProbeTexts, Shared, run};
use crate::value::Value;

/// The first address of the kernel's half (x86-64).
const KERNEL_HALF: u64 = 1 << 63;

/// The largest number of runs of a script's rules: a guest may claim any number of mappings, and is
/// paused meanwhile.
const MOST_RUNS: u64 = 1 << 21;

/// A rule of an iteration, compiled.
pub(super) struct Iterated {
    pub(super) iteration: Iteration,
    pub(super) code: Code,
}

/// The environment of a rule for a thread of a paused guest, or for what belongs to it.
struct AtTask<'t> {
    unix_ns: u64,
    task: &'t TaskInfo,
    /// The members of `ctx` behind the task.
    members: [u64; 2],
    stacks: &'t Stacks<'t>,
    kernel: MemoryView<'t>,
    /// The memory of its program; none in a kernel thread.
    program: Option<MemoryView<'t>>,
    emitted: RefCell<Vec<(usize, Vec<Value>)>>,
}

/// The stacks of the guest's threads.
struct Stacks<'t> {
    system: PausedSystem<'t>,
    /// The walker of kernel stacks, made for the first stack.
    unwinder: OnceCell<Result<KernelUnwinder, Unavailable>>,
}

impl Stacks<'_> {
    /// Walks the stacks of a thread; that of its program only if it is `wanted`.
    fn of(&self, task: &TaskInfo, wanted: bool) -> Option<ThreadStack> {
        let unwinder = self.unwinder.get_or_init(|| {
            let modules = self.system.modules().map(|modules| modules.items);
            self.system.kernel_unwinder(&modules.unwrap_or_default())
        });
        let objects = match wanted {
            true => self.system.objects(task, None).unwrap_or_default(),
            false => UserObjects::default(),
        };
        let unwinder = unwinder.as_ref().ok()?;
        let stack = self.system.stack(task, unwinder, &mut objects.unwinder());
        Some(stack)
    }
}

/// Copies the addresses of a stack. Returns their number.
fn copy(stack: Option<Stack>, frames: &mut [u64]) -> usize {
    let found = stack.map(|stack| stack.frames).unwrap_or_default();
    for (place, frame) in frames.iter_mut().zip(&found) {
        *place = frame.address.0;
    }
    found.len().min(frames.len())
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

    fn argument(&self, number: usize) -> u64 {
        self.members.get(number).copied().unwrap_or_default()
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

    fn kernel_stack(&self, frames: &mut [u64]) -> usize {
        let stack = self.stacks.of(self.task, false);
        copy(stack.and_then(|stack| stack.kernel), frames)
    }

    fn user_stack(&self, frames: &mut [u64]) -> usize {
        let stack = self.stacks.of(self.task, true);
        copy(stack.and_then(|stack| stack.user), frames)
    }

    fn emit(&self, emission: usize, values: &[Value]) -> bool {
        let mut emitted = self.emitted.borrow_mut();
        emitted.push((emission, values.to_vec()));
        true
    }
}

impl ScriptSession {
    /// Runs the rules of iterations over the guest, which is paused meanwhile, and passes on their
    /// output. A script without probes ends with it.
    ///
    /// # Errors
    /// If the kernel's structures cannot be read, with the reason.
    pub fn iterate(
        &mut self,
        guest: &dyn Traceable,
        each: &mut dyn FnMut(Output),
    ) -> Result<(), StartError> {
        let guest: &dyn Inspectable = guest;
        visit(
            &self.iterations,
            Some(guest),
            &self.shared,
            &self.clock,
            each,
        )?;
        if self.probes.is_empty() && self.to_come.is_empty() {
            self.shared.exited.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Runs rules over a guest, one after the other, unless the script has ended itself.
///
/// # Errors
/// If there is no guest, or the kernel's structures cannot be read. The rules before were run.
pub(super) fn visit(
    rules: &[Iterated],
    guest: Option<&dyn Inspectable>,
    shared: &Shared,
    clock: &Clock,
    each: &mut dyn FnMut(Output),
) -> Result<(), StartError> {
    let Some(first) = rules.first().filter(|_| !is_over(shared)) else {
        return Ok(());
    };
    let lost = |iteration, reason| StartError::Iteration { iteration, reason };
    let nobody = || lost(first.iteration, "there is no guest".to_owned());
    let guest = guest.ok_or_else(nobody)?;
    let mut visited = Ok(());
    let inspected = guest.inspect(&mut |system| {
        let visitor = Visitor {
            stacks: Stacks {
                system,
                unwinder: OnceCell::new(),
            },
            shared,
            left: Cell::new(MOST_RUNS),
            unix_ns: clock.unix_ns(vmm::host_tsc()),
        };
        visited = rules.iter().try_for_each(|rule| {
            let run = visitor.run(rule, each);
            run.map_err(|reason| lost(rule.iteration, reason))
        });
    });
    inspected.map_err(|reason| lost(first.iteration, reason))?;
    visited
}

fn is_over(shared: &Shared) -> bool {
    shared.exited.load(Ordering::Relaxed)
}

/// The rules' way through a paused guest.
struct Visitor<'v> {
    stacks: Stacks<'v>,
    shared: &'v Shared,
    /// The number of runs that are left.
    left: Cell<u64>,
    unix_ns: u64,
}

impl Visitor<'_> {
    /// Runs a rule for each thing of its iteration.
    fn run(&self, rule: &Iterated, each: &mut dyn FnMut(Output)) -> Result<(), String> {
        let system = &self.stacks.system;
        let why = |error: &dyn std::fmt::Display| error.to_string();
        let tasks = match rule.iteration {
            Iteration::Task => system.threads(),
            // Threads of a process share them.
            Iteration::TaskFile | Iteration::TaskVma => system.processes(),
        };
        let tasks = tasks.map_err(|lost| why(&lost))?;
        for task in tasks.complete().map_err(|lost| why(&lost))? {
            match rule.iteration {
                Iteration::Task => self.at(rule, &task, [0; 2], each)?,
                Iteration::TaskFile => {
                    let files = system.open_files(&task).map_err(|lost| why(&lost))?;
                    self.note(files.error.is_some());
                    for open in files.items {
                        let members = [open.number.into(), open.file.address.0];
                        self.at(rule, &task, members, each)?;
                    }
                }
                Iteration::TaskVma => {
                    let areas = system.vmas(&task).map_err(|lost| why(&lost))?;
                    self.note(areas.error.is_some());
                    for area in areas.items {
                        self.at(rule, &task, [area.address.0, 0], each)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Counts a table that could be read in part only.
    fn note(&self, is_incomplete: bool) {
        let reads = &self.shared.faults.reads;
        reads.fetch_add(is_incomplete.into(), Ordering::Relaxed);
    }

    /// Runs a rule once, and passes on its output.
    fn at(
        &self,
        rule: &Iterated,
        task: &TaskInfo,
        members: [u64; 2],
        each: &mut dyn FnMut(Output),
    ) -> Result<(), String> {
        if is_over(self.shared) {
            return Ok(());
        }
        let left = self.left.get().checked_sub(1);
        let refused = || format!("more than {MOST_RUNS} runs: refused");
        self.left.set(left.ok_or_else(refused)?);
        let system = &self.stacks.system;
        let context = AtTask {
            unix_ns: self.unix_ns,
            task,
            members,
            stacks: &self.stacks,
            kernel: system.kernel(),
            program: system.process_view(task),
            emitted: RefCell::default(),
        };
        let texts = ProbeTexts {
            name: rule.iteration.name().as_bytes().into(),
            function: [].into(),
        };
        run::<dyn Context>(&rule.code, self.shared, &context, &texts);
        for (emission, values) in context.emitted.into_inner() {
            output::of(self.shared, emission, values, self.unix_ns)
                .into_iter()
                .for_each(&mut *each);
        }
        Ok(())
    }
}
