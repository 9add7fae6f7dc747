//! The state of a task, as in `/proc/PID/stat`.

/// The values of `__state` and `exit_state` of a task (include/linux/sched.h). These have not moved
/// since Linux 4.14.
const INTERRUPTIBLE: u32 = 0x1;
const UNINTERRUPTIBLE: u32 = 0x2;
const STOPPED: u32 = 0x4;
const TRACED: u32 = 0x8;
const EXIT_DEAD: u32 = 0x10;
const EXIT_ZOMBIE: u32 = 0x20;
const PARKED: u32 = 0x40;
/// With [`UNINTERRUPTIBLE`]: the task does not count as load.
const NO_LOAD: u32 = 0x400;
/// Waiting for a sleeping spin lock (since 5.15), and frozen (since 6.1).
const LOCK_WAIT: u32 = 0x1000;
const FROZEN: u32 = 0x8000;

/// The state of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TaskState {
    /// Running, or ready to run.
    Running,
    /// Sleeping until an event or a signal.
    Sleeping,
    /// Sleeping until an event, usually of a disk.
    DiskSleep,
    /// Stopped by a signal.
    Stopped,
    /// Stopped by its tracer.
    TracingStop,
    /// Being removed.
    Dead,
    /// Ended, but not yet waited for.
    Zombie,
    /// Parked: a kernel thread that is put aside.
    Parked,
    /// Idle: a kernel thread without work.
    Idle,
}

impl TaskState {
    /// Decodes the two state words of a task. The rules are the kernel's `task_state_index`: of
    /// several bits the highest counts.
    #[must_use]
    pub fn new(state: u32, exit_state: u32) -> Self {
        const IDLE: u32 = UNINTERRUPTIBLE | NO_LOAD;
        if state & (LOCK_WAIT | FROZEN) != 0 {
            return Self::DiskSleep;
        }
        if state & IDLE == IDLE {
            return Self::Idle;
        }
        let both = state | exit_state;
        [
            (PARKED, Self::Parked),
            (EXIT_ZOMBIE, Self::Zombie),
            (EXIT_DEAD, Self::Dead),
            (TRACED, Self::TracingStop),
            (STOPPED, Self::Stopped),
            (UNINTERRUPTIBLE, Self::DiskSleep),
            (INTERRUPTIBLE, Self::Sleeping),
        ]
        .into_iter()
        .find(|(bit, _)| both & bit != 0)
        .map_or(Self::Running, |(_, state)| state)
    }

    /// Returns the letter in `/proc/PID/stat`.
    #[must_use]
    pub fn letter(self) -> char {
        match self {
            Self::Running => 'R',
            Self::Sleeping => 'S',
            Self::DiskSleep => 'D',
            Self::Stopped => 'T',
            Self::TracingStop => 't',
            Self::Dead => 'X',
            Self::Zombie => 'Z',
            Self::Parked => 'P',
            Self::Idle => 'I',
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_have_the_letters_of_proc() {
        for (state, exit_state, letter) in [
            (0, 0, 'R'),
            (0x200, 0, 'R'),
            (0x1, 0, 'S'),
            (0x2001, 0, 'S'),
            (0x2, 0, 'D'),
            (0x102, 0, 'D'),
            (0x104, 0, 'T'),
            (0x8, 0, 't'),
            (0x80, 0x10, 'X'),
            (0x80, 0x20, 'Z'),
            (0x80, 0x30, 'Z'),
            (0x40, 0, 'P'),
            (0x402, 0, 'I'),
            (0x2402, 0, 'I'),
            (0x400, 0, 'R'),
            (0x1000, 0, 'D'),
            (0x8000, 0, 'D'),
            (0x8402, 0, 'D'),
        ] {
            let found = TaskState::new(state, exit_state).letter();
            assert_eq!(found, letter, "{state:#x} {exit_state:#x}");
        }
    }
}
