//! One process of a guest as a debugger reads it.

use introspect::kernel::task_list::TaskInfo;
use introspect::kernel::vma::{Vma, VmaFlags};
use introspect::stack::frames::SavedRegisters;
use introspect::system::{Floating, NamedArea, PausedSystem, ProcessFile};
use introspect::x86_64::{GeneralRegisters, paging};
use introspect::{CpuRegisters, Gpa, Gva};
use probes::engine::{Filter, Match};
use probes::probe::Probe;
use probes::provider::{Traceable, uprobe};

use crate::reader::Reader;
use crate::registers::ThreadRegisters;
use crate::subject::{
    DebugError, File, MAX_THREADS, NumberOfHit, Subject, Thread, change, pieces, place_in_file,
    read_pages, unpatched,
};

/// The largest number of bytes of arguments, and of an environment, that are shown.
const MAX_TEXT: usize = 4096;

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
    reader: Reader<'g>,
    pid: i32,
}

impl<'g> Process<'g> {
    /// Returns the process with this number.
    ///
    /// # Errors
    /// If there is none, or it has no program.
    pub(crate) fn new(guest: &'g dyn Traceable, pid: i32) -> Result<Self, DebugError> {
        let process = Self {
            reader: Reader::new(guest),
            pid,
        };
        process.ask(|_, task| match task.user_mm() {
            Some(_) => Ok(()),
            None => Err(DebugError::KernelThread { pid }),
        })??;
        Ok(process)
    }

    /// Returns an answer about the process of the paused guest.
    fn ask<T>(&self, ask: impl FnOnce(&PausedSystem<'_>, &TaskInfo) -> T) -> Result<T, DebugError> {
        self.reader.look(|look| {
            let task = look.process(self.pid)?.ok().flatten();
            let task = task.ok_or(DebugError::NoProcess { pid: self.pid })?;
            Ok(ask(&look, &task))
        })?
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
            let read = |gpa, part: &mut [u8]| unpatched(self.guest(), gpa, part);
            file.read(offset, part, &read) == part.len()
        })
    }

    /// Returns the text of a file of `/proc/PID`, or `None` for one that is not known.
    fn text(&self, name: &[u8]) -> Result<Option<Vec<u8>>, DebugError> {
        let most = match name {
            // It ends with the mappings.
            b"maps" => usize::MAX,
            _ => MAX_TEXT,
        };
        self.ask(|look, task| Ok(look.process_text(task, name, most)?))?
    }

    /// Asks of the file at a path of the process: one that it has mapped, or one that was used
    /// lately. Returns `None` if there is none in the guest's memory.
    fn with_file<T>(
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
}

