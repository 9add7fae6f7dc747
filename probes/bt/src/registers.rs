//! The registers that `reg` returns, by their names in the CPU's manual and bpftrace.

use introspect::x86_64::GeneralRegisters;

/// A general register.
#[derive(Debug)]
pub(crate) struct Register {
    /// The name: `rax`.
    pub(crate) name: &'static str,
    /// The short name, which also means the whole register: `ax`.
    short: &'static str,
    /// Returns the register's contents.
    pub(crate) value: fn(&GeneralRegisters) -> u64,
}

impl Register {
    /// Returns the register with this name.
    pub(crate) fn of(name: &str) -> Option<&'static Self> {
        let mut all = REGISTERS.iter();
        all.find(|known| [known.name, known.short].contains(&name))
    }
}

const fn register(
    name: &'static str,
    short: &'static str,
    value: fn(&GeneralRegisters) -> u64,
) -> Register {
    Register { name, short, value }
}

/// All registers.
pub(crate) static REGISTERS: [Register; 18] = [
    register("rax", "ax", |all| all.rax),
    register("rbx", "bx", |all| all.rbx),
    register("rcx", "cx", |all| all.rcx),
    register("rdx", "dx", |all| all.rdx),
    register("rsi", "si", |all| all.rsi),
    register("rdi", "di", |all| all.rdi),
    register("rbp", "bp", |all| all.rbp),
    register("rsp", "sp", |all| all.rsp),
    register("r8", "r8", |all| all.r8),
    register("r9", "r9", |all| all.r9),
    register("r10", "r10", |all| all.r10),
    register("r11", "r11", |all| all.r11),
    register("r12", "r12", |all| all.r12),
    register("r13", "r13", |all| all.r13),
    register("r14", "r14", |all| all.r14),
    register("r15", "r15", |all| all.r15),
    register("rip", "ip", |all| all.rip),
    register("rflags", "flags", |all| all.rflags),
];
