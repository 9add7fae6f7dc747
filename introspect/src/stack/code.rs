//! Finds which addresses are kernel code, and whether the function at an instruction has no frame
//! yet or no longer.
//!
//! The caller passes the symbols and, for code that is loaded later, the ranges of modules. Code
//! that the kernel generates (BPF programs, trampolines) is recognized only by its region.

use std::ops::Range;

use super::orc::OrcTable;
use crate::kernel::symbols::Symbols;
use crate::kernel::text::{KernelText, Section};
use crate::{Gva, MemoryView};

/// The range of modules and generated code, in the upper part of the kernel's two gigabytes. It
/// runs from `MODULES_VADDR`, with the smaller of the two image sizes, to `MODULES_END`
/// (arch/x86/include/asm/pgtable_64_types.h).
const GENERATED: Range<u64> = 0xffff_ffff_a000_0000..0xffff_ffff_ff00_0000;

/// A module's code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleCode {
    /// The ranges of its text. There are several only while it is being loaded.
    pub text: Vec<Range<u64>>,
    /// Its unwind information, if it has any.
    pub orc: Option<OrcTable>,
}

/// The kind of code at an address.
#[derive(Debug, Clone, Copy)]
pub(super) enum Code<'a> {
    /// Code of the kernel's image.
    Kernel,
    /// Code of a module.
    Module(&'a ModuleCode),
    /// Code in the region of modules, but of no known module.
    Generated,
}

/// The kernel's code.
#[derive(Debug, Clone)]
pub(super) struct KernelCode {
    pub(super) symbols: Symbols,
    text: KernelText,
    scheduler: Range<u64>,
    return_thunk: Option<u64>,
    error_entry: Option<u64>,
    thunks: Option<u64>,
    pub(super) modules: Vec<ModuleCode>,
}

impl KernelCode {
    /// Collects the code of a running kernel. `symbols` must have its slide.
    pub(super) fn new(symbols: &Symbols) -> Self {
        let range = |start, end| Some(symbols.address_of(start)?..symbols.address_of(end)?);
        Self {
            text: KernelText::new(symbols),
            scheduler: range("__sched_text_start", "__sched_text_end").unwrap_or(0..0),
            return_thunk: symbols.address_of("__x86_return_thunk"),
            error_entry: symbols.address_of("error_entry"),
            thunks: symbols.address_of("__x86_indirect_thunk_array"),
            symbols: symbols.clone(),
            modules: Vec::new(),
        }
    }

