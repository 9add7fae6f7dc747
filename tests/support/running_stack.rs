//! Reads the stack of whatever a CPU runs, while the guest is paused and from inside traps.
//!
//! Inside a trap the one vCPU is before the trapped instruction: reads see the state at exactly
//! that instruction.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use iced_x86::{Decoder, DecoderOptions};
use introspect::stack::frames::{End, Found, Stack};
use introspect::system::{PausedSystem, System};
use introspect::x86_64::CpuState;
use introspect::{CpuRegisters, Gva, PausedMemory};
use vmm::trap::Trap;
use vmm::{StoppedVcpu, TrapSink};

use crate::proc_comparison::{frame_name, lossy};
use crate::shell::{COMMAND_LIMIT, Shell};

/// The selector of the kernel's code (`__KERNEL_CS`, arch/x86/include/asm/segment.h).
const KERNEL_CS: u16 = 0x10;

/// The stack of the task that a CPU runs.
pub struct Running {
    /// The task's name.
    pub name: String,
    /// The kernel's part of the stack; `None` if the task is in user mode.
    pub kernel: Option<Stack>,
    /// The kernel's frames as it would print them.
    pub frames: Vec<String>,
    /// The functions of the program, as far as they have names.
    pub program: Vec<String>,
    /// The end of the program's stack.
    pub program_end: Option<End>,
    /// Whether nothing in the kernel calls the outermost kernel frame.
    pub outermost: bool,
}

impl Running {
    /// Reads the stack of the task on the first CPU; `None` if that CPU is idle.
    ///
    /// # Panics
    /// If the kernel's tasks and stacks cannot be read.
    pub fn of(look: &PausedSystem<'_>) -> Option<Self> {
        let threads = look.threads().unwrap_or_else(|e| panic!("{e}"));
        let task = threads
            .items
            .iter()
            .find(|task| look.cpu_of(task).is_some())?;
        let objects = look.objects(task, None).unwrap_or_else(|e| panic!("{e}"));
        let modules = look.modules().unwrap_or_else(|e| panic!("{e}"));
        let unwinder = look.kernel_unwinder(&modules.items);
        let unwinder = unwinder.unwrap_or_else(|e| panic!("{e}"));
        let modules = look.module_symbols(modules);
        let (modules, _) = modules.unwrap_or_else(|e| panic!("{e}"));
        let stack = look.stack(task, &unwinder, &mut objects.unwinder());
        let symbols = look.system().symbols();
        let bounds =
            ["__entry_text_start", "__entry_text_end"].map(|name| symbols.address_of(name));
        let [Some(start), Some(end)] = bounds else {
            panic!("no bounds of the entry code: {bounds:?}")
        };
        let last = stack.kernel.iter().flat_map(|stack| &stack.frames).last();
        let outermost = last.is_some_and(|frame| {
            let address = frame.lookup_address();
            let name = symbols.resolve(address).map(|(symbol, _)| symbol.name);
            // The second name is used since Linux 6.6.
            let first = matches!(name, Some("ret_from_fork" | "ret_from_fork_asm"));
            first || (start..end).contains(&address)
        });
        let frames = stack.kernel.iter().flat_map(|stack| &stack.frames);
        let frames = frames.map(|frame| frame_name(look, Some(&modules), frame));
        let program = stack.user.iter().flat_map(|stack| &stack.frames);
        let program = program.filter_map(|frame| {
            let address = frame.lookup_address();
            Some(objects.at(address)?.resolve(address)?.0)
        });
        Some(Self {
            name: lossy(task.name()),
            frames: frames.collect(),
            program: program.collect(),
            program_end: stack.user.map(|stack| stack.end),
            kernel: stack.kernel,
            outermost,
        })
    }

    /// Returns the number of interrupted frames.
    pub fn interrupted(&self) -> usize {
        let frames = self.kernel.iter().flat_map(|stack| &stack.frames);
        frames
            .filter(|frame| frame.found == Found::Interrupted)
            .count()
    }

    /// Returns the defect of the kernel's part, if any. It must lead without an assumption to the
    /// entry from user mode or to a thread's first function.
    pub fn fault(&self) -> Option<String> {
        let stack = self.kernel.as_ref()?;
        (!self.outermost || !stack.is_reliable()).then(|| {
            format!(
                "{}: {}\n    {}",
                self.name,
                stack.end,
                self.frames.join("\n    ")
            )
        })
    }
}

