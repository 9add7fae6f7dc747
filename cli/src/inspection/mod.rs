//! Inspection of the running guest for `ps`, `maps`, `sym` and `stack`, on the machine's side of
//! the control socket. What the memory lacks of a program is read from the guest's disks.
//!
//! The guest is paused for each request, and the answer has the length of the pause. The facts
//! about its kernel are found at the first request and kept.

mod container;
mod files;
mod find;
mod inspected;
mod processes;
mod stored;
mod symbols;

use std::fmt::Display;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use introspect::kernel::list::Partial;
use introspect::kernel::loaded_modules::LoadedModules;
use introspect::kernel::modules::{Module, ModulesError};
use introspect::kernel::running::RunningKernel;
use introspect::stack::frames::{Found, Frame as WalkedFrame, Guess, Stack};
use introspect::system::{NamedArea, PausedSystem, System, Unavailable, UserObjects};
use introspect::user::symfs::Symfs;
use introspect::x86_64::CpuState;
use introspect::{PausedMemory, PhysicalMemory};
use vmm::machine::Paused;
use vmm::{Machine, VcpuRegisters};

use crate::guest_kernel::GuestKernel;
use crate::protocol::error::{ErrorKind, RequestError};
use crate::protocol::inspection::{
    Frame, Mapping, Maps, ProcessName, Processes, Reading, Stacks, Symbols, ThreadStack,
};
use crate::saved_guest::SavedGuest;
use find::{find, without_memory};
pub use inspected::InspectedGuest;
use processes::Descriptions;
use stored::GuestDisks;
use symbols::{kernel_symbols, named_objects, unknown_symbol, user_symbols};

/// The approximate limit of an answer's parts in bytes: a guest's inventions must not fill the
/// host's memory.
const MOST_BYTES: usize = 32 << 20;
/// The largest number of sentences about a process's objects whose functions could not be read.
const MOST_LOST: usize = 20;

/// The running kernel's readers, once they are made.
#[derive(Debug, Default)]
pub struct Inspector {
    system: Mutex<Option<Arc<System>>>,
}

/// A guest, and the readers.
#[derive(Debug)]
pub struct Inspection<'v> {
    guest: Guest<'v>,
    inspector: &'v Inspector,
}

/// A guest that is inspected.
#[derive(Debug, Clone, Copy)]
enum Guest<'v> {
    /// A machine, and its kernel's file if that is at hand.
    Machine(&'v Machine, Option<&'v GuestKernel>),
    /// One that does not run.
    Saved(&'v SavedGuest),
}

impl<'v> Guest<'v> {
    fn memory(self) -> &'v dyn PhysicalMemory {
        match self {
            Self::Machine(machine, _) => machine.ram(),
            Self::Saved(saved) => &*saved.memory,
        }
    }
}

/// A guest that does not run now, and its kernel.
struct Standing<'m> {
    memory: &'m dyn PhysicalMemory,
    /// The pause of a machine.
    paused: Option<Paused>,
    since: Instant,
    cpus: Vec<CpuState>,
    system: Arc<System>,
    /// The disks of a machine.
    disks: Option<GuestDisks<'m>>,
}

impl<'v> Inspection<'v> {
    /// Returns the inspection of a machine that runs `kernel`, if its file is at hand.
    pub fn new(
        machine: &'v Machine,
        kernel: Option<&'v GuestKernel>,
        inspector: &'v Inspector,
    ) -> Self {
        Self {
            guest: Guest::Machine(machine, kernel),
            inspector,
        }
    }

    /// Returns the inspection of a guest that does not run.
    pub fn of_saved(saved: &'v SavedGuest, inspector: &'v Inspector) -> Self {
        Self {
            guest: Guest::Saved(saved),
            inspector,
        }
    }

