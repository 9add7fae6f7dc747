//! One process of a guest as a debugger reads it. Each question pauses the guest, which the
//! debugger usually has done already.

use std::cell::RefCell;

use introspect::kernel::task_list::TaskInfo;
use introspect::kernel::vma::{Vma, VmaFlags};
use introspect::stack::frames::SavedRegisters;
use introspect::stack::kernel::KernelUnwinder;
use introspect::system::{Floating, NamedArea, PausedSystem, ProcessFile, Unavailable};
use introspect::x86_64::paging::Translation;
use introspect::x86_64::{GeneralRegisters, PAGE, paging};
use introspect::{CpuRegisters, Gpa, Gva, MemoryView};
use probes::probe::Probe;
use probes::provider::{self, Traceable, uprobe};

use crate::registers::UserRegisters;

/// The maximum number of threads listed.
const MAX_THREADS: usize = 1 << 16;

/// A question about the process that has no answer.
#[derive(Debug, thiserror::Error)]
pub enum DebugError {
    /// The guest's kernel is not known, or cannot be paused.
    #[error("the guest cannot be read: {0}")]
    Guest(String),
    /// The kernel's structures do not tell.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// There is no such process.
    #[error("the guest has no process {pid}; see ps")]
    NoProcess {
        /// The number that was asked for.
        pid: i32,
    },
    /// The process is a thread of the kernel.
    #[error("{pid} is a thread of the kernel, which has no program to debug")]
    KernelThread {
        /// The number that was asked for.
        pid: i32,
    },
    /// The probes of the debugger cannot be enabled.
    #[error("the process cannot be stopped: {0}")]
    Session(String),
}

/// A thread of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thread {
    pub(crate) number: i32,
    /// The name and the state, as ps(1) shows them.
    pub(crate) description: String,
    /// Whether it has begun to exit.
    pub(crate) is_exiting: bool,
    /// Whether a CPU runs it now.
    pub(crate) is_running: bool,
}

/// The flags that a program sets itself: CF, PF, AF, ZF, SF, TF, DF, OF, NT, AC.
const USER_FLAGS: u64 = 0x44dd5;

/// Returns registers with the flags that only the kernel sets as they are `now`.
fn with_kernel_flags(mut wanted: SavedRegisters, now: u64) -> SavedRegisters {
    let flags = wanted.general.rflags;
    wanted.general.rflags = now & !USER_FLAGS | flags & USER_FLAGS;
    wanted
}

/// The place of a thread's general registers.
enum Place {
    /// In the CPU with this number, with the values to put there.
    Cpu(usize, GeneralRegisters),
    /// In memory, with the bytes to put there.
    Memory(Gva, [u8; SavedRegisters::SIZE as usize]),
}

/// A task that has begun to exit (`PF_EXITING`, include/linux/sched.h).
const PF_EXITING: u32 = 4;

/// A process of a guest.
pub(crate) struct Process<'g> {
    guest: &'g dyn Traceable,
    pid: i32,
    /// The walker of kernel stacks, made once a stop.
    unwinder: RefCell<Option<KernelUnwinder>>,
}

impl<'g> Process<'g> {
    /// Returns the process with this number.
    ///
    /// # Errors
    /// If there is none, or it has no program.
    pub(crate) fn new(guest: &'g dyn Traceable, pid: i32) -> Result<Self, DebugError> {
        let process = Self {
            guest,
            pid,
            unwinder: RefCell::new(None),
        };
        process.ask(|_, task| match task.user_mm() {
            Some(_) => Ok(()),
            None => Err(DebugError::KernelThread { pid }),
        })??;
        Ok(process)
    }

