//! The panic of a guest's kernel and its message, read from physical memory alone.
//!
//! The caller passes the image that was booted. Neither registers nor page tables are needed. A
//! [`PanicFinder`] therefore works from the first instruction on, and after a triple fault or a
//! reset. An image is loaded where its segments say. A kernel that has since replaced it (kexec) is
//! recognised, and nothing is reported for it.
//!
//! There are two signs of a panic. `panic_cpu` (kernel/panic.c, since Linux 4.5) holds the number
//! of the CPU that panicked, or -1. It decides if the image names it. A kernel whose symbols are
//! only functions is judged by its log: see `record`.

mod record;

use std::ops::Range;

use memchr::memmem;

use super::image::{KernelImage, Segment};
use crate::bytes::u64_at;
use crate::{Gpa, PhysicalMemory};

/// The variable that holds the panicked CPU's number.
const PANIC_CPU: &str = "panic_cpu";
/// The maximum number of CPUs of a kernel (`NR_CPUS` in arch/x86/Kconfig).
const MAX_CPUS: u32 = 8192;
/// The text after [`record::START`] in the format string of `panic`.
const FORMAT_REST: &[u8] = b"%s";
/// The maximum number of bytes searched for the message. An image has tens of megabytes.
const MAX_SEARCHED: u64 = 1 << 30;
/// The number of bytes that can be searched in a few milliseconds.
const CHEAP: u64 = 64 << 20;
/// The number of bytes read at once.
const PART: u64 = 1 << 20;

/// The address that stands for an unknown one among a finder's bytes.
const NOWHERE: u64 = u64::MAX;
/// The size of the words before the ranges in a finder's bytes.
const HEAD: usize = 24;

/// A panic of the guest's kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelPanic {
    /// The number of the CPU that panicked, as the kernel counts; `None` if the kernel does not
    /// name the variable.
    pub cpu: Option<u32>,
    /// The message after `Kernel panic - not syncing: `; `None` if the log does not have it.
    pub text: Option<String>,
}

/// A finder of a panic of one kernel.
#[derive(Debug, Clone)]
pub struct PanicFinder {
    /// The physical ranges with the kernel's variables, including its log.
    searched: Vec<Range<u64>>,
    /// A constant of the image, whose presence identifies it in memory.
    constant: Option<(Gpa, Vec<u8>)>,
    /// The address of `panic_cpu`.
    panic_cpu: Option<Gpa>,
}

impl PanicFinder {
    /// Returns the finder for the kernel of `image`. `panic_cpu` is that variable's link address,
    /// if known. Returns `None` for an image without Linux's panic message.
    #[must_use]
    pub fn of_image(image: &KernelImage, panic_cpu: Option<u64>) -> Option<Self> {
        let bytes = image.bytes();
        let constant = [record::START, FORMAT_REST].concat();
        let at = memmem::find(bytes, &constant)?;
        let holds = |segment: &&Segment| segment.file.contains(&at);
        let segment = image.segments().iter().find(holds)?;
        let offset = u64::try_from(at.checked_sub(segment.file.start)?).ok()?;
        let address = Gpa(segment.physical_address.checked_add(offset)?);
        // Constants and variables have separate segments.
        let of_variables = image.segments().iter().filter(|other| *other != segment);
        let mut searched: Vec<_> = of_variables.map(Segment::physical_range).collect();
        if searched.is_empty() {
            searched.push(segment.physical_range());
        }
        Some(Self {
            searched,
            constant: Some((address, constant)),
            panic_cpu: panic_cpu.and_then(|address| image.physical(address)),
        })
    }

    /// Returns a finder for a guest whose image is not at hand, which searches all memory for a
    /// kernel's log. `panic_cpu` is the address of that variable, if it was found.
    ///
    /// A guest that is itself a host may hold the log of its own guest.
    #[must_use]
    pub fn of_memory(memory: &dyn PhysicalMemory, panic_cpu: Option<Gpa>) -> Self {
        Self {
            searched: memory.ram(),
            constant: None,
            panic_cpu,
        }
    }

