//! The programs that run at hits: from a stopped vCPU to the words of a record in its ring.
//!
//! They are written over [`Moment`], which abstracts a hit, so that tests can make one up. A record
//! has three words: the process number with the event type, the argument, and the nanoseconds from
//! the hit to the record's time.

use std::sync::Arc;

use probes::engine::{HitOutcome, ProbeHit, Program, TaskIdentity};

use super::layout::{Layout, Left, Memory, PORT_NAME};
use super::record::{
    EventType, SleepState, TRAP_FAULT, TRAP_MASK, TRAP_SYSTEM_CALL, TRAP_WRITE, name_argument,
    sleep_argument,
};
use super::selection::Selection;
use super::sleeps::{FRAMES, Sleeps};

/// The number of words of a record in a ring.
pub(super) const WORDS: usize = 3;
/// The number of bytes of a name in a record.
const NAME: usize = 8;
/// The bit of a page fault's error code that says that the access was a write.
const FAULT_WRITE: u64 = 2;
/// The offset of `cs` in `pt_regs`, and its bits that say user mode.
const SAVED_CS: u64 = 136;
const USER_MODE: u8 = 3;
/// The names of ports whose writes are markers.
const MARKED_PORTS: [&[u8]; 2] = [b"trace", b"ptrace"];

/// The part of a hit that the programs use.
pub(super) trait Moment: Memory {
    /// Returns the address of the current `task_struct`, 0 if not known.
    fn task(&self) -> u64;
    /// Returns an argument of the function or of the tracepoint.
    fn argument(&self, number: usize) -> u64;
    /// Returns the address of the last page fault.
    fn fault_address(&self) -> u64;
    /// Reads the kernel's stack, innermost frame first. Returns the number of frames.
    fn stack(&self, frames: &mut [u64]) -> usize;
    /// Puts a record into the ring.
    fn put(&self, words: [u64; WORDS]);
}

impl Memory for ProbeHit<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        ProbeHit::read(self, address, buffer)
    }

    fn read_string(&self, address: u64, buffer: &mut [u8]) -> usize {
        ProbeHit::read_string(self, address, buffer).0
    }
}

impl Moment for ProbeHit<'_> {
    fn task(&self) -> u64 {
        ProbeHit::task(self)
    }

    fn argument(&self, number: usize) -> u64 {
        self.arguments().get(number).copied().unwrap_or_default()
    }

    fn fault_address(&self) -> u64 {
        ProbeHit::fault_address(self)
    }

    fn stack(&self, frames: &mut [u64]) -> usize {
        self.kernel_stack(frames)
    }

    fn put(&self, words: [u64; WORDS]) {
        // The ring counts the records that it drops.
        self.emit(|slot| {
            if !words.iter().all(|word| slot.push_word(*word)) {
                slot.give_up();
            }
        });
    }
}

/// Returns the words of a record.
pub(super) fn words(pid: u32, event: EventType, argument: u64, ahead: u64) -> [u64; WORDS] {
    let first = u64::from(pid) | u64::from(event.number()) << 32;
    [first, argument, ahead]
}

/// The meaning of a hit; the lists name the function's arguments in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventHook {
    /// One task yields the CPU to another: previous, next.
    Switch,
    /// The task is woken.
    Wakes,
    /// The task is woken if it is in one of the states: task, states.
    WakesIf,
    /// The current task has made another.
    Made,
    /// The current task exits.
    Exits,
    /// The task is given a name: task, name, whether it executes another program.
    Renamed,
    /// The current task has begun to execute another program, whose name it has.
    Executes,
    /// A page fault: registers, error code.
    Fault,
    /// A system call, with its number in this argument.
    SystemCall(usize),
    /// An exception with this vector, from user mode: registers.
    Trap(u8),
    /// An interrupt begins.
    InterruptStarts(Vector),
    /// An interrupt ends.
    InterruptEnds(Vector),
    /// An interrupt whose handler has no function of its own: it begins and ends here.
    Interrupt(Vector),
    /// The program has written a marker.
    Marked,
    /// The program writes to a port: file.
    WritesPort,
    /// The task comes to deadline scheduling: run queue, task.
    Admitted,
    /// The task leaves deadline scheduling.
    Expelled,
    /// The timer of a task's period: timer.
    Released,
}

/// The source of an interrupt's vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vector {
    Fixed(u8),
    /// The function's second argument.
    Argument,
}

impl Vector {
    fn of(self, at: &impl Moment) -> u64 {
        match self {
            Self::Fixed(vector) => u64::from(vector),
            Self::Argument => at.argument(1) & 0xff,
        }
    }
}

/// The state that all probes of a device share.
pub(super) struct Context {
    pub(super) layout: Layout,
    pub(super) sleeps: Sleeps,
    pub(super) selection: Arc<Selection>,
}

