//! The instructions that may be executed after one: where a step of a thread ends.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};
use introspect::x86_64::GeneralRegisters;

/// The number of rt_sigreturn(2).
const RT_SIGRETURN: u64 = 15;
/// The offset from RSP of the saved RIP, where a handler returns (`struct rt_sigframe` behind its
/// return address: `uc_mcontext.ip`; arch/x86/include/uapi/asm/sigcontext.h).
const SAVED_RIP: u64 = 40 + 16 * 8;

/// Returns the addresses at which a thread with these registers may continue after the instruction
/// in `code`. `read` reads a word of its memory.
///
/// They are none if the code is no instruction, or the target is in memory that cannot be read:
/// the instruction faults then.
pub(crate) fn successors(
    code: &[u8],
    registers: &GeneralRegisters,
    fs_base: Option<u64>,
    read: &dyn Fn(u64) -> Option<u64>,
) -> Vec<u64> {
    let mut decoder = Decoder::with_ip(64, code, registers.rip, DecoderOptions::NONE);
    let instruction = decoder.decode();
    let next = instruction.next_ip();
    match instruction.flow_control() {
        _ if instruction.is_invalid() => Vec::new(),
        _ if instruction.code() == Code::Syscall => match registers.rax {
            RT_SIGRETURN => {
                let at = registers.rsp.wrapping_add(SAVED_RIP);
                read(at).into_iter().collect()
            }
            _ => vec![next],
        },
        FlowControl::UnconditionalBranch | FlowControl::Call => {
            vec![instruction.near_branch_target()]
        }
        FlowControl::ConditionalBranch => {
            let target = instruction.near_branch_target();
            match target == next {
                true => vec![next],
                false => vec![next, target],
            }
        }
        FlowControl::IndirectBranch | FlowControl::IndirectCall => {
            target(&instruction, registers, fs_base, read)
                .into_iter()
                .collect()
        }
        FlowControl::Return => read(registers.rsp).into_iter().collect(),
        _ => vec![next],
    }
}

/// Returns the addresses to which the function returns that is entered next: behind a call in
/// `code`, and the return address on the stack.
pub(crate) fn callers(
    code: &[u8],
    registers: &GeneralRegisters,
    read: &dyn Fn(u64) -> Option<u64>,
) -> Vec<u64> {
    let mut decoder = Decoder::with_ip(64, code, registers.rip, DecoderOptions::NONE);
    let next = decoder.decode().next_ip();
    let returned = read(registers.rsp);
    [Some(next), returned].into_iter().flatten().collect()
}

/// Returns the target of a branch that is in a register or in memory.
fn target(
    instruction: &Instruction,
    registers: &GeneralRegisters,
    fs_base: Option<u64>,
    read: &dyn Fn(u64) -> Option<u64>,
) -> Option<u64> {
    match instruction.op0_kind() {
        OpKind::Register => register(registers, instruction.op0_register()),
        OpKind::Memory => {
            let base = |of: Register, _, _| match of {
                Register::FS => fs_base,
                of if of.is_segment_register() => Some(0),
                of => register(registers, of),
            };
            read(instruction.virtual_address(0, 0, base)?)
        }
        _ => None,
    }
}

/// Returns the value of a general register of 64 bits.
fn register(r: &GeneralRegisters, name: Register) -> Option<u64> {
    Some(match name {
        Register::RAX => r.rax,
        Register::RBX => r.rbx,
        Register::RCX => r.rcx,
        Register::RDX => r.rdx,
        Register::RSI => r.rsi,
        Register::RDI => r.rdi,
        Register::RSP => r.rsp,
        Register::RBP => r.rbp,
        Register::R8 => r.r8,
        Register::R9 => r.r9,
        Register::R10 => r.r10,
        Register::R11 => r.r11,
        Register::R12 => r.r12,
        Register::R13 => r.r13,
        Register::R14 => r.r14,
        Register::R15 => r.r15,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: u64 = 0x40_1000;

    #[test]
    fn a_step_ends_where_the_instruction_may_lead() {
        let registers = GeneralRegisters {
            rip: HERE,
            rsp: 0x7ffe_0000,
            rax: 0x40_2000,
            rbx: 0x60_0000,
            rcx: 2,
            ..GeneralRegisters::default()
        };
        let returning = GeneralRegisters {
            rax: RT_SIGRETURN,
            ..registers
        };
        // A word of memory is its own address and one more.
        let read = |address: u64| Some(address + 1).filter(|_| address != 0x60_0000);
        for (name, code, registers, expected) in [
            ("nop", &[0x90][..], registers, vec![HERE + 1]),
            ("jmp", &[0xeb, 0x10], registers, vec![HERE + 0x12]),
            ("je", &[0x74, 0x10], registers, vec![HERE + 2, HERE + 0x12]),
            ("je next", &[0x74, 0], registers, vec![HERE + 2]),
            ("call", &[0xe8, 0, 1, 0, 0], registers, vec![HERE + 0x105]),
            ("call *%rax", &[0xff, 0xd0], registers, vec![0x40_2000]),
            (
                "call *8(%rbx,%rcx,8)",
                &[0xff, 0x54, 0xcb, 8],
                registers,
                vec![0x60_0019],
            ),
            ("jmp *(%rbx), unreadable", &[0xff, 0x23], registers, vec![]),
            (
                "jmp *%fs:0x10",
                &[0x64, 0xff, 0x24, 0x25, 0x10, 0, 0, 0],
                registers,
                vec![0x7011],
            ),
            ("ret", &[0xc3], registers, vec![0x7ffe_0001]),
            ("syscall", &[0x0f, 0x05], registers, vec![HERE + 2]),
            (
                "rt_sigreturn",
                &[0x0f, 0x05],
                returning,
                vec![0x7ffe_0000 + SAVED_RIP + 1],
            ),
            ("rep movsb", &[0xf3, 0xa4], registers, vec![HERE + 2]),
            ("ud2", &[0x0f, 0x0b], registers, vec![HERE + 2]),
            ("nothing", &[], registers, vec![]),
        ] {
            let found = successors(code, &registers, Some(0x7000), &read);
            assert_eq!(found, expected, "{name}");
        }
    }
}
