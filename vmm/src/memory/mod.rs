//! Guest RAM: a memfd, or a snapshot's file mapped copy-on-write, mapped once and shared by
//! everyone.
//!
//! It owns the layout of guest-physical memory, below and above the hole under 4 GiB, and all byte
//! access to it from the host. A machine that boots gets a memfd, so that other processes can map
//! it too. A restored one maps the snapshot's memory file privately, so that many restores share
//! its clean pages.

mod page_set;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::FromRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};

use devices::{HostWrites, WatchedMemory};
use introspect::{Gpa, PhysicalMemory, PhysicalReadError};
use vm_memory::bitmap::Bitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
};

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

/// An error for a range of guest-physical memory that is not RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guest-physical {address}, {length} bytes: not in guest RAM")]
pub struct PhysicalWriteError {
    /// The first byte.
    pub address: Gpa,
    /// The number of bytes.
    pub length: usize,
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
/// The longest access in bytes that goes word by word. Longer ones are left to vm-memory, whose
/// path to the bytes is longer.
const SHORT_ACCESS: usize = 64;

/// The size of a word in bytes.
const WORD: usize = 8;

/// A short range of RAM: its words, then its bytes.
struct Short<'a> {
    /// The address of the range in the host.
    start: *const u8,
    words: &'a [AtomicU64],
    bytes: &'a [AtomicU8],
}

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

    /// Writes `data` at a guest-physical address.
    ///
    /// # Errors
    /// If any byte of the range is not RAM. Bytes in RAM before it may have been written.
    pub fn write_physical(&self, address: Gpa, data: &[u8]) -> Result<(), PhysicalWriteError> {
        if let Some(short) = self.short(address, data.len()) {
            let start = short.start;
            let (words, bytes) = data.split_at(short.words.len() * WORD);
            for (place, word) in short.words.iter().zip(words.as_chunks().0) {
                place.store(u64::from_le_bytes(*word), Ordering::Relaxed);
            }
            for (place, byte) in short.bytes.iter().zip(bytes) {
                place.store(*byte, Ordering::Relaxed);
            }
            self.wrote(start, data.len());
            return Ok(());
        }
        self.map
            .write_slice(data, GuestAddress(address.0))
            .map_err(|_| PhysicalWriteError {
                address,
                length: data.len(),
            })
    }

    /// Reads one byte.
    ///
    /// # Errors
    /// If it is not RAM.
    pub fn read_byte(&self, address: Gpa) -> Result<u8, PhysicalReadError> {
        let mut byte = [0];
        self.read_physical(address, &mut byte)?;
        Ok(byte[0])
    }

    /// Returns the host address of `length` bytes of RAM that do not cross a region, for atomic
    /// access. Writers must report their writes ([`wrote`](Self::wrote)).
    pub(crate) fn host_address(&self, address: Gpa, length: u64) -> Option<*mut u8> {
        self.mapped.iter().find_map(|region| {
            let offset = address.0.checked_sub(region.start)?;
            let inside = offset < region.length && length <= region.length - offset;
            inside.then(|| {
                std::ptr::with_exposed_provenance_mut::<u8>(region.host)
                    .wrapping_add(offset as usize)
            })
        })
    }

    /// Returns the word at an address that is a multiple of 8, which the guest may change at any
    /// time.
    ///
    /// It stays in place for as long as RAM of this [number](Self::number) lives. Writers must
    /// report their writes ([`wrote`](Self::wrote)).
    #[inline]
    pub(crate) fn word(&self, address: Gpa) -> Option<&AtomicU64> {
        if !address.0.is_multiple_of(WORD as u64) {
            return None;
        }
        // Regions are whole pages, so a word does not cross the end of one.
        let within = |region: &Mapped| {
            let offset = address.0.wrapping_sub(region.start);
            (offset < region.length).then(|| region.host.wrapping_add(offset as usize))
        };
        let [low, high] = &self.mapped;
        let host = within(low).or_else(|| within(high))?;
        let pointer = std::ptr::with_exposed_provenance_mut::<u64>(host);
        // SAFETY: the pointer is into guest RAM, mapped as long as `self.map` lives, which the
        // result borrows. It is aligned, because regions begin at pages in the guest and in the
        // host. All access is atomic.
        Some(unsafe { AtomicU64::from_ptr(pointer) })
    }

    /// Stores a word at an address that is a multiple of 8. Otherwise, or outside RAM, stores
    /// nothing and returns `false`.
    #[inline]
    pub(crate) fn store_word(&self, address: Gpa, value: u64) -> bool {
        let Some(word) = self.word(address) else {
            return false;
        };
        word.store(value.to_le(), Ordering::Relaxed);
        self.wrote(word.as_ptr().cast(), WORD);
        true
    }

    /// Returns a short range of RAM, which the guest may change at any time: aligned words, then
    /// the remaining bytes.
    fn short(&self, address: Gpa, length: usize) -> Option<Short<'_>> {
        if length > SHORT_ACCESS {
            return None;
        }
        let pointer = self.host_address(address, length as u64)?;
        let words: &[AtomicU64] = if pointer.addr().is_multiple_of(WORD) {
            // SAFETY: `pointer` is aligned, and valid for at least `length` bytes as long as
            // `self.map` lives, which the result borrows. All access is atomic.
            unsafe { std::slice::from_raw_parts(pointer.cast(), length / WORD) }
        } else {
            &[]
        };
        let done = words.len() * WORD;
        // SAFETY: the bytes behind the words are valid likewise. Bytes need no alignment.
        let bytes = unsafe {
            std::slice::from_raw_parts(pointer.wrapping_add(done).cast::<AtomicU8>(), length - done)
        };
        Some(Short {
            start: pointer,
            words,
            bytes,
        })
    }
}

