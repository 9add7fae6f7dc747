//! The record of a panic in the kernel's log, recognised among other bytes.
//!
//! The log's text is a ring of blocks (kernel/printk/printk_ringbuffer.c, since Linux 5.10). Each
//! is the record's id (8 bytes, at a multiple of 8) and its text. Ids count up by one. The text
//! alone proves nothing. It is also in the kernel's constants, in log files in the page cache and
//! in the memory of log readers. Those copies lack an id with a neighbour before or after it.

use memchr::memmem;

use crate::bytes::u64_at;

/// The start of the record's text.
pub(super) const START: &[u8] = b"Kernel panic - not syncing: ";
/// Alignment of blocks in bytes.
pub(super) const ALIGN: u64 = 8;
/// The maximum size of a block in bytes: its id, the longest text (`PRINTKRB_RECORD_MAX`, 1024),
/// alignment.
pub(super) const REACH: u64 = 1024 + 2 * ALIGN;

/// The reach, and the size of an id, as lengths.
const LONGEST: usize = 1024 + 2 * WORD;
const WORD: usize = 8;
/// Ids have 62 bits. They start slightly below the highest and wrap to 0.
const ID_BITS: u64 = (1 << 62) - 1;
const HIGH_IDS: u64 = ID_BITS & !0xffff_ffff;
const LOW_IDS: u64 = 1 << 40;
/// Length of a level prefix (`\0010`) in bytes. The kernel removes it by moving the text but not
/// its end.
const LEVEL: usize = 2;

/// The maximum number of matches examined in one part of memory. A log has few; more would be
/// crafted to make the search slow.
const MOST_PLACES: usize = 1024;

/// Returns the message of the first record of a panic in `bytes`, which begin at a multiple of 8.
/// The text begins before `most`; bytes beyond are searched only for its end.
pub(super) fn find(bytes: &[u8], most: usize) -> Option<String> {
    let places = memmem::find_iter(bytes, START).take_while(|at| *at < most);
    let mut places = places.take(MOST_PLACES);
    places.find_map(|at| message_at(bytes, at))
}

/// Returns the message of the record whose text is at `at`, if it is one.
fn message_at(bytes: &[u8], at: usize) -> Option<String> {
    let block = at.checked_sub(WORD)?;
    let id = u64_at(bytes, block).filter(|id| block.is_multiple_of(WORD) && is_id(*id))?;
    let behind = following(bytes, at, id.wrapping_add(1) & ID_BITS);
    if behind.is_none() && !is_preceded(bytes, block, id.wrapping_sub(1) & ID_BITS) {
        return None;
    }
    let end = behind.unwrap_or_else(|| bytes.len().min(block.saturating_add(LONGEST)));
    let text = without_end(bytes.get(at..end)?);
    let message = String::from_utf8_lossy(text.get(START.len()..)?);
    Some(message.trim().to_owned())
}

fn is_id(id: u64) -> bool {
    (HIGH_IDS..=ID_BITS).contains(&id) || id < LOW_IDS
}

/// Finds the block of `next` after the text at `at`.
fn following(bytes: &[u8], at: usize, next: u64) -> Option<usize> {
    let places = (at.saturating_add(WORD)..at.saturating_add(LONGEST)).step_by(WORD);
    places
        .take_while(|place| *place < bytes.len())
        .find(|place| u64_at(bytes, *place) == Some(next))
}

/// Checks whether the block of `last` precedes the one at `block`.
fn is_preceded(bytes: &[u8], block: usize, last: u64) -> bool {
    let first = block.saturating_sub(LONGEST);
    let mut places = (first..block).step_by(WORD);
    places.any(|place| u64_at(bytes, place) == Some(last))
}

/// Returns the record's text, without the rest of its block.
fn without_end(held: &[u8]) -> &[u8] {
    let is_end = |byte: &u8| byte.is_ascii_control() && *byte != b'\t';
    let Some(end) = held.iter().position(is_end) else {
        return held;
    };
    let text = held.get(..end).unwrap_or(held);
    // Since Linux 5.12 the line break stays in the block, and the old end of the moved text follows
    // it.
    match (held.get(end), text.len().checked_sub(LEVEL)) {
        (Some(b'\n'), Some(moved)) => {
            let (text, left) = text.split_at(moved);
            match text.ends_with(left) {
                true => text,
                false => held.get(..end).unwrap_or(held),
            }
        }
        _ => text,
    }
}
