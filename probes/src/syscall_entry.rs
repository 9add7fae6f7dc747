//! The function that all system calls of 64-bit programs pass, and the registers that
//! describe them.

use introspect::Gva;
use introspect::kernel::symbols::Symbols;

/// Functions that all system calls of 64-bit programs pass, the better first.
pub(crate) const FUNCTIONS: [&str; 2] = ["x64_sys_call", "do_syscall_64"];
pub(crate) const REGISTERS: &str = "struct pt_regs *";
/// The kernel's entry for them, where its own stack is in use.
const ENTRY: &str = "entry_SYSCALL_64_after_hwframe";
/// The number of its bytes that are searched.
const ENTRY_CODE: usize = 256;
const CALL: u8 = 0xe8;
/// `mov rdi, rsp` and `mov rsi, rsp`.
const STACK_POINTER_TO: [[u8; 3]; 2] = [[0x48, 0x89, 0xe7], [0x48, 0x89, 0xe6]];

/// The argument registers that describe a system call, at the function that all of them pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SystemCallRegisters {
    /// The one with the address of `pt_regs`.
    pub(crate) registers: usize,
    /// The one with the number.
    pub(crate) number: usize,
    /// Whether the function returns the result; else it is in `pt_regs` then, which the stack
    /// pointer leads to.
    pub(crate) returns_result: bool,
}

/// Which argument of `do_syscall_64` the kernel's entry makes its stack pointer, the address of
/// `pt_regs`; `None` where its code does not tell. Types may lack the function: pahole leaves out
/// those that the function tracer cannot trace.
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
}
