//! Dumps of guests in the compressed format of kdump, as makedumpfile(8) and QEMU's
//! `dump-guest-memory` write it.
//!
//! | In blocks of the header's size | |
//! |---|---|
//! | 0 | the header (`struct disk_dump_header` of makedumpfile) |
//! | 1 | more of it (`struct kdump_sub_header`), with the places of notes |
//! | then | a bitmap of the pages that are RAM, and one of those in the dump |
//! | then | a descriptor for each page in the dump: place, length, flags |
//!
//! Pages are read when they are asked for.

mod flat;

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use flate2::read::ZlibDecoder;
use introspect::core_file::{self, CoreFileError};
use introspect::x86_64::CpuState;

use crate::file_memory::{PAGE, Page, PageSource};
use flat::Dump;

/// The beginning of the header.
const SIGNATURE: &[u8; 8] = b"KDUMP   ";
/// The size of the header that is read, in bytes.
const HEADER: usize = 464;
/// Offsets in it, of words of 4 bytes.
const VERSION: usize = 8;
const STATUS: usize = 424;
const BLOCK_SIZE: usize = 428;
const SUB_HEADER_BLOCKS: usize = 432;
const BITMAP_BLOCKS: usize = 436;
const MOST_PAGES: usize = 440;
/// The size of the second header that is read, in bytes.
const SUB_HEADER: usize = 104;
/// Offsets in it, of words of 8 bytes.
const NOTES: usize = 48;
const NOTES_SIZE: usize = 56;
const MOST_PAGES_64: usize = 96;
/// The version from which on the number of pages has 64 bits.
const WITH_64_BITS: u32 = 6;
/// The size of a descriptor in bytes.
const DESCRIPTOR: u64 = 24;
/// The flags of a page, and the status of the dump.
const ZLIB: u32 = 1;
const LZO: u32 = 2;
const SNAPPY: u32 = 4;
const INCOMPLETE: u32 = 8;
const ZSTD: u32 = 0x20;
/// The largest number of pages: 4 TiB of memory.
const LIMIT_PAGES: u64 = 1 << 30;
/// The largest size of notes that is read, in bytes.
const LIMIT_NOTES: u64 = 64 << 20;
/// The number of bytes of the bitmap whose pages are counted together.
const COUNTED: usize = 512;

/// The reason that a dump is of no use.
#[derive(Debug, thiserror::Error)]
pub enum KdumpError {
    /// It cannot be read, or is cut off.
    #[error("the dump is cut off or cannot be read: {0}")]
    Read(#[from] io::Error),
    /// The header has impossible values.
    #[error("the header of the dump is damaged: {what} of {found}")]
    Header {
        /// The value.
        what: &'static str,
        /// Its number.
        found: u64,
    },
    /// Its notes are damaged.
    #[error("the notes of the dump: {0}")]
    Notes(#[from] CoreFileError),
}

/// A dump.
pub(crate) struct Kdump {
    dump: Dump,
    /// The bitmap of the pages in the dump.
    pages: Vec<u8>,
    /// The number of pages before each [`COUNTED`] bytes of it.
    before: Vec<u64>,
    /// The place of the descriptors.
    descriptors: u64,
    cpus: Vec<CpuState>,
    crashed: Vec<CpuState>,
}

impl fmt::Debug for Kdump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kdump")
            .field("dump", &self.dump)
            .finish_non_exhaustive()
    }
}

/// Checks whether a file begins as a dump, flattened or not.
pub(crate) fn is_meant(file: &File) -> io::Result<bool> {
    let mut start = [0; 16];
    let read = file.read_at(&mut start, 0)?;
    let start = start.get(..read).unwrap_or_default();
    Ok(start.starts_with(SIGNATURE) || Dump::is_flat(start))
}

