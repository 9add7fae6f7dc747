//! Tests of the device from its driver's side.
#![allow(clippy::unwrap_used)]

use std::fs;

use super::*;
use crate::virtio::mock::Driver;
use crate::virtio::{FEATURE_EVENT_INDEX, FEATURE_INDIRECT_DESCRIPTORS, FEATURE_VERSION_1};

const QUEUE: u16 = 0;
const LENGTH: u64 = 1 << 20;
const READ: u32 = 0;
const WRITE: u32 = 1;

fn block(image: &tempfile::NamedTempFile, read_only: bool) -> Box<Block> {
    let options = ImageOptions {
        read_only,
        ..ImageOptions::default()
    };
    let backend = open(image.path(), &options).unwrap();
    let options = BlockOptions {
        read_only,
        id: "disk",
    };
    Box::new(Block::new(backend, options))
}

fn image() -> tempfile::NamedTempFile {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(LENGTH).unwrap();
    image
}

fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    header
}

/// Makes a driver with all features that this device and its transport offer.
fn driver(device: Box<Block>) -> Driver {
    let features = device.features() | FEATURE_VERSION_1;
    let mut driver = Driver::new(device);
    driver.probe(
        features | FEATURE_EVENT_INDEX | FEATURE_INDIRECT_DESCRIPTORS,
        1,
    );
    driver
}

#[test]
fn configuration_space_says_what_the_disk_is() {
    for (read_only, offered, absent) in [
        (
            true,
            FEATURE_READ_ONLY,
            FEATURE_DISCARD | FEATURE_WRITE_ZEROES,
        ),
        (
            false,
            FEATURE_DISCARD | FEATURE_WRITE_ZEROES,
            FEATURE_READ_ONLY,
        ),
    ] {
        let image = image();
        let device = block(&image, read_only);
        assert_eq!(device.features() & (offered | absent), offered);
        let mut config = [0; 60];
        device.read_config(0, &mut config);
        assert_eq!(config[..8], (LENGTH / SECTOR).to_le_bytes());
        assert_eq!(config[12..16], SEG_MAX.to_le_bytes());
        assert_eq!(config[20..24], 512u32.to_le_bytes());
        assert_eq!(config[56], u8::from(!read_only));
        // In parts, and beyond the end.
        let mut part = [0; 4];
        device.read_config(2, &mut part);
        assert_eq!(part, config[2..6]);
        for offset in [58, 60, u64::MAX] {
            let mut part = [0; 4];
            device.read_config(offset, &mut part);
            assert_eq!(part, [0; 4], "{offset}");
        }
    }
}

#[test]
fn more_requests_than_one_call_takes_are_all_answered() {
    let image = image();
    for indirect in [false, true] {
        let mut driver = driver(block(&image, false));
        driver.indirect = indirect;
        let count = 3 * REQUESTS_AT_ONCE as u64;
        for sector in 0..count {
            let data = vec![sector as u8 + 1; SECTOR as usize];
            driver.add(QUEUE, &[&header(WRITE, sector), &data], &[1]);
        }
        driver.kick(QUEUE);
        driver.run();
        let used = driver.used(QUEUE);
        assert_eq!(used.len() as u64, count);
        assert!(used.iter().all(|used| used.bytes == [0]));
        assert!(driver.interrupts() > 0 && driver.calls > 1);
        let written = fs::read(image.path()).unwrap();
        for sector in 0..count {
            let at = (sector * SECTOR) as usize;
            assert_eq!(written[at..at + 512], [sector as u8 + 1; 512]);
        }
        image.as_file().set_len(0).unwrap();
        image.as_file().set_len(LENGTH).unwrap();
    }
}

#[test]
fn chains_that_are_no_requests_come_back_and_the_disk_goes_on() {
    let image = image();
    let mut driver = driver(block(&image, true));
    // There is no room for a status; then only a header in the wrong direction.
    driver.add(QUEUE, &[&header(READ, 0)], &[]);
    driver.add(QUEUE, &[], &[16]);
    driver.add(QUEUE, &[&header(READ, 0)], &[512, 1]);
    driver.kick(QUEUE);
    driver.run();
    let used = driver.used(QUEUE);
    let lengths: Vec<u32> = used.iter().map(|used| used.length).collect();
    assert_eq!(lengths, [0, 0, 513]);
    assert_eq!(driver.handle.queue_stats(QUEUE).rejected, 1);
}

#[test]
fn a_disk_goes_on_where_it_was_saved() {
    let image = image();
    let mut driver = driver(block(&image, true));
    driver.add(QUEUE, &[&header(READ, 0)], &[513]);
    driver.kick(QUEUE);
    // The chain was notified and not served. The restored device checks on its own.
    let restored = block(&image, true);
    driver.replace(restored).unwrap();
    driver.run();
    assert_eq!(driver.used(QUEUE).len(), 1);
    let mut other = block(&image, true);
    assert!(other.restore(&[1], None).is_err());
}