    /// Returns the processes, or all threads.
    pub fn ps(&self, threads: bool) -> Result<Processes, RequestError> {
        let standing = self.pause()?;
        let mut incomplete = Vec::new();
        let processes = standing.look(|look| {
            let tasks = if threads {
                look.threads()
            } else {
                look.processes()
            };
            let tasks = tasks?;
            incomplete.extend(tasks.error.map(|error| error.to_string()));
            let mut descriptions = Descriptions::new(&look);
            let mut bare = 0;
            let described = tasks.items.iter().map(|task| {
                let whole = descriptions.bytes < MOST_BYTES;
                bare += usize::from(!whole);
                descriptions.process(task, whole)
            });
            let described = described.collect();
            if bare > 0 {
                incomplete.push(format!(
                    "of the last {bare} only the names are shown: the texts of those before have {} bytes",
                    descriptions.bytes
                ));
            }
            incomplete.extend(descriptions.lost());
            Ok::<_, RequestError>(described)
        })?;
        Ok(Processes {
            processes,
            reading: standing.end(incomplete),
        })
    }

    /// Returns the number of the one process of that name.
    pub fn pid(&self, name: &ProcessName) -> Result<i32, RequestError> {
        let standing = self.pause()?;
        let found = standing.look(|look| find(&look, name))?;
        Ok(found.pid)
    }

    /// Returns the mappings of a process.
    pub fn maps(&self, name: &ProcessName) -> Result<Maps, RequestError> {
        let standing = self.pause()?;
        let (task, maps) = standing.look(|look| {
            let task = find(&look, name)?;
            let maps = look.maps(&task)?;
            Ok::<_, RequestError>((task, maps))
        })?;
        let Some(maps) = maps else {
            return Err(without_memory(&task));
        };
        let reading = standing.end(maps.error.map(|error| error.to_string()));
        Ok(Maps {
            pid: task.pid,
            comm: lossy(task.name()),
            mappings: maps.areas.iter().map(mapping).collect(),
            reading,
        })
    }

    /// Returns symbols by address or name, of the kernel or of a process.
    pub fn sym(
        &self,
        what: &[String],
        name: Option<&ProcessName>,
        symfs: Option<PathBuf>,
    ) -> Result<Symbols, RequestError> {
        let Standing {
            paused,
            since,
            cpus,
            system,
            disks,
            memory,
        } = self.pause()?;
        let memory = PausedMemory::new(memory);
        let look = with_disks(system.look(&memory, &cpus), disks.as_ref());
        let mut incomplete = Vec::new();
        let (mut objects, mut loaded) = (None, None);
        match name {
            Some(name) => {
                let found = objects.insert(named_objects(&look, name, symfs, what)?);
                incomplete.append(&mut found.incomplete);
            }
            None => loaded = module_symbols(&look, look.modules(), &mut incomplete),
        }
        // All tables are read. The guest need not wait for the search in them and for similar
        // names.
        let mut reading = go_on(paused, since, incomplete);
        let (mut symbols, mut unknown) = (Vec::new(), Vec::new());
        for word in what {
            let found = match &objects {
                Some(objects) => user_symbols(objects, word),
                None => kernel_symbols(&look, loaded.as_ref(), word),
            };
            if found.is_empty() {
                unknown.push(unknown_symbol(&look, objects.as_ref(), word));
            }
            symbols.extend(found);
        }
        // Incomplete tables matter only if something was not found.
        if !unknown.is_empty() {
            reading
                .incomplete
                .extend(objects.iter().flat_map(lost_symbols));
        }
        Ok(Symbols {
            symbols,
            unknown,
            reading,
        })
    }

