//! One request of a block device: parsed, checked, carried out, and answered (virtio 1.2, 5.2.6).
//!
//! The readable part of a request is a 16-byte header and any data to write. The writable part is
//! room for data and one status byte. The driver chooses how they are split into descriptors.

use std::ops::Range;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_T_DISCARD as DISCARD, VIRTIO_BLK_T_FLUSH as FLUSH,
    VIRTIO_BLK_T_GET_ID as GET_ID, VIRTIO_BLK_T_IN as IN, VIRTIO_BLK_T_OUT as OUT,
    VIRTIO_BLK_T_WRITE_ZEROES as WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP as UNMAP,
};

use super::{BlockBackend, SECTOR};
use crate::virtio::Chain;
use crate::{MemorySlice, WatchedMemory};

/// The maximum number of data bytes of one request. A driver that obeys `size_max` and `seg_max`
/// never exceeds it.
pub(super) const MAX_DATA: u64 = super::SIZE_MAX as u64 * super::SEG_MAX as u64;
/// The maximum number of sectors of one segment of a discard, which is one call of the host.
pub(super) const MAX_DISCARD_SECTORS: u32 = 4 << 20;
/// The maximum number of segments of a discard.
pub(super) const MAX_DISCARD_SEGMENTS: u32 = 16;
/// The maximum number of sectors of a write of zeros, which may have to be written individually.
pub(super) const MAX_ZEROES_SECTORS: u32 = 16 << 10;
/// The maximum number of segments of a write of zeros.
pub(super) const MAX_ZEROES_SEGMENTS: u32 = 1;
/// The size in bytes of a device's name, zeros included.
pub(super) const ID_LENGTH: usize = VIRTIO_BLK_ID_BYTES as usize;

const HEADER: usize = 16;
const SEGMENT: usize = 16;
/// The number of bytes that go through the host at a time.
const CHUNK: usize = 64 << 10;

/// The result of a request, as in the status byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// A request in the guest's memory.
#[derive(Clone, Copy)]
struct Request<'a> {
    chain: &'a Chain,
    memory: &'a WatchedMemory,
}

impl Request<'_> {
    /// Returns the number of data bytes for the disk, after the header.
    fn given(&self) -> usize {
        self.chain.readable().saturating_sub(HEADER)
    }

    /// Returns the number of bytes for data from the disk, before the status.
    fn room(&self) -> usize {
        self.chain.writable().saturating_sub(1)
    }

    fn header(&self) -> Option<Header> {
        let mut bytes = [0; HEADER];
        let length = self.chain.read(self.memory, 0, &mut bytes);
        (length == HEADER).then_some(())?;
        Some(Header {
            kind: u32::from_le_bytes(*bytes.first_chunk()?),
            sector: u64::from_le_bytes(*bytes.last_chunk()?),
        })
    }

    /// Reads the data for the disk from `offset` on.
    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), Status> {
        let length = self.chain.read(self.memory, HEADER + offset, data);
        (length == data.len()).then_some(()).ok_or(Status::IoError)
    }

    /// Returns guest memory with `length` bytes of data for the disk.
    fn sources(&self, length: usize) -> Result<Vec<MemorySlice<'_>>, Status> {
        let sources = self.chain.sources(self.memory, HEADER, length);
        sources.ok_or(Status::IoError)
    }

    /// Returns guest memory for `length` bytes of data from the disk.
    fn targets(&self, length: usize) -> Result<Vec<MemorySlice<'_>>, Status> {
        let targets = self.chain.targets(self.memory, length);
        targets.ok_or(Status::IoError)
    }

    /// Writes data from the disk at `offset`.
    fn write(&self, offset: usize, data: &[u8]) -> Result<(), Status> {
        let length = self.chain.write(self.memory, offset, data);
        (length == data.len()).then_some(()).ok_or(Status::IoError)
    }
}

struct Header {
    kind: u32,
    sector: u64,
}

