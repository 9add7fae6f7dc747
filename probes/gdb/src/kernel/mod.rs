//! The guest's kernel as a debugger reads it: each task is a thread, and so is the idle task of a
//! vCPU that runs no other.
//!
//! A task that a vCPU runs has the vCPU's registers, be it in the kernel or in its program. Another
//! has those that the scheduler has kept for it. Addresses of programs are those of the selected
//! task.

mod arguments;
mod boundary;
mod call_frames;
mod code_frames;
mod image;
mod text;
mod types;

use std::cell::RefCell;
use std::sync::Arc;

use introspect::kernel::btf::Kind;
use introspect::kernel::loaded_modules::LoadedModules;
use introspect::kernel::symbols::Function;
use introspect::kernel::task_list::TaskInfo;
use introspect::stack::frames::SavedRegisters;
use introspect::system::PausedSystem;
use introspect::x86_64::{CpuState, GeneralRegisters, paging};
use introspect::{Gva, MemoryView};
use probes::engine::Filter;
use probes::kernel_view::KernelView;
use probes::name::ProbeName;
use probes::probe::{Moment, Probe, Target};
use probes::provider::{Traceable, kprobe};

use arguments::Arguments;
use text::Text;
use types::{Code, Sections};

use crate::reader::Reader;
use crate::registers::ThreadRegisters;
use crate::subject::{
    DebugError, File, MAX_THREADS, NumberOfHit, Subject, Thread, change, pieces, read_pages,
    unpatched,
};

/// The number of the first vCPU's idle task: no task's number is as large (`PID_MAX_LIMIT`,
/// include/linux/threads.h).
const FIRST_IDLE: i32 = (1 << 22) + 1;
/// The path of the file with the kernel's symbols.
const IMAGE: &[u8] = b"/vmlinux";
/// The largest number of records of unwind information that are given to the client. A
/// distribution's kernel has half a million.
const MOST_RECORDS: u64 = 1 << 21;
/// The selector of the kernel's code (`__KERNEL_CS`, arch/x86/include/asm/segment.h).
const KERNEL_CS: u16 = 0x10;

/// A task, or a vCPU without one.
#[derive(Debug, Clone)]
struct Task {
    thread: Thread,
    /// `None` for the idle task, which no list has.
    info: Option<TaskInfo>,
    /// The vCPU that runs it.
    cpu: Option<usize>,
}

/// The kernel of a guest.
pub(crate) struct Kernel<'g> {
    reader: Reader<'g>,
    /// The tasks, listed once a stop.
    tasks: RefCell<Option<Arc<Vec<Task>>>>,
    /// The symbols of modules, read once a stop.
    modules: RefCell<Option<Arc<LoadedModules>>>,
}

impl<'g> Kernel<'g> {
    pub(crate) fn new(guest: &'g dyn Traceable) -> Self {
        Self {
            reader: Reader::new(guest),
            tasks: RefCell::new(None),
            modules: RefCell::new(None),
        }
    }

    /// Returns the tasks: those that run first.
    fn tasks(&self) -> Result<Arc<Vec<Task>>, DebugError> {
        if let Some(tasks) = &*self.tasks.borrow() {
            return Ok(tasks.clone());
        }
        let tasks = Arc::new(self.reader.look(|look| list(&look))??);
        *self.tasks.borrow_mut() = Some(tasks.clone());
        Ok(tasks)
    }

    /// Returns the symbols of the modules that are loaded.
    fn modules(&self) -> Result<Arc<LoadedModules>, DebugError> {
        if let Some(modules) = &*self.modules.borrow() {
            return Ok(modules.clone());
        }
        let loaded = self.reader.look(|look| {
            let (loaded, errors) = look.module_symbols(look.modules()?)?;
            for error in errors {
                log::info!("a module's symbols are not known: {error}");
            }
            Ok::<_, DebugError>(loaded)
        })??;
        let loaded = Arc::new(loaded);
        *self.modules.borrow_mut() = Some(loaded.clone());
        Ok(loaded)
    }

    /// Returns a task by its number.
    fn task(&self, number: i32) -> Result<Option<Task>, DebugError> {
        let tasks = self.tasks()?;
        let task = tasks.iter().find(|task| task.thread.number == number);
        Ok(task.cloned())
    }

    /// Asks with the memory that a task sees at an address.
    fn with_view<T>(
        &self,
        thread: i32,
        address: u64,
        ask: impl FnOnce(&MemoryView<'_>) -> T,
    ) -> Result<Option<T>, DebugError> {
        let task = match address >> 63 {
            1 => None,
            _ => self.task(thread)?.and_then(|task| task.info),
        };
        self.reader.look(|look| match (address >> 63, task) {
            (1, _) => Some(ask(&look.kernel())),
            (_, Some(task)) => look.process_view(&task).map(|view| ask(&view)),
            (_, None) => None,
        })
    }
}

impl Subject for Kernel<'_> {
    fn guest(&self) -> &dyn Traceable {
        self.reader.guest()
    }

