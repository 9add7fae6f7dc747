//! The registers of a thread, in the order of the target description (`target.xml`).

use gdbstub::arch::{Arch, Registers};
use introspect::stack::frames::SavedRegisters;

/// The registers of x86 in GDB's order: the general ones, RIP, EFLAGS and six segments.
const CORE: usize = 24;
/// The sizes in bytes of the registers of floating point and vectors, which are not known.
const FLOATING: [(usize, usize); 4] = [(8, 10), (8, 4), (16, 16), (1, 4)];
/// The selectors of user mode's data (`__USER_DS`, arch/x86/include/asm/segment.h).
const USER_DS: u64 = 0x2b;

/// x86-64 with Linux's additions.
#[derive(Debug)]
pub(crate) enum Linux64 {}

impl Arch for Linux64 {
    type Usize = u64;
    type Registers = UserRegisters;
    type BreakpointKind = usize;
    type RegId = ();

    fn target_description_xml() -> Option<&'static str> {
        Some(include_str!("target.xml"))
    }
}

/// The registers of a thread of a program. A register that is not known is sent as unavailable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct UserRegisters {
    pub(crate) saved: Option<SavedRegisters>,
    pub(crate) fs_base: Option<u64>,
}

impl UserRegisters {
    /// Returns the core registers with their sizes in bytes; nothing if they are not known.
    fn core(&self) -> [(Option<u64>, usize); CORE] {
        let saved = self.saved.as_ref();
        let general = saved.map(|saved| &saved.general);
        let word = |of: fn(&introspect::x86_64::GeneralRegisters) -> u64| (general.map(of), 8);
        let segment = |value: u64| (saved.map(|_| value), 4);
        let cs = saved.map_or(0, |saved| u64::from(saved.cs));
        [
            word(|r| r.rax),
            word(|r| r.rbx),
            word(|r| r.rcx),
            word(|r| r.rdx),
            word(|r| r.rsi),
            word(|r| r.rdi),
            word(|r| r.rbp),
            word(|r| r.rsp),
            word(|r| r.r8),
            word(|r| r.r9),
            word(|r| r.r10),
            word(|r| r.r11),
            word(|r| r.r12),
            word(|r| r.r13),
            word(|r| r.r14),
            word(|r| r.r15),
            word(|r| r.rip),
            (general.map(|r| r.rflags), 4),
            segment(cs),
            segment(USER_DS),
            segment(0),
            segment(0),
            segment(0),
            segment(0),
        ]
    }
}

impl Registers for UserRegisters {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        self.saved.map_or(0, |saved| saved.general.rip)
    }

    fn gdb_serialize(&self, mut write_byte: impl FnMut(Option<u8>)) {
        let mut write = |value: Option<u64>, size: usize| match value {
            Some(value) => {
                let bytes = value.to_le_bytes();
                bytes
                    .into_iter()
                    .take(size)
                    .for_each(|byte| write_byte(Some(byte)));
            }
            None => (0..size).for_each(|_| write_byte(None)),
        };
        for (value, size) in self.core() {
            write(value, size);
        }
        for (count, size) in FLOATING {
            (0..count).for_each(|_| write(None, size));
        }
        write(self.saved.map(|saved| saved.orig_rax), 8);
        write(self.fs_base, 8);
        write(self.saved.map(|_| 0), 8);
    }

    fn gdb_deserialize(&mut self, _: &[u8]) -> Result<(), ()> {
        // Registers are not written, so the client's are never used.
        Ok(())
    }
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
        let registers = UserRegisters {
            saved: Some(saved),
            fs_base: Some(0x7f00_0000_1000),
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
