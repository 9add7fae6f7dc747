//! The kernel's unwind information (ORC) as the debugger reads it: a section `.debug_frame` (DWARF
//! 5, 6.4).
//!
//! Each function gets an entry. Its rules change where the kernel's table has another record.
//! Registers that the table does not follow are given as lost in the callers.

use introspect::stack::orc::OrcCopy;
use introspect::stack::orc_versions::{Base, OrcEntry, OrcType};

use super::code_frames::Row;

/// DWARF's numbers of registers (System V ABI for x86-64, figure 3.36).
mod register {
    pub(super) const RDX: u8 = 1;
    pub(super) const RDI: u8 = 5;
    pub(super) const RBP: u8 = 6;
    pub(super) const RSP: u8 = 7;
    pub(super) const R10: u8 = 10;
    pub(super) const R13: u8 = 13;
    pub(super) const RIP: u8 = 16;
}

/// The instructions and operations of DWARF that are used (DWARF 5, 7.7.1 and 7.24).
mod code {
    pub(super) const ADVANCE_4: u8 = 0x04;
    pub(super) const UNDEFINED: u8 = 0x07;
    pub(super) const SAME_VALUE: u8 = 0x08;
    pub(super) const CFA_EXPRESSION: u8 = 0x0f;
    pub(super) const EXPRESSION: u8 = 0x10;
    pub(super) const OFFSET_SIGNED: u8 = 0x11;
    pub(super) const CFA_SIGNED: u8 = 0x12;
    pub(super) const DEREF: u8 = 0x06;
    pub(super) const CONSTANT_SIGNED: u8 = 0x11;
    pub(super) const PLUS: u8 = 0x22;
    /// The base register 0 and an offset; others follow.
    pub(super) const BASE: u8 = 0x70;
}

/// The registers that a `pt_regs` holds, with their words in it (arch/x86/include/asm/ptrace.h).
const SAVED: [(u8, i64); 17] = [
    (15, 0),
    (14, 1),
    (13, 2),
    (12, 3),
    (register::RBP, 4),
    (3, 5),
    (11, 6),
    (10, 7),
    (9, 8),
    (8, 9),
    (0, 10),
    (2, 11),
    (register::RDX, 12),
    (4, 13),
    (register::RDI, 14),
    (register::RIP, 16),
    (register::RSP, 19),
];
/// The registers of a caller that the table does not follow.
const LOST: [u8; 14] = [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15];
/// The size of an address in bytes, to a multiple of which entries are filled.
const WORD: usize = 8;

/// The parts of `.debug_frame`: two common entries, for usual functions and for borders.
///
/// At a border the caller was interrupted or is on another stack. A debugger would report a corrupt
/// stack there, so borders are marked as frames of signal handlers.
pub(super) struct CallFrames {
    section: Vec<u8>,
    usual: u32,
    border: u32,
}

impl CallFrames {
    pub(super) fn new() -> Self {
        let mut frames = Self {
            section: Vec::new(),
            usual: 0,
            border: 0,
        };
        frames.usual = frames.common("");
        frames.border = frames.common("zS");
        frames
    }

    /// Adds the functions, given by ascending start and size, that the table has records of.
    /// `switches` are the ascending addresses at which functions change to another stack.
    pub(super) fn add(
        &mut self,
        functions: impl Iterator<Item = (u64, u64)>,
        table: &OrcCopy,
        switches: &[u64],
    ) {
        let mut records = table.iter().peekable();
        let mut before = None;
        for (start, size) in functions {
            let end = start.saturating_add(size);
            while let Some((_, record)) = records.next_if(|(at, _)| *at <= start) {
                before = Some(record);
            }
            let Some(first) = before else { continue };
            let mut rows = vec![(start, first)];
            while let Some((at, record)) = records.next_if(|(at, _)| *at < end) {
                rows.push((at, record));
                before = Some(record);
            }
            let is_border = is_border(start, size, &rows, switches);
            let after = table.format().offset_after_indirection;
            self.function(start, size, &rows, after, is_border);
        }
    }

    /// Adds a function with the records that its code has, for a kernel without a table.
    /// `switches` are as in [`add`](Self::add).
    pub(super) fn add_found(&mut self, start: u64, size: u64, rows: &[Row], switches: &[u64]) {
        let is_border = is_border(start, size, rows, switches);
        self.function(start, size, rows, true, is_border);
    }

