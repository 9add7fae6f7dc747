//! The general registers by their names in the AT&T syntax, in all widths: `rax`, `eax`, `ax`,
//! `al`, `ah`, `r8`, `r8d`, `r8w`, `r8b`.
//!
//! Source: Intel SDM volume 1, section 3.4.1.1. GNU as writes `r8b` for the `r8l` of Intel's
//! manual; both are accepted.

use crate::x86_64::GeneralRegisters;

/// One of the sixteen general registers, or the instruction pointer.
#[allow(missing_docs, reason = "the CPU's own names")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whole {
    Rax,
    Rbx,
    Rcx,
    Rdx,
    Rsi,
    Rdi,
    Rsp,
    Rbp,
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
    Rip,
}

/// The part of the register that a name denotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// All 8 bytes.
    Whole,
    /// The low 4 bytes.
    Double,
    /// The low 2 bytes.
    Word,
    /// The lowest byte.
    Low,
    /// The second lowest byte (`ah`).
    High,
}

/// A register, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Register {
    whole: Whole,
    part: Part,
}

/// The names of the registers without numbers: those of 8, 4 and 2 bytes, the lowest byte and the
/// second lowest.
const NAMED: [(Whole, [&str; 5]); 9] = [
    (Whole::Rax, ["rax", "eax", "ax", "al", "ah"]),
    (Whole::Rbx, ["rbx", "ebx", "bx", "bl", "bh"]),
    (Whole::Rcx, ["rcx", "ecx", "cx", "cl", "ch"]),
    (Whole::Rdx, ["rdx", "edx", "dx", "dl", "dh"]),
    (Whole::Rsi, ["rsi", "esi", "si", "sil", ""]),
    (Whole::Rdi, ["rdi", "edi", "di", "dil", ""]),
    (Whole::Rsp, ["rsp", "esp", "sp", "spl", ""]),
    (Whole::Rbp, ["rbp", "ebp", "bp", "bpl", ""]),
    (Whole::Rip, ["rip", "eip", "", "", ""]),
];
const PARTS: [Part; 5] = [Part::Whole, Part::Double, Part::Word, Part::Low, Part::High];

/// The registers with numbers.
const NUMBERED: [(Whole, &str); 8] = [
    (Whole::R8, "r8"),
    (Whole::R9, "r9"),
    (Whole::R10, "r10"),
    (Whole::R11, "r11"),
    (Whole::R12, "r12"),
    (Whole::R13, "r13"),
    (Whole::R14, "r14"),
    (Whole::R15, "r15"),
];

impl Register {
    /// Returns the register of this name, without the `%`, or `None` for one that is not general
    /// (`xmm0`, `fs`, `st`).
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        if name.is_empty() {
            return None;
        }
        for (whole, names) in NAMED {
            if let Some((part, _)) = PARTS.into_iter().zip(names).find(|(_, n)| *n == name) {
                return Some(Self { whole, part });
            }
        }
        let (digits, part) = match name.as_bytes().last()? {
            b'd' => (name.strip_suffix('d')?, Part::Double),
            b'w' => (name.strip_suffix('w')?, Part::Word),
            b'b' => (name.strip_suffix('b')?, Part::Low),
            b'l' => (name.strip_suffix('l')?, Part::Low),
            _ => (name, Part::Whole),
        };
        let (whole, _) = NUMBERED.into_iter().find(|(_, n)| *n == digits)?;
        Some(Self { whole, part })
    }

    /// Returns its size in bytes: 1, 2, 4 or 8.
    #[must_use]
    pub fn size(self) -> u8 {
        match self.part {
            Part::Whole => 8,
            Part::Double => 4,
            Part::Word => 2,
            Part::Low | Part::High => 1,
        }
    }

    /// Checks whether it is the instruction pointer.
    #[must_use]
    pub fn is_instruction_pointer(self) -> bool {
        self.whole == Whole::Rip
    }

    /// Returns its value, zero-extended.
    #[must_use]
    pub fn value(self, registers: &GeneralRegisters) -> u64 {
        let whole = self.whole_value(registers);
        match self.part {
            Part::Whole => whole,
            Part::Double => whole & 0xffff_ffff,
            Part::Word => whole & 0xffff,
            Part::Low => whole & 0xff,
            Part::High => whole >> 8 & 0xff,
        }
    }

    /// Returns the bits from its lowest up to the whole register's highest, for a size that differs
    /// from that of its name.
    #[must_use]
    pub fn bits_from_lowest(self, registers: &GeneralRegisters) -> u64 {
        match self.part {
            // The bits above are not part of the value.
            Part::High => self.value(registers),
            _ => self.whole_value(registers),
        }
    }

    fn whole_value(self, r: &GeneralRegisters) -> u64 {
        match self.whole {
            Whole::Rax => r.rax,
            Whole::Rbx => r.rbx,
            Whole::Rcx => r.rcx,
            Whole::Rdx => r.rdx,
            Whole::Rsi => r.rsi,
            Whole::Rdi => r.rdi,
            Whole::Rsp => r.rsp,
            Whole::Rbp => r.rbp,
            Whole::R8 => r.r8,
            Whole::R9 => r.r9,
            Whole::R10 => r.r10,
            Whole::R11 => r.r11,
            Whole::R12 => r.r12,
            Whole::R13 => r.r13,
            Whole::R14 => r.r14,
            Whole::R15 => r.r15,
            Whole::Rip => r.rip,
        }
    }
}

/// Returns registers with distinct values.
#[cfg(test)]
pub(super) fn distinct_registers() -> GeneralRegisters {
    let mut words = std::array::from_fn(|number| 0x8182_8384_8586_8700 + number as u64);
    words[17] = 0;
    GeneralRegisters::from_words(words)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_width_of_every_register_is_known() {
        let registers = distinct_registers();
        let read = |name: &str| {
            let register = Register::of(name).unwrap_or_else(|| panic!("{name}"));
            (register.value(&registers), register.size())
        };
        let named = [
            ["rax", "eax", "ax", "al"],
            ["rbx", "ebx", "bx", "bl"],
            ["rcx", "ecx", "cx", "cl"],
            ["rdx", "edx", "dx", "dl"],
            ["rsi", "esi", "si", "sil"],
            ["rdi", "edi", "di", "dil"],
            ["rsp", "esp", "sp", "spl"],
            ["rbp", "ebp", "bp", "bpl"],
        ];
        let numbered = (8..16).map(|n| ["", "d", "w", "b"].map(|part| format!("r{n}{part}")));
        let named = named.into_iter().map(|names| names.map(str::to_owned));
        for (number, [whole, double, word, low]) in (0..).zip(named.chain(numbered)) {
            let value = 0x8182_8384_8586_8700u64 + number;
            assert_eq!(read(&whole), (value, 8), "{whole}");
            assert_eq!(read(&double), (value & 0xffff_ffff, 4), "{double}");
            assert_eq!(read(&word), (value & 0xffff, 2), "{word}");
            assert_eq!(read(&low), (value & 0xff, 1), "{low}");
        }
        for name in ["ah", "bh", "ch", "dh"] {
            assert_eq!(read(name), (0x87, 1), "{name}");
        }
        assert_eq!(read("r15l"), (0x0f, 1));
        assert_eq!(read("rip"), (0x8182_8384_8586_8710, 8));
    }

    #[test]
    fn others_are_none() {
        for name in [
            "", "rax ", "RAX", "r7", "r16", "r8x", "r8bb", "xmm0", "st", "st(0)", "fs", "sih", "d",
            "l", "rd",
        ] {
            assert_eq!(Register::of(name), None, "{name}");
        }
    }
}
