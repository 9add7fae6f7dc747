//! A disk image by a stranger: raw or qcow2, damaged, below an overlay or not, read and written as
//! a guest does.
//!
//! The input is a list of moves and the image. Failures are a panic, and an image below an overlay
//! that has changed. So are bytes that do not read back as they were written to an overlay.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use devices::virtio::blk::{ImageFormat, ImageOptions, Overlay, open};
use hostile::Input;
use libfuzzer_sys::fuzz_target;

/// The maximum number of moves of one run.
const MOST: usize = 32;
/// The maximum number of bytes of a move.
const LONGEST: u64 = 4096;

static IMAGE: LazyLock<PathBuf> = LazyLock::new(|| {
    let name = format!("exotrace-fuzz-image-{}", std::process::id());
    std::env::temp_dir().join(name)
});

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let (choice, count) = (input.byte(), usize::from(input.byte()) % MOST);
    let moves: Vec<[u8; 8]> = (0..count).map(|_| input.bytes()).collect();
    fs::write(&*IMAGE, input.0).expect("a file");
    let options = ImageOptions {
        read_only: choice & 1 != 0,
        format: match choice >> 1 & 3 {
            0 => Some(ImageFormat::Raw),
            1 => Some(ImageFormat::Qcow2),
            _ => None,
        },
        overlay: (choice & 8 != 0).then_some(Overlay::Temporary),
        ..ImageOptions::default()
    };
    let mut disk = match open(&IMAGE, &options) {
        Ok(disk) => disk,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let length = disk.length();
    assert!(length > 0 && length.is_multiple_of(512));
    let sectors = length / 512;
    for [kind, content, count, place @ ..] in moves {
        let [a, b, c, d, e] = place;
        let place = u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]) % sectors * 512;
        let size = (u64::from(count) % 8 * 512 + 512)
            .min(LONGEST)
            .min(length - place);
        let mut buffer = vec![content; size as usize];
        match kind % 4 {
            0 => {
                let _ = disk.read_at(&mut buffer, place);
            }
            1 if !options.read_only => {
                let written = disk.write_at(&buffer, place);
                let mut back = vec![!content; buffer.len()];
                if written.is_ok() && options.overlay.is_some() {
                    disk.read_at(&mut back, place).expect("written bytes");
                    assert_eq!(back, buffer);
                }
            }
            2 if !options.read_only => {
                let _ = disk.discard(place..place + size);
            }
            _ => {
                let _ = disk.flush();
            }
        }
    }
    drop(disk);
    if options.overlay.is_some() || options.read_only {
        assert_eq!(fs::read(&*IMAGE).expect("the image"), input.0);
    }
});
