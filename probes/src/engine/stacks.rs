//! Walks kernel and user stacks at a hit.
//!
//! Kernel stacks are walked as the kernel itself does, by its unwind information or frame pointers
//! (see [`introspect::stack::kernel`]). Program stacks are walked by frame pointers, with the
//! caller of a function that was just entered. A walk ends where it cannot be continued.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::stack::kernel::KernelUnwinder;
use introspect::x86_64::GeneralRegisters;
use introspect::x86_64::paging::{AddressSpace, PAGE};
use introspect::x86_64::virtual_memory::read_u64;
use introspect::{Gva, PAGE_WORDS, PausedMemory, PhysicalMemory};

use super::hit::Hit;

/// The largest distance in bytes between two frames of a program that is accepted.
const LARGEST_FRAME: u64 = 1 << 24;

/// The unwinder and page tables for stack walks. Without an unwinder, kernel stacks are walked by
/// frame pointers, too.
#[derive(Default)]
pub(crate) struct Stacks {
    unwinder: OnceLock<KernelUnwinder>,
    space: Option<AddressSpace>,
}

impl Stacks {
    pub(crate) fn new(space: AddressSpace) -> Self {
        Self {
            unwinder: OnceLock::new(),
            space: Some(space),
        }
    }

    /// Sets the unwinder, unless there is one.
    pub(crate) fn set_unwinder(&self, unwinder: KernelUnwinder) {
        // Only one is kept: hits read it without a lock.
        let _ = self.unwinder.set(unwinder);
    }

    /// Fills `frames` with the kernel stack of a hit in kernel mode: `pc`, the reported address,
    /// then its callers. Returns the number of frames.
    pub(super) fn kernel(&self, hit: &Hit<'_>, pc: u64, frames: &mut [u64]) -> usize {
        let found = self.kernel_from(hit, frames);
        if let Some(first) = frames.first_mut().filter(|_| found > 0) {
            *first = pc;
        }
        found
    }

    /// Fills `frames` from the hit's own address, which may be behind the first instructions of a
    /// function.
    fn kernel_from(&self, hit: &Hit<'_>, frames: &mut [u64]) -> usize {
        let (Some(unwinder), Some(space)) = (self.unwinder.get(), self.space) else {
            let space = self.space.unwrap_or_else(|| hit.space());
            let walk = FrameWalk::new(hit.memory, space, hit.address);
            return walk.of_entered(hit, frames);
        };
        let memory = PausedMemory::brief(hit.memory);
        let task = Gva(hit.current.task().address);
        let cpu = hit.cpu_state(space);
        let stack = unwinder.running_at_most(memory.view(space), &cpu, task, frames.len());
        let found = stack.frames.iter().map(|frame| frame.address.0);
        frames
            .iter_mut()
            .zip(found)
            .map(|(place, frame)| *place = frame)
            .count()
    }

    /// Fills `frames` with the program's stack. For a hit in the kernel it starts at the program's
    /// kernel entry. `entered` marks a hit at a function's first instruction.
    pub(super) fn user(&self, hit: &Hit<'_>, entered: bool, frames: &mut [u64]) -> usize {
        let start = match hit.user {
            true => Some((
                hit.registers.rip,
                hit.registers.rsp,
                hit.registers.rbp,
                entered,
            )),
            false => self.entry(hit),
        };
        let Some((rip, rsp, rbp, entered)) = start else {
            return 0;
        };
        let walk = FrameWalk::new(hit.memory, hit.space(), Gva(rip));
        walk.fill(rip, rsp, rbp, entered, frames)
    }

    /// Returns the program's RIP, RSP and RBP at the current task's kernel entry.
    fn entry(&self, hit: &Hit<'_>) -> Option<(u64, u64, u64, bool)> {
        let (unwinder, space) = (self.unwinder.get()?, self.space?);
        let memory = PausedMemory::brief(hit.memory);
        let task = Gva(hit.current.task().address);
        let saved = unwinder.entry_registers(memory.view(space), task).ok()??;
        let general: &GeneralRegisters = &saved.general;
        Some((general.rip, general.rsp, general.rbp, false))
    }
}

/// A walk by frame pointers within one half of the address space.
struct FrameWalk<'m> {
    memory: &'m dyn PhysicalMemory,
    space: AddressSpace,
    half: u64,
}

/// A page of a stack: its virtual address and its words in memory.
struct StackPage<'m> {
    address: u64,
    words: &'m [AtomicU64; PAGE_WORDS],
}