/// The program of one probe.
pub(super) struct AtHit {
    pub(super) what: EventHook,
    pub(super) context: Arc<Context>,
    /// Whether anything is recorded; if not, tasks are only followed.
    pub(super) records: bool,
}

impl Program for AtHit {
    /// Checks whether the return is wanted. Only an interrupt's is, and that of another task's
    /// interrupt would be a useless hit.
    fn wants_return(&self, who: TaskIdentity) -> bool {
        let selection = &self.context.selection;
        selection.all() || selection.get(who.task).is_some()
    }

    fn run(&self, hit: &ProbeHit<'_>) -> HitOutcome {
        match self.context.see(self.what, hit, self.records) {
            true => HitOutcome::Accepted,
            false => HitOutcome::Filtered,
        }
    }
}

impl Context {
    /// Examines a hit, and puts records into the ring if it is to be recorded. Returns whether
    /// there was anything.
    pub(super) fn see(&self, what: EventHook, at: &impl Moment, records: bool) -> bool {
        let mut log = Log {
            at,
            records,
            any: false,
        };
        match what {
            EventHook::Switch => self.switch(&mut log),
            EventHook::Wakes => self.tell(&mut log, at.argument(0), EventType::Ready, 0),
            EventHook::WakesIf => {
                let waits = || {
                    let state = self.layout.state(at, at.argument(0)).unwrap_or_default();
                    u64::from(state) & at.argument(1) != 0
                };
                self.tell_if(&mut log, at.argument(0), EventType::Ready, 0, waits);
            }
            EventHook::Made => self.made(&mut log),
            EventHook::Exits => {
                self.tell(&mut log, at.task(), EventType::Dead, 0);
                self.selection.remove(at.task());
            }
            EventHook::Renamed => self.renamed(&mut log),
            EventHook::Executes => self.executes(&mut log),
            EventHook::Fault => {
                let write = match at.argument(1) & FAULT_WRITE {
                    0 => 0,
                    _ => TRAP_WRITE,
                };
                let argument = TRAP_FAULT | write | at.fault_address() & TRAP_MASK;
                self.tell(&mut log, at.task(), EventType::Trap, argument);
            }
            EventHook::SystemCall(number) => {
                // The kernel passes an int.
                let number = at.argument(number) & 0xffff_ffff;
                self.tell(
                    &mut log,
                    at.task(),
                    EventType::Trap,
                    TRAP_SYSTEM_CALL | number,
                );
            }
            EventHook::Trap(vector) => {
                let of_program = || {
                    let mut cs = [0];
                    let known = at.read(at.argument(0).wrapping_add(SAVED_CS), &mut cs);
                    known && cs[0] & USER_MODE == USER_MODE
                };
                let vector = u64::from(vector);
                self.tell_if(&mut log, at.task(), EventType::Trap, vector, of_program);
            }
            EventHook::InterruptStarts(vector) => {
                self.tell(&mut log, at.task(), EventType::Ints, vector.of(at));
            }
            EventHook::InterruptEnds(vector) => {
                self.tell(&mut log, at.task(), EventType::Inte, vector.of(at));
            }
            EventHook::Interrupt(vector) => {
                self.tell(&mut log, at.task(), EventType::Ints, vector.of(at));
                self.tell(&mut log, at.task(), EventType::Inte, vector.of(at));
            }
            EventHook::Marked => self.tell(&mut log, at.task(), EventType::User, 0),
            EventHook::WritesPort => {
                let marks = || {
                    let mut room = [0; PORT_NAME];
                    let name = self.layout.port_name(at, at.argument(0), &mut room);
                    // If the ports' names cannot be read, all ports count.
                    name.is_none_or(|name| MARKED_PORTS.contains(&name))
                };
                self.tell_if(&mut log, at.task(), EventType::User, 0, marks);
            }
            // By priority inheritance, a task is lent the class of one that waits for it. That is
            // no admission.
            EventHook::Admitted => {
                let by_itself = || self.layout.has_deadline(at, at.argument(1));
                self.tell_if(&mut log, at.argument(1), EventType::Admit, 0, by_itself);
            }
            EventHook::Expelled => {
                let by_itself = || self.layout.has_runtime(at, at.argument(1));
                self.tell_if(&mut log, at.argument(1), EventType::Expel, 0, by_itself);
            }
            EventHook::Released => self.released(&mut log),
        }
        log.any
    }

    /// Returns the number of a task if it is traced.
    fn traced(&self, at: &impl Moment, task: u64) -> Option<u32> {
        if self.selection.all() {
            return self.layout.pid(at, task);
        }
        let known = self.selection.get(task)?;
        let now = self.layout.identity(at, task)?;
        (known == now).then_some(now.pid)
    }

    /// Records an event of a task if that is traced.
    fn tell<M: Moment>(&self, log: &mut Log<'_, M>, task: u64, event: EventType, argument: u64) {
        self.tell_if(log, task, event, argument, || true);
    }

