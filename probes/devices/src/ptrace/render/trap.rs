//! Decodes the argument of a trap.

use probes::syscall_table;

use crate::ptrace::record::{TRAP_FAULT, TRAP_MASK, TRAP_SYSTEM_CALL, TRAP_WRITE};

/// The cause of a trap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trap {
    /// A page fault.
    Fault {
        /// The address, less its upper four bits.
        address: u64,
        /// Whether the access was a write.
        write: bool,
    },
    /// A system call.
    SystemCall {
        /// The system call's number.
        number: u64,
    },
    /// Another trap.
    Other {
        /// The trap's vector.
        vector: u64,
    },
}

impl Trap {
    /// Decodes an argument as Plan 9's readers do: first as a fault, then as a system call.
    #[must_use]
    pub fn of(argument: u64) -> Self {
        let value = argument & TRAP_MASK;
        if argument & TRAP_FAULT != 0 {
            let write = argument & TRAP_WRITE != 0;
            let address = value;
            Self::Fault { address, write }
        } else if argument & TRAP_SYSTEM_CALL != 0 {
            Self::SystemCall { number: value }
        } else {
            Self::Other { vector: argument }
        }
    }
}

/// Returns the name of a system call, or `sc` and its number if it has none.
pub(super) fn system_call(number: u64) -> String {
    syscall_table::by_number(number)
        .map_or_else(|| format!("sc{number}"), |call| call.name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_say_what_trapped() {
        let fault = |address, write| Trap::Fault { address, write };
        for (argument, expected) in [
            (0x1000_7fff_1234_5678, fault(0x7fff_1234_5678, false)),
            (0x5000_7fff_1234_5678, fault(0x7fff_1234_5678, true)),
            (0x7000_0000_0000_0001, fault(1, true)),
            (0x2000_0000_0000_003b, Trap::SystemCall { number: 59 }),
            (6, Trap::Other { vector: 6 }),
            (
                TRAP_WRITE | 6,
                Trap::Other {
                    vector: TRAP_WRITE | 6,
                },
            ),
        ] {
            assert_eq!(Trap::of(argument), expected, "{argument:#x}");
        }
        assert_eq!(system_call(59), "execve");
        assert_eq!(system_call(100_000), "sc100000");
    }
}
