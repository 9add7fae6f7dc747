//! virtio-rng (virtio 1.2, 5.4): random bytes from a source of the caller's.
//!
//! Each buffer of the guest is filled up to a bound. The driver requests more.

use std::fmt;
use std::io::{self, Read};
use std::time::Instant;

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::{ChainError, DeviceStateError, Progress, Queues, VirtioDevice};

/// The size of the queue. Linux has one request in flight.
const QUEUE_SIZE: u16 = 8;
/// The maximum number of bytes for one request.
const MOST: usize = 4 << 10;
/// The maximum number of requests served in one call.
const REQUESTS_AT_ONCE: usize = 8;

/// The host's random numbers, as from /dev/urandom.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostEntropy;

impl Read for HostEntropy {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // This waits only on a host that has just booted.
        Ok(getrandom(buffer, GetRandomFlags::empty())?)
    }
}

/// A source of random bytes.
pub struct Rng {
    source: Box<dyn Read + Send>,
}

impl fmt::Debug for Rng {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rng").finish_non_exhaustive()
    }
}

impl Rng {
    /// Makes a device that returns the bytes of `source`, which must never block.
    #[must_use]
    pub fn new(source: impl Read + Send + 'static) -> Self {
        Self {
            source: Box::new(source),
        }
    }

    /// Reads at most `room` random bytes. There are fewer, maybe none, if the source fails.
    fn bytes(&mut self, room: usize) -> Vec<u8> {
        let mut bytes = vec![0; room.min(MOST)];
        let length = match self.source.read(&mut bytes) {
            Ok(length) => length,
            Err(error) => {
                log::warn!("virtio-rng: {error}");
                0
            }
        };
        bytes.truncate(length);
        bytes
    }
}

impl VirtioDevice for Rng {
    fn name(&self) -> &'static str {
        "virtio-rng"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn activate(&mut self, _features: u64) {}

    fn process(&mut self, queue: u16, _now: Instant, queues: &mut Queues) -> Progress {
        for _ in 0..REQUESTS_AT_ONCE {
            let Some(chain) = queues.pop(queue) else {
                return match queues.listen(queue) {
                    true => Progress::More,
                    false => Progress::Idle,
                };
            };
            if chain.writable() == 0 {
                queues.reject(queue, chain, ChainError::Direction);
                continue;
            }
            let bytes = self.bytes(chain.writable());
            let length = chain.write(queues.memory(), 0, &bytes);
            queues.give(queue, chain, length);
        }
        Progress::More
    }

    fn reset(&mut self) {}

    fn save(&self) -> Vec<u8> {
        Vec::new()
    }

    fn restore(&mut self, state: &[u8], _features: Option<u64>) -> Result<(), DeviceStateError> {
        DeviceStateError::unless_empty(self.name(), state)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::virtio::FEATURE_VERSION_1;
    use crate::virtio::mock::Driver;

    #[test]
    fn a_request_gets_at_most_what_it_has_room_for_and_what_is_bounded() {
        let mut rng = Rng::new(io::repeat(0x5a));
        for (room, given) in [
            (1, 1),
            (64, 64),
            (MOST, MOST),
            (MOST + 1, MOST),
            (usize::MAX, MOST),
        ] {
            assert_eq!(rng.bytes(room), vec![0x5a; given], "{room}");
        }
        let mut short = Rng::new(&b"abc"[..]);
        assert_eq!(short.bytes(64), b"abc");
        assert_eq!(short.bytes(64), b"");
    }

    #[test]
    fn a_driver_gets_its_bytes_and_a_request_without_room_comes_back() {
        let mut driver = Driver::new(Box::new(Rng::new(io::repeat(7))));
        driver.probe(FEATURE_VERSION_1, 1);
        driver.add(0, &[], &[10, 6]);
        driver.add(0, &[b"no room"], &[]);
        driver.add(0, &[], &[3]);
        driver.kick(0);
        driver.run();
        let bytes: Vec<_> = driver.used(0).into_iter().map(|used| used.bytes).collect();
        assert_eq!(bytes, [vec![7; 16], vec![], vec![7; 3]]);
        assert_eq!(driver.handle.queue_stats(0).rejected, 1);
    }

    #[test]
    fn the_hosts_numbers_are_not_all_the_same() {
        let mut bytes = [0; 4096];
        HostEntropy.read_exact(&mut bytes).unwrap();
        let values: std::collections::BTreeSet<u8> = bytes.into_iter().collect();
        assert!(values.len() > 200, "{} values", values.len());
    }
}
