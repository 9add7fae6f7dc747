//! Guest RAM: a memfd, or a snapshot's file mapped copy-on-write, mapped once and shared by
//! everyone.
//!
//! It owns the layout of guest-physical memory, below and above the hole under 4 GiB, and all byte
//! access to it from the host. A machine that boots gets a memfd, so that other processes can map
//! it too. A restored one maps the snapshot's memory file privately, so that many restores share
//! its clean pages.

mod access;
mod page_set;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::FromRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use devices::{HostWrites, WatchedMemory};
use vm_memory::bitmap::Bitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

pub use access::PhysicalWriteError;
pub(crate) use page_set::PageSet;

/// The start of the hole for devices and APICs below 4 GiB.
pub const HOLE_START: u64 = 0xc000_0000;
/// The end of that hole, where RAM continues.
pub const HOLE_END: u64 = 0x1_0000_0000;
/// The granularity of RAM sizes in bytes.
pub const PAGE_SIZE: u64 = 4096;
/// The smallest RAM size in bytes. The micro guest and its tables fit.
pub const MIN_RAM: u64 = 2 << 20;
/// The largest RAM size in bytes.
pub const MAX_RAM: u64 = 512 << 30;

/// The reason that guest RAM cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The size is not usable.
    #[error(
        "guest memory of {asked} bytes: must be a multiple of {PAGE_SIZE} between {MIN_RAM} (2M) and {MAX_RAM} (512G)"
    )]
    Size {
        /// The requested size in bytes.
        asked: u64,
    },
    /// The host refuses that much memory.
    #[error("guest memory of {asked} bytes: the host refuses it ({source}); ask for less memory")]
    Host {
        /// The requested size in bytes.
        asked: u64,
        /// The host's error.
        source: io::Error,
    },
    /// The host has less memory than the machine would need.
    #[error(
        "guest memory of {asked} bytes: the host has {available} bytes available; ask for less memory"
    )]
    NotAvailable {
        /// The requested size in bytes.
        asked: u64,
        /// The host's `MemAvailable` in bytes.
        available: u64,
    },
    /// The file behind the memory is too short.
    #[error(
        "memory file of {found} bytes: the machine has {asked} bytes of RAM; the file is damaged"
    )]
    ShortFile {
        /// The size in the machine's description, in bytes.
        asked: u64,
        /// The length of the file in bytes.
        found: u64,
    },
}

/// Guest RAM. Cloning shares it.
#[derive(Clone, Debug)]
pub struct GuestRam {
    map: WatchedMemory,
    /// The regions of `map`, for accesses on the hit path.
    mapped: [Mapped; REGIONS],
    file: Arc<File>,
    size: u64,
    /// Whether the host's writes are noted.
    watched: Arc<AtomicBool>,
    /// The noted writes of each region.
    writes: Arc<[HostWrites]>,
    /// The number of this RAM and its clones, which no other RAM has.
    number: u64,
}

/// The next number.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// The number of regions: RAM below the hole and above it.
const REGIONS: usize = 2;

/// The place of a region in the host. It is empty if there is no region.
#[derive(Clone, Copy, Debug, Default)]
struct Mapped {
    start: u64,
    length: u64,
    /// The address in the host, with its provenance exposed.
    host: usize,
}

/// Returns the ranges of RAM for `size` bytes: below the hole, and the rest from 4 GiB on.
pub fn layout(size: u64) -> Vec<Range<u64>> {
    let low = size.min(HOLE_START);
    let high = (size > low).then(|| HOLE_END..HOLE_END + (size - low));
    std::iter::once(0..low).chain(high).collect()
}

fn check_size(size: u64) -> Result<(), RamError> {
    if !size.is_multiple_of(PAGE_SIZE) || !(MIN_RAM..=MAX_RAM).contains(&size) {
        return Err(RamError::Size { asked: size });
    }
    Ok(())
}

impl GuestRam {
    /// Creates zeroed RAM of `size` bytes on a memfd.
    ///
    /// # Errors
    /// If the size is not usable or the host does not have it.
    pub fn new(size: u64) -> Result<Self, RamError> {
        Self::within(size, host_available())
    }

