//! Walks the stack of a process's thread, by the unwind information of the mapped objects. For an
//! object without it, the walk uses frame pointers and marks the frames as guesses.
//!
//! The caller passes a view of the process's address space, its mappings and the thread's
//! registers. These are the registers that the kernel saved on entry, or those of a CPU in user
//! mode. A page that is not in memory ends the stack with its reason, as does anything else that
//! would have to be guessed.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use super::eh_frame::{self, Cfa, Failure, Place, REGISTERS, Rule};
use super::frames::{End, Found, Frame, Guess, SavedRegisters, Stack};
use crate::x86_64::GeneralRegisters;
use crate::{Gva, MemoryView};

pub use super::eh_frame::{MissingBytes, ObjectBytes};

/// The default maximum number of frames of a stack, that of `perf` (`PERF_MAX_STACK_DEPTH`).
pub const DEFAULT_FRAMES: usize = 127;
/// The maximum number of rules kept between walks.
const MAX_RULES: usize = 1 << 16;
/// The maximum distance in bytes of a credible frame pointer from the stack pointer: the usual
/// limit of a stack.
const MAX_DISTANCE: u64 = 8 << 20;
/// DWARF's numbers of registers (System V ABI for AMD64, figure 3.36).
const RBP: usize = 6;
const RSP: usize = 7;
const RETURN: usize = 16;
/// The members of [`GeneralRegisters`] by DWARF's numbers.
const DWARF_ORDER: [usize; REGISTERS] = [0, 3, 2, 1, 4, 5, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16];
/// The code to which a signal handler returns, for objects without a description of it: `mov
/// $15,%rax; syscall`, with a short or a long `mov`.
const SIGNAL_RETURN: [&[u8]; 2] = [
    &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05],
    &[0xb8, 0x0f, 0, 0, 0, 0x0f, 0x05],
];
/// The offset of the interrupted registers from the stack pointer at that code (`uc_mcontext` of
/// `struct ucontext`). DWARF's numbers follow, in the order of `struct sigcontext_64`
/// (arch/x86/include/uapi/asm/sigcontext.h).
const SIGNAL_CONTEXT: u64 = 40;
const SIGNAL_ORDER: [usize; 17] = [8, 9, 10, 11, 12, 13, 14, 15, 5, 4, 6, 3, 1, 0, 2, 7, 16];

/// A mapped object with unwind information.
pub struct MappedObject<'o> {
    /// The range at which its code is mapped.
    pub text: Range<u64>,
    /// The difference between a mapped address and its link address.
    pub bias: u64,
    /// The link address of its `.eh_frame_hdr` (program header `PT_GNU_EH_FRAME`), or `None` if it
    /// has none.
    pub eh_frame_hdr: Option<u64>,
    /// The link addresses of its section `.eh_frame`, if known. The section is searched if there is
    /// no `.eh_frame_hdr`.
    pub eh_frame: Option<Range<u64>>,
    /// The object's bytes.
    pub bytes: Box<dyn ObjectBytes + 'o>,
}

impl fmt::Debug for MappedObject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedObject")
            .field("text", &self.text)
            .field("bias", &self.bias)
            .finish_non_exhaustive()
    }
}

/// A walker of the stacks of one process's threads. It caches rules, which are valid as long as the
/// mappings.
pub struct UserUnwinder<'o> {
    /// The objects, ascending by address.
    objects: Vec<MappedObject<'o>>,
    /// Other ranges with code, ascending.
    code: Vec<Range<u64>>,
    rules: HashMap<u64, Result<Option<Rc<Rule>>, Failure>>,
    indices: Indices,
}

impl fmt::Debug for UserUnwinder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserUnwinder")
            .field("objects", &self.objects)
            .field("code", &self.code)
            .finish_non_exhaustive()
    }
}

impl<'o> UserUnwinder<'o> {
    /// Makes a walker for a process with these objects and these other executable ranges. The
    /// latter are those of files without unwind information, and memory that programs write code
    /// to. The ranges do not overlap, because they are mappings.
    #[must_use]
    pub fn new(mut objects: Vec<MappedObject<'o>>, mut code: Vec<Range<u64>>) -> Self {
        objects.sort_by_key(|object| object.text.start);
        code.sort_by_key(|range| range.start);
        Self {
            objects,
            code,
            rules: HashMap::new(),
            indices: Indices::default(),
        }
    }

