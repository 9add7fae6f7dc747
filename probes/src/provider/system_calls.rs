//! `syscall::NAME:entry` and `:return`: every system call of x86-64 by its name, seen where all of them pass.
//!
//! That is the entry and the return of `x64_sys_call`, or of `do_syscall_64` in kernels without it. System calls of 32-bit programs go another
//! way and are not among them. exit, exit_group and rt_sigreturn do not come back to their caller and have no return.

use introspect::Gva;
use introspect::kernel::symbols::Symbols;

use crate::engine::SystemCallRegisters;
use crate::kernel_view::KernelView;
use crate::name::{ProbeName, ProbePattern, matches_part};
use crate::probe::{Argument, Moment, Probe, Signature, Target};
use crate::syscall_table::{self, Syscall};

/// Name of the provider.
pub const PROVIDER: &str = "syscall";
/// Functions that all system calls of 64-bit programs pass, the better first.
const FUNCTIONS: [&str; 2] = ["x64_sys_call", "do_syscall_64"];
const REGISTERS: &str = "struct pt_regs *";
/// The kernel's entry for them, where its own stack is in use.
const ENTRY: &str = "entry_SYSCALL_64_after_hwframe";
/// Bytes of it that are looked at.
const ENTRY_CODE: usize = 256;
const CALL: u8 = 0xe8;
/// `mov rdi, rsp` and `mov rsi, rsp`.
const STACK_POINTER_TO: [[u8; 3]; 2] = [[0x48, 0x89, 0xe7], [0x48, 0x89, 0xe6]];

/// Gives the probes that match `pattern` to `each`.
pub fn list(pattern: &ProbePattern, each: &mut dyn FnMut(Probe)) {
    if !pattern.matches_provider(PROVIDER) || !matches_part(&pattern.module, "") {
        return;
    }
    let wanted = syscall_table::all()
        .iter()
        .filter(|call| matches_part(&pattern.function, call.name));
    for call in wanted {
        for moment in [Moment::Entry, Moment::Return] {
            if matches_part(&pattern.name, moment.name()) {
                each(probe(call, moment));
            }
        }
    }
}

/// Names that look like one of a system call, best first.
pub(super) fn nearest(name: &str, count: usize) -> Vec<String> {
    let names = syscall_table::nearest_names(name, count).into_iter();
    names.map(str::to_owned).collect()
}

fn probe(call: &Syscall, moment: Moment) -> Probe {
    let arguments = call.arguments.iter().map(|argument| Argument {
        name: argument.name.to_owned(),
        type_name: argument.type_name.to_owned(),
        is_string: argument.is_string(),
        translated: None,
    });
    Probe {
        name: ProbeName::new(PROVIDER, "", call.name, moment.name()),
        signature: Some(Signature {
            arguments: arguments.collect(),
            returns: (moment == Moment::Return).then(|| "long".to_owned()),
        }),
        target: Target::SystemCall {
            number: call.number,
            moment,
        },
    }
}

/// Where system calls pass, and which of its arguments tell of them.
pub(crate) fn entry_function(view: &KernelView) -> Option<(Gva, SystemCallRegisters)> {
    let (name, address) = FUNCTIONS
        .iter()
        .find_map(|name| Some((*name, view.symbols.address_of(name)?)))?;
    let types = view.btf.as_ref();
    let prototype = types.and_then(|btf| btf.func_proto_args(name).ok());
    // The order of the two has changed once, with Linux 5.13.
    let registers = prototype.and_then(|prototype| {
        let is_registers = |name: &str| name.trim_start_matches("const ") == REGISTERS;
        prototype
            .parameters
            .iter()
            .position(|parameter| is_registers(&parameter.type_name))
    });
    let registers = registers.filter(|at| *at < 2);
    let registers = registers.or(view.system_call_registers).unwrap_or(0);
    let layout = SystemCallRegisters {
        registers,
        number: 1 - registers,
        returns_result: name == FUNCTIONS[0],
    };
    Some((Gva(address), layout))
}

/// Which argument of `do_syscall_64` the kernel's entry makes its stack pointer, the address of `pt_regs`; `None` where its code
/// does not tell. Types may lack the function: pahole leaves out those that the function tracer cannot trace.
pub(crate) fn registers_by_code(
    symbols: &Symbols,
    read: impl FnOnce(Gva, &mut [u8]) -> bool,
) -> Option<usize> {
    let start = symbols.address_of(ENTRY)?;
    let function = symbols.address_of(FUNCTIONS[1])?;
    let mut code = [0; ENTRY_CODE];
    if !read(Gva(start), &mut code) {
        return None;
    }
    let is_call = |(at, bytes): (usize, &[u8])| {
        let [CALL, distance @ ..] = bytes else {
            return false;
        };
        let distance = i32::from_le_bytes(distance.try_into().unwrap_or_default());
        let next = start.wrapping_add(at as u64 + bytes.len() as u64);
        next.wrapping_add_signed(i64::from(distance)) == function
    };
    let call = code.windows(5).enumerate().position(is_call)?;
    let before = code.get(..call)?;
    let sets = |argument: &[u8; 3]| before.windows(3).any(|bytes| bytes == argument);
    match STACK_POINTER_TO.each_ref().map(sets) {
        [true, false] => Some(0),
        [false, true] => Some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::kernel::symbols::SymbolsBuilder;

    use super::*;

    fn names(pattern: &str) -> Vec<String> {
        let mut names = Vec::new();
        list(&ProbePattern::parse(pattern).unwrap(), &mut |probe| {
            names.push(probe.name.to_string());
        });
        names
    }

    #[test]
    fn the_entrys_code_tells_where_the_registers_are() {
        const START: u64 = 0xffff_ffff_8100_0000;
        let mut symbols = SymbolsBuilder::default();
        for (name, address) in [(ENTRY, START), (FUNCTIONS[1], START - 0x1000)] {
            symbols.push(name.as_bytes(), address, b'T', false).unwrap();
        }
        let symbols = symbols.finish(None);
        let of = |moves: &[u8], distance: i32| {
            registers_by_code(&symbols, |address, code| {
                assert_eq!(address, Gva(START));
                let call = [&[CALL][..], &distance.to_le_bytes()].concat();
                let found = [moves, &call].concat();
                code[..found.len()].copy_from_slice(&found);
                true
            })
        };
        // mov rdi, rax; mov rsi, rsp
        let old = [0x48, 0x89, 0xc7, 0x48, 0x89, 0xe6];
        // mov rdi, rsp; movsxd rsi, eax
        let new = [0x48, 0x89, 0xe7, 0x48, 0x63, 0xf0];
        let distance = -0x1000 - 6 - 5;
        assert_eq!(of(&old, distance), Some(1));
        assert_eq!(of(&new, distance), Some(0));
        assert_eq!(of(&old, distance + 1), None, "another function is called");
        assert_eq!(of(&old[..3], distance + 3), None, "neither is set");
        assert_eq!(registers_by_code(&symbols, |_, _| false), None);
    }

    #[test]
    fn system_calls_are_found_by_name() {
        assert_eq!(
            names("syscall:read"),
            ["syscall::read:entry", "syscall::read:return"]
        );
        assert_eq!(
            names("syscall::openat*:entry"),
            ["syscall::openat:entry", "syscall::openat2:entry"]
        );
        assert!(names("syscall:::").len() > 600);
        assert!(names("syscall:raed").is_empty());
        assert_eq!(nearest("openta", 1), ["openat"]);
    }
}