    /// Returns the stacks of the threads of a process.
    pub fn stack(
        &self,
        name: &ProcessName,
        symfs: Option<PathBuf>,
    ) -> Result<Stacks, RequestError> {
        let standing = self.pause()?;
        let mut incomplete = Vec::new();
        let (task, threads) = standing.look(|look| {
            let task = find(&look, name)?;
            let symfs = symfs.map(Symfs::new);
            // The kernel's part is available without the program's.
            let objects = look.objects(&task, symfs.as_ref()).unwrap_or_else(|lost| {
                incomplete.push(lost.to_string());
                UserObjects::default()
            });
            let modules = look.modules();
            let loaded = modules.as_ref().map_or(&[][..], |found| &found.items);
            let unwinder = look.kernel_unwinder(loaded)?;
            let modules = module_symbols(&look, modules, &mut incomplete);
            let threads = look.threads_of(&task)?;
            incomplete.extend(threads.error.map(|error| error.to_string()));
            let mut user = objects.unwinder();
            let (mut stacks, mut bytes) = (Vec::new(), 0);
            for thread in &threads.items {
                if bytes >= MOST_BYTES {
                    incomplete.push(format!(
                        "only the first {} of {} threads are shown: their stacks have {bytes} bytes",
                        stacks.len(),
                        threads.items.len()
                    ));
                    break;
                }
                let stack = look.stack(thread, &unwinder, &mut user);
                let end = |stack: &Option<Stack>| {
                    let stack = stack.as_ref().filter(|stack| !stack.end.is_complete());
                    stack.map(|stack| stack.end.to_string())
                };
                let frames = |stack: &Option<Stack>, name: &dyn Fn(&WalkedFrame) -> Frame| {
                    let frames = stack.iter().flat_map(|stack| &stack.frames);
                    frames.map(name).collect()
                };
                let stack = ThreadStack {
                    tid: thread.pid,
                    comm: lossy(thread.name()),
                    state: thread.state.letter(),
                    kernel_end: end(&stack.kernel),
                    user_end: end(&stack.user),
                    kernel: frames(&stack.kernel, &|frame| {
                        kernel_frame(&look, modules.as_ref(), frame)
                    }),
                    user: frames(&stack.user, &|frame| user_frame(&objects, frame)),
                };
                bytes += stack_bytes(&stack);
                stacks.push(stack);
            }
            incomplete.extend(objects.incomplete.iter().cloned());
            incomplete.extend(lost_symbols(&objects));
            Ok::<_, RequestError>((task, stacks))
        })?;
        Ok(Stacks {
            pid: task.pid,
            comm: lossy(task.name()),
            threads,
            reading: standing.end(incomplete),
        })
    }

    /// Returns the kernel stack of a vCPU from kept registers, such as those of a panic. The
    /// machine may have ended. The second value is the reason for an early end of the stack.
    pub fn kernel_stack(
        &self,
        registers: &VcpuRegisters,
    ) -> Result<(Vec<Frame>, Option<String>), RequestError> {
        // In the kernel SWAPGS is done: it does not matter which base would be swapped in.
        let cpu = registers.cpu_state(0);
        self.look(|look| {
            let modules = look.modules();
            let loaded = modules.as_ref().map_or(&[][..], |found| &found.items);
            let unwinder = look.kernel_unwinder(loaded)?;
            // Frames without a name are shown as addresses.
            let modules = module_symbols(&look, modules, &mut Vec::new());
            let stack = look.stack_on(&cpu, &unwinder)?;
            let frames = stack.frames.iter();
            let frames = frames.map(|frame| kernel_frame(&look, modules.as_ref(), frame));
            let end = (!stack.end.is_complete()).then(|| stack.end.to_string());
            Ok((frames.collect(), end))
        })?
    }

    /// Pauses the guest and returns the result of `ask` on it.
    ///
    /// # Errors
    /// If its kernel cannot be recognised.
    pub fn look<T>(&self, ask: impl FnOnce(PausedSystem<'_>) -> T) -> Result<T, RequestError> {
        Ok(self.pause()?.look(ask))
    }

    /// Returns the readers of the kernel's structures.
    ///
    /// # Errors
    /// If it cannot be recognised.
    pub fn system(&self) -> Result<Arc<System>, RequestError> {
        Ok(self.pause()?.system)
    }

    /// Pauses the guest.
    fn pause(&self) -> Result<Standing<'v>, RequestError> {
        let since = Instant::now();
        let disks = match self.guest {
            Guest::Machine(machine, _) => Some(GuestDisks::new(machine)),
            Guest::Saved(_) => None,
        };
        let (paused, cpus) = match self.guest {
            Guest::Machine(machine, _) => {
                let paused = machine.pause();
                let cpus = (0..machine.vcpus()).filter_map(|vcpu| machine.cpu_state(&paused, vcpu));
                let cpus: Vec<CpuState> = cpus.collect();
                (Some(paused), cpus)
            }
            Guest::Saved(saved) => (None, saved.cpus.clone()),
        };
        let known = &self.inspector.system;
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let system = match &*known {
            Some(system) => system.clone(),
            None => {
                let found = Arc::new(find_kernel(self.guest, paused.as_ref(), &cpus)?);
                known.insert(found).clone()
            }
        };
        Ok(Standing {
            memory: self.guest.memory(),
            paused,
            since,
            cpus,
            system,
            disks,
        })
    }
}