    pub(crate) fn guest(&self) -> &'g dyn Traceable {
        self.guest
    }

    /// Forgets the facts that hold only while the guest is paused.
    pub(crate) fn goes_on(&self) {
        self.unwinder.borrow_mut().take();
    }

    /// Returns an answer of the paused guest.
    fn look<T>(&self, ask: impl FnOnce(PausedSystem<'_>) -> T) -> Result<T, DebugError> {
        provider::inspect(self.guest, ask).map_err(DebugError::Guest)
    }

    /// Returns an answer about the process of the paused guest.
    fn ask<T>(&self, ask: impl FnOnce(&PausedSystem<'_>, &TaskInfo) -> T) -> Result<T, DebugError> {
        self.look(|look| {
            let task = look.process(self.pid)?.ok().flatten();
            let task = task.ok_or(DebugError::NoProcess { pid: self.pid })?;
            Ok(ask(&look, &task))
        })?
    }

    /// Returns the threads. The first one has begun the process.
    pub(crate) fn threads(&self) -> Result<Vec<Thread>, DebugError> {
        self.ask(|look, task| {
            let threads = look.threads_of(task)?.items;
            let threads = threads.iter().take(MAX_THREADS).map(|thread| Thread {
                number: thread.pid,
                description: format!(
                    "{} ({})",
                    String::from_utf8_lossy(&look.name(thread)),
                    thread.state.letter()
                ),
                is_exiting: thread.flags & PF_EXITING != 0,
                is_running: look.cpu_of(thread).is_some(),
            });
            Ok(threads.collect())
        })?
    }

    /// Returns the registers of a thread, as far as they are known.
    pub(crate) fn registers(&self, number: i32) -> Result<UserRegisters, DebugError> {
        let mut floating = None;
        let mut registers = self.ask(|look, task| {
            let threads = look.threads_of(task)?.items;
            let Some(thread) = threads.iter().find(|thread| thread.pid == number) else {
                return Ok::<_, DebugError>(UserRegisters::default());
            };
            let saved = self.with_unwinder(look, |unwinder| {
                look.user_registers(thread, unwinder).ok().flatten()
            })?;
            floating = look.floating(thread);
            Ok(UserRegisters {
                saved,
                fs_base: look.fs_base(thread),
                floating: None,
            })
        })??;
        let machine = self.guest.machine();
        registers.floating = match floating {
            Some(Floating::Memory(saved)) => Some(*saved),
            Some(Floating::Cpu(cpu)) => machine.floating(&machine.pause(), cpu),
            None => None,
        };
        Ok(registers)
    }

    /// Asks with the walker of kernel stacks.
    fn with_unwinder<T>(
        &self,
        look: &PausedSystem<'_>,
        ask: impl FnOnce(&KernelUnwinder) -> T,
    ) -> Result<T, DebugError> {
        let mut kept = self.unwinder.borrow_mut();
        let unwinder = match kept.take() {
            Some(unwinder) => unwinder,
            None => {
                let modules = look.modules().map(|modules| modules.items);
                look.kernel_unwinder(&modules.unwrap_or_default())?
            }
        };
        let answer = ask(&unwinder);
        *kept = Some(unwinder);
        Ok(answer)
    }

    /// Replaces the general registers of a thread. Returns whether it did: not if they are unknown.
    pub(crate) fn change_registers(
        &self,
        number: i32,
        wanted: &SavedRegisters,
    ) -> Result<bool, DebugError> {
        let place = self.ask(|look, task| {
            let threads = look.threads_of(task)?.items;
            let Some(thread) = threads.iter().find(|thread| thread.pid == number) else {
                return Ok(None);
            };
            if let Some(cpu) = look.cpu_of(thread)
                && cpu.in_user_mode()
            {
                let wanted = with_kernel_flags(*wanted, cpu.general.rflags);
                let place = |cpu| Place::Cpu(cpu, wanted.general);
                return Ok(look.cpu_number_of(thread).map(place));
            }
            self.with_unwinder(look, |unwinder| {
                let known = look.user_registers(thread, unwinder).ok().flatten()?;
                let at = unwinder.entry_place(look.kernel(), thread.address).ok()?;
                // The registers may be those of an entry on another stack.
                let there = SavedRegisters::read(look.kernel(), at).ok()?;
                let mut bytes = look.kernel().array(at).ok()?;
                with_kernel_flags(*wanted, known.general.rflags).store(&mut bytes);
                (there == known).then_some(Place::Memory(at, bytes))
            })
        })??;
        let machine = self.guest.machine();
        match place {
            None => Ok(false),
            Some(Place::Cpu(cpu, general)) => {
                Ok(machine.change_registers(&machine.pause(), cpu, &general))
            }
            Some(Place::Memory(at, bytes)) => {
                let pieces = self.look(|look| pieces(&look.kernel(), at, &bytes, |_| true))?;
                Ok(self.change(pieces))
            }
        }
    }

    /// Replaces memory of the process. Returns whether it did: not if the process itself could not
    /// write there without a fault.
    pub(crate) fn change_memory(&self, address: u64, bytes: &[u8]) -> Result<bool, DebugError> {
        let pieces = self.ask(|look, task| {
            let view = look.process_view(task)?;
            pieces(&view, Gva(address), bytes, |place| {
                place.user && place.writable
            })
        })?;
        Ok(self.change(pieces))
    }

    /// Replaces physical memory, piece by piece.
    fn change(&self, pieces: Option<Vec<(Gpa, Vec<u8>)>>) -> bool {
        let machine = self.guest.machine();
        let paused = machine.pause();
        pieces.is_some_and(|pieces| {
            pieces
                .iter()
                .all(|(gpa, bytes)| machine.change_memory(&paused, *gpa, bytes))
        })
    }

    /// Reads memory of the process without any traps. Returns the number of bytes up to the first
    /// page that is neither mapped now nor in the file behind it.
    pub(crate) fn read(&self, address: u64, buf: &mut [u8]) -> Result<usize, DebugError> {
        self.ask(|look, task| {
            let Some(view) = look.process_view(task) else {
                return 0;
            };
            let mut areas = None;
            let mut done = 0;
            while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
                let at = address.wrapping_add(done as u64);
                let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
                let length = in_page.min(rest.len());
                let (part, _) = rest.split_at_mut(length);
                let mapped = paging::translate(view.physical(), view.space(), Gva(at));
                let is_read = match mapped {
                    Ok(place) => place.user && self.unpatched(place.gpa, part),
                    Err(_) => {
                        let areas = areas.get_or_insert_with(|| areas_of(look, task));
                        let area = areas.iter().find(|area| area.area.contains(at));
                        area.is_some_and(|area| self.read_behind(look, area, at, part))
                    }
                };
                if !is_read {
                    break;
                }
                done += length;
            }
            done
        })
    }

    /// Reads the part of a page from the file behind a mapping, where the process has not touched
    /// it yet.
    fn read_behind(
        &self,
        look: &PausedSystem<'_>,
        area: &NamedArea,
        at: u64,
        part: &mut [u8],
    ) -> bool {
        let file = cached(look, &area.area);
        let offset = place_in_file(&area.area, at);
        file.zip(offset).is_some_and(|(file, offset)| {
            let read = |gpa, part: &mut [u8]| self.unpatched(gpa, part);
            file.read(offset, part, &read) == part.len()
        })
    }

    /// Reads physical memory as it is without any traps.
    fn unpatched(&self, gpa: Gpa, part: &mut [u8]) -> bool {
        let machine = self.guest.machine();
        machine.traps().read_unpatched(gpa, part).is_ok()
    }

    /// Returns the probe of the instruction at `address`; `None` if it is in no file.
    pub(crate) fn probe_at(&self, address: u64) -> Result<Option<Probe>, DebugError> {
        self.ask(|look, task| {
            let areas = areas_of(look, task);
            let area = areas.iter().find(|area| area.area.contains(address));
            let area =
                area.filter(|area| area.area.file.is_some() && area.area.flags.has(VmaFlags::EXEC));
            let offset = area.and_then(|area| place_in_file(&area.area, address));
            let Some((area, offset)) = area.zip(offset) else {
                return Ok(None);
            };
            let unpatched = |gpa: Gpa, part: &mut [u8]| self.unpatched(gpa, part);
            Ok(uprobe::point(
                look, self.pid, &area.name, offset, &unpatched,
            )?)
        })?
    }

    /// Returns the mappings as `/proc/PID/maps` has them.
    pub(crate) fn maps(&self) -> Result<String, DebugError> {
        self.ask(|look, task| {
            let areas = areas_of(look, task);
            areas.iter().map(line).collect()
        })
    }

    /// Returns the path of the program.
    pub(crate) fn executable(&self) -> Result<Option<Vec<u8>>, DebugError> {
        self.ask(|look, task| {
            let program = look.program(task, 0)?.and_then(Result::ok);
            Ok(program.and_then(|program| program.path))
        })?
    }

    /// Returns the arguments, each with a NUL behind it.
    pub(crate) fn arguments(&self, most: usize) -> Result<Vec<u8>, DebugError> {
        self.ask(|look, task| {
            let program = look.program(task, most)?.and_then(Result::ok);
            Ok(program.map_or_else(Vec::new, |program| program.arguments.bytes))
        })?
    }

    /// Returns the auxiliary vector.
    pub(crate) fn auxiliary_vector(&self) -> Result<Vec<u8>, DebugError> {
        self.ask(|look, task| Ok(look.auxiliary_vector(task)?.unwrap_or_default()))?
    }

    /// Asks of the file at a path of the process: one that it has mapped, or one that was used
    /// lately. Returns `None` if there is none in the guest's memory.
    pub(crate) fn with_file<T>(
        &self,
        path: &[u8],
        ask: impl FnOnce(&ProcessFile<'_>) -> T,
    ) -> Result<Option<T>, DebugError> {
        self.ask(|look, task| {
            let areas = areas_of(look, task);
            let area = areas.iter().find(|area| area.name == path);
            let file = match area.and_then(|area| cached(look, &area.area)) {
                Some(file) => Some(file),
                None => look.file_at(task, path)?,
            };
            Ok(file.as_ref().map(ask))
        })?
    }

    /// Reads bytes of the file at a path, without any traps; see [`ProcessFile::read`].
    pub(crate) fn read_file(
        &self,
        path: &[u8],
        offset: u64,
        buf: &mut [u8],
    ) -> Result<Option<usize>, DebugError> {
        let read = |gpa: Gpa, part: &mut [u8]| self.unpatched(gpa, part);
        self.with_file(path, |file| file.read(offset, buf, &read))
    }
}

/// Returns the physical places of bytes at a virtual address, page by page. `None` if one is not
/// mapped, or not `admitted`.
fn pieces(
    view: &MemoryView<'_>,
    address: Gva,
    bytes: &[u8],
    admitted: impl Fn(&Translation) -> bool,
) -> Option<Vec<(Gpa, Vec<u8>)>> {
    let mut pieces = Vec::new();
    let (mut at, mut rest) = (address.0, bytes);
    while !rest.is_empty() {
        let place = paging::translate(view.physical(), view.space(), Gva(at)).ok()?;
        let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
        let (piece, behind) = rest.split_at(in_page.min(rest.len()));
        if !admitted(&place) {
            return None;
        }
        pieces.push((place.gpa, piece.to_vec()));
        at = at.checked_add(piece.len() as u64)?;
        rest = behind;
    }
    Some(pieces)
}

/// Returns the mappings of the process, as far as they can be read.
fn areas_of(look: &PausedSystem<'_>, task: &TaskInfo) -> Vec<NamedArea> {
    let maps = look.maps(task).ok().flatten();
    maps.map_or_else(Vec::new, |maps| maps.areas)
}

/// Returns the file behind a mapping.
fn cached<'s>(look: &PausedSystem<'s>, area: &Vma) -> Option<ProcessFile<'s>> {
    let layout = look.system().page_cache().ok()?;
    let file = layout.open_file(look.kernel(), area.file?).ok()?;
    Some(ProcessFile::new(*look, file))
}

/// Returns the offset in the file of an address in a mapping.
fn place_in_file(area: &Vma, address: u64) -> Option<u64> {
    area.file?;
    area.file_offset
        .checked_add(address.checked_sub(area.start)?)
}

/// Returns a line of `/proc/PID/maps` (proc_pid_maps(5)).
fn line(area: &NamedArea) -> String {
    let permissions = area.area.flags.permissions();
    let offset = area.area.file.map_or(0, |_| area.area.file_offset);
    format!(
        "{:08x}-{:08x} {} {offset:08x} {:02x}:{:02x} {} {}\n",
        area.area.start,
        area.area.end,
        String::from_utf8_lossy(&permissions),
        area.file.major,
        area.file.minor,
        area.file.inode,
        String::from_utf8_lossy(&area.name),
    )
}
