//! Images of disks that nobody would make: partitions, file systems, configurations of boot
//! loaders, unified kernels.
//!
//! Whatever is on a disk, it is looked at in bounded time and memory, nothing panics, and what is
//! found stays within its limits. The input is an image without its zeros: records of 66 bytes,
//! each a piece's number and its bytes.
#![no_main]

use std::collections::HashMap;
use std::io;

use image::{Image, Limits, ReadAt};
use libfuzzer_sys::fuzz_target;

const PIECE: usize = 64;
const LENGTH: u64 = PIECE as u64 * (1 << 16);

struct Sparse(HashMap<u64, [u8; PIECE]>);

impl ReadAt for Sparse {
    fn length(&self) -> u64 {
        LENGTH
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > LENGTH) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (mut at, mut rest) = (offset, buffer);
        while !rest.is_empty() {
            let within = (at % PIECE as u64) as usize;
            let count = rest.len().min(PIECE - within);
            let (part, others) = rest.split_at_mut(count);
            match self.0.get(&(at / PIECE as u64)) {
                Some(piece) => part.copy_from_slice(&piece[within..within + count]),
                None => part.fill(0),
            }
            at += count as u64;
            rest = others;
        }
        Ok(())
    }
}

const LIMITS: Limits = Limits {
    kernel: 1 << 20,
    initramfs: 2 << 20,
};

fuzz_target!(|input: &[u8]| {
    let pieces = input.chunks_exact(PIECE + 2).map(|record| {
        let number = u16::from_le_bytes([record[0], record[1]]);
        (u64::from(number), record[2..].try_into().expect("64 bytes"))
    });
    let disk = Sparse(pieces.collect());
    let image = Image::open(Box::new(disk)).expect("the disk can be read");
    assert!(image.volumes().len() <= 128 && image.entries().len() <= 256);
    let defaults = image.entries().iter().filter(|entry| entry.is_default);
    assert!(defaults.count() <= 1);
    for entry in image.entries().iter().take(8) {
        if let Ok(files) = image.load(entry, LIMITS) {
            assert!(files.kernel.len() as u64 <= LIMITS.kernel);
            let initramfs = files.initramfs.unwrap_or_default();
            assert!(initramfs.len() as u64 <= LIMITS.initramfs);
            assert!(files.chosen.to_string().contains("kernel"));
        }
    }
    for path in ["/etc/os-release", "/boot/vmlinuz-1", "/vmlinuz"] {
        if let Ok(file) = image.open_file(path) {
            let mut bytes = [0; 100];
            let _ = file.read_at(&mut bytes, file.length() / 2);
        }
    }
});
