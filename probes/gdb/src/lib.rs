//! Serves the GDB remote protocol (GDB manual, appendix E) for one process of a running guest, or
//! for its kernel, from outside: no agent in the guest, and nothing of its process table shows a
//! debugger.
//!
//! The whole machine is paused while the debugger holds the process. Registers of threads that
//! do not run come from where the kernel keeps them, and memory through the process's page tables.
//! Breakpoints are traps in the page cache, like probes of programs, that stop this process alone.
//! A step of one thread is a trap at each instruction that may follow, for that thread only. The
//! guest is only read, unless the client may write.
//!
//! | Module | Does |
//! |---|---|
//! | `serve` | takes bytes of the client and stops of the guest, one at a time |
//! | `target` | answers the protocol's requests, by `gdbstub` |
//! | `debugger` | the state: the hold of the machine, steps, and which hits are reported |
//! | `subject` | the questions about a process or the kernel |
//! | `process` | reads the process: threads, registers, memory, mappings, files |
//! | `kernel` | reads the kernel: tasks, memory, a file of its symbols |
//! | `reader` | reads the structures of the paused guest |
//! | `registers` | the registers in the protocol's order |
//! | `breakpoints` | arms and disarms traps and watchpoints through the engine's sessions |
//! | `called` | lets functions that the client calls return |
//! | `stops` | the hits that wait to be reported, each with its hold of the machine |
//! | `step` | the instructions that may follow one |
//! | `events` | signals, exits, children and new programs of the process |
//! | `fork_exec` | the protocol's words for children and new programs |
//! | `broker` | stands between the client and `gdbstub`, for what that lacks |
//! | `packets` | bytes collected to packets |
//! | `conditions` | conditions of breakpoints, evaluated at the hit |
//! | `files` | files of the guest for the client |

mod breakpoints;
mod broker;
mod called;
mod conditions;
mod debugger;
mod events;
mod files;
mod fork_exec;
mod kernel;
mod packets;
mod process;
mod reader;
mod registers;
mod serve;
mod settle;
mod step;
mod stops;
mod subject;
mod target;

pub use serve::{Attached, End, ServeError};
pub use subject::DebugError;