impl Subject for Process<'_> {
    fn guest(&self) -> &dyn Traceable {
        self.reader.guest()
    }

    fn goes_on(&self) {
        self.reader.goes_on();
    }

    fn filter(&self, thread: Option<i32>) -> Filter {
        let number = |number| u32::try_from(number).unwrap_or_default();
        Filter {
            pids: Match::In(vec![number(self.pid)]),
            tids: thread.map_or(Match::Any, |thread| Match::In(vec![number(thread)])),
            ..Filter::default()
        }
    }

    fn number_of_hit(&self) -> NumberOfHit {
        NumberOfHit::Kernels
    }

    fn threads(&self) -> Result<Vec<Thread>, DebugError> {
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

    fn child_at(&self, address: u64) -> Result<Option<i32>, DebugError> {
        self.reader.look(|look| {
            let processes = look.processes()?.items;
            let child = processes.iter().find(|task| task.address == Gva(address));
            Ok(child.map(|child| child.tgid))
        })?
    }

    fn registers(&self, number: i32) -> Result<ThreadRegisters, DebugError> {
        let mut floating = None;
        let mut registers = self.ask(|look, task| {
            let threads = look.threads_of(task)?.items;
            let Some(thread) = threads.iter().find(|thread| thread.pid == number) else {
                return Ok::<_, DebugError>(ThreadRegisters::default());
            };
            let saved = self.reader.with_unwinder(look, |unwinder| {
                look.user_registers(thread, unwinder).ok().flatten()
            })?;
            floating = look.floating(thread);
            Ok(ThreadRegisters {
                saved,
                fs_base: look.fs_base(thread),
                ..ThreadRegisters::default()
            })
        })??;
        let machine = self.guest().machine();
        registers.floating = match floating {
            Some(Floating::Memory(saved)) => Some(*saved),
            Some(Floating::Cpu(cpu)) => machine.floating(&machine.pause(), cpu),
            None => None,
        };
        Ok(registers)
    }

    fn change_registers(&self, number: i32, wanted: &SavedRegisters) -> Result<bool, DebugError> {
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
            self.reader.with_unwinder(look, |unwinder| {
                let known = look.user_registers(thread, unwinder).ok().flatten()?;
                let at = unwinder.entry_place(look.kernel(), thread.address).ok()?;
                // The registers may be those of an entry on another stack.
                let there = SavedRegisters::read(look.kernel(), at).ok()?;
                let mut bytes = look.kernel().array(at).ok()?;
                with_kernel_flags(*wanted, known.general.rflags).store(&mut bytes);
                (there == known).then_some(Place::Memory(at, bytes))
            })
        })??;
        let machine = self.guest().machine();
        match place {
            None => Ok(false),
            Some(Place::Cpu(cpu, general)) => {
                Ok(machine.change_registers(&machine.pause(), cpu, &general))
            }
            Some(Place::Memory(at, bytes)) => {
                let pieces = |look: PausedSystem<'_>| pieces(&look.kernel(), at, &bytes, |_| true);
                let pieces = self.reader.look(pieces)?;
                Ok(change(self.guest(), pieces))
            }
        }
    }

    fn change_memory(&self, _: i32, address: u64, bytes: &[u8]) -> Result<bool, DebugError> {
        let pieces = self.ask(|look, task| {
            let view = look.process_view(task)?;
            pieces(&view, Gva(address), bytes, |place| {
                place.user && place.writable
            })
        })?;
        Ok(change(self.guest(), pieces))
    }

    fn read(&self, _: i32, address: u64, buf: &mut [u8]) -> Result<usize, DebugError> {
        self.ask(|look, task| {
            let Some(view) = look.process_view(task) else {
                return 0;
            };
            let mut areas = None;
            read_pages(address, buf, |at, part| {
                match paging::translate(view.physical(), view.space(), Gva(at)) {
                    Ok(place) => place.user && unpatched(self.guest(), place.gpa, part),
                    Err(_) => {
                        let areas = areas.get_or_insert_with(|| areas_of(look, task));
                        let area = areas.iter().find(|area| area.area.contains(at));
                        area.is_some_and(|area| self.read_behind(look, area, at, part))
                    }
                }
            })
        })
    }

    fn probe_at(&self, address: u64) -> Result<Option<Probe>, DebugError> {
        self.ask(|look, task| {
            let areas = areas_of(look, task);
            let area = areas.iter().find(|area| area.area.contains(address));
            let area =
                area.filter(|area| area.area.file.is_some() && area.area.flags.has(VmaFlags::EXEC));
            let offset = area.and_then(|area| place_in_file(&area.area, address));
            let Some((area, offset)) = area.zip(offset) else {
                return Ok(None);
            };
            let unpatched = |gpa: Gpa, part: &mut [u8]| unpatched(self.guest(), gpa, part);
            Ok(uprobe::point(
                look, self.pid, &area.name, offset, &unpatched,
            )?)
        })?
    }

    fn executable(&self) -> Result<Option<Vec<u8>>, DebugError> {
        self.ask(|look, task| {
            let program = look.program(task, 0)?.and_then(Result::ok);
            Ok(program.and_then(|program| program.path))
        })?
    }

    fn auxiliary_vector(&self) -> Result<Vec<u8>, DebugError> {
        self.ask(|look, task| Ok(look.auxiliary_vector(task)?.unwrap_or_default()))?
    }

    fn read_file(
        &self,
        path: &[u8],
        offset: u64,
        buf: &mut [u8],
    ) -> Result<Option<usize>, DebugError> {
        let read = |gpa: Gpa, part: &mut [u8]| unpatched(self.guest(), gpa, part);
        self.with_file(path, |file| file.read(offset, buf, &read))
    }

    fn open(&self, path: &[u8]) -> Result<Option<File>, DebugError> {
        if let Some(name) = of_proc(path)
            && let Some(text) = self.text(name)?
        {
            return Ok(Some(File::Text(text)));
        }
        let size = self.with_file(path, |file| file.file.size)?;
        Ok(size.map(|size| File::Cached(path.to_vec(), size)))
    }

    fn link(&self, path: &[u8]) -> Option<Vec<u8>> {
        match of_proc(path) {
            Some(b"exe") => self.executable().ok().flatten(),
            _ => None,
        }
    }
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

/// Returns the name below `/proc/PID` or `/proc/PID/task/TID`, whatever the numbers: the client
/// sees one process only.
fn of_proc(path: &[u8]) -> Option<&[u8]> {
    let name = below_number(path.strip_prefix(b"/proc/")?)?;
    match name.strip_prefix(b"task/") {
        Some(thread) => below_number(thread),
        None => Some(name),
    }
}

/// Returns what stands behind a number and a slash.
fn below_number(path: &[u8]) -> Option<&[u8]> {
    let end = path.iter().position(|byte| *byte == b'/')?;
    let (number, name) = path.split_at(end);
    let is_number = number == b"self" || number.iter().all(u8::is_ascii_digit);
    name.get(1..).filter(|_| is_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_process_are_known_by_any_number() {
        for (path, name) in [
            (&b"/proc/1/maps"[..], Some(&b"maps"[..])),
            (b"/proc/22/exe", Some(b"exe")),
            (b"/proc/1/task/22/maps", Some(b"maps")),
            (b"/proc/self/auxv", Some(b"auxv")),
            (b"/proc/cpuinfo", None),
            (b"/proc/fs/maps", None),
            (b"/bin/proc/1/maps", None),
        ] {
            assert_eq!(of_proc(path), name);
        }
    }
}
