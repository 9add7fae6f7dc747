//! RAM of every size, bytes and words of it, and the notes of writes.
#![allow(clippy::unwrap_used)]
use introspect::{Gpa, PhysicalMemory};
use vm_memory::Bytes;

use super::access::WORD;
use super::*;

#[test]
fn ram_goes_on_above_the_hole() {
    let layout =
        |size| -> Vec<(u64, u64)> { layout(size).iter().map(|r| (r.start, r.end)).collect() };
    assert_eq!(layout(256 << 20), [(0, 256 << 20)]);
    assert_eq!(
        layout(4 << 30),
        [(0, HOLE_START), (HOLE_END, HOLE_END + (1 << 30))]
    );
}

#[test]
fn unusable_sizes_are_refused_with_their_value() {
    for size in [0, 4096, (2 << 20) + 1, MAX_RAM + PAGE_SIZE] {
        let error = GuestRam::new(size).unwrap_err().to_string();
        assert!(error.contains(&size.to_string()), "{error}");
    }
}

#[test]
fn both_sides_of_the_hole_are_memory_and_the_hole_is_not() {
    // Only touched pages are ever allocated, so a small host suffices.
    let ram = GuestRam::within((3 << 30) + (64 << 20), None).unwrap();
    for address in [0, HOLE_START - 8, HOLE_END, HOLE_END + (64 << 20) - 8] {
        ram.write_physical(Gpa(address), &address.to_le_bytes())
            .unwrap();
        let mut back = [0; 8];
        ram.read_physical(Gpa(address), &mut back).unwrap();
        assert_eq!(u64::from_le_bytes(back), address);
    }
    assert!(ram.write_physical(Gpa(HOLE_START), &[1]).is_err());
    ram.read_byte(Gpa(HOLE_END + (64 << 20))).unwrap_err();
}

/// Tests short and long accesses, aligned and not, also across pages and up to the last byte.
#[test]
fn every_length_and_alignment_reads_back_what_was_written() {
    let ram = GuestRam::new(MIN_RAM).unwrap();
    let data: Vec<u8> = (0..200).collect();
    for length in [0, 1, 7, 8, 9, 16, 63, 64, 65, 200] {
        for address in (PAGE_SIZE - 12..PAGE_SIZE + 12).chain([MIN_RAM - length as u64]) {
            ram.write_physical(Gpa(address - 1), &[0xee]).unwrap();
            ram.write_physical(Gpa(address), &data[..length]).unwrap();
            let mut back = vec![0; length];
            ram.read_physical(Gpa(address), &mut back).unwrap();
            assert_eq!(back, data[..length], "{length} bytes at {address:#x}");
            assert_eq!(ram.read_byte(Gpa(address - 1)).unwrap(), 0xee);
        }
        let beyond = Gpa(MIN_RAM - length as u64 + 1);
        assert!(length == 0 || ram.write_physical(beyond, &data[..length]).is_err());
    }
}

#[test]
fn words_are_what_bytes_are() {
    let ram = GuestRam::new(MIN_RAM).unwrap();
    let last = MIN_RAM - WORD as u64;
    for address in [0, PAGE_SIZE - 8, last] {
        assert!(ram.store_word(Gpa(address), 0x1122_3344_5566_7788));
        assert_eq!(ram.read_byte(Gpa(address)).unwrap(), 0x88);
        assert_eq!(ram.read_word(Gpa(address)).unwrap(), 0x1122_3344_5566_7788);
    }
    ram.write_physical(Gpa(0x13), &[1, 2, 3, 4, 5, 6, 7, 8])
        .unwrap();
    assert_eq!(ram.read_word(Gpa(0x13)).unwrap(), 0x0807_0605_0403_0201);
    let words = ram.page_words(Gpa(PAGE_SIZE - 3)).unwrap();
    assert_eq!(words[511].load(Ordering::Relaxed), 0x1122_3344_5566_7788);
    assert!(ram.page_words(Gpa(MIN_RAM)).is_none());
    for address in [0x13, last + 1, MIN_RAM, u64::MAX - 7] {
        assert!(!ram.store_word(Gpa(address), 0), "{address:#x}");
    }
    for address in [last + 1, MIN_RAM, u64::MAX - 7] {
        assert!(ram.read_word(Gpa(address)).is_err(), "{address:#x}");
    }
}

#[test]
fn what_the_host_writes_is_noted_while_that_is_watched() {
    let ram = GuestRam::new(MIN_RAM).unwrap();
    ram.write_physical(Gpa(0), &[1]).unwrap();
    ram.watch_writes(true);
    ram.write_physical(Gpa(PAGE_SIZE - 1), &[1, 2]).unwrap();
    ram.write_physical(Gpa(4 * PAGE_SIZE), &[1; 100]).unwrap();
    ram.store_word(Gpa(6 * PAGE_SIZE), 1);
    ram.map_ref()
        .write_obj(1u16, GuestAddress(8 * PAGE_SIZE))
        .unwrap();
    let pages = |set: PageSet| -> Vec<u64> {
        let runs = set.runs(PAGE_SIZE);
        runs.map(|run| run.start / PAGE_SIZE).collect()
    };
    assert_eq!(pages(ram.take_written()), [0, 1, 4, 6, 8]);
    ram.watch_writes(false);
    ram.store_word(Gpa(6 * PAGE_SIZE), 1);
    assert_eq!(pages(ram.take_written()), [0; 0]);
}

#[test]
fn a_copy_on_write_machine_leaves_its_file_alone() {
    let mut file = tempfile::tempfile().unwrap();
    io::Write::write_all(&mut file, &vec![7; MIN_RAM as usize]).unwrap();
    let ram = GuestRam::copy_on_write(file.try_clone().unwrap(), MIN_RAM).unwrap();
    ram.write_physical(Gpa(100), &[9]).unwrap();
    assert_eq!(ram.read_byte(Gpa(100)).unwrap(), 9);
    let other = GuestRam::copy_on_write(file, MIN_RAM).unwrap();
    assert_eq!(other.read_byte(Gpa(100)).unwrap(), 7);
}
