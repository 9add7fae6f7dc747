//! Images for tests: tables by hand, file systems by `mke2fs`, `mkfs.vfat` and `mcopy`.

use std::fs;
use std::path::Path;
use std::process::Command;

/// A partition to be made.
pub(crate) struct Part {
    pub kind: String,
    pub bytes: Vec<u8>,
}

impl Part {
    pub(crate) fn new(kind: &str, bytes: Vec<u8>) -> Self {
        Self {
            kind: kind.to_owned(),
            bytes,
        }
    }
}

pub(crate) const ESP: &str = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b";
pub(crate) const LINUX: &str = "0fc63daf-8483-4772-8e79-3d69d8477de4";

const SECTOR: usize = 512;

fn guid_bytes(text: &str) -> Vec<u8> {
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    let mut bytes: Vec<u8> = (0..16).map(|at| byte(2 * at)).collect();
    bytes[..4].reverse();
    bytes[4..6].reverse();
    bytes[6..8].reverse();
    bytes
}

/// Returns a disk with a GPT, whose partitions have PARTUUIDs of their number's digits.
pub(crate) fn gpt(parts: &[Part]) -> Vec<u8> {
    let mut entries = vec![0; 128 * 128];
    let mut disk = vec![0; 34 * SECTOR];
    for (index, part) in parts.iter().enumerate() {
        let number = u8::try_from(index + 1).unwrap();
        let first = disk.len() / SECTOR;
        disk.extend(&part.bytes);
        disk.resize(disk.len().next_multiple_of(SECTOR), 0);
        let last = disk.len() / SECTOR - 1;
        let entry = &mut entries[index * 128..][..128];
        entry[..16].copy_from_slice(&guid_bytes(&part.kind));
        entry[16..32].fill(number);
        entry[32..40].copy_from_slice(&(first as u64).to_le_bytes());
        entry[40..48].copy_from_slice(&(last as u64).to_le_bytes());
        for (at, unit) in format!("part {number}").encode_utf16().enumerate() {
            entry[56 + 2 * at..][..2].copy_from_slice(&unit.to_le_bytes());
        }
    }
    let backup = disk.len() / SECTOR;
    disk.extend(&entries);
    let last = disk.len() / SECTOR;
    disk.resize(disk.len() + SECTOR, 0);
    disk[2 * SECTOR..][..entries.len()].copy_from_slice(&entries);
    for (at, other, table) in [(1, last, 2), (last, 1, backup)] {
        let mut header = [0; 92];
        header[..8].copy_from_slice(b"EFI PART");
        header[8..12].copy_from_slice(&0x1_0000_u32.to_le_bytes());
        header[12..16].copy_from_slice(&92_u32.to_le_bytes());
        for (offset, value) in [
            (24, at),
            (32, other),
            (40, 34),
            (48, backup - 1),
            (72, table),
        ] {
            header[offset..offset + 8].copy_from_slice(&(value as u64).to_le_bytes());
        }
        let sum = crc32fast::hash(&entries);
        for (offset, value) in [(80, 128), (84, 128), (88, sum)] {
            header[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        }
        let sum = crc32fast::hash(&header);
        header[16..20].copy_from_slice(&sum.to_le_bytes());
        disk[at * SECTOR..][..92].copy_from_slice(&header);
    }
    mbr_entry(&mut disk, 0, 0, (0xee, 1, u32::try_from(last).unwrap()));
    disk
}

/// Returns a disk with an MBR: types, first sectors and counts.
pub(crate) fn mbr(sectors: usize, parts: &[(u8, u32, u32)]) -> Vec<u8> {
    let mut disk = vec![0; sectors * SECTOR];
    disk[440..444].copy_from_slice(&0x1234_5678_u32.to_le_bytes());
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    for (index, part) in parts.iter().enumerate() {
        mbr_entry(&mut disk, 0, index, *part);
    }
    disk
}

/// Sets an entry of the record in a sector.
pub(crate) fn mbr_entry(disk: &mut [u8], sector: usize, index: usize, part: (u8, u32, u32)) {
    let record = &mut disk[sector * SECTOR..][..SECTOR];
    record[510..].copy_from_slice(&[0x55, 0xaa]);
    let entry = &mut record[446 + 16 * index..][..16];
    entry[4] = part.0;
    entry[8..12].copy_from_slice(&part.1.to_le_bytes());
    entry[12..16].copy_from_slice(&part.2.to_le_bytes());
}

/// Files of a tree: paths with their bytes. A path that ends in `@` is a symbolic link.
pub(crate) type Tree<'a> = [(&'a str, &'a [u8])];

fn write_tree(folder: &Path, tree: &Tree<'_>) {
    for (path, bytes) in tree {
        let place = folder.join(path.trim_start_matches('/').trim_end_matches('@'));
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        match path.ends_with('@') {
            true => std::os::unix::fs::symlink(str::from_utf8(bytes).unwrap(), place).unwrap(),
            false => fs::write(place, bytes).unwrap(),
        }
    }
}

/// Runs a command, and returns its output.
pub(crate) fn run(command: &mut Command) -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command.env("MTOOLS_SKIP_CHECK", "1");
    let output = command.output();
    let output = output.unwrap_or_else(|error| panic!("{command:?}: {error}; is it installed?"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns an ext file system of some MiB with these files; `options` are those of mke2fs.
pub(crate) fn ext(mib: u32, options: &[&str], tree: &Tree<'_>) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let (root, image) = (folder.path().join("root"), folder.path().join("image"));
    fs::create_dir(&root).unwrap();
    write_tree(&root, tree);
    let mut command = Command::new("mke2fs");
    command
        .args(["-q", "-F", "-U", UUID, "-L", "root"])
        .args(options);
    command
        .arg("-d")
        .arg(&root)
        .arg(&image)
        .arg(format!("{mib}M"));
    run(&mut command);
    fs::read(image).unwrap()
}

/// The UUID of file systems that [`ext`] makes.
pub(crate) const UUID: &str = "11111111-2222-3333-4444-555555555555";

/// Returns a FAT of some KiB with these files.
pub(crate) fn fat(bits: u32, kib: u32, tree: &Tree<'_>) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let (root, image) = (folder.path().join("root"), folder.path().join("image"));
    fs::create_dir(&root).unwrap();
    write_tree(&root, tree);
    let mut command = Command::new("mkfs.vfat");
    command.args(["-F", &bits.to_string(), "-i", "ABCD1234", "-n", "EFI", "-C"]);
    run(command.arg(&image).arg(kib.to_string()));
    let mut command = Command::new("mcopy");
    command.arg("-i").arg(&image).arg("-s");
    for item in fs::read_dir(&root).unwrap() {
        command.arg(item.unwrap().path());
    }
    run(command.arg("::/"));
    fs::read(image).unwrap()
}

/// Returns a program of EFI with these sections.
pub(crate) fn program(sections: &[(&str, &[u8])]) -> Vec<u8> {
    let mut file = vec![0; 0x400];
    file[..2].copy_from_slice(b"MZ");
    file[0x3c..0x40].copy_from_slice(&0x40_u32.to_le_bytes());
    file[0x40..0x44].copy_from_slice(b"PE\0\0");
    file[0x44..0x46].copy_from_slice(&0x8664_u16.to_le_bytes());
    let count = u16::try_from(sections.len()).unwrap();
    file[0x46..0x48].copy_from_slice(&count.to_le_bytes());
    // The optional header, without directories.
    file[0x54..0x56].copy_from_slice(&112_u16.to_le_bytes());
    file[0x58..0x5a].copy_from_slice(&0x20b_u16.to_le_bytes());
    for (index, (name, bytes)) in sections.iter().enumerate() {
        let header = 0x58 + 112 + 40 * index;
        let at = u32::try_from(file.len()).unwrap();
        let size = u32::try_from(bytes.len()).unwrap();
        file[header..][..name.len()].copy_from_slice(name.as_bytes());
        let values = [size, at, size.next_multiple_of(512), at];
        for (value, place) in values.into_iter().zip((header + 8..).step_by(4)) {
            file[place..place + 4].copy_from_slice(&value.to_le_bytes());
        }
        file.extend(*bytes);
        file.resize(file.len().next_multiple_of(512), 0);
    }
    file
}