impl PhysicalMemory for GuestRam {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        if let Some(short) = self.short(address, buf.len()) {
            let (words, bytes) = buf.split_at_mut(short.words.len() * WORD);
            for (word, place) in words.as_chunks_mut().0.iter_mut().zip(short.words) {
                *word = place.load(Ordering::Relaxed).to_le_bytes();
            }
            for (byte, place) in bytes.iter_mut().zip(short.bytes) {
                *byte = place.load(Ordering::Relaxed);
            }
            return Ok(());
        }
        self.map
            .read_slice(buf, GuestAddress(address.0))
            .map_err(|_| PhysicalReadError {
                address,
                length: buf.len(),
            })
    }

    #[inline]
    fn read_word(&self, address: Gpa) -> Result<u64, PhysicalReadError> {
        if let Some(word) = self.word(address) {
            return Ok(u64::from_le(word.load(Ordering::Relaxed)));
        }
        let mut bytes = [0; WORD];
        self.read_physical(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn page_words(&self, address: Gpa) -> Option<&[AtomicU64]> {
        let page = Gpa(address.0 & !(PAGE_SIZE - 1));
        let first = self.host_address(page, PAGE_SIZE)?;
        let words = PAGE_SIZE as usize / WORD;
        // SAFETY: the whole page is in RAM, mapped as long as `self.map` lives, which the result
        // borrows. It is aligned, because regions begin at pages in the guest and in the host. All
        // access is atomic.
        Some(unsafe { std::slice::from_raw_parts(first.cast(), words) })
    }

    fn ram(&self) -> Vec<Range<u64>> {
        layout(self.size)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn ram_goes_on_above_the_hole() {
        let layout =
            |size| -> Vec<(u64, u64)> { layout(size).iter().map(|r| (r.start, r.end)).collect() };
        assert_eq!(layout(256 << 20), [(0, 256 << 20)]);
        assert_eq!(
            layout(4 << 30),
            [(0, HOLE_START), (HOLE_END, HOLE_END + (1 << 30))]
        );
    }

    #[test]
    fn unusable_sizes_are_refused_with_their_value() {
        for size in [0, 4096, (2 << 20) + 1, MAX_RAM + PAGE_SIZE] {
            let error = GuestRam::new(size).unwrap_err().to_string();
            assert!(error.contains(&size.to_string()), "{error}");
        }
    }

    #[test]
    fn both_sides_of_the_hole_are_memory_and_the_hole_is_not() {
        // Only touched pages are ever allocated, so a small host suffices.
        let ram = GuestRam::within((3 << 30) + (64 << 20), None).unwrap();
        for address in [0, HOLE_START - 8, HOLE_END, HOLE_END + (64 << 20) - 8] {
            ram.write_physical(Gpa(address), &address.to_le_bytes())
                .unwrap();
            let mut back = [0; 8];
            ram.read_physical(Gpa(address), &mut back).unwrap();
            assert_eq!(u64::from_le_bytes(back), address);
        }
        assert!(ram.write_physical(Gpa(HOLE_START), &[1]).is_err());
        assert!(ram.read_byte(Gpa(HOLE_END + (64 << 20))).is_err());
    }

    /// Tests short and long accesses, aligned and not, also across pages and up to the last byte.
    #[test]
    fn every_length_and_alignment_reads_back_what_was_written() {
        let ram = GuestRam::new(MIN_RAM).unwrap();
        let data: Vec<u8> = (0..200).collect();
        for length in [0, 1, 7, 8, 9, 16, 63, 64, 65, 200] {
            for address in (PAGE_SIZE - 12..PAGE_SIZE + 12).chain([MIN_RAM - length as u64]) {
                ram.write_physical(Gpa(address - 1), &[0xee]).unwrap();
                ram.write_physical(Gpa(address), &data[..length]).unwrap();
                let mut back = vec![0; length];
                ram.read_physical(Gpa(address), &mut back).unwrap();
                assert_eq!(back, data[..length], "{length} bytes at {address:#x}");
                assert_eq!(ram.read_byte(Gpa(address - 1)).unwrap(), 0xee);
            }
            let beyond = Gpa(MIN_RAM - length as u64 + 1);
            assert!(length == 0 || ram.write_physical(beyond, &data[..length]).is_err());
        }
    }

    #[test]
    fn words_are_what_bytes_are() {
        let ram = GuestRam::new(MIN_RAM).unwrap();
        let last = MIN_RAM - WORD as u64;
        for address in [0, PAGE_SIZE - 8, last] {
            assert!(ram.store_word(Gpa(address), 0x1122_3344_5566_7788));
            assert_eq!(ram.read_byte(Gpa(address)).unwrap(), 0x88);
            assert_eq!(ram.read_word(Gpa(address)).unwrap(), 0x1122_3344_5566_7788);
        }
        ram.write_physical(Gpa(0x13), &[1, 2, 3, 4, 5, 6, 7, 8])
            .unwrap();
        assert_eq!(ram.read_word(Gpa(0x13)).unwrap(), 0x0807_0605_0403_0201);
        let words = ram.page_words(Gpa(PAGE_SIZE - 3)).unwrap();
        assert_eq!(words.len(), 512);
        assert_eq!(words[511].load(Ordering::Relaxed), 0x1122_3344_5566_7788);
        assert!(ram.page_words(Gpa(MIN_RAM)).is_none());
        for address in [0x13, last + 1, MIN_RAM, u64::MAX - 7] {
            assert!(!ram.store_word(Gpa(address), 0), "{address:#x}");
        }
        for address in [last + 1, MIN_RAM, u64::MAX - 7] {
            assert!(ram.read_word(Gpa(address)).is_err(), "{address:#x}");
        }
    }

    #[test]
    fn what_the_host_writes_is_noted_while_that_is_watched() {
        let ram = GuestRam::new(MIN_RAM).unwrap();
        ram.write_physical(Gpa(0), &[1]).unwrap();
        ram.watch_writes(true);
        ram.write_physical(Gpa(PAGE_SIZE - 1), &[1, 2]).unwrap();
        ram.write_physical(Gpa(4 * PAGE_SIZE), &[1; 100]).unwrap();
        ram.store_word(Gpa(6 * PAGE_SIZE), 1);
        ram.map_ref()
            .write_obj(1u16, GuestAddress(8 * PAGE_SIZE))
            .unwrap();
        let pages = |set: PageSet| -> Vec<u64> {
            let runs = set.runs(PAGE_SIZE);
            runs.map(|run| run.start / PAGE_SIZE).collect()
        };
        assert_eq!(pages(ram.take_written()), [0, 1, 4, 6, 8]);
        ram.watch_writes(false);
        ram.store_word(Gpa(6 * PAGE_SIZE), 1);
        assert_eq!(pages(ram.take_written()), [0; 0]);
    }

    #[test]
    fn a_copy_on_write_machine_leaves_its_file_alone() {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, &vec![7; MIN_RAM as usize]).unwrap();
        let ram = GuestRam::copy_on_write(file.try_clone().unwrap(), MIN_RAM).unwrap();
        ram.write_physical(Gpa(100), &[9]).unwrap();
        assert_eq!(ram.read_byte(Gpa(100)).unwrap(), 9);
        let other = GuestRam::copy_on_write(file, MIN_RAM).unwrap();
        assert_eq!(other.read_byte(Gpa(100)).unwrap(), 7);
    }
}
