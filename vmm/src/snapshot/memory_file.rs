//! Guest RAM as a sparse file: pages of zeros are holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use introspect::{Gpa, PhysicalMemory};

use crate::memory::{GuestRam, PAGE_SIZE};

/// Bytes looked at at once. A run of non-zero pages is written in one call.
const CHUNK: usize = 1 << 20;
const PAGE: usize = PAGE_SIZE as usize;

/// Writes all of `ram`, in the order of its ranges, to the empty `file`.
pub(super) fn write(ram: &GuestRam, file: &File) -> io::Result<()> {
    file.set_len(ram.size())?;
    let mut offset = 0u64;
    let mut chunk = vec![0u8; CHUNK];
    for range in ram.ram() {
        let mut at = range.start;
        while at < range.end {
            let length = CHUNK.min((range.end - at) as usize);
            let piece = chunk.get_mut(..length).unwrap_or_default();
            ram.read_physical(Gpa(at), piece)
                .map_err(io::Error::other)?;
            write_used_pages(file, piece, offset)?;
            at += length as u64;
            offset += length as u64;
        }
    }
    Ok(())
}

fn write_used_pages(file: &File, chunk: &[u8], offset: u64) -> io::Result<()> {
    let mut run: Option<usize> = None;
    let is_zero = |page: &[u8]| page.iter().all(|b| *b == 0);
    for (index, page) in chunk.chunks(PAGE).enumerate() {
        let at = index * PAGE;
        match (run, is_zero(page)) {
            (None, false) => run = Some(at),
            (Some(start), true) => {
                file.write_all_at(
                    chunk.get(start..at).unwrap_or_default(),
                    offset + start as u64,
                )?;
                run = None;
            }
            _ => {}
        }
    }
    match run {
        Some(start) => file.write_all_at(
            chunk.get(start..).unwrap_or_default(),
            offset + start as u64,
        ),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_file_has_the_whole_memory_and_only_the_used_pages() {
        let ram = GuestRam::new(16 << 20).unwrap();
        for address in [0u64, 4096, 5 << 20, (16 << 20) - 1] {
            ram.write_physical(Gpa(address), &[0xa5]).unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        write(&ram, &File::create(&path).unwrap()).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!(meta.len(), 16 << 20);
        assert!(meta.blocks() * 512 <= 64 << 10, "{} blocks", meta.blocks());
        let back = std::fs::read(&path).unwrap();
        let ones: Vec<usize> = (0..back.len()).filter(|i| back[*i] != 0).collect();
        assert_eq!(ones, [0, 4096, 5 << 20, (16 << 20) - 1]);
    }
}