impl Standing<'_> {
    fn look<T>(&self, ask: impl FnOnce(PausedSystem<'_>) -> T) -> T {
        let memory = PausedMemory::new(self.memory);
        let look = self.system.look(&memory, &self.cpus);
        ask(with_disks(look, self.disks.as_ref()))
    }

    /// Resumes the guest.
    fn end(self, incomplete: impl IntoIterator<Item = String>) -> Reading {
        go_on(self.paused, self.since, incomplete)
    }
}

/// Adds the disks of a guest that has some.
fn with_disks<'s>(look: PausedSystem<'s>, disks: Option<&'s GuestDisks<'_>>) -> PausedSystem<'s> {
    match disks {
        Some(disks) => look.with_stored(disks),
        None => look,
    }
}

/// Resumes the guest, which was paused at `since`, if it runs at all.
fn go_on(
    paused: Option<Paused>,
    since: Instant,
    incomplete: impl IntoIterator<Item = String>,
) -> Reading {
    let paused = paused.map(drop).map(|()| since.elapsed());
    Reading {
        standstill_us: paused.map_or(0, |paused| {
            u64::try_from(paused.as_micros()).unwrap_or(u64::MAX)
        }),
        incomplete: incomplete.into_iter().collect(),
    }
}

/// Makes the readers of the running kernel: from its file if available, else from the guest's
/// memory.
fn find_kernel(
    guest: Guest<'_>,
    paused: Option<&Paused>,
    cpus: &[CpuState],
) -> Result<System, RequestError> {
    let memory = PausedMemory::new(guest.memory());
    if let (Guest::Machine(machine, Some(kernel)), Some(paused)) = (guest, paused) {
        kernel.symbols().map_err(|error| no_kernel(&error))?;
        let kernel = kernel.place(machine, paused)?.ok_or_else(|| {
            no_kernel(&"the guest's kernel has not booted far enough to be inspected")
        })?;
        return Ok(System::new(&kernel, &memory));
    }
    let kernel = match (guest, paused) {
        (Guest::Saved(saved), _) => kernel_of(saved)?,
        (Guest::Machine(machine, _), paused) => {
            let entry = paused.and_then(|paused| machine.syscall_entry(paused, 0));
            kernel_in(&memory, cpus, entry.map_or(0, |entry| entry.0))?
        }
    };
    Ok(System::new(&kernel, &memory))
}

/// Finds the kernel of a guest that does not run.
fn kernel_of(saved: &SavedGuest) -> Result<RunningKernel, RequestError> {
    if let Some(kernel) = &saved.running {
        return Ok(kernel.clone());
    }
    let memory = PausedMemory::new(&*saved.memory);
    let mut kernel = kernel_in(&memory, &saved.cpus, saved.syscall_entry)?;
    if let (Err(_), Some(Ok(types))) =
        (&kernel.types, saved.kernel.as_ref().map(GuestKernel::types))
    {
        kernel.types = Ok(types.clone());
    }
    Ok(kernel)
}

/// Finds the kernel in memory, by its CPUs.
fn kernel_in(
    memory: &PausedMemory<'_>,
    cpus: &[CpuState],
    entry: u64,
) -> Result<RunningKernel, RequestError> {
    let ended = || RequestError::new(ErrorKind::Ended, "the guest has ended");
    let cpu = cpus.first().ok_or_else(ended)?;
    let view = memory.view(cpu.address_space());
    RunningKernel::find(view, cpu, entry).map_err(|error| {
        no_kernel(&format_args!(
            "no kernel is found in the guest's memory: {error}"
        ))
    })
}

fn no_kernel(why: &dyn Display) -> RequestError {
    RequestError::new(ErrorKind::NoKernel, why)
}