    /// Records an event of a traced task if another condition holds, which is not evaluated for
    /// other tasks.
    fn tell_if<M: Moment>(
        &self,
        log: &mut Log<'_, M>,
        task: u64,
        event: EventType,
        argument: u64,
        holds: impl FnOnce() -> bool,
    ) {
        if let Some(pid) = self.traced(log.at, task)
            && holds()
        {
            log.put(pid, event, argument);
        }
    }

    fn switch<M: Moment>(&self, log: &mut Log<'_, M>) {
        let at = log.at;
        let (previous, next) = (at.argument(0), at.argument(1));
        if let Some(pid) = self.traced(at, previous)
            && let Some(left) = self.layout.left(at, previous)
        {
            self.left(log, pid, left);
        }
        if let Some(pid) = self.traced(at, next) {
            let event = match self.layout.has_deadline(at, next) {
                true => EventType::Edf,
                false => EventType::Run,
            };
            log.put(pid, event, 0);
        }
    }

    fn left<M: Moment>(&self, log: &mut Log<'_, M>, pid: u32, left: Left) {
        match left {
            Left::Dead => return,
            Left::Ready => return log.put(pid, EventType::Ready, 0),
            Left::SliceUsed => log.put(pid, EventType::Slice, 0),
            Left::Yielded => log.put(pid, EventType::Yield, 0),
            Left::Sleeps | Left::Stopped => {}
        }
        let mut frames = [0; FRAMES];
        let found = log.at.stack(&mut frames);
        let (waits, pc) = self.sleeps.of(frames.get(..found).unwrap_or_default());
        let state = match left {
            Left::Stopped => SleepState::Stopped,
            Left::SliceUsed | Left::Yielded => SleepState::Waitrelease,
            _ => waits,
        };
        log.put(pid, EventType::Sleep, sleep_argument(state, pc));
    }

    fn made<M: Moment>(&self, log: &mut Log<'_, M>) {
        let (at, child) = (log.at, log.at.argument(0));
        let parent = self.selection.get(at.task());
        if let Some(parent) = parent
            && Some(parent) == self.layout.identity(at, at.task())
            && let Some(identity) = self.layout.identity(at, child)
        {
            self.selection.insert(child, identity);
        }
        // The child has its parent's name until it takes another.
        if let Some(pid) = self.traced(at, child) {
            let name = self.layout.comm(at, child).unwrap_or_default();
            log.put(pid, EventType::Name, name_argument(&name));
            log.put(pid, EventType::Ready, 0);
        }
    }

    fn renamed<M: Moment>(&self, log: &mut Log<'_, M>) {
        let at = log.at;
        // Some compilers inline this function into the one for execution, so that name is recorded
        // there.
        if at.argument(2) & 0xff != 0 {
            return;
        }
        if let Some(pid) = self.traced(at, at.argument(0)) {
            let mut name = [0; NAME];
            let length = at.read_string(at.argument(1), &mut name);
            let name = name.get(..length).unwrap_or_default();
            log.put(pid, EventType::Name, name_argument(name));
        }
    }

    fn executes<M: Moment>(&self, log: &mut Log<'_, M>) {
        let (at, task) = (log.at, log.at.task());
        // A thread that executes another program has taken over the number and start of its
        // process's first thread.
        if let Some(known) = self.selection.get(task)
            && let Some(now) = self.layout.identity(at, task)
            && known != now
        {
            self.selection.insert(task, now);
        }
        if let Some(pid) = self.traced(at, task) {
            let name = self.layout.comm(at, task).unwrap_or_default();
            log.put(pid, EventType::Name, name_argument(&name));
        }
    }

    fn released<M: Moment>(&self, log: &mut Log<'_, M>) {
        let Some(released) = self.layout.released(log.at, log.at.argument(0)) else {
            return;
        };
        if let Some(pid) = self.traced(log.at, released.task) {
            log.put(pid, EventType::Release, 0);
            log.put_ahead(pid, EventType::Deadline, released.period_ends);
            if released.is_ready {
                log.put(pid, EventType::Ready, 0);
            }
        }
    }
}

/// The destination of the records of one hit.
struct Log<'m, M> {
    at: &'m M,
    records: bool,
    any: bool,
}

impl<M: Moment> Log<'_, M> {
    fn put(&mut self, pid: u32, event: EventType, argument: u64) {
        self.put_words(words(pid, event, argument, 0));
    }

    /// Puts a record with a time in the future.
    fn put_ahead(&mut self, pid: u32, event: EventType, ahead: u64) {
        self.put_words(words(pid, event, 0, ahead));
    }

    fn put_words(&mut self, words: [u64; WORDS]) {
        if self.records {
            self.at.put(words);
            self.any = true;
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
