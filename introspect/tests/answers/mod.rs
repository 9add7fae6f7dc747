//! Reads every process from outside, in the form of the guest's own `/proc`: the same file names,
//! the same lines. Fields of `stat` that are not read are [`UNREAD`].

use std::collections::BTreeMap;
use std::error::Error;

use introspect::kernel::btf::Btf;
use introspect::kernel::path::PathRef;
use introspect::kernel::process::{ProcessLayout, ProcessText};
use introspect::kernel::running::RunningKernel;
use introspect::kernel::structure::StructureError;
use introspect::kernel::symbols::Symbols;
use introspect::kernel::task_list::TaskInfo;
use introspect::kernel::vma::VmaLayout;
use introspect::stack::frames::{End, Frame, Stack};
use introspect::stack::kernel::KernelUnwinder;
use introspect::system::{PausedSystem, System, UserObjects};
use introspect::x86_64::CpuState;
use introspect::{Gva, PausedMemory, PhysicalMemory};

/// The text of a field that is not read.
pub const UNREAD: &str = "?";
/// The number of fields of `/proc/PID/stat` (proc(5)).
const STAT_FIELDS: usize = 52;
/// The maximum size in bytes of a command line or an environment.
const MOST_TEXT: usize = 1 << 16;
/// The end of a process's own VMAs. Above is the vsyscall page, which the process's size omits.
const KERNEL_HALF: u64 = 1 << 63;

type Failure = Box<dyn Error>;

/// A kernel found in memory, with its readers.
pub struct Guest {
    pub kernel: RunningKernel,
    system: System,
    processes: ProcessLayout,
    areas: VmaLayout,
    cpus: Vec<CpuState>,
}

impl Guest {
    /// Finds the kernel that the first CPU runs. Its types are passed, because this kernel does not
    /// load them.
    pub fn find(
        memory: &dyn PhysicalMemory,
        cpus: &[CpuState],
        types: &Btf,
    ) -> Result<Self, Failure> {
        let cpu = cpus.first().ok_or("no CPU")?;
        let paused = PausedMemory::new(memory);
        let mut kernel = RunningKernel::find(paused.view(cpu.address_space()), cpu, 0)?;
        kernel.types = Ok(types.clone());
        Self::new(memory, kernel, cpus, types)
    }

    /// Makes the readers for a kernel.
    pub fn new(
        memory: &dyn PhysicalMemory,
        kernel: RunningKernel,
        cpus: &[CpuState],
        types: &Btf,
    ) -> Result<Self, Failure> {
        let paused = PausedMemory::new(memory);
        let system = System::new(&kernel, &paused);
        Ok(Self {
            processes: ProcessLayout::new(types)?,
            areas: VmaLayout::new(types, &kernel.symbols)?,
            cpus: cpus.to_vec(),
            system,
            kernel,
        })
    }

    /// Reads everything that can be read. `PID/task/TID/user`, which `/proc` lacks, is the thread's
    /// stack in the program, a function a line.
    pub fn answers(
        &self,
        memory: &dyn PhysicalMemory,
    ) -> Result<BTreeMap<String, String>, Failure> {
        let paused = PausedMemory::new(memory);
        let look = self.system.look(&paused, &self.cpus);
        let mut asked = Asked {
            guest: self,
            unwinder: look.kernel_unwinder(&look.modules()?.items)?,
            look,
            root: None,
            answers: BTreeMap::new(),
        };
        let init = look.process(1)??.ok_or("no process 1")?;
        asked.root = self.processes.root(look.kernel(), init.address)?;
        let processes = look.processes()?;
        if let Some(error) = processes.error {
            return Err(error.into());
        }
        for process in &processes.items {
            asked
                .process(process)
                .map_err(|error| format!("process {}: {error}", process.pid))?;
        }
        Ok(asked.answers)
    }
}

struct Asked<'s> {
    guest: &'s Guest,
    look: PausedSystem<'s>,
    unwinder: KernelUnwinder,
    root: Option<PathRef>,
    answers: BTreeMap<String, String>,
}

impl Asked<'_> {
    fn process(&mut self, process: &TaskInfo) -> Result<(), Failure> {
        let pid = process.pid;
        let (look, view) = (self.look, self.look.kernel());
        let layout = &self.guest.processes;
        let mut put = |name: &str, text: String| {
            self.answers.insert(format!("{pid}/{name}"), text);
        };
        put("stat", stat(self.guest, &look, process)?);
        let program = look.program(process, MOST_TEXT)?.transpose()?;
        put(
            "cmdline",
            whole(program.as_ref().map(|program| &program.arguments))?,
        );
        let mm = process.user_mm();
        let environment = mm
            .map(|mm| layout.environment(view, mm, MOST_TEXT))
            .transpose()?;
        put("environ", whole(environment.as_ref())?);
        put("maps", maps(self.guest, &look, process)?);
        if let Some(path) = program.and_then(|program| program.path) {
            put("exe", escaped(&path));
        }
        let root = self.root;
        let mut directory = |name, found: Result<Option<PathRef>, StructureError>| {
            if let Some(place) = found? {
                let text = layout.paths().text(view, place, root)?;
                put(name, escaped(&text.printed()));
            }
            Ok::<_, Failure>(())
        };
        directory("cwd", layout.working_directory(view, process.address))?;
        directory("root", layout.root(view, process.address))?;
        let files = look.open_files(process)?;
        for open in &files.items {
            let path = look.path_of(open.file.address);
            put(&format!("fd/{}", open.number), escaped(&path));
        }
        if let Some(error) = files.error {
            return Err(error.into());
        }
        self.threads(process)
    }

    fn threads(&mut self, process: &TaskInfo) -> Result<(), Failure> {
        let objects = self.look.objects(process, None)?;
        if let Some(error) = objects.incomplete.first() {
            return Err(error.as_str().into());
        }
        let mut user = objects.unwinder();
        let threads = self.look.threads_of(process)?;
        if let Some(error) = threads.error {
            return Err(error.into());
        }
        for thread in &threads.items {
            let stack = self.look.stack(thread, &self.unwinder, &mut user);
            let mut put = |name: &str, text: String| {
                let path = format!("{}/task/{}/{name}", process.pid, thread.pid);
                self.answers.insert(path, text);
            };
            put("stat", stat(self.guest, &self.look, thread)?);
            let kernel = stack.kernel.as_ref();
            put(
                "stack",
                kernel.map_or_else(String::new, |stack| {
                    kernel_lines(self.look.system().symbols(), &self.unwinder, stack)
                }),
            );
            if let Some(stack) = &stack.user {
                put("user", user_lines(&objects, stack));
            }
        }
        Ok(())
    }
}