    fn goes_on(&self) {
        self.reader.goes_on();
        self.tasks.borrow_mut().take();
        self.modules.borrow_mut().take();
    }

    /// Returns a filter that admits all hits. A filter of threads would leave out those in
    /// interrupts.
    fn filter(&self, _: Option<i32>) -> Filter {
        Filter::default()
    }

    fn number_of_hit(&self) -> NumberOfHit {
        NumberOfHit::WithIdle(FIRST_IDLE)
    }

    fn threads(&self) -> Result<Vec<Thread>, DebugError> {
        Ok(self
            .tasks()?
            .iter()
            .map(|task| task.thread.clone())
            .collect())
    }

    fn child_at(&self, _: u64) -> Result<Option<i32>, DebugError> {
        Ok(None)
    }

    fn registers(&self, thread: i32) -> Result<ThreadRegisters, DebugError> {
        let Some(task) = self.task(thread)? else {
            return Ok(ThreadRegisters::default());
        };
        let mut registers = ThreadRegisters::default();
        self.reader.look(|look| {
            if let Some(cpu) = task.cpu.and_then(|cpu| look.cpus().get(cpu)) {
                registers.saved = Some(of_cpu(cpu));
                registers.fs_base = Some(cpu.fs_base);
            } else if let Some(info) = &task.info {
                let kept = self.reader.with_unwinder(&look, |unwinder| {
                    unwinder.saved_registers(look.kernel(), info.address)
                })?;
                registers.saved = kept.ok().map(of_scheduler);
                registers.is_callers = true;
            }
            Ok::<_, DebugError>(())
        })??;
        let machine = self.guest().machine();
        if let Some(cpu) = task.cpu {
            registers.floating = machine.floating(&machine.pause(), cpu);
        }
        Ok(registers)
    }

    /// Replaces the registers of the vCPU that runs the task.
    fn change_registers(&self, thread: i32, wanted: &SavedRegisters) -> Result<bool, DebugError> {
        let task = self.task(thread)?;
        let machine = self.guest().machine();
        Ok(task
            .and_then(|task| task.cpu)
            .is_some_and(|cpu| machine.change_registers(&machine.pause(), cpu, &wanted.general)))
    }

    fn read(&self, thread: i32, address: u64, buf: &mut [u8]) -> Result<usize, DebugError> {
        let read = self.with_view(thread, address, |view| {
            read_pages(address, buf, |at, part| {
                let place = paging::translate(view.physical(), view.space(), Gva(at));
                place.is_ok_and(|place| unpatched(self.guest(), place.gpa, part))
            })
        })?;
        Ok(read.unwrap_or_default())
    }

    fn change_memory(&self, thread: i32, address: u64, bytes: &[u8]) -> Result<bool, DebugError> {
        let pieces = self.with_view(thread, address, |view| {
            pieces(view, Gva(address), bytes, |place| place.writable)
        })?;
        Ok(change(self.guest(), pieces.flatten()))
    }

    fn probe_at(&self, address: u64) -> Result<Option<Probe>, DebugError> {
        let view = self.guest().view();
        let own = view.kernel.symbols.resolve(address);
        let own = own.filter(|(symbol, _)| symbol.is_text());
        let found =
            own.map(|(symbol, offset)| (kprobe::KERNEL.to_owned(), symbol.name.to_owned(), offset));
        let found = match found {
            Some(found) => Some(found),
            None => in_module(&*self.modules()?, address),
        };
        let Some((module, function, offset)) = found else {
            return Ok(None);
        };
        let start = address.wrapping_sub(offset);
        let is_boundary = boundary::is_at(start, address, |at, code| {
            self.read(0, at, code).unwrap_or_default()
        });
        Ok(is_boundary.then(|| Probe {
            name: ProbeName::new(
                kprobe::PROVIDER,
                &module,
                &function,
                &format!("{offset:#x}"),
            ),
            signature: None,
            target: Target::Kernel {
                address: Gva(address),
                moment: Moment::Point,
            },
        }))
    }

    fn executable(&self) -> Result<Option<Vec<u8>>, DebugError> {
        Ok(Some(IMAGE.to_vec()))
    }

    fn auxiliary_vector(&self) -> Result<Vec<u8>, DebugError> {
        Ok(Vec::new())
    }