    /// Returns the finder as bytes, for [`Self::from_bytes`]. Little-endian words: the address of
    /// `panic_cpu` and that of the constant, all ones if unknown, the number of ranges,
    /// and start and end of each range; then the constant.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let place = |address: Option<Gpa>| address.map_or(NOWHERE, |address| address.0);
        let constant = self.constant.as_ref();
        let head = [
            place(self.panic_cpu),
            place(constant.map(|(address, _)| *address)),
            self.searched.len() as u64,
        ];
        let ranges = self.searched.iter().flat_map(|r| [r.start, r.end]);
        let words = head.into_iter().chain(ranges);
        let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        bytes.extend(constant.into_iter().flat_map(|(_, constant)| constant));
        bytes
    }

    /// Returns the finder that [`Self::to_bytes`] has written; `None` for bytes that are none.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(HEAD)?;
        let place = |offset| Some(u64_at(head, offset)?).filter(|word| *word != NOWHERE);
        let count = usize::try_from(u64_at(head, 16)?).ok()?;
        let (ranges, constant) = rest.split_at_checked(count.checked_mul(16)?)?;
        let range = |range: &[u8]| {
            let range = u64_at(range, 0)?..u64_at(range, 8)?;
            (range.start <= range.end).then_some(range)
        };
        Some(Self {
            searched: ranges.chunks_exact(16).map(range).collect::<Option<_>>()?,
            constant: place(8).map(|address| (Gpa(address), constant.to_vec())),
            panic_cpu: place(0).map(Gpa),
        })
    }

    /// Returns the name of the symbol that the constructors need.
    #[must_use]
    pub fn symbol() -> &'static str {
        PANIC_CPU
    }

    /// Checks whether looking at a guest that has not panicked is fast: a few bytes, or an image's
    /// variables.
    #[must_use]
    pub fn is_cheap(&self) -> bool {
        let lengths = self.searched.iter().map(|range| range.end - range.start);
        self.panic_cpu.is_some() || lengths.fold(0, u64::saturating_add) <= CHEAP
    }

    /// Returns the panic in `memory`; `None` if there is none, or another kernel runs.
    #[must_use]
    pub fn find(&self, memory: &dyn PhysicalMemory) -> Option<KernelPanic> {
        if !self.is_in(memory) {
            return None;
        }
        match self.panic_cpu {
            Some(address) => {
                let cpu = read_u32(memory, address).filter(|cpu| *cpu < MAX_CPUS)?;
                Some(KernelPanic {
                    cpu: Some(cpu),
                    text: self.text(memory),
                })
            }
            None => Some(KernelPanic {
                cpu: None,
                text: Some(self.text(memory)?),
            }),
        }
    }

    /// Checks whether the image's constant is at its address.
    fn is_in(&self, memory: &dyn PhysicalMemory) -> bool {
        self.constant.as_ref().is_none_or(|(address, constant)| {
            let mut found = vec![0; constant.len()];
            memory.read_physical(*address, &mut found).is_ok() && found == *constant
        })
    }

    /// Finds the message in the kernel's log.
    fn text(&self, memory: &dyn PhysicalMemory) -> Option<String> {
        let ram = memory.ram();
        let mut left = MAX_SEARCHED;
        let mut bytes = Vec::new();
        for range in &self.searched {
            let Some(within) = ram.iter().find(|ram| ram.contains(&range.start)) else {
                continue;
            };
            let end = range.end.min(within.end);
            let mut at = range.start & !(record::ALIGN - 1);
            while at < end && left > 0 {
                // Parts overlap by the size of a record and its neighbours.
                let length = (end - at).min(PART + 2 * record::REACH);
                bytes.resize(usize::try_from(length).ok()?, 0);
                let most = match length > PART + record::REACH {
                    true => usize::try_from(PART + record::REACH).ok()?,
                    false => bytes.len(),
                };
                if memory.read_physical(Gpa(at), &mut bytes).is_ok()
                    && let Some(text) = record::find(&bytes, most)
                {
                    return Some(text);
                }
                at = at.saturating_add(PART);
                left = left.saturating_sub(PART);
            }
        }
        None
    }
}

fn read_u32(memory: &dyn PhysicalMemory, address: Gpa) -> Option<u32> {
    let mut bytes = [0; 4];
    memory.read_physical(address, &mut bytes).ok()?;
    Some(u32::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests;
