//! The programs `execk` and `execu`: single instructions on the CPU, each from a state of the
//! caller's choice, with the outcome stored.
//!
//! The caller fills a table in guest memory before the guest runs. [`Slot::all`] returns its slots,
//! and [`Slot::fill`] a slot's bytes. COUNT on the command line is the number of filled slots, from
//! the first on. After the run the same slots hold the outcomes ([`Slot::outcome`]). The machine
//! needs 4 MiB of RAM.
//!
//! Each case is one instruction with landing pads around it:
//!
//! ```text
//! below      pad: stores its own address as RIP, and then the CPU's state
//! entry      the instruction
//! after      pad, behind its last byte
//! above      pad, behind that
//! ```
//!
//! The caller must ensure that the instruction ends at one of the pads, accesses no memory but its
//! case's data, and raises no exception. RSP may be anything that the instruction itself does not
//! use. The flags, and values popped into them, must not contain IF, TF, IOPL, NT or other bits
//! that change how the CPU continues.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::asm::{AssembleError, Assembler, Code};
use super::layout::exec::{
    AFTER, AREA, BEFORE, CASES, CONTINUE, CURRENT, END, REMAINING, SAVED_RSP, TOTAL,
};
use super::layout::{PD_LOW, data};
use super::tables::{LARGE_PAGE, USER};

/// The size of one case in bytes.
pub const SLOT_SIZE: usize = 0x400;
/// The size of a case's data in bytes.
pub const DATA_SIZE: usize = 0x200;
/// The size of a landing pad in bytes.
pub const PAD_SIZE: usize = 18;
/// The size of the longest instruction in bytes.
const LONGEST_INSTRUCTION: usize = 15;
/// The offsets of a case's parts after its code: the state before, the state after, data.
const STATE_BEFORE: usize = 0x80;
const STATE_AFTER: usize = 0x140;
const DATA: usize = 0x200;

/// The number of 64-bit words of a [`State`] in memory.
const WORDS: usize = 18;
/// The offset of the flags among them.
const FLAGS: u64 = 16 * 8;
/// The offset of RIP among them.
const RIP: u64 = 17 * 8;

const _: () = assert!(3 * PAD_SIZE + LONGEST_INSTRUCTION <= STATE_BEFORE);
const _: () = assert!(STATE_BEFORE + 8 * WORDS <= STATE_AFTER && STATE_AFTER + 8 * WORDS <= DATA);
const _: () = assert!(DATA + DATA_SIZE == SLOT_SIZE);
// The area is addressed by 32-bit displacements, and opened to users by one entry.
const _: () = assert!(END <= i32::MAX as u64 && END - AREA == LARGE_PAGE);

/// The registers that an instruction works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct State {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15: by their number in instructions.
    pub registers: [u64; 16],
    /// RFLAGS. In user mode interrupts are on whatever this value is.
    pub rflags: u64,
    /// Before: the instruction's address. After: the address at which execution continued.
    pub rip: u64,
}

/// A slot of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot(u64);

impl Slot {
    /// Returns all slots, in the order in which the guest executes them.
    pub fn all() -> impl Iterator<Item = Self> {
        (CASES..END).step_by(SLOT_SIZE).map(Self)
    }

    /// Returns the guest-physical and virtual address of the slot's [`SLOT_SIZE`] bytes.
    #[must_use]
    pub const fn address(self) -> u64 {
        self.0
    }

    /// Returns the address of the pad below the instruction.
    #[must_use]
    pub const fn below(self) -> u64 {
        self.0
    }

    /// Returns the address of the instruction.
    #[must_use]
    pub const fn entry(self) -> u64 {
        self.0 + PAD_SIZE as u64
    }

    /// Returns the address of the pad behind an instruction of `length` bytes.
    #[must_use]
    pub const fn after(self, length: usize) -> u64 {
        self.entry() + length as u64
    }

    /// Returns the address of the pad behind that.
    #[must_use]
    pub const fn above(self, length: usize) -> u64 {
        self.after(length) + PAD_SIZE as u64
    }

    /// Returns the address of the [`DATA_SIZE`] bytes that the instruction may use.
    #[must_use]
    pub const fn data(self) -> u64 {
        self.0 + DATA as u64
    }