/// Returns the line of `/proc/PID/stat`.
fn stat(guest: &Guest, look: &PausedSystem<'_>, task: &TaskInfo) -> Result<String, Failure> {
    let mut fields = vec![UNREAD.to_owned(); STAT_FIELDS];
    // Fields are numbered from 1, as in proc(5).
    let mut put = |number: usize, text: String| {
        if let Some(field) = fields.get_mut(number - 1) {
            *field = text;
        }
    };
    put(1, task.pid.to_string());
    put(2, format!("({})", escaped(&look.name(task))));
    put(3, task.state.letter().to_string());
    put(4, task.parent.to_string());
    put(5, task.process_group.to_string());
    put(6, task.session.to_string());
    put(9, task.flags.to_string());
    put(18, task.priority.to_string());
    put(19, task.nice.to_string());
    put(20, task.threads.to_string());
    put(22, task.start_ticks().to_string());
    put(39, task.cpu.to_string());
    let maps = look.maps(task)?;
    let sizes = maps.iter().flat_map(|maps| &maps.areas);
    let own = sizes.filter(|area| area.area.start < KERNEL_HALF);
    let size: u64 = own.map(|area| area.area.end - area.area.start).sum();
    put(23, size.to_string());
    let mm = task.user_mm();
    let bounds = mm
        .map(|mm| guest.areas.bounds(look.kernel(), mm))
        .transpose()?;
    put(28, bounds.map_or(0, |it| it.start_stack).to_string());
    put(47, bounds.map_or(0, |it| it.start_brk).to_string());
    Ok(fields.join(" ") + "\n")
}

/// Returns the lines of `/proc/PID/maps`.
fn maps(guest: &Guest, look: &PausedSystem<'_>, task: &TaskInfo) -> Result<String, Failure> {
    let mut text = String::new();
    let (Some(maps), Some(mm)) = (look.maps(task)?, task.mm) else {
        return Ok(text);
    };
    if let Some(error) = maps.error {
        return Err(error.into());
    }
    let view = look.kernel();
    let bounds = guest.areas.bounds(view, mm)?;
    for area in &maps.areas {
        let path = |_: Gva| area.name.clone();
        let line = guest.areas.maps_line(view, &bounds, &area.area, path)?;
        text += &escaped(&line);
        text.push('\n');
    }
    Ok(text)
}

/// Returns the lines of `/proc/PID/stack`, with `--` and a reason after an incomplete stack.
fn kernel_lines(symbols: &Symbols, unwinder: &KernelUnwinder, stack: &Stack) -> String {
    let shown = stack
        .frames
        .iter()
        .filter(|frame| !unwinder.is_scheduler(frame));
    let mut text: String = shown
        .map(|frame| format!("[<0>] {}\n", kernel_place(symbols, frame)))
        .collect();
    // For a task that has ended, /proc shows nothing either.
    if !stack.is_reliable() && stack.end != End::NoStack {
        text += &format!("-- {}\n", stack.end);
    }
    text
}

/// Formats an address of a backtrace as the kernel does: by the byte before, for any frame, with
/// the function's size.
fn kernel_place(symbols: &Symbols, frame: &Frame) -> String {
    let Some((symbol, offset)) = symbols.resolve(frame.address.0.wrapping_sub(1)) else {
        return frame.address.to_string();
    };
    let above = symbols
        .iter()
        .filter(|other| !other.absolute && other.address > symbol.address);
    let size = above
        .map(|other| other.address - symbol.address)
        .min()
        .unwrap_or(0);
    format!("{}+{:#x}/{size:#x}", symbol.name, offset + 1)
}

/// Returns one function a line, then `--` and the reason for the end.
fn user_lines(objects: &UserObjects<'_>, stack: &Stack) -> String {
    let mut text = String::new();
    for frame in &stack.frames {
        let address = frame.lookup_address();
        let object = objects.at(address);
        let function = object.and_then(|object| object.resolve(address));
        let place = object.map_or("?".into(), |object| escaped(&object.path));
        let name = function.map_or("?".to_owned(), |(name, _)| name);
        let doubt = if frame.reliable { "" } else { " (a guess)" };
        text += &format!("{name} {place}{doubt}\n");
    }
    text + &format!("-- {}\n", stack.end)
}

/// Returns the text, which must be complete.
fn whole(text: Option<&ProcessText>) -> Result<String, Failure> {
    match text {
        Some(ProcessText {
            missing: Some(error),
            ..
        }) => Err((*error).into()),
        Some(text) if text.cut => Err(format!("it has more than {MOST_TEXT} bytes").into()),
        Some(text) => Ok(escaped(&text.bytes)),
        None => Ok(String::new()),
    }
}

/// Escapes bytes as in the file of expectations: a NUL as `\0`.
pub fn escaped(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace('\0', "\\0")
}
