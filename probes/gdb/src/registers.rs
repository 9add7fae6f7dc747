//! The registers of a thread, in the order of the target description (`target.xml`).

use gdbstub::arch::{Arch, Registers};
use introspect::kernel::fpu::FXSAVE;
use introspect::stack::frames::SavedRegisters;
use introspect::x86_64::GeneralRegisters;

/// The registers of x86 in GDB's order: the general ones, RIP, EFLAGS and six segments.
const CORE: usize = 24;
/// The numbers and sizes in bytes of the registers of floating point and vectors: of x87, its
/// control registers, XMM, MXCSR.
const FLOATING: [(usize, usize); 4] = [(8, 10), (8, 4), (16, 16), (1, 4)];
/// The numbers in GDB's order of the registers that a function keeps for its caller: RBX, RBP, RSP,
/// R12 to R15 (System V ABI for x86-64, 3.2.1), and RIP.
const CALLERS: [usize; 8] = [1, 6, 7, 12, 13, 14, 15, 16];
/// The selectors of user mode's data (`__USER_DS`, arch/x86/include/asm/segment.h).
const USER_DS: u64 = 0x2b;

/// x86-64 with Linux's additions.
#[derive(Debug)]
pub(crate) enum Linux64 {}

impl Arch for Linux64 {
    type Usize = u64;
    type Registers = ThreadRegisters;
    type BreakpointKind = usize;
    type RegId = ();

    fn target_description_xml() -> Option<&'static str> {
        Some(include_str!("target.xml"))
    }
}

/// The registers of a thread of a program. A register that is not known is sent as unavailable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ThreadRegisters {
    pub(crate) saved: Option<SavedRegisters>,
    /// Whether only those are known that a function keeps for its caller: RBX, RBP, RSP, R12 to
    /// R15, and RIP.
    pub(crate) is_callers: bool,
    pub(crate) fs_base: Option<u64>,
    /// Floating point and vectors, as FXSAVE stores them.
    pub(crate) floating: Option<[u8; FXSAVE]>,
}

/// Returns the general registers in GDB's order, RIP last.
pub(crate) fn general_in_order(r: &mut GeneralRegisters) -> [&mut u64; 17] {
    [
        &mut r.rax, &mut r.rbx, &mut r.rcx, &mut r.rdx, &mut r.rsi, &mut r.rdi, &mut r.rbp,
        &mut r.rsp, &mut r.r8, &mut r.r9, &mut r.r10, &mut r.r11, &mut r.r12, &mut r.r13,
        &mut r.r14, &mut r.r15, &mut r.rip,
    ]
}

impl ThreadRegisters {
    /// Returns the core registers with their sizes in bytes; nothing if they are not known.
    fn core(&self) -> [(Option<u64>, usize); CORE] {
        let mut core = [(None, 4); CORE];
        let Some(mut saved) = self.saved else {
            core.iter_mut().take(17).for_each(|(_, size)| *size = 8);
            return core;
        };
        let segments = [
            saved.general.rflags,
            u64::from(saved.cs),
            USER_DS,
            0,
            0,
            0,
            0,
        ];
        let is_known = |number: usize| !self.is_callers || CALLERS.contains(&number);
        let mut numbers = 0..;
        let words = general_in_order(&mut saved.general).map(|word| {
            let known = numbers.next().is_some_and(is_known);
            (known.then_some(*word), 8)
        });
        let values = words
            .into_iter()
            .chain(segments.map(|value| (Some(value), 4)));
        core.iter_mut()
            .zip(values)
            .for_each(|(place, value)| *place = value);
        core
    }
}

impl Registers for ThreadRegisters {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        self.saved.map_or(0, |saved| saved.general.rip)
    }

    fn gdb_serialize(&self, mut write_byte: impl FnMut(Option<u8>)) {
        for (value, size) in self.core() {
            write_word(&mut write_byte, value, size);
        }
        match &self.floating {
            Some(area) => floating(area, &mut write_byte),
            None => {
                let bytes: usize = FLOATING.iter().map(|(count, size)| count * size).sum();
                (0..bytes).for_each(|_| write_byte(None));
            }
        }
        let mut write = |value, size| write_word(&mut write_byte, value, size);
        write(self.saved.map(|saved| saved.orig_rax), 8);
        write(self.fs_base, 8);
        write(self.saved.map(|_| 0), 8);
    }

    /// Takes the general registers and the number of the system call; the others cannot be changed.
    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        let floating: usize = FLOATING.iter().map(|(count, size)| count * size).sum();
        let core: usize = self.core().iter().map(|(_, size)| size).sum();
        let word = |at: usize, size: usize| {
            let bytes = bytes.get(at..at.checked_add(size)?)?;
            let mut word = [0; 8];
            let places = word.iter_mut().zip(bytes);
            places.for_each(|(place, byte)| *place = *byte);
            Some(u64::from_le_bytes(word))
        };
        // The client sends all registers for a thread, whatever it was told before.
        let saved = self.saved.insert(SavedRegisters {
            general: GeneralRegisters::default(),
            cs: 0,
            orig_rax: 0,
        });
        let order = general_in_order(&mut saved.general);
        for (number, register) in order.into_iter().enumerate() {
            *register = word(number * 8, 8).ok_or(())?;
        }
        saved.general.rflags = word(17 * 8, 4).ok_or(())?;
        saved.orig_rax = word(core + floating, 8).ok_or(())?;
        Ok(())
    }
}