    pub(super) fn into_section(self) -> Vec<u8> {
        self.section
    }

    /// Adds a common entry. Returns its place.
    fn common(&mut self, augmentation: &str) -> u32 {
        let place = self.section.len() as u32;
        self.entry(|entry| {
            entry.extend(u32::MAX.to_le_bytes());
            entry.push(1); // version
            entry.extend(augmentation.as_bytes());
            // NUL, code and data alignment of 1, and the register of the return address.
            entry.extend([0, 1, 1, register::RIP]);
            if !augmentation.is_empty() {
                entry.push(0); // the length of more data
            }
            for register in LOST {
                entry.extend([code::UNDEFINED, register]);
            }
        });
        place
    }

    fn function(
        &mut self,
        start: u64,
        size: u64,
        rows: &[Row],
        offset_after_indirection: bool,
        is_border: bool,
    ) {
        let border = self.border;
        let common = match is_border {
            true => border,
            false => self.usual,
        };
        self.entry(|entry| {
            entry.extend(common.to_le_bytes());
            entry.extend(start.to_le_bytes());
            entry.extend(size.to_le_bytes());
            if common == border {
                entry.push(0); // the length of more data
            }
            let mut at = start;
            let mut rules = Rules::default();
            for (from, record) in rows {
                if *from > at {
                    entry.push(code::ADVANCE_4);
                    entry.extend(((from - at) as u32).to_le_bytes());
                    at = *from;
                }
                let next = Rules::of(*record, offset_after_indirection);
                next.change(&rules, entry);
                rules = next;
            }
        });
    }

    /// Adds an entry: its length, its contents, and what fills it.
    fn entry(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let from = self.section.len();
        self.section.extend([0; 4]);
        write(&mut self.section);
        let filled = (self.section.len() - from - 4).next_multiple_of(WORD) + from + 4;
        self.section.resize(filled, 0);
        let length = (filled - from - 4) as u32;
        let place = self.section.iter_mut().skip(from);
        place
            .zip(length.to_le_bytes())
            .for_each(|(place, byte)| *place = byte);
    }
}

/// Checks whether a function's callers were interrupted, or are on another stack.
fn is_border(start: u64, size: u64, rows: &[Row], switches: &[u64]) -> bool {
    let next = switches.partition_point(|at| *at < start);
    rows.iter().any(|(_, record)| saves(*record))
        || switches.get(next).is_some_and(|at| *at - start < size)
}

/// Checks whether a record finds registers that an entry into the kernel has saved.
fn saves(record: Option<OrcEntry>) -> bool {
    record.is_some_and(|record| matches!(record.kind, OrcType::Registers | OrcType::HardwareFrame))
}

/// The rules at an instruction, as encoded instructions; empty for those of the common entry.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Rules {
    cfa: Vec<u8>,
    rip: Vec<u8>,
    rbp: Vec<u8>,
    /// Whether all registers are in memory at the CFA.
    all: bool,
    rsp: Vec<u8>,
}

impl Rules {
    /// Returns the rules of a record. The CFA is the stack pointer that the record computes.
    fn of(record: Option<OrcEntry>, offset_after_indirection: bool) -> Self {
        let nothing = Self {
            cfa: based(register::RSP, 0),
            rip: vec![code::UNDEFINED, register::RIP],
            ..Self::default()
        };
        let Some(record) = record else {
            return nothing;
        };
        let Some(cfa) = cfa(&record, offset_after_indirection) else {
            return nothing;
        };
        let saved = |register: u8| {
            let word = SAVED.iter().find(|(number, _)| *number == register);
            word.map_or(0, |(_, word)| word * 8)
        };
        match record.kind {
            OrcType::Undefined | OrcType::EndOfStack => nothing,
            OrcType::Call => Self {
                cfa,
                rip: at(register::RIP, -8),
                rbp: rbp(&record),
                ..Self::default()
            },
            OrcType::Registers => Self {
                cfa,
                rip: at(register::RIP, saved(register::RIP)),
                rsp: at(register::RSP, saved(register::RSP)),
                rbp: at(register::RBP, saved(register::RBP)),
                all: true,
            },
            // RIP, CS, RFLAGS, RSP.
            OrcType::HardwareFrame => Self {
                cfa,
                rip: at(register::RIP, 0),
                rsp: at(register::RSP, 24),
                rbp: rbp(&record),
                all: false,
            },
        }
    }