/// A disk: its backend, and the operations that a request may do.
pub(super) struct Disk {
    pub(super) backend: Box<dyn BlockBackend>,
    pub(super) read_only: bool,
    /// True if the driver does not use FLUSH, so that a completed write must be on stable storage.
    pub(super) write_through: bool,
    pub(super) id: [u8; ID_LENGTH],
    chunk: Vec<u8>,
}

/// Converts a failure of the host to an I/O error for the guest.
fn io_error(error: std::io::Error) -> Status {
    log::debug!("virtio-blk: {error}");
    Status::IoError
}

impl Disk {
    pub(super) fn new(backend: Box<dyn BlockBackend>, read_only: bool, id: &str) -> Self {
        let mut padded = [0; ID_LENGTH];
        for (place, byte) in padded.iter_mut().zip(id.bytes()) {
            *place = byte;
        }
        Self {
            backend,
            read_only,
            write_through: true,
            id: padded,
            chunk: vec![0; CHUNK],
        }
    }

    /// Returns the size in sectors.
    pub(super) fn sectors(&self) -> u64 {
        self.backend.length() / SECTOR
    }

    /// Carries out a request. Returns the number of bytes written from the start of the writable
    /// part on. Returns `None` if there is no room for the status.
    pub(super) fn serve(&mut self, chain: &Chain, memory: &WatchedMemory) -> Option<usize> {
        let request = Request { chain, memory };
        let status_at = chain.writable().checked_sub(1)?;
        let done = match request.header() {
            Some(header) => self.carry_out(&header, request),
            None => Err(Status::IoError),
        };
        let (status, written) = match done {
            Ok(written) => (Status::Ok, written),
            Err(status) => (status, 0),
        };
        let told = chain.write(memory, status_at, &[status as u8]);
        // The status counts as written only if nothing before it was skipped.
        Some(written + if written == status_at { told } else { 0 })
    }

    /// Carries out a request. Returns the number of data bytes written for the driver.
    fn carry_out(&mut self, header: &Header, request: Request<'_>) -> Result<usize, Status> {
        let (given, room) = (request.given(), request.room());
        let is_write = matches!(header.kind, OUT | DISCARD | WRITE_ZEROES);
        let wrong_way = if is_write { room } else { given };
        if wrong_way > 0 || (self.read_only && is_write) {
            return Err(Status::IoError);
        }
        match header.kind {
            IN => {
                let range = self.range(header.sector, room)?;
                let targets = request.targets(room)?;
                match self.backend.read_direct(&targets, range.start) {
                    Some(read) => read.map_err(io_error)?,
                    None => self.read(range, request)?,
                }
                return Ok(room);
            }
            OUT => {
                let range = self.range(header.sector, given)?;
                let sources = request.sources(given)?;
                match self.backend.write_direct(&sources, range.start) {
                    Some(written) => written.map_err(io_error)?,
                    None => self.write(range, request)?,
                }
            }
            FLUSH => {
                self.backend.flush().map_err(io_error)?;
                return Ok(0);
            }
            GET_ID => {
                let length = room.min(ID_LENGTH);
                request.write(0, self.id.get(..length).unwrap_or_default())?;
                return Ok(length);
            }
            DISCARD => {
                let segments = self.segments(request, MAX_DISCARD_SEGMENTS, MAX_DISCARD_SECTORS)?;
                if segments.iter().any(|segment| segment.flags != 0) {
                    return Err(Status::Unsupported);
                }
                for segment in segments {
                    // A discard is only a hint. Sectors that cannot be discarded are kept.
                    self.backend.discard(segment.range).map_err(io_error)?;
                }
            }
            WRITE_ZEROES => {
                let segments = self.segments(request, MAX_ZEROES_SEGMENTS, MAX_ZEROES_SECTORS)?;
                if segments.iter().any(|segment| segment.flags & !UNMAP != 0) {
                    return Err(Status::Unsupported);
                }
                for segment in segments {
                    let given_up = segment.flags & UNMAP != 0
                        && self
                            .backend
                            .discard(segment.range.clone())
                            .map_err(io_error)?;
                    if !given_up {
                        self.write_zeroes(segment.range)?;
                    }
                }
            }
            _ => return Err(Status::Unsupported),
        }
        // The request has changed the disk.
        if self.write_through {
            self.backend.flush().map_err(io_error)?;
        }
        Ok(0)
    }