    fn open(&self, path: &[u8]) -> Result<Option<File>, DebugError> {
        if path != IMAGE {
            return Ok(None);
        }
        let view = self.guest().view();
        let symbols = &view.kernel.symbols;
        let range = view.text().unwrap_or_default();
        let text = Text::read(&range, |at, piece| {
            self.read(0, at, piece).unwrap_or_default()
        });
        let switches = image::switches(symbols, &text);
        let types = types_of(view, &text);
        let loaded = self.modules()?;
        let image = self.reader.look(|look| {
            let tables = self.reader.with_unwinder(&look, |unwinder| {
                let tables = unwinder
                    .tables()
                    .filter(|table| table.len() <= MOST_RECORDS);
                let copies = tables.map(|table| table.copy(look.kernel()));
                let told = copies.inspect(|copy| {
                    if let Err(error) = copy {
                        log::info!("a part of the kernel has no call frames: {error}");
                    }
                });
                told.filter_map(Result::ok).collect::<Vec<_>>()
            })?;
            let listed = look.modules()?.items;
            Ok::<_, DebugError>(image::make(
                symbols, &listed, &loaded, &tables, &text, &switches, types,
            ))
        })??;
        match image {
            Ok(image) => Ok(Some(File::Text(image))),
            Err(error) => {
                log::info!("the kernel's symbols cannot be given: {error}");
                Ok(None)
            }
        }
    }

    fn read_file(&self, _: &[u8], _: u64, _: &mut [u8]) -> Result<Option<usize>, DebugError> {
        Ok(None)
    }

    fn link(&self, _: &[u8]) -> Option<Vec<u8>> {
        None
    }
}

/// Returns the kernel's types and functions for the debugger, as far as they are known.
fn types_of(view: &KernelView, text: &Text) -> Option<Sections> {
    let btf = view.kernel.btf()?;
    let range = view.text().ok()?;
    let mut arguments = Arguments::new();
    let code = |function: Function<'_>| {
        let (start, size) = (function.symbol.address, function.size);
        // Of several functions of one name, BTF has one: nobody knows which.
        let mut named = view.kernel.symbols.all_of(function.symbol.name);
        if size == 0 || named.nth(1).is_some() || !range.contains(&start) {
            return None;
        }
        let first = text.at(start, arguments::MOST);
        Some(Code {
            id: btf.find(function.symbol.name, &[Kind::Function])?,
            start,
            size,
            kept: arguments.kept_until(first, start),
        })
    };
    let functions: Vec<Code> = view.text_functions().filter_map(code).collect();
    types::sections(btf, range.clone(), &functions)
}

/// Lists the tasks, those that a vCPU runs first, and the idle tasks of the other vCPUs.
fn list(look: &PausedSystem<'_>) -> Result<Vec<Task>, DebugError> {
    let mut running: Vec<Option<Task>> = vec![None; look.cpus().len()];
    let mut others = Vec::new();
    for info in look.threads()?.items.into_iter().take(MAX_THREADS) {
        let cpu = look.cpu_number_of(&info);
        let name = String::from_utf8_lossy(&look.name(&info)).into_owned();
        let task = Task {
            thread: Thread {
                number: info.pid,
                description: match cpu {
                    Some(cpu) => format!("{name} ({}, on CPU {cpu})", info.state.letter()),
                    None => format!("{name} ({})", info.state.letter()),
                },
                is_exiting: false,
                is_running: cpu.is_some(),
            },
            info: Some(info),
            cpu,
        };
        match cpu.and_then(|cpu| running.get_mut(cpu)) {
            Some(place) => *place = Some(task),
            None => others.push(task),
        }
    }
    let idle = |cpu: usize| Task {
        thread: Thread {
            number: FIRST_IDLE.saturating_add(i32::try_from(cpu).unwrap_or_default()),
            description: format!("swapper/{cpu} (R, on CPU {cpu})"),
            is_exiting: false,
            is_running: true,
        },
        info: None,
        cpu: Some(cpu),
    };
    let running = running.into_iter().enumerate();
    let running = running.map(|(cpu, task)| task.unwrap_or_else(|| idle(cpu)));
    Ok(running.chain(others).collect())
}

/// Returns the module and function that an address is in, and the distance to its first byte.
fn in_module(loaded: &LoadedModules, address: u64) -> Option<(String, String, u64)> {
    let (found, offset) = loaded.resolve(address)?;
    let text = found.symbol.is_text();
    text.then(|| {
        (
            found.module.to_owned(),
            found.symbol.name.to_owned(),
            offset,
        )
    })
}

/// Returns the registers of a CPU, in whatever mode it is.
fn of_cpu(cpu: &CpuState) -> SavedRegisters {
    SavedRegisters {
        general: cpu.general,
        cs: cpu.cs,
        orig_rax: u64::MAX,
    }
}

/// Returns the registers that the scheduler has kept for a task.
fn of_scheduler(general: GeneralRegisters) -> SavedRegisters {
    SavedRegisters {
        general,
        cs: KERNEL_CS,
        orig_rax: u64::MAX,
    }
}
