//! Children of the process and programs that it executes, as the client learns of them: "fork
//! Events" and "exec Events" of the protocol (GDB manual, "Stop Reply Packets" of appendix E).
//!
//! `gdbstub` has no report of a new program, and none of a child that is another process.

use std::fmt::Write as _;

use introspect::stack::frames::SavedRegisters;

/// The number by which `gdbstub` calls the process.
pub(crate) const OWN: u64 = 1;
/// The system calls that make a process (arch/x86/entry/syscalls/syscall_64.tbl).
const CLONE: u64 = 56;
const VFORK: u64 = 58;
const CLONE3: u64 = 435;
/// The flag of a clone whose parent waits for the child's program or end
/// (include/uapi/linux/sched.h).
const CLONE_VFORK: u64 = 0x4000;

/// The events of which a client takes reports, by its features `fork-events` and `exec-events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct EventFeatures {
    pub(crate) forks: bool,
    pub(crate) execs: bool,
}

/// An event that stops the process, behind a report for which `gdbstub` has no words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StopEvent {
    /// A thread has made a process.
    Child {
        thread: i32,
        child: i32,
        /// Whether the thread waits until the child has a program of its own.
        waits: bool,
    },
    /// A thread has executed the program at a path.
    Program { thread: i32, path: Vec<u8> },
}

impl StopEvent {
    /// Returns the report's body.
    pub(crate) fn report(&self) -> String {
        match self {
            Self::Child {
                thread,
                child,
                waits,
            } => {
                let kind = if *waits { "vfork" } else { "fork" };
                format!("T05{kind}:p{child:x}.{child:x};thread:p{OWN:x}.{thread:x};")
            }
            Self::Program { thread, path } => {
                let mut report = "T05exec:".to_owned();
                for byte in path {
                    // Writing to a text does not fail.
                    let _ = write!(report, "{byte:02x}");
                }
                let _ = write!(report, ";thread:p{OWN:x}.{thread:x};");
                report
            }
        }
    }
}

/// Checks whether a thread with these registers waits in its system call for a child's program.
/// `read` reads a word of its memory.
pub(crate) fn waits_for_child(
    saved: &SavedRegisters,
    read: impl FnOnce(u64) -> Option<u64>,
) -> bool {
    let first = saved.general.rdi;
    let flags = match saved.orig_rax {
        VFORK => return true,
        CLONE => Some(first),
        CLONE3 => read(first),
        _ => None,
    };
    flags.is_some_and(|flags| flags & CLONE_VFORK != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use introspect::x86_64::GeneralRegisters;

    #[test]
    fn a_parent_waits_if_it_says_so() {
        for (orig_rax, rdi, there, expected) in [
            (VFORK, 0, None, true),
            (57, CLONE_VFORK, None, false),
            (CLONE, CLONE_VFORK | 0x11, None, true),
            (CLONE, 0x120_0011, None, false),
            (CLONE3, 0x1000, Some(CLONE_VFORK), true),
            (CLONE3, 0x1000, Some(0), false),
            (CLONE3, 0x1000, None, false),
        ] {
            let general = GeneralRegisters {
                rdi,
                ..GeneralRegisters::default()
            };
            let saved = SavedRegisters {
                general,
                cs: 0x33,
                orig_rax,
            };
            assert_eq!(
                waits_for_child(&saved, |_| there),
                expected,
                "{orig_rax} {rdi:#x}"
            );
        }
    }
}