    /// Returns the bytes to write at [`Slot::address`] for one case. The state's `rip` is ignored:
    /// it is [`Slot::entry`].
    ///
    /// # Errors
    /// If the instruction is empty or has more than 15 bytes.
    pub fn fill(
        self,
        instruction: &[u8],
        state: &State,
        data: &[u8; DATA_SIZE],
    ) -> Result<Vec<u8>, FillError> {
        let length = instruction.len();
        if !(1..=LONGEST_INSTRUCTION).contains(&length) {
            return Err(FillError { length });
        }
        let mut bytes = Vec::with_capacity(SLOT_SIZE);
        bytes.extend(pad(self.below()));
        bytes.extend(instruction);
        bytes.extend(pad(self.after(length)));
        bytes.extend(pad(self.above(length)));
        bytes.resize(STATE_BEFORE, 0);
        let words = state.registers.iter().chain([&state.rflags]);
        bytes.extend(words.chain([&self.entry()]).flat_map(|w| w.to_le_bytes()));
        bytes.resize(DATA, 0);
        bytes.extend(data);
        Ok(bytes)
    }

    /// Returns the state that the guest left in a slot, and the case's data.
    #[must_use]
    pub fn outcome(bytes: &[u8; SLOT_SIZE]) -> (State, &[u8]) {
        let (rest, data) = bytes.split_at(DATA);
        let mut words = rest[STATE_AFTER..].as_chunks::<8>().0.iter();
        let mut next = || words.next().map_or(0, |word| u64::from_le_bytes(*word));
        let state = State {
            registers: std::array::from_fn(|_| next()),
            rflags: next(),
            rip: next(),
        };
        (state, data)
    }
}

/// The error for an instruction that does not have 1 to 15 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an instruction of {length} bytes; give 1 to {LONGEST_INSTRUCTION}")]
pub struct FillError {
    /// The given number of bytes.
    pub length: usize,
}

/// Returns `mov dword [AFTER + RIP], address; jmp [CONTINUE]`: neither changes a register or a
/// flag.
fn pad(address: u64) -> [u8; PAD_SIZE] {
    let mut pad = [0; PAD_SIZE];
    let parts: [&[u8]; 5] = [
        &[0xc7, 0x04, 0x25],
        &((AFTER + RIP) as u32).to_le_bytes(),
        &(address as u32).to_le_bytes(),
        &[0xff, 0x24, 0x25],
        &(CONTINUE as u32).to_le_bytes(),
    ];
    for (to, from) in pad.iter_mut().zip(parts.into_iter().flatten()) {
        *to = *from;
    }
    pad
}

/// The registers and their offsets in a [`State`], RSP last: until then it may be in use.
const REGISTERS: [(u64, AsmRegister64); 16] = [
    (0, rax),
    (1, rcx),
    (2, rdx),
    (3, rbx),
    (5, rbp),
    (6, rsi),
    (7, rdi),
    (8, r8),
    (9, r9),
    (10, r10),
    (11, r11),
    (12, r12),
    (13, r13),
    (14, r14),
    (15, r15),
    (4, rsp),
];

/// Assembles `micro_exec`, the program `execk`, and `micro_start_user_exec`, which opens the table
/// to users and enters user mode.
pub(super) fn assemble_kernel(asm: &mut Assembler, user: &Code) -> Result<(), AssembleError> {
    asm.function("micro_exec")?;
    let a = &mut asm.code;
    a.mov(eax, user.address("micro_user_exec_cases")? as u32)?;
    a.call(rax)?;
    a.mov(qword_ptr(data::COUNT), rdi)?;
    a.ret()?;

    asm.function("micro_start_user_exec")?;
    let enter = asm.label("micro_enter_user");
    let a = &mut asm.code;
    a.or(qword_ptr(PD_LOW + AREA / LARGE_PAGE * 8), USER as i32)?;
    a.mov(rax, cr3)?;
    a.mov(cr3, rax)?;
    a.mov(esi, user.address("micro_user_exec")? as u32)?;
    a.jmp(enter)?;
    Ok(())
}