    /// Walks the stack of a thread with these registers, for at most `most` frames
    /// ([`DEFAULT_FRAMES`]).
    #[must_use]
    pub fn walk(&mut self, view: MemoryView<'_>, at: &SavedRegisters, most: usize) -> Stack {
        let mut frames = Vec::new();
        let end = match at.is_32_bit() {
            true => End::ThirtyTwoBit,
            false => self.frames(view, at, most, &mut frames),
        };
        Stack {
            frames,
            end,
            entry: None,
        }
    }

    fn frames(
        &mut self,
        view: MemoryView<'_>,
        at: &SavedRegisters,
        most: usize,
        frames: &mut Vec<Frame>,
    ) -> End {
        let mut thread = Thread::new(view, &at.general);
        let (mut found, mut reliable) = (Found::Register, true);
        loop {
            let address = Gva(thread.rip);
            if !self.is_code(thread.rip) {
                return End::NotCode { address };
            }
            if frames.len() >= most {
                return End::TooLong;
            }
            let mut frame = Frame {
                address,
                found,
                reliable,
                trampoline: None,
            };
            let step = self.step(&mut thread, &frame);
            if step == Ok(Found::Interrupted) {
                // The code to which a handler returns was not called. Its address is that of its
                // first instruction.
                frame.found = Found::Interrupted;
            }
            frames.push(frame);
            match step {
                Ok(next) => {
                    reliable &= !matches!(next, Found::Guess(_));
                    found = next;
                }
                Err(end) => return end,
            }
        }
    }

    fn is_code(&self, address: u64) -> bool {
        find_object(&self.objects, address).is_some()
            || find(&self.code, |range| range, address).is_some()
    }

    /// Moves from the thread's frame to the caller, and returns how that was found.
    fn step(&mut self, thread: &mut Thread<'_>, frame: &Frame) -> Result<Found, End> {
        let lookup = frame.lookup_address();
        let address = Gva(lookup);
        let rule = match self.rule(lookup) {
            Ok(rule) => rule,
            Err((Failure::Bad, _)) => return Err(End::BadUnwindInfo { address }),
            Err((Failure::Missing(missing), bias)) => {
                let gva = Gva(missing.address.wrapping_add(bias));
                return Err(End::NotPresent { gva });
            }
        };
        match rule {
            Some(rule) => {
                thread.apply(&rule)?;
                Ok(match rule.signal {
                    true => Found::Interrupted,
                    false => Found::Return,
                })
            }
            None if thread.leave_signal()? => Ok(Found::Interrupted),
            None => {
                thread.follow_frame_pointer(matches!(frame.found, Found::Guess(_)))?;
                if !self.is_code(thread.rip) {
                    // The assumption did not hold: the function keeps another value in RBP.
                    return Err(End::NoUnwindInfo { address });
                }
                Ok(Found::Guess(Guess::FramePointer))
            }
        }
    }

    /// Returns the rule for the instruction at `address`. A failure comes with the object's bias.
    fn rule(&mut self, address: u64) -> Result<Option<Rc<Rule>>, (Failure, u64)> {
        let Some(object) = find_object(&self.objects, address) else {
            return Ok(None);
        };
        let bias = object.bias;
        if let Some(known) = self.rules.get(&address) {
            return known.clone().map_err(|failure| (failure, bias));
        }
        let rule = find_rule(object, &mut self.indices, address.wrapping_sub(bias));
        // A page that is not in memory now may be at the next walk.
        if !matches!(rule, Err(Failure::Missing(_))) {
            if self.rules.len() >= MAX_RULES {
                self.rules.clear();
            }
            self.rules.insert(address, rule.clone());
        }
        rule.map_err(|failure| (failure, bias))
    }
}

/// Returns the object whose code holds `address`.
fn find_object<'a, 'o>(
    objects: &'a [MappedObject<'o>],
    address: u64,
) -> Option<&'a MappedObject<'o>> {
    find(objects, |object| &object.text, address)
}

