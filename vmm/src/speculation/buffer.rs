//! Guest memory as a path of speculation sees it: with the path's own stores on top, and with
//! memory that the guest does not have.
//!
//! Nothing is written to the guest. The number of bytes that a path may store is bounded.

use introspect::x86_64::paging::{self, AddressSpace, Translation};
use introspect::{Gpa, Gva, PhysicalMemory};

use crate::memory::{GuestRam, PAGE_SIZE};
use crate::vcpu::StoppedVcpu;
use crate::x86_64::LONGEST_INSTRUCTION;
use crate::x86_64::emulate::{
    ControlRegister, Environment, FxState, MemoryFault, Segment, StateError,
};

/// The maximum number of aligned words that are written on a path, outside the scratch memory.
const MOST_WORDS: usize = 512;
/// The maximum number of pages whose translations are kept.
const MOST_PAGES: usize = 32;
/// The number of bytes of code that are read at a time.
const CODE_BYTES: usize = 128;
/// The size of such a word in bytes.
const WORD: u64 = 8;

/// Memory with the stores of the path on top.
pub(super) struct StoreBuffer<'c> {
    cpu: &'c StoppedVcpu<'c>,
    space: AddressSpace,
    forced: Vec<(Gva, u64)>,
    /// The words written, ascending by address.
    written: Vec<Word>,
    scratch: Scratch,
    /// The pages of the guest that the path has used, with their translations. A processor keeps
    /// them as long.
    pages: Vec<(u64, Translation)>,
    /// The code last read, with its address.
    code: (u64, Vec<u8>),
}

/// An aligned word, some of whose bytes were written.
struct Word {
    address: u64,
    bytes: [u8; WORD as usize],
    /// One bit for each byte that was written.
    mask: u8,
}

/// Memory that exists on the path alone.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) start: u64,
    pub(super) bytes: Vec<u8>,
}

impl Scratch {
    /// Returns the range of an access that lies in this memory as a whole.
    fn range(&self, address: u64, length: usize) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(address.checked_sub(self.start)?).ok()?;
        let end = start.checked_add(length)?;
        (end <= self.bytes.len()).then_some(start..end)
    }
}

impl<'c> StoreBuffer<'c> {
    /// Makes a buffer over the memory that `cpu` sees. `forced` are words that read as other
    /// values.
    pub(super) fn new(cpu: &'c StoppedVcpu<'c>, forced: &[(Gva, u64)]) -> Self {
        Self {
            cpu,
            space: cpu.address_space(),
            forced: forced.to_vec(),
            written: Vec::with_capacity(16),
            scratch: Scratch::default(),
            pages: Vec::with_capacity(8),
            code: (0, Vec::new()),
        }
    }

    /// Adds memory where the guest has none. It replaces memory that was added before.
    pub(super) fn set_scratch(&mut self, scratch: Scratch) {
        self.scratch = scratch;
    }

    /// Returns the memory of [`Self::set_scratch`].
    pub(super) fn scratch(&self) -> &[u8] {
        &self.scratch.bytes
    }

    /// Returns the code at an address, as it is without traps: at least the longest instruction,
    /// or less if a page is missing.
    pub(super) fn code(&mut self, address: Gva) -> &[u8] {
        let has = |code: &(u64, Vec<u8>)| {
            let offset = usize::try_from(address.0.checked_sub(code.0)?).ok()?;
            (offset + LONGEST_INSTRUCTION <= code.1.len()).then_some(offset)
        };
        let offset = match has(&self.code) {
            Some(offset) => offset,
            None => {
                let traps = self.cpu.traps();
                let code = traps.read_code_of(address, self.space, CODE_BYTES);
                self.code = (address.0, code);
                0
            }
        };
        self.code.1.get(offset..).unwrap_or_default()
    }

    fn ram(&self) -> &GuestRam {
        self.cpu.ram()
    }

    /// Checks whether the byte at an address was written on the path.
    pub(super) fn has_written(&self, address: u64) -> bool {
        let found = self.place(address & !(WORD - 1)).ok();
        let word = found.and_then(|place| self.written.get(place));
        word.is_some_and(|word| word.mask >> (address % WORD) & 1 == 1)
    }

    /// Returns the place of a word in the list, or the place at which it is missing.
    fn place(&self, address: u64) -> Result<usize, usize> {
        self.written
            .binary_search_by_key(&address, |word| word.address)
    }

    /// Returns a word to write to; `None` if there are too many.
    fn word(&mut self, address: u64) -> Option<&mut Word> {
        let place = match self.place(address) {
            Ok(place) => place,
            Err(_) if self.written.len() >= MOST_WORDS => return None,
            Err(place) => {
                let word = Word {
                    address,
                    bytes: [0; WORD as usize],
                    mask: 0,
                };
                self.written.insert(place, word);
                place
            }
        };
        self.written.get_mut(place)
    }