fn write_word(write_byte: &mut impl FnMut(Option<u8>), value: Option<u64>, size: usize) {
    match value {
        Some(value) => {
            let bytes = value.to_le_bytes().into_iter().take(size);
            bytes.for_each(|byte| write_byte(Some(byte)));
        }
        None => (0..size).for_each(|_| write_byte(None)),
    }
}

/// Sends the registers that FXSAVE has stored, in GDB's order.
fn floating(area: &[u8; FXSAVE], write_byte: &mut impl FnMut(Option<u8>)) {
    let bytes = |at: usize, size: usize| area.iter().skip(at).take(size).copied();
    let half = |at| {
        bytes(at, 2)
            .rev()
            .fold(0, |word, byte| word << 8 | u64::from(byte))
    };
    for register in 0..8 {
        bytes(32 + 16 * register, 10).for_each(|byte| write_byte(Some(byte)));
    }
    let status = half(2);
    let tag = full_tag(area, status);
    let opcode = half(6) & 0x7ff;
    let low = |at| half(at) | half(at + 2) << 16;
    // fctrl, fstat, ftag, fiseg, fioff, foseg, fooff, fop
    for value in [
        half(0),
        status,
        tag,
        half(12),
        low(8),
        half(20),
        low(16),
        opcode,
    ] {
        write_word(write_byte, Some(value), 4);
    }
    bytes(160, 256).for_each(|byte| write_byte(Some(byte)));
    bytes(24, 4).for_each(|byte| write_byte(Some(byte)));
}

/// Returns the tag word of x87, of which FXSAVE stores only which registers are not empty (Intel
/// SDM volume 1, table 10-3).
fn full_tag(area: &[u8; FXSAVE], status: u64) -> u64 {
    const VALID: u64 = 0;
    const ZERO: u64 = 1;
    const SPECIAL: u64 = 2;
    const EMPTY: u64 = 3;
    let used = area.get(4).copied().unwrap_or_default();
    let top = status >> 11 & 7;
    (0..8).fold(0, |tag, physical| {
        let number = (physical + 8 - top) % 8;
        let register = area.iter().skip(32 + 16 * number as usize).take(10);
        let register: Vec<u8> = register.copied().collect();
        let (fraction, exponent) = register.split_at(register.len().min(8));
        let exponent = exponent
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u64::from(*byte))
            & 0x7fff;
        let is_zero = fraction.iter().all(|byte| *byte == 0);
        let is_normal = fraction.last().is_some_and(|byte| byte & 0x80 != 0);
        let kind = match (used >> physical & 1, exponent) {
            (0, _) => EMPTY,
            (_, 0) if is_zero => ZERO,
            (_, 0 | 0x7fff) => SPECIAL,
            _ if !is_normal => SPECIAL,
            _ => VALID,
        };
        tag | kind << (2 * physical)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Returns the sizes in bits of the registers that the description declares, in order.
    fn described() -> Vec<(String, usize)> {
        let value = |line: &str, name: &str| {
            let from = line.find(&format!("{name}=\""))? + name.len() + 2;
            let rest = line.get(from..)?;
            rest.split('"').next().map(str::to_owned)
        };
        let text = Linux64::target_description_xml().unwrap();
        let registers = text.lines().filter(|line| line.contains("<reg "));
        registers
            .map(|line| {
                let bits = value(line, "bitsize").unwrap().parse().unwrap();
                (value(line, "name").unwrap(), bits)
            })
            .collect()
    }

    #[test]
    fn registers_are_sent_in_the_order_and_sizes_of_the_description() {
        let words: Vec<u64> = (0..18).map(|word| 0x1111_0000 + word).collect();
        let saved = SavedRegisters {
            general: introspect::x86_64::GeneralRegisters::from_words(words.try_into().unwrap()),
            cs: 0x33,
            orig_rax: 39,
        };
        let registers = ThreadRegisters {
            saved: Some(saved),
            fs_base: Some(0x7f00_0000_1000),
            ..ThreadRegisters::default()
        };
        let mut bytes = Vec::new();
        registers.gdb_serialize(|byte| bytes.push(byte));
        let mut at = 0;
        let mut seen = std::collections::BTreeMap::new();
        for (name, bits) in described() {
            let part: Option<Vec<u8>> = bytes[at..at + bits / 8].iter().copied().collect();
            at += bits / 8;
            seen.insert(name, part);
        }
        assert_eq!(at, bytes.len());
        let word = |name: &str| {
            let part = seen[name].clone()?;
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(&part);
            Some(u64::from_le_bytes(word))
        };
        for (name, expected) in [
            ("rax", Some(saved.general.rax)),
            ("rbp", Some(saved.general.rbp)),
            ("rsp", Some(saved.general.rsp)),
            ("r15", Some(saved.general.r15)),
            ("rip", Some(saved.general.rip)),
            ("eflags", Some(saved.general.rflags)),
            ("cs", Some(0x33)),
            ("ss", Some(USER_DS)),
            ("orig_rax", Some(39)),
            ("fs_base", Some(0x7f00_0000_1000)),
            ("fctrl", None),
            ("mxcsr", None),
        ] {
            assert_eq!(word(name), expected, "{name}");
        }
        assert!(seen["xmm15"].is_none() && seen["st0"].is_none());
    }
}
