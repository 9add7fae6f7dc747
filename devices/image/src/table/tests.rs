//! Tables as tools write them, and as a hostile image may have them.

use super::*;
use crate::disk::Disk;
use crate::test_images::{Part, gpt, mbr, mbr_entry};

fn read_from(disk: Vec<u8>) -> (TableKind, Vec<Partition>) {
    let disk = Disk::new(Box::new(disk));
    disk.allow(64 << 20);
    read(&disk.window()).unwrap()
}

const LINUX: &str = "0fc63daf-8483-4772-8e79-3d69d8477de4";
const ESP: &str = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b";

fn two_parts() -> Vec<u8> {
    let esp = Part::new(ESP, vec![1; 4096]);
    let root = Part::new(LINUX, vec![2; 8192]);
    gpt(&[esp, root])
}

#[test]
fn a_gpt_has_numbers_places_and_names() {
    let disk = two_parts();
    let (kind, parts) = read_from(disk.clone());
    assert_eq!((kind, parts.len()), (TableKind::Gpt, 2));
    assert_eq!(parts[0].type_name(), Some("EFI system"));
    assert_eq!((parts[1].number, parts[1].length), (2, 8192));
    assert_eq!(parts[1].name.as_deref(), Some("part 2"));
    assert_eq!(parts[1].uuid, "02020202-0202-0202-0202-020202020202");
    assert_eq!(disk[usize::try_from(parts[1].start).unwrap()], 2);
}

#[test]
fn the_backup_serves_when_the_first_is_damaged() {
    for at in [512 + 16, 512 + 72, 1024 + 32] {
        let mut disk = two_parts();
        disk[at] ^= 0xff;
        let (kind, parts) = read_from(disk);
        assert_eq!((kind, parts.len()), (TableKind::GptBackup, 2), "{at}");
    }
}

#[test]
fn a_gpt_without_a_sound_header_has_no_partitions() {
    let mut disk = two_parts();
    let end = disk.len() - 512;
    disk[512] = 0;
    disk[end] = 0;
    assert_eq!(read_from(disk), (TableKind::None, Vec::new()));
}

#[test]
fn an_mbr_has_primary_and_logical_partitions() {
    let mut disk = mbr(64, &[(0x83, 1, 4), (0x05, 8, 40), (0, 0, 0), (0x82, 5, 2)]);
    // Two logical partitions: at sector 9, and at 8 + 12 + 2.
    mbr_entry(&mut disk, 8, 0, (0x83, 1, 3));
    mbr_entry(&mut disk, 8, 1, (0x05, 12, 10));
    mbr_entry(&mut disk, 20, 0, (0x83, 2, 5));
    let (kind, parts) = read_from(disk);
    assert_eq!(kind, TableKind::Mbr);
    let places = parts
        .iter()
        .map(|part| (part.number, part.start / 512, part.length / 512));
    assert_eq!(
        places.collect::<Vec<_>>(),
        [(1, 1, 4), (4, 5, 2), (5, 9, 3), (6, 22, 5)]
    );
    assert_eq!(parts[2].uuid, "12345678-05");
    assert_eq!(parts[1].type_name(), Some("Linux swap"));
}

#[test]
fn a_circle_of_logical_partitions_ends() {
    let mut disk = mbr(64, &[(0x0f, 8, 40)]);
    mbr_entry(&mut disk, 8, 0, (0x83, 1, 3));
    mbr_entry(&mut disk, 8, 1, (0x05, 0, 10));
    let (_, parts) = read_from(disk);
    assert!(parts.len() > 1 && parts.len() <= MOST_PARTITIONS);
}

#[test]
fn partitions_beyond_the_end_are_cut_off() {
    let (_, parts) = read_from(mbr(16, &[(0x83, 8, 100), (0x83, 16, 1), (0x83, 9, 1)]));
    let places = parts.iter().map(|part| (part.number, part.length / 512));
    assert_eq!(places.collect::<Vec<_>>(), [(1, 8), (3, 1)]);
}

#[test]
fn a_disk_without_a_table_is_one_volume() {
    let mut code = mbr(8, &[]);
    code[446..510].fill(0x5a);
    for disk in [vec![], vec![0; 100], vec![0; 4096], mbr(8, &[]), code] {
        assert_eq!(read_from(disk), (TableKind::None, Vec::new()));
    }
}
