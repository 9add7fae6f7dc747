//! How far into a function its arguments are sure to be in their registers.

use iced_x86::{Decoder, DecoderOptions, FlowControl, InstructionInfoFactory, OpAccess, Register};

/// The number of bytes of a function that are looked at.
pub(super) const MOST: usize = 16;
/// The registers of arguments (System V ABI for x86-64, 3.2.3).
const REGISTERS: [Register; 6] = [
    Register::RDI,
    Register::RSI,
    Register::RDX,
    Register::RCX,
    Register::R8,
    Register::R9,
];

/// Reads the first instructions of functions.
pub(super) struct Arguments(InstructionInfoFactory);

impl Arguments {
    pub(super) fn new() -> Self {
        Self(InstructionInfoFactory::new())
    }

    /// Returns the address behind the instructions before which the function at `start` has all
    /// arguments in their registers. `code` is its first bytes, which may be none.
    ///
    /// It ends at the first instruction that changes one, or that may go elsewhere: a later one may
    /// come back. A call at the very start is that of the kernel's function tracer, which keeps
    /// them.
    pub(super) fn kept_until(&mut self, code: &[u8], start: u64) -> u64 {
        let code = code.get(..MOST).unwrap_or(code);
        let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
        let mut end = start + 1;
        while decoder.can_decode() {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                break;
            }
            // Before this instruction, nothing has changed.
            end = instruction.ip() + 1;
            let flow = instruction.flow_control();
            let is_tracer = flow == FlowControl::Call && instruction.ip() == start;
            if flow != FlowControl::Next && !is_tracer {
                break;
            }
            let used = self.0.info(&instruction).used_registers();
            let changes = used.iter().any(|used| {
                let is_read = matches!(used.access(), OpAccess::Read | OpAccess::CondRead);
                !is_read && REGISTERS.contains(&used.register().full_register())
            });
            if changes && !is_tracer {
                break;
            }
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_kept_until_one_changes_or_the_code_goes_elsewhere() {
        for (code, kept) in [
            // nopl 0(%rax,%rax,1); push %rbp; mov %rdi,%rbp; mov %rsi,%rdi
            (
                &[
                    0x0f, 0x1f, 0x44, 0, 0, 0x55, 0x48, 0x89, 0xfd, 0x48, 0x89, 0xf7,
                ][..],
                10,
            ),
            // call; push %rbx; test %rdi,%rdi; je
            (
                &[0xe8, 1, 2, 3, 4, 0x53, 0x48, 0x85, 0xff, 0x74, 0x10, 0x90],
                10,
            ),
            // xor %ecx,%ecx
            (&[0x31, 0xc9, 0x90, 0x90], 1),
            (&[0xc3], 1),
            (&[], 1),
            // Sixteen nops, and more.
            (&[0x90; 20], 16),
        ] {
            let found = Arguments::new().kept_until(code, 0x1000);
            assert_eq!(found - 0x1000, kept, "{code:02x?}");
        }
    }
}