/// Assembles `micro_user_exec_cases`, called in either mode with RDI = COUNT: executes that many
/// cases, and returns their number in RDI. No register is kept but RSP.
pub(super) fn assemble_user(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_user_exec")?;
    let cases = asm.label("micro_user_exec_cases");
    let exit = asm.label("micro_user_exit");
    asm.code.call(cases)?;
    asm.code.jmp(exit)?;

    asm.function("micro_user_exec_cases")?;
    let next = asm.label("micro_user_exec_next");
    let landed = asm.label("micro_user_exec_landed");
    let a = &mut asm.code;
    a.mov(qword_ptr(SAVED_RSP), rsp)?;
    a.mov(qword_ptr(REMAINING), rdi)?;
    a.mov(qword_ptr(TOTAL), rdi)?;
    a.mov(qword_ptr(CURRENT), CASES as i32)?;
    a.lea(rax, ptr(landed))?;
    a.mov(qword_ptr(CONTINUE), rax)?;

    asm.function("micro_user_exec_next")?;
    let a = &mut asm.code;
    a.mov(rsi, qword_ptr(CURRENT))?;
    a.add(rsi, STATE_BEFORE as i32)?;
    a.mov(edi, BEFORE as u32)?;
    a.mov(ecx, WORDS as u32)?;
    a.rep().movsq()?;
    a.mov(esp, (BEFORE + FLAGS) as u32)?;
    a.popfq()?;
    for (index, register) in REGISTERS {
        a.mov(register, qword_ptr(BEFORE + 8 * index))?;
    }
    a.jmp(qword_ptr(BEFORE + RIP))?;

    // Landing pads continue here.
    asm.function("micro_user_exec_landed")?;
    let a = &mut asm.code;
    for (index, register) in REGISTERS {
        a.mov(qword_ptr(AFTER + 8 * index), register)?;
    }
    a.mov(esp, (AFTER + FLAGS + 8) as u32)?;
    a.pushfq()?;
    a.cld()?;
    a.mov(rdi, qword_ptr(CURRENT))?;
    a.add(rdi, STATE_AFTER as i32)?;
    a.mov(esi, AFTER as u32)?;
    a.mov(ecx, WORDS as u32)?;
    a.rep().movsq()?;
    a.add(qword_ptr(CURRENT), SLOT_SIZE as i32)?;
    a.dec(qword_ptr(REMAINING))?;
    a.jnz(next)?;
    a.mov(rsp, qword_ptr(SAVED_RSP))?;
    a.mov(rdi, qword_ptr(TOTAL))?;
    a.ret()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use iced_x86::{Decoder, Mnemonic, OpKind};

    use super::*;

    #[test]
    fn an_instruction_stands_between_pads_that_name_themselves() {
        for length in [1, 15] {
            let slot = Slot::all().last().unwrap();
            let bytes = slot
                .fill(&vec![0x90; length], &State::default(), &[0; DATA_SIZE])
                .unwrap();
            assert_eq!(bytes.len(), SLOT_SIZE);
            assert_eq!(bytes[PAD_SIZE..][..length], vec![0x90; length]);
            for pad in [slot.below(), slot.after(length), slot.above(length)] {
                let code = &bytes[(pad - slot.address()) as usize..];
                let mut decoder = Decoder::with_ip(64, code, pad, 0);
                let (store, jump) = (decoder.decode(), decoder.decode());
                assert_eq!(store.mnemonic(), Mnemonic::Mov);
                assert_eq!(u64::from(store.immediate32()), pad);
                assert_eq!(store.memory_displacement64(), AFTER + RIP);
                assert_eq!(
                    (jump.mnemonic(), jump.op0_kind()),
                    (Mnemonic::Jmp, OpKind::Memory)
                );
                assert_eq!(jump.memory_displacement64(), CONTINUE);
                assert_eq!(decoder.ip(), pad + PAD_SIZE as u64);
            }
        }
    }

    #[test]
    fn no_instruction_and_one_too_long_are_refused() {
        let slot = Slot::all().next().unwrap();
        for length in [0, 16] {
            let filled = slot.fill(&vec![0x90; length], &State::default(), &[0; DATA_SIZE]);
            assert_eq!(filled, Err(FillError { length }));
        }
    }

    #[test]
    fn places_fill_the_area_and_do_not_overlap() {
        let slots: Vec<_> = Slot::all().collect();
        assert_eq!(slots.len(), 2044);
        assert!(
            slots
                .windows(2)
                .all(|pair| pair[0].address() + SLOT_SIZE as u64 == pair[1].address())
        );
        assert!(slots[2043].address() + SLOT_SIZE as u64 == END);
    }
}
