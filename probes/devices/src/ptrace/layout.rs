//! Offsets in the kernel's structures, from its own types, and the reads at hits that use them.
//!
//! Everything is read through [`Memory`], and a hostile guest may have anything there. A value that
//! cannot be read is `None`. No value that is read is trusted as an index, a length or an existing
//! address.

use introspect::kernel::btf::Btf;
use introspect::kernel::layout::{LayoutError, first_offset, offset};
use introspect::kernel::task::COMM_LENGTH;

/// Bits of `task_struct.__state` (include/linux/sched.h): stopped by a signal or a debugger; dead.
const STOPPED: u32 = 0x0004 | 0x0008;
const DEAD: u32 = 0x0080;
/// The policy `SCHED_DEADLINE`.
const DEADLINE: u32 = 6;
/// The greatest length of a port's name that is compared.
pub(super) const PORT_NAME: usize = 16;

/// The guest's memory, by virtual address.
pub(super) trait Memory {
    /// Fills `buffer`. Returns `false` if not all of it could be read.
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;

    /// Reads a string up to its NUL, the buffer's end or the last readable byte. Returns its
    /// length.
    fn read_string(&self, address: u64, buffer: &mut [u8]) -> usize;
}

fn bytes<const N: usize>(memory: &(impl Memory + ?Sized), at: u64, offset: u64) -> Option<[u8; N]> {
    let at = at.checked_add(offset).filter(|at| at >> 63 == 1)?;
    let mut bytes = [0; N];
    memory.read(at, &mut bytes).then_some(bytes)
}

fn word(memory: &(impl Memory + ?Sized), at: u64, offset: u64) -> Option<u32> {
    bytes(memory, at, offset).map(u32::from_le_bytes)
}

fn long(memory: &(impl Memory + ?Sized), at: u64, offset: u64) -> Option<u64> {
    bytes(memory, at, offset).map(u64::from_le_bytes)
}

/// The identity of a task beyond its address, which another task gets after its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    /// The thread's number.
    pub(super) pid: u32,
    /// Nanoseconds from the machine's boot to the task's creation.
    pub(super) start: u64,
}

/// A bit of a structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bit {
    pub(super) byte: u64,
    pub(super) mask: u8,
}

impl Bit {
    fn new(btf: &Btf, path: &str) -> Result<Self, LayoutError> {
        let member = btf.member(path)?;
        match member.bits {
            Some(1) => Ok(Self {
                byte: member.bit_offset / 8,
                mask: 1 << (member.bit_offset % 8),
            }),
            // An int before Linux 4.17.
            _ => Ok(Self {
                byte: member.byte_offset,
                mask: u8::MAX,
            }),
        }
    }

    fn is_set(self, memory: &(impl Memory + ?Sized), at: u64) -> Option<bool> {
        bytes(memory, at, self.byte).map(|[byte]: [u8; 1]| byte & self.mask != 0)
    }
}

/// The offsets that decide whether a task can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Running {
    pub(super) state: u64,
    /// The offset of an int up to Linux 7.1, then of a byte. Its values (`TASK_ON_RQ_QUEUED`,
    /// `TASK_ON_RQ_MIGRATING`) fit in one byte.
    pub(super) on_rq: u64,
    pub(super) policy: u64,
    /// Set while a sleeping task stays on its run queue for a while: since Linux 6.12.
    pub(super) delayed: Option<u64>,
}

/// The offsets of a task's deadline scheduling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Deadline {
    /// The offset of `sched_dl_entity` in `task_struct`.
    pub(super) entity: u64,
    /// The timer's offset in `sched_dl_entity`.
    pub(super) timer: u64,
    pub(super) runtime: u64,
    pub(super) relative: u64,
    pub(super) throttled: Bit,
    pub(super) yielded: Bit,
    /// The bit that says that the entity belongs to no task: since Linux 6.8.
    pub(super) server: Option<Bit>,
}

/// The offsets on the way from an open file to the name of its port
/// (drivers/char/virtio_console.c).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Port {
    pub(super) private_data: u64,
    pub(super) name: u64,
}

/// All offsets. A part that a kernel lacks is the sentence that says why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) pid: u64,
    pub(super) comm: u64,
    pub(super) start: u64,
    pub(super) running: Result<Running, String>,
    pub(super) deadline: Result<Deadline, String>,
    pub(super) port: Option<Port>,
}

impl Layout {
    /// Finds the offsets.
    ///
    /// # Errors
    /// The types do not describe a task's identity.
    pub(super) fn new(btf: &Btf) -> Result<Self, LayoutError> {
        let start = ["task_struct.start_boottime", "task_struct.real_start_time"];
        Ok(Self {
            pid: offset(btf, "task_struct.pid", 4)?,
            comm: offset(btf, "task_struct.comm", COMM_LENGTH as u64)?,
            start: first_offset(btf, &start, 8)?,
            running: running(btf).map_err(|error| error.to_string()),
            deadline: deadline(btf).map_err(|error| error.to_string()),
            port: port(btf).ok(),
        })
    }

    /// Returns the identity of the task at `task`.
    pub(super) fn identity(&self, memory: &(impl Memory + ?Sized), task: u64) -> Option<Identity> {
        Some(Identity {
            pid: word(memory, task, self.pid)?,
            start: long(memory, task, self.start)?,
        })
    }

    /// Returns a thread's number.
    pub(super) fn pid(&self, memory: &(impl Memory + ?Sized), task: u64) -> Option<u32> {
        word(memory, task, self.pid)
    }

    /// Returns the task's name, NUL-padded.
    pub(super) fn comm(
        &self,
        memory: &(impl Memory + ?Sized),
        task: u64,
    ) -> Option<[u8; COMM_LENGTH]> {
        bytes(memory, task, self.comm)
    }