    /// Puts the bytes that were written over those of the guest.
    fn overlay(&self, address: u64, buf: &mut [u8]) {
        let first = address & !(WORD - 1);
        let from = self.place(first).unwrap_or_else(|place| place);
        for word in self.written.get(from..).unwrap_or_default() {
            // The words are in order: one behind the access ends it.
            if word.address.wrapping_sub(first) >= buf.len() as u64 + WORD {
                return;
            }
            for (at, byte) in (0..WORD).zip(word.bytes) {
                let offset = word.address.wrapping_add(at).wrapping_sub(address);
                let place = usize::try_from(offset).ok().and_then(|at| buf.get_mut(at));
                if let Some(place) = place.filter(|_| word.mask >> at & 1 == 1) {
                    *place = byte;
                }
            }
        }
    }

    fn translate(&mut self, address: u64, write: bool) -> Result<Gpa, MemoryFault> {
        let fault = MemoryFault { address, write };
        let offset = address % PAGE_SIZE;
        let page = address - offset;
        let kept = self.pages.iter().find(|(known, _)| *known == page);
        let found = match kept {
            Some((_, found)) => *found,
            None => {
                let found = paging::translate(self.ram(), self.space, Gva(page));
                let found = found.map_err(|_| fault)?;
                if self.pages.len() < MOST_PAGES {
                    self.pages.push((page, found));
                }
                found
            }
        };
        match write && !found.writable {
            true => Err(fault),
            false => Ok(Gpa(found.gpa.0.wrapping_add(offset))),
        }
    }
}

impl Environment for StoreBuffer<'_> {
    fn read(&mut self, address: u64, buf: &mut [u8]) -> Result<(), MemoryFault> {
        let fault = MemoryFault {
            address,
            write: false,
        };
        if let Some((_, value)) = self.forced.iter().find(|(at, _)| at.0 == address) {
            for (place, byte) in buf.iter_mut().zip(value.to_le_bytes()) {
                *place = byte;
            }
            return Ok(());
        }
        if let Some(range) = self.scratch.range(address, buf.len()) {
            buf.copy_from_slice(self.scratch.bytes.get(range).ok_or(fault)?);
            return Ok(());
        }
        let mut done = 0;
        while done < buf.len() {
            let at = address.wrapping_add(done as u64);
            let in_page = (PAGE_SIZE - at % PAGE_SIZE) as usize;
            let end = buf.len().min(done + in_page);
            let gpa = self.translate(at, false)?;
            let part = buf.get_mut(done..end).ok_or(fault)?;
            self.ram().read_physical(gpa, part).map_err(|_| fault)?;
            done = end;
        }
        self.overlay(address, buf);
        Ok(())
    }

    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), MemoryFault> {
        let fault = MemoryFault {
            address,
            write: true,
        };
        if let Some(range) = self.scratch.range(address, data.len()) {
            let place = self.scratch.bytes.get_mut(range).ok_or(fault)?;
            place.copy_from_slice(data);
            return Ok(());
        }
        self.translate(address, true)?;
        self.translate(
            address.wrapping_add(data.len().saturating_sub(1) as u64),
            true,
        )?;
        for (at, byte) in (0..).map(|offset| address.wrapping_add(offset)).zip(data) {
            let word = self.word(at & !(WORD - 1)).ok_or(fault)?;
            let offset = at % WORD;
            word.mask |= 1 << offset;
            if let Some(place) = word.bytes.get_mut(offset as usize) {
                *place = *byte;
            }
        }
        Ok(())
    }

    fn compare_exchange(
        &mut self,
        address: u64,
        old: &[u8],
        new: &[u8],
    ) -> Result<bool, MemoryFault> {
        self.exchange_in_two_steps(address, old, new)
    }

    fn segment_base(&mut self, segment: Segment) -> Result<u64, StateError> {
        Ok(match segment {
            Segment::Fs => self.cpu.sregs().fs.base,
            Segment::Gs => self.cpu.sregs().gs.base,
        })
    }

    fn set_segment_base(&mut self, _: Segment, _: u64) -> Result<(), StateError> {
        Err(outside("write a segment base"))
    }

    fn fx_state(&mut self) -> Result<FxState, StateError> {
        Err(outside("read the FPU state"))
    }

    fn set_fx_state(&mut self, _: &FxState) -> Result<(), StateError> {
        Err(outside("write the FPU state"))
    }

    fn cpl(&mut self) -> Result<u8, StateError> {
        Ok(0)
    }

    fn control_register(&mut self, register: ControlRegister) -> Result<u64, StateError> {
        match register {
            ControlRegister::Cr0 => Ok(self.cpu.sregs().cr0),
            ControlRegister::Cr4 => Ok(self.cpu.sregs().cr4),
            ControlRegister::Xcr0 => Err(outside("read XCR0")),
        }
    }

    fn inhibit_interrupts(&mut self) -> Result<(), StateError> {
        // There are no interrupts on this path.
        Ok(())
    }

    fn halt(&mut self) -> Result<(), StateError> {
        Err(outside("halt"))
    }
}

fn outside(action: &'static str) -> StateError {
    StateError {
        action,
        source: std::io::ErrorKind::Unsupported.into(),
    }
}