    /// Returns the kind of code at `address`, or `None` if it is not code.
    pub(super) fn at(&self, address: u64) -> Option<Code<'_>> {
        match self.text.section(address) {
            Section::Text => return Some(Code::Kernel),
            Section::Data => return None,
            Section::Elsewhere => {}
        }
        let holds = |module: &&ModuleCode| module.text.iter().any(|range| range.contains(&address));
        match self.modules.iter().find(holds) {
            Some(module) => Some(Code::Module(module)),
            None => GENERATED.contains(&address).then_some(Code::Generated),
        }
    }

    /// Checks whether the address is in a function of the scheduler, which `/proc/PID/stack` and
    /// `wchan` omit.
    pub(super) fn is_scheduler(&self, address: u64) -> bool {
        self.scheduler.contains(&address)
    }

    /// Returns the distance of the return address above RSP, if the function at `ip` has no frame
    /// pointer set up. It may not have set it up yet, or have released it already.
    pub(super) fn frameless(&self, view: MemoryView<'_>, ip: u64) -> Option<Frameless> {
        let (symbol, offset) = self
            .symbols
            .resolve(ip)
            .filter(|(symbol, _)| symbol.is_text())?;
        let mut code = [0; Prologue::LONGEST];
        view.read(Gva(symbol.address), &mut code).ok()?;
        let prologue = Prologue::of(&code);
        match prologue.push {
            Some(push) if offset <= push => return Some(Frameless::At(0)),
            Some(push) if offset == push + 1 => return Some(Frameless::At(8)),
            None => return Some(Frameless::Perhaps),
            _ => {}
        }
        // `pop %rbp` or `leave` right before `ret`, or a jump to the code that replaces `ret`.
        let around: [u8; 6] = view.array(Gva(ip.wrapping_sub(1))).ok()?;
        let [before, now, target @ ..] = around;
        let popped = matches!(before, 0x5d | 0xc9);
        let returns = match now {
            // One of our traps hides the original byte.
            0xc3 | 0xcc => true,
            0xe9 => {
                let distance = i64::from(i32::from_le_bytes(target));
                Some(ip.wrapping_add(5).wrapping_add_signed(distance)) == self.return_thunk
            }
            _ => false,
        };
        (popped && returns).then_some(Frameless::At(0))
    }

    /// Checks whether `address` follows the call by which an exception's entry has its registers
    /// saved (`idtentry_body`, arch/x86/entry/entry_64.S).
    pub(super) fn follows_error_entry(&self, view: MemoryView<'_>, address: u64) -> bool {
        let entry = self.error_entry;
        entry.is_some_and(|entry| Self::follows_call_of(view, address, entry))
    }

    /// Checks whether `address` follows a direct call of the function at `target`.
    pub(super) fn follows_call_of(view: MemoryView<'_>, address: u64, target: u64) -> bool {
        let Ok([0xe8, distance @ ..]) = view.array::<5>(Gva(address.wrapping_sub(5))) else {
            return false;
        };
        let distance = i64::from(i32::from_le_bytes(distance));
        address.wrapping_add_signed(distance) == target
    }

    /// Checks whether `address` is in the function by which an exception's entry has its registers
    /// saved.
    pub(super) fn is_in_error_entry(&self, address: u64) -> bool {
        let symbol = self.symbols.resolve(address).map(|(symbol, _)| symbol);
        symbol.is_some_and(|symbol| Some(symbol.address) == self.error_entry)
    }

    /// Returns the distance above RSP at which a retpoline thunk's return address ends. `address`
    /// must be an instruction of it that changes the stack by calls only
    /// (`__x86_indirect_thunk_array`, arch/x86/lib/retpoline.S). The array has code for each of 16
    /// registers, 32 bytes apart.
    pub(super) fn in_thunk(&self, view: MemoryView<'_>, address: u64) -> Option<i16> {
        const APART: u64 = 32;
        /// A kernel without retpolines has LFENCE and a jump there.
        const LFENCE: [u8; 3] = [0x0f, 0xae, 0xe8];
        const CALL: u8 = 0xe8;
        let offset = self.thunks.and_then(|start| address.checked_sub(start))?;
        if offset >= 16 * APART {
            return None;
        }
        let start = Gva(address - offset % APART);
        match offset % APART {
            0 => Some(8),
            3 if view.array(start) == Ok(LFENCE) => Some(8),
            // The call's target, after an INT3.
            6 if view.array(start) == Ok([CALL]) => Some(16),
            _ => None,
        }
    }

    /// Checks whether `address` follows a call instruction.
    pub(super) fn follows_call(&self, view: MemoryView<'_>, address: u64) -> bool {
        let Ok(bytes) = view.array::<7>(Gva(address.wrapping_sub(7))) else {
            return false;
        };
        // `call rel32`, or `call *…` (ff /2). Except for prefixes, the second byte of the latter
        // determines its length.
        let indirect = |length: usize| {
            let at = bytes.len() - length;
            let byte = |index: usize| bytes.get(at + index).copied().unwrap_or_default();
            let (modrm, sib) = (byte(1), byte(2));
            let known = match (modrm >> 6, modrm & 7) {
                (3, _) | (0, 0..=3 | 6..) => 2,
                // Without a base register, as in a call through a table of functions.
                (0, 4) if sib & 7 == 5 => 7,
                (0, 4) | (1, 0..=3 | 5..) => 3,
                (1, _) => 4,
                (2, 4) => 7,
                _ => 6,
            };
            byte(0) == 0xff && modrm >> 3 & 7 == 2 && known == length
        };
        bytes.get(2) == Some(&0xe8) || [2, 3, 4, 6, 7].into_iter().any(indirect)
    }
}

/// The place of a function's return address while the function has no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frameless {
    /// At this distance above RSP.
    At(u64),
    /// At RSP, if the function, which never has a frame, has pushed nothing.
    Perhaps,
}

/// The first instructions of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prologue {
    /// The offset of `push %rbp`, if `mov %rsp,%rbp` follows it.
    pub(super) push: Option<u64>,
}

impl Prologue {
    /// The maximum number of bytes that are read.
    pub(super) const LONGEST: usize = 16;
    /// `endbr64`, then the call of the function tracer or the no-operation in its place. Each may
    /// be missing.
    const PREFIXES: [(&[u8], usize); 3] = [
        (&[0xf3, 0x0f, 0x1e, 0xfa], 4),
        (&[0xe8], 5),
        (&[0x0f, 0x1f, 0x44, 0x00, 0x00], 5),
    ];
    const FRAME: [u8; 4] = [0x55, 0x48, 0x89, 0xe5];