    /// Creates zeroed RAM on a host that has `available` bytes, if known.
    pub(crate) fn within(size: u64, available: Option<u64>) -> Result<Self, RamError> {
        check_size(size)?;
        if let Some(available) = available
            && size > available
        {
            return Err(RamError::NotAvailable {
                asked: size,
                available,
            });
        }
        // SAFETY: the name is a NUL-terminated literal and the flags are valid. The result is
        // checked.
        let fd = unsafe { libc::memfd_create(c"exotrace-guest-ram".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(RamError::Host {
                asked: size,
                source: io::Error::last_os_error(),
            });
        }
        // SAFETY: `fd` was just returned by memfd_create, and nobody else owns it.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(size).map_err(|source| RamError::Host {
            asked: size,
            source,
        })?;
        Self::map(file, size, libc::MAP_SHARED)
    }

    /// Creates RAM with the contents of `file`, copied on write. The file does not change.
    ///
    /// # Errors
    /// If the size is not usable, the file is shorter, or it cannot be mapped.
    pub fn copy_on_write(file: File, size: u64) -> Result<Self, RamError> {
        check_size(size)?;
        let found = file
            .metadata()
            .map_err(|source| RamError::Host {
                asked: size,
                source,
            })?
            .len();
        if found < size {
            return Err(RamError::ShortFile { asked: size, found });
        }
        Self::map(file, size, libc::MAP_PRIVATE)
    }

    fn map(file: File, size: u64, sharing: libc::c_int) -> Result<Self, RamError> {
        let host = |source| RamError::Host {
            asked: size,
            source,
        };
        let file = Arc::new(file);
        let watched = Arc::<AtomicBool>::default();
        let mut writes = Vec::new();
        let mut regions = Vec::new();
        let mut offset = 0;
        for range in layout(size) {
            let length = range.end - range.start;
            let notes = HostWrites::new(length as usize, watched.clone());
            writes.push(notes.clone());
            let region = MmapRegionBuilder::new_with_bitmap(length as usize, notes)
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(sharing | libc::MAP_NORESERVE)
                .with_file_offset(FileOffset::from_arc(file.clone(), offset))
                .build()
                .map_err(|e| host(io::Error::other(e)))?;
            let region = GuestRegionMmap::new(region, GuestAddress(range.start))
                .ok_or_else(|| host(io::Error::other("address overflow")))?;
            // SAFETY: the range is the mapping that was just made. The advice only excludes it from
            // core dumps.
            let advised = unsafe {
                libc::madvise(region.as_ptr().cast(), length as usize, libc::MADV_DONTDUMP)
            };
            if advised != 0 {
                return Err(host(io::Error::last_os_error()));
            }
            regions.push(region);
            offset += length;
        }
        let map = WatchedMemory::from_regions(regions).map_err(|e| host(io::Error::other(e)))?;
        let mut mapped = [Mapped::default(); REGIONS];
        for (slot, region) in mapped.iter_mut().zip(map.iter()) {
            *slot = Mapped {
                start: region.start_addr().0,
                length: region.len(),
                host: region.as_ptr().expose_provenance(),
            };
        }
        Ok(Self {
            map,
            mapped,
            file,
            size,
            watched,
            writes: writes.into(),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Returns the number of this RAM and its clones, unique in this process. The mapping lives as
    /// long as any of them.
    #[inline]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the total RAM in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the file behind the RAM: the memfd of a booted machine, or the snapshot's file of a
    /// restored one.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the rust-vmm view of the same memory.
    pub fn map_ref(&self) -> &WatchedMemory {
        &self.map
    }

    /// Starts or stops noting the pages that the host writes.
    ///
    /// Writers must be paused when this starts, or write with sequentially consistent operations.
    pub(crate) fn watch_writes(&self, watch: bool) {
        if watch {
            // Discards the notes of an earlier watch.
            let _ = self.take_written();
        }
        self.watched.store(watch, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Returns the pages that the host has written since the last call, or since watching began.
    /// Later reads see those writes.
    pub(crate) fn take_written(&self) -> PageSet {
        let mut written = PageSet::empty(self);
        for (region, writes) in self.writes.iter().enumerate() {
            written.add_words(region, &writes.take());
        }
        written
    }

    /// Notes a write through a pointer into RAM, or of a word of it. Every such writer must call
    /// it.
    ///
    /// Costs a relaxed load while writes are not watched.
    #[inline]
    pub(crate) fn wrote(&self, pointer: *const u8, length: usize) {
        if self.watched.load(Ordering::Relaxed) {
            self.note_write(pointer, length);
        }
    }

    #[cold]
    #[inline(never)]
    fn note_write(&self, pointer: *const u8, length: usize) {
        for (region, writes) in self.mapped.iter().zip(self.writes.iter()) {
            let offset = pointer.addr().wrapping_sub(region.host);
            if (offset as u64) < region.length {
                writes.mark_dirty(offset, length);
            }
        }
    }

    /// Returns (guest-physical start, length, host address) of each region, for KVM's memory slots.
    pub fn slots(&self) -> Vec<(u64, u64, u64)> {
        self.map
            .iter()
            .map(|r| (r.start_addr().0, r.len(), r.as_ptr() as u64))
            .collect()
    }

    /// Asks the host to back `range` with pages now, huge ones if it can.
    ///
    /// Single faults on the guest's first touches cost more. A refusal changes only speed.
    pub fn prefault(&self, range: Range<u64>) {
        for (start, length, host) in self.slots() {
            let from = range.start.max(start);
            let to = range.end.min(start + length);
            if from >= to {
                continue;
            }
            let address = (host + (from - start)) as *mut libc::c_void;
            // SAFETY: [address, address + to - from) lies inside a mapping owned by `self.map`.
            // Both calls only populate or tune it and never change its contents.
            unsafe {
                libc::madvise(address, (to - from) as usize, libc::MADV_HUGEPAGE);
                libc::madvise(address, (to - from) as usize, libc::MADV_POPULATE_WRITE);
            }
        }
    }
}

/// Returns the host's `MemAvailable` in bytes, if it is known.
fn host_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    line.split_whitespace()
        .nth(1)?
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}
