//! The frames of functions in a kernel without unwind information, found in their code.
//!
//! Such a kernel keeps frame pointers. Each instruction's effect on the stack is followed in the
//! order of addresses and along jumps forward, so that the caller is also known before a function
//! has made its frame and after it has removed it. The records are those of ORC.

use std::collections::BTreeMap;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};
use introspect::stack::orc_versions::{Base, OrcEntry, OrcType};

/// The size of a word on the stack, in bytes.
const WORD: i16 = 8;
/// The number of instructions at whose start the code of an entry into the kernel is recognised.
const FIRST: usize = 3;

/// A record from an address on.
pub(super) type Row = (u64, Option<OrcEntry>);

/// The place of a function's frame at an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Frame {
    /// The register from which the caller's stack pointer is counted.
    base: Base,
    /// Its distance in bytes.
    distance: i16,
    /// The place of the caller's RBP, if it is saved, in bytes from the caller's stack pointer.
    saved: Option<i16>,
}

impl Frame {
    /// The frame at a function's first instruction.
    const FIRST: Self = Self {
        base: Base::Sp,
        distance: WORD,
        saved: None,
    };

    /// Returns the frame after an instruction.
    fn after(self, instruction: &Instruction) -> Self {
        let first = instruction.op0_register();
        match (self.base, instruction.mnemonic()) {
            (Base::Sp, Mnemonic::Push) => {
                let distance = self.distance.saturating_add(WORD);
                let saved = self.saved.or((first == Register::RBP).then_some(-distance));
                Self {
                    distance,
                    saved,
                    ..self
                }
            }
            (Base::Sp, Mnemonic::Pop) => Self {
                distance: self.distance.saturating_sub(WORD),
                saved: self.saved.filter(|_| first != Register::RBP),
                ..self
            },
            (Base::Sp, Mnemonic::Sub | Mnemonic::Add) if first == Register::RSP => {
                match moved(instruction) {
                    Some(moved) => Self {
                        distance: self.distance.saturating_sub(moved),
                        ..self
                    },
                    None => self,
                }
            }
            (Base::Sp, Mnemonic::Mov)
                if makes_frame(instruction) && self.saved == Some(-self.distance) =>
            {
                Self {
                    base: Base::Bp,
                    ..self
                }
            }
            (Base::Bp, Mnemonic::Leave) => Self::FIRST,
            (Base::Bp, Mnemonic::Pop) if first == Register::RBP => Self {
                base: Base::Sp,
                distance: self.distance.saturating_sub(WORD),
                saved: None,
            },
            _ => self,
        }
    }

    fn record(self) -> OrcEntry {
        OrcEntry {
            sp_offset: self.distance,
            bp_offset: self.saved.unwrap_or_default(),
            sp: self.base,
            bp: self.saved.map_or(Base::Undefined, |_| Base::PreviousSp),
            kind: OrcType::Call,
            signal: false,
        }
    }
}

/// Returns by how many bytes an addition to RSP, or a subtraction, moves it.
fn moved(instruction: &Instruction) -> Option<i16> {
    let is_number = !matches!(instruction.op1_kind(), OpKind::Register | OpKind::Memory);
    let number = is_number.then(|| instruction.immediate(1).cast_signed())?;
    let number = i16::try_from(number).ok()?;
    match instruction.mnemonic() {
        Mnemonic::Sub => number.checked_neg(),
        _ => Some(number),
    }
}

/// Returns the records of the function at `start`.
pub(super) fn rows(start: u64, code: &[u8]) -> Vec<Row> {
    if is_entry(start, code) {
        return vec![(start, Some(OrcEntry::REGISTERS))];
    }
    let mut frame = Frame::FIRST;
    // The frame in the function's body, which is that of code to which no jump is known.
    let mut body = frame;
    let mut jumps: BTreeMap<u64, Frame> = BTreeMap::new();
    let mut rows = vec![(start, Some(frame.record()))];
    let end = start.saturating_add(code.len() as u64);
    let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        let (at, next) = (instruction.ip(), instruction.next_ip());
        if let Some(known) = jumps.remove(&at)
            && known != frame
        {
            frame = known;
            rows.push((at, Some(frame.record())));
        }
        let before = frame;
        frame = frame.after(&instruction);
        if frame.base == Base::Bp {
            body = frame;
        }
        if let Some(target) = jump_target(&instruction).filter(|target| *target > at) {
            jumps.insert(target, frame);
        }
        if !goes_on(&instruction) {
            frame = body;
        }
        if frame != before && next < end {
            rows.push((next, Some(frame.record())));
        }
    }
    rows
}

/// Returns the address to which an instruction may jump, if it is in the instruction.
fn jump_target(instruction: &Instruction) -> Option<u64> {
    let jumps = matches!(
        instruction.flow_control(),
        FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch
    );
    jumps.then(|| instruction.near_branch_target())
}