/// Returns the element whose range holds `address`. The elements are ascending by range.
fn find<T>(all: &[T], range: impl Fn(&T) -> &Range<u64>, address: u64) -> Option<&T> {
    let after = all.partition_point(|one| range(one).start <= address);
    let one = all.get(after.checked_sub(1)?)?;
    range(one).contains(&address).then_some(one)
}

/// The first address and the record of each function, ascending.
type Index = Rc<Vec<(u64, u64)>>;

/// The indices of the objects without a search table.
#[derive(Default)]
struct Indices {
    /// The indices by the mapped address of `.eh_frame`. A section that could not be read is not
    /// read again, because it may be large.
    known: HashMap<u64, Result<Index, Failure>>,
    /// The number of bytes of all sections that were read.
    read: u64,
}

impl Indices {
    fn of(&mut self, object: &MappedObject<'_>, section: &Range<u64>) -> Result<Index, Failure> {
        let mapped = object.bias.wrapping_add(section.start);
        if let Some(known) = self.known.get(&mapped) {
            return known.clone();
        }
        let left = eh_frame::MAX_SECTIONS.saturating_sub(self.read);
        let length = section.end.checked_sub(section.start);
        let found = match length.filter(|length| *length <= left) {
            Some(length) => {
                self.read += length;
                eh_frame::index(&*object.bytes, section.start, length).map(Rc::new)
            }
            None => Err(Failure::Bad),
        };
        self.known.insert(mapped, found.clone());
        found
    }
}

/// Finds the rule for the instruction at a link address of an object.
fn find_rule(
    object: &MappedObject<'_>,
    indices: &mut Indices,
    address: u64,
) -> Result<Option<Rc<Rule>>, Failure> {
    let bytes = &*object.bytes;
    let record = match (object.eh_frame_hdr, &object.eh_frame) {
        (Some(header), _) => eh_frame::search(bytes, header, address)?,
        (None, Some(section)) => {
            let index = indices.of(object, section)?;
            let after = index.partition_point(|(start, _)| *start <= address);
            let before = after.checked_sub(1).and_then(|before| index.get(before));
            before.map(|(_, record)| *record)
        }
        (None, None) => None,
    };
    match record {
        Some(record) => Ok(eh_frame::rule(bytes, record, address)?.map(Rc::new)),
        None => Ok(None),
    }
}

/// A thread's registers in one frame.
struct Thread<'p> {
    view: MemoryView<'p>,
    rip: u64,
    registers: [Option<u64>; REGISTERS],
}

impl<'p> Thread<'p> {
    fn new(view: MemoryView<'p>, at: &GeneralRegisters) -> Self {
        let words = at.words();
        Self {
            view,
            rip: at.rip,
            registers: DWARF_ORDER.map(|index| words.get(index).copied()),
        }
    }

    fn get(&self, number: usize) -> Option<u64> {
        self.registers.get(number).copied().flatten()
    }

    fn need(&self, number: u16) -> Result<u64, End> {
        let address = Gva(self.rip);
        let known = self.get(number.into());
        known.ok_or(End::LostRegister {
            address,
            register: number,
        })
    }

    /// Moves to the caller by a rule.
    fn apply(&mut self, rule: &Rule) -> Result<(), End> {
        let address = Gva(self.rip);
        if rule.registers.get(RETURN) == Some(&Place::Lost) {
            return Err(End::Bottom);
        }
        let cfa = match &rule.cfa {
            Cfa::Register(number, offset) => self.need(*number)?.wrapping_add_signed(*offset),
            Cfa::Expression(code) => eh_frame::expression(self, code, rule.encoding, None)?,
        };
        let mut registers = [None; REGISTERS];
        for (number, (place, new)) in rule.registers.iter().zip(&mut registers).enumerate() {
            *new = match place {
                Place::Same => self.get(number),
                Place::Lost => None,
                Place::At(offset) => self.saved(number, cfa.wrapping_add_signed(*offset))?,
                Place::Is(offset) => Some(cfa.wrapping_add_signed(*offset)),
                Place::Register(other) => self.get((*other).into()),
                Place::AtExpression(code) => {
                    let at = eh_frame::expression(self, code, rule.encoding, Some(cfa))?;
                    self.saved(number, at)?
                }
                Place::IsExpression(code) => {
                    Some(eh_frame::expression(self, code, rule.encoding, Some(cfa))?)
                }
            };
        }
        let sp = registers
            .get(RSP)
            .copied()
            .flatten()
            .ok_or(End::BadUnwindInfo { address })?;
        let before = self.get(RSP).unwrap_or_default();
        // A signal handler may run on its own stack.
        if !rule.signal && sp <= before {
            return Err(End::NotOutwards { pointer: Gva(sp) });
        }
        self.arrive(registers)
    }

