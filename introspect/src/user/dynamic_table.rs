//! The table of `PT_DYNAMIC`, by which the dynamic linker finds an object's symbols without any
//! section header.
//!
//! The table lacks the number of symbols, which the hash tables have.

use object::LittleEndian;
use object::elf;
use object::read::elf::Dyn;

use super::lost::LostReason;
use super::object_file::ObjectFile;
use crate::bytes::u32_at;

/// The maximum size of the table in bytes. A library has some thirty entries of 16 bytes.
const MAX_TABLE: u64 = 64 << 10;
/// The maximum size of the buckets of a hash table in bytes: more than a million buckets.
const MAX_BUCKETS: u64 = 4 << 20;
/// The number of bytes of a chain that are read at a time.
const CHAIN_ROUND: u64 = 256;
/// The maximum number of such reads.
const MAX_CHAIN_ROUNDS: usize = 64;

/// The location of the symbols, by link-time addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DynamicSymbols {
    /// The address of the first symbol.
    pub(super) symbols: u64,
    /// The number of symbols.
    pub(super) count: u64,
    /// The address of the first byte of their names.
    pub(super) strings: u64,
    /// The size of the names in bytes.
    pub(super) strings_size: u64,
}

/// The values of the entries that are used here.
#[derive(Debug, Default)]
struct Entries {
    symbols: Option<u64>,
    strings: Option<u64>,
    strings_size: Option<u64>,
    hash: Option<u64>,
    gnu_hash: Option<u64>,
}

/// Finds the dynamic symbols. Returns `None` if the object is linked statically.
///
/// # Errors
/// If the table or a hash table is missing or damaged.
pub(super) fn find(object: &ObjectFile<'_>) -> Result<Option<DynamicSymbols>, LostReason> {
    let segments = object.segments().iter();
    let Some(segment) = segments.clone().find(|s| s.kind == elf::PT_DYNAMIC) else {
        return Ok(None);
    };
    let bytes = object.segment_bytes(segment, MAX_TABLE)?;
    let entries = match object.is_64_bit() {
        true => entries::<elf::Dyn64<LittleEndian>>(&bytes),
        false => entries::<elf::Dyn32<LittleEndian>>(&bytes),
    };
    let (Some(symbols), Some(strings)) = (entries.symbols, entries.strings) else {
        return Ok(None);
    };
    let count = match (entries.hash, entries.gnu_hash) {
        (Some(hash), gnu) => match (sysv_count(object, hash), gnu) {
            (Err(_), Some(gnu)) => gnu_count(object, gnu)?,
            (count, _) => count?,
        },
        (None, Some(gnu)) => gnu_count(object, gnu)?,
        (None, None) => {
            return Err(damaged(
                "neither DT_HASH nor DT_GNU_HASH counts its symbols",
            ));
        }
    };
    Ok(Some(DynamicSymbols {
        symbols: object.dynamic_address(symbols),
        count,
        strings: object.dynamic_address(strings),
        strings_size: entries.strings_size.unwrap_or(u64::MAX),
    }))
}

fn damaged(reason: &str) -> LostReason {
    LostReason::Damaged(reason.to_owned())
}

fn entries<D: Dyn<Endian = LittleEndian>>(bytes: &[u8]) -> Entries {
    let count = bytes.len() / size_of::<D>();
    let mut found = Entries::default();
    let Ok((table, _)) = object::pod::slice_from_bytes::<D>(bytes, count) else {
        return found;
    };
    for entry in table {
        let value = Some(entry.val(LittleEndian));
        match entry.tag(LittleEndian) {
            elf::DT_NULL => break,
            elf::DT_SYMTAB => found.symbols = value,
            elf::DT_STRTAB => found.strings = value,
            elf::DT_STRSZ => found.strings_size = value,
            elf::DT_HASH => found.hash = value,
            elf::DT_GNU_HASH => found.gnu_hash = value,
            _ => {}
        }
    }
    found
}

/// Reads the number of symbols, the second word of a System V hash table.
fn sysv_count(object: &ObjectFile<'_>, hash: u64) -> Result<u64, LostReason> {
    let table = object.sparse_at(object.dynamic_address(hash), 8)?;
    let count = table.get(0..8).and_then(|words| u32_at(words, 4));
    count
        .map(u64::from)
        .ok_or_else(|| damaged("DT_HASH is cut short"))
}

/// Computes the number of symbols from a GNU hash table. It holds a bloom filter, the first symbol
/// of each bucket, and a word for each symbol from the first hashed one on. The low bit of the word
/// marks the last symbol of its bucket. The last symbol is the last of the bucket that starts last.
fn gnu_count(object: &ObjectFile<'_>, hash: u64) -> Result<u64, LostReason> {
    let cut = || damaged("DT_GNU_HASH is cut short");
    let hash = object.dynamic_address(hash);
    let header = object.sparse_at(hash, 16)?;
    let header = |at| header.get(0..16).and_then(|header| u32_at(header, at));
    let (Some(buckets), Some(first), Some(filter)) = (header(0), header(4), header(8)) else {
        return Err(cut());
    };
    let (buckets, first) = (u64::from(buckets), u64::from(first));
    let filter_word = if object.is_64_bit() { 8 } else { 4 };
    // Three 32-bit numbers: added to an address in a segment, no sum below is near 2^64.
    let buckets_at = hash.saturating_add(16 + u64::from(filter) * filter_word);
    let chains_at = buckets_at.saturating_add(buckets * 4);
    let size = LostReason::bounded(buckets * 4, MAX_BUCKETS)?;
    let heads = object.sparse_at(buckets_at, buckets * 4)?;
    let heads = heads.get(0..size).ok_or_else(cut)?.chunks_exact(4);
    let last = heads
        .filter_map(|head| u32_at(head, 0))
        .max()
        .map_or(0, u64::from);
    let Some(mut chain) = last.checked_sub(first).filter(|_| last > 0) else {
        // Nothing is hashed. All symbols before are undefined.
        return Ok(first);
    };
    // A bucket's chain is a few words long. Each round ends at the end of the segment at the
    // latest.
    for _ in 0..MAX_CHAIN_ROUNDS {
        let words = object.sparse_at(chains_at.saturating_add(chain * 4), CHAIN_ROUND)?;
        let words = words.get(0..words.len() & !3).ok_or_else(cut)?;
        let count = words.len() as u64 / 4;
        let end = words
            .chunks_exact(4)
            .position(|word| u32_at(word, 0).is_some_and(|word| word & 1 != 0));
        match end {
            Some(end) => return Ok(first + chain + end as u64 + 1),
            None if count == 0 => return Err(cut()),
            None => chain += count,
        }
    }
    Err(damaged("a chain of DT_GNU_HASH does not end"))
}
