//! The common part of the fuzz targets: a kernel's types, queries about processes, and a guest
//! whose whole memory is the input.
//!
//! Each target passes its input to one decoder and queries everything of the result. Failures are a
//! panic, an endless walk and unbounded memory. Results are checked if something must hold for any
//! input.
//!
//! The stable toolchain is enough: `cargo fuzz run --sanitizer none TARGET corpus/TARGET
//! seeds/TARGET` in this folder. The example `fuzz-seeds` of introspect makes the seeds.
#![forbid(unsafe_code)]

#[path = "../../tests/images/mod.rs"]
pub mod images;

use std::ops::Range;
use std::sync::LazyLock;

use introspect::kernel::btf::Btf;
use introspect::system::PausedSystem;
use introspect::x86_64::AddressSpace;
use introspect::{Gpa, MemoryView, PausedMemory, PhysicalMemory, PhysicalReadError};

/// The start of the direct mapping: the input's first byte.
pub const START: u64 = 0xffff_8880_0000_0000;
/// The address of the two page tables, above all memory that they map.
const TABLES: u64 = 1 << 40;
const TABLE: u64 = 4096;
const GIGABYTE: u64 = 1 << 30;
/// The bits of an entry that is present, writable and for user mode.
const USABLE: u64 = 0b111;
/// The bit of a page in a table above the lowest.
const LARGE: u64 = 1 << 7;

static TYPES: LazyLock<Btf> = LazyLock::new(images::types);

/// The number of queries that [`ask`] knows.
pub const QUESTIONS: u8 = 4;

/// Makes one query about processes, in detail about `most` threads from number `first` on, and as
/// many open files of each. Any result is accepted.
///
/// A run makes only one query, so that it is short: programs, open files, mapped objects or stacks.
pub fn ask(look: PausedSystem<'_>, question: u8, first: usize, most: usize) {
    let tasks = look.threads().map(|tasks| tasks.items).unwrap_or_default();
    let first = first.checked_rem(tasks.len()).unwrap_or(0);
    let mut asked = tasks.iter().skip(first).take(most);
    match question % QUESTIONS {
        0 => asked.for_each(|task| {
            let _ = look.name(task);
            let _ = look.program(task, 256);
            let _ = look.namespace_pid(task);
            let _ = look.own_host_name(task);
            if let Ok(Some(node)) = look.cgroup_node(task) {
                let _ = look.cgroup_path(node);
            }
        }),
        1 => asked.for_each(|task| {
            let files = look.open_files(task).map(|files| files.items);
            for open in files.iter().flatten().take(most) {
                let _ = look.path_of(open.file.address);
            }
        }),
        2 => asked.for_each(|task| {
            let Ok(objects) = look.objects(task, None) else {
                return;
            };
            let Ok(Some(maps)) = look.maps(task) else {
                return;
            };
            let _ = objects.generated_named("main");
            for named in maps.areas.iter().take(most) {
                let address = named.area.start;
                let _ = objects.at(address).map(|object| object.resolve(address));
            }
        }),
        _ => {
            let modules = look.modules().map(|found| found.items);
            let Ok(unwinder) = look.kernel_unwinder(&modules.unwrap_or_default()) else {
                return;
            };
            if let Some(task) = asked.next()
                && let Ok(objects) = look.objects(task, None)
            {
                let stack = look.stack(task, &unwinder, &mut objects.unwinder());
                for frame in stack.user.iter().flat_map(|stack| &stack.frames).take(most) {
                    let address = frame.lookup_address();
                    let _ = objects.at(address).map(|object| object.resolve(address));
                }
            }
        }
    }
}

/// Returns the types of Linux 6.1.
#[must_use]
pub fn types() -> &'static Btf {
    &TYPES
}

/// A guest whose memory repeats the input everywhere. No pointer is invalid, and most lead in
/// circles.
pub struct Endless<'i> {
    input: &'i [u8],
}

impl<'i> Endless<'i> {
    /// Makes a guest of an input, unless that is empty.
    #[must_use]
    pub fn new(input: &'i [u8]) -> Option<Self> {
        (!input.is_empty()).then_some(Self { input })
    }

    /// Calls a closure with a view of the guest.
    pub fn look<T>(&self, with: impl FnOnce(MemoryView<'_>) -> T) -> T {
        with(PausedMemory::new(self).view(space()))
    }
}

/// Returns the address space that maps it.
#[must_use]
pub fn space() -> AddressSpace {
    AddressSpace {
        root: Gpa(TABLES),
        levels: 4,
    }
}

impl PhysicalMemory for Endless<'_> {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        for (at, byte) in (address.0..).zip(buf) {
            let table = at.checked_sub(TABLES).filter(|place| *place < 2 * TABLE);
            *byte = match table {
                Some(place) => entry(place / 8).to_le_bytes()[(place % 8) as usize],
                None => self.input[(at % self.input.len() as u64) as usize],
            };
        }
        Ok(())
    }

    fn ram(&self) -> Vec<Range<u64>> {
        std::iter::once(0..TABLES + 2 * TABLE).collect()
    }
}

/// Returns an entry. All entries of the first table point to the second, which maps 512 pages of 1
/// GiB.
fn entry(index: u64) -> u64 {
    match index.checked_sub(TABLE / 8) {
        None => (TABLES + TABLE) | USABLE,
        Some(page) => (page * GIGABYTE) | LARGE | USABLE,
    }
}