impl StackPage<'_> {
    /// Returns the two words at an address, which is a multiple of 8, if both are in this page.
    #[inline]
    fn pair(&self, at: u64) -> Option<(u64, u64)> {
        let place = usize::try_from(at.wrapping_sub(self.address) / 8).ok()?;
        let word = |place: usize| {
            let word = self.words.get(place)?;
            Some(u64::from_le(word.load(Ordering::Relaxed)))
        };
        Some((word(place)?, word(place + 1)?))
    }
}

impl<'m> FrameWalk<'m> {
    fn new(memory: &'m dyn PhysicalMemory, space: AddressSpace, within: Gva) -> Self {
        Self {
            memory,
            space,
            half: within.0 >> 63,
        }
    }

    /// Reads the two words at an address, and keeps their page, since frames are close together.
    fn look_up(&self, at: u64, page: &mut Option<StackPage<'m>>) -> Option<(u64, u64)> {
        let address = at & !(PAGE - 1);
        let words = self.memory.page_at(self.space, Gva(address));
        *page = words.map(|words| StackPage { address, words });
        if let Some(pair) = page.as_ref().and_then(|page| page.pair(at)) {
            return Some(pair);
        }
        let word = |at: u64| read_u64(self.memory, self.space, Gva(at)).ok();
        Some((word(at)?, word(at.checked_add(8)?)?))
    }

    /// Reads the word at an address, and keeps its page.
    fn word(&self, at: u64, page: &mut Option<StackPage<'m>>) -> Option<u64> {
        if at.is_multiple_of(8)
            && let Some((word, _)) = self.look_up(at, page)
        {
            return Some(word);
        }
        read_u64(self.memory, self.space, Gva(at)).ok()
    }

    /// Walks the stack of a function at its first instruction.
    fn of_entered(&self, hit: &Hit<'_>, frames: &mut [u64]) -> usize {
        let r = hit.registers;
        self.fill(r.rip, r.rsp, r.rbp, true, frames)
    }

    /// Fills `frames` from the innermost on. Returns the number of frames.
    fn fill(&self, rip: u64, rsp: u64, rbp: u64, entered: bool, frames: &mut [u64]) -> usize {
        let mut count = 0;
        let mut push = |pc: u64| match frames.get_mut(count) {
            Some(place) if pc != 0 && pc >> 63 == self.half => {
                *place = pc;
                count += 1;
                true
            }
            _ => false,
        };
        if !push(rip) {
            return count;
        }
        let mut page: Option<StackPage<'_>> = None;
        // At a function's first instruction, its caller is not in a frame yet.
        if entered
            && let Some(caller) = self.word(rsp, &mut page)
            && !push(caller)
        {
            return count;
        }
        let (mut frame, mut below) = (rbp, rsp);
        while frame >= below && frame - below < LARGEST_FRAME && frame.is_multiple_of(8) {
            let kept = page.as_ref().and_then(|page| page.pair(frame));
            let Some((outer, caller)) = kept.or_else(|| self.look_up(frame, &mut page)) else {
                break;
            };
            if !push(caller) {
                break;
            }
            below = frame.saturating_add(16);
            frame = outer;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use introspect::test_memory::{Flags, TestMemory};

    use super::*;

    #[test]
    fn frame_pointers_are_followed_to_where_they_end() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        let stack = 0x7ffe_0000u64;
        memory.map(space, stack, 0x18_0000, 4096, Flags::default());
        // The return address of the function entered; then two frames.
        for (at, value) in [
            (0x100u64, 0x40_1111u64),
            (0x140, stack + 0x180),
            (0x148, 0x40_2222),
            (0x180, 0),
            (0x188, 0x40_3333),
        ] {
            memory.write(0x18_0000 + at, &value.to_le_bytes());
        }
        let fill = |memory: &TestMemory, rsp, rbp, entered, most: usize| {
            let mut frames = [0; 8];
            let walk = FrameWalk::new(memory, space, Gva(0));
            let count = walk.fill(0x40_1000, rsp, rbp, entered, &mut frames[..most]);
            frames[..count].to_vec()
        };
        let (rsp, rbp) = (stack + 0x100, stack + 0x140);
        for (entered, expected) in [
            (true, &[0x40_1000, 0x40_1111, 0x40_2222, 0x40_3333][..]),
            (false, &[0x40_1000, 0x40_2222, 0x40_3333]),
        ] {
            assert_eq!(fill(&memory, rsp, rbp, entered, 8), expected);
        }
        // Not a frame pointer, or a loop.
        memory.write(0x18_0140, &rbp.to_le_bytes());
        assert_eq!(fill(&memory, rsp, rbp, false, 8), [0x40_1000, 0x40_2222]);
        assert_eq!(fill(&memory, stack, 17, false, 8), [0x40_1000]);
        assert_eq!(fill(&memory, stack, rbp, true, 1), [0x40_1000]);
        assert!(fill(&memory, stack, rbp, true, 0).is_empty());
    }
}
