//! A query about processes of the tests' saved memory image with damaged words, which the input
//! selects. Most pointers are those of a real kernel, to data of another type or that no longer
//! exists. The first byte also selects the query and its subject.
#![no_main]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::LazyLock;

use hostile::{QUESTIONS, ask, images, types};
use introspect::core_file::CoreFile;
use introspect::kernel::running::RunningKernel;
use introspect::system::System;
use introspect::x86_64::PAGE;
use introspect::{Gpa, PausedMemory, PhysicalMemory, PhysicalReadError};
use libfuzzer_sys::fuzz_target;

/// The maximum number of threads that are read one by one.
const MOST: usize = 2;
/// The maximum number of words damaged in one run.
const MOST_DAMAGE: usize = 64;
const WORD: u64 = 8;
/// The bit in the number of the damaged word that selects a bit flip instead of a word from
/// elsewhere.
const TURNED: u16 = 1 << 15;

static CORE: LazyLock<CoreFile> = LazyLock::new(images::core);

static PAGES: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let ram = CORE.ram();
    ram.iter()
        .flat_map(|range| range.clone().step_by(PAGE as usize))
        .collect()
});

static SYSTEM: LazyLock<System> = LazyLock::new(|| {
    let memory = PausedMemory::new(&*CORE);
    let cpu = &CORE.cpus()[0];
    let space = memory.view(cpu.address_space());
    let mut kernel = RunningKernel::find(space, cpu, 0).expect("a kernel");
    kernel.types = Ok(types().clone());
    System::new(&kernel, &memory)
});

/// The image with other words at these addresses.
struct Damaged(BTreeMap<u64, [u8; WORD as usize]>);

impl Damaged {
    /// Reads the damage as pages and words of the image: the target, and the source or the bit.
    fn new(input: &[u8]) -> Self {
        let mut words = BTreeMap::new();
        let place = |page: u16, word: u16| {
            let page = PAGES[usize::from(page) % PAGES.len()];
            page + u64::from(word) % (PAGE / WORD) * WORD
        };
        for damage in input.chunks_exact(8).take(MOST_DAMAGE) {
            let [page, word, from, which] =
                [0, 2, 4, 6].map(|at| u16::from_le_bytes([damage[at], damage[at + 1]]));
            let at = place(page, word & !TURNED);
            let source = if word & TURNED == 0 {
                place(from, which)
            } else {
                at
            };
            let mut value = [0; WORD as usize];
            if CORE.read_physical(Gpa(source), &mut value).is_err() {
                continue;
            }
            if word & TURNED != 0 {
                value[usize::from(which) / 8 % 8] ^= 1 << (which % 8);
            }
            words.insert(at, value);
        }
        Self(words)
    }
}

impl PhysicalMemory for Damaged {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        CORE.read_physical(address, buf)?;
        let end = address.0 + buf.len() as u64;
        let first = address.0.saturating_sub(WORD - 1);
        for (word, value) in self.0.range(first..end) {
            for (at, byte) in (*word..).zip(value) {
                if (address.0..end).contains(&at) {
                    buf[(at - address.0) as usize] = *byte;
                }
            }
        }
        Ok(())
    }

    fn ram(&self) -> Vec<Range<u64>> {
        CORE.ram()
    }
}

fuzz_target!(|bytes: &[u8]| {
    let damaged = Damaged::new(bytes);
    let memory = PausedMemory::new(&damaged);
    let choice = bytes.first().copied().unwrap_or(0);
    let look = SYSTEM.look(&memory, CORE.cpus());
    ask(
        look,
        choice % QUESTIONS,
        usize::from(choice / QUESTIONS),
        MOST,
    );
});