    /// Writes the instructions that differ from those before.
    fn change(&self, before: &Self, to: &mut Vec<u8>) {
        let mut write = |rule: &[u8], old: &[u8], without: &[u8]| {
            if rule != old {
                to.extend(if rule.is_empty() { without } else { rule });
            }
        };
        write(&self.cfa, &before.cfa, &[]);
        write(&self.rip, &before.rip, &[code::UNDEFINED, register::RIP]);
        write(&self.rbp, &before.rbp, &[code::SAME_VALUE, register::RBP]);
        // Without a rule the stack pointer is the CFA, which no instruction can say again.
        let cfa = [code::EXPRESSION + 6, register::RSP, 0];
        write(&self.rsp, &before.rsp, &cfa);
        if self.all == before.all {
            return;
        }
        for register in LOST {
            match self.all {
                true => {
                    let word = SAVED.iter().find(|(number, _)| *number == register);
                    to.extend(at(register, word.map_or(0, |(_, word)| word * 8)));
                }
                false => to.extend([code::UNDEFINED, register]),
            }
        }
    }
}

/// Returns the rule for the CFA; `None` if the record has none.
fn cfa(record: &OrcEntry, offset_after_indirection: bool) -> Option<Vec<u8>> {
    let offset = i64::from(record.sp_offset);
    let in_memory = |base: u8, before: i64, after: i64| {
        let mut expression = vec![code::BASE + base];
        signed(before, &mut expression);
        expression.push(code::DEREF);
        if after != 0 {
            expression.push(code::CONSTANT_SIGNED);
            signed(after, &mut expression);
            expression.push(code::PLUS);
        }
        let mut rule = vec![code::CFA_EXPRESSION, expression.len() as u8];
        rule.extend(expression);
        rule
    };
    Some(match record.sp {
        Base::Undefined | Base::PreviousSp => return None,
        Base::Sp => based(register::RSP, offset),
        Base::Bp => based(register::RBP, offset),
        Base::R10 => based(register::R10, offset),
        Base::R13 => based(register::R13, offset),
        Base::Di => based(register::RDI, offset),
        Base::Dx => based(register::RDX, offset),
        Base::BpIndirect => in_memory(register::RBP, offset, 0),
        Base::SpIndirect if offset_after_indirection => in_memory(register::RSP, 0, offset),
        Base::SpIndirect => in_memory(register::RSP, offset, 0),
    })
}

/// Returns the rule for RBP; empty if it has not changed.
fn rbp(record: &OrcEntry) -> Vec<u8> {
    let offset = i64::from(record.bp_offset);
    match record.bp {
        Base::PreviousSp => at(register::RBP, offset),
        Base::Bp => {
            let mut place = vec![code::BASE + register::RBP];
            signed(offset, &mut place);
            let mut rule = vec![code::EXPRESSION, register::RBP, place.len() as u8];
            rule.extend(place);
            rule
        }
        _ => Vec::new(),
    }
}

/// Returns the rule for a CFA of a register and an offset.
fn based(register: u8, offset: i64) -> Vec<u8> {
    let mut rule = vec![code::CFA_SIGNED, register];
    signed(offset, &mut rule);
    rule
}

/// Returns the rule for a register in memory, `offset` bytes above the CFA.
fn at(register: u8, offset: i64) -> Vec<u8> {
    let mut rule = vec![code::OFFSET_SIGNED, register];
    signed(offset, &mut rule);
    rule
}