/// Returns the size of texts in bytes.
fn bytes_of<'a>(texts: &[String], more: impl IntoIterator<Item = &'a str>) -> usize {
    let texts = texts.iter().map(|text| text.len() + size_of::<String>());
    texts.sum::<usize>() + more.into_iter().map(str::len).sum::<usize>()
}

fn stack_bytes(stack: &ThreadStack) -> usize {
    let frames = stack.kernel.iter().chain(&stack.user);
    let bytes = |frame: &Frame| {
        let texts = [frame.name.as_deref(), frame.object.as_deref()];
        size_of::<Frame>() + bytes_of(&[], texts.into_iter().flatten())
    };
    frames.map(bytes).sum()
}

fn mapping(area: &NamedArea) -> Mapping {
    let permissions = area.area.flags.permissions();
    Mapping {
        start: area.area.start,
        end: area.area.end,
        permissions: lossy(&permissions),
        offset: if area.area.file.is_some() {
            area.area.file_offset
        } else {
            0
        },
        device: (area.file.major, area.file.minor),
        inode: area.file.inode,
        name: lossy(&area.name),
    }
}

/// Returns the reasons why some functions of a process's objects have no names.
fn lost_symbols(objects: &UserObjects<'_>) -> Vec<String> {
    let generated = objects.lost_generated();
    let lost = objects.objects.iter();
    let lost = lost.flat_map(|object| object.lost_symbols());
    generated.chain(lost).take(MOST_LOST).collect()
}

/// Returns the modules' symbols and reports those that could not be read.
fn module_symbols(
    look: &PausedSystem<'_>,
    modules: Result<Partial<Module, ModulesError>, Unavailable>,
    incomplete: &mut Vec<String>,
) -> Option<LoadedModules> {
    match modules.and_then(|modules| look.module_symbols(modules)) {
        Ok((modules, errors)) => {
            incomplete.extend(errors.iter().map(ToString::to_string));
            Some(modules)
        }
        Err(lost) => {
            incomplete.push(lost.to_string());
            None
        }
    }
}

fn kernel_frame(
    look: &PausedSystem<'_>,
    modules: Option<&LoadedModules>,
    frame: &WalkedFrame,
) -> Frame {
    let behind = frame.address.0.wrapping_sub(frame.lookup_address());
    let place = look.place(frame.lookup_address(), modules);
    Frame {
        address: frame.address.0,
        offset: place
            .as_ref()
            .map_or(0, |place| place.offset.wrapping_add(behind)),
        object: place.as_ref().and_then(|place| place.module.clone()),
        name: place.map(|place| place.name),
        doubt: doubt(frame),
    }
}

fn user_frame(objects: &UserObjects<'_>, frame: &WalkedFrame) -> Frame {
    let behind = frame.address.0.wrapping_sub(frame.lookup_address());
    if let Some(place) = objects.generated_at(frame.lookup_address()) {
        return Frame {
            address: frame.address.0,
            name: Some(place.name),
            offset: place.offset.wrapping_add(behind),
            object: Some(place.file),
            doubt: doubt(frame),
        };
    }
    let object = objects.at(frame.lookup_address());
    let place = object.and_then(|object| object.resolve(frame.lookup_address()));
    let offset = match (&place, object) {
        (Some((_, offset)), _) => offset.wrapping_add(behind),
        (None, Some(object)) => object.base.address_in_file(frame.address),
        (None, None) => 0,
    };
    Frame {
        address: frame.address.0,
        offset,
        object: object.map(|object| lossy(&object.path)),
        name: place.map(|(name, _)| name),
        doubt: doubt(frame),
    }
}

fn doubt(frame: &WalkedFrame) -> Option<String> {
    let text = match frame.found {
        Found::Guess(Guess::FramePointer) => "by its frame pointer",
        Found::Guess(Guess::TopOfStack) => "taken from the top of the stack",
        Found::Guess(Guess::Caller) => "the first call of the function on the stack",
        _ if frame.trampoline.is_some() && !frame.reliable => "its return address was replaced",
        _ => return None,
    };
    Some(text.to_owned())
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