    /// Returns the bytes from `sector` on, if all of them are on the disk and whole sectors.
    fn range(&self, sector: u64, length: usize) -> Result<Range<u64>, Status> {
        let length = u64::try_from(length).map_err(|_| Status::IoError)?;
        if length == 0 || !length.is_multiple_of(SECTOR) || length > MAX_DATA {
            return Err(Status::IoError);
        }
        self.inside(sector, length).ok_or(Status::IoError)
    }

    fn inside(&self, sector: u64, length: u64) -> Option<Range<u64>> {
        let start = sector.checked_mul(SECTOR)?;
        let end = start.checked_add(length)?;
        (end <= self.backend.length()).then_some(start..end)
    }

    fn read(&mut self, range: Range<u64>, request: Request<'_>) -> Result<(), Status> {
        for piece in pieces(range) {
            let chunk = self.chunk.get_mut(..piece.length).ok_or(Status::IoError)?;
            self.backend
                .read_at(chunk, piece.offset)
                .map_err(io_error)?;
            request.write(piece.done, chunk)?;
        }
        Ok(())
    }

    fn write(&mut self, range: Range<u64>, request: Request<'_>) -> Result<(), Status> {
        for piece in pieces(range) {
            let chunk = self.chunk.get_mut(..piece.length).ok_or(Status::IoError)?;
            request.read(piece.done, chunk)?;
            self.backend
                .write_at(chunk, piece.offset)
                .map_err(io_error)?;
        }
        Ok(())
    }

    fn write_zeroes(&mut self, range: Range<u64>) -> Result<(), Status> {
        self.chunk.fill(0);
        for piece in pieces(range) {
            let chunk = self.chunk.get(..piece.length).ok_or(Status::IoError)?;
            self.backend
                .write_at(chunk, piece.offset)
                .map_err(io_error)?;
        }
        Ok(())
    }

    /// Returns the segments of a discard or a write of zeros, all of them inside the disk.
    fn segments(
        &self,
        request: Request<'_>,
        most: u32,
        most_sectors: u32,
    ) -> Result<Vec<Segment>, Status> {
        let length = request.given();
        let count = length / SEGMENT;
        if length == 0 || !length.is_multiple_of(SEGMENT) || count > most as usize {
            return Err(Status::IoError);
        }
        let mut segments = Vec::with_capacity(count);
        for index in 0..count {
            let mut bytes = [0; SEGMENT];
            request.read(index * SEGMENT, &mut bytes)?;
            let [sector, sector_high, sectors, flags] = words(&bytes);
            let sector = u64::from(sector) | u64::from(sector_high) << 32;
            if sectors > most_sectors {
                return Err(Status::IoError);
            }
            let range = self.inside(sector, u64::from(sectors) * SECTOR);
            segments.push(Segment {
                range: range.ok_or(Status::IoError)?,
                flags,
            });
        }
        Ok(segments)
    }
}

struct Segment {
    range: Range<u64>,
    flags: u32,
}

/// Splits a segment into four little-endian words.
fn words(bytes: &[u8; SEGMENT]) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    words
}

/// A part of a range for one call of the host.
struct Piece {
    /// The offset on the disk.
    offset: u64,
    length: usize,
    /// The number of bytes of the range before it.
    done: usize,
}

fn pieces(range: Range<u64>) -> impl Iterator<Item = Piece> {
    let Range { start, end } = range;
    (start..end).step_by(CHUNK).map(move |offset| Piece {
        offset,
        length: (end - offset).min(CHUNK as u64) as usize,
        done: (offset - start) as usize,
    })
}

#[cfg(test)]
mod tests;