    pub(super) fn of(code: &[u8]) -> Self {
        // A trap may hide the first byte.
        let starts = |at: usize, pattern: &[u8]| {
            let there = code.get(at..at + pattern.len()).unwrap_or_default();
            there.len() == pattern.len()
                && there
                    .iter()
                    .zip(pattern)
                    .enumerate()
                    .all(|(index, (found, expected))| {
                        found == expected || (at + index == 0 && *found == 0xcc)
                    })
        };
        let mut at = 0;
        for (pattern, length) in Self::PREFIXES {
            // A single byte is not enough to recognize it.
            if starts(at, pattern) && (pattern.len() > 1 || code.get(at) == pattern.first()) {
                at += length;
            }
        }
        let push = starts(at, &Self::FRAME).then_some(at as u64);
        Self { push }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::test_kernel::all_symbols;
    use crate::test_memory::{Flags, TestMemory};

    const TEXT: u64 = 0xffff_ffff_8100_0000;

    #[test]
    fn prologues_are_known_with_and_without_a_trap() {
        for (code, push) in [
            (&[0x55, 0x48, 0x89, 0xe5, 0x41][..], Some(0)),
            (&[0xcc, 0x48, 0x89, 0xe5, 0x41], Some(0)),
            (&[0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0x48, 0x89, 0xe5], Some(4)),
            (&[0xcc, 0x0f, 0x1e, 0xfa, 0x55, 0x48, 0x89, 0xe5], Some(4)),
            (&[0x0f, 0x1f, 0x44, 0, 0, 0x55, 0x48, 0x89, 0xe5], Some(5)),
            (&[0xe8, 1, 2, 3, 4, 0x55, 0x48, 0x89, 0xe5], Some(5)),
            (
                &[
                    0xf3, 0x0f, 0x1e, 0xfa, 0xe8, 1, 2, 3, 4, 0x55, 0x48, 0x89, 0xe5,
                ],
                Some(9),
            ),
            (&[0x41, 0x57, 0x55, 0x48, 0x89, 0xe5], None),
            (&[0x55, 0x53, 0x48, 0x89, 0xe5], None),
            (&[0x55, 0x48], None),
            (&[], None),
        ] {
            assert_eq!(Prologue::of(code).push, push, "{code:02x?}");
        }
    }

    #[test]
    fn functions_without_a_frame_are_known_by_their_code() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        memory.map(space, TEXT, 0x18_0000, 4096, Flags::default());
        // push, mov; 4 bytes; pop, ret. 8 bytes on, the same with a jump to the thunk; then an
        // assembly function.
        memory.write(
            0x18_0100,
            &[0x55, 0x48, 0x89, 0xe5, 0x90, 0x90, 0x90, 0x90, 0x5d, 0xc3],
        );
        memory.write(
            0x18_0110,
            &[0x55, 0x48, 0x89, 0xe5, 0xc9, 0xe9, 0xe5, 0, 0, 0],
        );
        memory.write(0x18_0120, &[0x90, 0xc3, 0xe8, 0, 0, 0, 0, 0xff, 0xd0, 0x90]);
        // `call *table(,%rax,8)`, `call *(%rsp)`.
        memory.write(0x18_0130, &[0xff, 0x14, 0xc5, 0, 0, 0, 0x82]);
        memory.write(0x18_0140, &[0xff, 0x14, 0x24]);
        let functions = [
            ("_stext", 0),
            ("plain", 0x100),
            ("thunked", 0x110),
            ("assembly", 0x120),
            ("__x86_return_thunk", 0x200),
            ("_etext", 0x300),
        ];
        let functions = functions.map(|(name, offset)| (name, TEXT + offset, b'T', false));
        let code = KernelCode::new(&all_symbols(functions, Some(TEXT + 0x400)));
        let paused = PausedMemory::new(&memory);
        let view = paused.view(space);
        for (offset, expected) in [
            (0x100, Some(Frameless::At(0))),
            (0x101, Some(Frameless::At(8))),
            (0x104, None),
            (0x108, None),
            (0x109, Some(Frameless::At(0))),
            (0x115, None),
            (0x121, Some(Frameless::Perhaps)),
        ] {
            assert_eq!(code.frameless(view, TEXT + offset), expected, "{offset:#x}");
        }
        memory.write(0x18_0116, &0xe6u32.to_le_bytes());
        let paused = PausedMemory::new(&memory);
        let view = paused.view(space);
        assert_eq!(code.frameless(view, TEXT + 0x115), Some(Frameless::At(0)));
        for (offset, after_call) in [
            (0x127, true),
            (0x129, true),
            (0x126, false),
            (0x12a, false),
            (0x137, true),
            (0x133, false),
            (0x143, true),
        ] {
            assert_eq!(
                code.follows_call(view, TEXT + offset),
                after_call,
                "{offset:#x}"
            );
        }
        for (address, expected) in [
            (TEXT + 0x2ff, "Some(Kernel)"),
            (TEXT + 0x300, "None"),
            (0xffff_ffff_c000_0000, "Some(Generated)"),
            (0x1000, "None"),
        ] {
            assert_eq!(format!("{:?}", code.at(address)), expected, "{address:#x}");
        }
    }
}