/// The stack at a trap.
pub struct Trapped {
    /// The address of the next instruction.
    pub address: u64,
    /// RDI: at the entry of a function, its first argument.
    pub argument: u64,
    /// The stack.
    pub running: Running,
}

/// A sink that reads the stack at each trap.
struct StackSink {
    system: Arc<System>,
    seen: Arc<Mutex<Vec<Trapped>>>,
}

impl TrapSink for StackSink {
    fn trap(&self, trap: &Trap, cpu: &StoppedVcpu<'_>) {
        let state = CpuState {
            general: *cpu.general(),
            cs: KERNEL_CS,
            gs_base: cpu.kernel_gs_base().0,
            cr3: cpu.page_table_root().0,
            ..CpuState::default()
        };
        let memory = PausedMemory::new(cpu.ram());
        let running = Running::of(&self.system.look(&memory, &[state]));
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.extend(running.map(|running| Trapped {
            address: trap.address.0,
            argument: cpu.regs().rdi,
            running,
        }));
    }
}

/// A guest whose traps are watched.
pub struct Watched<'s> {
    shell: &'s Shell,
    system: Arc<System>,
    seen: Arc<Mutex<Vec<Trapped>>>,
}

impl<'s> Watched<'s> {
    /// Starts to read the stack at each trap, until the machine gets another sink. Dropping this
    /// value does not end it.
    ///
    /// # Panics
    /// If the guest's kernel cannot be found.
    pub fn new(shell: &'s Shell) -> Self {
        let system = shell.linux.system();
        let seen = Arc::<Mutex<Vec<Trapped>>>::default();
        shell.linux.machine().set_sink(Some(Box::new(StackSink {
            system: system.clone(),
            seen: seen.clone(),
        })));
        Self {
            shell,
            system,
            seen,
        }
    }

    fn function(&self, name: &str) -> Gva {
        let address = self.system.symbols().address_of(name);
        Gva(address.unwrap_or_else(|| panic!("no {name}")))
    }

    /// Waits until `enough` returns true or the limit passes. Returns what was seen, and whether it
    /// was enough.
    pub fn wait(
        &self,
        limit: Duration,
        enough: impl Fn(&[Trapped]) -> bool,
    ) -> (Vec<Trapped>, bool) {
        let deadline = Instant::now() + limit;
        loop {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let done = enough(&seen);
            if done || Instant::now() >= deadline {
                return (std::mem::take(&mut seen), done);
            }
            drop(seen);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Returns the stacks at the entries of kernel functions, once there are `enough`.
    ///
    /// # Panics
    /// If they do not come within [`COMMAND_LIMIT`], or a function is not known or cannot be
    /// trapped.
    pub fn stacks_at(
        &self,
        functions: &[&str],
        enough: impl Fn(&[Trapped]) -> bool,
    ) -> Vec<Trapped> {
        let linux = &self.shell.linux;
        let traps = linux.machine().traps();
        let arm = |function: &&str| {
            let site = traps.arm_kernel(self.function(function), self.system.space());
            site.unwrap_or_else(|e| panic!("{function}: {e}"))
        };
        let sites: Vec<_> = functions.iter().map(arm).collect();
        let (seen, done) = self.wait(COMMAND_LIMIT, enough);
        for site in sites {
            traps.disarm(site);
        }
        assert!(
            done,
            "{functions:?}: only {} stacks in {COMMAND_LIMIT:?}\n{}",
            seen.len(),
            linux.situation()
        );
        seen
    }

    /// Returns the addresses of the instructions of a function of `length` bytes.
    ///
    /// # Panics
    /// If it is not known.
    pub fn instructions(&self, function: &str, length: usize) -> Vec<u64> {
        let start = self.function(function);
        let code = self.shell.linux.look(|look| {
            let code = look.kernel().bytes(start, length);
            code.unwrap_or_else(|e| panic!("{function}: {e}"))
        });
        let decoder = Decoder::with_ip(64, &code, start.0, DecoderOptions::NONE);
        decoder.into_iter().map(|found| found.ip()).collect()
    }
}