impl Kdump {
    /// Opens a dump.
    ///
    /// # Errors
    /// If it is none, or damaged, or compressed in another way.
    pub(crate) fn open(file: File) -> Result<Self, KdumpError> {
        let dump = Dump::open(file)?;
        let mut header = [0; HEADER];
        dump.read(&mut header, 0)?;
        let word = |at: usize| {
            let bytes = header.get(at..at + 4).and_then(|b| b.try_into().ok());
            bytes.map_or(0, u32::from_le_bytes)
        };
        let damaged = |what, found: u64| KdumpError::Header { what, found };
        if !header.starts_with(SIGNATURE) {
            return Err(damaged("a signature", u64::from(word(0))));
        }
        let block = u64::from(word(BLOCK_SIZE));
        if block != PAGE {
            return Err(damaged("a block size", block));
        }
        if word(STATUS) & INCOMPLETE != 0 {
            return Err(damaged("a status (incomplete)", u64::from(word(STATUS))));
        }
        let mut more = [0; SUB_HEADER];
        dump.read(&mut more, block)?;
        let long = |at: usize| {
            let bytes = more.get(at..at + 8).and_then(|b| b.try_into().ok());
            bytes.map_or(0, u64::from_le_bytes)
        };
        let most = match word(VERSION) >= WITH_64_BITS {
            true => long(MOST_PAGES_64),
            false => u64::from(word(MOST_PAGES)),
        };
        let sub_blocks = u64::from(word(SUB_HEADER_BLOCKS));
        let bitmap_blocks = u64::from(word(BITMAP_BLOCKS));
        let half = bitmap_blocks * block / 2;
        if most > LIMIT_PAGES || most.div_ceil(8) > half || half > LIMIT_PAGES / 8 + block {
            return Err(damaged("a number of pages", most));
        }
        let bitmaps = (1 + sub_blocks) * block;
        let mut pages = vec![0; usize::try_from(most.div_ceil(8)).unwrap_or_default()];
        dump.read(&mut pages, bitmaps + half)?;
        let size = long(NOTES_SIZE).min(LIMIT_NOTES);
        let mut notes = vec![0; usize::try_from(size).unwrap_or_default()];
        dump.read(&mut notes, long(NOTES))?;
        let core_file::Cpus { cpus, crashed } = core_file::cpus_of_notes(&notes)?;
        Ok(Self {
            before: counts(&pages),
            pages,
            descriptors: bitmaps + bitmap_blocks * block,
            dump,
            cpus,
            crashed,
        })
    }

    /// Returns the CPUs in QEMU's notes.
    pub(crate) fn cpus(&self) -> &[CpuState] {
        &self.cpus
    }

    /// Returns the CPUs in the notes of a kernel that has crashed, with their general registers.
    pub(crate) fn crashed_cpus(&self) -> &[CpuState] {
        &self.crashed
    }

    fn has(&self, page: u64) -> bool {
        let byte = usize::try_from(page / 8).ok();
        let byte = byte.and_then(|at| self.pages.get(at));
        byte.is_some_and(|byte| byte >> (page % 8) & 1 == 1)
    }

    /// Returns the number of the descriptor of a page, which is in the dump.
    fn number(&self, page: u64) -> Option<u64> {
        let byte = usize::try_from(page / 8).ok()?;
        let first = byte / COUNTED;
        let whole = self.pages.get(first * COUNTED..byte)?;
        let last = self.pages.get(byte)? & ((1 << (page % 8)) - 1);
        let whole: u64 = whole.iter().map(|byte| u64::from(byte.count_ones())).sum();
        Some(self.before.get(first)? + whole + u64::from(last.count_ones()))
    }
}

/// Returns the number of pages before each [`COUNTED`] bytes of a bitmap.
fn counts(pages: &[u8]) -> Vec<u64> {
    let mut sum = 0;
    let counts = pages.chunks(COUNTED).map(|chunk| {
        let before = sum;
        sum += chunk
            .iter()
            .map(|byte| u64::from(byte.count_ones()))
            .sum::<u64>();
        before
    });
    counts.collect()
}

impl PageSource for Kdump {
    fn page(&self, address: u64, page: &mut Page) -> Option<()> {
        let number = address / PAGE;
        if !self.has(number) {
            return None;
        }
        let mut descriptor = [0; DESCRIPTOR as usize];
        let at = self.descriptors + self.number(number)? * DESCRIPTOR;
        self.dump.read(&mut descriptor, at).ok()?;
        let [place, sizes, _] = descriptor.as_chunks::<8>().0.try_into().ok()?;
        let place = u64::from_le_bytes(place);
        let sizes = u64::from_le_bytes(sizes);
        let (size, flags) = (sizes as u32, (sizes >> 32) as u32);
        let size = u64::from(size).min(2 * PAGE);
        let mut bytes = vec![0; usize::try_from(size).ok()?];
        self.dump.read(&mut bytes, place).ok()?;
        match flags {
            0 => page.copy_from_slice(bytes.get(..PAGE as usize)?),
            ZLIB => ZlibDecoder::new(bytes.as_slice())
                .read_exact(&mut **page)
                .ok()?,
            LZO => {
                let length = lzokay::decompress::decompress(&bytes, &mut **page);
                length.ok().filter(|length| *length == PAGE as usize)?;
            }
            SNAPPY => {
                let length = snap::raw::Decoder::new().decompress(&bytes, &mut **page);
                length.ok().filter(|length| *length == PAGE as usize)?;
            }
            ZSTD => ruzstd::decoding::StreamingDecoder::new(bytes.as_slice())
                .ok()?
                .read_exact(&mut **page)
                .ok()?,
            _ => return None,
        }
        Some(())
    }

    fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for page in (0..self.pages.len() as u64 * 8).filter(|page| self.has(*page)) {
            let (start, end) = (page * PAGE, (page + 1) * PAGE);
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::ZlibEncoder;

    use super::*;

    /// The first byte of each page in the dump, by its number.
    const PAGES: [(u64, u8); 4] = [(0, 1), (2, 3), (9, 7), (4100, 9)];

    /// Returns a dump whose pages are full of one byte each, compressed if `flags` say so.
    fn dump(flags: u32) -> Vec<u8> {
        let block = PAGE as usize;
        let mut bytes = vec![0; 4 * block];
        bytes[..8].copy_from_slice(SIGNATURE);
        for (at, word) in [
            (VERSION, 6),
            (STATUS, flags),
            (BLOCK_SIZE, 4096),
            (SUB_HEADER_BLOCKS, 1),
            (BITMAP_BLOCKS, 2),
        ] {
            bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(word));
        }
        bytes[block + MOST_PAGES_64..][..8].copy_from_slice(&5000u64.to_le_bytes());
        for (page, _) in PAGES {
            bytes[3 * block + page as usize / 8] |= 1 << (page % 8);
        }
        let mut data = Vec::new();
        let from = 4 * block + PAGES.len() * DESCRIPTOR as usize;
        for (_, byte) in PAGES {
            let page = [byte; PAGE as usize];
            let page = match flags {
                ZLIB => {
                    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
                    encoder.write_all(&page).unwrap();
                    encoder.finish().unwrap()
                }
                SNAPPY => snap::raw::Encoder::new().compress_vec(&page).unwrap(),
                LZO => lzokay::compress::compress(&page).unwrap(),
                _ => page.to_vec(),
            };
            bytes.extend(((from + data.len()) as u64).to_le_bytes());
            bytes.extend((page.len() as u32).to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend([0; 8]);
            data.extend(page);
        }
        bytes.extend(data);
        bytes
    }

    /// Returns a dump in the flattened form, in pieces of 1000 bytes that come in reverse.
    fn flattened(dump: &[u8]) -> Vec<u8> {
        let mut bytes = b"makedumpfile\0".to_vec();
        bytes.resize(4096, 0);
        for (number, piece) in dump.chunks(1000).enumerate().rev() {
            bytes.extend((number as i64 * 1000).to_be_bytes());
            bytes.extend((piece.len() as i64).to_be_bytes());
            bytes.extend(piece);
        }
        bytes.extend([0xff; 16]);
        bytes
    }

    fn open(bytes: &[u8]) -> Result<Kdump, KdumpError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        assert!(is_meant(&file).unwrap());
        Kdump::open(file)
    }

    #[test]
    fn pages_are_read_in_each_form() {
        for (name, bytes) in [
            ("plain", dump(0)),
            ("zlib", dump(ZLIB)),
            ("snappy", dump(SNAPPY)),
            ("lzo", dump(LZO)),
            ("flattened", flattened(&dump(ZLIB))),
        ] {
            let found = open(&bytes).unwrap();
            let ranges: Vec<_> = PAGES
                .iter()
                .map(|(page, _)| page * PAGE..(page + 1) * PAGE)
                .collect();
            assert_eq!(found.ranges(), ranges, "{name}");
            for (number, byte) in PAGES {
                let mut page: Page = Box::new([0; PAGE as usize]);
                found.page(number * PAGE, &mut page).unwrap();
                assert_eq!(*page, [byte; PAGE as usize], "{name}");
            }
            let mut page: Page = Box::new([0; PAGE as usize]);
            for missing in [1, 8, 4999, 5000, 1 << 40] {
                assert_eq!(found.page(missing * PAGE, &mut page), None, "{name}");
            }
        }
    }

    #[test]
    fn damage_is_told_and_never_more() {
        for bytes in [dump(ZLIB), flattened(&dump(ZLIB))] {
            for length in (16..bytes.len()).step_by(97) {
                let mut page: Page = Box::new([0; PAGE as usize]);
                if let Ok(found) = open(&bytes[..length]) {
                    for (number, _) in PAGES {
                        found.page(number * PAGE, &mut page);
                    }
                }
            }
            for at in (16..bytes.len().min(20_000)).step_by(13) {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0xff;
                let mut page: Page = Box::new([0; PAGE as usize]);
                if let Ok(found) = open(&damaged) {
                    found.page(2 * PAGE, &mut page);
                }
            }
        }
    }
}