/// Writes a number as SLEB128 (DWARF 5, 7.6).
fn signed(mut value: i64, to: &mut Vec<u8>) {
    loop {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        let is_last = value == if low & 0x40 == 0 { 0 } else { -1 };
        to.push(low | if is_last { 0 } else { 0x80 });
        if is_last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use gimli::{
        BaseAddresses, CfaRule, DebugFrame, LittleEndian, Register, RegisterRule, UnwindContext,
        UnwindSection,
    };

    use introspect::stack::orc_versions::OrcFormat;

    use super::*;

    const TEXT: u64 = 0xffff_ffff_8100_0000;
    const IPS: u64 = TEXT + 0x100_0000;

    /// Returns a table of records at these offsets in the text, in the layout of Linux 6.1: the
    /// offsets of SP and BP, their bases, and the type.
    fn table(records: &[(u64, i16, i16, u8, u8)]) -> OrcCopy {
        let format = OrcFormat::of(None, Some("Linux version 6.1.0")).unwrap();
        let (mut ips, mut entries) = (Vec::new(), Vec::new());
        for (index, (start, sp, bp, bases, kind)) in (0u64..).zip(records) {
            let distance = (TEXT + start).wrapping_sub(IPS + index * 4);
            ips.extend((distance as u32).to_le_bytes());
            entries.extend(sp.to_le_bytes());
            entries.extend(bp.to_le_bytes());
            entries.extend([*bases, *kind]);
        }
        OrcCopy::from_bytes(IPS, &ips, &entries, format).unwrap()
    }

    #[test]
    fn a_debugger_finds_the_rules_of_each_record() {
        const SP: u8 = 5;
        const BP: u8 = 4;
        const SP_IN_MEMORY: u8 = 9;
        const BP_SAVED: u8 = 1 << 4;
        let table = table(&[
            (0x100, 8, 0, SP, 0),
            (0x101, 16, -16, SP | BP_SAVED, 0),
            (0x104, 16, -16, BP | BP_SAVED, 0),
            (0x120, 8, 0, SP, 0),
            // Another function: an entry with all registers, then those of the CPU alone.
            (0x200, 0, 0, SP, 1),
            (0x210, 8, 0, SP, 2),
            (0x220, 8, 0, SP, 0),
            (0x230, 16, 0, SP_IN_MEMORY, 0),
            (0x240, 0, 0, 0, 0),
        ]);
        let mut frames = CallFrames::new();
        let functions = [(0x80, 0x10), (0x100, 0x28), (0x200, 0x50)];
        let functions = functions.map(|(start, size)| (TEXT + start, size));
        frames.add(functions.into_iter(), &table, &[]);
        let section = frames.into_section();
        let section = DebugFrame::new(&section, LittleEndian);
        let bases = BaseAddresses::default();
        let row = |offset: u64| {
            let mut context = UnwindContext::new();
            let row = section.unwind_info_for_address(
                &bases,
                &mut context,
                TEXT + offset,
                DebugFrame::cie_from_offset,
            );
            let row = row.unwrap_or_else(|error| panic!("{offset:#x}: {error}"));
            // Without a rule a register is as in the callee.
            let rule = |number| {
                row.register(Register(number))
                    .unwrap_or(RegisterRule::SameValue)
            };
            (row.cfa().clone(), rule(16), rule(6), rule(7), rule(12))
        };
        let based = |register, offset| CfaRule::RegisterAndOffset {
            register: Register(register),
            offset,
        };
        let (lost, at) = (RegisterRule::Undefined, RegisterRule::Offset);
        let same = RegisterRule::SameValue;
        let call = at(-8);
        for (offset, cfa, rip, rbp, r12) in [
            (0x100, based(7, 8), call.clone(), same.clone(), lost.clone()),
            (0x101, based(7, 16), call.clone(), at(-16), lost.clone()),
            (0x11f, based(6, 16), call.clone(), at(-16), lost.clone()),
            (0x127, based(7, 8), call.clone(), same.clone(), lost.clone()),
            (0x200, based(7, 0), at(128), at(32), at(24)),
            (0x21f, based(7, 8), at(0), same.clone(), lost.clone()),
            (0x220, based(7, 8), call.clone(), same.clone(), lost.clone()),
        ] {
            let found = row(offset);
            let rules = (found.0, found.1, found.2, found.4);
            assert_eq!(rules, (cfa, rip, rbp, r12), "{offset:#x}");
        }
        assert_eq!((row(0x200).3, row(0x210).3), (at(152), at(24)));
        assert!(matches!(row(0x220).3, RegisterRule::ValExpression(_)));
        assert!(matches!(row(0x230).0, CfaRule::Expression(_)));
        assert_eq!(row(0x24f).1, lost, "the end of the stack");
        let mut context = UnwindContext::new();
        let without = section.unwind_info_for_address(
            &bases,
            &mut context,
            TEXT + 0x80,
            DebugFrame::cie_from_offset,
        );
        assert!(without.is_err(), "a function before all records");
    }
}
