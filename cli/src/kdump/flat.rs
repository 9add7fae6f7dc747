//! The flattened form of a dump, in which it can be written to a pipe: a header of 4096 bytes, then
//! pieces, each with its place in the dump and its length (makedumpfile(8), `-F`; dump/dump.c of
//! QEMU, which writes no other).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

/// The beginning of the header.
const SIGNATURE: &[u8] = b"makedumpfile\0";
/// The size of the header in bytes.
const HEADER: u64 = 4096;
/// The size in bytes of what stands before each piece: its place and its length, big-endian.
const BEFORE: u64 = 16;
/// The place that ends the pieces.
const END: i64 = -1;
/// The largest number of pieces. One has a page or more.
const MOST: usize = 64 << 20;
/// The size of the buffer for what stands before pieces, in bytes.
const BUFFER: usize = 64 << 10;

/// A file that is read by the places of the dump.
#[derive(Debug)]
pub(super) struct Dump {
    file: File,
    /// The place in the dump, the length and the place in the file of each piece, ascending; `None`
    /// if the file is the dump.
    pieces: Option<Vec<(u64, u64, u64)>>,
}

impl Dump {
    /// Opens a dump in either form.
    ///
    /// # Errors
    /// If it cannot be read, or its pieces do not fit together.
    pub(super) fn open(file: File) -> io::Result<Self> {
        let mut start = [0; SIGNATURE.len()];
        let read = file.read_at(&mut start, 0)?;
        let is_flat = start.get(..read) == Some(SIGNATURE);
        let pieces = is_flat.then(|| pieces(&file)).transpose()?;
        Ok(Self { file, pieces })
    }

    /// Checks whether a file begins as a flattened dump.
    pub(super) fn is_flat(start: &[u8]) -> bool {
        start.starts_with(SIGNATURE)
    }

    /// Fills `buf` from a place of the dump.
    ///
    /// # Errors
    /// If the dump has not all of it.
    pub(super) fn read(&self, buf: &mut [u8], place: u64) -> io::Result<()> {
        let Some(pieces) = &self.pieces else {
            return self.file.read_exact_at(buf, place);
        };
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = place.checked_add(done as u64).ok_or_else(cut_off)?;
            let after = pieces.partition_point(|(start, ..)| *start <= at);
            let piece = after.checked_sub(1).and_then(|index| pieces.get(index));
            let (start, length, from) = *piece.ok_or_else(cut_off)?;
            let within = at - start;
            let left = length.checked_sub(within).filter(|left| *left > 0);
            let left = usize::try_from(left.ok_or_else(cut_off)?).unwrap_or(usize::MAX);
            let (part, _) = rest.split_at_mut(left.min(rest.len()));
            self.file.read_exact_at(part, from + within)?;
            done += part.len();
        }
        Ok(())
    }
}

/// Reads where the pieces are.
fn pieces(file: &File) -> io::Result<Vec<(u64, u64, u64)>> {
    let length = file.metadata()?.len();
    let mut reader = io::BufReader::with_capacity(BUFFER, file);
    reader.seek(SeekFrom::Start(HEADER))?;
    let (mut pieces, mut at) = (Vec::new(), HEADER);
    loop {
        let mut words = [[0; 8]; 2];
        for word in &mut words {
            reader.read_exact(word)?;
        }
        let [place, size] = words.map(i64::from_be_bytes);
        if place == END {
            break;
        }
        let (Ok(place), Ok(size)) = (u64::try_from(place), u64::try_from(size)) else {
            return Err(cut_off());
        };
        let from = at + BEFORE;
        at = from.checked_add(size).ok_or_else(cut_off)?;
        let is_whole = at <= length && place.checked_add(size).is_some();
        if !is_whole || pieces.len() == MOST {
            return Err(cut_off());
        }
        pieces.push((place, size, from));
        reader.seek_relative(size.cast_signed())?;
    }
    // A later piece at the same place counts: headers may be written twice.
    pieces.sort_by_key(|(place, ..)| *place);
    pieces.dedup_by(|later, kept| {
        let is_same = later.0 == kept.0;
        if is_same {
            *kept = *later;
        }
        is_same
    });
    Ok(pieces)
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the dump is cut off")
}
