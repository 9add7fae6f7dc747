//! virtio-blk (virtio 1.2, 5.2): a disk of 512-byte sectors over a [`BlockBackend`].
//!
//! The caller owns the storage; [`open`] returns that of an image file. A request is carried out
//! while the queue is processed, so none is in flight between two calls. Requests are bounded: one
//! larger than the limits reported to the driver is an I/O error, as is one beyond the disk.
//!
//! Not here: several queues, the write cache's switch, secure erase, zoned disks, lifetime.

mod backend;
mod direct;
mod image;
mod request;

use std::fmt;
use std::io;
use std::time::Instant;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use super::device::read_space;
use super::{ChainError, DeviceStateError, Progress, Queues, VirtioDevice};

pub use crate::virtio::device::OverlayFile;
pub use backend::BlockBackend;
pub use direct::DirectIo;
pub use image::{Damage, ImageError, ImageFormat, ImageOptions, Overlay, open};
use request::Disk;

/// The size of a sector in bytes, whatever the disk's own block size.
const SECTOR: u64 = 512;
/// The maximum number of bytes of one segment of a request.
const SIZE_MAX: u32 = 64 << 10;
/// The maximum number of segments of a request: more than Linux's largest one of scattered pages
/// (1280 KiB), so that it stays in one piece. With header and status it fills the queue.
const SEG_MAX: u32 = 510;
const QUEUE_SIZE: u16 = 512;
/// The maximum number of requests carried out in one call.
const REQUESTS_AT_ONCE: usize = 16;

const FEATURE_SIZE_MAX: u64 = 1 << VIRTIO_BLK_F_SIZE_MAX;
const FEATURE_SEG_MAX: u64 = 1 << VIRTIO_BLK_F_SEG_MAX;
const FEATURE_READ_ONLY: u64 = 1 << VIRTIO_BLK_F_RO;
const FEATURE_BLOCK_SIZE: u64 = 1 << VIRTIO_BLK_F_BLK_SIZE;
const FEATURE_FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;
const FEATURE_DISCARD: u64 = 1 << VIRTIO_BLK_F_DISCARD;
const FEATURE_WRITE_ZEROES: u64 = 1 << VIRTIO_BLK_F_WRITE_ZEROES;

/// The size of configuration space in bytes.
const CONFIG_LENGTH: usize = 60;
/// The alignment of discards in sectors. One smaller than a page of the host frees nothing.
const DISCARD_ALIGNMENT: u32 = 8;

/// A block device.
pub struct Block {
    disk: Disk,
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("read_only", &self.disk.read_only)
            .finish_non_exhaustive()
    }
}

/// The properties of a disk besides its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockOptions<'a> {
    /// True if the disk rejects writes, which is also reported to the driver.
    pub read_only: bool,
    /// The device's name (`/sys/block/vda/serial`), up to 20 bytes.
    pub id: &'a str,
}

impl Block {
    /// Makes a disk over `backend`.
    #[must_use]
    pub fn new(backend: Box<dyn BlockBackend>, options: BlockOptions<'_>) -> Self {
        Self {
            disk: Disk::new(backend, options.read_only, options.id),
        }
    }

    /// Returns configuration space (`struct virtio_blk_config`). Fields of features that are not
    /// offered are zero.
    fn config(&self) -> [u8; CONFIG_LENGTH] {
        let mut config = [0; CONFIG_LENGTH];
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(place) = config.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        put(0, &self.disk.sectors().to_le_bytes());
        put(8, &SIZE_MAX.to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &(SECTOR as u32).to_le_bytes());
        if !self.disk.read_only {
            put(36, &request::MAX_DISCARD_SECTORS.to_le_bytes());
            put(40, &request::MAX_DISCARD_SEGMENTS.to_le_bytes());
            put(44, &DISCARD_ALIGNMENT.to_le_bytes());
            put(48, &request::MAX_ZEROES_SECTORS.to_le_bytes());
            put(52, &request::MAX_ZEROES_SEGMENTS.to_le_bytes());
            put(56, &[1]); // zeros may be holes
        }
        config
    }
}

impl VirtioDevice for Block {
    fn name(&self) -> &'static str {
        "virtio-blk"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let always = FEATURE_SIZE_MAX | FEATURE_SEG_MAX | FEATURE_BLOCK_SIZE | FEATURE_FLUSH;
        always
            | match self.disk.read_only {
                true => FEATURE_READ_ONLY,
                false => FEATURE_DISCARD | FEATURE_WRITE_ZEROES,
            }
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_space(&self.config(), offset, data);
    }

    fn activate(&mut self, features: u64) {
        self.disk.write_through = features & FEATURE_FLUSH == 0;
    }

    fn process(&mut self, queue: u16, _now: Instant, queues: &mut Queues) -> Progress {
        queues.ignore(queue);
        for _ in 0..REQUESTS_AT_ONCE {
            let Some(chain) = queues.pop(queue) else {
                // Chains that came between the last check and now are not notified.
                return match queues.listen(queue) {
                    true => Progress::More,
                    false => Progress::Idle,
                };
            };
            match self.disk.serve(&chain, queues.memory()) {
                Some(used) => queues.give(queue, chain, used),
                None => queues.reject(queue, chain, ChainError::Direction),
            }
        }
        Progress::More
    }

    fn reset(&mut self) {
        self.disk.write_through = true;
    }

    fn overlay(&mut self) -> io::Result<Option<OverlayFile>> {
        self.disk.backend.overlay()
    }

    fn peek_disk(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.disk.backend.peek(buffer, offset)
    }

    fn save(&self) -> Vec<u8> {
        // The only state follows from the features.
        Vec::new()
    }

    fn restore(&mut self, state: &[u8], features: Option<u64>) -> Result<(), DeviceStateError> {
        DeviceStateError::unless_empty(self.name(), state)?;
        self.disk.write_through = features.is_none_or(|features| features & FEATURE_FLUSH == 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