    /// Checks whether the task is scheduled by deadlines.
    pub(super) fn has_deadline(&self, memory: &(impl Memory + ?Sized), task: u64) -> bool {
        let policy = self.running.as_ref().ok().map(|running| running.policy);
        policy.and_then(|policy| word(memory, task, policy)) == Some(DEADLINE)
    }

    /// Checks whether the task has ever been given a runtime for deadline scheduling.
    pub(super) fn has_runtime(&self, memory: &(impl Memory + ?Sized), task: u64) -> bool {
        let runtime = self.deadline.as_ref().ok().and_then(|deadline| {
            long(memory, task.wrapping_add(deadline.entity), deadline.runtime)
        });
        runtime.is_some_and(|runtime| runtime != 0)
    }

    /// Returns the bits of the task's state.
    pub(super) fn state(&self, memory: &(impl Memory + ?Sized), task: u64) -> Option<u32> {
        word(memory, task, self.running.as_ref().ok()?.state)
    }

    /// Returns the state of a task that loses its CPU to another.
    pub(super) fn left(&self, memory: &(impl Memory + ?Sized), task: u64) -> Option<Left> {
        let running = self.running.as_ref().ok()?;
        let state = word(memory, task, running.state)?;
        if state & DEAD != 0 {
            return Some(Left::Dead);
        }
        let delayed = running.delayed.and_then(|at| bytes(memory, task, at));
        let is_delayed = delayed.is_some_and(|[byte]: [u8; 1]| byte != 0);
        if bytes(memory, task, running.on_rq)? == [0] || is_delayed {
            return Some(match state & STOPPED {
                0 => Left::Sleeps,
                _ => Left::Stopped,
            });
        }
        let Some(deadline) = self.deadline.as_ref().ok() else {
            return Some(Left::Ready);
        };
        let entity = task.wrapping_add(deadline.entity);
        let is = |bit: Bit| bit.is_set(memory, entity).unwrap_or_default();
        Some(match (is(deadline.throttled), is(deadline.yielded)) {
            (false, _) => Left::Ready,
            (true, false) => Left::SliceUsed,
            (true, true) => Left::Yielded,
        })
    }

    /// Returns the task whose next period this timer begins, if it is a timer of deadline
    /// scheduling.
    pub(super) fn released(&self, memory: &(impl Memory + ?Sized), timer: u64) -> Option<Released> {
        let deadline = self.deadline.as_ref().ok()?;
        let entity = timer.checked_sub(deadline.timer)?;
        let task = entity.checked_sub(deadline.entity)?;
        let is_server = deadline
            .server
            .is_some_and(|bit| bit.is_set(memory, entity) != Some(false));
        if is_server || !deadline.throttled.is_set(memory, entity)? {
            return None;
        }
        let on_rq: [u8; 1] = bytes(memory, task, self.running.as_ref().ok()?.on_rq)?;
        let released = Released {
            task,
            period_ends: long(memory, entity, deadline.relative)?,
            is_ready: on_rq != [0],
        };
        self.has_deadline(memory, task).then_some(released)
    }

    /// Reads into `room` the name of the port behind an open file. Returns `None` if it cannot be
    /// read.
    pub(super) fn port_name<'r>(
        &self,
        memory: &(impl Memory + ?Sized),
        file: u64,
        room: &'r mut [u8; PORT_NAME],
    ) -> Option<&'r [u8]> {
        let layout = self.port?;
        let port = long(memory, file, layout.private_data)?;
        let name = long(memory, port, layout.name).filter(|at| at >> 63 == 1)?;
        let length = memory.read_string(name, room);
        room.get(..length)
    }
}

/// The state of a task that loses its CPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// The task has ended.
    Dead,
    /// The task waits.
    Sleeps,
    /// The task was stopped.
    Stopped,
    /// The task can go on.
    Ready,
    /// The task has used up its period's runtime, and waits for the next period.
    SliceUsed,
    /// The task has given up the rest of its period, and waits for the next one.
    Yielded,
}

/// A task whose next period begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Released {
    pub(super) task: u64,
    /// Nanoseconds from now to its deadline.
    pub(super) period_ends: u64,
    /// Whether it waits for nothing else.
    pub(super) is_ready: bool,
}

fn running(btf: &Btf) -> Result<Running, LayoutError> {
    let state = offset(btf, "task_struct.__state", 4);
    let on_rq = offset(btf, "task_struct.on_rq", 4);
    Ok(Running {
        // A long before Linux 5.14, whose lower half has all states.
        state: state.or_else(|error| offset(btf, "task_struct.state", 8).map_err(|_| error))?,
        on_rq: on_rq.or_else(|error| offset(btf, "task_struct.on_rq", 1).map_err(|_| error))?,
        policy: offset(btf, "task_struct.policy", 4)?,
        delayed: offset(btf, "task_struct.se.sched_delayed", 1).ok(),
    })
}

fn deadline(btf: &Btf) -> Result<Deadline, LayoutError> {
    Ok(Deadline {
        entity: btf.member("task_struct.dl")?.byte_offset,
        timer: btf.member("sched_dl_entity.dl_timer")?.byte_offset,
        runtime: offset(btf, "sched_dl_entity.dl_runtime", 8)?,
        relative: offset(btf, "sched_dl_entity.dl_deadline", 8)?,
        throttled: Bit::new(btf, "sched_dl_entity.dl_throttled")?,
        yielded: Bit::new(btf, "sched_dl_entity.dl_yielded")?,
        server: Bit::new(btf, "sched_dl_entity.dl_server").ok(),
    })
}

fn port(btf: &Btf) -> Result<Port, LayoutError> {
    Ok(Port {
        private_data: offset(btf, "file.private_data", 8)?,
        name: offset(btf, "port.name", 8)?,
    })
}