/// Checks whether the instruction behind another may be executed after it.
fn goes_on(instruction: &Instruction) -> bool {
    !matches!(
        instruction.flow_control(),
        FlowControl::Return
            | FlowControl::UnconditionalBranch
            | FlowControl::IndirectBranch
            | FlowControl::Exception
            | FlowControl::Interrupt
    )
}

/// Checks whether code is an entry into the kernel rather than a C function.
fn is_entry(start: u64, code: &[u8]) -> bool {
    let decode = || Decoder::with_ip(64, code, start, DecoderOptions::NONE).into_iter();
    let begins = |kind: fn(&Instruction) -> bool| decode().take(FIRST).any(|first| kind(&first));
    // C functions have such instructions in their midst.
    begins(is_of_entry) || (!begins(makes_frame) && decode().any(|any| leaves(&any)))
}

/// Checks whether only the code of an entry into the kernel begins with an instruction: it clears
/// flags, and pushes a number in place of an error code.
fn is_of_entry(instruction: &Instruction) -> bool {
    let pushes = instruction.mnemonic() == Mnemonic::Push;
    let number = !matches!(instruction.op0_kind(), OpKind::Register | OpKind::Memory);
    (pushes && number) || matches!(instruction.mnemonic(), Mnemonic::Cld | Mnemonic::Swapgs)
}

/// Checks whether an instruction makes RBP the frame pointer.
fn makes_frame(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Mov
        && instruction.op0_register() == Register::RBP
        && instruction.op1_register() == Register::RSP
}

/// Checks whether an instruction leaves the kernel.
fn leaves(instruction: &Instruction) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::Iretq | Mnemonic::Sysretq)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 0xffff_ffff_8100_0000;

    fn found(code: &[u8]) -> Vec<(u64, String, i16)> {
        let shown = |(at, record): &Row| {
            let record = record.as_ref()?;
            Some((
                at - START,
                record.sp.place(record.sp_offset),
                record.bp_offset,
            ))
        };
        rows(START, code).iter().filter_map(shown).collect()
    }

    #[test]
    fn the_caller_is_found_at_each_instruction() {
        let sp = |at, distance: i16, saved| (at, format!("sp+{distance}"), saved);
        let bp = |at, saved| (at, "bp+16".to_owned(), saved);
        for (code, expected) in [
            (
                // push rbp; mov rbp,rsp; push rbx; sub rsp,8; ...; pop rbx; pop rbp; ret; nop; ret
                &[
                    0x55, 0x48, 0x89, 0xe5, 0x53, 0x48, 0x83, 0xec, 8, 0x5b, 0x5d, 0xc3, 0x90, 0xc3,
                ][..],
                vec![
                    sp(0, 8, 0),
                    sp(1, 16, -16),
                    bp(4, -16),
                    sp(11, 8, 0),
                    bp(12, -16),
                ],
            ),
            (
                // test edi,edi; je +6; push rbp; mov rbp,rsp; leave; ret; ret
                &[
                    0x85, 0xff, 0x74, 6, 0x55, 0x48, 0x89, 0xe5, 0xc9, 0xc3, 0xc3,
                ],
                vec![
                    sp(0, 8, 0),
                    sp(5, 16, -16),
                    bp(8, -16),
                    sp(9, 8, 0),
                    bp(10, -16),
                    sp(10, 8, 0),
                ],
            ),
            (
                // Without a frame: push r12; sub rsp,0x10; add rsp,0x10; pop r12; ret
                &[
                    0x41, 0x54, 0x48, 0x83, 0xec, 0x10, 0x48, 0x83, 0xc4, 0x10, 0x41, 0x5c, 0xc3,
                ],
                vec![
                    sp(0, 8, 0),
                    sp(2, 16, 0),
                    sp(6, 32, 0),
                    sp(10, 16, 0),
                    sp(12, 8, 0),
                ],
            ),
        ] {
            assert_eq!(found(code), expected, "{code:x?}");
        }
    }

    #[test]
    fn entries_into_the_kernel_have_the_registers_on_the_stack() {
        for (code, expected) in [
            // cld; push -1; call ...
            (
                &[0xfc, 0x6a, 0xff, 0xe8, 0, 0, 0, 0][..],
                OrcType::Registers,
            ),
            // swapgs
            (&[0x0f, 0x01, 0xf8], OrcType::Registers),
            // pop rdi; iretq
            (&[0x5f, 0x48, 0xcf], OrcType::Registers),
            (&[0x55, 0xc3], OrcType::Call),
        ] {
            let first = rows(START, code).first().and_then(|(_, record)| *record);
            assert_eq!(first.map(|record| record.kind), Some(expected), "{code:x?}");
        }
    }
}