    /// Reads a saved register. Only the return address and the pointers end the walk if they cannot
    /// be read.
    fn saved(&self, number: usize, at: u64) -> Result<Option<u64>, End> {
        match number {
            RBP | RSP | RETURN => End::word(self.view, at).map(Some),
            _ => Ok(self.view.u64(Gva(at)).ok()),
        }
    }

    fn arrive(&mut self, registers: [Option<u64>; REGISTERS]) -> Result<(), End> {
        self.registers = registers;
        match self.need(RETURN as u16)? {
            // Thread libraries put zero below a thread's first function.
            0 => Err(End::Bottom),
            rip => {
                self.rip = rip;
                Ok(())
            }
        }
    }

    /// Moves to the frame that a signal interrupted, if the thread is at the code to which its
    /// handler returns.
    fn leave_signal(&mut self) -> Result<bool, End> {
        let is_there = SIGNAL_RETURN.iter().any(|code| {
            let mut found = [0; 9];
            let found = found.get_mut(..code.len()).unwrap_or_default();
            self.view.read(Gva(self.rip), found).is_ok() && found == *code
        });
        let Some(sp) = self.get(RSP).filter(|_| is_there) else {
            return Ok(false);
        };
        let mut registers = [None; REGISTERS];
        for (index, number) in (0u64..).zip(SIGNAL_ORDER) {
            let value = End::word(self.view, sp.wrapping_add(SIGNAL_CONTEXT + index * 8))?;
            if let Some(register) = registers.get_mut(number) {
                *register = Some(value);
            }
        }
        self.arrive(registers)?;
        Ok(true)
    }

    /// Moves to the caller as if the function kept a frame pointer. `again` is true if the frame
    /// itself was found so.
    fn follow_frame_pointer(&mut self, again: bool) -> Result<(), End> {
        let none = End::NoUnwindInfo {
            address: Gva(self.rip),
        };
        let (Some(bp), Some(sp)) = (self.get(RBP), self.get(RSP)) else {
            return Err(none);
        };
        if bp == 0 && again {
            // By the ABI, programs and threads start with this value.
            return Err(End::Bottom);
        }
        let near = bp >= sp && bp - sp <= MAX_DISTANCE && bp.is_multiple_of(8);
        if !near {
            return Err(none);
        }
        let caller_bp = End::word(self.view, bp)?;
        let rip = End::word(self.view, bp.wrapping_add(8))?;
        if rip == 0 && !again {
            // This may be the outermost frame, but RBP may equally be no frame pointer.
            return Err(none);
        }
        let mut registers = [None; REGISTERS];
        for (number, value) in [(RBP, caller_bp), (RSP, bp.wrapping_add(16)), (RETURN, rip)] {
            if let Some(register) = registers.get_mut(number) {
                *register = Some(value);
            }
        }
        self.arrive(registers)
    }
}

impl eh_frame::Machine for Thread<'_> {
    type Error = End;

    fn register(&self, number: u16) -> Result<u64, End> {
        self.need(number)
    }

    fn memory(&self, address: u64, size: u8) -> Result<u64, End> {
        let mut word = [0; 8];
        let part = word.get_mut(..size.into()).ok_or_else(|| self.bad())?;
        let read = self.view.read(Gva(address), part);
        read.map_err(|_| End::NotPresent { gva: Gva(address) })?;
        Ok(u64::from_le_bytes(word))
    }

    fn bad(&self) -> End {
        End::BadUnwindInfo {
            address: Gva(self.rip),
        }
    }
}
